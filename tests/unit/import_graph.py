"""Who imports whom: every import statement of the project's files, and the circles among them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "speedlab": ROOT / "speedlab",
    "cuda_ops": ROOT / "cuda_ops",
    "speedlab_notebook": ROOT / "extension/speedlab_notebook",
    "speedlab_server": ROOT / "extension/speedlab_server",
}


@dataclass(frozen=True)
class Import:
    """One imported module: who imports it, at which line, and whether inside a function."""

    module: str
    target: str
    line: int
    inside_function: bool
    package: str = ""
    """The `a` of `from a import b`, whose own file is read for `b` first."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[Import]:
    """Every import in `source` by its full dotted name; `from a import b` counts as `a.b`."""

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, inside)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, inside)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join(filter(None, (*parents, base)))
            for alias in node.names:
                yield Import(module, f"{base}.{alias.name}", node.lineno, inside, package=base)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield Import(module, str(node.args[0].value), node.lineno, inside)
        inner = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    yield from visit(ast.parse(source), False)


def sources() -> dict[str, tuple[str, bool]]:
    """Module -> its text, and whether it is a package's __init__."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            found[module] = path.read_text(encoding="utf-8"), is_package
    return found


def all_imports() -> list[Import]:
    return [
        item
        for module, (text, is_package) in sources().items()
        for item in imports_of(text, module, is_package=is_package)
    ]


def import_graph(texts: Mapping[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Module -> the files it needs. `from a import b` needs a's own file, and b's where b is a module. A package needs
    what it passes on under its own name, at once or when it is first asked for (`_HOMES`). Parents of what is named are
    not counted: Python has begun them before."""
    graph: dict[str, set[str]] = {}
    for module, (text, is_package) in texts.items():
        items = [*imports_of(text, module, is_package=is_package), *_passed_on_later(text, module)]
        named = {name for item in items for name in (item.target, item.package)}
        graph[module] = (named & texts.keys()) - {module}
    return graph


def _passed_on_later(text: str, module: str) -> Iterator[Import]:
    """What a package's `_HOMES` names: modules in full, or inside the package."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["_HOMES"]:
            for home in ast.literal_eval(node.value).values():
                for target in (home, f"{module}.{home}"):
                    yield Import(module, target, node.lineno, True)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of files each of which needs all others of its group (strongly connected components), sorted."""
    needs = {module: _reached(graph, module) for module in graph}
    groups = {frozenset(other for other in needs[module] if module in needs.get(other, ())) for module in graph}
    return sorted(sorted(group) for group in groups if group)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What `start` needs, directly or not; itself only where it stands in a circle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def shortest_way(graph: Mapping[str, set[str]], group: list[str]) -> str:
    """'a → b → a': the shortest circle through the first file of a group."""
    ways = [[group[0]]]
    for way in ways:
        for module in sorted(graph[way[-1]] & {*group}):
            if module == group[0]:
                return " → ".join([*way, module])
            if module not in way:
                ways.append([*way, module])
    raise AssertionError(f"{group} is no circle")

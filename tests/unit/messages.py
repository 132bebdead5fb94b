"""What texts for people name: commands, options, calls, keyword arguments, configuration fields; and whether these are.

Nothing here is a list of names: parsers, signatures and fields are asked, so that a message that advises what no longer
exists is found wherever it stands.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from import_graph import PACKAGES, ROOT
from speedlab_notebook.magics import ranks_magic
from speedlab_notebook.magics.commands import COMMANDS as MAGIC_COMMANDS

import speedlab
from speedlab import cli
from speedlab.bench import BENCHES
from speedlab.cluster.launch.host_specs import SlurmJob
from speedlab.config import RunConfig
from tests import benchmarks

ROOTS: dict[str, Any] = {
    "run": speedlab.Run,
    "cluster": speedlab.Cluster,
    "engine": speedlab.Engine,
    "speedlab": speedlab,
    "sl": speedlab,
}
"""Names under which texts speak of what a user holds, and what these are."""

HOLE = "_"
"""What stands for a value that is filled in when the message is made."""

_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
_CALL = re.compile(rf"(?<![\w./%\-\"'])(?:{'|'.join(ROOTS)})(?:\.[a-zA-Z]\w*(?:{_ARGUMENTS})*)+")
_COMMAND = re.compile(r"(?<![\w./\-])(%?)speedlab ([a-z][\w-]*)((?: +[^\s`;,]+)*)")
_BENCHMARK = re.compile(
    r'make bench NAME=(\w+)(?: ARGS="([^"]*)")?|python -m tests\.benchmarks (\w+)((?: +[^\s`;,]+)*)'
)
_OPTION = re.compile(r"(?<![\w-])(?<!var\()--[a-z][\w.-]*\w")
_KEYWORD = re.compile(r"(?<![\w.\-$])([a-z][a-z0-9_]*)=(?![=>])")
_FIELD = re.compile(r"(?<![\w./\-])([a-z_]+)\.([a-z][a-z_]*)(?![\w.(/])")
_SWITCH = re.compile(r"(?<![\w.])([a-z_]+): (?:true|false)\b")
_THEIRS = re.compile(rf"(?<![\w.])(?!(?:{'|'.join(speedlab.__all__)})\b)\w+\([^()]*\)")
"""A call of what is the reader's own, or of another library: forward(input_ids=...)."""
_MAGIC = re.compile(r"(?<![\w%])(%%?)([a-z]\w+)")


@dataclass(frozen=True)
class Text:
    """A text that a person may read, and where it stands."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


@functools.cache
def messages() -> list[Text]:
    """All texts of the packages that are prose, docstrings apart."""
    return [text for package in PACKAGES.values() for path in sorted(package.rglob("*.py")) for text in texts_of(path)]


def docstrings() -> list[Text]:
    """All docstrings of the packages."""
    found = []
    for path in (path for package in PACKAGES.values() for path in sorted(package.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # Attributes are described by texts below them, which are docstrings, too.
            if isinstance(node, ast.Expr) and isinstance(text := getattr(node.value, "value", None), str):
                found.append(Text(path, node.lineno, text))
    return found


def texts_of(path: Path) -> Iterator[Text]:
    """The literals of a file that hold a space; of an f-string the whole, with holes where values come."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    passed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(node.value)  # A docstring.
        elif isinstance(node, ast.JoinedStr):
            passed.update(value for value in node.values if isinstance(value, ast.Constant))
        elif isinstance(node, ast.Attribute) and node.attr == "encode":
            passed.add(node.value)  # Bytes are for machines.
    for node in ast.walk(tree):
        if node in passed:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        else:
            continue
        if " " in text.strip():
            yield Text(path, node.lineno, text)


def faults(text: str, path: Path | None = None) -> list[str]:
    """What `text` names and nobody has. `path`: the file it stands in, which decides whose options it may name."""
    return [
        *_commands(text),
        *_benchmarks(text),
        *_options(_BENCHMARK.sub("", text), path),
        *_calls(text),
        *_keywords(_BENCHMARK.sub("", text)),
        *_fields(text, path),
        *_magics(text),
    ]


# Commands and their options


@functools.cache
def options_of(percent: str, command: str) -> frozenset[str]:
    """The options that the help of `speedlab COMMAND` or `%speedlab COMMAND` tells; of a benchmark: 'bench step'."""
    if percent:
        return frozenset(option.flag for option in MAGIC_COMMANDS[command].options) | {"--help"}
    shown = _help_of(command)
    # A help may name another one of the same command: `speedlab train --resume --help`.
    others = set(re.findall(rf"`(?:speedlab )({command} --.+?) --help`", shown))
    return frozenset(_OPTION.findall(" ".join([shown, *map(_help_of, others)])))


def _help_of(line: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "999")  # No name is broken at the end of a line.
        cli.main([*line.split(), "--help"])
    return shown.getvalue()


def _commands(text: str) -> Iterator[str]:
    for percent, command, rest in _COMMAND.findall(text):
        if command not in (MAGIC_COMMANDS if percent else cli.COMMANDS):
            yield f"there is no command {percent}speedlab {command}"
            continue
        if command == "bench":
            name = rest.split()[0].rstrip(":") if rest else "NAME"
            if name not in BENCHES:
                yield from (f"there is no benchmark {name}" for _ in [name] if name != "NAME")
                continue
            command = f"bench {name}"
        known = options_of(percent, command)
        yield from (f"{percent}speedlab {command} has no {o}" for o in _OPTION.findall(rest) if o not in known)


def _benchmarks(text: str) -> Iterator[str]:
    """Benchmarks of the repository, which `make bench` runs."""
    for made, given, run, rest in _BENCHMARK.findall(text):
        name = made or run
        if name in BENCHES:
            known = options_of("", f"bench {name}")
        elif name in benchmarks.BENCHES:
            known = _options_of_benchmark(name)
        else:
            yield from (f"there is no benchmark {name}" for _ in [name] if name != "NAME")
            continue
        yield from (f"benchmark {name} has no {o}" for o in _OPTION.findall(given or rest) if o not in known)


@functools.cache
def _options_of_benchmark(name: str) -> frozenset[str]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "999")  # No name is broken at the end of a line.
        importlib.import_module(f"tests.benchmarks.{name}").main(["--help"])
    return frozenset(_OPTION.findall(shown.getvalue()))


def _options(text: str, path: Path | None) -> Iterator[str]:
    """Options that stand for themselves: those of the commands that the file serves, or else of any."""
    alone = _OPTION.findall(_COMMAND.sub("", text))
    if not alone:
        return
    serves = [name for name, (module, _) in cli.COMMANDS.items() if path == PACKAGES["speedlab"] / f"cli/{module}.py"]
    choices = [("", name) for name in serves or cli.COMMANDS]
    if path is not None and path.parent.name == "bench":
        choices += [("", f"bench {name}") for name in BENCHES]
    elif not serves:
        choices += [("%", name) for name in MAGIC_COMMANDS]
    known = {"--version", *_OPTION.findall(ranks_magic.USAGE)}.union(*(options_of(*choice) for choice in choices))
    yield from (f"no command has {option}" for option in alone if option not in known)


def _magics(text: str) -> Iterator[str]:
    for percent, name in _MAGIC.findall(text):
        if (percent, name) not in {("%", "speedlab"), ("%%", "ranks"), ("%", "load_ext")}:
            yield f"there is no magic {percent}{name}"


# Calls


def _calls(text: str) -> Iterator[str]:
    for found in _CALL.findall(text):
        if _is_file(found.rpartition(".")[2]):
            continue
        try:
            node = ast.parse(re.sub(r"(, *)?(…|\.\.\.)", "", found), mode="eval").body
        except SyntaxError:
            node = ast.parse(re.sub(_ARGUMENTS, "", found), mode="eval").body  # The arguments are words.
        try:
            _resolved(node)
        except _Missing as missing:
            yield f"{found}: {missing}"


class _Missing(Exception):  # noqa: N818  # what is the matter
    """A name that is not there, or an argument that is not taken."""


def _resolved(node: ast.expr) -> Any:
    """The class, function or module that an expression stands for; None where that is not known."""
    if isinstance(node, ast.Name):
        return ROOTS[node.id]
    if isinstance(node, ast.Attribute):
        owner = _resolved(node.value)
        return None if owner is None else _attribute(owner, node.attr)
    assert isinstance(node, ast.Call)
    function = _resolved(node.func)
    if function is None:
        return None
    if isinstance(function, _Held):
        function = getattr(function.kind, "__call__", None)  # noqa: B004  # its signature is wanted
        if function is None:
            raise _Missing("it is no function")
    arguments = [None] * len(node.args)
    parameters = inspect.signature(function).parameters
    if not inspect.isclass(function) and next(iter(parameters), "") == "self":
        arguments.append(None)
    try:
        inspect.signature(function).bind_partial(*arguments, **{k.arg: None for k in node.keywords if k.arg})
    except TypeError as error:
        raise _Missing(str(error)) from None
    return _Held(function) if inspect.isclass(function) else _returned(function)


@dataclass(frozen=True)
class _Held:
    """An instance of a class."""

    kind: type


def _attribute(owner: Any, name: str) -> Any:
    if inspect.ismodule(owner):
        try:
            return getattr(owner, name, None) or importlib.import_module(f"{owner.__name__}.{name}")
        except ImportError:
            raise _Missing(f"{owner.__name__} has no {name}") from None
    kind = owner.kind if isinstance(owner, _Held) else owner
    if not inspect.isclass(kind):
        return None
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, property):
        return _returned(found.fget)
    if isinstance(found, classmethod | staticmethod):
        return getattr(kind, name)
    if found is not None:
        return found if callable(found) else None
    if name not in _set_in(kind):
        raise _Missing(f"{kind.__name__} has no {name}")
    return None


@functools.cache
def _set_in(kind: type) -> frozenset[str]:
    """Names of the attributes that methods of a class and its bases set, or that its body declares."""
    names: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("speedlab"):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return frozenset(names)


def _returned(function: Any) -> _Held | None:
    """What calling it gives, by its annotation; None when that names no class of ours."""
    said = getattr(function, "__annotations__", {}).get("return")
    name = said if isinstance(said, str) else getattr(said, "__name__", "")
    kind = getattr(inspect.getmodule(function), name, None) or ROOTS.get(name.lower())
    return _Held(kind) if inspect.isclass(kind) and kind.__module__.startswith("speedlab") else None


# Keyword arguments and configuration fields


@functools.cache
def _public_parameters() -> frozenset[str]:
    """Names of the parameters of everything public: functions, classes and their methods."""
    functions: list[Callable[..., Any]] = []
    for name in speedlab.__all__:
        if callable(public := getattr(speedlab, name)):
            functions.append(public)
            methods = vars(public).items() if inspect.isclass(public) else ()
            functions += [getattr(public, key) for key, value in methods if callable(getattr(public, key))]
    names = {parameter for function in functions for parameter in _parameters(function)}
    names |= {field.name for field in dataclasses.fields(SlurmJob)}  # Cluster(slurm={...}), --slurm nodes=4
    return frozenset(names | set(_config_fields()) | {field for part in _config_fields().values() for field in part})


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    with contextlib.suppress(TypeError, ValueError):  # A constant; a function that is written in C.
        yield from inspect.signature(function).parameters


@functools.cache
def _config_fields() -> dict[str, frozenset[str]]:
    """Fields of a RunConfig, with the fields of those that are parts."""

    def inner(name: str) -> frozenset[str]:
        part = RunConfig.part_of(name)
        return frozenset(part.model_fields if part is not None else ())

    return {name: inner(name) for name in RunConfig.model_fields}


def _keywords(text: str) -> Iterator[str]:
    if "<" in text:
        return  # HTML
    known = _public_parameters() | set(dir(torch.nn.Parameter)) | set(_parameters(torch.Tensor.backward))
    for module, name in re.findall(r"\b(torch(?:\.\w+)*)\.(\w+)", text):
        with contextlib.suppress(ImportError, AttributeError):
            function = getattr(importlib.import_module(module), name)
            known |= set(_parameters(getattr(function, name) if inspect.ismodule(function) else function))
    alone = _KEYWORD.findall(_THEIRS.sub("", _CALL.sub("", _OPTION.sub("", text))))
    yield from (f"nothing public takes {name}=" for name in alone if name not in known)


def _fields(text: str, path: Path | None) -> Iterator[str]:
    if path is not None and path.parent.name == "deepspeed":
        return  # Its texts speak of DeepSpeed's keys.
    fields = _config_fields()
    for part, name in _FIELD.findall(text):
        if fields.get(part) and name not in fields[part] and not _is_file(name):
            yield f"the configuration has no {part}.{name}"
    for name in _SWITCH.findall(text):
        if name not in _public_parameters():
            yield f"the configuration has no {name}"


def _is_file(name: str) -> bool:
    return name in ("py", "json", "yaml", "bin", "safetensors", "html", "txt", "md")

"""Imports run one way: ARCHITECTURE.md's table of folders, read and held against every import statement.

An import inside a function counts like one at the top: a room that may not know another may not know it lazily either.
What is only for the type checker (`if TYPE_CHECKING:`) does not run and does not count. Nor may files need each other
in a circle, at whatever time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from import_graph import PACKAGES, ROOT, Import, all_imports, circles, import_graph, imports_of, shortest_way, sources

import speedlab

BASE = frozenset({"config", "layout", "placement", "hardware"})
EVERYTHING = BASE | {
    "network",
    "display",
    "telemetry",
    "planner",
    "cluster",
    "data",
    "models",
    "comm",
    "offload",
    "parallel",
    "optim",
    "engine",
    "trainer",
    "cuda_ops",
}
MAY_IMPORT: dict[str, frozenset[str]] = {
    "layout": frozenset(),
    "placement": frozenset({"layout"}),
    "hardware": frozenset(),
    "network": frozenset(),
    "moved_modules": frozenset(),
    "display": frozenset(),
    "config": frozenset({"layout", "display"}),
    "telemetry": BASE | {"display", "planner"},
    "planner": BASE | {"display"},
    "cluster": BASE | {"network", "display", "telemetry", "planner", "data"},
    "data": frozenset({"config"}),
    "models": frozenset({"config", "cuda_ops"}),
    "comm": frozenset({"layout", "network", "cuda_ops"}),
    "offload": BASE | {"comm", "cuda_ops"},
    "parallel": BASE | {"comm", "offload", "models", "telemetry", "cuda_ops"},
    "optim": BASE | {"parallel", "offload", "comm", "telemetry", "cuda_ops"},
    "engine": BASE
    | {"optim", "parallel", "offload", "comm", "models", "data", "telemetry", "planner", "display", "cuda_ops"},
    "trainer": BASE
    | {
        "engine",
        "optim",
        "parallel",
        "offload",
        "comm",
        "models",
        "data",
        "telemetry",
        "planner",
        "display",
        "cuda_ops",
    },
    "calibrate": EVERYTHING,
    "bench": EVERYTHING | {"calibrate"},
    "cli": EVERYTHING | {"bench", "calibrate"},
    "cuda_ops": frozenset(),
    "speedlab_notebook": BASE | {"display", "cluster", "planner", "telemetry"},
    "speedlab_server": BASE | {"cluster", "telemetry", "display"},
}
"""The room of a module -> the rooms it may import. ARCHITECTURE.md says the same in words."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("speedlab", "speedlab_notebook"): "load_ipython_extension: `%load_ext speedlab` finds the notebook's package",
    ("speedlab", "moved_modules"): "the table of old names of modules is read when an import would fail",
    ("speedlab.cluster.run", "speedlab_notebook"): "Run.dashboard and Run.panel display the notebook's views",
    ("speedlab.cluster.worker.remote", "offload"): "these functions run in the engines, not in the kernel",
    ("speedlab.cluster.worker.remote", "engine"): "these functions run in the engines, not in the kernel",
    ("speedlab.cluster.worker.remote", "trainer"): "these functions run in the engines, not in the kernel",
    ("speedlab.cluster.worker.remote", "comm"): "these functions run in the engines, not in the kernel",
    ("speedlab.cluster.worker.remote", "parallel"): "these functions run in the engines, not in the kernel",
    ("speedlab.cluster.worker.remote", "models"): "these functions run in the engines, not in the kernel",
    ("speedlab.cluster.worker.remote", "torch"): "these functions run in the engines, not in the kernel",
}
"""(module, room or package) -> why it may import that inside a function, and only there."""

JUPYTER = frozenset(
    {
        "IPython",
        "ipywidgets",
        "anywidget",
        "jupyterlab",
        "jupyter_server",
        "ipykernel",
        "ipyparallel",
        "nbclient",
        "nbformat",
        "nbconvert",
    }
)
FOREIGN: dict[str, frozenset[str]] = {
    "cluster": frozenset(
        {"ipyparallel", "IPython"}
    ),  # IPython: the folder of ipyparallel's profiles, the engines' shell
    "cli": frozenset({"nbclient", "nbformat"}),
    "speedlab_notebook": frozenset({"IPython", "ipywidgets", "anywidget"}),
    "speedlab_server": frozenset({"jupyter_server"}),
}
"""Rooms that may import something of Jupyter's, and what; the others may import nothing of it."""
WITHOUT_TORCH = frozenset(
    {
        "layout",
        "placement",
        "hardware",
        "network",
        "config",
        "display",
        "telemetry",
        "planner",
        "cluster",
        "data",
        "cli",
        "speedlab_notebook",
        "speedlab_server",
    }
)
"""Rooms that kernels and terminals import: there, torch would start CUDA and cost seconds."""


def room(module: str) -> str:
    """'telemetry' for speedlab.telemetry.feed; 'speedlab' for the package itself; the package's name elsewhere."""
    parts = module.split(".")
    return parts[0] if parts[0] != "speedlab" or len(parts) == 1 else parts[1]


def room_of_target(target: str) -> str:
    """As room(), but `from speedlab import RunConfig` counts as the room where that public name lives."""
    name = room(target)
    home = speedlab._HOMES.get(name) if target.startswith("speedlab.") else None
    if home:
        return room(home)
    return "speedlab" if target.startswith("speedlab.") and name not in MAY_IMPORT else name


def fault(item: Import) -> str | None:
    """Why this import is against the table; None when it is not."""
    mine, theirs = room(item.module), room_of_target(item.target)
    if item.inside_function and (item.module, theirs) in EXCEPTIONS:
        return None
    if theirs in JUPYTER:
        return None if theirs in FOREIGN.get(mine, ()) else f"{mine} imports nothing of Jupyter's"
    if theirs == "torch":
        return f"{mine} is imported by kernels and terminals" if mine in WITHOUT_TORCH else None
    if mine not in {*MAY_IMPORT, "speedlab"}:
        return f"{mine} is no room of ARCHITECTURE.md"
    if theirs not in MAY_IMPORT or theirs == mine:
        return None
    if mine == "speedlab":
        return f"speedlab itself imports {theirs}"
    allowed = MAY_IMPORT[mine]
    return None if theirs in allowed else f"{mine} may import {', '.join(sorted(allowed)) or 'nothing of ours'}"


def test_every_import_follows_the_table_of_rooms() -> None:
    faults = [f"{item}: {why}" for item in all_imports() if (why := fault(item))]
    assert not faults, "\n".join(faults)


def test_every_module_is_in_a_room() -> None:
    modules = {item.module for item in all_imports()}
    assert {room(module) for module in modules} <= {*MAY_IMPORT, "speedlab"}


def test_architecture_has_the_same_table() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Folders")[2].partition("\n## ")[0]
    written: dict[str, set[str]] = {}
    for row in (line.split("|") for line in table.splitlines() if line.startswith("| `")):
        named = set(re.findall(r"[a-z_]+", row[3])) & set(MAY_IMPORT)
        for name in re.findall(r"`([^`]+)`", row[1]):
            written[Path(name.rstrip("/")).stem] = set(EVERYTHING) if "everything" in row[3] else named
    # One row of words: "config and placement → layout, config → display".
    written |= {
        "config": {"layout", "display"},
        "placement": {"layout"},
        "layout": set(),
        "hardware": set(),
        "network": set(),
        "moved_modules": set(),
    }
    written["bench"] |= {"calibrate"}
    written["cli"] |= {"bench", "calibrate"}
    assert written == {name: set(rooms) for name, rooms in MAY_IMPORT.items()}


def test_no_two_rooms_import_each_other() -> None:
    order: list[str] = []
    left = dict(MAY_IMPORT)
    while left:
        free = [name for name, needs in left.items() if not needs - set(order)]
        assert free, f"a circle among {sorted(left)}"
        order += free
        left = {name: needs for name, needs in left.items() if name not in free}


DOORS = {
    ("speedlab", "speedlab_notebook"): "load_ipython_extension",
    ("speedlab.cluster.run", "speedlab_notebook.dashboard.widget"): "Run.dashboard",
    ("speedlab.cluster.run", "speedlab_notebook.panel.panel"): "Run.panel",
}
"""(file, file that it may need although that one needs it, too) -> the function in which it does."""


def test_no_file_needs_itself_by_way_of_others() -> None:
    graph = import_graph(sources())
    for module, following in DOORS:
        assert following in graph[module], f"{module} has no door to {following} any more; take it from DOORS"
        graph[module].remove(following)
    found = [shortest_way(graph, group) for group in circles(graph)]
    assert not found, "\n".join(found)


def test_everything_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    declared = {re.split(r"[<>=\[~! ]", text)[0].lower().replace("_", "-") for text in texts}
    distributions = packages_distributions()
    undeclared = set()
    for item in all_imports():
        top = item.target.partition(".")[0]
        if top in sys.stdlib_module_names or top in PACKAGES or top in UNDECLARED:
            continue
        if not declared & {name.lower().replace("_", "-") for name in distributions.get(top, [top])}:
            undeclared.add(f"{item}")
    assert not undeclared, "\n".join(sorted(undeclared))


UNDECLARED = {
    "IPython": "comes with ipykernel, and there is no notebook without it",
    "traitlets": "comes with ipyparallel and ipywidgets, whose classes are subclassed",
    "jupyter_client": "comes with ipykernel",
    "jupyter_core": "comes with jupyter-server",
    "nbformat": "comes with nbclient",
    "websocket": "comes with jupyter-server",
    "tqdm": "replaced by its own bars of text, where a person's code in an engine imports it",
    "deepspeed": "a peer in benchmarks, where a person has it installed",
    "peft": "a model that has adapters of PEFT comes from it",
}
"""Third-party packages that may be imported although pyproject.toml does not name them, and why."""


@pytest.mark.parametrize(
    "module", ["speedlab", "speedlab.cli", "speedlab.config", "speedlab.cluster", "speedlab.telemetry"]
)
def test_what_a_kernel_imports_starts_no_torch(module) -> None:
    code = (
        f"import sys, {module}; print(*sorted({{'torch', 'numba', 'transformers', 'tensorflow'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_run_of_the_built_in_model_loads_no_compiler(tmp_path) -> None:
    # torch's own ways of filling meta tensors, of making an optimizer and of looking at each operation load it, for
    # nothing: a second on every rank, before the first step.
    code = """
import sys
from speedlab.config import RunConfig
from speedlab.trainer.run_registry import advance
from speedlab.telemetry.run_folder import RunFolder
small = {"layers": 1, "hidden": 32, "heads": 2, "vocab_size": 257, "context": 16}
data = {"source": "task:copy", "sequence_length": 16, "vocab_size": 257}
folder = RunFolder.create(RunConfig(name="one", folder=sys.argv[1], steps=1, model=small, data=data))
print(advance(folder.path), sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["finished []"], done.stderr


def test_public_names_are_found_where_they_are_said_to_be() -> None:
    assert set(speedlab.__all__) == {*speedlab._HOMES, "__version__"}
    for name in speedlab.__all__:
        assert getattr(speedlab, name).__name__ == name if name != "__version__" else speedlab.__version__
    with pytest.raises(AttributeError, match="module 'speedlab' has no attribute 'nothing'"):
        _ = speedlab.nothing


# The judge itself


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("speedlab.layout", "import torch", "layout is imported by kernels and terminals"),
        ("speedlab.layout", "from speedlab.config import RunConfig", "layout may import nothing of ours"),
        ("speedlab.comm.group", "from speedlab import RunConfig", "comm may import cuda_ops, layout, network"),
        ("speedlab.comm.group", "def f():\n    from ..engine import x", "comm may import cuda_ops, layout, network"),
        ("speedlab.optim", "from speedlab.cluster.run import Run", "optim may import "),
        ("speedlab.optim", "import importlib; importlib.import_module('speedlab.cluster')", "optim may import "),
        ("speedlab.optim", "import IPython.display", "optim imports nothing of Jupyter's"),
        ("speedlab.telemetry.feed", "import ipyparallel", "telemetry imports nothing of Jupyter's"),
        ("speedlab.cluster.run", "def f():\n    import torch", "cluster is imported by kernels and terminals"),
        ("speedlab.cluster.worker.remote", "import torch", "cluster is imported by kernels and terminals"),
        ("speedlab.cluster.worker.remote", "from speedlab.engine import x", "cluster may import "),
        ("speedlab", "import speedlab_notebook", "speedlab itself imports speedlab_notebook"),
        ("cuda_ops.adam", "from speedlab import layout", "cuda_ops may import nothing of ours"),
        ("speedlab_notebook.panel.panel", "from speedlab.engine import initialize", "speedlab_notebook may import "),
        ("speedlab_notebook.panel.panel", "import torch.distributed", "speedlab_notebook is imported by kernels"),
        ("speedlab.cellar.wine", "import speedlab.layout", "cellar is no room"),
    ],
)
def test_imports_against_the_table_are_found(module, source, complaint) -> None:
    faults = [why for item in imports_of(source, module, is_package=False) if (why := fault(item))]
    assert len(faults) == 1
    assert faults[0].startswith(complaint)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("speedlab.cluster.worker.remote", "def f():\n    import torch\n    from speedlab.engine import initialize"),
        ("speedlab.cluster.run", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("speedlab.telemetry.feed", "from .folder import RunFolder\nfrom speedlab.layout import Layout"),
        ("speedlab", "def load():\n    import speedlab_notebook"),
        ("speedlab.optim", "import torch, json\nfrom speedlab import config, parallel"),
    ],
)
def test_imports_that_follow_the_table_are_not(module, source) -> None:
    assert not [why for item in imports_of(source, module, is_package=False) if (why := fault(item))]


def graph_of(texts: dict[str, str]) -> dict[str, set[str]]:
    packages = {module.rpartition(".")[0] for module in texts}
    return import_graph({module: (text, module in packages) for module, text in texts.items()})


def test_a_circle_is_found_at_the_top_of_files_and_inside_functions() -> None:
    graph = graph_of(
        {
            "a": "",
            "a.one": "from a.two import x",
            "a.two": "def f():\n    import a.three",
            "a.three": "def f():\n    def g():\n        from a.one import f",
            "a.four": "import a.one",
        }
    )
    assert circles(graph) == [["a.one", "a.three", "a.two"]]
    assert shortest_way(graph, circles(graph)[0]) == "a.one → a.two → a.three → a.one"


@pytest.mark.parametrize(
    ("package", "inner"),
    [
        ("from a.one import f", "from a import g"),
        ("from .one import f", "from . import two"),
        ("_HOMES = {'f': 'one'}", "def h():\n    from a import f"),
        ("_HOMES = {'f': 'a.one'}", "import importlib\nimportlib.import_module('a')"),
    ],
)
def test_what_a_package_passes_on_it_needs(package: str, inner: str) -> None:
    graph = graph_of({"a": package, "a.one": inner, "a.two": ""})
    assert circles(graph) == [["a", "a.one"]]


@pytest.mark.parametrize(
    "inner",
    [
        "import a.two as two",
        "from a.two import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import f",
        "import a_other, os",
    ],
)
def test_what_closes_no_circle_is_none(inner: str) -> None:
    assert circles(graph_of({"a": "from a.one import f", "a.one": inner, "a.two": "import os"})) == []


def test_two_circles_are_told_apart() -> None:
    graph = graph_of({"a": "", "a.b": "import a.c", "a.c": "import a.b", "a.d": "import a.e, a.b", "a.e": "import a.d"})
    assert circles(graph) == [["a.b", "a.c"], ["a.d", "a.e"]]

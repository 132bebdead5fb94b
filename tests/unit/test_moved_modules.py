"""Modules under the names that they had before 0.2: the same module, one warning, and no cost for anybody else."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from import_graph import sources

from speedlab.moved_modules import OLD_PACKAGES, REMOVED_IN, moved_modules, renamed_names

MOVED = moved_modules()


def new_process(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_the_table_names_modules_that_exist_for_names_that_do_not() -> None:
    existing = set(sources())
    assert len(MOVED) > 400
    assert not {new for new in MOVED.values() if new not in existing}
    assert not {old for old in MOVED if old in existing}


@pytest.mark.parametrize("package", sorted({old.rpartition(".")[0] for old in MOVED}))
def test_an_old_name_is_the_new_module_and_warns_once(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in MOVED.items():
        if old.rpartition(".")[0] != package:
            continue
        importlib.import_module(new)
        monkeypatch.delitem(sys.modules, old, raising=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            module = importlib.import_module(old)
            again = importlib.import_module(old)
        assert module is again is sys.modules[new]
        assert module.__name__ == new
        assert [str(one.message) for one in seen if one.category is DeprecationWarning] == [
            f"{old} is now {new}. The old name will be removed in SpeedLab {REMOVED_IN}."
        ]


RENAMED = {new: names for new in sorted(set(MOVED.values())) if (names := renamed_names(new))}


@pytest.mark.parametrize("new", RENAMED)
def test_old_names_of_classes_and_functions_are_found_in_old_modules(new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = next(old for old, target in MOVED.items() if target == new)
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"^{old} is now {new}\. The old name "):
        module = importlib.import_module(old)
    for name, today in RENAMED[new].items():
        assert name not in vars(module)
        with pytest.warns(
            DeprecationWarning, match=rf"^{new}\.{name} is now {today}\. The old name will be removed in "
        ):
            exec(f"from {old} import {name} as found", scope := {})
        assert scope["found"] is getattr(module, today)
    with pytest.raises(AttributeError, match=f"module '{new}' has no attribute 'nothing'"):
        _ = module.nothing


def test_the_warning_names_the_line_that_imports(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json\nfrom speedlab.display.text import bytes_text\nprint(bytes_text(3 * 2**30))\n")
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=60)
    first, code, *rest = done.stderr.splitlines()
    assert first.startswith(f"{script}:2: DeprecationWarning: speedlab.display.text is now speedlab.display.formatting")
    assert (code.strip(), rest) == ("from speedlab.display.text import bytes_text", [])
    assert done.stdout == "3.0 GiB\n"


def test_packages_that_no_longer_exist_hold_their_old_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    # `errors` is a module of speedlab.optim, too. The old name gives that module, not a second copy of its classes.
    for name, new in (("losses", "speedlab.engine.loss"), ("errors", "speedlab.optim.errors")):
        package = importlib.import_module("speedlab.engine.step")
        assert list(package.__path__) == []
        monkeypatch.delitem(sys.modules, f"speedlab.engine.step.{name}", raising=False)
        monkeypatch.delattr(package, name, raising=False)
        with pytest.warns(DeprecationWarning, match=rf"^speedlab\.engine\.step\.{name} is now {new}\."):
            exec(f"from speedlab.engine.step import {name} as found", scope := {})
        assert scope["found"] is importlib.import_module(new)
    assert [importlib.import_module(old).__name__ for old in OLD_PACKAGES] == list(OLD_PACKAGES)


@pytest.mark.parametrize(
    "name", ["speedlab.nothing", "speedlab.engine.step.nothing", "speedlab.display.nothing", "speedlab_nothing"]
)
def test_unknown_names_fail_as_they_do_elsewhere(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    assert (str(caught.value), caught.value.name) == (f"No module named {name!r}", name)


def test_todays_names_load_no_table_and_no_further_module() -> None:
    code = """
import sys
before = set(sys.modules)
import speedlab
print(*sorted(set(sys.modules) - before - set(sys.stdlib_module_names)))
import speedlab.cluster, speedlab.config, speedlab.telemetry
print("speedlab.moved_modules" in sys.modules)
"""
    done = new_process(code)
    assert done.stdout.splitlines() == ["speedlab", "False"], done.stderr

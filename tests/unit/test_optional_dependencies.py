"""An install without what people need in front of notebooks: scripts and servers work, the rest says what to do."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from import_graph import ROOT, all_imports

from speedlab.display.optional_dependencies import PACKAGES, MissingExtraError, extras

_HIDDEN = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {PACKAGES["notebook"]!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
"""Before anything else is imported: as if the extra had not been installed."""


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _HIDDEN + code], check=False, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("command", ["train", "plan", "config", "status", "resume"])
def test_a_terminal_needs_nothing_of_a_notebook(command) -> None:
    module = {"config": "cluster", "status": "cluster", "resume": "train"}.get(command, command)
    done = _python(f"import speedlab.cli.{module}, speedlab.cluster, speedlab.config; print('fine')")
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_what_is_missing_is_named_with_what_brings_it() -> None:
    done = _python("from speedlab.cli import main; sys.exit(main(['demo']))")
    assert done.returncode == 2
    assert done.stderr == (
        "speedlab demo: this needs nbformat, which is not installed; pip install 'speedlab[notebook]' brings it\n"
    )


def test_a_panel_and_a_dashboard_say_it_too() -> None:
    done = _python(
        "from speedlab.cluster.run import Run\n"
        "run = object.__new__(Run)\n"
        "for show in (Run.panel, Run.dashboard):\n"
        "    try: show(run)\n"
        "    except ImportError as error: print(error)\n"
    )
    assert done.stdout.count("which is not installed; pip install 'speedlab[notebook]' brings it") == 2, done.stderr


def test_what_is_missing_of_nobodys_stays_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_ours"), extras():
        import nothing_of_ours  # noqa: F401  # pyright: ignore[reportMissingImports]
    with pytest.raises(MissingExtraError, match="this needs plotly"), extras():
        raise ModuleNotFoundError("No module named 'plotly.offline'", name="plotly.offline")


def test_only_the_notebooks_rooms_import_its_packages_at_once() -> None:
    packages = set(PACKAGES["notebook"])
    found = {
        item.module.split(".")[0]
        for item in all_imports()
        if item.target.partition(".")[0] in packages and not item.inside_function
    }
    assert found <= {"speedlab_notebook", "speedlab_server"}


def test_each_extra_brings_what_it_is_said_to_bring() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name, packages in PACKAGES.items():
        brought = " ".join(extra[name]).replace("-", "_")
        missing = [package for package in packages if package not in brought]
        assert missing in ([], ["nbformat"]), name  # It comes with nbclient.

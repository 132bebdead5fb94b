"""speedlab-jupyter, for servers without torch: it has all that it imports, and declares what it does not have."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import speedlab
from speedlab.config import RunConfig
from speedlab.telemetry.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
_ALONE = """
import sys
KERNELS = {"torch", "numba", "cuda_ops", "ipyparallel", "ipykernel", "ipywidgets", "anywidget", "plotly", "jupyterlab",
           "transformers", "speedlab_notebook"}
unpacked, root = sys.argv[1:]
class Alone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in KERNELS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
# The checkout is installed where the test runs; the light distribution has to do without it.
sys.meta_path[:] = [Alone(), *(finder for finder in sys.meta_path if "editable" not in repr(finder).lower())]
sys.path.insert(0, unpacked)
import json, speedlab, speedlab_server.handlers
from speedlab_server.run_registry import Registry
from speedlab_server.clusters import all_clusters
registry = Registry(root)
runs = registry.runs()
reader = registry.reader(runs[0].id)
reader.look()
print(json.dumps([speedlab.__file__, runs[0].name, runs[0].state, reader.events(0).total, len(all_clusters())]))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it is built from this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("light")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT / "extension", check=True, capture_output=True, timeout=60)
    (wheel,) = folder.glob("speedlab_jupyter-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_it_reads_runs_with_nothing_of_the_kernels(unpacked: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    RunFolder.create(RunConfig(name="looked-at", folder=str(tmp_path / "runs")))
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(unpacked), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    file, *found = json.loads(done.stdout)
    assert Path(file).is_relative_to(unpacked)
    assert found == ["looked-at", "starting", 0, 0]


def test_it_brings_the_page_and_turns_the_server_extension_on(unpacked: Path) -> None:
    data = next(unpacked.glob("speedlab_jupyter-*.data")) / "data"
    page = json.loads((data / "share/jupyter/labextensions/speedlab/package.json").read_text())
    assert (data / "share/jupyter/labextensions/speedlab" / page["jupyterlab"]["_build"]["load"]).exists()
    enabled = json.loads((data / "etc/jupyter/jupyter_server_config.d/speedlab_server.json").read_text())
    assert enabled == {"ServerApp": {"jpserver_extensions": {"speedlab_server": True}}}


def test_both_distributions_and_the_page_have_one_version(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("speedlab_jupyter-*.dist-info/METADATA")
    assert f"\nVersion: {speedlab.__version__}\n" in metadata.read_text(encoding="utf-8")
    page = json.loads((ROOT / "extension" / "lab" / "package.json").read_text(encoding="utf-8"))
    assert page["version"] == speedlab.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"] == {"path": "speedlab/__init__.py"}

"""What travels to the engines by value, and what cannot: packed in one interpreter, unpacked in this one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.user_model import read_own_model
from speedlab.cluster.worker.serialization import Globals, pack, unpack

NOTEBOOK = """
    import sys, threading
    import helper_of_the_user
    from torch import nn
    from speedlab.cluster.worker.serialization import pack

    factor = 3

    class Net(nn.Module):
        def __init__(self, width=2):
            super().__init__()
            self.linear = nn.Linear(width, factor)

    def scaled(x):
        return x * factor + there

    def counts():
        global count
        count = there + 1
        return count

    made = {
        "class": Net,
        "lambda": lambda: Net(5),
        "instance": Net(),
        "module": helper_of_the_user,
        "class of a module": helper_of_the_user.Helper,
        "scaled": scaled,
        "counts": counts,
    }
    sys.stdout.buffer.write(pack(made, {}))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """From an interpreter whose folder this one does not know, as a kernel's is not an engine's."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "helper_of_the_user.py").write_text("base = 40\nclass Helper:\n    def answer(self): return base + 2\n")
    (folder / "notebook.py").write_text(textwrap.dedent(NOTEBOOK))
    done = subprocess.run([sys.executable, "notebook.py"], cwd=folder, stdout=subprocess.PIPE, timeout=60, check=True)
    return done.stdout


def test_what_a_notebook_defines_is_made_again_where_nothing_of_it_is_known(packed: bytes) -> None:
    made: dict[str, Any] = unpack(packed)
    assert "helper_of_the_user" not in sys.modules
    assert made["class"]().linear.weight.shape == (3, 2)
    assert made["lambda"]().linear.weight.shape == (3, 5)
    assert isinstance(made["instance"], made["class"])
    assert made["module"].Helper().answer() == made["class of a module"]().answer() == 42
    again: dict[str, Any] = unpack(packed)
    assert torch.equal(again["instance"].linear.weight, made["instance"].linear.weight)
    assert again["instance"].linear.weight is not made["instance"].linear.weight


def test_a_function_of_a_notebook_brings_its_globals_and_finds_the_rest_on_the_engine(packed: bytes) -> None:
    namespace: dict[str, Any] = {"there": 5, "factor": 1000}
    names = Globals(namespace)
    made = unpack(packed, names)
    assert made["scaled"](2) == 11
    with names.kept():
        assert made["counts"]() == 6
    assert namespace["count"] == 6  # As `global` would leave it in a cell.
    assert namespace["factor"] == 1000  # What it brought along stays its own.
    namespace["there"] = 6
    assert made["scaled"](2) == 12
    with pytest.raises(NameError, match="there"):
        unpack(packed)["scaled"](2)


class Holder:
    def __init__(self, held: Any) -> None:
        self.inside = {"deep": [1, held]}


def test_an_error_names_the_part_that_cannot_travel(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked() -> None:
        lock.acquire()

    with pytest.raises(
        ClusterError, match=r"model.inside\['deep'\]\[1\] \(a lock\) cannot be sent to the engines: .*lock"
    ):
        pack({"model": Holder(lock)}, {"loss": 1, "model": Holder(lock)})
    with pytest.raises(ClusterError, match=r"lock, which locked uses \(a lock\) cannot be sent"):
        pack((locked, (), {}), {"locked": locked})
    with (
        open(tmp_path / "log", "w") as log,
        pytest.raises(ClusterError, match=r"its arguments\[0\] \(a TextIOWrapper\) .*make it there"),
    ):
        pack((print, (log,), {}), {"print": print, "its arguments": (log,)})


def test_an_own_model_that_somebody_else_wrote_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    from speedlab.cluster.files import signed_files, user_model

    path = tmp_path / user_model.OWN_MODEL
    packed = pack({"model": dict}, {})
    path.write_bytes(signed_files._sign(packed) + packed)
    assert read_own_model(path) == {"model": dict}
    key = signed_files.home.root() / "model-key"
    assert key.stat().st_mode & 0o777 == 0o600
    for forged in (bytes(32) + packed, signed_files._sign(packed) + packed[:-1], b""):
        path.write_bytes(forged)
        with pytest.raises(ClusterError, match=r"not written by you .*cluster\.train\(config, model=\.\.\.\)"):
            read_own_model(path)
    path.write_bytes(signed_files._sign(packed) + packed)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "another"))
    with pytest.raises(ClusterError, match="not written by you"):
        read_own_model(path)

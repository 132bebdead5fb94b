"""The process of one engine: `python -m speedlab.cluster.worker.process`, started by the launchers, or a fork of a
process that has imported torch already (`nursery_process.py`).

1. Bind to the device's CPU cores, and start the thread of `wires.py`, before anything else starts threads.
2. Import torch, while the controller is still starting.
3. Take the controller's address from its file, and become an ipyparallel engine.

Progress bars in an engine are text: a widget of tqdm's would belong to the engine, to which no page is connected,
and would stay at 0 %. `tqdm.auto`, which libraries use, asks the modules that are replaced here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

import speedlab.cluster.files.processes as processes
import speedlab.cluster.worker.abort_connections as wires
import speedlab.cluster.worker.remote as remote

_WIDGETS = ("tqdm.notebook", "tqdm.autonotebook")


class TextBars(MetaPathFinder, Loader):
    """Finds tqdm's bars for terminals where bars for notebooks are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in _WIDGETS else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm.std import tqdm, trange

        vars(module).update(tqdm=tqdm, trange=trange, tqdm_notebook=tqdm, tnrange=trange)


def use_text_bars() -> None:
    """From now on, in this process; before anything imports tqdm's bars."""
    sys.meta_path.insert(0, TextBars())


_CONTROLLER_SECONDS = 60.0
_POLL_SECONDS = 0.02


def main() -> None:
    """Run the engine until it is told to stop."""
    take_place()
    remote.preload()
    serve()


def take_place() -> None:
    """Be the engine of the rank that the environment names; before anything starts threads."""
    processes.name_engine(int(os.environ["RANK"]))
    remote.bind_to_cores()
    wires.start_cutter()


def serve() -> None:
    """Work for the controller until it says to stop."""
    if not os.environ.get("IPP_CONNECTION_INFO"):
        os.environ["IPP_CONNECTION_INFO"] = wait_for_controller(
            Path(os.environ["IPP_PROFILE_DIR"])
            / "security"
            / f"ipcontroller-{os.environ['IPP_CLUSTER_ID']}-engine.json"
        )
    from ipyparallel.engine.app import IPEngine

    leave_interrupts_to_tasks()
    use_text_bars()
    IPEngine.launch_instance()


def leave_interrupts_to_tasks() -> None:
    """Let SIGINT raise only inside a task's function, where `remote.call` asks for it.

    The kernel would have it raise while it handles any message. A KeyboardInterrupt in its own code goes up through the
    event loop and ends the engine, when it comes just before the function begins.
    """
    from ipyparallel.engine.kernel import IPythonParallelKernel

    def stay_as_it_is(self: IPythonParallelKernel) -> None:
        del self

    IPythonParallelKernel.pre_handler_hook = stay_as_it_is
    IPythonParallelKernel.post_handler_hook = stay_as_it_is


def wait_for_controller(path: Path) -> str:
    """The controller's connection information, once its file is whole: it is written in place."""
    deadline = time.monotonic() + _CONTROLLER_SECONDS
    while time.monotonic() < deadline:
        try:
            return json.dumps(json.loads(path.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(_POLL_SECONDS)
    sys.exit(f"no controller wrote {path} within {_CONTROLLER_SECONDS:g} s")


if __name__ == "__main__":
    main()

"""Process of one engine: `python -m speedlab.cluster.worker.process`, or a fork of the fork server (`fork_server.py`).

1. Bind to the device's CPU cores, and start the thread of `abort_connections.py`, before any other code starts threads.
2. Import torch, while the controller is still starting.
3. Read the controller's address from its file, and become an ipyparallel engine.

Progress bars in an engine are text: a widget would belong to the engine, to which no page is connected, and would stay
at 0 %. `tqdm.auto`, which libraries use, imports the modules that are replaced here.
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
    """Import hook that returns tqdm's terminal bars if notebook bars are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for tqdm's notebook modules, None for other modules."""
        return spec_from_loader(fullname, self) if fullname in _WIDGETS else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a notebook module with the terminal bars."""
        from tqdm.std import tqdm, trange

        vars(module).update(tqdm=tqdm, trange=trange, tqdm_notebook=tqdm, tnrange=trange)


def use_text_bars() -> None:
    """Use terminal bars in this process; call before any code imports tqdm's bars."""
    sys.meta_path.insert(0, TextBars())


_CONTROLLER_SECONDS = 60.0
_POLL_SECONDS = 0.02


def main() -> None:
    """Run the engine until the controller stops it."""
    take_place()
    remote.preload()
    serve()


def take_place() -> None:
    """Become the engine of the rank in the environment; call before any code starts threads."""
    processes.name_engine(int(os.environ["RANK"]))
    remote.bind_to_cores()
    wires.start_cutter()


def serve() -> None:
    """Execute tasks of the controller until it stops the engine."""
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
    """Let SIGINT raise only inside the function of a task, where `remote.call` allows it.

    By default, ipyparallel's kernel lets SIGINT raise while it handles any message. A KeyboardInterrupt in the kernel's
    own code, just before the function begins, passes through the event loop and ends the engine.
    """
    from ipyparallel.engine.kernel import IPythonParallelKernel

    def stay_as_it_is(self: IPythonParallelKernel) -> None:
        del self

    IPythonParallelKernel.pre_handler_hook = stay_as_it_is
    IPythonParallelKernel.post_handler_hook = stay_as_it_is


def wait_for_controller(path: Path) -> str:
    """Wait for the controller's connection file, which is written in place; return its contents.

    Args:
        path: Connection file.

    Raises:
        SystemExit: If the file is not complete after 60 s.
    """
    deadline = time.monotonic() + _CONTROLLER_SECONDS
    while time.monotonic() < deadline:
        try:
            return json.dumps(json.loads(path.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(_POLL_SECONDS)
    sys.exit(f"no controller wrote {path} within {_CONTROLLER_SECONDS:g} s")


if __name__ == "__main__":
    main()

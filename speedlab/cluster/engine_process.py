"""The process of one engine: `python -m speedlab.cluster.engine_process`, started by the launchers, or a fork of a
process that has imported torch already (`nursery_process.py`).

1. Bind to the device's CPU cores, and start the thread of `wires.py`, before anything else starts threads.
2. Import torch, while the controller is still starting.
3. Take the controller's address from its file, and become an ipyparallel engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import speedlab.cluster.processes as processes
import speedlab.cluster.remote as remote
import speedlab.cluster.wires as wires
from speedlab.cluster.text_bars import use_text_bars

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

"""Functions that run in the engines. They import torch and the training engine inside their bodies only."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import speedlab.cluster.debug.rank_debugger as debugging
import speedlab.cluster.files.processes as processes
import speedlab.cluster.launch.rendezvous as host_rendezvous
from speedlab.cluster.errors import ClusterError, describe
from speedlab.cluster.files.agent_run_dir import folder_here, origin_of
from speedlab.cluster.files.user_model import OWN_MODEL, read_own_model
from speedlab.cluster.worker.cells import run_cell
from speedlab.cluster.worker.serialization import Globals, pack, unpack
from speedlab.config import ConfigError, RunConfig

FAILED = "__speedlab_failed__"
"""Key that marks the result of `call` as a failure."""

_WHOLE = {
    os.path.join("distributed", "distributed_c10d.py"): {"init_process_group", "new_group", "destroy_process_group"},
    os.path.join("comm", "breakpoint_timeouts.py"): {"__enter__", "__exit__"},
    os.path.join("debug", "rank_debugger.py"): {"__enter__", "__exit__"},
    os.path.join("worker", "cells.py"): {"__enter__", "__exit__"},
}
"""Functions that must not be interrupted, by the end of their file's path."""

_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(str(Path(__file__).parents[3] / package) + os.sep for package in ("speedlab", "cuda_ops")),
    }
)
"""Folders of modules whose import must not be interrupted. A user's own module can be: it may train during its
import.
"""
_COMPILER = f"{os.sep}numba{os.sep}core{os.sep}"


def call(work: bytes) -> Any:
    """Run a function on this rank.

    SIGINT raises KeyboardInterrupt only inside the function. Elsewhere in the engine it would break a message, and the
    kernel would wait for the answer for ever.

    Args:
        work: Packed function, arguments and keyword arguments.

    Returns:
        The packed result, or {FAILED: RemoteFailure as a dict} if the function raised.
    """
    of_a_person = True
    try:
        with _at_work(), _interruptible():
            names = Globals(_namespace())
            function, arguments, keywords = unpack(work, names)
            # New work of the user frees the last exception; internal calls keep it.
            if of_a_person := all(function is not known for known in _ALONGSIDE):
                debugging.forget()
            with names.kept():
                result = function(*arguments, **keywords)
        return _packed(result)
    except BaseException as error:  # Also SystemExit: exit() in a function must not end the engine.
        signal.signal(signal.SIGINT, _ignore)
        if of_a_person:
            debugging.keep(error)
        return {FAILED: describe(error)}


def _at_work() -> contextlib.AbstractContextManager[None]:
    """Record the current message for the agent, which checks it before it signals this engine; only with
    several hosts.
    """
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if "SPEEDLAB_STORE" not in os.environ or shell is None:
        return contextlib.nullcontext()
    return host_rendezvous.at_work(shell.kernel.get_parent()["header"]["msg_id"])


def _packed(result: Any) -> bytes:
    try:
        return pack(result, {"what it returned": result})
    except ClusterError as error:
        what = str(error).replace("be sent to the engines", "be sent back").partition("; make it there")[0]
        raise TypeError(f"{what}; return numbers, text, arrays, tensors or containers of them") from None


def _namespace() -> dict[str, Any]:
    """Return the namespace of cells in this engine."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return shell.user_ns if shell is not None else vars(sys.modules["__main__"])


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _ignore)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, unless the code must not be interrupted.

    Otherwise half of something would remain for ever: half a process group, half a library, half a compiler's type
    registry, a cell's timeouts and hooks. The cluster sends the signal again, and later aborts what such a function
    waits for.
    """
    while frame is not None:
        if _is_whole(frame):
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_whole(frame: FrameType) -> bool:
    """Return whether the code of this frame must not be interrupted."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if name == "<module>":  # The main module of the engine is a module, too, but it is not being imported.
        imported = frame.f_back is not None and frame.f_back.f_code.co_filename.startswith("<frozen importlib")
        return imported and file.startswith(_LIBRARIES)
    return any(name in names and file.endswith(end) for end, names in _WHOLE.items()) or _COMPILER in file


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore SIGINT between two tasks."""


def identify() -> dict[str, int]:
    """Return the rank and the process id of this engine."""
    return {"rank": int(os.environ["RANK"]), "pid": os.getpid()}


def reset(generation: int = 0) -> None:
    """Leave the process group that an interrupt or a death has broken; the next `speedlab.comm.join()` makes a new one.

    Args:
        generation: Lowest generation of the new group. Only this call sets it if the host's agent has just ended.
    """
    if "SPEEDLAB_STORE" in os.environ:
        with contextlib.suppress(OSError):  # With a full disk or a held lock, the agent or a later reset sets it.
            host_rendezvous.set_generation(Path(os.environ["SPEEDLAB_RENDEZVOUS"]), generation)
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        import speedlab.cluster.worker.abort_connections as wires
        from speedlab.comm import leave

        # A collective may still run in the background, and `leave` would wait for it.
        wires.cut()
        leave(failed=True)
    # torch names groups by a counter. `leave` resets the counter, but an interrupted `join` does not. Ranks with
    # different counters would wait for each other under different names.
    distributed.distributed_c10d._world.group_count = 0


def bind_to_cores() -> None:
    """Bind every thread of this process to the cores of SPEEDLAB_DEVICE, as far as they may be used."""
    cores = json.loads(os.environ["SPEEDLAB_DEVICE"])["cores"]
    if not cores or not hasattr(os, "sched_setaffinity"):
        return  # macOS has no affinity; the thread counts still apply.
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended, and a control group may forbid all these cores.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cores)


def held_runs() -> dict[str, int]:
    """Return the step of each run that this engine holds, by run folder."""
    from speedlab.trainer import run_registry

    return {origin_of(folder): step for folder, step in run_registry.held().items()}


_ALONGSIDE = (identify, reset, held_runs, debugging.post_mortem)
"""Functions that the cluster calls itself; they keep the last exception of a rank for its post-mortem."""


def rebind(environment: Mapping[str, str]) -> None:
    """Continue as a rank of another world size. The state of runs is freed; the next `advance` builds it for the new
    ranks.

    Args:
        environment: Environment variables of the new rank.
    """
    from speedlab.trainer import run_registry

    run_registry.release()
    reset()
    os.environ.update(environment)
    processes.name_engine(int(os.environ["RANK"]))
    bind_to_cores()
    use_threads()


def use_threads() -> None:
    """Set torch's number of threads from the environment, because torch may have been imported before."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def preload() -> None:
    """Import torch and the training engine before the process reports that it is ready.

    A later import could be interrupted, which would leave incomplete modules.
    """
    import speedlab.engine

    assert speedlab.engine


def try_model(config: str, file: str) -> dict[str, Any]:
    """Check a user's model without values; see `speedlab.engine.model_check.validate_model`.

    Args:
        config: Configuration of the run, as JSON.
        file: File of the model.

    Returns:
        The findings as plain data.

    Raises:
        ConfigError: If the model cannot be trained or this host does not see the file.
    """
    import torch

    from speedlab.engine.model_check import validate_model as go

    if not Path(file).exists():
        raise ConfigError(
            f"model: ranks read a model of your own from {file}, which this host does not see; set IPYTHONDIR to a "
            "folder that all hosts share, or train the built-in model"
        )
    device = torch.device(json.loads(os.environ["SPEEDLAB_DEVICE"])["kind"])
    try:
        own = read_own_model(Path(file))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model: the engines cannot make it of what was sent: {error}") from error
    return go(RunConfig(**json.loads(config)), int(os.environ["WORLD_SIZE"]), device=device, **own)


def measure_disk(folder: str) -> tuple[float, float]:
    """Measure the disk of a folder, or of the nearest existing folder above it.

    Args:
        folder: Path of the folder.

    Returns:
        (bytes read per second, bytes written per second).
    """
    from speedlab.offload.disk_benchmark import measure_disk as measure
    from speedlab.planner.hardware.hosts import existing

    found = measure(existing(Path(folder)) or Path(folder))
    return found.read_bytes_per_second, found.write_bytes_per_second


def run_cell_at(door: str, code: str) -> str | None:
    """Execute a cell; `breakpoint()` stops if a DebugServer listens. Meanwhile collectives do not time out on other
    ranks.

    Args:
        door: Name of the DebugServer; "" for none.
        code: Source code of the cell.

    Returns:
        The text of the last expression; None without one.
    """
    with debugging.Breakpoints(door), _patience() if door else contextlib.nullcontext():
        return run_cell(code)


def _patience() -> contextlib.AbstractContextManager[None]:
    from speedlab.comm import patience

    return patience()


def advance(folder: str) -> str:
    """Execute the commands of a run and train until it pauses, finishes or fails.

    Args:
        folder: Folder of the run.

    Returns:
        The state of the run afterwards.
    """
    from speedlab.cluster.worker.cells import LiveCells
    from speedlab.trainer.run_registry import advance as go

    folder = folder_here(folder)
    file = Path(folder) / OWN_MODEL
    own_model = functools.partial(read_own_model, file) if file.exists() else None
    return str(go(folder, own_model, cells=LiveCells(_patience)))


def generate(folder: str, prompt: str, tokens: int, *, temperature: float = 0.8, seed: int = 0) -> str:
    """Generate text with the model of a run; all ranks take part.

    Args:
        folder: Folder of the run.
        prompt: Beginning of the text.
        tokens: Number of tokens.
        temperature: Temperature of the sampling.
        seed: Seed of the sampling.
    """
    from speedlab.trainer.run_registry import generate as go

    return go(folder_here(folder), prompt, tokens, temperature=temperature, seed=seed)

"""Functions that run in the engines. They import torch and SpeedLab's engine inside their bodies only."""

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
"""Key that marks an answer of `call` as a failure."""

_WHOLE = {
    os.path.join("distributed", "distributed_c10d.py"): {"init_process_group", "new_group", "destroy_process_group"},
    os.path.join("comm", "breakpoint_timeouts.py"): {"__enter__", "__exit__"},
    os.path.join("debug", "rank_debugger.py"): {"__enter__", "__exit__"},
    os.path.join("worker", "cells.py"): {"__enter__", "__exit__"},
}
"""Functions that have to be left to end, by the end of their file's name."""

_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(str(Path(__file__).parents[3] / package) + os.sep for package in ("speedlab", "cuda_ops")),
    }
)
"""Where modules lie that are imported whole or not at all; a user's own may train while it is imported."""
_COMPILER = f"{os.sep}numba{os.sep}core{os.sep}"


def call(work: bytes) -> Any:
    """Run a function on this rank; `work` is it, its arguments and its keywords, packed. Returns its result, packed, or
    {FAILED: RemoteFailure as a dict} when it raised.

    SIGINT raises KeyboardInterrupt only inside the function. Elsewhere in the engine it would cut a message in two, and
    the kernel would wait for the answer for ever.
    """
    of_a_person = True
    try:
        with _at_work(), _interruptible():
            names = Globals(_namespace())
            function, arguments, keywords = unpack(work, names)
            if of_a_person := all(function is not known for known in _BESIDE):
                debugging.forget()
            with names.kept():
                result = function(*arguments, **keywords)
        return _packed(result)
    except BaseException as error:  # SystemExit, too: a rank that calls exit() must not end its engine.
        signal.signal(signal.SIGINT, _ignore)
        if of_a_person:
            debugging.keep(error)
        return {FAILED: describe(error)}


def _at_work() -> contextlib.AbstractContextManager[None]:
    """What an agent has to see before it signals this engine, in a cluster of several hosts."""
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
    """Where cells of this engine put their names."""
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
    """Raise KeyboardInterrupt, but not where half of something would stay behind for ever: half a process group, half a
    library, half a compiler's registry of types, a cell's limits and hooks. The cluster sends the signal again, and
    later breaks what such a function waits for."""
    while frame is not None:
        if _is_whole(frame):
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_whole(frame: FrameType) -> bool:
    """Whether what this frame does is to be done whole."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if name == "<module>":  # The engine's own main module is one, too, but nothing imports it.
        imported = frame.f_back is not None and frame.f_back.f_code.co_filename.startswith("<frozen importlib")
        return imported and file.startswith(_LIBRARIES)
    return any(name in names and file.endswith(end) for end, names in _WHOLE.items()) or _COMPILER in file


def _ignore(number: int, frame: FrameType | None) -> None:
    """SIGINT between two tasks: there is nothing to interrupt."""


def identify() -> dict[str, int]:
    """Which rank this engine is, and its process."""
    return {"rank": int(os.environ["RANK"]), "pid": os.getpid()}


def reset(generation: int = 0) -> None:
    """Leave the process group that an interrupt or a death has broken; the next `speedlab.comm.join()` makes one, in
    that generation at least: on a host whose agent has just ended nobody else tells it."""
    if "SPEEDLAB_STORE" in os.environ:
        with contextlib.suppress(OSError):  # On a full disk, or behind a lock, the agent or a later reset tells it.
            host_rendezvous.set_generation(Path(os.environ["SPEEDLAB_RENDEZVOUS"]), generation)
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        import speedlab.cluster.worker.abort_connections as wires
        from speedlab.comm import leave

        # A collective may still go on in the background, and leaving would wait for it.
        wires.cut()
        leave(failed=True)
    # Groups are named by a counter, which leaving sets back, but a join that was cut off does not. Ranks whose counters
    # differ would wait for each other under different names.
    distributed.distributed_c10d._world.group_count = 0


def bind_to_cores() -> None:
    """Restrict every thread of this process to the cores of SPEEDLAB_DEVICE, as far as they may be used."""
    cores = json.loads(os.environ["SPEEDLAB_DEVICE"])["cores"]
    if not cores or not hasattr(os, "sched_setaffinity"):
        return  # macOS has no affinity; thread counts still hold.
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended in between, and a control group may keep all these cores from this process.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cores)


def held_runs() -> dict[str, int]:
    """The runs that this engine holds: their folder, and the step they stand at."""
    from speedlab.trainer import run_registry

    return {origin_of(folder): step for folder, step in run_registry.held().items()}


_BESIDE = (identify, reset, held_runs, debugging.post_mortem)
"""What the cluster does by itself, and looking: these leave alone what a rank keeps of its last exception."""


def rebind(environment: Mapping[str, str]) -> None:
    """Go on as one of another number of ranks, as the one that `environment` binds it to.

    What this engine holds of runs is given up: the next `advance` builds it anew for the new ranks.
    """
    from speedlab.trainer import run_registry

    run_registry.release()
    reset()
    os.environ.update(environment)
    processes.name_engine(int(os.environ["RANK"]))
    bind_to_cores()
    use_threads()


def use_threads() -> None:
    """As many as the environment says, in a process whose libraries have read it before."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def preload() -> None:
    """Import torch and the training engine; an engine process does so before it reports that it is ready.

    Not later: an interrupt in the middle of an import would leave modules half there.
    """
    import speedlab.engine

    assert speedlab.engine


def try_model(config: str, file: str) -> dict[str, Any]:
    """What `speedlab.engine.model_check.validate_model` says of the model in `file`, for the run of `config`, as
    JSON."""
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
    """(bytes read, bytes written a second) of states in `folder`, or in the nearest folder above it."""
    from speedlab.offload.disk_benchmark import measure_disk as measure
    from speedlab.planner.hardware.hosts import existing

    found = measure(existing(Path(folder)) or Path(folder))
    return found.read_bytes_per_second, found.write_bytes_per_second


def run_cell_at(door: str, code: str) -> str | None:
    """As `run_cell`, with `breakpoint()` for whoever serves that door; "" where nobody can be asked. While somebody
    can, no rank is late in a collective: another one may stand there."""
    with debugging.Breakpoints(door), _patience() if door else contextlib.nullcontext():
        return run_cell(code)


def _patience() -> contextlib.AbstractContextManager[None]:
    from speedlab.comm import patience

    return patience()


def advance(folder: str) -> str:
    """Carry out the run's control words and train until it pauses, ends or fails; returns the state it is left in."""
    from speedlab.cluster.worker.cells import LiveCells
    from speedlab.trainer.run_registry import advance as go

    folder = folder_here(folder)
    file = Path(folder) / OWN_MODEL
    own_model = functools.partial(read_own_model, file) if file.exists() else None
    return str(go(folder, own_model, cells=LiveCells(_patience)))


def generate(folder: str, prompt: str, tokens: int, *, temperature: float = 0.8, seed: int = 0) -> str:
    """Text that the run's model writes after `prompt`; all ranks work on it."""
    from speedlab.trainer.run_registry import generate as go

    return go(folder_here(folder), prompt, tokens, temperature=temperature, seed=seed)

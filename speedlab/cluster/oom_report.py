"""Report of a rank that ran out of memory: the rank, the failed allocation, the held memory, and the cheapest changes
that fit.

The failed allocation is read from the failure: the module whose forward raised, the functions in the traceback, the
size in the allocator's message. The held memory is the rank's last ledger.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from speedlab.cluster.errors import DIED, RankError, RemoteFailure
from speedlab.config.errors import more_in
from speedlab.display.figure_style import LABELS
from speedlab.display.formatting import bytes_text
from speedlab.hardware import Device
from speedlab.planner import parameter_count
from speedlab.planner.hardware.local import hardware_here
from speedlab.planner.plan import plan_setup
from speedlab.planner.setup import Setup
from speedlab.telemetry.current_config import present_config
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import CATEGORIES, Ledger
from speedlab.telemetry.run_folder import RunFolder

_KINDS = frozenset({"MemoryError", "OutOfMemoryError", "_ArrayMemoryError"})
_SIGNS = ("out of memory", "can't allocate memory", "Cannot allocate memory")
_FULL = 0.8
"""Share of its memory that a rank held last. Above this share, a sudden end of its process is attributed to memory."""
_CATEGORY_OF = (
    (("_gather", "all_gather", "borrow", "reduce_scatter", "all_reduce"), "communication_buffers"),
    (
        ("exp_avg", "init_state", "adamw", "optim/sharded_optimizer.py", "optim/fused.py", "torch/optim/"),
        "optimizer_moments",
    ),
    (("accumulate_grad", ".grad", "gradient_"), "gradients"),
    (("materialise", "to_empty", "reset_parameters", "build_"), "parameters"),
)
"""Signs in a traceback, newest call last, and the category of the requested tensor; activations without a sign."""
_SIZE = re.compile(r"[Tt]ried to allocate (?P<number>[\d.]+) ?(?P<unit>bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def out_of_memory_lines(error: RankError, folder: RunFolder, devices: Sequence[Device]) -> list[str]:
    """Return lines that describe an out-of-memory failure; [] if memory was not the reason.

    Args:
        error: Error of the ranks.
        folder: Folder of the run.
        devices: Devices by rank.
    """
    feed = Feed(folder)
    try:
        feed.poll(files=True)
        for ranks, failure in error.groups:
            records = feed.records.get(ranks[0])
            ledger = records[-1].ledger if records else None
            if _ran_out(failure, ledger):
                return [_reported(ranks[0], failure, ledger), *_changes(feed, devices), more_in("memory")]
    finally:
        feed.close()
    return []


def _ran_out(failure: RemoteFailure, ledger: Ledger | None) -> bool:
    if failure.kind == DIED:  # The kernel gives no reason when it kills a process.
        return ledger is not None and ledger.reported_bytes > _FULL * ledger.capacity_bytes > 0
    return failure.kind in _KINDS or any(sign in failure.message for sign in _SIGNS)


def _reported(rank: int, failure: RemoteFailure, ledger: Ledger | None) -> str:
    """Return 'Out of memory on rank 2: 2.0 GiB for activations in forward of blocks.3 did not fit; it held 3.1
    GiB: …'.
    """
    size = allocation_bytes(failure.message)
    what = "its process was ended by the system, most likely for memory;" if failure.kind == DIED else ""
    if not what:
        asked = f"{bytes_text(size)} for " if size else ""
        module = f" in forward of {failure.module}" if failure.module else ""
        what = f"{asked}{LABELS[tipping_category(failure)]}{module} did not fit;"
    if ledger is None:
        return f"Out of memory on rank {rank}: {what} no step was done before"
    held = sorted(((getattr(ledger, name), name) for name in CATEGORIES), reverse=True)
    parts = ", ".join(f"{LABELS[name]} {bytes_text(count)}" for count, name in held[:4] if count > 0)
    capacity = f" of {bytes_text(ledger.capacity_bytes)}" if ledger.capacity_bytes else ""
    return f"Out of memory on rank {rank}: {what} it held {bytes_text(ledger.reported_bytes)}{capacity}: {parts}"


def tipping_category(failure: RemoteFailure) -> str:
    """Return the ledger's category of the requested tensor, from the innermost call with a known sign.

    Args:
        failure: Failure of a rank.
    """
    for line in reversed(failure.traceback.splitlines(keepends=True)):
        for signs, category in _CATEGORY_OF:
            if any(sign in line for sign in signs):
                return category
    return "activations"


def allocation_bytes(message: str) -> int:
    """Return the size in bytes that an allocator's message names; 0 if it names none."""
    found = _SIZE.search(message)
    return int(float(found["number"]) * _UNITS[found["unit"]]) if found else 0


def _changes(feed: Feed, devices: Sequence[Device]) -> list[str]:
    """Return the cheapest changes that hold less than what did not fit."""
    said = next((event.details for event in reversed(feed.events) if event.kind == "started"), {})
    config = feed.folder.config
    if said.get("parameters", parameter_count(config.model)) != parameter_count(config.model):
        return []  # A model of the user: the planner does not know its memory.
    dtype = said.get("dtype") or config.precision.dtype
    if dtype == "auto":
        dtype = "bfloat16" if all(device.fast_dtype == "bfloat16" for device in devices) else "float32"
    try:
        hardware = hardware_here(devices, dtype)
        setup = Setup.of_config(present_config(config, feed.events, len(devices)), len(devices), dtype=dtype)
        made = plan_setup(setup, hardware)
        # The predicted size did not fit, even if the device has more memory: other processes use some of it.
        limit = min(made.capacity_bytes, made.heaviest.total - 1)
        spec = replace(hardware.machines.device, memory_bytes=limit)
        short = replace(hardware, machines=replace(hardware.machines, device=spec))
        changes = plan_setup(setup, short).cheapest_changes()
    except ValueError:
        return []
    if not changes:
        return ["No change of one or two settings holds less; take more engines or a smaller model"]
    return ["Cheapest changes that fit:", *(f"  {change}" for change in changes)]

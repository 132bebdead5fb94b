"""Where every byte of a rank is: the ledger, from the storages the engine really holds, and an exact trace of
activations.

Looking at what a rank holds: the ledger, and an exact trace of activations.

Memory over the time of a step: what the allocator has given out at the ends of the step's phases.

Nothing is made to wait: the allocator's own counters are read, on the host. On a GPU they are ahead of the device, as
the host is. Only some steps are marked, one in a second at most, and so few that reading costs less than 1/400 of the
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speedlab.comm.shared import arena
from speedlab.engine.state import TrainingState
from speedlab.hardware import memory_bytes
from speedlab.offload import OffloadedState
from speedlab.optim.sharded_optimizer import PartitionedOptimizer
from speedlab.parallel.zero import FlatParam, Zero
from speedlab.placement import EIGHT_BITS, STATE_CATEGORIES, MemoryKind, StatePlacement
from speedlab.telemetry.records import Ledger, MemoryMark


class ActivationTrace(TorchDispatchMode):
    """While active, follows every storage that is made; afterwards `peak_bytes` is the most that was alive at once.

    `activation_trace` makes one.

    Storages in `known` (flats, parameters, buffers) are not counted, whether they were there before or were made
    meanwhile, and none that are made while `follows` says no. What remains is what forward and backward make: saved
    activations, logits, gradients between layers. A storage counts until it is freed or resized to nothing.
    """

    def __init__(self, known: Callable[[], set[int]], follows: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._known_now, self._follows = known, follows
        self._known: set[int] = set()
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Identity of a storage → (itself, number of its event)."""
        self._events: list[tuple[int, int]] = []
        """(number of the event in which a storage was made, bytes that are more now), in order of time."""
        self.peak_bytes = 0

    def __enter__(self) -> ActivationTrace:
        self._known = self._known_now()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        known = self._known_now()
        # Only now it is seen which of the storages that were made are moments or buffers of reductions.
        others = {number for key, (_, number) in self._alive.items() if key in known}
        live = 0
        for number, more in self._events:
            if number not in others:
                live += more
                self.peak_bytes = max(self.peak_bytes, live)
        self._alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._follows():
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                    self._follow(leaf)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True wraps the method above into something that imports torch's compiler when it is first called.
        return False

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._alive:
            return
        number, size = len(self._events), storage.nbytes()
        self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key, size)), number)
        self._events.append((number, size))

    def _forget(self, key: int, size: int) -> None:
        if key in self._alive:
            self._events.append((self._alive.pop(key)[1], -size))


class _BesideCompiler(ActivationTrace):
    """Where compiled code may call it: torch's compiler leaves the method alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def activation_trace(known: Callable[[], set[int]], follows: Callable[[], bool] = lambda: True) -> ActivationTrace:
    """A trace to enter. Where nothing is compiled it does not load torch's compiler, which takes a rank a second."""
    kind = _BesideCompiler if "torch._dynamo" in sys.modules else ActivationTrace
    return kind(known, follows)


class PeakMemory:
    """The most memory that the allocator (CUDA) or the operating system (CPU) has reported since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._status = Path("/proc/self/status")
        self._can_reset = os.access("/proc/self/clear_refs", os.W_OK)

    def take(self) -> tuple[int, int | None]:
        """(peak bytes reported, peak bytes allocated to tensors), and start again.

        CPU: the process's resident set without what it reads of its peers' shared memory, and None; CUDA: what the
        allocator reserved, and what it gave out.
        """
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(self._device), torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        return self._take_resident(), None

    def _take_resident(self) -> int:
        try:
            text = self._status.read_text()
        except OSError:
            import psutil

            return psutil.Process().memory_info().rss
        field = "VmHWM:" if self._can_reset else "VmRSS:"
        line = next(line for line in text.splitlines() if line.startswith(field))
        if self._can_reset:
            try:
                # 5 resets the high-water mark of the resident set (proc(5)); it costs microseconds.
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._can_reset = False  # Some containers forbid it; the present resident set is reported instead.
        return int(line.split()[1]) * 1024 - _of_peers(text)

    @staticmethod
    def resident() -> int:
        """Bytes of this process that are in memory now."""
        import psutil

        return psutil.Process().memory_info().rss


def _of_peers(status: str) -> int:
    """Bytes of the resident set that belong to other ranks: shared pages beyond this rank's own."""
    shared = next((line for line in status.splitlines() if line.startswith("RssShmem:")), "RssShmem: 0")
    return max(0, int(shared.split()[1]) * 1024 - arena().nbytes)


_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MMAP_MAX = -3, -1, -4
"""Names of three settings of glibc's allocator (mallopt(3))."""

_KEPT_BYTES, _LARGEST_KEPT_BYTES, _USUAL_MAPPINGS = 1 << 30, 32 << 20, 1 << 16
"""Freed memory that a process keeps at the end of its heap; the largest block that comes from the heap as long as
blocks may have mappings of their own, and of how many that is true unless somebody says otherwise."""


def keep_freed_memory() -> None:
    """Let the allocator of this process keep what training frees and takes again in every step.

    By default glibc gives it back to the system and the next step faults it in page by page: 5 to 10 % of a step on
    CPUs. `release_freed_memory` gives it back when it is no longer needed. Nothing happens on other systems.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)  # First: setting either ends its growing by itself.
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_MAX, 0)  # No threshold is above that: logits alone are larger.


_SPARING_BYTES = 256 << 10
"""With less than that a block comes from the heap all the same: a mapping of its own costs microseconds."""

_SETTLED_BYTES, _SETTLED_LARGEST_BYTES = 4 << 20, 2 << 20
"""As the two above, of a sparing process whose lasting memory has its place."""

_SETTLED_ROOM_BYTES = 128 << 20
"""What has to be available for that: about twice what it was seen to cost, in holes between blocks."""


def give_freed_memory_back() -> None:
    """Undo `keep_freed_memory`, where memory is what a training lacks: what is freed goes back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_MMAP_THRESHOLD, _SPARING_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _SPARING_BYTES)
        library.mallopt(_MMAP_MAX, _USUAL_MAPPINGS)
        library.malloc_trim(0)


def suit_allocator(device: torch.device, *, sparing: bool) -> None:
    """What a CPU rank's process does with freed memory: keep it, or be `sparing`."""
    if device.type == "cpu":
        (give_freed_memory_back if sparing else keep_freed_memory)()


def settle_allocator(device: torch.device) -> None:
    """After the first step of a sparing process: what lasts has been allocated, in between what was freed, and can no
    longer pin it. From now on a little of what each step frees and takes again is kept: faulting all of it in took a
    fifth of a step whose states are on disk. Nothing changes where memory is too short for it."""
    if device.type == "cpu" and memory_bytes()[1] > _SETTLED_ROOM_BYTES:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libc.so.6")
            library.mallopt(_MMAP_THRESHOLD, _SETTLED_LARGEST_BYTES)
            library.mallopt(_TRIM_THRESHOLD, _SETTLED_BYTES)


def release_freed_memory(device: torch.device) -> None:
    """Give freed memory back to the system and the device now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def storage_bytes(tensor: Tensor | None) -> int:
    """Bytes that the tensor's storage really holds now (0 when it was released)."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def known_storages(buffers: Iterable[Tensor], flats: Iterable[FlatParam], optimizer: PartitionedOptimizer) -> set[int]:
    """Identities of the storages that other ledger categories count; those of `buffers`, and what flats hold."""
    tensors: list[Tensor | None] = [*buffers]
    for flat in flats:
        tensors += [flat.full, flat.shard, flat.master]
        tensors += [] if flat.secondary is None else [flat.secondary.shard]
        if flat.gradient is not None:
            tensors += flat.gradient.tensors
            tensors += optimizer.states_of(flat).values()
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}


def measure_states(buffers: Iterable[Tensor], zeros: Iterable[Zero], optimizer: PartitionedOptimizer) -> dict[str, int]:
    """Bytes of parameters, gradients, master weights and moments that this rank keeps on its device between steps: of
    each state that the placement table has there, what its storages really hold."""
    sizes = dict.fromkeys(STATE_CATEGORIES.values(), 0)
    sizes["parameters"] = sum(buffer.nbytes for buffer in buffers)
    for flat, state, home in _homes(zeros):
        if home.where is MemoryKind.DEVICE:
            tensors = _tensors_of(state, flat, optimizer)
            nbytes = sum(storage_bytes(tensor) for tensor in tensors)
            if home.form == EIGHT_BITS:  # The tensors have values in an update only.
                nbytes = sum(kept.nbytes for kept in _kept(state, flat))
            sizes[STATE_CATEGORIES.get(state, "gradients")] += nbytes
    return sizes


def measure_offloaded(zeros: Iterable[Zero], where: MemoryKind) -> dict[str, int]:
    """Bytes of the same categories that this rank keeps at a place other than its device; {} where it keeps nothing."""
    sizes: dict[str, int] = {}
    for flat, state, home in _homes(zeros):
        if home.where is where:
            nbytes = sum(kept.nbytes for kept in _kept(state, flat))
            if nbytes:
                category = STATE_CATEGORIES.get(state, "gradients")
                sizes[category] = sizes.get(category, 0) + nbytes
    return sizes


def _homes(zeros: Iterable[Zero]) -> Iterator[tuple[FlatParam, str, StatePlacement]]:
    for zero in zeros:
        for flat in zero.flats:
            for state, home in zero.placement.flats[flat.name][0].states.items():
                yield flat, state, home


def _kept(state: str, flat: FlatParam) -> Iterable[OffloadedState]:
    """What keeps a state of a flat that lies away."""
    if state == "gradient":
        return (
            [flat.gradient.offloaded.kept] if flat.gradient is not None and flat.gradient.offloaded is not None else []
        )
    if state == "moments":
        # A copy: an update beside this step may make the first ones now.
        return [away.kept for name, away in list(flat.offloaded.items()) if name not in ("parameter", "master")]
    if state == "waiting":
        return [flat.gradient.waiting.kept] if flat.gradient is not None and flat.gradient.waiting is not None else []
    return [flat.offloaded[state].kept]


def _tensors_of(state: str, flat: FlatParam, optimizer: PartitionedOptimizer) -> Iterable[Tensor]:
    """What holds a state of a flat between steps. A partition may be a slice of a whole that is kept: its storage."""
    if state == "parameter":
        return [flat.shard]
    if state == "master":
        return [flat.master]
    if state == "secondary":
        return [] if flat.secondary is None else [flat.secondary.shard]
    assert flat.gradient is not None  # Frozen rows have no other states.
    if state == "moments":
        return optimizer.states_of(flat).values()
    return [flat.gradient.partition if state == "gradient" else flat.gradient.kept[state]]


def make_ledger(
    states: dict[str, int],
    *,
    activations: int,
    buffers: int,
    peak: tuple[int, int | None],
    outside: int,
    device: torch.device,
    away: Mapping[MemoryKind, dict[str, int]] | None = None,
    capacities: Mapping[MemoryKind, int] | None = None,
) -> Ledger:
    """The ledger at the peak of a step: categories that sum to what was reported, the rest as other framework memory.
    `away`: what lies at other places, with the `capacities` of these; on a CPU the host's is no longer the device's.

    `activations` is the last exact trace; where an allocator counts every byte, its peak gives the better figure.
    """
    reported, allocated = peak
    if allocated is not None:
        activations = max(0, allocated - sum(states.values()) - buffers)
    if device.type == "cuda":
        free, capacity = torch.cuda.mem_get_info(device)
        outside = max(0, capacity - free - torch.cuda.memory_reserved(device))
        reported += outside
    else:
        capacity = memory_bytes()[0] // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host, disk = ((away or {}).get(where, {}) for where in (MemoryKind.HOST, MemoryKind.DISK))
    counted = sum(states.values()) + activations + buffers + outside
    if device.type == "cpu":
        reported -= sum(host.values())
    return Ledger(
        **states,
        activations=activations,
        communication_buffers=buffers,
        outside_framework=outside,
        other_framework=reported - counted,
        reported_bytes=reported,
        capacity_bytes=capacity,
        host=host,
        disk=disk,
        host_capacity_bytes=(capacities or {}).get(MemoryKind.HOST, 0),
        disk_capacity_bytes=(capacities or {}).get(MemoryKind.DISK, 0),
    )


class MemoryProbe:
    """The memory of one rank, and what was last measured of its activations."""

    def __init__(self, state: TrainingState, *, outside_bytes: int) -> None:
        """`outside_bytes`: what the process held before the engine was built."""
        self._state, self._outside_bytes = state, outside_bytes
        self._peak = PeakMemory(state.world.device)
        self._activation_bytes = 0

    @contextmanager
    def trace_activations(self) -> Iterator[None]:
        """Measure the activations of what is done inside exactly; it is slower. Later ledgers carry the figure on."""

        def known() -> set[int]:
            state = self._state
            lent = [buffer for group in state.mesh.groups for buffer in group.idle_buffers]
            # On CPUs what the host keeps is used where it is, and no activation either.
            away = state.stores.in_memory
            return known_storages([*state.buffers, *lent, *away], state.flats, state.partitioned_optimizer)

        def follows() -> bool:  # What an optimizer makes in its first step are moments.
            traffic = self._state.traffic
            return traffic.phase != "optimizer" and not traffic.encoding

        with activation_trace(known, follows) as trace:
            yield
        self._activation_bytes = trace.peak_bytes

    def ledger(self) -> Ledger:
        """Bytes by category at the peak since the last call."""
        state = self._state
        away = {where: measure_offloaded(state.zeros, where) for where in state.stores.made}
        if staging := state.stores.take_staging_peak():
            away.setdefault(MemoryKind.HOST, {})["communication_buffers"] = staging
        return make_ledger(
            measure_states(state.buffers, state.zeros, state.partitioned_optimizer),
            activations=self._activation_bytes,
            buffers=state.traffic.buffers.take_peak(),
            peak=self._peak.take(),
            outside=self._outside_bytes,
            device=state.world.device,
            away=away,
            capacities={where: store.capacity_bytes for where, store in state.stores.made.items() if away[where]},
        )

    def start_anew(self) -> None:
        """Peaks of before count no more."""
        self._peak.take()


MOST_MARKS = 128
"""Of one step; of many micro-batches the first ones are marked."""
_SECONDS = 1.0
_MOST_SECONDS = 3e-3
"""Of a processor, that reading may take in one step: a heap in very many pieces is counted slowly, and then left."""
_SPARING = 400
"""Times the time that reading took pass until the next step is marked."""


class MemoryMarks:
    """Of one rank. A step begins with `begin`, and `take` has its marks."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`work_clock`: tells a thread's time on its processor, which does not grow while others have that."""
        self._device, self._clock, self._work_clock = device, clock, work_clock
        self._found: list[MemoryMark] | None = None
        """None in a step that is not marked."""
        self._began = self._due = self._spent = 0.0

    def begin(self) -> None:
        """A step begins now."""
        self._began = now = self._clock()
        self._found = [] if now >= self._due else None
        self._spent = 0.0
        self.note("start")

    def note(self, phase: str) -> None:
        """A phase has ended."""
        if self._found is None or len(self._found) >= MOST_MARKS or self._spent > _MOST_SECONDS:
            return
        before = self._work_clock()
        seconds = round(self._clock() - self._began, 6)
        self._found.append(MemoryMark(phase, seconds, allocated_bytes(self._device)))
        self._spent += self._work_clock() - before

    def drop(self) -> None:
        """What has been marked since `begin` is no step's: the next one is marked in its place."""
        self._found = None

    def take(self) -> list[MemoryMark]:
        """Those of the step that ends; [] where it is not marked."""
        if self._found is None:
            return []
        self._due = self._began + max(_SECONDS, _SPARING * self._spent)
        return self._found


def allocated_bytes(device: torch.device) -> int:
    """What is given out now: CUDA: to tensors; CPU: to the process by its heap, and to it of shared memory. 0 where
    nobody counts."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    heap = _heap()
    if heap is None:
        return 0
    counted = heap()
    return counted.used + counted.mapped + arena().nbytes


class _Heap(ctypes.Structure):
    """What mallinfo2(3) tells."""

    _fields_ = [(f"other{i}", ctypes.c_size_t) for i in range(4)]  # ctypes reads it so
    _fields_ += [("mapped", ctypes.c_size_t), ("other4", ctypes.c_size_t), ("other5", ctypes.c_size_t)]
    _fields_ += [("used", ctypes.c_size_t), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t)]


@functools.cache
def _heap() -> Callable[[], _Heap] | None:
    """glibc's counters, since version 2.33; None on other systems."""
    try:
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype, mallinfo2.argtypes = _Heap, []
    return mallinfo2

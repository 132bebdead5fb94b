"""Memory ledger: where every byte of a rank is, from the storages that the engine holds.

1. `ActivationTrace` measures the peak of activations exactly, by following storages.
2. `PeakMemory` reads peaks of the allocator (CUDA) or the operating system (CPU).
3. Allocator settings: whether glibc keeps freed memory.
4. `measure_states`, `make_ledger` and `MemoryProbe` make the ledger.
5. `MemoryMarks` records allocated bytes over a step, at the ends of its phases.

Marks cause no sync: only host counters of the allocator are read, which on a GPU are ahead of the device. At most one
step per second is marked, and reading costs less than 1/400 of the time.
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
    """A trace of every storage created while it is active. `peak_bytes` is the largest total of live storages.

    `activation_trace` makes one. It counts what forward and backward create: saved activations, logits, gradients
    between layers. It skips storages in `known` (flat parameters, parameters, buffers), including those created
    meanwhile, and storages created while `follows` returns False. A storage counts until it is freed or resized to 0.
    """

    def __init__(self, known: Callable[[], set[int]], follows: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._known_now, self._follows = known, follows
        self._known: set[int] = set()
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Key of a storage → (weak reference, number of its event)."""
        self._events: list[tuple[int, int]] = []
        """(number of the event that created the storage, change in bytes), in order of time."""
        self.peak_bytes = 0

    def __enter__(self) -> ActivationTrace:
        self._known = self._known_now()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        known = self._known_now()
        # Only now it is known which new storages are moments or reduction buffers.
        # Creations of such storages are removed from the replay below.
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
        # With True, torch wraps the method above, and the first call imports the compiler.
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
    """A trace that compiled code may call: torch's compiler skips the method."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def activation_trace(known: Callable[[], set[int]], follows: Callable[[], bool] = lambda: True) -> ActivationTrace:
    """Return a trace to enter.

    Without compiled code it does not import torch's compiler, which costs a rank one second.

    Args:
        known: Returns keys of storages to skip.
        follows: Returns whether to follow new storages now.
    """
    kind = _BesideCompiler if "torch._dynamo" in sys.modules else ActivationTrace
    return kind(known, follows)


class PeakMemory:
    """The memory peak since the last `take`, from the allocator (CUDA) or the operating system (CPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._status = Path("/proc/self/status")
        self._can_reset = os.access("/proc/self/clear_refs", os.W_OK)

    def take(self) -> tuple[int, int | None]:
        """Return the peaks, and reset them.

        Returns:
            (peak bytes reported, peak bytes allocated to tensors). CUDA: reserved by the allocator, and given out. CPU:
            the resident set without peers' shared memory, and None.
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
                # 5 resets the high-water mark of the resident set (proc(5)); this takes microseconds.
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._can_reset = False  # Some containers forbid this; the present resident set is reported instead.
        return int(line.split()[1]) * 1024 - _of_peers(text)

    @staticmethod
    def resident() -> int:
        """Return the resident bytes of this process now."""
        import psutil

        return psutil.Process().memory_info().rss


def _of_peers(status: str) -> int:
    """Return resident bytes that belong to other ranks: shared pages beyond this rank's own."""
    shared = next((line for line in status.splitlines() if line.startswith("RssShmem:")), "RssShmem: 0")
    # This rank's own shared memory is its arena.
    return max(0, int(shared.split()[1]) * 1024 - arena().nbytes)


_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MMAP_MAX = -3, -1, -4
"""Names of three settings of glibc's allocator (mallopt(3))."""

_KEPT_BYTES, _LARGEST_KEPT_BYTES, _USUAL_MAPPINGS = 1 << 30, 32 << 20, 1 << 16
"""Freed bytes that a process keeps at the end of its heap; largest block from the heap while mmap is allowed; default
number of mappings.
"""


def keep_freed_memory() -> None:
    """Make the allocator keep memory that every step frees and allocates again.

    By default glibc returns it to the system, and the next step faults it in page by page: 5 to 10 % of a step on CPUs.
    `release_freed_memory` returns it later. Does nothing on other systems.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        # First, because setting either threshold stops its automatic growth.
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_MAX, 0)  # No mmap at all, because logits alone exceed the largest possible threshold.


_SPARING_BYTES = 256 << 10
"""Smaller blocks come from the heap in any case, because an own mapping costs microseconds."""

_SETTLED_BYTES, _SETTLED_LARGEST_BYTES = 4 << 20, 2 << 20
"""As the two constants above, for a sparing process after its lasting memory is allocated."""

_SETTLED_ROOM_BYTES = 128 << 20
"""Available bytes required for that: about twice the measured cost, in holes between blocks."""


def give_freed_memory_back() -> None:
    """Undo `keep_freed_memory`: freed memory returns to the system. For runs that are short of memory."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_MMAP_THRESHOLD, _SPARING_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _SPARING_BYTES)
        library.mallopt(_MMAP_MAX, _USUAL_MAPPINGS)
        library.malloc_trim(0)


def suit_allocator(device: torch.device, *, sparing: bool) -> None:
    """Choose what a CPU rank's process does with freed memory.

    Args:
        device: The device of this rank; only CPUs change.
        sparing: True returns freed memory to the system, False keeps it.
    """
    if device.type == "cpu":
        (give_freed_memory_back if sparing else keep_freed_memory)()


def settle_allocator(device: torch.device) -> None:
    """Let a sparing process keep a little freed memory, after its first step.

    Lasting memory is allocated now, so freed blocks cannot pin it. Without this, page faults took a fifth of a step
    with states on disk. Changes nothing if memory is too short.

    Args:
        device: The device of this rank; only CPUs change.
    """
    if device.type == "cpu" and memory_bytes()[1] > _SETTLED_ROOM_BYTES:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libc.so.6")
            library.mallopt(_MMAP_THRESHOLD, _SETTLED_LARGEST_BYTES)
            library.mallopt(_TRIM_THRESHOLD, _SETTLED_BYTES)


def release_freed_memory(device: torch.device) -> None:
    """Return freed memory to the system and the device now.

    Args:
        device: The device of this rank.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def storage_bytes(tensor: Tensor | None) -> int:
    """Return the bytes that the tensor's storage holds now; 0 if it was released.

    Args:
        tensor: A tensor or None.
    """
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def known_storages(buffers: Iterable[Tensor], flats: Iterable[FlatParam], optimizer: PartitionedOptimizer) -> set[int]:
    """Return keys of the storages that other ledger categories count.

    Args:
        buffers: Buffers of the model and of the engine.
        flats: The flat parameters.
        optimizer: Holds the moments.
    """
    tensors: list[Tensor | None] = [*buffers]
    for flat in flats:
        tensors += [flat.full, flat.shard, flat.master]
        tensors += [] if flat.secondary is None else [flat.secondary.shard]
        if flat.gradient is not None:
            tensors += flat.gradient.tensors
            tensors += optimizer.states_of(flat).values()
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}


def measure_states(buffers: Iterable[Tensor], zeros: Iterable[Zero], optimizer: PartitionedOptimizer) -> dict[str, int]:
    """Measure states that this rank keeps on its device between steps.

    Args:
        buffers: Buffers of the model.
        zeros: The partitioners of the model parts.
        optimizer: Holds the moments.

    Returns:
        Bytes of parameters, gradients, master weights and moments, by category: the real size of their storages.
    """
    sizes = dict.fromkeys(STATE_CATEGORIES.values(), 0)
    sizes["parameters"] = sum(buffer.nbytes for buffer in buffers)
    for flat, state, home in _homes(zeros):
        if home.where is MemoryKind.DEVICE:
            tensors = _tensors_of(state, flat, optimizer)
            nbytes = sum(storage_bytes(tensor) for tensor in tensors)
            if home.form == EIGHT_BITS:  # The decoded tensors exist only during an update.
                nbytes = sum(kept.nbytes for kept in _kept(state, flat))
            sizes[STATE_CATEGORIES.get(state, "gradients")] += nbytes
    return sizes


def measure_offloaded(zeros: Iterable[Zero], where: MemoryKind) -> dict[str, int]:
    """Measure states that this rank keeps off its device.

    Args:
        zeros: The partitioners of the model parts.
        where: The kind of memory.

    Returns:
        Bytes by the same categories; {} without any.
    """
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
    """Return the stores of an offloaded state of a flat parameter."""
    if state == "gradient":
        return (
            [flat.gradient.offloaded.kept] if flat.gradient is not None and flat.gradient.offloaded is not None else []
        )
    if state == "moments":
        # A copy, because a delayed update may add the first states now.
        return [away.kept for name, away in list(flat.offloaded.items()) if name not in ("parameter", "master")]
    if state == "waiting":
        return [flat.gradient.waiting.kept] if flat.gradient is not None and flat.gradient.waiting is not None else []
    return [flat.offloaded[state].kept]


def _tensors_of(state: str, flat: FlatParam, optimizer: PartitionedOptimizer) -> Iterable[Tensor]:
    """Return the tensors of a state between steps.

    A partition may be a slice of a whole storage, which counts whole.
    """
    if state == "parameter":
        return [flat.shard]
    if state == "master":
        return [flat.master]
    if state == "secondary":
        return [] if flat.secondary is None else [flat.secondary.shard]
    assert flat.gradient is not None  # Frozen parameters have no other states.
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
    """Return the ledger at the peak of a step.

    Categories sum to the reported bytes; the rest is other framework memory.

    Args:
        states: Bytes of states on the device, by category.
        activations: Bytes of the last exact trace. An allocator that counts every byte gives a better figure.
        buffers: Peak bytes of communication buffers.
        peak: From `PeakMemory.take`.
        outside: Bytes that the process held before the engine.
        device: The device of this rank.
        away: Bytes off the device by memory kind and category. On a CPU, host memory is then not the device's.
        capacities: Bytes of these memories.
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
        # On a CPU the resident set includes host stores, which the ledger lists separately.
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
    """The memory measurements of one rank, with the last traced activations."""

    def __init__(self, state: TrainingState, *, outside_bytes: int) -> None:
        """Start measuring.

        Args:
            state: The training state.
            outside_bytes: Bytes that the process held before the engine was built.
        """
        self._state, self._outside_bytes = state, outside_bytes
        self._peak = PeakMemory(state.world.device)
        self._activation_bytes = 0

    @contextmanager
    def trace_activations(self) -> Iterator[None]:
        """Measure the activations of the code inside exactly. This is slower. Later ledgers reuse the figure."""

        def known() -> set[int]:
            state = self._state
            lent = [buffer for group in state.mesh.groups for buffer in group.idle_buffers]
            # On CPUs, states in host memory are used in place, and are no activations either.
            away = state.stores.in_memory
            return known_storages([*state.buffers, *lent, *away], state.flats, state.partitioned_optimizer)

        def follows() -> bool:  # Storages that an optimizer creates in its first step are moments.
            traffic = self._state.traffic
            return traffic.phase != "optimizer" and not traffic.encoding

        with activation_trace(known, follows) as trace:
            yield
        self._activation_bytes = trace.peak_bytes

    def ledger(self) -> Ledger:
        """Return bytes by category at the peak since the last call."""
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

    def start_again(self) -> None:
        """Reset the peak."""
        self._peak.take()


MOST_MARKS = 128
"""Largest number of marks in a step. With many micro-batches only the first ones are marked."""
_SECONDS = 1.0
_MOST_SECONDS = 3e-3
"""Processor time for reading in one step: reading a fragmented heap is slow, and then stops."""
_SPARING = 400
"""The next marked step starts after this many times the time that reading took."""


class MemoryMarks:
    """The allocated bytes of one rank over a step. `begin` starts a step, and `take` returns its marks."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Start without marks.

        Args:
            device: The device of this rank.
            clock: Wall-clock time in seconds.
            work_clock: Processor time of the thread in seconds, which does not grow while other threads run.
        """
        self._device, self._clock, self._work_clock = device, clock, work_clock
        self._found: list[MemoryMark] | None = None
        """None in a step that is not marked."""
        self._began = self._due = self._spent = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._began = now = self._clock()
        self._found = [] if now >= self._due else None
        self._spent = 0.0
        self.note("start")

    def note(self, phase: str) -> None:
        """Mark the end of a phase.

        Args:
            phase: Name of the phase.
        """
        # Stop marking when reading costs too much.
        if self._found is None or len(self._found) >= MOST_MARKS or self._spent > _MOST_SECONDS:
            return
        before = self._work_clock()
        seconds = round(self._clock() - self._began, 6)
        self._found.append(MemoryMark(phase, seconds, allocated_bytes(self._device)))
        self._spent += self._work_clock() - before

    def drop(self) -> None:
        """Drop the marks since `begin`, which belong to no step. The next step is marked instead."""
        self._found = None

    def take(self) -> list[MemoryMark]:
        """Return the marks of the step that ends; [] if it is not marked."""
        if self._found is None:
            return []
        # Reading costs at most 1/_SPARING of the time.
        self._due = self._began + max(_SECONDS, _SPARING * self._spent)
        return self._found


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes allocated now.

    Args:
        device: CUDA: bytes of tensors. CPU: bytes of the process heap plus its own shared memory.

    Returns:
        The bytes; 0 if the system has no counter.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    heap = _heap()
    if heap is None:
        return 0
    # Blocks in the heap, blocks with an own mapping, and this rank's shared memory.
    counted = heap()
    return counted.used + counted.mapped + arena().nbytes


class _Heap(ctypes.Structure):
    """The result struct of mallinfo2(3)."""

    _fields_ = [(f"other{i}", ctypes.c_size_t) for i in range(4)]  # ctypes reads it so
    _fields_ += [("mapped", ctypes.c_size_t), ("other4", ctypes.c_size_t), ("other5", ctypes.c_size_t)]
    _fields_ += [("used", ctypes.c_size_t), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t)]


@functools.cache
def _heap() -> Callable[[], _Heap] | None:
    """Return glibc's counters (version 2.33 or later); None on other systems."""
    try:
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype, mallinfo2.argtypes = _Heap, []
    return mallinfo2

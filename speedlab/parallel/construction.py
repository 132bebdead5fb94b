"""Run a model's constructor without ever holding all of its values.

The constructor runs on the CPU, unchanged. So its random numbers, its control flow and its values are those of a plain
call. Meanwhile:

1. Record every operation that writes a large tensor, with the state of the random generator before the operation.
2. If large tensors exceed a budget, free the least recently used ones. Keep a checksum.
3. Before an operation reads a freed tensor, compute its values again from the record.
4. At the end, freed parameters become parameters on `meta`. `Construction.value_of` computes each one again when its
   unit is built.

A value is never freed if the record cannot reproduce it:

- large tensors from files, NumPy or other threads;
- tensor subclasses;
- tensors whose memory was handed out (`data_ptr`, `numpy`).

Such parameters stay in memory. So a constructor that calls `from_pretrained` simply runs as usual. If a value differs
from its checksum, replay raises an error: the result is equal bits or an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

log = logging.getLogger("speedlab.parallel")

LEAST_BYTES = 64 << 10
"""Smaller tensors are kept, because a record of them costs more memory than they hold."""

BUDGET_BYTES = 128 << 20
"""Bytes that large tensors may hold while the constructor runs, in addition to the arguments of one operation."""

_SAID_FROM_BYTES = 1 << 30
"""From this many bytes on, the log reports parameters that a callable keeps in memory."""

_aten = torch.ops.aten

_OVERWRITING = {
    *(_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.bernoulli_),
    *(_aten.exponential_, _aten.cauchy_, _aten.log_normal_, _aten.geometric_),
}
"""Operations that write every element of their first argument and do not read it."""

_UNFILLED = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
"""Operations that return uninitialized memory. Large results are zeroed, so that they can be reproduced."""

_METADATA = {_aten.set_}
"""Operations that change which memory a tensor uses, but write no memory."""

_RAW_ACCESS = {
    *("__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "apply_", "const_data_ptr", "data_ptr", "map_"),
    *("mutable_data_ptr", "numpy", "pin_memory", "share_memory_", "storage", "_typed_storage", "untyped_storage"),
}
"""Tensor methods that hand out memory. No mode can see later reads and writes of this memory."""

_MANY_ARGUMENTS = 8
"""Operations with more large tensors than this are not replayed, because all arguments would be needed at once."""

_MOST_CALLS = 8192
"""A value is not replayed if this takes more calls."""

_MOST_VALUES = 256
"""A value is not replayed if it depends on more other large values."""


class ReplayError(RuntimeError):
    """A replayed operation returned different values."""


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU generator and, on a GPU, the generator of the current device. Runs on the host without
    synchronization.

    `torch.manual_seed` asks every device type, and records a Python stack for each missing one. This takes
    milliseconds, which every block would pay in every forward.

    Args:
        seed: The seed.
        device: A CPU or CUDA device.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators as the plain constructor would, and restore the caller's random state afterwards.

    Args:
        seed: The seed.
        device: A CPU or CUDA device.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_generators(seed, device)
        yield


def construct(
    factory: Callable[[], nn.Module], *, seed: int, device: torch.device
) -> tuple[nn.Module, Construction | None]:
    """Call `factory`. Every value equals, bit for bit, that of `torch.manual_seed(seed); factory()` in one process.

    Args:
        factory: Builds the model, on the CPU by default.
        seed: Seed of torch's random generators.
        device: Its generator is seeded, in addition to the CPU's.

    Returns:
        The model, and the record of its freed parameters, which are on `meta`. The record is None if all values are in
        memory, because the model is small or cannot be replayed.
    """
    recorder = _Recorder()
    try:
        with seeded(seed, device), recorder.recording():
            module = factory()
        if not recorder.failed:
            return module, _finish(module, recorder)
    except ReplayError:
        pass
    except Exception:
        if not recorder.failed:
            raise
    log.info("model: its initialisation cannot be repeated from a record, so the callable runs again, whole")
    with seeded(seed, device):
        return factory(), None


class Construction:
    """The record that can compute freed parameters of a model again."""

    def __init__(self, parameters: dict[int, tuple[nn.Parameter, _Past, _Geometry]]) -> None:
        self._parameters = parameters  # Refers to the parameters, so that their ids are not reused.

    def value_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Compute the values of a freed parameter again.

        Args:
            parameter: A parameter of the model.

        Returns:
            The values on the CPU; None if the parameter was not freed here.

        Raises:
            ReplayError: The values differ from those of the constructor.
        """
        if id(parameter) not in self._parameters:
            return None
        _, past, geometry = self._parameters[id(parameter)]
        return geometry.view(past.replay())


# ---- the record ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How a tensor views its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Geometry:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class _History:
    """All writes to a storage, in order, since it was created or fully overwritten."""

    __slots__ = ("calls", "created", "exact", "nbytes", "writes")

    def __init__(self, nbytes: int, *, created: _Operation | None = None, exact: bool = True) -> None:
        self.nbytes = nbytes
        self.created = created
        """The operation that created the storage with values; None: it was allocated as zeros."""
        self.writes: list[_Operation] = []
        self.exact = exact
        """Whether replay reproduces the values at an acceptable cost."""
        self.calls = 0
        """Upper bound for the calls of a replay."""
        if created is not None:
            self._count(created)

    def write(self, operation: _Operation | None) -> None:
        """Add an operation that wrote to the storage; None: an operation that cannot be replayed."""
        if operation is None or not self.exact:
            self.exact = False
            return
        self.writes.append(operation)
        self._count(operation)

    def _count(self, operation: _Operation) -> None:
        others = _uses([operation], self)
        self.calls += 1 + sum(1 + length for _, length in others)
        self.exact = self.calls <= _MOST_CALLS and len(others) <= _MOST_VALUES


@dataclass(slots=True)
class _Past:
    """A storage in its state after the first `length` writes."""

    history: _History
    length: int
    checksum: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[int, int]:
        return id(self.history), self.length

    @property
    def operations(self) -> list[_Operation]:
        """The operations that produced this state."""
        created = [] if self.history.created is None else [self.history.created]
        return [*created, *self.history.writes[: self.length]]

    def replay(self) -> torch.UntypedStorage:
        """Compute the values in new memory. Raises ReplayError if they differ from the checksum."""
        with torch.no_grad():
            before = torch.default_generator.get_state()
            try:
                storage = _Replay(self).value(self)
            finally:
                torch.default_generator.set_state(before)
        if self.checksum is not None and _checksum(storage) != self.checksum:
            raise ReplayError(
                "model: a parameter came out differently when its initialisation was repeated; give the module itself, "
                "model=f(), instead of the function that makes it"
            )
        return storage


def _uses(operations: Iterable[_Operation], own: _History) -> Counter[tuple[int, int]]:
    """Count how often each other large value is an argument of these operations, or of those that compute their
    arguments.
    """
    found: Counter[tuple[int, int]] = Counter()
    stack = [(operation, own) for operation in operations]
    while stack and len(found) <= _MOST_VALUES:
        operation, history = stack.pop()
        for leaf in tree_iter((operation.args, operation.kwargs)):
            if isinstance(leaf, _Large) and leaf.past.history is not history:
                found[leaf.past.key] += 1
                if found[leaf.past.key] == 1:
                    stack += [(each, leaf.past.history) for each in leaf.past.operations]
    return found


class _Replay:
    """One computation of a value from the record. Each intermediate value is computed once, and freed after its last
    use.
    """

    def __init__(self, past: _Past) -> None:
        self._uses = _uses(past.operations, past.history)
        self._values: dict[tuple[int, int], torch.UntypedStorage] = {}

    def value(self, past: _Past) -> torch.UntypedStorage:
        storage = self._values.get(past.key)
        if storage is None:
            storage = self._computed(past)
            self._values[past.key] = storage
        self._uses[past.key] -= 1
        if self._uses[past.key] <= 0:
            del self._values[past.key]
        return storage

    def _computed(self, past: _Past) -> torch.UntypedStorage:
        history = past.history
        if history.created is None:
            storage = torch.zeros(history.nbytes, dtype=torch.uint8).untyped_storage()
        else:
            created = history.created
            result = created.repeat(lambda leaf: leaf.geometry.view(self.value(leaf.past)))
            storage = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)][created.output].untyped_storage()
        for operation in history.writes[: past.length]:
            operation.repeat(
                lambda leaf: leaf.geometry.view(storage if leaf.past.history is history else self.value(leaf.past))
            )
        return storage


@dataclass(frozen=True, slots=True)
class _Large:
    """An argument of an operation: a view of a recorded storage."""

    past: _Past
    geometry: _Geometry


@dataclass(frozen=True, slots=True)
class _Operation:
    """One call. Large tensors are replaced by `_Large`, small ones by copies."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor | None
    """State of the generator that the call uses; None: it draws no random numbers."""
    default_dtype: torch.dtype
    output: int = 0
    """Index of the result that holds the new storage, if the call creates one."""

    def repeat(self, view_of: Callable[[_Large], Tensor]) -> Any:
        """Call the function again and return its result.

        Args:
            view_of: Returns a real tensor for each large argument.
        """

        def real(leaf: Any) -> Any:
            return view_of(leaf) if isinstance(leaf, _Large) else leaf

        args, kwargs = tree_map(real, self.args), tree_map(real, self.kwargs)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            if self.random_state is not None:
                if kwargs.get("generator") is not None:
                    kwargs["generator"] = torch.Generator()
                    kwargs["generator"].set_state(self.random_state)
                else:
                    torch.default_generator.set_state(self.random_state)
            return self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)


# ---- while the constructor runs --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LargeStorage:
    """A large storage that the constructor created and that is still alive."""

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    history: _History
    pinned: bool = False
    """Whether its memory was handed out, so that it is never freed."""
    freed: _Past | None = None
    """The state at the time when its memory was freed; None: it has memory."""

    def past(self) -> _Past:
        return _Past(self.history, len(self.history.writes))


@dataclass
class _Recorder:
    """The large storages of one construction."""

    failed: bool = False
    """Whether freed values could not be computed again, even if the constructor caught this error."""
    _given_up: bool = False
    """Whether no memory is freed any more."""
    _entries: dict[int, _LargeStorage] = field(default_factory=dict)
    """Entries by address of the storage."""
    _resident: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Bytes of the storages that could be freed, by address; least recently used first."""
    _held: int = 0
    _threads: int = field(default_factory=threading.active_count)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of this thread. After an exception, all living tensors get their memory back."""
        try:
            with _Operations(self), _RawAccess(self):
                yield
        except BaseException:
            with contextlib.suppress(ReplayError):
                self.give_up()
            raise

    # ---- memory ------------------------------------------------------------------------------------------------------

    def find(self, tensor: Tensor) -> _LargeStorage | None:
        """Return the entry of a tensor's storage; None if it is small or unknown."""
        storage = _storage_of(tensor)
        return None if storage is None else self._entries.get(storage._cdata)

    def freed_entry(self, storage: torch.UntypedStorage) -> _LargeStorage | None:
        """Return the entry of a storage whose memory is freed; None for other storages."""
        entry = self._entries.get(storage._cdata)
        return entry if entry is not None and entry.freed is not None else None

    def give_up(self) -> None:
        """Restore all freed memory, and free nothing from now on."""
        self._given_up = True
        for entry in list(self._entries.values()):
            self.restore(entry)

    def restore(self, entry: _LargeStorage, *, values: bool = True) -> None:
        """Restore the memory of a freed storage.

        Args:
            entry: The storage.
            values: Whether to restore the values too. Not needed if the next operation overwrites them.

        Raises:
            ReplayError: The values cannot be reproduced.
        """
        storage = entry.storage()
        if entry.freed is None or storage is None:
            return
        past, entry.freed = entry.freed, None
        storage.resize_(entry.nbytes)
        if values:
            try:
                with _disable_current_modes():
                    storage.copy_(past.replay())
            except Exception:
                self.failed = True
                raise
        self._use(entry)

    def pin(self, tensor: Tensor) -> None:
        """Restore a tensor's memory, and never free it from now on."""
        entry = self.find(tensor)
        if entry is not None:
            self.restore(entry)
            entry.pinned = True
            self._leave(entry)

    def make_room(self, used: Iterable[_LargeStorage]) -> None:
        """Free least recently used storages until the budget is met.

        Args:
            used: Storages that are in use and must stay.
        """
        busy = {id(entry) for entry in used}
        if threading.active_count() > self._threads:
            self.give_up()  # No mode sees writes of another thread.
        for address in list(self._resident) if self._held > BUDGET_BYTES and not self._given_up else ():
            if self._held <= BUDGET_BYTES:
                return
            entry = self._entries[address]
            storage = entry.storage()
            if id(entry) in busy or storage is None:
                continue
            past = entry.past()
            past.checksum = _checksum(storage)
            storage.resize_(0)
            entry.freed = past
            self._leave(entry)

    def _use(self, entry: _LargeStorage) -> None:
        storage = entry.storage()
        if storage is None or entry.pinned or not entry.history.exact:
            self._leave(entry)
            return
        if storage._cdata not in self._resident:
            self._held += entry.nbytes
            self._resident[storage._cdata] = entry.nbytes
        self._resident.move_to_end(storage._cdata)

    def _leave(self, entry: _LargeStorage) -> None:
        storage = entry.storage()
        if storage is not None:
            self._held -= self._resident.pop(storage._cdata, 0)

    def _follow(self, storage: torch.UntypedStorage, history: _History) -> _LargeStorage:
        address = storage._cdata

        def end(_: object) -> None:
            self._entries.pop(address, None)
            self._held -= self._resident.pop(address, 0)

        entry = _LargeStorage(weakref.ref(storage, end), storage.nbytes(), history)
        self._entries[address] = entry
        self._use(entry)
        return entry

    # ---- operations --------------------------------------------------------------------------------------------------

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and record its writes to large storages.

        Args:
            function: An operation of torch.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result of the function.
        """
        if self._given_up:
            return function(*args, **kwargs)
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if not isinstance(function, torch._ops.OpOverload) or any(not _is_plain(tensor) for tensor in inputs):
            self.give_up()
            return function(*args, **kwargs)
        entries = {id(tensor): self.find(tensor) for tensor in inputs}
        written = _written(function, args, kwargs)
        overwritten = self._overwritten(function, args, inputs, entries)
        if overwritten is not None:
            self.restore(overwritten, values=False)
            overwritten.history = _History(overwritten.nbytes)
        used = [entry for entry in entries.values() if entry is not None]
        for entry in used:
            self.restore(entry)
            self._use(entry)
        packet = function.overloadpacket
        changed = {id(e): e for t in written if (e := entries[id(t)]) is not None} if packet not in _METADATA else {}
        # A replay for one of several written tensors would also change the others, so such a call is not replayable.
        exact = len(changed) < 2 and self._can_repeat(function, inputs, entries)
        # Record before the call, which changes the random state and possibly its small arguments.
        recorded = self._operation(function, args, kwargs, entries) if changed and exact else None
        random_state = _random_state(function, kwargs)
        result = function(*args, **kwargs)
        for entry in changed.values():
            storage = entry.storage()
            if storage is not None and storage.nbytes() != entry.nbytes:  # The call was resize_.
                entry.pinned = True
                self._leave(entry)
            entry.history.write(recorded)
            self._use(entry)
        used += self._created(function, args, kwargs, inputs, entries, result, random_state, exact=exact)
        self.make_room(used)
        return result

    def _overwritten(
        self, function: Any, args: tuple[Any, ...], inputs: list[Tensor], entries: dict[int, _LargeStorage | None]
    ) -> _LargeStorage | None:
        """Return the storage that the call overwrites completely without reading it; None if there is none."""
        if function.overloadpacket not in _OVERWRITING or not args or not isinstance(args[0], Tensor):
            return None
        target, entry = args[0], entries[id(args[0])]
        if entry is None or entry.pinned or target.numel() * target.itemsize != entry.nbytes:
            return None
        again = any(entries[id(tensor)] is entry for tensor in inputs if tensor is not target)
        return None if again or torch._debug_has_internal_overlap(target) != 0 else entry

    def _can_repeat(self, function: Any, inputs: list[Tensor], entries: dict[int, _LargeStorage | None]) -> bool:
        """Return whether a replay of the call gives the same values."""
        if function.namespace not in ("aten", "prims"):
            return False
        large = [tensor for tensor in inputs if _nbytes(tensor) >= LEAST_BYTES]
        if len(large) > _MANY_ARGUMENTS or any(t.is_conj() or t.is_neg() for t in inputs):
            return False
        known = [entries[id(tensor)] for tensor in large]
        return all(entry is not None and not entry.pinned and entry.history.exact for entry in known)

    def _operation(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entries: dict[int, _LargeStorage | None],
        output: int = 0,
        random_state: Tensor | None = None,
    ) -> _Operation:
        def stored(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            entry = entries[id(leaf)]
            if entry is not None:
                return _Large(entry.past(), _Geometry.of(leaf))
            return leaf.detach().clone()  # A small tensor, whose values may change later.

        state = _random_state(function, kwargs) if random_state is None else random_state
        given = tree_map(stored, args), tree_map(stored, kwargs)
        return _Operation(function, *given, state, torch.get_default_dtype(), output)

    def _created(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        entries: dict[int, _LargeStorage | None],
        result: Any,
        random_state: Tensor | None,
        *,
        exact: bool,
    ) -> list[_LargeStorage]:
        """Return entries for the large storages that the call created or returned."""
        found: list[_LargeStorage] = []
        outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        given = {storage._cdata for tensor in inputs if (storage := _storage_of(tensor)) is not None}
        for index, tensor in enumerate(outputs):
            if not _is_plain(tensor):
                self.give_up()
                return found
            storage = _storage_of(tensor)
            if storage is None or storage.nbytes() < LEAST_BYTES or storage._cdata in given:
                continue
            known = self._entries.get(storage._cdata)
            if known is None and function.namespace in ("aten", "prims"):
                if function.overloadpacket in _UNFILLED:
                    _bytes_of(storage).zero_()
                    history = _History(storage.nbytes())
                elif exact:
                    created = self._operation(function, args, kwargs, entries, index, random_state)
                    history = _History(storage.nbytes(), created=created)
                else:
                    history = _History(storage.nbytes(), exact=False)
                known = self._follow(storage, history)
            if known is not None:
                found.append(known)
        return found


class _Operations(TorchDispatchMode):
    """Passes every operation of this thread to the recorder, below autograd."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The recorder itself also accesses memory, which `_RawAccess` must not see.
        with torch._C.DisableTorchFunction():
            return self._recorder.run(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler at the first call, which takes a second.


class _RawAccess(TorchFunctionMode):
    """Notifies the recorder before the memory of a tensor is handed out."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _RAW_ACCESS:
            for leaf in tree_iter((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._recorder.pin(leaf)
        return func(*args, **(kwargs or {}))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is exactly a Tensor or a Parameter, not a subclass."""
    return type(tensor) in (Tensor, nn.Parameter)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a dense CPU tensor; None for other tensors."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    return tensor.untyped_storage()


def _nbytes(tensor: Tensor) -> int:
    storage = _storage_of(tensor)
    return tensor.numel() * tensor.itemsize if storage is None else storage.nbytes()


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that the function writes, according to its schema."""
    found: list[Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += [leaf for leaf in tree_iter(given) if isinstance(leaf, Tensor)]
    return found


def _random_state(function: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the state of the generator that the function will use; None if it uses none."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    return (kwargs.get("generator") or torch.default_generator).get_state()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _checksum(storage: torch.UntypedStorage) -> tuple[int, ...]:
    """Return sums of the bytes. The second sum covers only the first half, so it depends on the order."""
    with torch.no_grad(), _disable_current_modes():
        whole = _bytes_of(storage)
        words = whole.numel() // 8
        numbers = whole[: 8 * words].view(torch.int64)
        sums = numbers.sum(), numbers[: words // 2].sum(), whole[8 * words :].sum()
        return tuple(int(each.item()) for each in sums)


# ---- afterwards ------------------------------------------------------------------------------------------------------


def _finish(module: nn.Module, recorder: _Recorder) -> Construction | None:
    """Turn freed parameters into parameters on `meta`, and restore all other memory."""
    if not isinstance(module, nn.Module):
        recorder.give_up()
        return None
    freed: dict[int, tuple[nn.Parameter, _Past, _Geometry]] = {}
    whole = 0
    for parameter in module.parameters():
        past = _past_of(parameter, recorder)
        geometry = _Geometry.of(parameter)
        if past is not None and _to_meta(parameter):
            freed[id(parameter)] = parameter, past, geometry
        elif not parameter.is_meta:
            whole += parameter.numel() * parameter.element_size()
    recorder.give_up()
    if whole > _SAID_FROM_BYTES:
        log.warning(
            "model: each rank holds %.1f GiB of the callable's parameters whole until they are partitioned, because "
            "it loads them or computes them in a way that cannot be repeated part by part",
            whole / (1 << 30),
        )
    return Construction(freed) if freed else None


def _past_of(parameter: nn.Parameter, recorder: _Recorder) -> _Past | None:
    """Return the state of a freed parameter that shares its memory with no other tensor; None for other parameters."""
    storage = _storage_of(parameter) if _is_plain(parameter) else None
    entry = None if storage is None else recorder.freed_entry(storage)
    if storage is None or entry is None or type(parameter) is not nn.Parameter:
        return None
    users = torch._C._storage_Use_Count(storage._cdata) - 1  # The local variable `storage` counts as one user.
    return entry.freed if users == 1 else None


def _to_meta(parameter: nn.Parameter) -> bool:
    """Turn the parameter into one on `meta`, keeping the Python object. Return False if this is impossible."""
    like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return _swap(parameter, like)


def give_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Turn a parameter on `meta` into one with values, keeping the Python object.

    Args:
        parameter: A parameter on meta.
        value: Its values.

    Raises:
        RuntimeError: An autograd graph or a weak reference holds the parameter.
    """
    if not _swap(parameter, value):
        raise RuntimeError("model: something holds on to the graph of a parameter that has no values yet")


def _swap(parameter: nn.Parameter, value: Tensor) -> bool:
    if weakref.getweakrefs(parameter):
        return False
    other = nn.Parameter(value, parameter.requires_grad)
    vars(other).update(vars(parameter))  # pyright: ignore[reportAttributeAccessIssue]  # a dict, as of any object
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError:  # An autograd graph refers to the parameter.
        return False
    return True

"""A GPU without memory or time: which operations come, what the host waits for, what would be illegal."""

from __future__ import annotations

import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, META = torch.device("cuda:0"), torch.device("meta")

_aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default
"""What C++ asks where a tensor is with."""

_SYNCHRONISE = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
}
"""Operations after which the host knows a value of the device, or how many there are."""


_FEW = 16
"""Numbers that the driver takes along with the call, pinned or not: no transfer of them is listed."""


class FakeCudaError(AssertionError):
    """Something that fails on a GPU, or may."""


@dataclass(frozen=True)
class Wait:
    """A time when the host waited for the device: by what operation, and in which lines of speedlab, inner first."""

    what: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} at {' < '.join(self.lines) or 'a place outside speedlab'}"


@dataclass(frozen=True)
class Collective:
    """A collective: c10d's name of it, what carries it ("nccl" or "gloo"), of which group and how many ranks."""

    name: str
    wires: str
    group: str
    ranks: int
    dtype: torch.dtype | None
    nbytes: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        what = f"{self.name} of {self.nbytes} bytes of {self.dtype} over {self.ranks} ranks by {self.wires}"
        return f"{what} at {' < '.join(self.lines)}"


@dataclass
class Seen:
    """What the rank did since the last `take`."""

    waits: list[Wait] = field(default_factory=list)
    pageable: list[Wait] = field(default_factory=list)
    """Copies between the device and host memory that is not pinned, which were meant not to wait."""
    collectives: list[Collective] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Names of collectives and of our kernels, as they were started."""
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Of every tensor that was made on the GPU."""
    emptied: int = 0
    """Calls of torch.cuda.empty_cache."""


class FakeEvent:
    """torch.cuda.Event, in numbers of operations instead of time."""

    def __init__(self, gpu: FakeGpu, *args: Any, **kwargs: Any) -> None:
        self._gpu, self._at = gpu, -1

    def record(self, stream: Any = None) -> None:
        self._at = self._gpu.enqueue()

    def query(self) -> bool:
        return self._at <= self._gpu.passed

    def synchronize(self) -> None:
        if self._at > self._gpu.passed:
            self._gpu.wait("Event.synchronize")

    def wait(self, stream: Any = None) -> None:
        """A stream waits, not the host."""

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.query() and end.query()):
            raise FakeCudaError("elapsed_time of an event that has not passed")
        return float(end._at - self._at)


class FakeStream:
    """torch.cuda.Stream, and what torch.cuda.stream(…) gives. All streams are one queue here."""

    device, device_index, device_type, stream_id, cuda_stream, priority = CUDA, 0, 1, 0, 0, 0

    def __init__(self, gpu: FakeGpu, *args: Any, **kwargs: Any) -> None:
        self._gpu = gpu

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self._gpu)
        event.record()
        return event

    def query(self) -> bool:
        return self._gpu.enqueued <= self._gpu.passed

    def synchronize(self) -> None:
        self._gpu.wait("Stream.synchronize")


class FakeGpu(TorchDispatchMode):
    """Sends what concerns the GPU to FakeTensorMode, which must be active below, and all else to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self._thread = threading.get_ident()
        self.enqueued = self.passed = 0
        self.meta_is_cuda = False
        """Whether "meta" is what C++ thinks of our tensors: wherever no model is built on it."""
        self._pinned: set[int] = set()
        self._arriving: dict[int, int] = {}
        """Pinned memory that a copy was enqueued to → number of that copy."""

    # ---- the device and the host ---------------------------------------------------------------------------------

    def enqueue(self) -> int:
        self.enqueued += 1
        return self.enqueued

    def take(self) -> Seen:
        """What was seen since the last call."""
        seen, self.seen = self.seen, Seen()
        return seen

    def wait(self, what: str) -> None:
        self.passed = self.enqueued
        if threading.get_ident() == self._thread:  # Other threads, as that of a save, hold up nobody.
            self.seen.waits.append(Wait(what, _lines()))

    def is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage()._cdata)
        return tensor

    def _to_device(self, source: Tensor, name: str, *, non_blocking: bool) -> None:
        if source.numel() == 0 or (non_blocking and self.is_pinned(source)):
            return
        if non_blocking:
            if source.numel() > _FEW:
                self.seen.pageable.append(Wait(f"{name} to the device", _lines()))
        else:
            self.wait(f"{name} to the device")

    def _to_host(self, target: Tensor, name: str, *, non_blocking: bool) -> None:
        """The copy that was enqueued arrives, as ones."""
        number = self.enqueue()
        with torch._C._DisableTorchDispatch():
            target.fill_(1)
        if non_blocking and self.is_pinned(target):
            self._arriving[target.untyped_storage()._cdata] = number
        else:
            self.wait(f"{name} to the host")

    # ---- operations ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is DEVICE_OF:
            return META if isinstance(args[0], FakeTensor) else func(*args)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            return self._communicate(func, args, tensors)
        ours = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        asked = self.asked_device(kwargs, ours)
        pinned = kwargs.get("pin_memory")
        if pinned:
            kwargs["pin_memory"] = False
        if not ours and (asked is None or asked.type != "cuda"):
            self._check_arrived(func, tensors)
            with torch._C._DisableTorchDispatch():
                made = func(*args, **kwargs)
            return self.pin(made) if pinned else made
        if func is _aten.record_stream.default:
            return None
        self._check_memory(func, ours)
        host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        if func is _aten._to_copy.default and asked is not None and asked.type == "cpu":
            with torch._C._DisableTorchDispatch():
                made = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            self._to_host(made, "a copy", non_blocking=False)
            return made
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            self._to_host(args[0], "copy_", non_blocking=_non_blocking(args, kwargs))
            return args[0]
        if func in (_aten._to_copy.default, _aten.copy_.default) and host:
            source, non_blocking = host[0], _non_blocking(args, kwargs)
            if not (non_blocking and self.is_pinned(source)):  # Else the queue reads it, not the host.
                self._check_arrived(func, host)
            self._to_device(source, func._opname, non_blocking=non_blocking)
            with torch._C._DisableTorchDispatch():
                blank = torch.empty_like(source, device="meta")
            args = (blank, *args[1:]) if func is _aten._to_copy.default else (args[0], *args[2:])
            if func is _aten.copy_.default:
                return args[0]
        elif func is _aten.index.Tensor or func is _aten.index_put_.default or func is _aten.index_put.default:
            args = self._index(func, args)
        elif func in _SYNCHRONISE:
            self.wait(func._opname)
            return self._made_up(func, args[0])
        elif func._opname.startswith("_fused_") and host:
            raise FakeCudaError(f"{func._opname} was given a CPU tensor: illegal memory access on a GPU")
        self.enqueue()
        if func.namespace == "cuda_ops":
            self.seen.order.append(func._opname)
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, FakeTensor):
                self.seen.shapes.add(tuple(leaf.shape))
                if leaf.fake_device.type != "cuda":
                    raise FakeCudaError(f"{func} made a tensor on {leaf.fake_device}")
        return made

    def _made_up(self, func: Any, tensor: FakeTensor) -> Any:
        """What the host reads, or on the GPU as many results as there may be."""
        if func is _aten._local_scalar_dense.default:
            return True if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1
        if func is _aten.nonzero.default:
            return torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64, device=CUDA)
        if func is _aten.masked_select.default:
            return torch.empty(tensor.numel(), dtype=tensor.dtype, device=CUDA)
        return True  # equal

    def asked_device(self, kwargs: dict[str, Any], ours: list[FakeTensor]) -> torch.device | None:
        device = kwargs.get("device")
        if device is None:
            return None
        device = torch.device(device)
        # What C++ makes from the options of another tensor: to C++ all of ours are on meta.
        if device.type == "meta" and (ours or self.meta_is_cuda):
            device = CUDA
        if device.type == "cuda":
            device = CUDA if device.index is None else device
            if device != CUDA:
                raise FakeCudaError(f"{device}: this process sees one GPU, {CUDA}")
        kwargs["device"] = device
        return device

    def _check_memory(self, func: Any, ours: list[FakeTensor]) -> None:
        for tensor in ours:
            if tensor.numel() and tensor.untyped_storage().nbytes() == 0 and not _is_view(func):
                raise FakeCudaError(f"{func} takes a tensor {tuple(tensor.shape)} whose memory was given up")

    def _check_arrived(self, func: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors if self._arriving else ():
            key = tensor.untyped_storage()._cdata
            if self._arriving.get(key, 0) > self.passed and not _is_view(func):
                raise FakeCudaError(f"{func} reads pinned memory before the copy to it has arrived")

    def _index(self, func: Any, args: Any) -> Any:
        """Masks have the host ask how many elements they choose, unless one number is written to all of them."""
        indices = [index for index in args[1] if index is not None]
        writes_one = func is not _aten.index.Tensor and args[2].numel() == 1
        made = list(args[1])
        for place, index in enumerate(made):
            if index is not None and not isinstance(index, FakeTensor):
                self._to_device(index, "an index", non_blocking=False)
                made[place] = torch.empty(index.shape, dtype=index.dtype, device=CUDA)
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            if not writes_one:
                self.wait("indexing by a mask")
            # As many as the mask has elements; what is done to them has the same shape whatever they are.
            chosen = [i for index in made if index is not None for i in self._all_of(index)]
            made = chosen
        return args[0], made, *args[2:]

    def _all_of(self, index: Tensor) -> list[Tensor]:
        if index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return [torch.empty(index.numel(), dtype=torch.int64, device=CUDA) for _ in range(index.dim())]

    # ---- collectives ---------------------------------------------------------------------------------------------

    def _communicate(self, func: Any, args: Any, tensors: list[Tensor]) -> Any:
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
        kinds = {"cuda" if isinstance(tensor, FakeTensor) else "cpu" for tensor in tensors}
        if len(kinds) > 1:
            raise FakeCudaError(f"{func._opname} of tensors of the CPU and of the GPU together")
        on_gpu = kinds == {"cuda"}
        wanted = backend_of.get(group.group_name, "")
        if (wanted == "gloo" and on_gpu) or (wanted == "nccl" and not on_gpu):
            raise FakeCudaError(f"{func._opname} of tensors of {kinds} in a group of {wanted}")
        self._check_memory(func, [tensor for tensor in tensors if isinstance(tensor, FakeTensor)])
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise FakeCudaError(f"{func._opname} of a tensor that is not contiguous")
        wires = "nccl" if on_gpu else "gloo"
        self.seen.order.append(func._opname)
        self.seen.collectives.append(
            Collective(
                name=func._opname,
                wires=wires,
                group=group.group_name,
                ranks=group.size(),
                dtype=tensors[0].dtype if tensors else None,
                nbytes=sum(tensor.nbytes for tensor in tensors),
                lines=_lines(),
            )
        )
        if on_gpu:
            self.enqueue()
        work = FakeWork().boxed()
        returns_tensors = len(func._schema.returns) == 2
        return (args[0], work) if returns_tensors else work


backend_of: dict[str, str] = {}
"""Name of a group → the backend that it was asked for with."""


def _is_group(script: Any) -> bool:
    return "ProcessGroup" in script._type().qualified_name()


def _is_view(func: Any) -> bool:
    return func.is_view or func in (_aten.detach.default, _aten.alias.default)


def _non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


_OURS = ("/speedlab/", "/cuda_ops/")


def _lines() -> tuple[str, ...]:
    """The innermost lines of the package on the stack, inner first."""
    found = []
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if any(part in path for part in _OURS) and "/tests/" not in path:
            found.append(f"{Path(path).name}:{line} {frame.f_code.co_name}")
        if len(found) == 3:
            break
    return tuple(found)

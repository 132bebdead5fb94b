"""One rank of a GPU world without a GPU: tensors on "cuda" have shapes and no values, collectives go nowhere.

Inside `fake_cuda(rank=…, world_size=…)`

1. torch.cuda is there: `Stream`, `Event` and figures that are made up; an event has passed once the host has waited for
   something that was enqueued behind it.
2. Operations on tensors of "cuda" are carried out by FakeTensorMode, which refuses CPU tensors among them. CPU tensors
   are real. Memory that was given up (a Storage of size 0) must not be read or written.
3. Collectives of torch.distributed go to its fake backend and are listed. NCCL takes tensors of the GPU only.
4. Every time the host would wait for the device is listed with the line that made it wait, and what it would read
   there is 1. Copies to the device from memory that is not pinned are listed too; what is copied to pinned memory
   must not be read before it has arrived.

An operation whose number of results depends on values (nonzero) gives the most there may be.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_gpu import DEVICE_OF, META, FakeEvent, FakeGpu, FakeStream, backend_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import speedlab.comm.group as group_module
import speedlab.engine.entry_points as entry_module
import speedlab.parallel.zero.inspect as inspect_module
from speedlab.comm import Group, leave
from speedlab.comm.transports.select import GroupLink
from speedlab.engine.step_reduction import reduce_step

GIB = 2**30

_SHARE, _COLLECT = Group.share, Group.collect


@contextmanager
def fake_cuda(*, rank: int, world_size: int) -> Iterator[FakeGpu]:
    """This process is `rank` of `world_size` ranks, each with a GPU of its own. Everything is as before afterwards."""
    gpu = FakeGpu()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        for patch in _patches(gpu):
            stack.enter_context(patch)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(_leave)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # torch.tensor(…, device="cuda") makes it on the CPU and copies, where modes see it.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(fake)
        stack.enter_context(gpu)
        yield gpu


@contextmanager
def groups_talk() -> Iterator[None]:
    """Inside, what ranks tell each other really goes through the group; only what this rank says itself arrives."""
    with mock.patch.object(Group, "share", _SHARE), mock.patch.object(Group, "collect", _COLLECT):
        yield


def _leave() -> None:
    leave()
    backend_of.clear()


def _patches(gpu: FakeGpu) -> Iterator[Any]:
    cuda, put = torch.cuda, mock.patch.object
    constants = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "a GPU that is made up",
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (60 * GIB, 80 * GIB),
        "memory_reserved": 4 * GIB,
        "memory_allocated": 2 * GIB,
        "max_memory_reserved": 4 * GIB,
        "max_memory_allocated": 2 * GIB,
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
    }
    for name, value in constants.items():
        yield put(cuda, name, lambda *args, value=value, **kwargs: value)
    for name in (
        "_lazy_init",
        "set_device",
        "reset_peak_memory_stats",
        "set_rng_state",
        "manual_seed",
        "manual_seed_all",
    ):
        yield put(cuda, name, lambda *args, **kwargs: None)
    state = torch.zeros(16, dtype=torch.uint8)
    properties = SimpleNamespace(name="a GPU that is made up", total_memory=80 * GIB, major=9, minor=0)
    yield put(cuda, "get_rng_state", lambda *args: state.clone())  # The host keeps it.
    yield put(cuda, "get_device_properties", lambda *args: properties)
    yield put(cuda, "memory_stats", lambda *args: Counter())
    yield put(cuda, "Event", _kind(FakeEvent, gpu))
    yield put(cuda, "Stream", _kind(FakeStream, gpu))
    for name in ("current_stream", "default_stream", "stream"):
        yield put(cuda, name, lambda *args: FakeStream(gpu))
    yield put(cuda, "synchronize", lambda *args: gpu.wait("torch.cuda.synchronize"))
    yield put(cuda, "empty_cache", lambda: setattr(gpu.seen, "emptied", gpu.seen.emptied + 1))
    yield put(Tensor, "is_pinned", lambda tensor, *args: gpu.is_pinned(tensor))
    yield put(Tensor, "pin_memory", lambda tensor, *args: gpu.pin(tensor.clone()))
    yield from _tensor_patches(gpu)
    yield from _group_patches()


def _kind(kind: type, gpu: FakeGpu) -> type:
    """`kind` as a class whose constructor takes what torch's takes."""
    return type(kind.__name__, (kind,), {"__init__": lambda self, *args, **kwargs: kind.__init__(self, gpu)})


def _tensor_patches(gpu: FakeGpu) -> Iterator[Any]:
    """To Python a tensor is on "cuda"; to C++ on "meta", which has no streams and so needs no torch with CUDA."""
    dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]  # it is a class method
    dispatch_mode = FakeTensorMode.__torch_dispatch__

    def of_tensor(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return META if func is DEVICE_OF else dispatch(cls, func, types, args, asked(args, kwargs))

    def of_mode(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return META if func is DEVICE_OF else dispatch_mode(self, func, types, args, asked(args, kwargs))

    def asked(args: Any, kwargs: Any) -> dict[str, Any]:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:  # Operations that FakeTensorMode takes apart come by here only.
            gpu.asked_device(kwargs, [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)])
        return kwargs

    def tolist(tensor: FakeTensor) -> Any:
        gpu.wait("tolist")
        with torch._C._DisableTorchDispatch():
            return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()

    def totals(*args: Any, **kwargs: Any) -> Any:
        # Every number is one here, and nobody has written, nor do gradients differ.
        return replace(reduce_step(*args, **kwargs), written=0, differing=0, lost=0)

    yield mock.patch("speedlab.engine.train_step.reduce_step", totals)
    yield mock.patch.object(FakeTensor, "__torch_dispatch__", classmethod(of_tensor))
    yield mock.patch.object(FakeTensorMode, "__torch_dispatch__", of_mode)
    yield mock.patch.object(FakeTensor, "is_cuda", property(lambda t: t.fake_device.type == "cuda"), create=True)
    yield mock.patch.object(FakeTensor, "is_cpu", property(lambda t: t.fake_device.type == "cpu"), create=True)
    yield mock.patch.object(FakeTensor, "is_meta", property(lambda t: False), create=True)
    yield mock.patch.object(FakeTensor, "tolist", tolist)
    yield mock.patch.object(FakeTensor, "data_ptr", _address, create=True)


def _address(tensor: Tensor) -> int:
    """Tells memory apart as an address does."""
    return tensor.untyped_storage()._cdata * 2**24 + tensor.storage_offset() * tensor.itemsize


def _group_patches() -> Iterator[Any]:
    """Groups of any backend are the fake one. What ranks tell each other is what this one would say."""
    new_group = dist.new_group

    def made(ranks: Any = None, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = new_group(ranks, *args, backend="fake", **kwargs)
        if backend is not None:
            backend_of[group.group_name] = backend
        return group

    def reported(value: Any) -> Any:
        return json.loads(json.dumps(value))

    yield mock.patch.object(dist, "new_group", made)
    # The made-up backend stands for NCCL.
    real_link = group_module.link_of
    fabric = lambda group, kind: GroupLink.FABRIC if group is not None and kind == "cuda" else real_link(group, kind)  # noqa: E731
    yield mock.patch.object(group_module, "link_of", fabric)
    yield mock.patch.object(Group, "share", lambda self, value, source=0: reported(value))
    yield mock.patch.object(Group, "collect", lambda self, value: [reported(value) for _ in range(self.size)])
    for module in (entry_module, inspect_module):
        yield mock.patch.object(module, "exchange_numbers", lambda own, ranks: [list(own) for _ in ranks])

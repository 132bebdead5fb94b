"""The GPU that is made up, itself: what it must notice, it notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_cuda import fake_cuda
from fake_gpu import CUDA, FakeCudaError, FakeGpu

from speedlab.comm import Group


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_cuda(rank=0, world_size=2) as fake:
        fake.meta_is_cuda = True
        yield fake


def test_devices_do_not_mix(gpu) -> None:
    x = torch.ones(3, device=CUDA)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([x, torch.ones(3)])
    assert (x + torch.ones(())).device == CUDA  # A number.
    assert gpu.seen.waits == []


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor(1.0, device=CUDA),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.ones(3).copy_(x, non_blocking=True),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_look_is_a_wait(gpu, look) -> None:
    x = torch.ones(3, device=CUDA)
    assert gpu.seen.waits == []
    look(x)
    assert len(gpu.seen.waits) == 1


def test_memory_that_was_given_up_is_not_read(gpu) -> None:
    x = torch.ones(4, device=CUDA)
    view = x[1:3]
    x.untyped_storage().resize_(0)
    with pytest.raises(FakeCudaError, match="given up"):
        view * 2
    x.untyped_storage().resize_(16)
    assert (view * 2).shape == (2,)


def test_pinned_memory_is_read_when_the_copy_is_there(gpu) -> None:
    x = torch.ones(4, device=CUDA)
    place = torch.empty(4, pin_memory=True)
    assert place.is_pinned()
    place.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    with pytest.raises(FakeCudaError, match="before"):
        place.sum()
    event.synchronize()
    assert event.query()
    assert place.sum() == 4
    assert len(gpu.take().waits) == 1
    torch.empty(4, device=CUDA).copy_(place, non_blocking=True)
    torch.empty(64, device=CUDA).copy_(torch.empty(64), non_blocking=True)
    seen = gpu.take()
    assert (len(seen.waits), len(seen.pageable)) == (0, 1)


def test_everything_is_as_before_afterwards() -> None:
    before = torch.cuda.Event, torch.cuda.is_available(), Group.share
    with fake_cuda(rank=1, world_size=4) as fake:
        assert torch.cuda.is_available()
        assert torch.ones(3, device="cuda").device == CUDA
        assert not torch.ones(3).is_cuda
        assert torch.distributed.get_rank() == 1
        assert fake.seen.waits == []
    assert before == (torch.cuda.Event, torch.cuda.is_available(), Group.share)
    assert not torch.distributed.is_initialized()
    assert torch.ones(3).sum().item() == 3

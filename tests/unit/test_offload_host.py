"""speedlab.offload.host_store: states in the host's memory behave as those on disk, and cost nothing where they are
used."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_cuda import fake_cuda
from hypothesis import given
from hypothesis import strategies as st

from speedlab.comm import CommStats
from speedlab.hardware import memory_bytes
from speedlab.offload import HostStore, OffloadError
from speedlab.offload import host_store as host_module
from speedlab.placement import MemoryKind

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_turn_is_the_state_itself(dtype: torch.dtype) -> None:
    traffic = CommStats()
    store = HostStore(traffic, CPU)
    kept = store.keep(10, dtype)
    assert (store.where, kept.where, kept.numel, kept.dtype) == (MemoryKind.HOST, MemoryKind.HOST, 10, dtype)
    for values in (True, False):
        transfer = kept.fetch(values=values)
        assert transfer.over
        transfer.wait()
        kept.tensor.add_(1)
        kept.leave(changed=True)
    kept.fetch()
    assert kept.tensor.tolist() == [2] * 10
    assert not traffic.link_bytes, "nothing has moved"


@given(st.data())
def test_any_sequence_of_calls_is_as_plain_tensors(data: st.DataObject) -> None:
    store = HostStore(CommStats(), CPU)
    dtype = data.draw(st.sampled_from(DTYPES))
    kept, plain = store.keep(100, dtype), torch.zeros(100, dtype=dtype)
    for step in range(data.draw(st.integers(1, 20))):
        start = data.draw(st.integers(0, 99))
        stop = data.draw(st.integers(start, 100))
        into = torch.empty(stop - start, dtype=dtype)
        match data.draw(st.sampled_from(["turn", "read", "write"])):
            case "turn":
                kept.fetch().wait()
                assert kept.tensor.equal(plain)
                reading = kept.read(into, start)
                writing = kept.write(torch.full((1,), step, dtype=dtype), start)
                again = kept.fetch()
                assert not any(transfer.over for transfer in (reading, writing, again))
                kept.tensor.add_(1)
                plain += 1
                expected = plain[start:stop].clone()
                plain[start] = step
                kept.leave(changed=True)
                for transfer in (reading, writing, again):
                    assert transfer.over
                    transfer.wait()
                assert into.equal(expected)
                assert kept.tensor.equal(plain)
                kept.leave(changed=False)
            case "read":
                kept.read(into, start).wait()
                assert into.equal(plain[start:stop])
            case "write":
                kept.write(into.fill_(step), start).wait()
                plain[start:stop] = step
    store.flush()


def test_what_waits_for_a_turn_to_end_can_be_interrupted_and_goes_on() -> None:
    kept = HostStore(CommStats(), CPU).keep(5, torch.float32)
    kept.fetch()
    into = torch.empty(5)
    reading = kept.read(into)
    waiting = threading.Thread(target=reading.wait)
    waiting.start()
    kept.tensor.fill_(3)
    kept.leave(changed=True)
    waiting.join(30)
    assert not waiting.is_alive()
    assert into.tolist() == [3] * 5


def test_bytes_kept_are_told_and_given_up() -> None:
    store = HostStore(CommStats(), CPU)
    one, _ = store.keep(10, torch.float32), store.keep(3, torch.uint8)
    assert store.nbytes == 43
    assert store.capacity_bytes == memory_bytes()[0]
    one.drop()
    one.drop()
    assert store.nbytes == 3
    with pytest.raises(OffloadError, match="was dropped; `keep` a new one"):
        one.fetch()
    store.close()
    store.close()
    assert store.nbytes == 0


def test_a_host_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "memory_bytes", lambda: (4 << 30, 1 << 30))
    store = HostStore(CommStats(), CPU)
    with pytest.raises(OffloadError, match=r"has 1\.000 GiB of memory left and 2\.000 GiB are needed"):
        store.keep(1 << 29, torch.float32)
    assert store.nbytes == 0


def test_what_does_not_fit_is_refused() -> None:
    kept = HostStore(CommStats(), CPU).keep(10, torch.float32)
    for tensor, start in ((torch.zeros(5), 6), (torch.zeros(5), -1), (torch.zeros(5, dtype=torch.float64), 0)):
        for call in (kept.read, kept.write):
            with pytest.raises(ValueError, match=r"of a state of 10 elements of torch\.float32"):
                call(tensor, start)
    with pytest.raises(RuntimeError, match="`fetch` the state first"):
        _ = kept.tensor
    with pytest.raises(RuntimeError, match="`fetch` the state first"):
        kept.leave(changed=False)


def test_parameters_are_read_into_and_written_from() -> None:
    kept = HostStore(CommStats(), CPU).keep(3, torch.float32)
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    kept.write(parameter).wait()
    kept.fetch()
    assert not kept.tensor.requires_grad
    kept.tensor.mul_(2)
    kept.leave(changed=True)
    kept.read(parameter).wait()
    assert parameter.tolist() == [2, 4, 6]
    assert parameter.is_leaf


def test_beside_a_gpu_it_is_pinned_and_copies_wait_for_nothing() -> None:
    with fake_cuda(rank=0, world_size=1) as gpu:
        traffic = CommStats()
        store = HostStore(traffic, torch.device("cuda"))
        kept = store.keep(100, torch.float32)
        on_device = torch.ones(40, device="cuda")
        kept.read(on_device, 60).wait()
        kept.write(on_device, 10)
        assert not gpu.take().waits, "the host waits for the device at the next turn only"
        kept.fetch().wait()
        assert kept.tensor.is_pinned()
        kept.leave(changed=True)
        assert traffic.link_bytes == {"host copy": 320}

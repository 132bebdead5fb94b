"""speedlab.comm.shared.shared_tensors: the arena's blocks, whatever passes through it and whenever the collector
runs."""

from __future__ import annotations

import ctypes
import itertools
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speedlab.comm.shared import shared_tensors
from speedlab.comm.shared.memfd import AnonymousSegment
from speedlab.comm.shared.shared_tensors import Arena, PeerMemory, arena

PAGE = 4096


def in_a_process(body: str, *, seconds: float = 60) -> str:
    """What a fresh process prints; one that hangs fails the test."""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def resident_shared() -> int:
    """Bytes of shared memory that this process has in its resident set."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("RssShmem:")).split()[1]) * 1024


@pytest.mark.timeout(120)
def test_a_million_temporaries_pass_beside_one_that_lives() -> None:
    own = Arena()
    living = own.empty(5, torch.float32).fill_(7)
    mapped = None
    for k in range(1_000_000):
        passing = own.empty(8, torch.float32)
        if k % 1000 == 0:
            assert passing.tolist() == [0.0] * 8, k
            passing.fill_(k + 1)
        if k == 10:
            mapped = len(own._extents)
    del passing
    assert living.tolist() == [7.0] * 5
    assert own.nbytes == 20
    assert len(own._extents) == mapped == 1


COLLECTED = """
import gc, torch
from speedlab.comm.shared.shared_tensors import Arena
own = Arena()
class Cycle:
    def __init__(self):
        self.me, self.tensor = self, own.empty(300, torch.float32)
        assert self.tensor.sum() == 0
        self.tensor.fill_(1)
gc.set_threshold(1)
for _ in range(20_000):
    Cycle()
gc.set_threshold(700, 10, 10)
gc.collect()
print(own.nbytes)
"""


def test_the_collector_may_run_at_every_allocation() -> None:
    assert in_a_process(COLLECTED) == "0"


MANY = """
import os, resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from speedlab.comm.shared import arena
tensors = [arena().empty(k + 1, torch.float32).fill_(k) for k in range(2000)]
assert all(tensor.sum().item() == k * (k + 1) for k, tensor in enumerate(tensors))
print(len(os.listdir("/proc/self/fd")))
"""


def test_living_tensors_take_no_descriptors() -> None:
    assert int(in_a_process(MANY)) <= 64


def test_blocks_never_overlap_and_are_zeros_again() -> None:
    own, rng = Arena(), random.Random(5)
    held: dict[int, tuple[Tensor, int]] = {}
    for k in range(1000):
        if held and rng.random() < 0.5:
            tensor, value = held.pop(rng.choice(list(held)))
            assert tensor.eq(value).all()
            del tensor
        numel = rng.choice([1, 100, PAGE, PAGE + 1, 3 * PAGE, 40_000, 1_000_000])
        tensor = own.empty(numel, torch.uint8)
        assert not tensor.any()
        held[k] = tensor.fill_(k % 255 + 1), k % 255 + 1
        del tensor
        if len(held) > 60:
            held.pop(min(held))
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor, _ in held.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(tensor.eq(value).all() for tensor, value in held.values())
    assert own.nbytes == sum(tensor.nbytes for tensor, _ in held.values())
    held.clear()
    assert own.nbytes == 0


def test_memory_goes_back_to_the_system_when_a_tensor_is_dropped() -> None:
    own = Arena()
    before = resident_shared()
    tensor = own.empty(32 << 20, torch.uint8).fill_(1)
    assert resident_shared() - before >= 32 << 20
    del tensor
    assert resident_shared() - before < 1 << 20, "at once, not at the next allocation"


def test_free_neighbours_join_to_what_a_larger_tensor_needs() -> None:
    own = Arena()
    many = [own.empty(1 << 20, torch.uint8) for _ in range(64)]
    assert len(own._extents) == 1
    del many
    assert own.empty(64 << 20, torch.uint8).fill_(3).eq(3).all()
    assert len(own._extents) == 1


def test_larger_tensor_than_an_extent_gets_one() -> None:
    own = Arena()
    tensor = own.empty(100 << 20, torch.uint8)
    tensor[-1] = 9
    found = own.find(tensor.data_ptr() + 5, 10)
    assert found is not None
    assert (found.extent, found.offset) == (0, 5)
    assert own.find(tensor.data_ptr() + 5, tensor.nbytes) is None, "beyond its end"
    assert own.find(torch.zeros(1).data_ptr(), 4) is None, "not of the arena"


def test_a_view_or_a_pin_keeps_the_block() -> None:
    own = Arena()
    tensor = own.empty(10_000, torch.uint8).fill_(4)
    view = tensor[5000:5010]
    del tensor
    assert own.nbytes == 10_000
    place = own.find(view.data_ptr(), view.nbytes)
    del view
    assert place is not None
    assert own.nbytes == 10_000
    assert own.empty(10_000, torch.uint8).sum() == 0
    assert place.block.sum() == 40_000
    del place
    assert own.nbytes == 0


def test_kept_until_it_is_over() -> None:
    own, over = Arena(), threading.Event()
    own.keep([own.empty(100, torch.uint8)], over.is_set)
    assert own.nbytes == 100
    over.set()
    assert own.nbytes == 0


def test_a_peer_reads_where_it_was_told() -> None:
    """Through a second mapping, as another process has it; extents that come later are found too."""
    peer = PeerMemory.of(arena().handle)
    assert PeerMemory.of(arena().handle) is peer, "one for all groups"
    tensors = [arena().empty(numel, torch.uint8) for numel in (10, 70 << 20, 200 << 20)]
    for k, tensor in enumerate(tensors):
        tensor[-8:] = k + 1
        place = arena().find(tensor.data_ptr(), tensor.nbytes)
        assert place is not None
        address = peer.address(place.extent, place.offset)
        assert address != tensor.data_ptr()
        assert ctypes.string_at(address + tensor.nbytes - 8, 8) == bytes([k + 1] * 8)
    assert not peer.ended


FORKED = """
import os, torch
torch.set_num_threads(1)
from speedlab.comm.shared import arena
held = [arena().empty(100_000, torch.uint8).fill_(6)]
pid = os.fork()
if pid == 0:
    held.clear()
    own = arena().empty(100_000, torch.uint8).fill_(1)
    os._exit(0 if own.eq(1).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(held[0].eq(6).all().item())
"""


def test_a_forked_child_leaves_its_parents_memory_alone() -> None:
    assert in_a_process(FORKED) == "True"


def test_no_memory_is_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words by which a run's error says what would have fitted."""
    own = Arena()
    text = Path("/proc/self/status").read_text()
    used = int(next(line for line in text.splitlines() if line.startswith("VmSize:")).split()[1]) * 1024
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), before[1]))
    try:
        with pytest.raises(MemoryError, match=r"out of memory: tried to allocate 536870912 bytes of shared memory"):
            own.empty(512 << 20, torch.uint8)
        with pytest.raises(MemoryError, match=r"Cannot allocate memory: tried to allocate 536870912 bytes"):
            AnonymousSegment.create(512 << 20)
        monkeypatch.setattr(shared_tensors, "_SMALLEST_EXTENT", 1 << 40)
        tensor = own.empty(1000, torch.uint8)  # What is asked for fits, though nothing beyond.
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert tensor.sum() == 0

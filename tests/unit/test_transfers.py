"""speedlab.comm without processes: transfers, host copies, errors that tell of a peer, which file imports which."""

from __future__ import annotations

import ast
import errno
import threading
from datetime import timedelta
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import speedlab.comm
from speedlab.comm import CommStats, HostCopies, PeerLost, Transfer
from speedlab.comm.errors import reason_of, reports_lost_peer
from speedlab.comm.process_groups import ProcessGroups
from speedlab.comm.transports.base import Transport
from speedlab.comm.transports.nccl import Exchanging, rounds_often
from speedlab.comm.transports.select import GroupLink, choose, link_of

CPU = torch.device("cpu")


# ---- transfers -------------------------------------------------------------------------------------------------------


def test_transfer_is_counted_when_started_and_waited_for_once() -> None:
    traffic, calls = CommStats(phase="forward"), []
    transfer = Transfer(lambda: calls.append(1), traffic, CPU, name="all_gather", link="gloo", nbytes=40)
    assert (transfer.name, transfer.link, transfer.nbytes, transfer.stream) == ("all_gather", "gloo", 40, None)
    assert not transfer.over
    transfer.wait()
    transfer.wait()
    assert transfer.over
    assert calls == [1]
    assert traffic.link_bytes == {"gloo": 40}
    counted = traffic.take()
    assert (counted.sent_bytes, counted.moved_bytes) == ({"all_gather": 40}, {})
    assert counted.sent_through == {"all_gather": {"gloo": 40}}
    assert (set(counted.peer_seconds), counted.place_seconds) == ({"forward"}, {})
    assert traffic.take() == ({}, {}, {}, {}, {}, 0, 0)


def test_ways_to_the_host_and_the_disk_are_counted_apart() -> None:
    traffic = CommStats(phase="optimizer")
    for link, nbytes in (("disk read", 100), ("disk write", 60), ("host copy", 8), ("gloo", 40)):
        Transfer(lambda: None, traffic, CPU, link=link, nbytes=nbytes).wait()
    traffic.phase = ""
    Transfer(lambda: None, traffic, CPU, link="disk read", nbytes=1).wait()  # A save between two steps, say.
    counted = traffic.take()
    assert counted.moved_bytes == {"disk read": 101, "disk write": 60, "host copy": 8}
    assert counted.sent_bytes == {}
    assert set(counted.peer_seconds) == set(counted.place_seconds) == {"optimizer"}


def test_what_a_thread_waits_beside_the_step_is_in_no_phase() -> None:
    traffic = CommStats(phase="forward")

    def alongside() -> None:
        with traffic.alongside_the_step():
            Transfer(lambda: None, traffic, CPU, link="disk read", nbytes=100).wait()

    for work in (alongside, Transfer(lambda: None, traffic, CPU, link="disk read", nbytes=1).wait):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    counted = traffic.take()
    assert counted.moved_bytes == {"disk read": 101}
    assert set(counted.place_seconds) == {"forward"}, "of another thread of the step, as autograd's are"
    assert traffic._alongside == set()


def test_transfer_that_failed_fails_again() -> None:
    def fail() -> None:
        raise PeerLost("rank 1 left")

    transfer = Transfer(fail, CommStats(), CPU)
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 left"):
            transfer.wait()


def test_transfer_may_be_over_by_itself() -> None:
    done = [False]
    transfer = Transfer(lambda: None, CommStats(), CPU, over=lambda: done[0])
    assert not transfer.over
    done[0] = True
    assert transfer.over


def test_host_copies_on_a_cpu_are_copies() -> None:
    traffic = CommStats()
    copies = HostCopies(CPU, traffic)
    source, into = torch.arange(6, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    for copy in (copies.to_device, copies.to_host):
        into.zero_()
        transfer = copy(source, into)
        assert transfer.over
        transfer.wait()
        assert into.equal(source)
    assert traffic.link_bytes == {"host copy": 24}
    assert traffic.take()[0] == {}, "no collective has sent it"


def test_host_copies_of_what_does_not_match_are_refused() -> None:
    copies = HostCopies(CPU, CommStats())
    with pytest.raises(ValueError, match=r"from \(6,\) torch.float32 to \(3,\) torch.float32; expected contiguous"):
        copies.to_host(torch.zeros(6), torch.zeros(3))
    with pytest.raises(ValueError, match=r"torch.float32 to \(6,\) torch.float64"):
        copies.to_device(torch.zeros(6), torch.zeros(6, dtype=torch.float64))


# ---- errors ----------------------------------------------------------------------------------------------------------

GLOO_PLACE = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] "


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("rank 1 left"),
        RuntimeError(GLOO_PLACE + "Connection closed by peer [127.0.0.1]:5000"),
        RuntimeError(GLOO_PLACE + "Read error [127.0.0.1]:5000: Connection reset by peer"),
        RuntimeError(GLOO_PLACE + "writev [127.0.0.1]:5000: Broken pipe"),
        RuntimeError("[buffer.cc:72] Timed out waiting 300000ms for recv operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistNetworkError("The client socket has failed to connect"),
        dist.DistStoreError("wait timeout after 300000ms"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_errors_that_tell_of_a_lost_peer(error: RuntimeError) -> None:
    assert reports_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("out of memory: tried to allocate 8 bytes of shared memory beside 0 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
        dist.DistBackendError("NCCL error: unhandled cuda error. Cuda failure 'out of memory'"),
        dist.DistBackendError("NCCL error: ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ValueError("a list of 3 tensors, expected one for each of the 4 ranks"),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_errors_of_this_rank_itself(error: Exception) -> None:
    assert not reports_lost_peer(error)


def test_reason_is_a_short_line() -> None:
    error = RuntimeError(GLOO_PLACE + "Connection closed by peer [127.0.0.1]:5000. This may indicate a remote crash\nx")
    assert reason_of(error) == "Connection closed by peer [127.0.0.1]:5000"
    assert reason_of(RuntimeError("")) == "RuntimeError"


# ---- which transport -------------------------------------------------------------------------------------------------


class ProcessGroupNCCL:
    """Stands for torch's, which a torch without NCCL lacks."""


class Mixed:
    """A process group of a world of GPUs: "cpu:gloo,cuda:nccl"."""

    def __init__(self) -> None:
        self.gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=9))

    def _get_backend(self, device: torch.device) -> object:
        match device.type:
            case "cpu":
                return self.gloo
            case "cuda":
                return ProcessGroupNCCL()
        raise RuntimeError(f"No backend type associated with device type {device.type}")


def test_link_depends_on_where_the_flat_lives() -> None:
    group = Mixed()
    links = {kind: link_of(group, kind) for kind in ("cpu", "cuda", "meta")}
    assert links == {"cpu": GroupLink.GLOO, "cuda": GroupLink.FABRIC, "meta": GroupLink.OTHER}
    assert link_of(None, "cuda") is GroupLink.PROCESS
    assert link_of(group.gloo, "cpu") is GroupLink.GLOO, "where ranks cannot share memory, gloo is the group itself"


@pytest.mark.parametrize(
    ("link", "name"),
    [
        (GroupLink.SHARED, "InPlace"),
        (GroupLink.HOSTS, "Transport"),
        (GroupLink.GLOO, "GlooPeers"),
        (GroupLink.FABRIC, "Exchanging"),
        (GroupLink.OTHER, "Transport"),
    ],
)
def test_transport_of_a_link(link: GroupLink, name: str) -> None:
    class Met:
        meeting = None

    traffic = CommStats()
    made = choose(link, ProcessGroups(Met()), 2, 0, CPU, traffic.buffers)
    assert type(made).__name__ == name
    assert choose(GroupLink.PROCESS, ProcessGroups(None), 1, 0, CPU, traffic.buffers) is None


def test_sums_are_taken_wide_where_their_own_dtype_would_round_twice() -> None:
    assert rounds_often(torch.bfloat16, 3)
    assert not rounds_often(torch.bfloat16, 2)
    assert not rounds_often(torch.float32, 8)
    assert not rounds_often(torch.int16, 8)
    assert issubclass(Exchanging, Transport)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_no_circle_between_the_files_of_comm() -> None:
    """Imports inside functions and packages' own files count; a circle raises CycleError, which names it."""
    root = Path(speedlab.comm.__file__).parent
    files = {}
    for path in root.rglob("*.py"):
        parts = ("speedlab", "comm", *path.relative_to(root).with_suffix("").parts)
        files[".".join(part for part in parts if part != "__init__")] = path
    needs: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                within = [f"{node.module}.{alias.name}" for alias in node.names]
                needs[name] |= {found if found in files else node.module for found in within} & files.keys()
            elif isinstance(node, ast.Import):
                needs[name] |= {alias.name for alias in node.names} & files.keys()
    order = list(TopologicalSorter(needs).static_order())
    assert order.index("speedlab.comm.shared") < order.index("speedlab.comm.group") < order.index("speedlab.comm")
    backend = "speedlab.comm.shared"
    outside = {needed for name in files if backend in name for needed in needs[name] if backend not in needed}
    leaves = {"speedlab.comm.errors", "speedlab.comm.timeouts", "speedlab.comm.own_note"}
    assert outside == leaves, "the backend knows nothing of what uses it"
    assert not any(needs[leaf] for leaf in leaves)

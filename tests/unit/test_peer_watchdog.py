"""speedlab.comm.peer_watchdog: a rank that leaves, or whose process ends, is known to its peers by name, and aborts
them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from speedlab.comm import PeerLost, world
from speedlab.comm import peer_watchdog as module
from speedlab.comm.peer_watchdog import PeerWatchdog

QUICK = 0.01


def looking(path: Path, size: int) -> tuple[list[PeerWatchdog], list[threading.Event]]:
    """The look-outs of so many ranks, all in this process, and what tells that each has aborted."""
    aborted = [threading.Event() for _ in range(size)]
    stores = [dist.PrefixStore("watch", dist.FileStore(str(path), size)) for _ in range(size)]
    return [PeerWatchdog(stores[k], k, size, aborted[k].set, seconds=QUICK) for k in range(size)], aborted


@pytest.mark.timeout(30)
def test_rank_that_failed_is_named_by_all_others(tmp_path: Path) -> None:
    watches, aborted = looking(tmp_path / "store", 3)
    for watch in watches:
        watch.check()
    watches[1].stop(failed=True)
    for rank in (0, 2):
        assert aborted[rank].wait(20)
        with pytest.raises(PeerLost, match=rf"^rank {rank} waited for a peer that left: rank 1 left$"):
            watches[rank].check()
        watches[rank].stop(failed=False)
    assert not aborted[1].is_set(), "it aborts its own by leaving"


@pytest.mark.timeout(30)
def test_rank_that_leaves_in_peace_disturbs_nobody(tmp_path: Path) -> None:
    watches, aborted = looking(tmp_path / "store", 2)
    watches[0].stop(failed=False)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    assert not dist.PrefixStore("watch", store).check(["left/0"])
    assert watches[1]._look() is None
    watches[1].stop(failed=False)
    assert not aborted[1].is_set()


@pytest.mark.timeout(60)
def test_rank_that_fails_with_the_one_that_serves_the_store_leaves_all_the_same(tmp_path: Path) -> None:
    """torchrun's store goes with its process; what is told through it reaches nobody any more."""
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    aborted = threading.Event()
    watch = PeerWatchdog(dist.TCPStore("127.0.0.1", server.port, 2, is_master=False), 1, 2, aborted.set, seconds=QUICK)
    del server
    assert aborted.wait(20)
    with pytest.raises(PeerLost, match="the store of the world is gone") as caught:
        watch.check()
    assert "\n" not in str(caught.value), "without torch's own stack"
    watch.stop(failed=True)
    assert not watch._thread.is_alive()


@pytest.mark.timeout(60)
def test_process_of_this_host_that_ends_is_noticed(tmp_path: Path) -> None:
    aborted = threading.Event()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        with mock.patch.object(module.os, "getpid", return_value=peer.pid):
            other = PeerWatchdog(store, 1, 2, lambda: None, seconds=3600)
        watch = PeerWatchdog(store, 0, 2, aborted.set, seconds=QUICK)
        watch.check()
        peer.kill()
        assert aborted.wait(20)
        with pytest.raises(PeerLost, match="the process of rank 1 has ended"):
            watch.check()
        for one in (watch, other):
            one.stop(failed=False)


@pytest.mark.parametrize(
    ("failed", "lost", "end"), [(True, None, "abort"), (False, None, "destroy"), (False, "x", "abort")]
)
def test_leaving_after_a_failure_aborts(failed: bool, lost: str | None, end: str) -> None:
    """Under NCCL; a stand-in for the look-out says that this is a world of GPUs."""
    watch = mock.Mock(lost=lost)
    with (
        mock.patch.object(world, "_watches", [watch]),
        mock.patch.object(world.dist, "is_initialized", return_value=True),
        mock.patch.object(world.dist, "destroy_process_group") as destroy,
        mock.patch.object(world.distributed_c10d, "_abort_process_group") as abort,
    ):
        world.leave(failed=failed)
    assert (abort.called, destroy.called) == (end == "abort", end == "destroy")
    watch.stop.assert_called_once_with(failed=failed or lost is not None)


def test_abort_reaches_every_group_that_has_communicators() -> None:
    class HostOnly:
        def _get_backend(self, device: object) -> object:
            raise RuntimeError("No backend type associated with device type cuda")

    class OnDevices:
        backend = mock.Mock()

        def _get_backend(self, device: object) -> object:
            return self.backend

    groups = {HostOnly(): 0, OnDevices(): 1, OnDevices(): 2}
    with mock.patch.object(world.distributed_c10d, "_world", mock.Mock(pg_map=groups)):
        world._abort_communicators()
    assert OnDevices.backend.abort.call_count == 2


def test_world_of_cpus_has_no_look_out() -> None:
    world.check_peers()
    assert world._watches == []

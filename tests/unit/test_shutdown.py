"""The end of clusters for whoever has no handle of them; supervisors are made up, the protocol is the real one."""

from __future__ import annotations

import math
import select
import threading
from pathlib import Path

import pytest

import speedlab.cluster.files.cluster_dir as homes
import speedlab.cluster.shutdown as ending
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState, known_clusters
from speedlab.cluster.supervisor.channel import Channel, listen
from speedlab.cluster.supervisor.client import Client, StartGivenUpError
from speedlab.cluster.supervisor.protocol import Cancel, ProtocolMessage
from speedlab.cluster.supervisor.server import Server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterDir:
    """The folder of a cluster of which nothing runs."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    home = ClusterDir("slurm-81")
    home.create("the token")
    return home


class WaitingSupervisor:
    """One whose start waits in a queue."""

    starting = "job 81 is queued, 3rd of 7 in a100 (Priority)"

    def __init__(self, *, is_ready: bool = False, ready_after: float = math.inf) -> None:
        """`ready_after`: times that it was asked whether it is."""
        self.is_ready, self.cancelled = is_ready, threading.Event()
        self._left = ready_after

    def ready(self, seconds: float) -> str | None:
        if self.cancelled.wait(0 if self.is_ready else seconds):
            raise ClusterError("the start of the cluster was cancelled; nothing is left of it")
        self._left -= 1
        return "the token" if self.is_ready or self._left < 0 else None

    def cancel_start(self) -> None:
        self.cancelled.set()

    def left(self, client: object) -> None:
        pass


def served(home: ClusterDir, supervisor: WaitingSupervisor) -> Server:
    return Server(listen(home.supervisor_socket), supervisor)  # pyright: ignore[reportArgumentType]


def test_a_start_that_waits_in_a_queue_is_given_up(home: ClusterDir) -> None:
    supervisor = WaitingSupervisor()
    server = served(home, supervisor)
    try:
        ending.cancel_start(home)
    finally:
        server.close()
    assert supervisor.cancelled.is_set()
    assert not home.path.exists()  # Whoever has started it is gone: it is cleaned up here.


def test_a_start_that_says_nothing_and_takes_a_second_is_given_up(home: ClusterDir) -> None:
    supervisor = WaitingSupervisor(ready_after=20)  # As one of engines on one host.
    supervisor.starting = ""
    server = served(home, supervisor)
    try:
        ending.cancel_start(home)
    finally:
        server.close()
    assert supervisor.cancelled.is_set()


def test_a_start_that_has_just_become_ready_is_left_alone(home: ClusterDir) -> None:
    server = served(home, supervisor := WaitingSupervisor(is_ready=True))
    try:
        with pytest.raises(ClusterError, match="has just become ready; stop it instead"):
            ending.cancel_start(home)
    finally:
        server.close()
    assert (supervisor.cancelled.is_set(), home.path.exists()) == (False, True)


def test_a_start_whose_supervisor_is_of_another_version_is_left_alone(
    home: ClusterDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has begun on hosts, as a job in a queue, nobody else would give back."""
    monkeypatch.setattr("speedlab.cluster.supervisor.protocol.VERSION", 3)
    send = Channel.send

    def slow(channel: Channel, message: ProtocolMessage) -> None:
        """A word behind the greeting comes when the supervisor has refused that and left."""
        if isinstance(message, Cancel):
            look = select.poll()
            look.register(channel.connection, select.POLLRDHUP)
            assert look.poll(10_000)
        send(channel, message)

    monkeypatch.setattr(Channel, "send", slow)
    server = served(home, supervisor := WaitingSupervisor())
    try:
        with pytest.raises(ClusterError, match=r"^the cluster's supervisor speaks version 3 .*, and this client 2: "):
            ending.cancel_start(home)
    finally:
        server.close()
    assert (supervisor.cancelled.is_set(), home.path.exists()) == (False, True)


def test_a_start_is_given_up_even_where_its_supervisor_ends_in_that_moment(home: ClusterDir) -> None:
    server = served(home, WaitingSupervisor())

    def given_up() -> bool:
        for client in server.clients:
            client.close()
        return True

    try:
        with pytest.raises(StartGivenUpError):  # Not as if it had died: then another one would be started.
            Client(home.supervisor_socket, lambda ranks, stream, text: None, given_up=given_up)
    finally:
        server.close()


def test_what_nobody_starts_is_removed_and_what_runs_is_not(home: ClusterDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ending.NotStartingError, match="no process starts cluster 'slurm-81' any more"):
        ending.cancel_start(home)
    state = ClusterState(
        name="slurm-81", token="the token", controller_pid=1, started=0.0, devices=(), engines=(), backend="shared"
    )
    home.write(state)
    ending.stop(home, "of one before")  # Another cluster has its name by now.
    assert home.path.exists()

    monkeypatch.setattr(homes, "is_alive", lambda pid, token: True)
    with pytest.raises(ClusterError, match="runs; stop it instead"):
        ending.remove(home)
    assert home.path.exists()

    (home.path / "cluster.json").write_text("{")
    ending.remove(home)
    assert not home.path.exists()


def test_a_cluster_whose_hosts_only_a_supervisor_gives_back_is_not_forgotten(
    home: ClusterDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "is_alive", lambda pid, token: True)
    home.write(
        ClusterState(
            name="slurm-81",
            token="the token",
            controller_pid=1,
            started=0.0,
            backend="shared",
            devices=(),
            engines=(),
            hosts=("a", "b"),
        )
    )
    with pytest.raises(ClusterError, match=r"was not stopped: .* Only its supervisor gives hosts back"):
        ending.stop(home, "the token")
    assert home.path.exists()


def test_a_folder_that_may_not_be_read_hides_no_other(home: ClusterDir, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ClusterDir("other")
    other.create("its token")
    file = home.path / "cluster.json"
    file.write_text("{}")
    read = Path.read_text

    def denied(path: Path, *arguments: str) -> str:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments)

    monkeypatch.setattr(Path, "read_text", denied)
    found = dict(known_clusters())
    assert found[other.path] is None
    assert str(found[file.parent]) == f"{file} may not be read by this user; give it the right to"

    def shut(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", shut)
    with pytest.raises(PermissionError):  # Not as if there were none.
        list(known_clusters())

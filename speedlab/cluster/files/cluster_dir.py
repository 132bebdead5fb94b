"""The folder of a cluster, below the IPython directory, readable by its owner only.

    <IPython directory>/profile_default/speedlab/<name>/    (<name>@<host>/ if another host has the name already)
        host             name of the cluster's host
        token            unique id of the cluster, written before its first process starts
        cluster.json     what runs: token, controller, engines and devices by rank
        changing         exists while engines are bound to another number of ranks
        interrupting     exists while ranks are interrupted and leave their process group
        security/ log/   connection files and logs of ipyparallel; the folder is the engines' IPython profile
        rendezvous/      file stores of the process group, and `generation`
    <IPython directory>/profile_default/speedlab/<name>.lock

Several hosts may share a home folder. Each has its own cluster of a name, and never changes another host's. The profile
is always the default one, so that every kernel, script and terminal of a user finds the same clusters.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

import speedlab.cluster.launch.rendezvous as host_rendezvous
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.file_locks import hold
from speedlab.cluster.files.processes import TOKEN, is_alive
from speedlab.hardware import Device

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_LOCK_SECONDS = 120.0
_HOST = "host"
_TOKEN = "token"
SUPERVISOR_SOCKET = "supervisor.sock"
OUTPUT = "output"
CHANGING, INTERRUPTING = "changing", "interrupting"


def this_host() -> str:
    """Return the name of this machine."""
    return platform.node()


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One rank's engine."""

    rank: int
    pid: int
    engine_id: int
    """ipyparallel's id; a restart changes it."""
    host: str = ""
    """Name of the host in a cluster of several hosts; `pid` is a process id of that host."""
    started: float = 0.0
    """Start time of the process, by its host's clock; 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """What runs, as stored in cluster.json."""

    name: str
    token: str
    controller_pid: int
    started: float
    devices: tuple[Device, ...]
    engines: tuple[EngineEntry, ...]
    backend: str
    """How CPU engines communicate: "shared" (memory) or "gloo"."""
    host: str = field(default_factory=this_host)
    """Host of the controller and the supervisor."""
    hosts: tuple[str, ...] = ()
    """Hosts of the engines, in a cluster of several hosts."""
    over: str = ""
    """Why the cluster has ended, if its supervisor noticed."""
    timeout_seconds: float = 0.0
    """Timeout of collectives; 0 for the default."""
    link: str = ""
    """Simulated link between engines, such as '1 Gbit/s 1 ms'; "" for none."""

    @property
    def running(self) -> bool:
        """Whether its controller runs, on this host."""
        return self.host == this_host() and is_alive(self.controller_pid, self.token)

    def to_json(self) -> str:
        """Return the state as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterState:
        """Return the state in `text`; ignore fields of a later version.

        Raises:
            ValueError: If the text is no state; RecursionError if it is nested too deeply.
        """
        return msgspec.json.decode(text, type=cls)


def timeout_environment(timeout_seconds: float) -> dict[str, str]:
    """Return the variables that set the timeout of collectives (`comm.group_timeouts`); none for 0."""
    return {"SPEEDLAB_TIMEOUT_SECONDS": f"{timeout_seconds:g}"} if timeout_seconds else {}


class ClusterDir:
    """The folder of the cluster `name`."""

    def __init__(self, name: str, at: Path | None = None) -> None:
        """Name the folder; nothing is made.

        Args:
            name: Name of the cluster.
            at: Folder of all clusters; None for that of this process.

        Raises:
            ClusterError: If the name cannot be the name of a folder.
        """
        if not _NAME.fullmatch(name):
            raise ClusterError(
                f"{name!r} cannot name a cluster; use 1 to 60 letters, digits, '-', '_' or '.', first a letter or digit"
            )
        self.name = name
        self.root = at or root()

    @property
    def path(self) -> Path:
        """The folder. With a suffix for this host if another host has, or had, a cluster of this name."""
        common, own = self.root / self.name, self.root / f"{self.name}@{this_host()}"
        return common if not own.exists() and _host_of(common) in (None, this_host()) else own

    @property
    def rendezvous(self) -> Path:
        """Folder of the process group's file stores."""
        return self.path / "rendezvous"

    @property
    def log(self) -> Path:
        """Folder of the logs."""
        return self.path / "log"

    @property
    def supervisor_socket(self) -> Path:
        """Socket at which the supervisor listens."""
        return self.path / SUPERVISOR_SOCKET

    @property
    def supervisor_lock(self) -> Path:
        """File that the supervisor locks as long as it lives."""
        return self.path / "supervisor.lock"

    @property
    def nursery_log(self) -> Path:
        """Output of the fork server."""
        return self.log / "nursery.log"

    def environment(self, token: str, backend: str, link: str, timeout_seconds: float) -> dict[str, str]:
        """Return the environment variables of every process of the cluster.

        Args:
            token: Unique id of the cluster.
            backend: Backend of the process group.
            link: Simulated link; "" for none.
            timeout_seconds: Timeout of collectives; 0 for the default.
        """
        return {
            **timeout_environment(timeout_seconds),
            TOKEN: token,
            "SPEEDLAB_BACKEND": backend,
            "SPEEDLAB_LINK": link,
            "SPEEDLAB_SUPERVISOR_LOCK": str(self.supervisor_lock),
        }

    @property
    def output(self) -> Path:
        """Folder of the output of each rank."""
        return self.path / OUTPUT

    @property
    def _state_file(self) -> Path:
        return self.path / "cluster.json"

    def connection_file(self, kind: str) -> Path:
        """Return the connection file that the controller writes for `kind`, 'client' or 'engine'."""
        return self.path / "security" / f"ipcontroller-{self.name}-{kind}.json"

    def create(self, token: str) -> None:
        """Make the folder for a new cluster with this token, and remove an old one; nothing runs yet."""
        self.remove()
        path = self.path
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        for folder in (draft, draft / "security", draft / "log", draft / "rendezvous"):
            folder.mkdir(mode=0o700, parents=True)
        write_private(draft / _HOST, this_host())
        write_private(draft / _TOKEN, token)
        draft.rename(path)  # The draft names its owner before another host can see the folder.
        host_rendezvous.set_generation(self.rendezvous, 0)

    @property
    def token(self) -> str | None:
        """Id of the last cluster that was started here, even if it never became ready; None without one."""
        try:
            return (self.path / _TOKEN).read_text()
        except OSError:
            return None

    def remove(self) -> None:
        """Remove the folder."""
        path = self.path  # After the removal, `path` may be the folder of another host.
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            # A process that is ending may have written a file between the listing and the removal.
            shutil.rmtree(path)

    def read(self) -> ClusterState | None:
        """Return the stored state; None if there is none.

        Raises:
            ClusterError: If the file is damaged; names the file.
        """
        return _read(self.path)

    def stamp(self) -> int:
        """Return a number that changes whenever the state is written; 0 without a state."""
        try:
            return self._state_file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def write(self, state: ClusterState) -> None:
        """Store the state."""
        write_private(self._state_file, state.to_json())

    @property
    def generation(self) -> int:
        """Generation of the process group that ranks join next; `speedlab.comm.join` reads it."""
        return host_rendezvous.generation(self.rendezvous)

    def next_generation(self) -> None:
        """Let ranks that join from now on use a new store."""
        host_rendezvous.next_generation(self.rendezvous)

    @contextlib.contextmanager
    def amid(self, what: str) -> Iterator[None]:
        """Mark an operation that must not stay incomplete; a crash leaves the mark.

        Args:
            what: CHANGING: engines may be bound to another state than the stored one. INTERRUPTING: some ranks may have
                left their process group and others not.
        """
        file = self.path / what
        file.touch(mode=0o600)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def was_amid(self, what: str) -> bool:
        """Return whether an earlier process ended inside `amid`."""
        return (self.path / what).exists()

    def break_stores(self) -> None:
        """Let ranks fail that wait in native code in a store for a missing rank.

        A waiting rank opens the file again and again, and a symbolic link to itself cannot be opened. Call
        `next_generation` afterwards.
        """
        for store in self.rendezvous.glob("store-*"):
            broken = store.with_name(f"broken-{store.name}")
            broken.symlink_to(store.name)
            broken.replace(store)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the cluster: only one process at a time starts, restarts or stops it.

        Raises:
            ClusterError: If another process holds it for 120 s.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = hold(self.path.parent / f"{self.name}.lock", _LOCK_SECONDS)
        except TimeoutError:
            raise ClusterError(
                f"another process has been starting or stopping cluster {self.name!r} for {_LOCK_SECONDS:g} s; end "
                "that process, or use another name"
            ) from None
        try:
            yield
        finally:
            os.close(descriptor)


def root() -> Path:
    """Return the folder of all clusters; IPYTHONDIR changes it."""
    from IPython.paths import get_ipython_dir

    return Path(get_ipython_dir()) / "profile_default" / "speedlab"


def running_clusters() -> list[ClusterState]:
    """Return every running cluster of this user, the newest first."""
    states = []
    for _, state in known_clusters():
        if isinstance(state, ClusterError):  # The other clusters are not affected.
            warnings.warn(str(state), stacklevel=2)
        elif state is not None and state.running:
            states.append(state)
    return sorted(states, key=lambda state: -state.started)


def known_clusters() -> Iterator[tuple[Path, ClusterState | ClusterError | None]]:
    """Yield (folder, state) of every cluster of this user.

    The state is None if the cluster is not ready yet, and an error if it is damaged or must not be read.

    Raises:
        OSError: If the folder of all clusters must not be read.
    """
    try:
        names = sorted(os.listdir(root()))
    except (FileNotFoundError, NotADirectoryError):
        return
    for folder in (root() / name for name in names if not name.startswith(".")):
        try:
            if any((folder / name).exists() for name in (_TOKEN, "cluster.json")):
                yield folder, _read(folder)
        except ClusterError as error:
            yield folder, error
        except PermissionError as error:
            yield folder, _forbidden(folder, error)


def _read(folder: Path) -> ClusterState | None:
    file = folder / "cluster.json"
    try:
        return ClusterState.from_json(file.read_text())
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise _forbidden(folder, error) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ClusterError(
            f"{file} is damaged ({error}); remove the folder {folder} once no engine of it runs"
        ) from None


def _forbidden(folder: Path, error: PermissionError) -> ClusterError:
    return ClusterError(f"{error.filename or folder} may not be read by this user; give it the right to")


def _host_of(folder: Path) -> str | None:
    """Return the host of the cluster in a folder; None if there is none."""
    try:
        return (folder / _HOST).read_text()
    except OSError:
        return None


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically; mode 0600.

    Args:
        path: File.
        text: New text.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)

"""Where a cluster keeps its files: a folder of its own under the IPython directory, readable by its owner only.

    <IPython directory>/profile_default/speedlab/<name>/    (<name>@<host>/ where another host has the name already)
        host             the host that it is of
        token            which cluster it is, from before its first process is started
        cluster.json     what runs: token, controller, engines and devices by rank
        changing         is there while engines are bound to another number of them
        interrupting     is there while ranks are interrupted and leave their process group
        security/ log/   connection files and logs of ipyparallel; the folder is the engines' IPython profile
        rendezvous/      file stores of the process group, and `generation`
    <IPython directory>/profile_default/speedlab/<name>.lock

A home folder may be shared by several hosts: each has its own cluster of a name, and touches no other's. The profile is
always the default one, so that every kernel, script and terminal of a person finds the same clusters.
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
    """The name under which this machine knows itself."""
    return platform.node()


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One rank's engine."""

    rank: int
    pid: int
    engine_id: int
    """ipyparallel's number; another one after a restart."""
    host: str = ""
    """Of a cluster of several hosts: on which one it runs; there `pid` counts."""
    started: float = 0.0
    """When its process started, by its host's clock; 0 where nobody has asked."""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """What runs, as written to cluster.json."""

    name: str
    token: str
    controller_pid: int
    started: float
    devices: tuple[Device, ...]
    engines: tuple[EngineEntry, ...]
    backend: str
    """How CPU engines reach each other: "shared" (memory) or "gloo"."""
    host: str = field(default_factory=this_host)
    """Where its controller and supervisor are."""
    hosts: tuple[str, ...] = ()
    """Where its engines are, when they are on several hosts."""
    over: str = ""
    """Why it has ended, where its supervisor came to know."""
    timeout_seconds: float = 0.0
    """How long collectives of its engines wait for a peer; 0 where the user gave no limit."""
    link: str = ""
    """Between engines that pretend to be hosts of their own: '1 Gbit/s 1 ms'; "" where they pretend nothing."""

    @property
    def running(self) -> bool:
        """Whether its controller runs, on this host."""
        return self.host == this_host() and is_alive(self.controller_pid, self.token)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterState:
        """Fields of a later version are passed over. Raises ValueError or RecursionError for what is none."""
        return msgspec.json.decode(text, type=cls)


def timeout_environment(timeout_seconds: float) -> dict[str, str]:
    """What the engines find of it in their environment (`comm.limits`); 0: the user gave no limit."""
    return {"SPEEDLAB_TIMEOUT_SECONDS": f"{timeout_seconds:g}"} if timeout_seconds else {}


class ClusterDir:
    """The folder of the cluster `name`. Raises ClusterError for a name that cannot be one of a folder."""

    def __init__(self, name: str, at: Path | None = None) -> None:
        """`at`: the folder of all clusters, where it is not that of this process."""
        if not _NAME.fullmatch(name):
            raise ClusterError(
                f"{name!r} cannot name a cluster; use 1 to 60 letters, digits, '-', '_' or '.', first a letter or digit"
            )
        self.name = name
        self.root = at or root()

    @property
    def path(self) -> Path:
        """The folder: of this host alone where another one has, or had, a cluster of that name."""
        common, own = self.root / self.name, self.root / f"{self.name}@{this_host()}"
        return common if not own.exists() and _host_of(common) in (None, this_host()) else own

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def supervisor_socket(self) -> Path:
        """Where the cluster's supervisor listens."""
        return self.path / SUPERVISOR_SOCKET

    @property
    def supervisor_lock(self) -> Path:
        """Held by the cluster's supervisor as long as it lives."""
        return self.path / "supervisor.lock"

    @property
    def nursery_log(self) -> Path:
        """What the process prints that engines are forked off."""
        return self.log / "nursery.log"

    def environment(self, token: str, backend: str, link: str, timeout_seconds: float) -> dict[str, str]:
        """What every process of the cluster finds in its environment. `timeout_seconds`: 0 for no limit of the
        user's."""
        return {
            **timeout_environment(timeout_seconds),
            TOKEN: token,
            "SPEEDLAB_BACKEND": backend,
            "SPEEDLAB_LINK": link,
            "SPEEDLAB_SUPERVISOR_LOCK": str(self.supervisor_lock),
        }

    @property
    def output(self) -> Path:
        """What each rank has printed."""
        return self.path / OUTPUT

    @property
    def _state_file(self) -> Path:
        return self.path / "cluster.json"

    def connection_file(self, kind: str) -> Path:
        """What the controller writes for `kind`, 'client' or 'engine'."""
        return self.path / "security" / f"ipcontroller-{self.name}-{kind}.json"

    def create(self, token: str) -> None:
        """Make the folder anew, for the cluster with this token; nothing runs yet."""
        self.remove()
        path = self.path
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        for folder in (draft, draft / "security", draft / "log", draft / "rendezvous"):
            folder.mkdir(mode=0o700, parents=True)
        write_private(draft / _HOST, this_host())
        write_private(draft / _TOKEN, token)
        draft.rename(path)  # It says whose it is before another host can see it.
        host_rendezvous.set_generation(self.rendezvous, 0)

    @property
    def token(self) -> str | None:
        """Which cluster was begun here last, also one that never became ready; None where none was."""
        try:
            return (self.path / _TOKEN).read_text()
        except OSError:
            return None

    def remove(self) -> None:
        path = self.path  # Once it is gone, the name may stand for another host's.
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            # A process that is ending may have written a file between the listing and the removal.
            shutil.rmtree(path)

    def read(self) -> ClusterState | None:
        """What was written last; None when nothing was. Raises ClusterError for a damaged file, with its name."""
        return _read(self.path)

    def stamp(self) -> int:
        """Changes whenever the state is written; 0 without one."""
        try:
            return self._state_file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def write(self, state: ClusterState) -> None:
        write_private(self._state_file, state.to_json())

    @property
    def generation(self) -> int:
        """Number of the process group that ranks join next; `speedlab.comm.join` reads it."""
        return host_rendezvous.generation(self.rendezvous)

    def next_generation(self) -> None:
        """Ranks that join from now on meet in a new store."""
        host_rendezvous.next_generation(self.rendezvous)

    @contextlib.contextmanager
    def amid(self, what: str) -> Iterator[None]:
        """What is done meanwhile must not stay half done: CHANGING, engines may be bound to something else than what is
        written here; INTERRUPTING, some ranks may have left their process group and others not."""
        file = self.path / what
        file.touch(mode=0o600)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def was_amid(self, what: str) -> bool:
        """Whether whoever was `amid` it has ended before it was done."""
        return (self.path / what).exists()

    def break_stores(self) -> None:
        """Let ranks that wait in native code in a store, for a rank that will not come, fail.

        Who waits opens the file again and again, and a link to itself cannot be opened. `next_generation` must follow.
        """
        for store in self.rendezvous.glob("store-*"):
            broken = store.with_name(f"broken-{store.name}")
            broken.symlink_to(store.name)
            broken.replace(store)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Only one process at a time starts, restarts or stops this cluster."""
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
    """The folder of all clusters; IPYTHONDIR moves it."""
    from IPython.paths import get_ipython_dir

    return Path(get_ipython_dir()) / "profile_default" / "speedlab"


def running_clusters() -> list[ClusterState]:
    """Every cluster of this person that runs, the newest first."""
    states = []
    for _, state in known_clusters():
        if isinstance(state, ClusterError):  # The others can be used all the same.
            warnings.warn(str(state), stacklevel=2)
        elif state is not None and state.running:
            states.append(state)
    return sorted(states, key=lambda state: -state.started)


def known_clusters() -> Iterator[tuple[Path, ClusterState | ClusterError | None]]:
    """The folder of every cluster of this person with what is written of it: None where it has not become ready yet,
    an error where that is damaged, or may not be read. Raises OSError where the folder of all may not be."""
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
    """The host whose cluster a folder is; None where nobody has one there."""
    try:
        return (folder / _HOST).read_text()
    except OSError:
        return None


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, so that no reader sees half of it; mode 0600."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)

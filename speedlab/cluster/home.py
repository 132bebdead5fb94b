"""Where a cluster keeps its files: a folder of its own under the IPython directory, readable by its owner only.

    <IPython directory>/profile_default/speedlab/<name>/
        cluster.json     what runs: token, controller, engines and devices by rank
        security/ log/   connection files and logs of ipyparallel; the folder is the engines' IPython profile
        rendezvous/      file stores of the process group, and `generation`
    <IPython directory>/profile_default/speedlab/<name>.lock

The profile is always the default one, so that every kernel, script and terminal of a person finds the same clusters.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.processes import is_alive
from speedlab.hardware import Device

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_LOCK_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """One rank's engine."""

    rank: int
    pid: int
    engine_id: int
    """ipyparallel's number; another one after a restart."""


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

    @property
    def running(self) -> bool:
        return is_alive(self.controller_pid, self.token)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterState:
        data = json.loads(text)
        data["devices"] = tuple(Device(**{**device, "cores": tuple(device["cores"])}) for device in data["devices"])
        data["engines"] = tuple(EngineEntry(**engine) for engine in data["engines"])
        return cls(**data)


class Home:
    """The folder of the cluster `name`. Raises ClusterError for a name that cannot be one of a folder."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ClusterError(
                f"{name!r} cannot name a cluster; use 1 to 60 letters, digits, '-', '_' or '.', first a letter or digit"
            )
        self.name = name
        self.path = root() / name
        self.rendezvous = self.path / "rendezvous"
        self.log = self.path / "log"
        self._state_file = self.path / "cluster.json"

    def connection_file(self, kind: str) -> Path:
        """What the controller writes for `kind`, 'client' or 'engine'."""
        return self.path / "security" / f"ipcontroller-{self.name}-{kind}.json"

    def create(self) -> None:
        """Make the folder anew, empty."""
        self.remove()
        for folder in (self.path, self.path / "security", self.log, self.rendezvous):
            folder.mkdir(mode=0o700, parents=True)
        self._write_generation(0)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            # A process that is ending may have written a file between the listing and the removal.
            shutil.rmtree(self.path)

    def read(self) -> ClusterState | None:
        """What was written last; None when nothing was, or by a version that wrote something else."""
        try:
            return ClusterState.from_json(self._state_file.read_text())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"{self._state_file} is damaged ({error}); remove the folder {self.path} once no engine of it runs"
            ) from None

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
        return int((self.rendezvous / "generation").read_text())

    def next_generation(self) -> None:
        """Ranks that join from now on meet in a new store."""
        self._write_generation(self.generation + 1)

    def break_stores(self) -> None:
        """Let ranks that wait in native code in a store, for a rank that will not come, fail.

        Who waits opens the file again and again, and a link to itself cannot be opened. `next_generation` must follow.
        """
        for store in self.rendezvous.glob("store-*"):
            broken = store.with_name(f"broken-{store.name}")
            broken.symlink_to(store.name)
            broken.replace(store)

    def _write_generation(self, number: int) -> None:
        write_private(self.rendezvous / "generation", f"{number}\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Only one process at a time starts, restarts or stops this cluster."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_SECONDS
        descriptor = os.open(self.path.parent / f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ClusterError(
                            f"another process has been starting or stopping cluster {self.name!r} for "
                            f"{_LOCK_SECONDS:g} s; end that process, or use another name"
                        ) from None
                    time.sleep(0.05)
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
    for file in root().glob("*/cluster.json"):
        state = Home(file.parent.name).read()
        if state is not None and state.running:
            states.append(state)
    return sorted(states, key=lambda state: -state.started)


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, so that no reader sees half of it; mode 0600."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)

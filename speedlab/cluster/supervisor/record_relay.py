"""A run whose folder not all hosts see: what its ranks write there comes over the wire, so that the folder on the
cluster's side is complete for whoever reads it; configuration, status and control words go the other way.

1. Before ranks begin to work on it, each host is given what the folder says.
2. While they work, hosts are asked for what is new: events before the status that counts them, lines from where they
   were left off, and once more when the work has ended. A control word goes to them when it is posted.
3. Up to where everything was taken is kept beside the run's folder, for the next supervisor.

Checkpoints stay where ranks write them, so there are none: such a run is refused with the reason before it starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import speedlab.cluster.agents.run_files as agent_runs
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.user_model import OWN_MODEL
from speedlab.telemetry.run_folder import RunFolder, write_atomically

log = logging.getLogger("speedlab.supervisor")

POLL_SECONDS = 0.2
_SETTLE_SECONDS, _LOOK_SECONDS = 30.0, 0.02
_KNOWN = "wire.json"
_GIVEN = ("config.json", "status.json")


class AgentRecords(Protocol):
    """The agents, as far as a wire asks them anything."""

    def ask_hosts(self, function: Callable[..., Any], by_host: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """What it returned, by host, of those that answered."""
        ...

    @property
    def host_names(self) -> tuple[str, ...]:
        """In the order of ranks."""
        ...


def relay_for(folder: RunFolder, hosts: AgentRecords) -> RecordRelay | None:
    """The wire of a run; None where all hosts see its folder. Raises ClusterError for a run that needs more than goes
    over a wire, and where a host does not answer."""
    names = hosts.host_names
    text = (folder.path / "config.json").read_text()
    answers = hosts.ask_hosts(agent_runs.sees, dict.fromkeys(names, (str(folder.path), text)))
    if silent := [name for name in names if name not in answers]:
        raise ClusterError(f"{', '.join(silent)} does not say whether it sees {folder.path}; try again")
    without = [name for name in names if not answers[name]]
    if not without:
        return None
    if reason := _refusal(folder):
        raise ClusterError(
            f"{', '.join(without)} does not see {folder.path.parent}: records come over the wire, but {reason}; or "
            "give a folder that all hosts share (a home folder on the network)"
        )
    given = folder.config.data.source
    sources = [source for source in ([given] if isinstance(given, str) else given) if Path(source).is_absolute()]
    lacking = hosts.ask_hosts(agent_runs.not_here, dict.fromkeys(without, (sources,)))
    for name, paths in lacking.items():
        if paths:
            raise ClusterError(
                f"data.source: {paths[0]} is not on {name}, and its ranks read it there; copy it to the same place on "
                "each host, or to a folder that all share"
            )
    return RecordRelay(folder, hosts)


def _refusal(folder: RunFolder) -> str:
    """What such a run cannot have, and what to do; "" for nothing."""
    config = folder.config
    if config.checkpoint.every_steps:
        return (
            f"checkpoint.every_steps is {config.checkpoint.every_steps}, and ranks of all hosts read a checkpoint "
            "together: set it to 0"
        )
    if (folder.path / OWN_MODEL).exists():
        return "a model of your own is read from there: train the built-in one"
    return ""


class RecordRelay:
    """The wire of one run. Its methods may be called from any thread."""

    def __init__(self, folder: RunFolder, hosts: AgentRecords) -> None:
        self._folder, self._hosts = folder, hosts
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = self._read_known()
        self._silent: list[str] = []
        """Hosts that did not say what is new when they were asked last."""
        self._ended = threading.Event()

    def refuse(self, word: str) -> None:
        """Raise ClusterError for a control word that needs a folder that all see."""
        if word in ("save", "reshape", "live"):
            raise ClusterError(
                f"{word}: ranks of run {self._folder.name!r} would exchange what they hold through its folder, which "
                "not all hosts see; start it in a folder that all hosts share"
            )

    def give(self) -> None:
        """Send the hosts what the folder says. Raises ClusterError where one does not take it."""
        path = self._folder.path
        files = {name: (path / name).read_text() for name in _GIVEN}
        after = self._folder.read_status().command
        for word in sorted((path / "control").glob("[0-9]*.json")):
            if int(word.stem) > after:
                files[f"control/{word.name}"] = word.read_text()
        self._send(files)

    def give_word(self, number: int) -> None:
        """Send a control word that was posted."""
        name = f"control/{number:06d}.json"
        self._send({name: (self._folder.path / name).read_text()})

    def _send(self, files: Mapping[str, str]) -> None:
        names = self._hosts.host_names
        arguments = (str(self._folder.path), files)
        answers = self._hosts.ask_hosts(agent_runs.receive, dict.fromkeys(names, arguments))
        if silent := [name for name in names if name not in answers]:
            raise ClusterError(f"{', '.join(silent)} did not take what run {self._folder.name!r} is told; try again")

    def follow(self) -> None:
        """Take in what is new, again and again, on a thread, until `settle`."""
        self._ended = threading.Event()
        threading.Thread(target=self._follow, args=(self._ended,), name="speedlab-wire", daemon=True).start()

    def settle(self) -> None:
        """The ranks have ended: take in the rest, also of hosts that do not answer at once."""
        self._ended.set()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self.take() or (self._silent and time.monotonic() < deadline):
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Nothing came of the work."""
        self._ended.set()

    def _follow(self, ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            try:
                self.take()
            except Exception:  # A full disk, a folder that was removed: said, and tried again.
                log.exception("what ranks of %s write cannot be taken in now", self._folder.name)

    def take(self) -> bool:
        """Take in what is new; whether there was something."""
        with self._lock:
            names = self._hosts.host_names
            if not names:
                self._silent = []
                return False
            asked = {name: (str(self._folder.path), self._known.get(name, {}), name == names[0]) for name in names}
            answers = self._hosts.ask_hosts(agent_runs.news, asked)
            self._silent = [name for name in names if name not in answers]
            for name in [*names[1:], names[0]]:  # The status, which rank 0's host tells, counts what was recorded.
                for file, (known, data) in answers.get(name, {}).items():
                    self._write(file, data)
                    self._known.setdefault(name, {})[file] = known
            if any(answers.values()):
                write_atomically(self._folder.path / _KNOWN, json.dumps(self._known))
            return any(answers.values())

    def _write(self, name: str, data: bytes) -> None:
        path = self._folder.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.suffix == ".jsonl":
            with path.open("ab") as file:
                file.write(data)
        elif path.suffix == ".json":
            write_atomically(path, data.decode())
        else:
            draft = path.with_name(f".{path.name}")
            draft.write_bytes(data)
            draft.replace(path)

    def _read_known(self) -> dict[str, dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self._folder.path / _KNOWN).read_text())
            if isinstance(found, dict):
                return found
        return {}

"""Relay the records of a run whose folder not all hosts see.

The folder on the supervisor's host becomes complete; configuration, status and commands travel in the other direction.

1. Before ranks begin, each host receives the contents of the folder.
2. While ranks work, hosts are asked for new data: events before the status that counts them, and lines from the last
   position on. They are asked once more after the work has ended. A command is sent when it is posted.
3. The position up to which everything was received is stored in the run folder, for the next supervisor.

Checkpoints are not relayed: they stay on the hosts whose ranks write them. A run with checkpoints is refused before it
starts, with the reason.
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
    """The part of the agents that a relay uses."""

    def ask_hosts(self, function: Callable[..., Any], by_host: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call `function` in the agents; return the results of the hosts that answered.

        Args:
            function: Function of an agent.
            by_host: Arguments by host.
        """
        ...

    @property
    def host_names(self) -> tuple[str, ...]:
        """Reachable hosts, in the order of ranks."""
        ...


def relay_for(folder: RunFolder, hosts: AgentRecords) -> RecordRelay | None:
    """Return the relay of a run; None if all hosts see its folder.

    Args:
        folder: Folder of the run.
        hosts: Agents of the hosts.

    Raises:
        ClusterError: If the run needs more than its records, or a host does not answer.
    """
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
    """Return why this run cannot be relayed and what to do; "" if it can."""
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
    """The relay of one run. Methods are thread-safe."""

    def __init__(self, folder: RunFolder, hosts: AgentRecords) -> None:
        """Read the stored position.

        Args:
            folder: Folder of the run on the supervisor's host.
            hosts: Agents of the hosts.
        """
        self._folder, self._hosts = folder, hosts
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = self._read_known()
        self._silent: list[str] = []
        """Hosts that did not answer the last request."""
        self._ended = threading.Event()

    def refuse(self, word: str) -> None:
        """Raise ClusterError for a command that needs a shared folder.

        Args:
            word: Name of the command.
        """
        if word in ("save", "reshape", "live"):
            raise ClusterError(
                f"{word}: ranks of run {self._folder.name!r} would exchange what they hold through its folder, which "
                "not all hosts see; start it in a folder that all hosts share"
            )

    def give(self) -> None:
        """Send the contents of the folder to the hosts.

        Raises:
            ClusterError: If a host does not answer.
        """
        path = self._folder.path
        files = {name: (path / name).read_text() for name in _GIVEN}
        after = self._folder.read_status().command
        for word in sorted((path / "control").glob("[0-9]*.json")):
            if int(word.stem) > after:
                files[f"control/{word.name}"] = word.read_text()
        self._send(files)

    def give_word(self, number: int) -> None:
        """Send a posted command to the hosts.

        Args:
            number: Number of the command.

        Raises:
            ClusterError: If a host does not answer.
        """
        name = f"control/{number:06d}.json"
        self._send({name: (self._folder.path / name).read_text()})

    def _send(self, files: Mapping[str, str]) -> None:
        names = self._hosts.host_names
        arguments = (str(self._folder.path), files)
        answers = self._hosts.ask_hosts(agent_runs.receive, dict.fromkeys(names, arguments))
        if silent := [name for name in names if name not in answers]:
            raise ClusterError(f"{', '.join(silent)} did not take the commands of run {self._folder.name!r}; try again")

    def follow(self) -> None:
        """Start a thread that fetches new records until `settle`."""
        self._ended = threading.Event()
        threading.Thread(target=self._follow, args=(self._ended,), name="speedlab-wire", daemon=True).start()

    def settle(self) -> None:
        """Fetch the rest after the ranks have ended; wait up to 30 s for hosts that do not answer at once."""
        self._ended.set()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self.take() or (self._silent and time.monotonic() < deadline):
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Stop the thread without fetching the rest, because the ranks did not begin."""
        self._ended.set()

    def _follow(self, ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            try:
                self.take()
            except Exception:  # For example a full disk or a deleted folder: log it and try again.
                log.exception("what ranks of %s write cannot be taken in now", self._folder.name)

    def take(self) -> bool:
        """Fetch new records once; return whether there were any."""
        with self._lock:
            names = self._hosts.host_names
            if not names:
                self._silent = []
                return False
            asked = {name: (str(self._folder.path), self._known.get(name, {}), name == names[0]) for name in names}
            answers = self._hosts.ask_hosts(agent_runs.news, asked)
            self._silent = [name for name in names if name not in answers]
            for name in [*names[1:], names[0]]:  # Rank 0's host last: its status counts the records of the others.
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

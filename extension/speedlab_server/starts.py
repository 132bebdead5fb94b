"""Clusters that pages start: a process each, `speedlab start`, which ends when its engines are ready.

The server starts that process and waits for its end; it imports nothing of torch, and the cluster outlives it. What
the start waits for tells the cluster's supervisor, as of any other start; what went wrong is told here, in the list of
clusters, until somebody removes it or starts that name again.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import speedlab_server.messages as m
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import Home
from speedlab_server.places import Place

MOST_AT_ONCE = 4
_MOST_TEXT = 4000
_TERM_SECONDS = 10.0


@dataclass
class _Start:
    process: subprocess.Popen[str]
    problem: str = ""
    """Why it failed; empty while it is under way."""
    given_up: bool = False


class Starts:
    """Any thread may ask."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the processes are started; the server's root."""
        self._folder = folder
        self._starts: dict[str, _Start] = {}
        """By the cluster's name."""
        self._lock = threading.Lock()

    def begin(self, name: str, engines: int | None, place: Place, hosts: Mapping[str, str] | None = None) -> None:
        """Start a cluster in the background, on this machine or on `hosts` (as `words_of_line` gives them). Raises
        ClusterError where that name is being started from here, or too many are; OSError where the Python cannot be
        run."""
        command = [place.python, "-m", "speedlab.cli", "start", name]
        command += ["--engines", str(engines)] if engines is not None else []
        command += [f"--{way}={words}" for way, words in (hosts or {}).items()]
        with self._lock:
            under_way = [known for known, start in self._starts.items() if not start.problem]
            if name in under_way:
                raise ClusterError(f"cluster {name!r} is being started already")
            if len(under_way) >= MOST_AT_ONCE:
                raise ClusterError(f"{', '.join(under_way)} are being started; wait for one of them, or cancel it")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=self._folder,
                # Not the modules of the server's root, which may be others' to write: neither `speedlab start`, nor the
                # supervisor and the engines behind it.
                env=os.environ | place.environment | {"PYTHONSAFEPATH": "1"},
                start_new_session=True,  # A Ctrl-C for the server is none for the engines.
            )
            start = self._starts[name] = _Start(process)
        threading.Thread(target=self._wait, args=(name, start), name="speedlab-start", daemon=True).start()

    def told(self, found: list[m.ClusterSummary]) -> list[m.ClusterSummary]:
        """The list of clusters together with what was started from here: not there yet, or failed."""
        with self._lock:
            starts = dict(self._starts)
        there = {cluster.id: cluster for cluster in found}
        for name, start in starts.items():
            id, problem = Home(name).path.name, start.problem
            known = there.get(id)
            # Before its supervisor listens its folder looks as if nobody started it.
            if known is None or known.state not in ("running", "starting"):
                state: m.ClusterKind = "failed" if problem else "starting"
                there[id] = m.ClusterSummary(id=id, name=name, state=state, text=problem)
            elif problem and known.state == "running":  # Started since by somebody: its end is another matter.
                self._forget(name, start)
        return sorted(there.values(), key=lambda cluster: cluster.id)

    def knows(self, name: str) -> bool:
        """Whether it is being started from here, or failed to."""
        return name in self._starts

    def give_up(self, name: str) -> None:
        """From now on nobody wants it: how it ends is not told."""
        with self._lock:
            if (start := self._starts.get(name)) is not None:
                start.given_up = True

    def end(self, name: str) -> None:
        """End the process of a start that nobody else can be asked to give up; forget one that has failed."""
        with self._lock:
            start = self._starts.get(name)
        if start is None:
            return
        if not start.problem:
            start.given_up = True
            start.process.terminate()
            try:
                start.process.wait(_TERM_SECONDS)
            except subprocess.TimeoutExpired:
                start.process.kill()
        self._forget(name, start)

    def _wait(self, name: str, start: _Start) -> None:
        _, said = start.process.communicate()
        if start.process.returncode == 0 or start.given_up:
            self._forget(name, start)
        else:
            start.problem = _words(said) or f"`speedlab start` ended with status {start.process.returncode}"

    def _forget(self, name: str, start: _Start) -> None:
        with self._lock:
            if self._starts.get(name) is start:
                del self._starts[name]


def _words(said: str) -> str:
    """What a command has said of its failure: from its own sentence on, else its last lines."""
    text = said.strip()
    _, found, sentence = text.rpartition("speedlab start: ")
    return (sentence if found else "\n".join(text.splitlines()[-3:]))[:_MOST_TEXT]

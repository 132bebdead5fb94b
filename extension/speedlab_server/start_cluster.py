"""Which Pythons can start a cluster: the server's own, where it has all that engines need, and those of its kernels.

On hubs the server's environment is often not the kernels'. Pages name a place by its id, never by a path. Each
Python is started once, and asked again when it, or a folder that it imports from, has changed.

Clusters that pages start: a process each, `speedlab start`, which ends when its engines are ready.

The server starts that process and waits for its end; it imports nothing of torch, and the cluster outlives it. What
the start waits for tells the cluster's supervisor, as of any other start; what went wrong is told here, in the list of
clusters, until somebody removes it or starts that name again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import speedlab_server.schema as m
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir
from speedlab_server.errors import QuestionError

OWN = "server"
"""Id of the server's own Python; the others have `kernel-` and the name of their kernelspec."""
_LOCAL = "local-provisioner"
_LOOKS_AT_ONCE = 4
_LOOK_SECONDS = 20.0
"""For a Python on a cold disk; whoever opens the form waits for it."""
_SETTLED_NS = 2 * 10**9
"""What has changed later than so long ago may just be changing, as while somebody installs something."""
_HAS_ALL = (
    "import json, site, sys, importlib.util as u; "
    "has = all(map(u.find_spec, ('speedlab', 'torch', 'ipyparallel'))) and u.find_spec('speedlab.cli') is not None; "
    "print(json.dumps([has, [*sys.path, site.getusersitepackages()]]))"
)

NOTHING_FITS = (
    "no Python of this server can start engines: neither its own nor one of its kernels on this machine has SpeedLab "
    "and torch. Install speedlab[notebook] where a kernel runs, or start the cluster there: %speedlab start in a "
    "notebook, `speedlab start` in a terminal"
)


class PythonEnvironment(NamedTuple):
    """A Python of this machine, and what its kernels get in their environment."""

    id: str
    name: str
    """For people."""
    python: str
    environment: dict[str, str]


def candidates(specs: Mapping[str, Any]) -> list[PythonEnvironment]:
    """The server's Python, and those of kernels (`specs`: as Jupyter's manager of kernelspecs gives them) that run on
    this machine; one that several share counts once."""
    places = [PythonEnvironment(OWN, "the server's Python", sys.executable, {})]
    for name, found in specs.items():
        spec = found.get("spec", {})
        argv = spec.get("argv") or [""]
        provisioner = spec.get("metadata", {}).get("kernel_provisioner", {}).get("provisioner_name", _LOCAL)
        if spec.get("language") != "python" or provisioner != _LOCAL or "{connection_file}" not in argv:
            continue
        if not Path(argv[0]).name.startswith("python"):
            continue  # A program that starts the kernel elsewhere, or prepares for it: it does more than we know.
        # As Jupyter takes them: a bare name is the server's own.
        bare = argv[0] in ("python", f"python{sys.version_info.major}")
        python = sys.executable if bare else shutil.which(argv[0])
        # `${PATH}` in it stands for the server's own, as for a kernel.
        templates = {key: Template(str(value)) for key, value in (spec.get("env") or {}).items()}
        environment = {key: template.safe_substitute(os.environ) for key, template in templates.items()}
        if python and not any((place.python, place.environment) == (python, environment) for place in places):
            places.append(PythonEnvironment(f"kernel-{name}", str(spec.get("display_name", name)), python, environment))
    return places


class Pythons:
    """Knows which Pythons have all that engines need. Belongs to the event loop; what waits does so in a few threads of
    its own, so that a Python on a disk that hangs holds up nobody who reads a run."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="speedlab-pythons")
        self._looks: dict[object, asyncio.Future[bool]] = {}
        """Under way, by what is started: pages that ask meanwhile wait for the same one."""
        self._known: dict[object, _Known] = {}

    async def able(self, places: list[PythonEnvironment]) -> list[PythonEnvironment]:
        """Those of `places` that can start a cluster."""
        has = await asyncio.gather(*map(self._has_all, places))
        return [place for place, it in zip(places, has, strict=True) if it]

    def _has_all(self, place: PythonEnvironment) -> asyncio.Future[bool]:
        key = place.python, *sorted(place.environment.items())
        if (look := self._looks.get(key)) is None:
            look = asyncio.get_running_loop().run_in_executor(self._threads, self._look, key, place)
            self._looks[key] = look
            look.add_done_callback(lambda _: self._looks.pop(key))
        return look

    def _look(self, key: object, place: PythonEnvironment) -> bool:
        known = self._known.get(key)
        if known is None or known.stamps != _stamps(known.files):
            self._known.pop(key, None)
            if (found := _asked(place)) is None:
                return False
            has_all, folders = found
            files = [place.python, *folders]
            known = _Known(has_all, files, _stamps(files))
            if max(known.stamps) < time.time_ns() - _SETTLED_NS:
                self._known[key] = known
        return known.has_all


class _Known(NamedTuple):
    has_all: bool
    files: list[str]
    """The Python itself, and the folders that it imports from: whatever is installed or removed changes one."""
    stamps: list[int]


def _stamps(files: list[str]) -> list[int]:
    """When each was changed, nanoseconds; 0 for what is not there."""
    found = []
    for file in files:
        try:
            found.append(os.stat(file).st_mtime_ns)
        except OSError:
            found.append(0)
    return found


def _asked(place: PythonEnvironment) -> tuple[bool, list[str]] | None:
    """(whether it has all that engines need, the folders that it imports from); None where it cannot be asked. Starts
    it for a moment, and imports nothing but the package `speedlab`, which imports nothing itself."""
    try:
        done = subprocess.run(
            [place.python, "-P", "-c", _HAS_ALL],  # A folder `torch` where the server was started is none.
            env=os.environ | place.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOOK_SECONDS,
            check=True,
        )
        has_all, folders = json.loads(done.stdout.splitlines()[-1])
        return bool(has_all), [str(folder) for folder in folders]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return None


def place_of(id: str, places: list[PythonEnvironment]) -> PythonEnvironment:
    """Raises QuestionError."""
    for place in places:
        if place.id == id:
            return place
    known = ", ".join(place.id for place in places)
    raise QuestionError(f"there is no Python {id[:64]!r} to start a cluster with; there are {known}")


MOST_AT_ONCE = 4
_MOST_TEXT = 4000
_TERM_SECONDS = 10.0


@dataclass
class _Start:
    process: subprocess.Popen[str]
    problem: str = ""
    """Why it failed; empty while it is under way."""
    given_up: bool = False


class ClusterLauncher:
    """Any thread may ask."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the processes are started; the server's root."""
        self._folder = folder
        self._starts: dict[str, _Start] = {}
        """By the cluster's name."""
        self._lock = threading.Lock()

    def begin(
        self, name: str, engines: int | None, place: PythonEnvironment, hosts: Mapping[str, str] | None = None
    ) -> None:
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
            id, problem = ClusterDir(name).path.name, start.problem
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

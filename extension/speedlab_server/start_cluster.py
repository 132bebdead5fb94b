"""Start clusters from a page: find the Python environments that can do so, and run `speedlab start` in one of them.

1. `candidates` lists the server's own Python and those of local kernels. On hubs, the server's environment is often
   not the kernels'. Pages name an environment by its id, never by a path.
2. `Pythons` starts each Python once and checks that it has all packages. It checks again after the Python, or a folder
   that it imports from, has changed.
3. `ClusterLauncher` runs `speedlab start` as a separate process, which ends when the engines are ready. The server
   imports no torch, and the cluster outlives the server. The cluster's supervisor reports the progress of the start.
   The list of clusters shows an error until a user removes it or starts a cluster of the same name again.
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
"""Id of the server's own Python. Other ids are `kernel-` and the name of the kernelspec."""
_LOCAL = "local-provisioner"
_LOOKS_AT_ONCE = 4
_LOOK_SECONDS = 20.0
"""Time limit of a check, long enough for a Python on a cold disk. The form in the page waits for it."""
_SETTLED_NS = 2 * 10**9
"""Do not cache a check if a file has changed more recently: an installation may be in progress."""
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
    """A Python of this machine, and the environment variables of its kernels."""

    id: str
    name: str
    """Display name."""
    python: str
    environment: dict[str, str]


def candidates(specs: Mapping[str, Any]) -> list[PythonEnvironment]:
    """Return the server's Python and those of local Python kernels, without duplicates.

    Args:
        specs: Kernelspecs, as Jupyter's kernelspec manager returns them.
    """
    places = [PythonEnvironment(OWN, "the server's Python", sys.executable, {})]
    for name, found in specs.items():
        spec = found.get("spec", {})
        argv = spec.get("argv") or [""]
        provisioner = spec.get("metadata", {}).get("kernel_provisioner", {}).get("provisioner_name", _LOCAL)
        if spec.get("language") != "python" or provisioner != _LOCAL or "{connection_file}" not in argv:
            continue
        if not Path(argv[0]).name.startswith("python"):
            continue  # Another program starts this kernel, and may do more than run Python.
        # As in Jupyter: a bare name means the server's own Python.
        bare = argv[0] in ("python", f"python{sys.version_info.major}")
        python = sys.executable if bare else shutil.which(argv[0])
        # Substitute `${PATH}` by the server's own value, as Jupyter does for a kernel.
        templates = {key: Template(str(value)) for key, value in (spec.get("env") or {}).items()}
        environment = {key: template.safe_substitute(os.environ) for key, template in templates.items()}
        if python and not any((place.python, place.environment) == (python, environment) for place in places):
            places.append(PythonEnvironment(f"kernel-{name}", str(spec.get("display_name", name)), python, environment))
    return places


class Pythons:
    """Finds the Pythons that have all packages of an engine. Use it only from the event loop.

    Checks run in a few own threads, so that a Python on a hanging disk does not delay pages that read runs.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="speedlab-pythons")
        self._looks: dict[object, asyncio.Future[bool]] = {}
        """Checks in progress, by what is started. Pages that ask meanwhile share them."""
        self._known: dict[object, _Known] = {}

    async def able(self, places: list[PythonEnvironment]) -> list[PythonEnvironment]:
        """Return those of `places` that can start a cluster.

        Args:
            places: Python environments.
        """
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
    """The Python itself, and the folders that it imports from: an installation or removal changes one of them."""
    stamps: list[int]


def _stamps(files: list[str]) -> list[int]:
    """Return the modification time of each file in nanoseconds; 0 for a missing file."""
    found = []
    for file in files:
        try:
            found.append(os.stat(file).st_mtime_ns)
        except OSError:
            found.append(0)
    return found


def _asked(place: PythonEnvironment) -> tuple[bool, list[str]] | None:
    """Return (whether a Python has all packages, the folders that it imports from); None if it does not answer.

    Starts the Python for a moment. The check imports only the package `speedlab`, which imports nothing itself.
    """
    try:
        done = subprocess.run(
            [place.python, "-P", "-c", _HAS_ALL],  # -P: ignore a folder `torch` in the working directory.
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
    """Return the environment with an id.

    Args:
        id: Id of the environment.
        places: Known environments.

    Raises:
        QuestionError: The id is unknown.
    """
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
    """Why the start failed; empty while it is in progress."""
    given_up: bool = False


class ClusterLauncher:
    """Starts clusters in the background. Safe to use from any thread."""

    def __init__(self, folder: Path) -> None:
        """Create a launcher.

        Args:
            folder: Working directory of the processes; the server's root.
        """
        self._folder = folder
        self._starts: dict[str, _Start] = {}
        """By name of the cluster."""
        self._lock = threading.Lock()

    def begin(
        self, name: str, engines: int | None, place: PythonEnvironment, hosts: Mapping[str, str] | None = None
    ) -> None:
        """Start a cluster in the background, on this machine or on `hosts`.

        Args:
            name: Name of the cluster.
            engines: Number of engines; None for the default.
            place: The Python that starts it.
            hosts: Hosts, as `words_of_line` returns them.

        Raises:
            ClusterError: A start of this name is in progress, or too many starts are.
            OSError: The Python cannot be run.
        """
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
                # PYTHONSAFEPATH: import no modules from the server's root, which other users may be able to write.
                # `speedlab start` passes the variable on to the supervisor and the engines.
                env=os.environ | place.environment | {"PYTHONSAFEPATH": "1"},
                start_new_session=True,  # A Ctrl-C of the server must not reach the engines.
            )
            start = self._starts[name] = _Start(process)
        threading.Thread(target=self._wait, args=(name, start), name="speedlab-start", daemon=True).start()

    def reported(self, found: list[m.ClusterSummary]) -> list[m.ClusterSummary]:
        """Return the list of clusters, with those whose start is in progress or has failed.

        Args:
            found: Clusters found on disk.
        """
        with self._lock:
            starts = dict(self._starts)
        there = {cluster.id: cluster for cluster in found}
        for name, start in starts.items():
            id, problem = ClusterDir(name).path.name, start.problem
            known = there.get(id)
            # Until its supervisor listens, the folder looks like that of a cluster that was never started.
            if known is None or known.state not in ("running", "starting"):
                state: m.ClusterKind = "failed" if problem else "starting"
                there[id] = m.ClusterSummary(id=id, name=name, state=state, text=problem)
            elif problem and known.state == "running":  # Another client has started it since: forget our failure.
                self._forget(name, start)
        return sorted(there.values(), key=lambda cluster: cluster.id)

    def knows(self, name: str) -> bool:
        """Return whether a start of this name is in progress or has failed.

        Args:
            name: Name of the cluster.
        """
        return name in self._starts

    def give_up(self, name: str) -> None:
        """Mark a start as cancelled, so that its end is not reported.

        Args:
            name: Name of the cluster.
        """
        with self._lock:
            if (start := self._starts.get(name)) is not None:
                start.given_up = True

    def end(self, name: str) -> None:
        """End the process of a start, if no supervisor can cancel it yet; forget a failed start.

        Args:
            name: Name of the cluster.
        """
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
    """Return the error text of a command: from its own message on, else its last lines."""
    text = said.strip()
    _, found, sentence = text.rpartition("speedlab start: ")
    return (sentence if found else "\n".join(text.splitlines()[-3:]))[:_MOST_TEXT]

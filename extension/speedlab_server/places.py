"""Which Pythons can start a cluster: the server's own, where it has all that engines need, and those of its kernels.

On hubs the server's environment is often not the kernels'. Pages name a place by its id, never by a path. Each
Python is started once, and asked again when it, or a folder that it imports from, has changed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from speedlab_server.problems import QuestionError

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


class Place(NamedTuple):
    """A Python of this machine, and what its kernels get in their environment."""

    id: str
    name: str
    """For people."""
    python: str
    environment: dict[str, str]


def candidates(specs: Mapping[str, Any]) -> list[Place]:
    """The server's Python, and those of kernels (`specs`: as Jupyter's manager of kernelspecs gives them) that run on
    this machine; one that several share counts once."""
    places = [Place(OWN, "the server's Python", sys.executable, {})]
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
            places.append(Place(f"kernel-{name}", str(spec.get("display_name", name)), python, environment))
    return places


class Pythons:
    """Knows which Pythons have all that engines need. Belongs to the event loop; what waits does so in a few threads of
    its own, so that a Python on a disk that hangs holds up nobody who reads a run."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="speedlab-pythons")
        self._looks: dict[object, asyncio.Future[bool]] = {}
        """Under way, by what is started: pages that ask meanwhile wait for the same one."""
        self._known: dict[object, _Known] = {}

    async def able(self, places: list[Place]) -> list[Place]:
        """Those of `places` that can start a cluster."""
        has = await asyncio.gather(*map(self._has_all, places))
        return [place for place, it in zip(places, has, strict=True) if it]

    def _has_all(self, place: Place) -> asyncio.Future[bool]:
        key = place.python, *sorted(place.environment.items())
        if (look := self._looks.get(key)) is None:
            look = asyncio.get_running_loop().run_in_executor(self._threads, self._look, key, place)
            self._looks[key] = look
            look.add_done_callback(lambda _: self._looks.pop(key))
        return look

    def _look(self, key: object, place: Place) -> bool:
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


def _asked(place: Place) -> tuple[bool, list[str]] | None:
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


def place_of(id: str, places: list[Place]) -> Place:
    """Raises QuestionError."""
    for place in places:
        if place.id == id:
            return place
    known = ", ".join(place.id for place in places)
    raise QuestionError(f"there is no Python {id[:64]!r} to start a cluster with; there are {known}")

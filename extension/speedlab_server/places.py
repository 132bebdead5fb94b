"""Which Pythons can start a cluster: the server's own, where it has all that engines need, and those of its kernels.

On hubs the server's environment is often not the kernels'. Pages name a place by its id, never by a path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
_HAS_ALL = (
    "import sys, importlib.util as u; "
    "sys.exit(not all(map(u.find_spec, ('speedlab', 'torch', 'ipyparallel'))) or u.find_spec('speedlab.cli') is None)"
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


def able(places: list[Place]) -> list[Place]:
    """Those whose Python has all that engines need. Starts each for a moment; imports nothing of it."""
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        return [place for place, has in zip(places, pool.map(_has_all, places), strict=True) if has]


def _has_all(place: Place) -> bool:
    try:
        done = subprocess.run(
            [place.python, "-P", "-c", _HAS_ALL],  # A folder `torch` where the server was started is none.
            env=os.environ | place.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOOK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def place_of(id: str, places: list[Place]) -> Place:
    """Raises QuestionError."""
    for place in places:
        if place.id == id:
            return place
    known = ", ".join(place.id for place in places)
    raise QuestionError(f"there is no Python {id[:64]!r} to start a cluster with; there are {known}")

"""Print requirements.lock: what the project and its tests need, at the versions this environment has.

Run as `make lock` after an upgrade. torch has its own pip call, so it is not in the list; what its CPU build needs is.
`lock.py docs`, in .venv-docs, prints notebooks/site/requirements.lock.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BUILD = ("hatchling", "editables")
"""What an editable install without build isolation needs."""
SEPARATE = frozenset({"torch", "triton", "cuda-bindings", "cuda-toolkit"})
"""torch, in its own pip call, and what its CUDA build pins itself (with every nvidia-* package but NVML's bindings)."""
HEADER = """\
# Everything but torch that the project and its tests need: `make lock` writes this file.
# `make setup` installs torch first, in its own pip call and with this file as constraints, and then this file.
"""


DOCS_HEADER = """\
# What the documentation's site needs beyond requirements.lock: `make lock` writes this file.
"""


def main(what: str = "project") -> int:
    """`what`: "project", or "docs" for what its site needs beside that."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts, header, elsewhere = (*project["dependencies"], *extras["notebook"], *extras["dev"], *BUILD), HEADER, set()
    if what == "docs":
        texts, header = extras["docs"], DOCS_HEADER
        elsewhere = set(re.findall(r"^(.+)==", Path("requirements.lock").read_text(encoding="utf-8"), re.MULTILINE))
    wanted = [Requirement(text) for text in texts]
    versions: dict[str, str] = {}
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if (key := str(requirement)) in seen or (name.startswith("nvidia-") and name != "nvidia-ml-py"):
            continue
        seen.add(key)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            print(f"{name} is required but not installed; run `make setup` and install it first", file=sys.stderr)
            return 1
        if name not in SEPARATE | elsewhere:
            versions[name] = installed.version.partition("+")[0]
        wanted += [
            needed for needed in map(Requirement, installed.requires or ()) if _applies(needed, requirement.extras)
        ]
    print(header + "\n".join(f"{name}=={versions[name]}" for name in sorted(versions)))
    return 0


def _applies(needed: Requirement, extras: set[str]) -> bool:
    """Whether a package's requirement holds on this machine for any of the extras that were asked for."""
    return needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

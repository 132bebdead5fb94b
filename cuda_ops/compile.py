"""Compiling kernels for CPUs: serial, without the GIL, and kept on disk.

Numba looks at a kernel's own file to see whether its machine code is stale, not at the files of the functions that it
calls. So the folder's name carries a digest of all sources here: another version of anything has a folder of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding

EXACT = frozenset({"contract", "nsz"})
"""Every element gets the same bits wherever it stands in its array, and NaN and infinities stay what they are."""

REORDERED = frozenset({"contract", "nsz", "reassoc"})
"""Sums may be taken in another order, which lets them use vector registers. NaN and infinities stay what they are."""


@cache
def cache_folder() -> Path:
    """Where machine code is kept: a folder for each version of these kernels, of Numba, and kind of processor.

    NUMBA_CACHE_DIR, where it is set, or the user's cache folder.
    """
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    version = f"{sources.hexdigest()[:12]}-numba-{numba.__version__}-{binding.get_host_cpu_name()}"
    configured = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(configured) if configured else base / "speedlab" / "kernels") / version


def kernel(*, fastmath: frozenset[str] = EXACT) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for CPUs, when it is first called with new types.

    Serial, because threads are shared out by `threads.share`: a kernel then runs on any number of Python threads at
    once, and Numba's threading layers, of which one aborts the process when two threads enter it, are never loaded.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        # numpy's rules for division: Python's would put a branch into every loop.
        compiled = numba.njit(nogil=True, error_model="numpy", fastmath=set(fastmath))(function)
        settings: Any = numba.config
        before = settings.CACHE_DIR
        settings.CACHE_DIR = str(cache_folder())  # Read once, here: the user's own functions keep their place.
        try:
            compiled.enable_caching()
        finally:
            settings.CACHE_DIR = before
        return compiled

    return decorate

"""Compile kernels for CPUs: serial, without the GIL, and cached on disk.

Numba checks only a kernel's own file for changes, not the files of the functions that it calls. The name of the cache
folder therefore contains a digest of all source files here, so that each version has its own folder.
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
"""fastmath flags with which an element gets the same bits at every position in its array; NaN and infinities
are kept.
"""

REORDERED = frozenset({"contract", "nsz", "reassoc"})
"""fastmath flags that also allow sums in another order, for vector registers. NaN and infinities are kept."""


@cache
def cache_folder() -> Path:
    """Return the folder of the machine code: one per version of these kernels, version of Numba and kind of processor.

    Its parent is NUMBA_CACHE_DIR if set, otherwise a folder in the user's cache folder.
    """
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    version = f"{sources.hexdigest()[:12]}-numba-{numba.__version__}-{binding.get_host_cpu_name()}"
    configured = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(configured) if configured else base / "speedlab" / "kernels") / version


def kernel(*, fastmath: frozenset[str] = EXACT) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function for CPUs at its first call with new types.

    Kernels are serial, because `threads.share` splits the work: a kernel then runs in any number of Python threads at
    once. Numba's threading layers are never loaded, because one of them aborts the process if two threads enter it.

    Args:
        fastmath: LLVM flags, EXACT or REORDERED.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        # Use numpy's rules for division: Python's would add a branch to every loop.
        compiled = numba.njit(nogil=True, error_model="numpy", fastmath=set(fastmath))(function)
        settings: Any = numba.config
        before = settings.CACHE_DIR
        # Numba reads the setting once, here. Restored below, so that user functions keep their folder.
        settings.CACHE_DIR = str(cache_folder())
        try:
            compiled.enable_caching()
        finally:
            settings.CACHE_DIR = before
        return compiled

    return decorate

"""SpeedLab: train large models from a notebook. Importing this starts neither torch nor CUDA nor any process."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, RankError, Run, attach, compare
    from speedlab.config import ConfigError, RunConfig
    from speedlab.engine import Engine, gather, initialize
    from speedlab.engine.checkpoint import export_hf, import_deepspeed, import_hf
    from speedlab.layout import Layout, LayoutError
    from speedlab.planner.plan import plan

__version__ = "0.1.0"

_HOMES = {
    "RunConfig": "speedlab.config",
    "ConfigError": "speedlab.config",
    "Layout": "speedlab.layout",
    "LayoutError": "speedlab.layout",
    "Cluster": "speedlab.cluster",
    "RankError": "speedlab.cluster",
    "Run": "speedlab.cluster",
    "attach": "speedlab.cluster",
    "compare": "speedlab.cluster",
    "initialize": "speedlab.engine",
    "Engine": "speedlab.engine",
    "gather": "speedlab.engine",
    "plan": "speedlab.planner.plan",
    "export_hf": "speedlab.engine.checkpoint",
    "import_hf": "speedlab.engine.checkpoint",
    "import_deepspeed": "speedlab.engine.checkpoint",
}
"""Public names and the modules they live in; each module is imported when its name is first used."""

__all__ = [
    "Cluster",
    "ConfigError",
    "Engine",
    "Layout",
    "LayoutError",
    "RankError",
    "Run",
    "RunConfig",
    "__version__",
    "attach",
    "compare",
    "export_hf",
    "gather",
    "import_deepspeed",
    "import_hf",
    "initialize",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'speedlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _OldModuleNames:
    """Finds modules by the names that they had before 0.2. Asked last, and only for imports that would fail."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(("speedlab", "cuda_ops")):
            return None
        from speedlab.moved_modules import find_spec

        return find_spec(name)


sys.meta_path.append(_OldModuleNames)  # type: ignore[arg-type]  # a class with a static method is a finder, too


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext speedlab`: the only place where the engine's package knows of the notebook's."""
    from speedlab_notebook import load_ipython_extension as load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    from speedlab_notebook import unload_ipython_extension as unload

    unload(ipython)

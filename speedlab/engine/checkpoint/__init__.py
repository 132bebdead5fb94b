"""Checkpoints independent of the layout. Nothing is pickled.

Each rank writes its part. A manifest lists which slice of which parameter is in which file, and any layout can read it.
"""

from speedlab.engine.checkpoint.async_save import Saving
from speedlab.engine.checkpoint.deepspeed_universal import import_deepspeed
from speedlab.engine.checkpoint.hf import export_hf, import_hf
from speedlab.engine.checkpoint.prune import prune
from speedlab.engine.checkpoint.read import load
from speedlab.engine.checkpoint.write import finish_saving, save, saving_of
from speedlab.telemetry.checkpoint_index import CheckpointError

__all__ = [
    "CheckpointError",
    "Saving",
    "export_hf",
    "finish_saving",
    "import_deepspeed",
    "import_hf",
    "load",
    "prune",
    "save",
    "saving_of",
]

"""SpeedLab for Jupyter's server: clusters and runs for pages, without any kernel. Never imports torch.

`speedlab_server.schema` says what travels, `handlers` where it is asked for, `live` what comes by itself.
"""

from __future__ import annotations

import os
from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Where Jupyter's server looks what is to be loaded."""
    return [{"module": "speedlab_server"}]


def _load_jupyter_server_extension(serverapp: Any) -> None:
    """Add the handlers to the server that starts."""
    from speedlab.telemetry.figures.deltas import SERVED
    from speedlab_server.handlers import add_handlers

    os.environ[SERVED] = "1"
    add_handlers(serverapp.web_app, serverapp.root_dir)

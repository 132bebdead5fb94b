"""Jupyter server extension of SpeedLab: clusters and runs for pages, without a kernel. Never imports torch.

`speedlab_server.schema` defines the messages, `handlers` the HTTP requests, `live_socket` and `figure_socket` the
websockets.
"""

from __future__ import annotations

import os
from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Return the modules that Jupyter's server loads."""
    return [{"module": "speedlab_server"}]


def _load_jupyter_server_extension(serverapp: Any) -> None:
    """Add the handlers to the starting server."""
    from speedlab.telemetry.figures.deltas import SERVED
    from speedlab_server.handlers import add_handlers

    os.environ[SERVED] = "1"
    add_handlers(serverapp.web_app, serverapp.root_dir)

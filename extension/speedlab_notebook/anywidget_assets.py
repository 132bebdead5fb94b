"""Assets of widgets: built JavaScript and CSS files, plotly's bundle, and the text encoding of binary buffers."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

import anywidget
import traitlets

_BUILT = Path(__file__).parent / "static"


def as_text(buffer: bytes) -> str:
    """Encode a buffer as base64 text.

    A Jupyter server that gets its kernels from a gateway fails at binary messages, and then delivers no later message.

    Args:
        buffer: The bytes to send to the page.
    """
    return base64.b64encode(buffer).decode()


def built(name: str) -> Path:
    """Return the path of a built file of the page.

    Args:
        name: The file's name, for example 'dashboard.js'.

    Raises:
        FileNotFoundError: The file is not built; the message gives the command that builds it.
    """
    path = _BUILT / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not built, so there is no dashboard. In a checkout run `make pages`; released wheels have it"
        )
    return path


class PlotlyBundle(anywidget.AnyWidget):
    """Plotly's basic bundle, compressed. A page loads it once, for any number of dashboards."""

    _esm = "export default {};"
    source = traitlets.Unicode().tag(sync=True)
    """The gzipped bundle, encoded by `as_text`."""

    _shared: PlotlyBundle | None = None

    @classmethod
    def shared(cls) -> PlotlyBundle:
        """Return the bundle of this kernel; make it at the first call, or after it was closed."""
        if cls._shared is None or cls._shared.comm is None:
            cls._shared = cls(source=as_text(gzip.compress(built("plotly.js").read_bytes(), 5)))
        return cls._shared

"""What widgets give their pages: files that pages run, and bytes as they travel."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

import anywidget
import traitlets

_BUILT = Path(__file__).parent / "static"


def as_text(buffer: bytes) -> str:
    """Bytes as they travel. A Jupyter server that has its kernels from a gateway fails at binary messages, and gives
    its page nothing that comes behind one."""
    return base64.b64encode(buffer).decode()


def built(name: str) -> Path:
    """A file that pages run. Raises FileNotFoundError that says how it is made."""
    path = _BUILT / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not built, so there is no dashboard. In a checkout run `make pages`; released wheels have it"
        )
    return path


class PlotlyBundle(anywidget.AnyWidget):
    """plotly's basic bundle, compressed: the page takes it from here once, however many dashboards it shows."""

    _esm = "export default {};"
    source = traitlets.Unicode().tag(sync=True)
    """As `as_text` gives it."""

    _shared: PlotlyBundle | None = None

    @classmethod
    def shared(cls) -> PlotlyBundle:
        """The one of this kernel."""
        if cls._shared is None or cls._shared.comm is None:
            cls._shared = cls(source=as_text(gzip.compress(built("plotly.js").read_bytes(), 5)))
        return cls._shared

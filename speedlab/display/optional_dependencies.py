"""Map optional extras to their packages, and name the extra to install if an import fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = {
    "notebook": ("anywidget", "ipywidgets", "jupyter_server", "jupyterlab", "nbclient", "nbformat", "plotly"),
    "hf": ("transformers",),
    "tensorboard": ("tensorboard",),
}
"""Extra -> packages that it installs."""


class MissingExtraError(ImportError):
    """A package of an optional extra is needed but not installed."""


@contextmanager
def extras() -> Iterator[None]:
    """Turn failed imports inside the block into a message that names the extra to install.

    Raises:
        MissingExtraError: a package of a known extra is missing. Other errors pass through unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((name for name, packages in PACKAGES.items() if package in packages), None)
        if extra is None:
            raise
        raise MissingExtraError(
            f"this needs {package}, which is not installed; pip install 'speedlab[{extra}]' brings it"
        ) from None

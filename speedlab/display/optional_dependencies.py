"""What an install leaves out: the packages of each extra, and what to say where one of them is missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = {
    "notebook": ("anywidget", "ipywidgets", "jupyter_server", "jupyterlab", "nbclient", "nbformat", "plotly"),
    "hf": ("transformers",),
    "tensorboard": ("tensorboard",),
}
"""Extra -> what is imported of it."""


class MissingExtraError(ImportError):
    """Something that a part of SpeedLab needs and that this install left out."""


@contextmanager
def extras() -> Iterator[None]:
    """Raises MissingExtraError, with what to install, where a package of an extra is missing; else what was raised."""
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

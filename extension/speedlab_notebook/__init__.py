"""SpeedLab in a notebook: magics, panel, dashboard, displays.

Loading registers names only. What they need (ipyparallel, widgets, plots) is imported when one of them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register `%speedlab`, `%%ranks`, their completion and the displays; doing it again changes nothing."""
    from speedlab_notebook import displays
    from speedlab_notebook.magics import speedlab_magic

    speedlab_magic.register(ipython)
    displays.register(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Take everything back that loading registered. Clusters and runs go on."""
    from speedlab_notebook import displays
    from speedlab_notebook.magics import speedlab_magic

    speedlab_magic.unregister(ipython)
    displays.unregister(ipython)

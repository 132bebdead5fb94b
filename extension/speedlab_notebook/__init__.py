"""SpeedLab in a notebook: magics, panel, dashboard, displays.

Loading the extension only registers names. ipyparallel, widgets and plots are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register `%speedlab`, `%%ranks`, their completion and the displays. A second call changes nothing.

    Args:
        ipython: The IPython shell of the kernel.
    """
    from speedlab_notebook import displays
    from speedlab_notebook.magics import speedlab_magic

    speedlab_magic.register(ipython)
    displays.register(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Remove everything that loading registered. Clusters and runs continue.

    Args:
        ipython: The IPython shell of the kernel.
    """
    from speedlab_notebook import displays
    from speedlab_notebook.magics import speedlab_magic

    speedlab_magic.unregister(ipython)
    displays.unregister(ipython)

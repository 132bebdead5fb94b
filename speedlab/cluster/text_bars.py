"""Progress bars in an engine are text: a widget of tqdm's would belong to the engine, to which no page is connected,
and would stay at 0 %. `tqdm.auto`, which libraries use, asks the modules that are replaced here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

_WIDGETS = ("tqdm.notebook", "tqdm.autonotebook")


class TextBars(MetaPathFinder, Loader):
    """Finds tqdm's bars for terminals where bars for notebooks are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in _WIDGETS else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm.std import tqdm, trange

        vars(module).update(tqdm=tqdm, trange=trange, tqdm_notebook=tqdm, tnrange=trange)


def use_text_bars() -> None:
    """From now on, in this process; before anything imports tqdm's bars."""
    sys.meta_path.insert(0, TextBars())

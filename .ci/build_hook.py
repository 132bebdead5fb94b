"""Asks of hatch, before it builds or installs: what pages run has to be there, and is not made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILT = ("extension/lab/labextension/package.json", "extension/speedlab_notebook/static/dashboard.js")


class PagesHook(BuildHookInterface):
    """A wheel or an sdist without its pages would install well and then miss them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        missing = [path for path in BUILT if not (Path(self.root) / path).exists()]
        if missing:
            raise FileNotFoundError(
                f"{missing[0]} is not built. In a checkout run `make setup`, or .ci/pages.sh in its environment; "
                "released wheels and sdists have it"
            )

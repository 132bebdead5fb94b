"""Print the guides of the package in the terminal: `speedlab guide`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from speedlab.config.command_line import read_options
from speedlab.display.documentation import NoGuideError, page


@dataclass(frozen=True, kw_only=True)
class GuideOptions:
    """Print a guide, or one section of it; without a name, the list of guides."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Name of the guide."""
    section: Annotated[str, tyro.conf.Positional] = ""
    """Words of a section's heading, to print only this section."""


def guide(argv: list[str]) -> int:
    """Print a guide as Markdown.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status: 0 printed, 2 there is no such guide or section.
    """
    options = read_options(GuideOptions, argv, "speedlab guide")
    try:
        print(page(options.name, options.section))
    except NoGuideError as error:
        print(f"speedlab guide: {error}", file=sys.stderr)
        return 2
    return 0

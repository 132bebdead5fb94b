"""`speedlab guide`: the pages that come with the package, printed in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from speedlab.config.cli_options import read_options
from speedlab.display.documentation import NoGuideError, page


@dataclass(frozen=True, kw_only=True)
class GuideOptions:
    """Print a guide, or one section of it; without a name, which there are."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Name of the guide."""
    section: Annotated[str, tyro.conf.Positional] = ""
    """Words of the section's heading: only that one is printed."""


def guide(argv: list[str]) -> int:
    """Print a page of Markdown; exit status 2 for one that there is not."""
    options = read_options(GuideOptions, argv, "speedlab guide")
    try:
        print(page(options.name, options.section))
    except NoGuideError as error:
        print(f"speedlab guide: {error}", file=sys.stderr)
        return 2
    return 0

"""`speedlab guide`: the pages that come with the package, printed in the terminal."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import speedlab
from speedlab.config.options import read_options

FOLDER = Path(speedlab.__file__).parent / "guides"

_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


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
    if not options.name:
        print(_contents())
        return 0
    if options.name not in names():
        print(f"speedlab guide: {_unknown('guide', options.name, names())}", file=sys.stderr)
        return 2
    text = (FOLDER / f"{options.name}.md").read_text(encoding="utf-8")
    if options.section:
        parts = sections(text)
        found = [body for heading, body in parts.items() if options.section.lower() in heading.lower()]
        if not found:
            print(f"speedlab guide {options.name}: {_unknown('section', options.section, parts)}", file=sys.stderr)
            return 2
        text = "\n".join(found)
    print(text.rstrip())
    return 0


def names() -> list[str]:
    """Names of the guides."""
    return sorted(path.stem for path in FOLDER.glob("*.md"))


def sections(text: str) -> dict[str, str]:
    """A page's sections by their headings, each with its heading."""
    # A line of code may begin as a heading does.
    starts = [match.start() for match in _HEADING.finditer(_FENCED.sub(lambda code: "`" * len(code[0]), text))]
    bodies = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    return {body.partition("\n")[0].removeprefix("## "): body for body in bodies}


def _contents() -> str:
    width = max(map(len, names()))
    titles = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0] for name in names()}
    lines = [f"  {name:<{width}}  {title.removeprefix('# ')}" for name, title in titles.items()]
    return "\n".join(["usage: speedlab guide NAME [SECTION]", "", *lines])


def _unknown(kind: str, word: str, known: list[str] | dict[str, str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    return f"there is no {kind} {word!r}; {hint}"

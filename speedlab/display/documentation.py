"""What comes with the package to be read: guides, for `speedlab guide` and `%speedlab guide`, and notebooks."""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "guides"
_NOTEBOOKS = (FOLDER.parent / "notebooks", FOLDER.parents[1] / "notebooks")
"""In the package; in a checkout, which an editable install is, they lie beside it."""
QUICKSTART = "01_quickstart.ipynb"

TROUBLE = "trouble"
"""The guide that quotes messages, a line each behind '> ', with '…' for what a message fills in."""

_QUOTE = re.compile(r"^> (.*)$", re.MULTILINE)
_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class NoGuideError(ValueError):
    """There is no guide, or no section, of that name."""


def page(name: str, section: str = "") -> str:
    """The guide `name`, or its sections whose headings have `section` in them, as Markdown; without a name, which there
    are. Raises NoGuideError, which names the nearest."""
    if not name:
        return _contents()
    if name not in names():
        raise NoGuideError(_unknown("guide", name, names()))
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    if section:
        parts = sections(text)
        found = [body for heading, body in parts.items() if section.lower() in heading.lower()]
        if not found:
            raise NoGuideError(f"{name}: {_unknown('section', section, parts)}")
        text = "\n".join(found)
    return text.rstrip()


def notebook_file(name: str) -> Path:
    """The file of a notebook. Raises NoGuideError, which names the nearest."""
    found = {path.name: path for folder in _NOTEBOOKS for path in sorted(folder.glob("*.ipynb"))}
    if name not in found:
        raise NoGuideError(_unknown("notebook", name, list(found)))
    return found[name]


def names() -> list[str]:
    """Names of the guides."""
    return sorted(path.stem for path in FOLDER.glob("*.md"))


def sections(text: str) -> dict[str, str]:
    """A page's sections by their headings, each with its heading."""
    # A line of code may begin as a heading does.
    starts = [match.start() for match in _HEADING.finditer(_FENCED.sub(lambda code: "`" * len(code[0]), text))]
    bodies = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    return {body.partition("\n")[0].removeprefix("## "): body for body in bodies}


def section_about(message: str) -> str | None:
    """The section of `TROUBLE` that quotes a message; None for one that it does not know."""
    text = " ".join(message.split())
    return next((section for pattern, section in _quoted() if pattern.search(text)), None)


@functools.cache
def _quoted() -> list[tuple[re.Pattern[str], str]]:
    page = FOLDER / f"{TROUBLE}.md"
    parts = sections(page.read_text(encoding="utf-8")) if page.exists() else {}  # An install may leave the guides out.
    return [
        (re.compile(".*".join(map(re.escape, quote.split("…")))), heading)
        for heading, body in parts.items()
        for quote in _QUOTE.findall(body)
    ]


def _contents() -> str:
    width = max(map(len, names()))
    titles = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0] for name in names()}
    lines = [f"  {name:<{width}}  {title.removeprefix('# ')}" for name, title in titles.items()]
    return "\n".join(["usage: guide NAME [SECTION]", "", *lines])


def _unknown(kind: str, word: str, known: list[str] | dict[str, str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    return f"there is no {kind} {word!r}; {hint}"

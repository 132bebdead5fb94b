"""Find the guides and notebooks of the package, for `speedlab guide` and `%speedlab guide`."""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "guides"
_NOTEBOOKS = (FOLDER.parent / "notebooks", FOLDER.parents[1] / "notebooks")
"""In an installed package; and in a checkout (an editable install), next to the package."""
QUICKSTART = "01_quickstart.ipynb"

KINDS = {
    "tutorials": "Tutorials: learn by doing",
    "how-to": "How-to: one task each",
    "concepts": "Concepts: how SpeedLab works",
    "": "Reference",
    "decisions": "Decisions: why the code is as it is, for those who change it",
}
"""Each folder of guides and its heading, in the order of the list; "" is the top folder."""
RENAMED = {"measured": "performance"}
"""Old name of a guide -> its name."""

TROUBLE = "trouble"
"""The guide that quotes error messages: one line each after '> ', with '…' for the variable parts."""

_QUOTE = re.compile(r"^> (.*)$", re.MULTILINE)
_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class NoGuideError(ValueError):
    """There is no guide, or no section, of that name."""


def page(name: str, section: str = "") -> str:
    """Return a guide, or some sections of it, as Markdown.

    Args:
        name: a name of `names()`, or the last part of one if no other guide has it; the list of guides if empty.
        section: return only the sections whose headings contain this text.

    Raises:
        NoGuideError: there is no such guide or section; the message names the nearest one.
    """
    if not name:
        return _contents()
    text = guide_file(name).read_text(encoding="utf-8")
    if section:
        parts = sections(text)
        found = [body for heading, body in parts.items() if section.lower() in heading.lower()]
        if not found:
            raise NoGuideError(f"{name}: {_unknown('section', section, parts)}")
        text = "\n".join(found)
    return text.rstrip()


def guide_file(name: str) -> Path:
    """Return the file of a guide. Old names of guides still work.

    Raises:
        NoGuideError: there is no such guide; the message names the nearest one.
    """
    name = RENAMED.get(name, name)
    files = _guide_files()
    matching = [path for path in files.values() if path.stem == name]
    if name in files:
        return files[name]
    if len(matching) == 1:
        return matching[0]
    raise NoGuideError(_unknown("guide", name, names()))


def notebook_file(name: str) -> Path:
    """Return the file of a notebook.

    Raises:
        NoGuideError: there is no such notebook; the message names the nearest one.
    """
    found = {path.name: path for folder in _NOTEBOOKS for path in sorted(folder.glob("*.ipynb"))}
    if name not in found:
        raise NoGuideError(_unknown("notebook", name, list(found)))
    return found[name]


def names() -> list[str]:
    """Return the names of the guides, in the order of the list."""
    return list(_guide_files())


def _guide_files() -> dict[str, Path]:
    """Return name -> file of each guide. The name is the file's stem; for decisions `decisions/` and the stem."""
    return {
        f"{folder}/{path.stem}" if folder == "decisions" else path.stem: path
        for folder in KINDS
        for path in sorted((FOLDER / folder).glob("*.md"))
    }


def sections(text: str) -> dict[str, str]:
    """Return the sections of a Markdown page.

    Args:
        text: the page. A line in a fenced code block never starts a section.

    Returns:
        Heading -> body, which includes the heading line.
    """
    # Blank out code first: a line of code may start like a heading.
    starts = [match.start() for match in _HEADING.finditer(_FENCED.sub(lambda code: "`" * len(code[0]), text))]
    bodies = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    return {body.partition("\n")[0].removeprefix("## "): body for body in bodies}


def section_about(message: str) -> str | None:
    """Return the section of `TROUBLE` that quotes a message.

    Args:
        message: the message; white space is normalised.

    Returns:
        The heading of the section; None if no section quotes the message.
    """
    text = " ".join(message.split())
    return next((section for pattern, section in _quoted() if pattern.search(text)), None)


@functools.cache
def _quoted() -> list[tuple[re.Pattern[str], str]]:
    page = _guide_files().get(TROUBLE)
    parts = sections(page.read_text(encoding="utf-8")) if page else {}  # An install may leave the guides out.
    return [
        (re.compile(".*".join(map(re.escape, quote.split("…")))), heading)
        for heading, body in parts.items()
        for quote in _QUOTE.findall(body)
    ]


def _contents() -> str:
    """List the guides, grouped by folder."""
    files = _guide_files()
    width = max(map(len, files), default=0)
    lines = ["usage: guide NAME [SECTION]"]
    for folder, heading in KINDS.items():
        of_folder = {name: path for name, path in files.items() if path.parent == FOLDER / folder}
        if of_folder:
            lines += ["", heading]
        for name, path in of_folder.items():
            title = path.read_text(encoding="utf-8").partition("\n")[0]
            lines.append(f"  {name:<{width}}  {title.removeprefix('# ')}")
    return "\n".join(lines)


def _unknown(kind: str, word: str, known: list[str] | dict[str, str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    return f"there is no {kind} {word!r}; {hint}"

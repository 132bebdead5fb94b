"""Docstrings as Sphinx reads them. Ours are plain text with Markdown's backquotes, not reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

_ITEM = re.compile(r"(?:\d+\.|-) ")
_ARGUMENT = re.compile(r"(\s+)([*\w]+(?:, [*\w]+)*): ")
_CODE = re.compile(r"`([^`\n]+)`")
_SPECIAL = re.compile(r"([\\*|]|_(?=\W|$))")


def restructured(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText: paragraphs, lists, arguments, and what else is indented as it
    stands."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            blocks[-1].append(line.rstrip())
        elif blocks[-1]:
            blocks.append([])
    return [line for block in blocks if block for line in [*_block(block), ""]]


def _block(block: list[str]) -> Iterator[str]:
    """One block, between two empty lines."""
    items = [number for number, line in enumerate(block) if _ITEM.match(line)]
    first = items[0] if items else len(block)
    if block[0].endswith(":") and block[1:] and all(line.startswith(" ") for line in block[1:]):
        yield from (_text(block[0]), "")
        yield from _arguments(block[1:]) or _as_it_stands(block[1:])
    elif any(line.startswith(" ") for line in block[:first]):
        yield from _as_it_stands(block)
    else:
        yield from map(_text, block[:first])
        yield from [""] if first and items else []
        for start, end in pairwise([*items, len(block)]):
            marker, text = block[start].split(" ", 1)
            yield " ".join([marker, *(_text(line.strip()) for line in [text, *block[start + 1 : end]])])


def _arguments(lines: list[str]) -> list[str]:
    """Lines of `name: what it is`, each perhaps going on further in, as a list; [] where they are none."""
    if (match := _ARGUMENT.match(lines[0])) is None:
        return []
    found: list[str] = []
    for line in lines:
        if (name := _ARGUMENT.match(line)) is not None and name[1] == match[1]:
            found.append(f"- ``{name[2]}``: {_text(line[name.end() :])}")
        else:
            found[-1] += f" {_text(line.strip())}"
    return found


def _as_it_stands(lines: list[str]) -> list[str]:
    return ["::", "", *(f"    {line}" for line in lines)]


def _text(line: str) -> str:
    """A line with its code as code, and nothing else that means anything to Sphinx."""
    parts = _CODE.split(line)  # Text and code in turn.
    return "".join(
        f"``{part.strip()}``\\ " if number % 2 else _SPECIAL.sub(r"\\\1", part).replace("`", "\\`")
        for number, part in enumerate(parts)
    ).removesuffix("\\ ")

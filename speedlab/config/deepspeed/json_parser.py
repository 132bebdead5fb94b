"""Parse the text of a DeepSpeed file: JSON with comments and trailing commas.

1. `_plain` replaces comments (//, #, /* */) and trailing commas by spaces, so that all positions in the text stay.
2. json parses the rest. Duplicate keys give a warning; the last one counts.
3. Errors have line, column, the text at this place, and what to do.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from speedlab.config.errors import ConfigError

_WORD = re.compile(r"[^\s,:{}\[\]\"]+")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_SHOWN = 40
"""Maximum number of characters of a file in an error."""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The data of a DeepSpeed file, and warnings about text that is not JSON."""

    data: dict[str, Any]
    warnings: tuple[str, ...]


def parse(text: str) -> Parsed:
    """Parse the text of a DeepSpeed file.

    Raises:
        ConfigError: the text is broken; the message has line and column.
    """
    text = text.removeprefix("\ufeff")
    plain, warnings, open_at = _plain(text)
    start = len(plain) - len(plain.lstrip())
    if start == len(plain):
        raise ConfigError("the file holds nothing but space and comments; expected keys and values in { }")
    if plain[start] != "{":
        found = _found(plain, start)
        _refuse(text, start, f"a DeepSpeed file is one object in {{ }}, but found {found}; put it in {{ }}")
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                twice.append(key)
            seen[key] = value
        return seen

    def refuse_constant(name: str) -> NoReturn:
        place = re.search(rf"[:,\[]\s*{re.escape(name)}", plain)
        assert place is not None  # json has just parsed it.
        _refuse(text, place.end() - len(name), f"{name} is no number that a configuration can hold; give a finite one")

    try:
        data = json.loads(plain, object_pairs_hook=pairs, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        _refuse(text, error.pos, _fault(text, plain, error, open_at))
    except ConfigError:
        raise
    except ValueError as error:  # Python's limit on the digits of an integer.
        raise ConfigError(f"a number in the file cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError("brackets are nested too deeply for a configuration") from None
    warnings += [f"the key {key!r} is twice in one object; the last one counts" for key in dict.fromkeys(twice)]
    return Parsed(data=data, warnings=tuple(warnings))


def _plain(text: str) -> tuple[str, list[str], list[int]]:
    """Return (text without comments and trailing commas, warnings, positions of unclosed brackets)."""
    out = list(text)
    open_at: list[int] = []
    comments: list[int] = []
    commas: list[int] = []
    comma: int | None = None  # Position of a comma after a value, if nothing follows yet.
    before = ""  # The last character that is neither space nor comment.
    place = 0
    while place < len(text):
        mark = text[place]
        end = _comment_end(text, place)
        if end:
            comments.append(place)
            out[place:end] = [c if c in "\r\n" else " " for c in text[place:end]]
            place = end
            continue
        if mark == '"':
            place = _string_end(text, place)
            comma, before = None, mark
            continue
        if mark in "}]":
            if comma is not None:
                commas.append(comma)
                out[comma] = " "
            if open_at:
                open_at.pop()
        elif mark in "{[":
            open_at.append(place)
        if not mark.isspace():
            comma = place if mark == "," and before not in ("", *",:[{") else None
            before = mark
        place += 1
    warnings = []
    if comments:
        warnings.append(f"{_times(comments, 'comment', text)}: JSON has none; they were skipped")
    if commas:
        warnings.append(f"{_times(commas, 'trailing comma', text)}: JSON has none; they were skipped")
    return "".join(out), warnings, open_at


def _comment_end(text: str, place: int) -> int:
    """Return the end of the comment that starts at `place`; 0 if none does."""
    if text.startswith("/*", place):
        end = text.find("*/", place + 2)
        if end < 0:
            _refuse(text, place, "this comment is never closed; end it with */")
        return end + 2
    if text[place] == "#" or text.startswith("//", place):
        end = text.find("\n", place)
        return end if end >= 0 else len(text)
    return 0


def _string_end(text: str, place: int) -> int:
    """Return the position after the string that starts at `place`. json reports a string without end."""
    place += 1
    while place < len(text) and text[place] not in '"\n':
        place += 2 if text[place] == "\\" else 1
    return place + 1


def _fault(text: str, plain: str, error: json.JSONDecodeError, open_at: list[int]) -> str:
    """Return what is wrong at the position where json stopped, and what to do."""
    if not plain[error.pos :].strip() and open_at:
        line, column = _where(text, open_at[-1])
        return (
            f"the file ends before {text[open_at[-1]]!r} of line {line}, column {column} is closed; add what is missing"
        )
    found = _found(plain, error.pos)
    word = _WORD.match(plain, error.pos)
    if error.msg.startswith("Expecting value") and word:
        if word[0] in _PYTHON_WORDS:
            return f"{found} is Python; JSON writes {_PYTHON_WORDS[word[0]]}"
        if re.fullmatch(r"\W*[A-Za-z_]\w*\W*", word[0]):
            return f"{found} is no value; if it is a template's placeholder, fill it in; text needs double quotes"
    if error.msg.startswith(("Invalid control character", "Unterminated string")):
        return "a text in double quotes runs over the end of its line; close it"
    if error.msg.startswith("Expecting property name"):
        return f"expected a key in double quotes, but found {found}"
    return f"{error.msg[0].lower()}{error.msg[1:]}, but found {found}"


def _found(plain: str, place: int) -> str:
    """Return the text at `place`, short, in quotes."""
    word = _WORD.match(plain, place)
    found = word[0] if word else plain[place : place + 1]
    return repr(found[:_SHOWN]) if found else "the end of the file"


def _where(text: str, place: int) -> tuple[int, int]:
    """Return line and column of a position, both from 1."""
    return text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)


def _refuse(text: str, place: int, fault: str) -> NoReturn:
    line, column = _where(text, place)
    raise ConfigError(f"not valid JSON at line {line}, column {column}: {fault}")


def _times(places: list[int], what: str, text: str) -> str:
    count = len(places)
    first = f"line {_where(text, places[0])[0]}"
    return f"one {what} ({first})" if count == 1 else f"{count} {what}s (the first in {first})"

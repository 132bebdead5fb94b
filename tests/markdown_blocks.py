"""The code blocks of README and of the guides, for the tests that run them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "speedlab/guides").rglob("*.md"))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its code, the heading it stands under, and the last line before it."""

    language: str
    code: str
    heading: str
    before: str
    line: int


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        above = text[: match.start()]
        headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", above), re.MULTILINE)
        lines = above.rstrip().splitlines()
        found.append(
            Block(match[1], match[2], headings[-1] if headings else "", lines[-1] if lines else "", len(lines) + 2)
        )
    return found

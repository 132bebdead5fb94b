"""The words of documents and code are those of the field, and public functions are described."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from import_graph import sources
from markdown_blocks import GUIDES, README, ROOT

PAGES = [README, ROOT / "ARCHITECTURE.md", *GUIDES]
NOT_USED = {"told", "whoever", "beside", "behind", "anew", "lies", "stands", "apart", "people", "somebody"}
"""Words of our own dialect, for which the field has others: next to, after, again, is, reports."""


def prose(page: str) -> str:
    """Return a page without blocks and spans of code, and without quoted messages."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$|^> [^\n]*$", "", page, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_words_are_those_of_the_field(path: Path) -> None:
    words = re.findall(r"\w+", prose(path.read_text(encoding="utf-8")).lower())
    assert sorted(NOT_USED.intersection(words)) == []


def test_code_and_quoted_messages_are_no_prose() -> None:
    page = "One `told` word\n> told by a message\n```sh\ntold\n```\nmore told"
    assert re.findall(r"\w+", prose(page)) == ["One", "word", "more", "told"]


# ---- code ------------------------------------------------------------------------------------------------------------

MOST_OF_10_000_LINES = 2
"""Times that a word may be in names, comments, docstrings and messages of the packages: some are in keys of files."""
LEAST_DOCUMENTED = 0.75
"""Share of public functions with arguments whose docstring has a section: Args, Returns, Raises or Yields."""
_SECTION = re.compile(r"^\s*(Args|Returns|Raises|Yields):", re.MULTILINE)
_OLD_NAMES = "moved_modules.py"


def test_words_of_the_code_are_those_of_the_field() -> None:
    texts = [text for module, (text, _) in sources().items() if not module.endswith(_OLD_NAMES.removesuffix(".py"))]
    lines = sum(text.count("\n") for text in texts)
    words = Counter(word for text in texts for word in re.findall(r"[a-z]+", text.lower()))
    often = {word: words[word] for word in NOT_USED if words[word] * 10_000 > MOST_OF_10_000_LINES * lines}
    assert not often, f"in {lines} lines"


def test_public_functions_say_what_they_take_and_give() -> None:
    public = [
        node
        for text, _ in sources().values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        if {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        - {"self", "cls"}
    ]
    documented = [node for node in public if _SECTION.search(ast.get_docstring(node) or "")]
    assert len(documented) >= LEAST_DOCUMENTED * len(public)

"""The documentation's site: every notebook and guide has its place in it, and docstrings become what Sphinx reads."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import speedlab

ROOT = Path(__file__).parents[2]
SITE = ROOT / "notebooks/site"


def restructured(text: str) -> str:
    spec = importlib.util.spec_from_file_location("docstrings", SITE / "docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "\n".join(module.restructured(text.splitlines())).rstrip()


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("What `a` is: *b*, c_.", "What ``a``\\  is: \\*b\\*, c\\_."),
        ("Steps:\n\n1. One,\n   and more.\n2. Two", "Steps:\n\n1. One, and more.\n2. Two"),
        ("Ways:\n- one\n- two", "Ways:\n\n- one\n- two"),
        (
            "Args:\n    a: first\n        and more.\n    b, c: second",
            "Args:\n\n- ``a``: first and more.\n- ``b, c``: second",
        ),
        ("    x = 1\n    y = `2`", "::\n\n        x = 1\n        y = `2`"),
        ("Formula:\n  a + b", "Formula:\n\n::\n\n      a + b"),
        ("`code` ends in `code`", "``code``\\  ends in ``code``"),
    ],
)
def test_a_docstring_becomes_what_sphinx_reads(plain: str, expected: str) -> None:
    assert restructured(plain) == expected


def test_every_notebook_has_its_place() -> None:
    index = (SITE / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^notebooks/(\S+)$", index, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    links = re.findall(r"\]\(([^)#]+)\)", index)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_public_name_is_described() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (SITE / "api").glob("*.rst"))
    named = set(re.findall(r"^\.\. auto\w+:: speedlab\.(\w+)(?:\(.*\))?$", pages, re.MULTILINE))
    planner = {"plan"}  # Described where it lives.
    assert named | planner == set(speedlab.__all__) - {"__version__"}


def test_the_site_is_not_installed() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert "notebooks/site" in build["targets"]["wheel"]["exclude"]

"""Build the documentation: `python notebooks/site/build.py [html | linkcheck]`, as `make docs` and `make links` do.

1. Pages are laid out in build/site/source as in the checkout, so that links between them hold as they are: README and
   its like, the guides, the notebooks with the outputs that outputs.py has kept, and the pages of this folder at the
   top.
2. Pages that a command writes are written: every field of a configuration, every command.
3. Sphinx builds them into build/site/html. Warnings are errors, a link that leads nowhere among them.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from pathlib import Path

from outputs import shown
from sphinx.cmd.build import main as sphinx

from speedlab import cli

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / "build/site"
SOURCE = OUT / "source"
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "extension/screenshot.png",
    "speedlab/guides/**/*.md",
    "speedlab/planner/*.md",
    "notebooks/*.ipynb",
)


def lay_out() -> None:
    """1."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for pattern in PAGES:
        for page in ROOT.glob(pattern):
            place = SOURCE / page.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            if page.suffix == ".ipynb":
                place.write_text(shown(page), encoding="utf-8")
            else:
                shutil.copyfile(page, place)
    for name in ("index.md", "static", "api"):
        copy = shutil.copytree if (HERE / name).is_dir() else shutil.copyfile
        copy(HERE / name, SOURCE / name)


def said(*arguments: str) -> str:
    """What a command of the terminal prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.main(list(arguments))
    return out.getvalue().rstrip()


def write_pages() -> None:
    """2."""
    fields = said("config")
    (SOURCE / "api/fields.md").write_text(
        "# Every field of a configuration\n\n"
        "As `speedlab config` prints it: each field with its default and what it means. Each is an option of "
        f"`speedlab train`, too, by its path.\n\n```yaml\n{fields}\n```\n",
        encoding="utf-8",
    )
    parts = [f"## speedlab {name}\n\n```text\n{said(name, '--help')}\n```\n" for name in cli.COMMANDS]
    head = f"# The terminal\n\n```text\n{said('--help')}\n```\n"
    (SOURCE / "api/terminal.md").write_text("\n".join([head, *parts]), encoding="utf-8")


def main(builder: str = "html") -> int:
    """3."""
    lay_out()
    write_pages()
    strict = ["-W", "--keep-going"] if builder == "html" else []
    options = ["-q", "-b", builder, "-c", str(HERE), "-d", str(OUT / "doctrees"), "-j", "auto", *strict]
    code = sphinx([*options, str(SOURCE), str(OUT / builder)])
    if not code:
        print(f"docs: {OUT / builder}")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

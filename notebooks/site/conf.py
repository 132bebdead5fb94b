"""Sphinx's configuration. `build.py` beside it lays the sources out and calls Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import restructured

import speedlab

project = "SpeedLab"
author = "the authors of SpeedLab"
version = release = speedlab.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "index"

nb_execution_mode = "off"  # outputs.py runs them: with engines, and with fewer steps.
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "config.cache"]  # Notebooks may begin a part with a smaller heading.

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
nitpicky = False
linkcheck_timeout = 10
linkcheck_retries = 2

html_theme = "furo"
html_title = f"SpeedLab {release}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
# The colours of parameters, everywhere.
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_text)


def _as_text(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured(lines)

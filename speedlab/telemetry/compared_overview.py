"""Several runs at a glance, as they stay in a saved notebook: a picture, and tables."""

from __future__ import annotations

from collections.abc import Sequence

from speedlab.display.svg import figures_svg
from speedlab.telemetry.compared import Look, compared_figures, facts_table, settings_table
from speedlab.telemetry.overview import picture_html


def compared_overview(looks: Sequence[Look]) -> tuple[str, str]:
    """(SVG, HTML with the same picture and tables of what each run has come to and of the settings that differ)."""
    title = " · ".join(look.name for look in looks)
    svg = figures_svg(list(compared_figures(looks).values()), title=title)
    tables = facts_table(looks)._repr_html_() + settings_table(looks)._repr_html_()
    return svg, f"{picture_html(svg, title)}{tables}"

"""What block-sparse attention saves a plan and lets its queries see: lines of text, and a picture beside them."""

from __future__ import annotations

from speedlab.planner.flops import share_of_step
from speedlab.planner.setup import Setup


def attention_lines(setup: Setup) -> list[str]:
    """What a query sees, the longest path between two tokens and the work saved; empty for dense attention."""
    return [] if setup.seen is None else [*setup.seen.words, _step_words(setup)]


def attention_html(setup: Setup) -> str:
    """The pattern as a picture beside the same lines; empty where there are none."""
    return "" if setup.seen is None else setup.seen.html(_step_words(setup))


def _step_words(setup: Setup) -> str:
    share = share_of_step(setup.shape, setup.attention_share)
    if share > 0.9995:
        return "of a whole step's FLOP nearly nothing is saved: attention's are few at this length"
    return f"of a whole step's FLOP {100 * (1 - share):.3g} % are saved, {1 / share:.3g} times less"

"""Names that are not known: what is nearest to them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is none: the known ones that begin so, else those that look alike; then all."""
    names = sorted(known)
    folded = {candidate.lower(): candidate for candidate in names}
    begin = [candidate for candidate in folded if candidate.startswith(name.lower()) and name]
    close = [folded[match] for match in begin or difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)]
    nearest = f"nearest: {', '.join(close)}" if close else "none is near"
    return ValueError(f"{kind} {name!r} is not known; {nearest}. Known: {', '.join(names)}")

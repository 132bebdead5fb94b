"""What ranks have printed."""

from __future__ import annotations

from speedlab_server.message import Message, Part


class RankLines(Part, kw_only=True):
    """What a rank has printed."""

    rank: int
    lines: list[str]
    skipped: bool = False
    """Whether there were more lines before these than are kept, or sent at once."""


class Output(Message, kw_only=True):
    """What ranks have printed. `cursor` goes back as `after` with the next question."""

    ranks: list[RankLines]
    cursor: str

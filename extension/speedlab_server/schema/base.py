"""Base classes of messages, their common version, and messages of no other kind."""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 1


class Part(msgspec.Struct, kw_only=True):
    """What is inside of messages."""


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag=True):
    """Anything that travels by itself."""

    version: int = VERSION


class Problem(Message, kw_only=True):
    """Why something could not be answered, and what to do."""

    text: str


class Notebook(Message, kw_only=True):
    """A notebook that comes with SpeedLab."""

    name: str
    content: dict[str, Any]

"""A person who is asked by a debugger."""

from __future__ import annotations

import time
from collections.abc import Callable


class Person:
    """Says these lines, in their order, or raises what stands among them; anything else is done while the prompt
    stands, which the end of its rank's session has to interrupt then."""

    def __init__(self, *lines: str | type[BaseException] | Callable[[], object]) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        if isinstance(line, type):
            raise line
        line()
        time.sleep(60)
        raise AssertionError("the prompt did not end with its rank")

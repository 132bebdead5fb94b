"""Commands of pages for runs. They use the run's own methods, as a notebook does, with the same checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import speedlab_server.schema as m
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.run import Run
from speedlab.cluster.run_commands import CommandFuture
from speedlab.telemetry.current_config import CHANGES
from speedlab.telemetry.run_folder import RunFolder
from speedlab_server.clusters import Reached
from speedlab_server.errors import QuestionError

_WORDS: dict[str, tuple[Callable[..., CommandFuture], tuple[str, ...]]] = {
    "pause": (Run.pause, ()),
    "resume": (Run.resume, ("step", "tag", "steps")),
    "step": (Run.advance, ("n",)),
    "stop": (Run.stop, ()),
    "save": (Run.save, ("tag",)),
    "reshape": (Run.reshape, CHANGES),
}
"""Command -> the method that checks and posts it, and the arguments that a page may give."""

_KINDS: dict[str, tuple[type, ...]] = {"step": (int,), "steps": (int,), "n": (int,), "tag": (str,)}


def check(word: m.Word) -> None:
    """Raise QuestionError for an unknown command or argument.

    Args:
        word: The command.
    """
    if word.word not in _WORDS:
        raise QuestionError(f"there is no control word {word.word[:64]!r}; known: {', '.join(m.PAGE_WORDS)}")
    if word.word == "reshape" and "engines" in word.arguments:
        raise QuestionError(
            "reshape: another number of engines is started and stopped from a notebook, run.reshape(engines=…); a page "
            f"may change {', '.join(CHANGES)}"
        )
    _, known = _WORDS[word.word]
    if unknown := sorted(word.arguments.keys() - set(known)):
        raise QuestionError(f"{word.word} takes no {unknown[0][:64]!r}; it takes {', '.join(known) or 'nothing'}")
    for name, value in word.arguments.items():
        kinds = _KINDS.get(name)
        if kinds is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise QuestionError(f"{word.word}: {name} is {value!r:.64}, which is no {kinds[0].__name__}")


def give(path: Path, reached: Reached | None, word: m.Word) -> int:
    """Post a command and return its number. Waits for the supervisor; errors of the run's methods pass through.

    Args:
        path: The run folder.
        reached: The cluster that holds the run; None if its engines are gone.
        word: The command.
    """
    method, _ = _WORDS[word.word]
    cluster: Any = reached
    run = Run(RunFolder(path), cluster, attach=_refuse_others if reached is not None else None)
    try:
        return method(run, **word.arguments).number
    finally:
        run.feed.close()


def _refuse_others(name: str | None) -> NoReturn:
    """Refuse to attach another cluster: a page resumes a run only in the engines that hold it."""
    raise RunError("the run's engines are gone; from a notebook, speedlab.attach(name).resume() goes on in others")


assert set(_WORDS) == set(m.PAGE_WORDS)

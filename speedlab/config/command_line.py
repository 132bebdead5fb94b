"""Read command-line options with tyro, and suggest the nearest option for an unknown one."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tyro

from speedlab.config import ConfigError
from speedlab.config.errors import nearest_keys

_Options = TypeVar("_Options")
_OPTION = re.compile(r"--[a-z][\w.-]*\w")


def read_options(kind: type[_Options], argv: list[str] | None, prog: str, *, config: Sequence[Any] = ()) -> _Options:
    """Parse a command line.

    Args:
        kind: a dataclass of the options.
        argv: the arguments; None: those of this process.
        prog: name of the command, for usage and errors.
        config: tyro's configuration markers.

    Raises:
        ConfigError: options are unknown, one line for each. Other errors, and --help, exit the process as usual.
    """
    words = sys.argv[1:] if argv is None else argv
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = tyro.cli(kind, args=words, prog=prog, config=config)
    except SystemExit as ending:
        if ending.code:
            known = _known(kind, prog, config)
            given = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
            if unknown := [option for option in given if _key(option) not in known]:
                raise ConfigError("\n".join(_refusal(option, known, prog) for option in unknown)) from None
        sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())
    return options


def refuse_two_values(argv: Sequence[str], names: Mapping[str, str]) -> None:
    """Check that an option is not given by both of its names with different values.

    Args:
        argv: the arguments.
        names: short name -> long name.

    Raises:
        ConfigError: two values differ.
    """
    values: dict[str, str] = {}
    for number, word in enumerate(argv):
        option, equals, value = word.partition("=")
        values[option] = value if equals else "".join(argv[number + 1 : number + 2])
    for short, long in names.items():
        if {short, long} <= values.keys() and values[short] != values[long]:
            raise ConfigError(
                f"{short} {values[short]} and {long} {values[long]} say two things of one; {short} is short for "
                f"{long}, give one of them"
            )


def _known(kind: type, prog: str, config: Sequence[Any]) -> dict[str, str]:
    """Return all options in the help, by the key used for comparisons."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog=prog, config=config)
    return {_key(option): option for option in _OPTION.findall(shown.getvalue())}


def _key(option: str) -> str:
    """Return the field name of an option: 'kv_heads' for '--kv-heads'."""
    return option.removeprefix("--").replace("-", "_")


def _refusal(word: str, known: Mapping[str, str], prog: str) -> str:
    """Return the message about an unknown option, with the nearest ones, or all fields of a section."""
    inner: dict[str, list[str]] = {}
    for key in known:
        if "." in key:
            inner.setdefault(key.rpartition(".")[2], []).append(key)
    of_part = [key for key in known if key.startswith(f"{_key(word)}.")]
    near = of_part or nearest_keys(_key(word), known, inner)
    if not near:
        return f"unknown option {word!r}; `{prog} --help` lists all"
    named = ", ".join(repr(known[key]) for key in near)
    return f"unknown option {word!r}; the nearest {'is' if len(near) == 1 else 'are'} {named}"

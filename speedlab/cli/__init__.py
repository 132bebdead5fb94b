"""Run the command `speedlab`: train, demo, bench, and care of clusters and runs. This process does not load torch."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

COMMANDS = {
    "plan": ("plan", "what fits, how fast and why, before anything runs: speedlab plan gpt3-175b --machines ..."),
    "train": (
        "train",
        "train a run: speedlab train config.yaml --zero.stage 3, or go on with one: --resume NAME",
    ),
    "start": ("cluster", "start a cluster's engines and leave them running"),
    "config": ("cluster", "print a configuration with what every field means"),
    "status": ("cluster", "show the clusters that run, their engines and runs"),
    "stop": ("cluster", "end a cluster's engines"),
    "report": ("cluster", "write a run's report.html"),
    "proof": ("cluster", "print what was checked of a run's first batch"),
    "export": ("export", "write a run's checkpoint as a folder that transformers loads"),
    "trace": ("export", "write a pipeline's step as a Chrome trace"),
    "calibrate": ("calibrate", "measure this machine, so that plans say how long a step takes here"),
    "demo": ("demo", "train a small GPT while its ZeRO stage changes, and print what was measured"),
    "bench": ("bench", "measure collectives, kernels and the disk of this machine"),
    "guide": ("guide", "read on: from a script to SpeedLab, when something goes wrong, what was measured"),
}
"""Command -> (its module, what it does)."""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None: those of this process.

    Returns:
        The exit status: 0 done, 1 failed, 2 refused, 130 interrupted by Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        from speedlab import __version__

        print(f"speedlab {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"speedlab: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    from speedlab.cluster.errors import ClusterError
    from speedlab.cluster.known_runs import RunError
    from speedlab.config import ConfigError
    from speedlab.config.errors import with_more
    from speedlab.display.optional_dependencies import MissingExtraError, extras
    from speedlab.layout import LayoutError
    from speedlab.telemetry.checkpoint_index import CheckpointError
    from speedlab.telemetry.run_folder import RunFolderError

    module = importlib.import_module(f"speedlab.cli.{COMMANDS[name][0]}")
    try:
        with extras():
            return getattr(module, name)(rest)
    except ConfigError as error:
        print(f"speedlab {name}: {with_more(error, error.in_terminal)}", file=sys.stderr)
        return 2
    except (LayoutError, ClusterError, RunError, RunFolderError, CheckpointError, MissingExtraError) as error:
        print(f"speedlab {name}: {with_more(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"speedlab {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output has closed the pipe, like `head`. The interpreter's final flush would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: speedlab COMMAND [options]", "", *lines, "", "speedlab COMMAND --help lists the options; --version."]
    )

"""The command table of `%speedlab`: subcommands with options and examples; parser, completion and help.

`COMMANDS` is the only source. `parse`, `complete` and `help_text` all read it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from IPython.core.error import UsageError

from speedlab.display.documentation import names

HELP = ("--help", "-h")
_HELP_COLUMN = 30
_WORDS = {
    "run": "name or folder of a run",
    "rank": "a rank's number",
    "guide": "a guide's name; without one, which there are",
    "model": "a model's name, a Hugging Face folder or config.json, or a configuration",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a subcommand. An option without `value` and `choices` is a switch."""

    name: str
    description: str
    value: str = ""
    number: bool = False
    """Whether the value is a whole number of at least `least`."""
    least: int = 1
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as it is typed, for example '--name'."""
        return f"--{self.name}"

    @property
    def usage(self) -> str:
        """The flag with its value or choices, for example '--name NAME'."""
        return " ".join(filter(None, (self.flag, "|".join(self.choices) or self.value)))


@dataclass(frozen=True, kw_only=True)
class MagicCommand:
    """One subcommand of `%speedlab`."""

    name: str
    description: str
    example: str
    options: tuple[Option, ...] = ()
    takes: Literal["", "run", "rank", "model", "guide"] = ""
    """The kind of the positional argument: a run (name or folder), a rank, a model, or a guide's name; '' for none."""
    several: bool = False
    """Whether more than one positional argument may follow."""

    @property
    def usage(self) -> str:
        """The usage line of the subcommand."""
        more = " ..." if self.several else ""
        word = [f"[{self.takes.upper()}{more}]"] if self.takes else []
        return " ".join(["%speedlab", self.name, *word, *(f"[{option.usage}]" for option in self.options)])

    def help(self) -> str:
        """Return the text that `%speedlab NAME --help` prints."""
        word = [f"  {self.takes.upper():<{_HELP_COLUMN - 4}}  {_WORDS[self.takes]}"] if self.takes else []
        options = [f"  {option.usage:<{_HELP_COLUMN - 4}}  {option.description}" for option in self.options]
        return "\n".join([self.usage, f"  {self.description}", *word, *options, f"  example: {self.example}"])


_CLUSTER_NAME = Option(name="name", value="NAME", description="the cluster's name; else the one at hand")

_PLAN_OPTIONS = (
    Option(name="config", value="FILE", description="a configuration, also DeepSpeed's, by which the model is trained"),
    Option(name="machines", value="TEXT", description="'8 H100', '128x8 A100-80 nvlink3 ib-200x8'; else this machine"),
    Option(
        name="layers", value="N", number=True, description="blocks of a model without a name, or instead of its own"
    ),
    Option(name="hidden", value="N", number=True, description="width of the residual stream"),
    Option(name="heads", value="N", number=True, description="attention heads"),
    Option(name="kv-heads", value="N", number=True, description="heads of keys and values"),
    Option(name="head-size", value="N", number=True, description="width of a head; hidden / heads when left out"),
    Option(name="ffn", value="N", number=True, description="width inside the feed-forward layer"),
    Option(name="vocab", value="N", number=True, description="tokens of the vocabulary"),
    Option(name="seq", value="N", number=True, description="tokens of a sequence"),
    Option(name="gated", description="the feed-forward layer has a gate"),
    Option(name="engines", value="N", number=True, description="engines of this machine"),
    Option(name="tp", value="N", number=True, description="tensor-parallel ranks"),
    Option(name="pp", value="N", number=True, description="pipeline ranks"),
    Option(name="cp", value="N", number=True, description="context-parallel ranks, each with a part of every sequence"),
    Option(name="dp", value="N", number=True, description="data-parallel ranks; as many as there are devices for"),
    Option(name="islands", value="N", number=True, description="groups of ranks that meet every few steps"),
    Option(name="outer.every-steps", value="N", number=True, description="steps of islands between two meetings"),
    Option(name="outer.compression", choices=("none", "signs", "topk"), description="as what islands send"),
    Option(name="zero", choices=("0", "1", "2", "3"), description="ZeRO stage"),
    Option(name="micro", value="N", number=True, description="sequences of a micro-batch"),
    Option(name="global", value="N", number=True, description="sequences of a step"),
    Option(
        name="dtype", choices=("float32", "bfloat16", "float16"), description="compute dtype; the devices' fast one"
    ),
    Option(name="checkpointing", choices=("none", "selective", "block"), description="what backward computes again"),
    Option(name="partition-inputs", description="each tp rank keeps 1/tp of a block's input for backward"),
    Option(
        name="attention", choices=("fused", "plain"), description="whether its probabilities are never kept, or are"
    ),
    Option(name="chunked-loss", description="head and loss a few tokens at a time; logits are never whole"),
    Option(name="sequence-parallel", description="tp ranks have each a part of the sequence between the layers"),
    Option(
        name="schedule",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble"),
        description="order of a pipeline's passes",
    ),
    Option(name="chunks", value="N", number=True, description="pipeline stages of each rank; 2 when left out"),
    Option(name="moments", choices=("float32", "8bit"), description="as what the optimizer's moments are kept"),
    Option(name="masters", choices=("float32", "none"), description="whether bfloat16 parameters have masters"),
    Option(name="in-backward", description="each unit is updated in backward, and its gradient freed"),
    Option(name="offload.optimizer", choices=("none", "host", "disk"), description="where optimizer states lie"),
    Option(name="offload.parameters", choices=("none", "host", "disk"), description="where parameters lie; stage 3"),
    Option(name="offload.activations", choices=("none", "host"), description="where inputs of blocks wait"),
    Option(name="offload.delayed-update", value="N", number=True, description="first step whose update is a step late"),
    Option(name="host-bytes", value="SIZE", description="memory of each host: 128GiB, 1.5TB"),
    Option(name="disk-bytes", value="SIZE", description="free on the disk of each host: 30TB"),
    Option(name="tokens", value="COUNT", description="of the whole training: 300B, 1.5T"),
    Option(name="price", value="PRICE", description="of a device-hour, in any currency"),
    Option(name="search", description="the best layouts instead of one"),
    Option(name="largest", description="the largest model that fits on the machines"),
)

COMMANDS: Mapping[str, MagicCommand] = {
    command.name: command
    for command in (
        MagicCommand(
            name="start",
            description="start engines, one per GPU or on CPU cores, or find those that run; sets `cluster`",
            example="%speedlab start --engines 4",
            options=(
                Option(name="engines", value="N", number=True, description="number of engines; one per device, else 4"),
                Option(name="name", value="NAME", description="name of the cluster; 'default' when left out"),
                Option(
                    name="device",
                    choices=("auto", "cpu", "cuda"),
                    description="what engines run on; auto takes GPUs where there are any",
                ),
                Option(
                    name="backend",
                    choices=("shared", "gloo"),
                    description="how CPU engines reach each other: through shared memory, or sockets",
                ),
                Option(
                    name="link",
                    value="'1 Gbit/s 1 ms'",
                    description="CPU engines pretend to be hosts, with a link of this bandwidth and latency",
                ),
                Option(
                    name="timeout-seconds",
                    value="SECONDS",
                    number=True,
                    description="how long a collective waits for a rank that does not come; 1,800 when left out",
                ),
                Option(
                    name="hosts", value="A:8,B:8", description="over SSH, on these hosts, with so many engines each"
                ),
                Option(
                    name="slurm",
                    value="nodes=4,…",
                    description="in a job of Slurm: nodes, gpus_per_node or engines_per_node, partition, time, account",
                ),
                Option(name="mpi", value="FILE", description="under mpiexec, on the hosts of this host file"),
            ),
        ),
        MagicCommand(
            name="status",
            description="engines, their devices, states and memory, and the runs they hold",
            example="%speedlab status",
            options=(_CLUSTER_NAME,),
        ),
        MagicCommand(
            name="panel",
            description="configure a run, start it, and steer it",
            example="%speedlab panel quickstart",
            takes="run",
        ),
        MagicCommand(
            name="plan",
            description="what fits, how fast and why, on this machine or any other; nothing runs",
            example="%speedlab plan gpt2 --zero 3",
            takes="model",
            options=_PLAN_OPTIONS,
        ),
        MagicCommand(
            name="dash",
            description="live memory, throughput, loss and anatomy of a run's steps; of several, side by side",
            example="%speedlab dash",
            takes="run",
            several=True,
        ),
        MagicCommand(
            name="attach",
            description="find the cluster and run another kernel started; sets `cluster` and `run`, shows both views",
            example="%speedlab attach quickstart",
            takes="run",
        ),
        MagicCommand(
            name="interrupt",
            description="interrupt what the ranks are doing; they keep their state",
            example="%speedlab interrupt",
            options=(_CLUSTER_NAME,),
        ),
        MagicCommand(
            name="debug",
            description="look at what a rank raised last, with pdb's commands; q ends it",
            example="%speedlab debug 2",
            options=(_CLUSTER_NAME,),
            takes="rank",
        ),
        MagicCommand(
            name="stop",
            description="end the engines, and with them what they hold that is not saved",
            example="%speedlab stop --yes",
            options=(_CLUSTER_NAME, Option(name="yes", description="also when a run has not ended")),
        ),
        MagicCommand(
            name="config",
            description="every field of a configuration with its description: the defaults, or those of a run",
            example="%speedlab config --json",
            options=(
                Option(name="json", description="as JSON, without descriptions"),
                Option(name="present", description="of the run at hand"),
            ),
            takes="run",
        ),
        MagicCommand(
            name="report",
            description="write report.html, which shows a run's plots without a server, and link it",
            example="%speedlab report quickstart",
            takes="run",
        ),
        MagicCommand(
            name="layout",
            description="the position of each rank: pipeline stages and their blocks, data and tensor index, device",
            example="%speedlab layout --parameters",
            options=(
                Option(name="parameters", description="a row for each parameter: who holds its states, where, as what"),
                Option(name="rank", value="N", number=True, least=0, description="whose parameters; 0 when left out"),
            ),
            takes="run",
        ),
        MagicCommand(
            name="trace",
            description="write a pipeline's step as a Chrome trace, which chrome://tracing and Perfetto open",
            example="%speedlab trace --step 20",
            options=(
                Option(name="step", value="N", number=True, description="which step; the newest when left out"),
                Option(name="output", value="FILE", description="the file to write; trace.json when left out"),
            ),
            takes="run",
        ),
        MagicCommand(
            name="guide",
            description="read the guides: tutorials, how-to, concepts, performance, limitations, decisions",
            example="%speedlab guide trouble",
            options=(
                Option(name="section", value="WORDS", description="only the section whose heading has these words"),
            ),
            takes="guide",
        ),
    )
}
"""Name of a subcommand -> its options, description and example."""


def without_comment(line: str) -> str:
    """Return the line up to a comment, which IPython does not remove from the line of a magic.

    Args:
        line: The line after the magic's name.
    """
    return re.split(r"(?:^|\s)#", line, maxsplit=1)[0].rstrip()


def parse(line: str) -> tuple[MagicCommand | None, dict[str, Any]]:
    """Parse a line of `%speedlab`.

    Args:
        line: The line after the magic's name.

    Returns:
        The subcommand, and one entry for each given argument (positional, `help`, options); (None, {}) asks for
        the help of all subcommands.

    Raises:
        UsageError: An unknown word or a wrong value; the message names the nearest known word.
    """
    line = without_comment(line)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%speedlab {line}: {error}; quotes come in pairs") from None
    if not words or words[0] in (*HELP, "help"):
        return None, {}
    if words[0] not in COMMANDS:
        raise UsageError(f"%speedlab: {unknown('subcommand', words[0], COMMANDS)}")
    command = COMMANDS[words[0]]
    return command, _arguments(command, words[1:])


def _arguments(command: MagicCommand, words: Sequence[str]) -> dict[str, Any]:
    options = {option.flag: option for option in command.options}
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if word in HELP:
            found["help"] = True
        elif flag in options:
            option = options[flag]
            if not (option.value or option.choices):
                if equals:
                    raise UsageError(f"{command.usage}: {flag} is a switch and takes no value")
                found[option.name] = True
                continue
            if not equals:
                if not rest or rest[0].startswith("-"):
                    raise UsageError(f"{command.usage}: {flag} needs a value, as in {option.usage}")
                value = rest.pop(0)
            found[option.name] = _value(command, option, value)
        elif word.startswith("-"):
            raise UsageError(f"%speedlab {command.name}: {unknown('option', flag, [*options, HELP[0]])}")
        elif not command.takes:
            raise UsageError(f"%speedlab {command.name} takes no {word!r}; {command.usage}")
        elif command.several:
            found.setdefault(f"{command.takes}s", []).append(word)
        elif command.takes in found:
            first = found[command.takes]
            raise UsageError(f"%speedlab {command.name}: one {command.takes} at a time, not {first!r} and {word!r}")
        else:
            found[command.takes] = word
    return found


def _value(command: MagicCommand, option: Option, text: str) -> str | int:
    if option.choices and text not in option.choices:
        raise UsageError(f"%speedlab {command.name} {option.flag}: {unknown('value', text, option.choices)}")
    if not option.number:
        return text
    if not text.isdecimal() or int(text) < option.least:
        raise UsageError(
            f"%speedlab {command.name} {option.flag}: {text!r} is not a whole number of at least {option.least}"
        )
    return int(text)


def unknown(kind: str, word: str, known: Collection[str]) -> str:
    """Return the message for an unknown word.

    Args:
        kind: What the word should be, for example 'option'.
        word: The unknown word.
        known: The words that exist.

    Returns:
        For example "unknown option '--nme'; the nearest is '--name'"; all known words if none is near.
    """
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"the nearest is {near[0]!r}" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {word!r}; {hint}"


def complete(line: str, symbol: str, run_names: Callable[[], Collection[str]]) -> list[str]:
    """Return completions of the last word of a line.

    Args:
        line: The text up to the cursor; starts with '%speedlab'.
        symbol: The part of the last word that is typed already; may be ''.
        run_names: Returns the known runs; called only if a run may follow.

    Returns:
        Words that start with `symbol`: subcommands, flags, choices of a value, or positional arguments.
    """
    before = line[: len(line) - len(symbol)].split()[1:]
    if not before:
        return [name for name in COMMANDS if name.startswith(symbol)]
    command = COMMANDS.get(before[0])
    if command is None:
        return []
    options = {option.flag: option for option in command.options}
    last = options.get(before[-1])
    if last is not None and (last.value or last.choices):
        return [choice for choice in last.choices if choice.startswith(symbol)]
    words = [flag for flag in options if flag not in before]
    free = command.several or all(word.startswith("-") for word in before[1:])
    if command.takes and not symbol.startswith("-") and free:
        known = {"run": run_names, "rank": tuple, "model": known_models, "guide": names}
        words += sorted(name for name in known[command.takes]() if name not in before[1:])
    return [word for word in (*words, HELP[0]) if word.startswith(symbol)]


def known_models() -> set[str]:
    """Return the names of models that a plan accepts."""
    from speedlab.config.presets import MODELS

    return set(MODELS)


def help_text() -> str:
    """Return the text of `%speedlab?`: each subcommand with an example and its description."""
    lines = [
        "SpeedLab: train large models from a notebook.",
        "",
        *(f"  {command.example:<{_HELP_COLUMN}}{command.description}" for command in COMMANDS.values()),
        "",
        "  %%ranks 0,2-3                 run a cell on these ranks; %%ranks on all; --wait returns when they are done",
        "",
        "`start` and `attach` set the names `cluster` and `run`. `%speedlab NAME --help` lists a subcommand's options.",
    ]
    return "\n".join(lines)

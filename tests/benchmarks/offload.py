"""`python -m tests.benchmarks offload`: a training whose states are many times the memory that it may use, beside one
that has all of it.

1. A process that has trained a tiny model, so that everything is imported and compiled, is put under a limit on the
   memory that it takes from then on: the states' bytes divided by `--times`. Cache of files counts inside it.
2. It trains with parameters, gradients and optimizer states on disk. Losses must be those of the other, to the bit.
3. A step should take little more than the longer of computing alone and the disk's own time for the bytes moved.
4. Where DeepSpeed is installed and can build its way to the disk (libaio), it trains the same model from there, without
   a limit on its memory.

All take their steps in turns, so that a machine which is slower for a while is so for each of them.

With `--delayed` it is instead about updates that are late by a step (`offload.delayed_update`), beside those that are
not: states on the host, then on disk, without a limit. A turn is of a few steps, and ends when the last update has.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedlab.calibrate.rank_processes import RankSet
from speedlab.config.command_line import read_options
from tests.benchmarks import offload_sides as sides
from tests.benchmarks.memory_limit import MemoryLimit, NoLimitError, memory_limit

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """A training with its states on disk under a limit on memory, beside the same one with all of it."""

    layers: int = 96
    """Blocks of the GPT; each is a unit that is read and used."""
    hidden: int = 512
    """Its width."""
    tokens: int = 128
    """Of the one sequence of a step."""
    steps: int = 6
    """Steps of each side, in turns; the first is not timed."""
    times: float = 10.0
    """States, in parts of the memory that may be used."""
    in_backward: bool = True
    """Update each unit in backward, so that the disk has work while it computes; else all of them after it."""
    dtype: str = "float32"
    """Precision: float32 or bfloat16."""
    folder: Path = Path(tempfile.gettempdir())
    """On the disk that has the states."""
    peer: bool = True
    """Train with DeepSpeed, too, where it is installed."""
    delayed: bool = False
    """Steps whose updates are late beside steps whose updates are not, instead of all that; `steps` are turns then."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks offload")
    if options.steps < 2:
        sys.exit("bench offload: --steps is 1, and the first step is not timed; take 2 or more")
    if options.delayed:
        print("\n".join(line for place in ("host", "disk") for line in _alongside(options, place)))
        return
    case = sides.Case(options.layers, options.hidden, options.tokens, options.in_backward, options.dtype)
    disk = _disk(options.folder)
    try:
        with ExitStack() as stack:
            print("\n".join(_reported(*_measured(options, case, disk, stack))))
    except NoLimitError as error:
        sys.exit(f"bench offload: {error}")


def _measured(
    options: Options, case: sides.Case, disk: Any, stack: ExitStack
) -> tuple[dict[str, dict[str, Any]], Any, int, int]:
    """What each side tells, the disk's speed, the limit, and the most memory that was taken under it."""
    ranks = {"memory": stack.enter_context(RankSet(1))}
    plain = ranks["memory"].call(sides.begin, case, {})
    limit = int(plain["states"] / options.times)
    places = {"optimizer": "disk", "parameters": "disk", "folder": str(options.folder)}
    group = stack.enter_context(memory_limit("speedlab-bench"))
    ranks["disk"] = stack.enter_context(RankSet(1))
    _under_limit(ranks["disk"], group, limit, case, places)
    if options.peer and importlib.util.find_spec("deepspeed"):
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="speedlab-bench-", dir=options.folder))
        peer = stack.enter_context(RankSet(1))
        try:
            peer.call(sides.begin_deepspeed, case, place)
            ranks["DeepSpeed"] = peer
        except RuntimeError as error:  # Its way to the disk has to be built: libaio-dev, g++, ninja.
            print(f"without DeepSpeed: {error}", file=sys.stderr)
    for number in range(options.steps):
        print(f"step {number + 1} of {options.steps}, with {', '.join(ranks)}", file=sys.stderr, flush=True)
        for rank in ranks.values():
            rank.call(sides.step)
    reported = {name: rank.call(sides.end) for name, rank in ranks.items()}
    return reported, disk, limit, group.peak_bytes


_TURN = 4
"""Steps of a turn with late updates, of which one is waited for."""


def _alongside(options: Options, place: str) -> list[str]:
    """What late updates make of a step with optimizer states at a place."""
    case = sides.Case(options.layers, options.hidden, options.tokens, False, options.dtype)
    seconds: dict[str, list[float]] = {"at once": [], "late": []}
    with ExitStack() as stack:
        ranks = {name: stack.enter_context(RankSet(1)) for name in seconds}
        for name, rank in ranks.items():
            late = {"delayed_update": 1} if name == "late" else {}
            rank.call(sides.begin, case, {"optimizer": place, "folder": str(options.folder), **late})
        for number in range(options.steps):
            print(f"turn {number + 1} of {options.steps}, on {place}", file=sys.stderr, flush=True)
            for name, rank in ranks.items():
                seconds[name].append(rank.call(sides.turn, _TURN))
        for rank in ranks.values():
            rank.call(sides.end)
    ratios = [late / once for late, once in zip(seconds["late"][1:], seconds["at once"][1:], strict=True)]
    at_once, late = (statistics.median(each[1:]) for each in seconds.values())
    return [f"optimizer on {place}       {at_once:.2f} s a step, late {late:.2f} s: {_range(ratios)} of it"]


def _under_limit(rank: RankSet, group: MemoryLimit, limit: int, case: sides.Case, places: dict[str, str]) -> None:
    """The side that trains from disk has begun, under its limit."""
    pid = rank.call(sides.warm, case, places)
    group.set(limit)
    group.take_in([pid])
    print(f"with {limit / _GIB:.2f} GiB", file=sys.stderr, flush=True)
    rank.call(sides.begin, case, places)


def _reported(reported: dict[str, dict[str, Any]], disk: Any, limit: int, peak: int) -> list[str]:
    plain, away = reported["memory"], reported["disk"]
    same = plain["losses"] == away["losses"]
    moving = away["read"] / disk.read_bytes_per_second + away["written"] / disk.write_bytes_per_second
    computing, from_disk = plain["seconds"][1:], away["seconds"][1:]
    ratios = [mine / max(other, moving) for mine, other in zip(from_disk, computing, strict=True)]
    lines = [
        f"parameters              {plain['parameters']:,}",
        f"states                  {plain['states'] / _GIB:.2f} GiB, {plain['states'] / limit:.1f} times the limit",
        f"memory taken at most    {peak / _GIB:.3f} GiB of {limit / _GIB:.3f}",
        f"losses                  {'the same bits' if same else 'DIFFERENT'}: "
        f"{', '.join(f'{loss:.7f}' for loss in away['losses'])}",
        f"a step in memory        {statistics.median(computing):.2f} s",
        f"the disk, for its bytes {moving:.2f} s: {away['read'] / _GIB:.2f} GiB read at "
        f"{disk.read_bytes_per_second / 1e9:.2f} GB/s, {away['written'] / _GIB:.2f} GiB written at "
        f"{disk.write_bytes_per_second / 1e9:.2f} GB/s",
        f"a step from disk        {statistics.median(from_disk):.2f} s, {_range(ratios)} times the longer of both",
    ]
    if "DeepSpeed" in reported:
        theirs = reported["DeepSpeed"]["seconds"][1:]
        ahead = [other / mine for mine, other in zip(from_disk, theirs, strict=True)]
        lines.append(
            f"DeepSpeed from disk     {statistics.median(theirs):.2f} s, {_range(ahead)} times ours; without a limit, "
            f"{reported['DeepSpeed']['peak'] / _GIB:.2f} GiB taken"
        )
    return lines


def _range(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


def _disk(folder: Path) -> Any:
    from speedlab.offload import measure_disk

    return measure_disk(folder)

"""`speedlab bench saving`: checkpoints beside a plain write of the same bytes, and what they take of a step's time and
memory.

All ranks begin together; times are those of the slowest rank.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from speedlab.bench.ranks import run_on_ranks
from speedlab.bench.table import Row, report

_SAMPLE_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Options:
    """Save and load the 17M-parameter GPT under AdamW: bytes a second beside a plain write, the stall of a save in the
    background beside a copy in memory, and what loading needs beside the largest unit."""

    ranks: tuple[int, ...] = (1, 2)
    """Numbers of rank processes, one thread each."""
    stage: int = 2
    """ZeRO stage."""
    folder: Path = Path(tempfile.gettempdir())
    """Where to write; on the disk that is to be measured."""
    rounds: int = 5
    """Interleaved rounds; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=argv, prog="speedlab bench saving")
    rows: list[Row] = []
    for ranks in options.ranks:
        print(f"{ranks} ranks ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            times, facts = run_on_ranks(_measure, ranks, folder, options.stage, options.rounds)
        rows += _rows(f"{ranks} ranks, zero {options.stage}", times, facts)
    report(rows, options.json)


def _measure(folder: str, stage: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds by what was done, slowest rank; and bytes: of all ranks' tensors, of the largest unit, and the most that
    a load took beside what was there."""
    import torch

    import speedlab
    from speedlab.config import ModelConfig
    from speedlab.engine import checkpoint
    from speedlab.models import GPT

    config = {"zero": {"stage": stage}, "precision": {"dtype": "float32"}, "batch": {"micro_size": 1}}
    engine: Any = speedlab.initialize(model=lambda: GPT(ModelConfig(preset="gpt-mini")), config=config)[0]
    tokens = torch.randint(0, 8192, (1, 64))
    engine.backward(engine(tokens, targets=tokens).loss)
    engine.step()  # Moments exist from the first step on.
    own = [state[flat.start - flat.state_range[0] : flat.end - flat.state_range[0]]
           for flat in engine.flats
           for state in (flat.master, *engine.partitioned_optimizer.states_of(flat).values())]  # fmt: skip
    rank, place = engine.world.rank, Path(folder)

    def plain(round_: int) -> None:
        _plain_write(place / f"plain-{round_}-{rank}", own)

    def behind(round_: int) -> None:
        checkpoint.save(engine, place, f"behind-{round_}", {}, wait=False)

    def copy(round_: int) -> None:
        [state.clone() for state in own]

    work: dict[str, Callable[[int], Any]] = {
        "save": lambda round_: checkpoint.save(engine, place, f"whole-{round_}", {}),
        "plain write": plain,
        "stall": behind,
        "copy": copy,
        "load": lambda round_: checkpoint.load(engine, place, f"whole-{round_}"),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    most = 0
    for round_ in range(-1, rounds):  # The first one is for warming up.
        for name, act in work.items():
            checkpoint.finish_saving(engine)
            os.sync()  # What the one before left to write shall not count for this one.
            engine.everyone.barrier()
            with _AnonymousPeak() as peak:
                start = time.perf_counter()
                act(round_)
                seconds = time.perf_counter() - start
            slowest = max(engine.everyone.collect(seconds))
            if round_ >= 0:
                times[name].append(slowest)
                most = max(most, peak.extra_bytes if name == "load" else 0)
    nbytes = sum(engine.everyone.collect(sum(state.nbytes for state in own)))
    facts = {"bytes": nbytes, "unit": max(flat.full.nbytes for flat in engine.flats)}
    facts["load"] = max(engine.everyone.collect(most))
    engine.destroy(keep_parameters=False)
    return times, facts


def _plain_write(file: Path, states: list[Any]) -> None:
    with file.open("xb", buffering=0) as stream:
        for state in states:
            left = state.detach().numpy().data.cast("B")
            while len(left):
                left = left[stream.write(left) :]
        os.fsync(stream.fileno())
    file.unlink()


class _AnonymousPeak:
    """The most anonymous memory of this process inside the block, beside what it had at its start; mapped files, which
    the system takes back as it likes, do not count. Looked at every half millisecond."""

    extra_bytes = 0

    def __enter__(self) -> _AnonymousPeak:
        self._start = self._most = _anonymous_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._end.wait(_SAMPLE_SECONDS):
            self._most = max(self._most, _anonymous_bytes())

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self.extra_bytes = self._most - self._start


def _anonymous_bytes() -> int:
    """0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _rows(case: str, times: dict[str, list[float]], facts: dict[str, int]) -> list[Row]:
    megabytes = facts["bytes"] / 1e6

    def row(what: str, ours: str, unit: str, peer: str, value: Callable[[float], float]) -> Row:
        own, theirs = times[ours], times[peer]
        return Row(
            case=f"{what}, {megabytes:,.0f} MB, {case}",
            ours=value(statistics.median(own)),
            unit=unit,
            peer_name=peer,
            peer=value(statistics.median(theirs)),
            ratio=statistics.median(b / a for a, b in zip(own, theirs, strict=True)),
            n=len(own),
            spread=(max(own) - min(own)) / statistics.median(own),
        )

    loading = statistics.median(times["load"])
    return [
        row("save", "save", "MB/s", "plain write", lambda seconds: megabytes / seconds),
        row("stall of a save in the background", "stall", "ms", "copy", lambda seconds: seconds * 1e3),
        Row(case=f"load, hashed, {case}", ours=megabytes / loading, unit="MB/s", n=len(times["load"])),
        Row(
            case=f"memory that loading takes, {case}",
            ours=facts["load"] / 2**20,
            unit="MiB",
            peer_name="largest unit",
            peer=facts["unit"] / 2**20,
            ratio=facts["unit"] / max(1, facts["load"]),
            n=len(times["load"]),
        ),
    ]

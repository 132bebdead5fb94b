"""`python -m tests.benchmarks saving`: checkpoints beside a plain write of the same bytes, and what they take of a
step's time and memory.

All ranks begin together; times are those of the slowest rank. The order turns, and nothing is deleted while time runs:
what one round has written goes before the next begins.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedlab.calibrate.interleave import Times, row, take_turns
from speedlab.calibrate.rank_processes import run_on_ranks
from speedlab.calibrate.table import BenchRow, report
from speedlab.config.command_line import read_options

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
    rounds: int = 6
    """Interleaved rounds; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks saving")
    rows: list[BenchRow] = []
    for ranks in options.ranks:
        print(f"{ranks} ranks ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            times, facts = run_on_ranks(_measure, ranks, folder, options.stage, options.rounds)
        rows += _rows(f"{ranks} ranks, zero {options.stage}", times, facts)
    report(rows, options.json)


def _measure(folder: str, stage: int, rounds: int) -> tuple[Times, dict[str, int]]:
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
    place, here, rank = Path(folder), Path(folder) / "round", engine.world.rank
    checkpoint.save(engine, place, "first", {})
    work: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpoint.save(engine, here, "whole", {}),
        "plain write": lambda: _plain_write(here / f"plain-{rank}", own),
        "stall": lambda: checkpoint.save(engine, here, "behind", {}, wait=False),
        "copy": lambda: [state.clone() for state in own],
        "load": lambda: checkpoint.load(engine, place, "first"),
    }
    most = 0

    def act(name: str) -> float:
        nonlocal most
        os.sync()  # What the one before left to write shall not count for this one.
        engine.everyone.barrier()
        with _AnonymousPeak() as peak:
            start = time.perf_counter()
            work[name]()
            seconds = time.perf_counter() - start
        most = max(most, peak.extra_bytes if name == "load" else 0)
        checkpoint.finish_saving(engine)
        return max(engine.everyone.collect(seconds))

    def clean(_: int = 0) -> None:
        engine.everyone.barrier()
        if rank == 0:
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir()
        engine.everyone.barrier()

    clean()
    take_turns(list(work), 1, act, after=clean)  # For warming up.
    most = 0
    times = take_turns(list(work), rounds, act, after=clean)
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


def _rows(case: str, times: Times, facts: dict[str, int]) -> list[BenchRow]:
    megabytes = facts["bytes"] / 1e6

    def speed(seconds: float) -> float:
        return megabytes / seconds

    what = f"{megabytes:,.0f} MB, {case}"
    return [
        row(f"save, {what}", times, own="save", peer="plain write", unit="MB/s", value=speed),
        row(f"stall of a save in the background, {what}", times, own="stall", peer="copy"),
        row(f"load, hashed, {case}", times, own="load", unit="MB/s", value=speed),
        BenchRow(
            case=f"memory that loading takes, {case}",
            ours=facts["load"] / 2**20,
            unit="MiB",
            peer_name="largest unit",
            peer=facts["unit"] / 2**20,
            ratio=facts["unit"] / max(1, facts["load"]),
            n=len(times["load"]),
        ),
    ]

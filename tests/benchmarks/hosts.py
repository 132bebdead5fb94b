"""`python -m tests.benchmarks hosts`: clusters of several hosts, on namespaces of this machine with real sshd and
Slurm.

Starts of two hosts take turns with one of as many engines on this machine alone. Steps are those of a GPT of 10M
parameters, four ranks in all, so that all arrangements compute the same. Needs root.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from speedlab.calibrate.interleave import Times, row, take_turns
from speedlab.calibrate.rank_processes import changed_environment
from speedlab.calibrate.table import BenchRow, report
from speedlab.config import ConfigError
from speedlab.config.command_line import read_options
from speedlab.network import LinkRate
from tests.benchmarks.hosts_trials import (
    ssh_hosts,
    time_losses,
    time_recovery,
    time_registering,
    time_start,
    time_steps,
)
from tests.benchmarks.lab import Lab, missing_for_lab
from tests.benchmarks.lab.daemons import missing_for, start_slurm, start_sshd

PARTS = ("start", "register", "steps", "recovery")
_ARRANGEMENTS = {"1 host x 4": (1, 4), "2 hosts x 2": (2, 2), "4 hosts x 1": (4, 1)}
_LINKS = {"1 Gbit/s": LinkRate(bits_per_second=1e9), "unshaped": None}
_REGISTERED = 64
_GOALS = {"start": 1.5, "register": 60.0, "recovery": 4.0, "cut": 5.0}
"""Times one host's; seconds."""
_ONE_HOST = "one host"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start-up over SSH and Slurm, engines that register, step times on 1, 2 and 4 hosts, and ways back from failures,
    on hosts in namespaces of this machine."""

    parts: tuple[str, ...] = PARTS
    """Which of start, register, steps, recovery."""
    rounds: int = 3
    """Interleaved rounds; medians are taken over them."""
    steps: int = 5
    """Of each arrangement in a round."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks hosts")
    if unknown := [part for part in options.parts if part not in PARTS]:
        raise ConfigError(f"--parts: {unknown[0]!r} is none; there are {', '.join(PARTS)}")
    if missing := missing_for_lab() or missing_for("ssh"):
        print(f"bench hosts: {missing}", file=sys.stderr)
        sys.exit(2)
    measures: dict[str, Callable[[int], Iterator[tuple[BenchRow, str]]]] = {
        "start": _starts,
        "register": _registering,
        "steps": partial(_steps, steps=options.steps),
        "recovery": _recoveries,
    }
    found: list[tuple[BenchRow, str]] = []
    # Hosts import what this process does.
    with changed_environment({"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}):
        for part in PARTS:
            if part in options.parts:
                print(f"{part} ...", file=sys.stderr, flush=True)
                found += measures[part](options.rounds)
    report([each for each, _ in found], options.json)
    print("\n".join(reported for _, reported in found if reported))


def _starts(rounds: int) -> Iterator[tuple[BenchRow, str]]:
    with Lab(2) as lab:
        settings = start_sshd(lab)
        ways: dict[str, Callable[[], float]] = {
            _ONE_HOST: lambda: time_start("one", engines=4),
            "SSH": lambda: time_start("ssh", hosts=ssh_hosts(lab, settings, 2)),
        }
        variables = {}
        if missing := missing_for("slurm"):
            print(f"start over Slurm is left out: {missing}", file=sys.stderr)
        else:
            variables = start_slurm(lab)
            ways["Slurm"] = lambda: time_start("slurm", slurm={"nodes": 2, "engines_per_node": 2})
        with changed_environment(variables):
            take_turns(list(ways), 1, lambda name: ways[name]())  # For warming up: files are read once.
            times = take_turns(list(ways), rounds, lambda name: ways[name]())
    yield _seconds("start of 4 engines on one host", times, _ONE_HOST), ""
    for name in list(ways)[1:]:
        ratio = statistics.median(a / b for a, b in zip(times[name], times[_ONE_HOST], strict=True))
        found = _seconds(f"start of 2 hosts x 2 over {name}", times, name, peer=_ONE_HOST)
        yield found, _reported(f"start over {name}, times one host's", ratio, _GOALS["start"])


def _registering(rounds: int) -> Iterator[tuple[BenchRow, str]]:
    del rounds  # Once: what they import was read from the disk by then.
    with Lab(2) as lab:
        seconds = time_registering(lab, start_sshd(lab), _REGISTERED)
    case = f"{_REGISTERED} engines without torch, over SSH"
    yield _seconds(case, {case: [seconds]}, case), _reported(f"{case}, seconds", seconds, _GOALS["register"])


def _steps(rounds: int, *, steps: int) -> Iterator[tuple[BenchRow, str]]:
    for name, link, times in time_steps(_ARRANGEMENTS, _LINKS, rounds, steps):
        (case,) = times
        yield row(f"step, {case}, {name}, {link}", times, own=case), ""


def _recoveries(rounds: int) -> Iterator[tuple[BenchRow, str]]:
    killed, cut = "engine killed: run goes on", "host cut off: named"
    on, back = "host cut off: a new step on the other", "host back: a new step on both"
    seconds = time_recovery(rounds)
    yield (
        _seconds(killed, {killed: seconds}, killed),
        _reported(f"{killed}, seconds", statistics.median(seconds), _GOALS["recovery"]),
    )
    with Lab(2) as lab:
        losses = time_losses(lab, start_sshd(lab), rounds)
    seconds = [loss.named_seconds for loss in losses]
    yield _seconds(cut, {cut: seconds}, cut), _reported(f"{cut}, seconds", max(seconds), _GOALS["cut"])
    yield _seconds(on, {on: [loss.gone_on_seconds for loss in losses]}, on), ""
    yield _seconds(back, {back: [loss.grown_seconds for loss in losses]}, back), ""


def _seconds(case: str, times: Times, own: str, peer: str = "") -> BenchRow:
    return row(case, times, own=own, peer=peer, unit="s", value=lambda seconds: seconds)


def _reported(what: str, found: float, goal: float) -> str:
    """'start over SSH, times one host's: 1.31, goal 1.5: met'."""
    return f"{what}: {found:.2f}, goal {goal:g}: {'met' if found <= goal else 'missed'}"

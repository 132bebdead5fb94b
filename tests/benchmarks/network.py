"""`python -m tests.benchmarks network`: ways to train over slow links, on hosts in namespaces of this machine with
shaped links.

For each arrangement of hosts and each link, a case takes turns with the plain one that it stands beside:

1. Bytes of a step are counted at the hosts' interfaces, so headers and everything else are in them.
2. A step is timed in the compressed phase, plain and compressed in one run.
3. A whole run, of which 15 % are the warm-up, is timed where a case has one; plain's is as many of its steps.

Held-out losses do not depend on links, and take long: `--losses`, on one host. Needs root.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from speedlab.config import ConfigError, RunConfig
from speedlab.config.command_line import read_options
from speedlab.network import LinkRate
from tests.benchmarks.lab import missing_for_lab
from tests.benchmarks.network_cases import CASES, ENTERING, LAYOUTS, WARM_UP, Case, check_names, chosen
from tests.benchmarks.network_losses import heldout_losses
from tests.benchmarks.network_ranks import Hosts
from tests.benchmarks.network_table import UNSHAPED, Found, Rows

_LEARNING_RATE = 1e-8
_QUICK_LINKS, _QUICK_HOSTS, _QUICK_CASES = ("100 Mbit/s",), ("2x1",), ("plain ZeRO-0", "1-bit Adam, ZeRO-0")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Bytes between hosts, step times and times of whole runs, of a GPT of 10M parameters, over links of several
    bandwidths; ZeRO beside tensor parallelism and a pipeline."""

    links: tuple[str, ...] = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s", UNSHAPED)
    """Of each host, in each direction: '100 Mbit/s', or 'unshaped'."""
    hosts: tuple[str, ...] = ("2x1", "2x2")
    """Hosts x ranks of each."""
    cases: tuple[str, ...] = ()
    """Only those whose names begin so; all when left out. Layouts are compared over the slowest of the links."""
    rounds: int = 3
    """Interleaved rounds; medians are taken over them."""
    steps: int = 2
    """Of each in a round; on links of 1 Gbit/s and more three times as many."""
    run_steps: int = 20
    """Of a whole run, end to end."""
    losses: bool = False
    """Also held-out losses of the same cases, on one host."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the losses."""
    loss_steps: int = 600
    """Of each training whose held-out loss is told. A variance that is frozen after 30 updates of 200 is none yet."""
    quick: bool = False
    """1-bit Adam beside plain over 100 Mbit/s, two hosts with one rank each, and no more: two minutes."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks network")
    if options.quick:
        options = _quick(options)
    try:
        links = {text: _link(text) for text in options.links}
        arrangements = [_arrangement(text) for text in options.hosts]
        check_names(options.cases)
        groups, layouts = chosen(CASES, options.cases), chosen(LAYOUTS, options.cases)
        _check([*groups, *layouts], options)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if missing := missing_for_lab():
        print(
            f"bench network: {missing}. Without them Cluster(engines=2, link='100 Mbit/s') pretends a link",
            file=sys.stderr,
        )
        sys.exit(2)
    losses = heldout_losses(groups, options.seeds, options.loss_steps, _say) if options.losses else {}
    found: list[Found] = []
    slowest = min(links, key=lambda text: float("inf") if (rate := links[text]) is None else rate.bits_per_second)
    work = [(each, group, links) for each in arrangements for group in groups]
    work += [((2, 1), group, {slowest: links[slowest]}) for group in layouts]
    for (count, each), own in groupby(work, key=itemgetter(0)):
        with Hosts(count, each) as hosts:
            for _, group, over in own:
                found += _measured(hosts, f"{count}x{each}", group, over, options)
    print(Rows(found, losses))
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(each)) + "\n" for each in found))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _quick(options: Options) -> Options:
    fields = {"links": _QUICK_LINKS, "hosts": _QUICK_HOSTS, "cases": _QUICK_CASES, "rounds": 2, "steps": 1}
    return Options(**{**vars(options), **fields})


def _link(text: str) -> LinkRate | None:
    """'100 Mbit/s'; None for 'unshaped'."""
    link = None if text == UNSHAPED else LinkRate.parse(text)
    if link is not None and link.latency_seconds:
        raise ValueError(f"--links: {text!r} has a latency, and real links are shaped by bandwidth alone; leave it out")
    return link


def _arrangement(text: str) -> tuple[int, int]:
    """'2x1' -> 2 hosts, 1 rank each."""
    count, _, each = text.partition("x")
    if not (count.isdecimal() and each.isdecimal() and int(count) > 1 and int(each) > 0):
        raise ValueError(f"--hosts: {text!r} is no arrangement; write hosts, 'x' and ranks of each, as '2x1'")
    return int(count), int(each)


def _check(groups: Sequence[Sequence[Case]], options: Options) -> None:
    """Raise ConfigError where a case cannot be built, before anything starts."""
    for case in (case for group in groups for case in group):
        for warm_up in (1, _warm_up(options)):
            case.config(warm_up_steps=warm_up, steps=_steps_in_all(options))


def _warm_up(options: Options) -> int:
    """After which step compression begins in a whole run; the first ones are not timed."""
    return ENTERING + max(1, round(WARM_UP * options.run_steps))


def _steps_in_all(options: Options) -> int:
    """More than any engine makes: schedules and warm-ups are to end within a run."""
    return 1000 + options.run_steps


def _timed(case: Case, options: Options, warm_up_steps: int = 1) -> RunConfig:
    """Parameters hardly move: the variance of so few steps of a warm-up is one with which a training would diverge."""
    return case.config(warm_up_steps=warm_up_steps, steps=_steps_in_all(options), optimizer={"lr": _LEARNING_RATE})


def _measured(
    hosts: Hosts, name: str, group: Sequence[Case], links: Mapping[str, LinkRate | None], options: Options
) -> Iterator[Found]:
    """Rows of a plain case and those beside it, over each link."""
    plain = group[0]
    for case in group:
        hosts.enter(case.name, _timed(case, options))
    for text, link in links.items():
        hosts.shape(link)
        fast = link is None or link.bits_per_second >= 1e9
        times, sent = hosts.take_turns(
            {case.name: case.period for case in group}, options.rounds, options.steps * (3 if fast else 1)
        )
        usual = statistics.median(times[plain.name])
        for case in group:
            seconds = times[case.name]
            ratios = [before / own for before, own in zip(times[plain.name], seconds, strict=True)]
            run_speed, run_sent = statistics.median(ratios), sent[case.name]
            if case.warm_up:
                run_seconds, run_sent = _whole_run(hosts, case, link, options)
                run_speed = usual / run_seconds
            row = Found(
                hosts=name,
                link=text,
                case=case.name,
                alongside=case.alongside,
                step_seconds=statistics.median(seconds),
                step_bytes=sent[case.name],
                bytes_share=sent[case.name] / sent[plain.name],
                step_speed=statistics.median(ratios),
                step_speed_range=(min(ratios), max(ratios)),
                run_bytes_share=run_sent / sent[plain.name],
                run_speed=run_speed,
                wire_seconds=0.0 if link is None else link.seconds(sent[case.name]),
                goal=case.goal,
            )
            _say(
                f"{name}, {text}: {case.name}: {1e3 * row.step_seconds:,.0f} ms, {row.step_bytes / 1e6:,.2f} MB a step"
            )
            yield row
    for case in group:
        hosts.leave(case.name)


def _whole_run(hosts: Hosts, case: Case, link: LinkRate | None, options: Options) -> tuple[float, float]:
    """Seconds and bytes of a step, over a whole run that begins with the warm-up."""
    name = f"{case.name}, whole"
    hosts.enter(name, _timed(case, options, warm_up_steps=_warm_up(options)))
    hosts.shape(link)
    try:
        return hosts.take(name, options.run_steps)
    finally:
        hosts.leave(name)
        hosts.shape(link)

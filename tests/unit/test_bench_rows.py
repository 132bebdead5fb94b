"""What a benchmark prints: whose turn it is, medians and ranges of ratios, and which allocator a row had."""

from __future__ import annotations

import ctypes
import itertools
import json

import pytest

from speedlab.calibrate.interleave import row, take_turns, turned
from speedlab.calibrate.rank_processes import KEPT_MEMORY
from speedlab.calibrate.table import BenchRow, render, report
from tests.benchmarks import contestants, start, step


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_of_any_two_contestants_each_is_the_earlier_one_equally_often(count) -> None:
    names = [str(number) for number in range(count)]
    orders = [turned(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    for one, other in itertools.combinations(names, 2):
        assert sum(order.index(one) < order.index(other) for order in orders) == count
    assert [order[0] for order in orders[::2]] == names, "each begins in turn"


def test_every_round_has_each_contestant_once() -> None:
    calls: list[str] = []
    rounds: list[int] = []
    times = take_turns("ab", 3, lambda name: float(calls.append(name) or len(calls)), after=rounds.append)
    assert "".join(calls) == "abbaba"
    assert times == {"a": [1, 4, 6], "b": [2, 3, 5]}
    assert rounds == [0, 1, 2]


def test_ratios_are_those_of_one_round_with_their_range() -> None:
    times = {"limit": [1.0, 2.0, 1.0], "ours": [2.0, 2.0, 4.0], "peer": [3.0, 2.0, 8.0]}
    found = row("a case", times, peer="peer", floor="limit", unit="1/s", value=lambda seconds: 1 / seconds)
    assert (found.ours, found.peer, found.n) == (0.5, 1 / 3, 3)
    assert (found.ratio, found.ratio_range) == (1.5, (1.0, 2.0))
    assert (found.limit_share, found.limit_range) == (0.5, (0.25, 1.0))
    assert found.spread == 0.5


def test_a_row_says_its_allocator_and_the_range_of_its_ratio(tmp_path) -> None:
    seconds = {"limit": [1.0, 1.0], "ours 1": [2.0, 1.0], "DDP as installed": [4.0, 4.0], "before ours 1": [1.0, 1.0]}
    rows = step._rows("float32", 2, seconds)
    cases = [(each.case.partition("ranks: ")[2], each.allocator, each.peer_name) for each in rows]
    assert cases == [
        ("limit", "kept", ""),
        ("ours 1", "kept", "before ours 1"),
        ("DDP as installed", "as installed", ""),
        ("before ours 1", "kept", ""),
    ]
    lines = render(rows).splitlines()
    assert "allocator" in lines[0]
    assert "0.75 (0.5..1)" in lines[2]
    assert "allocator" not in render([BenchRow(case="a case", ours=1.0, unit="ms")])
    report(rows, tmp_path / "rows.json")
    records = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert records[1]["ratio_range"] == records[1]["limit_range"] == [0.5, 1.0]
    keys = {"case", "ours", "unit", "peer_name", "peer", "ratio", "limit_share", "n", "spread"}
    assert keys < set(records[1])


def test_peers_get_the_allocator_setting_that_engines_ask_for(monkeypatch) -> None:
    from speedlab.engine.memory_ledger import keep_freed_memory

    asked: dict[int, int] = {}

    class Library:
        def __init__(self, name: str) -> None: ...

        def mallopt(self, name: int, value: int) -> None:
            asked[name] = value

    monkeypatch.setattr(ctypes, "CDLL", Library)
    keep_freed_memory()
    mmap_threshold, trim_threshold, mmap_max = -3, -1, -4  # mallopt(3)
    assert asked == {
        mmap_threshold: int(KEPT_MEMORY["MALLOC_MMAP_THRESHOLD_"]),
        trim_threshold: int(KEPT_MEMORY["MALLOC_TRIM_THRESHOLD_"]),
        mmap_max: int(KEPT_MEMORY["MALLOC_MMAP_MAX_"]),
    }


def test_limit_and_ddp_are_shown_without_the_setting_too() -> None:
    names = contestants.names()
    assert [name for name in names if name.endswith("as installed")] == ["limit as installed", "DDP as installed"]


def test_beside_another_checkout_peers_are_left_out_unless_named(tmp_path) -> None:
    wanted = step._wanted(step.Options(against=tmp_path))
    own = [f"{kind} {stage}" for kind in ("ours", "shipped") for stage in range(4)]
    assert wanted == ["limit", *own, "onebit_adam 0", "onebit_adam 1"]
    assert step._wanted(step.Options(against=tmp_path, only=("ours 0", "DDP"))) == ["DDP", "ours 0"]
    assert step._wanted(step.Options()) == contestants.names()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "DPP"], "no contestant 'DPP'; there are limit, DDP,"),
        (["--against", "nowhere"], "--against nowhere: no checkout of the project; there is no speedlab/__init__.py"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, problem, capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        step.main(arguments)
    assert refused.value.code == 2
    assert problem in capsys.readouterr().err


def test_starts_of_all_sizes_take_turns_beside_their_imports_and_are_stopped(monkeypatch, capsys) -> None:
    running: list[int] = []
    turns: list[str] = []

    class FakeCluster:
        def __init__(self, engines: int, **_: object) -> None:
            self.engines = engines

        def start(self) -> None:
            assert running == [], "the one before was stopped"
            running.append(self.engines)
            turns.append(f"start {self.engines}")

        def stop(self) -> None:
            running.remove(self.engines)

    monkeypatch.setattr(start, "Cluster", FakeCluster)
    monkeypatch.setattr(start, "_import", lambda processes: turns.append(f"imports {processes}") or 0.5)
    start.main(["--engines", "1", "4", "--rounds", "3"])
    every = sorted(["start 1", "imports 1", "start 4", "imports 4"])
    assert [sorted(turns[at : at + 4]) for at in range(0, 16, 4)] == [every] * 4  # One round for warming up.
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["start of 1 engines", "start of 4 engines"]
    assert "limit_share" in lines[0]

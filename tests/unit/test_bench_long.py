"""`python -m tests.benchmarks long`: lines, exponents, what it tells, and a run of it."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import context, long
from tests.benchmarks.long import CHECKPOINTED, DENSE, LONG, SIDES, TILED, Found, Line


def found(**changes) -> Found:
    lines = dict.fromkeys((side.name for side in SIDES), Line(fixed=0, per_token=2048))
    longest = {DENSE.name: 1000, CHECKPOINTED.name: 4000, TILED.name: 8000, LONG.name: 10_000}
    steps = {DENSE.name: [12.0, 9.0, 14.0], LONG.name: [2.0, 1.0, 2.0]}
    fields = {"peaks": {DENSE.name: 2**30, LONG.name: None}, "growth": [(4096, 1.0), (16384, 4.0), (65536, 16.0)]}
    return Found(**{"dtype": "float32", "lines": lines, "longest": longest, "steps": steps, **fields, **changes})


def test_the_longest_sequence_follows_from_two_short_ones() -> None:
    line = Line.through([(1000, 1_500_000), (3000, 3_500_000)])
    assert (line.fixed, line.per_token) == (500_000, 1000)
    assert line.longest(1_000_000_000) == 999_488  # 999,500 in whole blocks of 64.
    assert line.longest(400_000) == 0


def test_lengths_whose_memory_does_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="2000 tokens took 5 bytes, 1000 tokens 5; measure lengths further apart"):
        Line.through([(1000, 5), (2000, 5)])


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_the_exponent_is_that_of_the_law(power: float) -> None:
    assert long.exponent([(n, 3 * n**power) for n in (4096, 16384, 65536)]) == pytest.approx(power)


def test_rows_hold_ours_against_each_peer() -> None:
    *longest, step, growth = long.rows(found(), 1.0)
    assert [(row.peer_name, row.ratio) for row in longest] == [
        (DENSE.name, 10),
        (CHECKPOINTED.name, 2.5),
        (TILED.name, 1.25),
    ]
    assert (step.case, step.ours, step.peer, step.ratio) == ("float32: a step of 1,000 tokens", 2, 12, 7)
    assert growth.case == "float32: growth of a step's time, 4,096 to 65,536 tokens"
    assert growth.ours == pytest.approx(1)


def test_goals_are_told_as_met_or_missed_and_lengths_as_trained_or_not() -> None:
    reported = "\n".join(long.reported(found()))
    assert "dense: 1,000 tokens trained, with 1.000 GiB at most; 2.00 KiB a token" in reported
    assert "dense, checkpointing: 4,000 tokens by the line alone" in reported
    assert "tiles: 10,000 tokens trained, without a limit" in reported
    assert "longest / dense: 10.00, goal 10: met" in reported
    assert "longest / dense, checkpointing: 2.50, goal 3: MISSED" in reported
    assert "step / dense: 7.00, goal 6: met" in reported
    assert "growth: 1.00, goal 1.1: met" in reported
    worse = found(growth=[(4096, 1.0), (65536, 64.0)], longest=found().longest | {LONG.name: 9990})
    assert "growth: 1.50, goal 1.1: MISSED" in "\n".join(long.reported(worse))
    assert "longest / dense: 9.99, goal 10: MISSED" in "\n".join(long.reported(worse))


@pytest.mark.nightly  # Nine processes start, which takes most of a minute.
@pytest.mark.timeout(240)
def test_a_small_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = "--layers 2 --limits-gib 0.06 --short 1024 2048 --growth 512 2048 --tile 256 --dtypes bfloat16"
    long.main([*words.split(), "--json", str(file)])
    reported = capsys.readouterr().out
    assert "bfloat16, dense: " in reported
    assert reported.count(" tokens trained, with") == 2
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 5
    assert rows[0]["ratio"] > 1, reported
    assert rows[3]["ratio"] > 1, reported


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_small_run_over_ranks(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = "--dtypes float32 --layers 1 --deep 4 --spread 2 --length 1024 --short 2048 4096 --rounds 1 --limit-gib 0.5"
    context.main([*words.split(), "--json", str(file)])
    reported = capsys.readouterr().out
    assert reported.count("of one rank's, goal") == 4
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["unit"] for row in rows] == ["s", "s", "tokens", "tokens"]
    assert all(row["peer_name"] == "one rank" for row in rows)
    assert all(row["ratio"] > 1 for row in rows[2:]), reported

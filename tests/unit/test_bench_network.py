"""`python -m tests.benchmarks network` and `bench hosts`: cases as data, what is told of them, and what they say
without root."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speedlab.config import ConfigError
from speedlab.config.command_line import read_options
from tests.benchmarks import hosts, network
from tests.benchmarks.network_cases import CASES, LAYOUTS, SEED_NOISE, Case, Goal, check_names, chosen
from tests.benchmarks.network_table import Found, Rows, reached


def found(**changes: Any) -> Found:
    fields = {
        "hosts": "2x1",
        "link": "100 Mbit/s",
        "case": "new",
        "alongside": "plain",
        "step_seconds": 0.5,
        "step_bytes": 1e6,
        "bytes_share": 1 / 30,
        "step_speed": 9.0,
        "step_speed_range": (8.5, 9.5),
        "run_bytes_share": 1 / 6,
        "run_speed": 3.0,
        "wire_seconds": 0.4,
        "goal": Goal(bytes_share=1 / 28, step_speed=8, run_speed=3.5, loss_within=SEED_NOISE),
    }
    return Found(**{**fields, **changes})


def test_every_case_can_be_built_and_stands_beside_a_plain_one() -> None:
    for cases in (CASES, LAYOUTS):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        for case in cases:
            assert case.alongside in ("", *(each.name for each in cases if not each.alongside))
            config = case.config(warm_up_steps=7, steps=100)
            assert config.steps == 100
    onebit = next(case for case in CASES if case.warm_up)
    assert onebit.config(warm_up_steps=7, steps=100).optimizer.freeze_step == 7
    assert onebit.config(steps=100).optimizer.name == "onebit_adam"
    # One model and as many tokens a step for all layouts, or they could not be compared.
    batches = [case.config() for case in LAYOUTS]
    assert len({(each.batch.global_size, each.data.sequence_length, each.model) for each in batches}) == 1


def test_cases_are_chosen_with_the_plain_one_that_they_stand_beside() -> None:
    assert [[case.name for case in group] for group in chosen(CASES, ("1-bit Adam, ZeRO-1",))] == [
        ["plain ZeRO-1", "1-bit Adam, ZeRO-1"]
    ]
    assert [case for group in chosen(CASES, ()) for case in group] == list(CASES)
    assert chosen(LAYOUTS, ("plain",)) == []
    with pytest.raises(ValueError, match=r"no case begins with '2-bit'; there are plain ZeRO-0; 1-bit Adam, ZeRO-0"):
        check_names(("plain", "2-bit"))


def test_layers_of_settings_are_laid_part_by_part() -> None:
    case = Case(name="c", settings={"zero": {"stage": 1}}, warm_up=("optimizer.freeze_step",))
    config = case.config(warm_up_steps=3, steps=10, batch={"micro_size": 5})
    assert (config.zero.stage, config.optimizer.freeze_step, config.batch.micro_size) == (1, 3, 5)


def test_goals_are_told_where_a_row_can_speak_of_them() -> None:
    losses = {"plain": [2.0, 2.1], "new": [2.06, 2.12]}
    assert list(reached(found(), {})) == ["bytes ≤ 1/28: yes", "step ≥ 8: yes", "run ≥ 3.5: no"]
    assert list(reached(found(link="1 Gbit/s", bytes_share=0.1), losses)) == ["bytes ≤ 1/28: no", "loss ≤ +4.88%: yes"]
    gigabit, unshaped = (found(link=link, goal=Goal(gigabit_share=0.9)) for link in ("1 Gbit/s", "unshaped"))
    assert list(reached(gigabit, {}, [gigabit, unshaped])) == ["of unshaped ≥ 0.9: yes"]
    assert list(reached(gigabit, {}, [replace(unshaped, step_seconds=0.4)])) == ["of unshaped ≥ 0.9: no"]
    assert list(reached(found(goal=Goal(run_bytes_share=1 / 60)), {})) == ["run's bytes ≤ 1/60: no"]
    strict = Goal(loss_within=0.005)
    assert list(reached(found(goal=strict), losses)) == ["loss ≤ +0.50%: no"]


def test_the_table_says_what_limits_a_step() -> None:
    plain = found(case="plain", alongside="", goal=Goal())
    table = Rows([plain, found(), found(wire_seconds=0.1), found(link="unshaped", wire_seconds=0.0)], {})
    cells = [dict(zip(table.head(), line, strict=True)) for line in table.cells()]
    limits = [line["limited by"] for line in cells]
    assert limits == ["the link, 80%", "the link, 80%", "computing, link 20%", "computing"]
    assert [line["bytes of plain"] for line in cells[:2]] == ["1", "1/30"]
    assert (cells[1]["step speed (range)"], cells[1]["end to end"]) == ("9.00 (8.50..9.50)", "3.00")
    assert [line["bytes of a run"] for line in cells[:2]] == ["1", "1/6"]
    assert (cells[0]["goal: reached"], cells[3]["goal: reached"]) == ("–", "bytes ≤ 1/28: yes")


@pytest.mark.parametrize("bench", [network, hosts])
def test_without_root_it_is_said_in_a_sentence(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "missing_for_lab", lambda: "hosts in namespaces need Linux and root")
    with pytest.raises(SystemExit) as ended:
        bench.main([])
    assert ended.value.code == 2
    assert "hosts in namespaces need Linux and root" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--links", "slow"], "link 'slow' cannot be read; write a bandwidth"),
        (["--links", "1 Gbit/s 1 ms"], "'1 Gbit/s 1 ms' has a latency, and real links are shaped by bandwidth alone"),
        (["--hosts", "1x2"], "'1x2' is no arrangement; write hosts, 'x' and ranks of each, as '2x1'"),
        (["--cases", "none"], "no case begins with 'none'"),
    ],
)
def test_what_it_cannot_read_is_refused_before_anything_starts(words: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        network.main(words)


def test_a_quick_run_is_two_cases_over_one_link() -> None:
    quick = network._quick(read_options(network.Options, ["--quick"], "python -m tests.benchmarks network"))
    assert (quick.links, quick.hosts) == (("100 Mbit/s",), ("2x1",))
    assert chosen(LAYOUTS, quick.cases) == []
    assert [case.name for group in chosen(CASES, quick.cases) for case in group] == list(quick.cases)


def test_parts_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--parts: 'stop' is none; there are start, register, steps, recovery"):
        hosts.main(["--parts", "stop"])


def test_a_goal_of_hosts_is_met_or_missed() -> None:
    assert hosts._reported("start, times one host's", 1.3, 1.5) == "start, times one host's: 1.30, goal 1.5: met"
    assert hosts._reported("seconds", 61, 60) == "seconds: 61.00, goal 60: missed"

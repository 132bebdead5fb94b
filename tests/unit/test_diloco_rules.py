"""Islands before they run: what is refused, what they hold and how long they take by the plan, what is shown."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from telemetry_samples import make_record

from speedlab.config import ConfigError, RunConfig
from speedlab.config.layout_rules import why_not
from speedlab.config.validation import host_problem
from speedlab.layout import Layout, LayoutError
from speedlab.planner.plan import plan
from speedlab.telemetry.figures import History, figures, header
from speedlab.telemetry.run_folder import Status


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"optimizer": "onebit_adam", "zero": 0}, "set optimizer.name to 'adamw', and outer.compression to 'signs'"),
        ({"offload": {"optimizer": "host"}}, "offload.optimizer is 'host', .* set offload.optimizer to 'none'"),
        ({"precision": {"masters": "none", "dtype": "bfloat16"}}, "float32 masters, and precision.masters is 'none'"),
        ({"optimizer": {"in_backward": True}}, "optimizer.in_backward updates each unit before; set it to false"),
        ({"outer": {"every_steps": 4, "delay_steps": 4}}, "has to have ended; set delay_steps to at most 3"),
        (
            {"outer": {"every_steps": 4, "fragments": 5}},
            "meets once in outer.every_steps 4; set fragments to at most 4",
        ),
        ({"zero": {"stage": 3, "quantized_weights": True}}, "slow ones \\(weights in int8\\); leave its switches off"),
        ({"steps": 40}, "every_steps 50 is more than the run's 40 steps.* set it to 10, a quarter of the run, or"),
    ],
)
def test_what_islands_do_not_go_with_is_refused_with_what_does(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        RunConfig(**{"parallel": {"islands": 2}, **changes})
    with pytest.raises(ConfigError):
        RunConfig(outer={"every_steps": 0})


def test_islands_share_the_engines_and_the_batch() -> None:
    config = RunConfig(parallel={"islands": 2})
    assert config.layout(8) == Layout(islands=2, dp=4)
    assert config.batch.resolve(config.layout(8).data_size).dp == 8
    with pytest.raises(LayoutError, match=r"6 ranks do not divide by islands 4 × pp 1 × tp 1 = 4"):
        RunConfig(parallel={"islands": 4}).layout(6)
    reported = why_not(RunConfig(parallel={"islands": 2}), 8, tp=3)
    assert reported is not None
    assert "on 8 engines islands 2 × pp 1 × dp 2 × tp 2 or" in reported


def test_a_script_may_meet_more_rarely_than_the_steps_of_no_run() -> None:
    config = RunConfig(parallel={"islands": 2}, outer={"every_steps": 10**6})
    assert config.replace(zero=1).outer.every_steps == 10**6
    with pytest.raises(ConfigError, match=r"outer\.every_steps 1000000 is more than the run's 200 steps"):
        config.replace(steps=200)


@pytest.mark.parametrize(
    ("islands", "ranks", "reported"),
    [
        (2, {"a": 2, "b": 2}, ""),
        (4, {"a": 2, "b": 2}, ""),
        (3, {"a": 4, "b": 2}, ""),
        (1, {"a": 4, "b": 2}, ""),
        (2, {"a": 4, "b": 2}, "cut the ranks of host a .* 1 or 3 islands would do"),
        (2, {"a": 2, "b": 2, "c": 2}, "islands of 3 ranks cut the ranks of host b .*: 1 or 3 islands would do"),
    ],
)
def test_islands_are_whole_hosts_or_hosts_whole_islands(islands: int, ranks: dict[str, int], reported: str) -> None:
    problem = host_problem(islands, [host for host, count in ranks.items() for _ in range(count)])
    if not reported:
        assert problem is None
    else:
        with pytest.raises(ValueError, match=reported):
            raise ValueError(problem)


def test_the_plan_counts_what_is_kept_and_meetings_and_advises() -> None:
    config = RunConfig(model="gpt2", zero=1, precision="bfloat16", batch={"micro_size": 2}, parallel={"islands": 2})
    usual = plan(config.replace(parallel={"islands": 1}), "2x1 H100 eth-1")
    whole, signs = (
        plan(config.replace(outer={"compression": compression}), "2x1 H100 eth-1") for compression in ("none", "signs")
    )
    one = plan(config.replace(zero=0, parallel={"islands": 1}), "1 H100").heaviest
    elements = one.gradients // 2
    assert whole.heaviest.gradients - one.gradients == 8 * elements, "anchor and momentum"
    assert signs.heaviest.gradients - one.gradients == 12 * elements, "and an error"
    assert whole.time.parts["islands"] == pytest.approx(2 * usual.time.parts["data parallel"] / 50, rel=0.3)
    assert 28 < whole.time.parts["islands"] / signs.time.parts["islands"] < 32
    rare = plan(config.replace(outer={"every_steps": 100}), "2x1 H100 eth-1")
    assert rare.time.parts["islands"] == pytest.approx(whole.time.parts["islands"] / 2)
    late = plan(config.replace(outer={"delay_steps": 1, "fragments": 4}), "2x1 H100 eth-1")
    assert 0 < late.time.parts["islands"] < whole.time.parts["islands"], "a step hides some of each meeting"
    assert signs.advice.startswith("islands that meet every 50 steps make")
    assert "take islands 1" in plan(config.replace(parallel={"islands": 2}), "8 H100").advice
    with pytest.raises(ValueError, match=r"parallel\.islands 2: islands meet with float32 masters"):
        plan(replace(whole.setup, masters="none"), "2x1 H100 eth-1")


def test_meetings_are_drawn_and_told() -> None:
    separate = {"met": 0.0, "steps_to_meeting": 1, "sent_bytes": 0.0, "float32_bytes": 1000.0}
    met = separate | {"met": 1.0, "steps_to_meeting": 2, "sent_bytes": 32.0, "error_norm": 0.5}
    history = History.of({0: [make_record(1, exchange=separate), make_record(2, exchange=met)]})
    sent, angle, error = figures(history)["exchange"]["data"]
    assert sent["y"].tolist() == pytest.approx([0, 3.2])
    assert all(math.isnan(y) for y in angle["y"].tolist())
    assert error["y"].tolist() == [0, 0.5]
    assert "islands meet in 2 steps" in header(history, name="far", status=Status()).text

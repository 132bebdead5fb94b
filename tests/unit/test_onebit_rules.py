"""1-bit Adam before it runs: what is refused, what it holds how long it takes by the plan, what records show."""

from __future__ import annotations

import json
import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from telemetry_samples import make_record

from speedlab.config import ConfigError, OptimizerConfig, RunConfig
from speedlab.optim.zero_one_adam import StepKind, StepPolicy
from speedlab.planner import model_states
from speedlab.planner.plan import plan
from speedlab.telemetry.figures import History, figures, header
from speedlab.telemetry.record_store import Columns, RankRecords
from speedlab.telemetry.records import StepRecord
from speedlab.telemetry.run_folder import Status


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"zero": 2}, "needs whole gradients on every rank, and zero.stage 2 partitions them; set zero.stage to 0"),
        ({"zero": 1, "offload": {"optimizer": "host"}}, "and offload.optimizer is 'host'; set offload.optimizer to"),
        (
            {"zero": 0, "precision": {"moments": "8bit"}},
            "freezes a variance in float32, and precision.moments is '8bit'",
        ),
        ({"zero": 0, "precision": {"masters": "none", "dtype": "bfloat16"}}, "updates float32 masters, and precision"),
        ({"zero": 0, "optimizer": {"in_backward": True}}, "in_backward uses each unit's as it comes; set it to false"),
        (
            {"zero": 0, "optimizer": {"name": "onebit_lamb", "factor_min": 5}},
            "factor_min 5 is more than optimizer.factor_max 4, and the factor of a trust ratio is between them",
        ),
        (
            {"zero": 1, "optimizer": {"name": "onebit_lamb"}, "offload": {"optimizer": "host"}},
            "set offload.optimizer to 'none', or optimizer.name to 'lamb'",
        ),
        ({"zero": 0, "steps": 50, "optimizer": {"freeze_step": 50}}, "freeze_step 50 is no earlier .* set it to 10"),
        (
            {"zero": 1, "optimizer": {"name": "zero_one_adam"}},
            "zero.stage 1 partitions what they change; set zero.stage to 0, or optimizer.name to 'onebit_adam'",
        ),
        ({"zero": 3, "optimizer": {"name": "zero_one_adam"}}, "zero.stage 3 partitions them; set zero.stage to 0$"),
        (
            {"zero": 0, "parallel": {"cp": 2}, "optimizer": {"name": "zero_one_adam"}},
            "the 2 ranks of parallel.cp compute one sequence together, .* set parallel.cp to 1",
        ),
        (
            {"zero": 0, "offload": {"optimizer": "host"}, "optimizer": {"name": "zero_one_adam"}},
            "set offload.optimizer to 'none', or optimizer.name to 'adamw'",
        ),
        (
            {"zero": 0, "steps": 10, "optimizer": {"name": "zero_one_adam"}},
            "variance_doubling 16 updates the variance by whole gradients up to the run's last step, 10, .* to 2, a",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_with_what_does(changes: dict[str, Any], reported: str) -> None:
    changes = {**changes, "optimizer": {"name": "onebit_adam", **changes.get("optimizer", {})}}
    with pytest.raises(ConfigError, match=reported):
        RunConfig(**changes)


def test_zero_one_adam_updates_its_variance_and_exchanges_ever_more_seldom() -> None:
    steps = StepPolicy(freeze_step=14, variance_doubling=2, local_doubling=3, max_local_steps=3)
    kinds = "".join(steps.kind(step).name[0] for step in range(1, 31))
    assert kinds == "WWSWSWSWSSSWSS" + "SSS" + "SNS" + "S" + 3 * "NNS"
    assert steps.plain == 2
    assert [steps.to_exchange(step) for step in (17, 18, 21, 22, 24)] == [1, 2, 3, 2, 3]
    never = StepPolicy(freeze_step=None, variance_doubling=16, local_doubling=1, max_local_steps=16)
    assert "".join(never.kind(step).name[0] for step in range(1, 49)) == "W" * 16 + "SW" * 16
    assert [step for step in range(49, 300) if never.kind(step) is StepKind.WHOLE][:18] == [
        *range(52, 116, 4),
        120,
        128,
    ]
    assert never.kind(10**9) is StepKind.SIGNS


def test_a_script_without_steps_may_freeze_late_and_a_run_may_not() -> None:
    config = RunConfig(zero=0, optimizer={"name": "onebit_adam", "freeze_step": 500})
    assert config.layout(2, built_in=False).dp == 2
    with pytest.raises(ConfigError, match="freeze_step 500 is no earlier than the run's last step, 200"):
        config.layout(2)


def test_the_plan_counts_feedback_and_signs_and_advises() -> None:
    optimizer = OptimizerConfig(name="onebit_adam")
    for stage in (0, 1):
        states = model_states(1000, dp=4, stage=stage, dtype="bfloat16", optimizer=optimizer)
        assert states.gradients == 4 * 1000 + 4 * 1000 + 4 * 250, "a gradient, a worker's error, a quarter server"
        assert states.optimizer_moments == model_states(1000, dp=4, stage=stage, dtype="bfloat16").optimizer_moments
    config = RunConfig(model="gpt2", zero=0, optimizer={"name": "onebit_adam"}, precision="bfloat16")
    slow, fast = plan(config, "2x1 H100 eth-1"), plan(config, "8 H100")
    usual = plan(config.replace(optimizer="adamw"), "2x1 H100 eth-1")
    share = slow.time.parts["data parallel"] / usual.time.parts["data parallel"]
    assert share < 1 / 14, "of bfloat16, which AdamW may hide behind its backward besides"
    assert slow.heaviest.gradients - 2 * usual.heaviest.gradients == pytest.approx(
        1.5 * 2 * usual.heaviest.gradients, rel=1e-6
    )
    assert slow.advice.startswith("compressed steps are ")
    assert "take adamw" in fast.advice
    assert usual.advice == ""
    assert slow.advice in str(slow)
    lamb = plan(config.replace(optimizer="onebit_lamb"), "2x1 H100 eth-1")
    assert "times as fast as lamb's here" in lamb.advice
    assert lamb.heaviest.optimizer_moments == 1.5 * slow.heaviest.optimizer_moments, "a fresh variance"
    seldom = {"name": "zero_one_adam", "freeze_step": 10, "max_local_steps": 4}
    zero_one = plan(config.replace(optimizer=seldom), "2x1 H100 eth-1")
    assert zero_one.time.parts["data parallel"] == pytest.approx(slow.time.parts["data parallel"] / 4)
    assert zero_one.heaviest.optimizer_moments == 1.5 * slow.heaviest.optimizer_moments, "an anchor"
    assert "times as fast as adamw's here" in zero_one.advice
    many = plan(config.replace(optimizer=seldom | {"max_local_steps": 16}), "2x8 H100 eth-1").advice
    assert re.match(r"compressed steps are \d{3} times as fast", many)
    assert plan(config.replace(optimizer="zero_one_adam"), "2x1 H100 eth-1").heaviest == slow.heaviest
    alone = plan(config, "1 H100")
    assert "exchanges nothing" in alone.advice
    staged = plan(config.replace(zero=1), "2x1 H100 eth-1")
    assert staged.time.parts["data parallel"] == slow.time.parts["data parallel"], "signs there and back"
    with pytest.raises(ValueError, match=r"needs whole gradients"):
        plan(replace(slow.setup, zero_stage=2), "2x1 H100 eth-1")


REPORTED = {"compressed": 1.0, "error_norm": 0.5, "sent_bytes": 320.0, "float32_bytes": 10_000.0}


def test_records_carry_an_exchange_and_those_of_before_have_none(tmp_path: Path) -> None:
    record = make_record(1, exchange=REPORTED)
    assert StepRecord.from_json(record.to_json()) == record
    old = json.loads(make_record(1).to_json())
    del old["exchange"]
    assert StepRecord.from_json(json.dumps(old)).exchange == {}
    columns = Columns(0)
    for each in (
        make_record(1),
        make_record(2, exchange=REPORTED),
        make_record(3, exchange=REPORTED | {"angle": 30.0}),
    ):
        columns.append(each)
        assert columns[len(columns) - 1] == each
    file, reported = tmp_path / "rank-0.jsonl", list[str]()
    file.write_text(record.to_json() + "\n" + make_record(2, exchange={"angle": "wide"}).to_json() + "\n")
    records = RankRecords(file, 0, threading.RLock(), reported.append)
    records.read()
    assert list(records) == [record]
    assert len(reported) == 1


def test_an_exchange_is_drawn_and_told_where_there_is_one() -> None:
    warm = [make_record(step, exchange={"compressed": 0.0}) for step in (1, 2)]
    compressed = [make_record(3, exchange=REPORTED | {"angle": 30.0}), make_record(4, exchange=REPORTED)]
    history = History.of({0: warm + compressed})
    sent, angle, error = figures(history)["exchange"]["data"]
    assert sent["y"].tolist() == pytest.approx([100, 100, 3.2, 3.2])
    assert [None if math.isnan(y) else y for y in angle["y"].tolist()] == [None, None, 30.0, 30.0], "the last look"
    assert error["y"].tolist() == [0, 0, 0.5, 0.5]
    assert "exchange" not in figures(History.of({0: [make_record(1)]}))
    text = header(history, name="slow", status=Status()).text
    assert "ZeRO stage 2 · compressed, 3.2 % of float32 sent" in text
    assert "warm-up before compression" in header(History.of({0: warm}), name="slow", status=Status()).text
    for reported, words in (
        ({"compressed": 0.0, "variance_updated": 1.0}, "gradients sent whole, for the variance"),
        (REPORTED | {"steps_to_exchange": 3.0}, "ranks exchange in 3 steps"),
        (REPORTED | {"steps_to_exchange": 1.0}, "ranks exchange in 1 step"),
    ):
        history = History.of({0: [make_record(1, exchange=reported)]})
        assert f" · {words} · " in header(history, name="slow", status=Status()).text

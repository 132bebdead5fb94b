"""ZeRO++ before it runs: what is refused, what a row of the table says, how long it takes by the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speedlab.config import ConfigError, RunConfig
from speedlab.config.validation import secondary_problem, unequal_problem
from speedlab.layout import LayoutError
from speedlab.placement import INT4, INT8, Replication, ZeroPolicy, state_placements
from speedlab.planner.plan import plan

ALL = {"quantized_weights": True, "quantized_gradients": True}


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"zero": {"stage": 0, "quantized_weights": True}}, "under which parameters never travel; set zero.stage to 2"),
        ({"zero": {"stage": 0, "quantized_gradients": True}}, "no rank owns the sum of a part; set zero.stage to 2"),
        ({"zero": {"stage": 2, "secondary_partition": 2}}, "secondary_partition 2 needs zero.stage 3, and it is 2"),
        ({"zero": {"stage": 3, "secondary_partition": 0}}, "greater than or equal to 1"),
        (
            {
                "zero": {"stage": 3, "secondary_partition": 2},
                "offload": {"optimizer": "host", "parameters": "host"},
            },
            "offload.parameters is 'host'; set offload.parameters to 'none'",
        ),
        (
            {"zero": {"stage": 2, "quantized_weights": True}, "offload": {"optimizer": "host"}},
            "and offload.optimizer is 'host'; set zero.stage to 3, or",
        ),
        (
            {
                "zero": {"stage": 1, "quantized_weights": True},
                "precision": {"dtype": "bfloat16", "masters": "none"},
            },
            "precision.masters is 'none', so that nothing else would hold their values; set zero.stage to 3",
        ),
        (
            {"zero": {"stage": 1, "quantized_gradients": True}, "optimizer": "onebit_adam"},
            "exchanges signs itself, and zero.quantized_weights or zero.quantized_gradients asks for integers",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_with_what_does(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        RunConfig(**changes)


def test_hosts_are_equal_and_hold_whole_secondary_partitions() -> None:
    assert unequal_problem([2, 2]) is None
    assert "hosts of 3 and 1" in (unequal_problem([3, 1]) or "")
    assert secondary_problem(None, 4) is secondary_problem(2, 4) is secondary_problem(1, 3) is None
    for size, nearest in ((3, 2), (8, 4), (16, 4)):
        assert f"set it to {nearest}, or to null" in (secondary_problem(size, 4) or "")


def test_the_table_says_as_what_states_travel() -> None:
    def table(stage: int, dp: int, **forms: Any) -> dict[str, Any]:
        zero_policy = ZeroPolicy.of_stage(
            stage, dp, quantized_weights=True, quantized_gradients=True, secondary_ranks=2
        )
        return state_placements(zero_policy, **{"parameter": "float32", **forms})

    for stage in (1, 2, 3):
        states = table(stage, 4, gradient="float32")
        assert (states["parameter"].sent, states["gradient"].sent, states["moments"].sent) == (INT8, INT4, "")
        assert ("secondary" in states) == (stage == 3)
        assert ("master" in states) == (stage < 3), "where parameters stay they are rounded, and masters apart"
        assert {home.sent for home in table(stage, 1, gradient="float32").values()} == {""}, "one rank sends nothing"
        assert table(stage, 4)["parameter"].sent == INT8, "frozen ones, too, or flats would be others at other stages"
        assert table(stage, 4, parameter="float64", gradient="float64")["parameter"].sent == "", "no kernel has it"
    assert table(3, 4)["secondary"].holders is Replication.SECONDARY
    assert Replication.SECONDARY.share(10, 4) == 3


def test_the_plan_counts_bytes_and_memory_and_advises() -> None:
    config = RunConfig(model="gpt2", zero=3, precision="bfloat16", batch={"micro_size": 1})
    switches = {**ALL, "secondary_partition": 1}
    slow, fast = (plan(config.replace(zero=switches), machines) for machines in ("2x1 H100 eth-1", "2 H100"))
    usual = plan(config, "2x1 H100 eth-1")
    share = slow.time.parts["data parallel"] / usual.time.parts["data parallel"]
    assert share == pytest.approx(0.26, abs=0.01), "1 + 0 + 1/2 bytes of 2 + 2 + 2, and scales"
    assert slow.advice.startswith("steps are ")
    assert slow.advice.endswith("with weights in int8, gradients in int4, parameters partitioned again over 1")
    assert fast.advice.endswith("and nothing is rounded; leave ZeRO++'s switches off")
    assert slow.advice in str(slow)
    assert usual.advice == ""
    assert "sends nothing" in plan(config.replace(zero=ALL), "1 H100").advice
    held = slow.heaviest.parameters - usual.heaviest.parameters
    assert held == pytest.approx(2 * usual.heaviest.parameters, rel=1e-3), "a half each, and a whole again"
    four = plan(config.replace(zero=ALL), "4x4 H100 eth-1").time.parts["data parallel"]
    plainly = plan(config, "4x4 H100 eth-1").time.parts["data parallel"]
    assert four < 0.5 * plainly
    for size, machines in ((3, "2x8 H100 eth-1"), (16, "2x8 H100 eth-1"), (8, "2x4 H100 eth-1")):
        with pytest.raises(LayoutError, match=rf"secondary_partition {size} does not divide the [48] data-parallel"):
            plan(config.replace(zero={"stage": 3, "secondary_partition": size}), machines)
    with pytest.raises(ValueError, match=r"secondary_partition 1 needs zero.stage 3"):
        plan(replace(slow.setup, zero_stage=2), "2x1 H100 eth-1")

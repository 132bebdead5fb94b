"""The search against brute force, and its promises: what it names fits, keeps the batch, and says what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from speedlab.config import OffloadConfig, OptimizerConfig, OuterConfig
from speedlab.layout import Layout
from speedlab.planner.fit_suggestions import cheapest_change, differences
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.layer_shapes import shape_parameters
from speedlab.planner.memory.predict import predict_memory
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.presets import cluster, model
from speedlab.planner.search import USABLE, Candidate, largest_model, search
from speedlab.planner.search_space import Fixed
from speedlab.planner.setup import ModelShape, Setup
from speedlab.planner.time.efficiency import efficiency_of
from speedlab.planner.time.step_time import predict_time

SHAPE = ModelShape(
    name="small", layers=8, hidden=2048, heads=16, ffn_hidden=8192, vocab_size=50304, sequence_length=1024
)


def small(memory_gib: float) -> Machines:
    machines = Machines.parse("4 A100-40")
    return replace(machines, device=replace(machines.device, memory_bytes=int(memory_gib * 2**30)))


def brute_force(machines: Machines, global_size: int) -> float:
    """Seconds of the fastest step among all that fit, every one asked."""
    best = float("inf")
    for dp, tp, pp in product((1, 2, 4), repeat=3):
        if dp * tp * pp != 4:
            continue
        stages = (0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2, 3)
        for stage, micro, again in product(stages, (1, 2, 4, 8, 16, 32, 64), ("none", "block")):
            share = global_size // dp
            if share % micro:
                continue
            setup = Setup(
                shape=SHAPE,
                layout=Layout(dp=dp, tp=tp, pp=pp),
                zero_stage=stage,
                dtype="bfloat16",
                micro_size=micro,
                accumulation=share // micro,
                checkpointing=again,
                sequence_parallel=tp > 1,
            )
            winds: list[dict[str, Any]] = [{}]
            if pp > 1 and setup.accumulation % pp == 0:
                winds.append({"schedule": "interleaved", "chunks": 2})
            for wind in winds:
                wound = replace(setup, **wind)
                if held_bytes(wound) <= USABLE * machines.device.memory_bytes:
                    seconds = predict_time(wound, machines, efficiency_of(machines.device)).step_seconds
                    best = min(best, seconds)
    return best


def held_bytes(setup: Setup) -> int:
    """Of the rank that holds most."""
    return max(rank.total for rank in predict_memory(setup))


@pytest.mark.parametrize("memory_gib", [4, 6, 9, 20])
def test_the_fastest_is_what_brute_force_finds(memory_gib: float) -> None:
    machines = small(memory_gib)
    found = search(SHAPE, machines, global_size=64)
    assert found[0].time.step_seconds == pytest.approx(brute_force(machines, 64))


def test_more_memory_is_never_slower_and_too_little_finds_nothing() -> None:
    speeds = [search(SHAPE, small(gib), global_size=64)[0].time.step_seconds for gib in (4, 8, 16, 32)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > speeds[-1]
    assert search(SHAPE, small(0.5), global_size=64) == []


def test_what_it_names_fits_and_keeps_the_batch() -> None:
    machines = cluster("1024-a100")
    found = search(model("gpt3-175b"), machines, global_size=1536)
    assert len(found) == 5
    assert len({candidate.setup.layout for candidate in found}) == 5
    for candidate in found:
        assert candidate.setup.global_size == 1536
        assert candidate.setup.layout.world_size == 1024
        assert candidate.held_bytes == max(rank.total for rank in predict_memory(candidate.setup))
        assert candidate.free_bytes >= (1 - USABLE) * machines.device.memory_bytes
        assert "limited by" in candidate.reason
        assert "GiB left" in candidate.reason
    seconds = [candidate.time.step_seconds for candidate in found]
    assert seconds == sorted(seconds)


def test_targets_differ_as_they_say() -> None:
    machines = Machines.parse("4x8 A100-80 nvlink3 ib-200x8")
    shape = model("turing-nlg-17b")
    fastest, cheapest, fewest = (
        search(shape, machines, global_size=512, target=target)[0]
        for target in ("fastest", "cheapest", "fewest devices")
    )
    assert fastest.devices == 32
    assert fastest.time.step_seconds < min(cheapest.time.step_seconds, fewest.time.step_seconds)
    assert cheapest.device_seconds <= min(fastest.device_seconds, fewest.device_seconds)
    assert fewest.devices <= cheapest.devices
    # 16 bytes a parameter: 256 GiB of states need four devices of 79 GiB at least.
    assert fewest.devices >= 4


def test_devices_that_the_batch_cannot_occupy_are_left_idle() -> None:
    """12 blocks and 4 sequences cannot be divided over 1,024 devices."""
    found = search(model("gpt2"), cluster("1024-a100"), global_size=4)
    assert found
    assert found[0].devices < 1024
    assert found[0].setup.global_size == 4


@pytest.mark.timeout(120)  # Seconds; one layout after the other without the bounds takes hours.
def test_two_trillion_parameters_on_1024_devices_in_seconds() -> None:
    assert search(model("2t"), cluster("1024-a100"), global_size=1024)


def test_what_was_not_validated_says_so() -> None:
    machines = Machines.parse("8 B200")
    assert "B200" in search(SHAPE, machines, global_size=64)[0].caution
    assert search(SHAPE, Machines.parse("8 A100-80"), global_size=64)[0].caution == ""
    t5 = search(model("t5-3b"), machines, global_size=64)[0]
    assert "published rules" in t5.caution


def test_wrong_requests() -> None:
    machines = small(8)
    with pytest.raises(ValueError, match="target 'best' is not one of fastest, cheapest, fewest devices"):
        search(SHAPE, machines, global_size=64, target="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global_size 0"):
        search(SHAPE, machines, global_size=0)
    with pytest.raises(ValueError, match="does not divide by heads"):
        search(replace(SHAPE, heads=15), machines, global_size=64)


# The largest model, the cheapest change


def test_the_largest_model_fits_and_the_next_one_would_not() -> None:
    machines = Machines.parse("1 A100-40")
    found = largest_model(machines)
    assert found is not None
    assert held_bytes(found.setup) <= USABLE * machines.device.memory_bytes
    # 16 bytes a parameter of model states bound it from above; something is left for activations.
    bound = machines.device.memory_bytes / 16
    assert 0.6 * bound < shape_parameters(found.setup.shape) < bound
    assert shape_parameters(largest_model(Machines.parse("1 A100-80")).setup.shape) > shape_parameters(  # type: ignore[union-attr]
        found.setup.shape
    )


AWAY = {"optimizer": "host", "parameters": "host", "activations": "host"}


def largest_with(offload: dict[str, str], **host: int) -> Candidate:
    """The largest model on one V100 in a host of these sizes, its states in these places."""
    machines = Machines.parse("1 V100-32")
    machines = replace(machines, host=replace(machines.host, **host))
    found = largest_model(machines, fixed=Fixed(others={"offload": OffloadConfig.model_validate(offload)}))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("offload", "full", "host"),
    [
        ({"optimizer": "host"}, "device", {"memory_bytes": 1500 * 10**9}),
        ({"optimizer": "host"}, "host", {"memory_bytes": 128 * 2**30}),
        (AWAY, "host", {"memory_bytes": 1500 * 10**9}),
        ({**AWAY, "optimizer": "disk", "parameters": "disk"}, "disk", {"disk_bytes": 2 * 10**12}),
    ],
)
def test_the_largest_model_fills_the_place_that_is_full_first(
    offload: dict[str, str], full: str, host: dict[str, int]
) -> None:
    found = largest_with(offload, **host)
    shares = {at.name: at.held_bytes / at.capacity_bytes for at in found.places if at.capacity_bytes}
    assert all(at.fits for at in found.places)
    assert max(shares, key=shares.__getitem__) == full
    assert shares[full] > 0.85  # Models grow in steps; the next one does not fit.
    assert found.setup.offload == OffloadConfig.model_validate(offload)


def test_more_room_beside_the_device_holds_a_larger_model() -> None:
    sizes = [shape_parameters(largest_with(AWAY, memory_bytes=gib * 2**30).setup.shape) for gib in (64, 128, 512, 1024)]
    assert sizes == sorted(set(sizes))
    # 16 bytes a parameter: 2 of it, 2 of its gradient, 12 of master and moments.
    assert 0.85 * 1024 * 2**30 / 16 < sizes[-1] < 1024 * 2**30 / 16


def test_smaller_states_hold_a_larger_model_on_the_device_alone_and_beside_it() -> None:
    smallest = {"masters": "none", "moments": "8bit", "optimizer": OptimizerConfig(in_backward=True)}
    machines = Machines.parse("1 H200")
    plain, small = (largest_model(machines, fixed=Fixed(others=others)) for others in ({}, smallest))
    assert plain is not None
    assert small is not None
    # 16 bytes a parameter against 4.03, of which activations and buffers of a unit take their part.
    sizes = [shape_parameters(found.setup.shape) for found in (plain, small)]
    assert 30e9 < sizes[1] < machines.device.memory_bytes / 4.03
    assert 3 < sizes[1] / sizes[0] < 16 / 4.03
    assert str(Fixed(others=smallest)) == "masters none, moments 8bit, updated in backward"
    away = OffloadConfig.model_validate(AWAY | {"optimizer": "disk", "parameters": "disk"})
    on_disk = largest_model(machines, fixed=Fixed(others={**smallest, "offload": away}))
    assert on_disk is not None
    # What the host decodes for its update takes the host's memory, not the device's.
    rank = max(predict_memory(on_disk.setup), key=lambda rank: rank.total)
    here = max(
        predict_memory(replace(on_disk.setup, moments="float32", masters="float32")), key=lambda rank: rank.total
    )
    assert rank.communication_buffers == pytest.approx(here.communication_buffers, rel=0.01)


def test_an_update_in_backward_is_planned_for_one_rank_and_its_tensor_peers_only() -> None:
    in_backward = {"optimizer": OptimizerConfig(in_backward=True)}
    found = largest_model(Machines.parse("8 H100"), fixed=Fixed(tp=8, others=in_backward))
    assert found is not None
    assert found.setup.layout == Layout(dp=1, tp=8, pp=1)
    with pytest.raises(ValueError, match="one micro-batch and one rank of dp"):
        largest_model(Machines.parse("8 H100"), fixed=Fixed(dp=8, others=in_backward))
    with pytest.raises(ValueError, match="masters none needs dtype bfloat16"):
        largest_model(Machines.parse("1 V100-32"), fixed=Fixed(others={"masters": "none"}))


def test_places_that_do_not_go_together_are_named() -> None:
    with pytest.raises(ValueError, match=r"offload.parameters 'host' needs offload.optimizer"):
        largest_with({"parameters": "host"})


def test_the_cheapest_changes_fit_and_are_in_order_of_their_price() -> None:
    machines = small(9)
    before = Setup(shape=SHAPE, layout=Layout(dp=4), zero_stage=0, dtype="bfloat16", micro_size=16, accumulation=1)
    assert held_bytes(before) > machines.device.memory_bytes
    found = cheapest_change(before, machines)
    assert len(found) == 3
    seconds = predict_time(before, machines, efficiency_of(machines.device)).step_seconds
    for change in found:
        assert held_bytes(change.setup) <= USABLE * machines.device.memory_bytes
        assert change.setup.global_size == before.global_size
        assert change.price == pytest.approx(change.candidate.time.step_seconds / seconds - 1)
        assert "GiB left" in str(change)


def test_a_single_change_comes_before_pairs() -> None:
    machines = small(20)
    before = Setup(shape=SHAPE, layout=Layout(dp=4), zero_stage=0, dtype="bfloat16", micro_size=16, accumulation=1)
    found = cheapest_change(before, machines)
    singles = [change for change in found if ";" not in change.words]
    assert singles
    assert found[: len(singles)] == singles
    assert [change.price for change in singles] == sorted(change.price for change in singles)


def test_a_machines_own_memory_can_be_asked() -> None:
    asked: list[Setup] = []

    def none_fits(setup: Setup) -> Sequence[RankMemory]:
        asked.append(setup)
        return [RankMemory(activations=2**60)]

    assert search(SHAPE, small(20), global_size=16, memory=none_fits) == []
    assert asked
    assert cheapest_change(asked[0], small(20), memory=none_fits) == []


def test_two_changes_of_one_thing_are_told_as_one() -> None:
    before = Setup(shape=SHAPE, layout=Layout(dp=4), zero_stage=0, dtype="bfloat16", micro_size=16, accumulation=1)
    after = replace(before, layout=Layout(dp=1, tp=4), micro_size=4, accumulation=16, sequence_parallel=True)
    assert differences(before, after) == "micro-batch 16 → 4; tp 1 → 4; sequence parallel"
    for change in cheapest_change(before, small(6)):
        names = [word.partition(" → ")[0].rpartition(" ")[0] for word in change.words.split("; ")]
        assert len(names) == len(set(names)), change.words


# Long sequences


def long_shape(length: int, **changes: Any) -> ModelShape:
    """Five heads, which tp 2, 4 and 8 do not divide, and two layers, so that tp and pp make little room."""
    sizes = {"layers": 2, "hidden": 1280, "heads": 5, "ffn_hidden": 5120, "vocab_size": 50304, "chunked_loss": True}
    return ModelShape(name="long", **{**sizes, "sequence_length": length, "position": "rotary", **changes})


def test_sequences_are_cut_where_nothing_else_makes_room() -> None:
    machines = Machines.parse("8 A100-80")
    shape = long_shape(2**21)
    assert search(shape, machines, global_size=8, fixed=Fixed(cp=1)) == []
    found = search(shape, machines, global_size=8)
    assert found
    assert all(candidate.setup.layout.cp > 1 for candidate in found)
    times = [candidate.time.step_seconds for candidate in found]
    assert times == sorted(times)
    for candidate in found:
        assert max(rank.total for rank in predict_memory(candidate.setup, device="cuda")) == candidate.held_bytes
    assert {each.setup.layout.cp for each in search(shape, machines, global_size=8, fixed=Fixed(cp=4))} == {4}


def test_sequences_that_fit_are_not_cut() -> None:
    """Messages between the ranks cost, and nothing is gained."""
    best, *others = search(long_shape(2**14), Machines.parse("8 A100-80"), global_size=8)
    assert best.setup.layout == Layout(dp=8)
    assert any(candidate.setup.layout.cp > 1 for candidate in others)
    cut = next(candidate for candidate in others if candidate.setup.layout.cp > 1)
    assert cut.time.parts["context parallel"] > 0
    assert cut.time.step_seconds > best.time.step_seconds


@pytest.mark.parametrize(
    "shape",
    [
        long_shape(4096),
        long_shape(2**15, gated=True),
        long_shape(2**15, kv_heads=1),
        long_shape(2**15 + 1),
        long_shape(2**15, dropout=0.1),
    ],
    ids=["short", "gated", "grouped", "odd", "dropping, and heads do not divide"],
)
def test_layouts_that_the_engine_does_not_have_are_not_looked_at(shape: ModelShape) -> None:
    found = search(shape, Machines.parse("8 A100-80"), global_size=8, count=20)
    assert found
    assert {candidate.setup.layout.cp for candidate in found} == {1}


def test_cutting_sequences_is_a_change_that_fits() -> None:
    machines = Machines.parse("8 A100-80")
    setup = Setup(
        shape=long_shape(2**20, layers=8),
        layout=Layout(dp=8),
        zero_stage=1,
        dtype="bfloat16",
        micro_size=1,
        accumulation=1,
        checkpointing="block",
    )
    assert max(rank.total for rank in predict_memory(setup, device="cuda")) > machines.device.memory_bytes
    changes = cheapest_change(setup, machines, efficiency=efficiency_of(machines.device))
    assert "cp 1 → 2" in [change.words for change in changes]
    cut = next(change for change in changes if change.words == "cp 1 → 2")
    assert cut.options == "--cp 2 --dp 4 --micro 1 --global 8"


def test_islands_that_are_fixed_are_searched_by_whole_hosts_and_meet_as_they_are_told() -> None:
    slow = Machines.parse("4x2 A100-80 eth-1")
    often, seldom = (
        search(SHAPE, slow, global_size=64, fixed=Fixed(islands=2, others={"outer": OuterConfig(every_steps=steps)}))
        for steps in (1, 100)
    )
    for found in often, seldom:
        assert found
        assert all(candidate.setup.layout.islands == 2 for candidate in found)
        assert all(candidate.devices == 8 and candidate.setup.global_size == 64 for candidate in found)
    assert seldom[0].time.step_seconds < often[0].time.step_seconds
    assert all(candidate.setup.layout.islands == 1 for candidate in search(SHAPE, slow, global_size=64))
    # Of 3 hosts of 2, an island of 1 host or less, and none of one and a half: then one host stays idle.
    three = Machines.parse("3x2 A100-80 eth-1")
    for islands, devices in ((3, {3, 6}), (2, {2, 4})):
        assert search(SHAPE, three, global_size=96, fixed=Fixed(islands=islands))[0].devices in devices
    with pytest.raises(ValueError, match="islands are equal, of whole hosts or inside one"):
        search(SHAPE, three, global_size=96, fixed=Fixed(islands=5))

"""Step time against numbers worked out by hand: FLOP, rings, what is waited for and what is hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speedlab.config import AttentionConfig, RunConfig
from speedlab.layout import Layout, LayoutError
from speedlab.placement import INT8, ITEM_BYTES
from speedlab.planner.flops import share_of_step, token_flops
from speedlab.planner.hardware.devices import DeviceSpec, Machines
from speedlab.planner.hardware.links import Link
from speedlab.planner.layer_shapes import shape_parameters
from speedlab.planner.presets import cluster, model
from speedlab.planner.setup import Setup
from speedlab.planner.time.communication import Ring, rings
from speedlab.planner.time.efficiency import Efficiency, efficiency_of
from speedlab.planner.time.kernels import Rates, block_pass
from speedlab.planner.time.step_time import PARTS, blocks_by_rank, bubble_share, predict_time, rank_parameters

ENDLESS = 1e30


def ideal(*, hosts: int = 1, per_host: int = 8, in_host: float = ENDLESS, between: float = ENDLESS) -> Machines:
    """Devices of 1 TFLOP/s with endless memory bandwidth; links without latency."""
    spec = DeviceSpec(
        name="ideal",
        memory_bytes=2**40,
        peak_flops={"bfloat16": 1e12, "float32": 1e12},
        memory_bytes_per_second=ENDLESS,
    )
    return Machines(
        device=spec,
        per_host=per_host,
        hosts=hosts,
        in_host=Link(name="in", bandwidth_bytes_per_second=in_host, latency_seconds=0),
        between=Link(name="out", bandwidth_bytes_per_second=between, latency_seconds=0),
    )


IDEAL = Efficiency.measured(kernel_seconds=0)


def setup(**changes: Any) -> Setup:
    base = Setup(
        shape=replace(model("gpt2"), dropout=0.0, causal=False),
        layout=Layout(),
        zero_stage=0,
        dtype="bfloat16",
        micro_size=2,
        accumulation=4,
        attention="plain",
    )
    return replace(base, **changes)


# FLOP


@pytest.mark.parametrize("name", ["gpt3-175b", "mt-nlg-530b", "1t"])
def test_conventions_are_the_papers_formulas(name: str) -> None:
    shape = model(name)
    s, l, h, v = shape.sequence_length, shape.layers, shape.hidden, shape.vocab_size  # noqa: E741 - the papers' names
    hardware = 96 * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    wanted = 72 * l * h * h * (1 + s / (6 * h) + v / (12 * l * h))
    assert token_flops(shape, "hardware", "block") == pytest.approx(hardware, rel=1e-12)
    assert token_flops(shape, "model", "block") == pytest.approx(wanted, rel=1e-12)
    assert token_flops(shape, "hardware") == token_flops(shape, "model")
    assert token_flops(shape, "parameters", "block") == 8 * shape_parameters(shape)
    assert token_flops(shape, "attention") == 6 * shape_parameters(shape) + 12 * l * h * s


def test_selective_recomputation_computes_the_scores_again() -> None:
    shape = model("gpt3-175b")
    again = token_flops(shape, "hardware", "selective") - token_flops(shape, "model")
    assert again == pytest.approx(4 * shape.layers * shape.hidden * shape.sequence_length)


def test_of_sparse_attention_its_share_of_the_scores_counts() -> None:
    shape = model("gpt3-175b")
    s, l, h = shape.sequence_length, shape.layers, shape.hidden  # noqa: E741 - the papers' names
    scores = 12 * l * h * s
    dense = token_flops(shape, "model")
    assert dense - token_flops(shape, "model", attention_share=0.25) == pytest.approx(0.75 * scores, rel=1e-12)
    saved = 0.75 * scores / 2 / (dense - scores / 2)
    assert share_of_step(shape, 0.25) == pytest.approx(1 - saved, rel=1e-12)
    assert share_of_step(shape, 1.0) == 1


@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
def test_an_ideal_device_computes_at_its_peak(checkpointing: Any) -> None:
    wanted = setup(checkpointing=checkpointing)
    found = predict_time(wanted, ideal(), IDEAL)
    assert found.tflops("hardware") == pytest.approx(1.0, rel=1e-6)
    assert found.mfu <= 1


def test_selective_recomputation_takes_the_time_between_layers() -> None:
    """Of fused attention and linear layers nothing, and no sum over tensor ranks a second time."""
    machines = cluster("1024-a100")

    def parts(checkpointing: Any, attention: Any = "fused") -> dict[str, float]:
        layout = Layout(tp=8)
        wanted = setup(shape=model("gpt3-175b"), layout=layout, checkpointing=checkpointing, attention=attention)
        return predict_time(wanted, machines, efficiency_of(machines.device)).parts

    none, some, block = parts("none"), parts("selective"), parts("block")
    assert none["recompute"] == 0
    assert 0 < some["recompute"] < 0.2 * block["recompute"]
    assert some["tensor parallel"] == none["tensor parallel"] < block["tensor parallel"]
    plain = parts("selective", attention="plain")
    assert plain["recompute"] > some["recompute"]


# Collectives


def test_rings_by_hand() -> None:
    ring = Ring(ranks=4, bytes_per_second=1e9, latency_seconds=1e-3, crosses_hosts=False)
    assert ring.gather(4e9) == pytest.approx(3e-3 + 3.0)
    assert ring.all_reduce(4e9) == pytest.approx(6e-3 + 6.0), "twice the ring, for long messages"
    assert ring.all_reduce(4) == pytest.approx(4e-3, rel=1e-4), "two levels of a tree, for short ones"
    alone = replace(ring, ranks=1)
    assert (alone.gather(1e9), alone.all_reduce(1e9), alone.send(1e9)) == (0, 0, 0)


def test_a_group_gets_its_share_of_the_hosts_cards() -> None:
    machines = ideal(hosts=4, in_host=100e9, between=8e9)
    found = rings(Layout(tp=4, dp=8), machines, IDEAL)
    assert not found.tp.crosses_hosts
    assert found.tp.bytes_per_second == 100e9
    assert found.dp.crosses_hosts
    assert found.dp.bytes_per_second == 2e9, "4 groups share a host's 8 GB/s"
    whole = rings(Layout(dp=32), machines, IDEAL)
    assert whole.dp.bytes_per_second == 8e9, "one group has all of it"
    chain = rings(Layout(tp=8, pp=4), machines, IDEAL)
    assert chain.pp.bytes_per_second == 1e9, "8 pairs at once"


@pytest.mark.parametrize(
    ("layout", "cards"),
    [
        (Layout(pp=32), 1),  # one pair crosses between two hosts, and has 8 cards at its sides
        (Layout(tp=4, pp=8), 1),  # four pairs
        (Layout(tp=8, pp=4), 1),
        (Layout(tp=16, pp=2), 0.5),  # sixteen ranks of a host of 16 share its cards
    ],
)
def test_a_message_goes_through_one_card(layout: Layout, cards: float) -> None:
    machines = ideal(hosts=4, in_host=1e12, between=8e9)
    assert machines.between is not None
    machines = replace(machines, between=replace(machines.between, bandwidth_bytes_per_second=1e9, cards=8))
    machines = replace(machines, per_host=max(8, layout.tp))
    assert rings(layout, machines, IDEAL).pp.bytes_per_second == cards * 1e9
    assert rings(Layout(dp=32), machines, IDEAL).dp.bytes_per_second == 8e9, "a collective uses all of them"


def test_tensor_parallel_sums_by_hand() -> None:
    """Two all-reduces of tokens × hidden × 2 bytes in each block and direction; a third of them again for blocks that
    are computed again; one more for the head."""
    machines = ideal(in_host=1e9)
    tokens, hidden = 2 * 1024, 768
    once = 2 * (3 / 4) * tokens * hidden * 2 / 1e9
    plain = predict_time(setup(layout=Layout(tp=4)), machines, IDEAL)
    assert plain.parts["tensor parallel"] == pytest.approx(4 * (12 * 4 + 1) * once)
    again = predict_time(setup(layout=Layout(tp=4), checkpointing="block"), machines, IDEAL)
    assert again.parts["tensor parallel"] == pytest.approx(4 * (12 * 6 + 1) * once)


@pytest.mark.parametrize(
    ("stage", "accumulation", "bytes_a_parameter"),
    [
        (0, 1, 2 + 2),  # all-reduce: reduce-scatter and gather
        (0, 4, 4 + 4),  # sums of several micro-batches are float32
        (1, 4, 4 + 2),
        (2, 4, 4 * 4 + 2),  # reduced with every micro-batch
        (3, 4, 4 * 4 + 2 * 4 * 2),  # gathered forward and backward
    ],
)
def test_data_parallel_traffic_by_hand(stage: int, accumulation: int, bytes_a_parameter: int) -> None:
    wanted = setup(layout=Layout(dp=4), zero_stage=stage, accumulation=accumulation)
    found = predict_time(wanted, ideal(in_host=1e6), IDEAL)
    held = rank_parameters(wanted)
    # The position table is left out of what a rank computes with.
    assert held == pytest.approx(shape_parameters(wanted.shape), rel=0.01)
    assert found.parts["data parallel"] == pytest.approx(bytes_a_parameter * held * 3 / 4 / 1e6, rel=1e-3)
    assert found.hidden_seconds == 0


@pytest.mark.parametrize(
    ("changes", "bytes_a_parameter"),
    [
        ({}, 2),  # gradients; parameters are mapped where they lie
        ({"quantized_weights": True}, 2 + 2 * ITEM_BYTES[INT8]),
    ],
    ids=["as they lie", "int8"],
)
def test_cores_of_one_host_map_parameters_at_stage_3(changes: dict[str, Any], bytes_a_parameter: float) -> None:
    wanted = setup(layout=Layout(dp=4), zero_stage=3, accumulation=1, **changes)
    machines = ideal(in_host=1e6)
    cores = replace(machines, device=replace(machines.device, name="cpu"))
    found = predict_time(wanted, cores, IDEAL).parts["data parallel"]
    assert found == pytest.approx(bytes_a_parameter * rank_parameters(wanted) * 3 / 4 / 1e6, rel=1e-3)
    separate = replace(ideal(hosts=4, per_host=1, between=1e6), device=cores.device)
    gathered = 2 * (ITEM_BYTES[INT8] if changes else 2)
    found = predict_time(wanted, separate, IDEAL).parts["data parallel"]
    assert found == pytest.approx((2 + gathered) * rank_parameters(wanted) * 3 / 4 / 1e6, rel=1e-3)


def test_what_is_hidden_is_not_waited_for() -> None:
    wanted = setup(layout=Layout(dp=4), zero_stage=3)
    machines = ideal(in_host=1e9)
    waited = predict_time(wanted, machines, IDEAL)
    hidden = predict_time(wanted, machines, replace(IDEAL, overlap=0.5))
    assert hidden.hidden_seconds > 0
    assert hidden.step_seconds + hidden.hidden_seconds == pytest.approx(waited.step_seconds)


def test_up_to_four_gpus_have_no_switch() -> None:
    """Of a V100's 150 GB/s a third goes to each of three neighbours; hosts of eight, and PCIe, are as before."""
    four = Machines.parse("4 V100-32")
    assert [four.in_host_bytes_per_second(ranks) for ranks in (1, 2, 3, 4)] == [150e9, 50e9, 100e9, 150e9]
    assert Machines.parse("8 V100-32").in_host_bytes_per_second(2) == 150e9
    assert Machines.parse("4 V100-32 pcie3").in_host_bytes_per_second(2) == 15.75e9
    assert rings(Layout(tp=2, dp=2), four, IDEAL).tp.bytes_per_second == 50e9


def test_a_unit_is_gathered_ahead_only_where_two_and_a_gradient_fit() -> None:
    """Four micro-batches: parameters twice in 2 bytes, gradients once in 4."""
    wanted = setup(layout=Layout(dp=4), zero_stage=3)
    unit = 2 * rank_parameters(wanted) / wanted.shape.layers
    hidden = []
    for memory in (3 * unit + 1, 3 * unit - 1):
        machines = ideal(in_host=1e9)
        machines = replace(machines, device=replace(machines.device, memory_bytes=int(memory)))
        found = predict_time(wanted, machines, replace(IDEAL, overlap=0.5))
        hidden.append(found.hidden_seconds)
        assert found.parts["data parallel"] + found.hidden_seconds == pytest.approx(
            4 * (2 * 2 + 4) * 3 / 4 * rank_parameters(wanted) / 1e9
        )
    assert hidden[0] > 0
    assert hidden[1] == 0


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 3), ("block", 4)])
def test_lists_are_gathered_a_matrix_at_a_time_and_waited_for(checkpointing: Any, times: int) -> None:
    """Twelve blocks of four matrices and the table; forward, backward, gradients, and again where a block is computed
    again. Each costs a kernel for every rank beside the ring."""
    wanted = setup(layout=Layout(dp=4), zero_stage=3, listed_gathers=True, checkpointing=checkpointing)
    found = predict_time(wanted, ideal(in_host=1e9), replace(IDEAL, overlap=0.5, kernel_seconds=1e-3))
    ring = 3 / 4 * 2 * rank_parameters(wanted) / 1e9
    assert found.parts["data parallel"] == pytest.approx(4 * times * (ring + (12 * 4 + 1) * 4 * 1e-3))
    assert found.hidden_seconds == 0


def test_heads_that_matrix_units_do_not_take() -> None:
    """Two products of scores at a tenth of the rate, forward and backward; fused attention pads."""
    aligned = ideal()
    machines = replace(aligned, device=replace(aligned.device, unaligned_share=0.1))
    odd = replace(setup().shape, head_size=60)
    slow, fast = (predict_time(setup(shape=odd), each, IDEAL) for each in (machines, aligned))
    for direction, products in (("forward", 2), ("backward", 4)):
        flops = 4 * 12 * products * 2 * 2 * 12 * 1024 * 1024 * 60
        assert slow.parts[direction] - fast.parts[direction] == pytest.approx(flops / 1e11 - flops / 1e12)
    for wanted in (setup(), setup(shape=odd, attention="fused"), setup(shape=odd, dtype="float32")):
        assert predict_time(wanted, machines, IDEAL).parts == predict_time(wanted, aligned, IDEAL).parts


# Pipelines, the update, the whole


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_the_bubble_is_the_theorys_share(schedule: Any, chunks: int) -> None:
    wanted = setup(layout=Layout(pp=4), accumulation=8, schedule=schedule, chunks=chunks)
    found = predict_time(wanted, ideal(), IDEAL)
    passes = found.step_seconds - found.parts["optimizer"] - found.parts["data parallel"]
    share = bubble_share(schedule, pp=4, chunks=chunks, micro_batches=8)
    assert found.parts["bubble"] / passes == pytest.approx(share)


def test_the_slowest_pipeline_rank_counts() -> None:
    even = setup(layout=Layout(pp=2), cut=(6, 6))
    uneven = replace(even, cut=(10, 2))
    assert blocks_by_rank(uneven) == [10, 2]
    of_even, of_uneven = (predict_time(wanted, ideal(), IDEAL).parts["forward"] for wanted in (even, uneven))
    assert of_uneven / of_even == pytest.approx(10 / 6)


def test_the_update_moves_30_bytes_a_parameter_it_owns() -> None:
    machines = ideal()
    slow = replace(machines, device=replace(machines.device, memory_bytes_per_second=1e9))
    for stage, share in ((0, 1), (1, 4)):
        wanted = setup(layout=Layout(dp=4), zero_stage=stage)
        found = predict_time(wanted, slow, IDEAL)
        assert found.parts["optimizer"] == pytest.approx(30 * rank_parameters(wanted) / share / 1e9)
    wide = predict_time(setup(dtype="float32"), slow, IDEAL)
    assert wide.parts["optimizer"] == pytest.approx(32 * rank_parameters(setup()) / 1e9)


def test_parts_sum_to_the_step_and_to_tokens_days_hours_and_cost() -> None:
    machines = replace(cluster("1024-a100"), price_per_device_hour=2.0)
    wanted = Setup(
        shape=model("gpt3-175b"),
        layout=Layout(dp=8, tp=8, pp=16),
        zero_stage=1,
        dtype="bfloat16",
        micro_size=1,
        accumulation=192,
        checkpointing="block",
        attention="plain",
    )
    found = predict_time(wanted, machines, efficiency_of(machines.device))
    assert list(found.parts) == list(PARTS)
    assert found.tokens_per_second == pytest.approx(1536 * 2048 / sum(found.parts.values()))
    assert found.days(300e9) == pytest.approx(300e9 / found.tokens_per_second / 86400)
    assert found.device_hours(300e9) == pytest.approx(24 * 1024 * found.days(300e9))
    assert found.cost(300e9) == pytest.approx(2 * found.device_hours(300e9))
    assert 25 < found.days(300e9) < 45, "34 days were published (arXiv:2104.04473)"
    assert "%" in found.limit


def test_narrow_products_are_slow() -> None:
    """A tenth of the hidden size, cut over 8 ranks, reaches less of the peak than a whole one."""
    machines = cluster("1024-a100")
    efficiency = efficiency_of(machines.device)
    rates = []
    for name in ("gpt2", "gpt3-175b"):
        wanted = setup(shape=model(name), layout=Layout(tp=4), dtype="bfloat16", accumulation=1, attention="fused")
        found = predict_time(wanted, machines, efficiency)
        computing = found.parts["forward"] + found.parts["backward"]
        rates.append(found.mfu * found.step_seconds / computing)
    assert rates[0] < 0.7 * rates[1]


def test_sparse_attention_is_timed_by_its_share_of_blocks() -> None:
    """Of 16 blocks of 64 tokens a window of 2 sees 31 of 136."""

    def forward(**attention: Any) -> float:
        model = {"context": 1024, "attention": attention}
        setup = Setup.of_config(RunConfig(model=model, data={"sequence_length": 1024}), 1, dtype="float32")
        return block_pass(setup, Rates.of(ideal().device, IDEAL, "float32")).forward

    config = RunConfig(model={"context": 1024}, data={"sequence_length": 1024})
    scores = 2 * config.batch.resolve(1).micro_size * 1024 * 1024 * config.model.hidden / 1e12
    saved = forward() - forward(kind="block_sparse", pattern="longformer", global_blocks=0)
    assert saved == pytest.approx((1 - 31 / 136) * scores)


def test_what_was_not_validated_says_so() -> None:
    b200 = Machines.parse("8 B200")
    assert "B200" in predict_time(setup(), b200, efficiency_of(b200.device)).caution
    a100 = Machines.parse("8 A100-80")
    assert predict_time(setup(), a100, efficiency_of(a100.device)).caution == ""
    t5 = setup(shape=model("t5-11b"))
    assert "encoder-decoder" in predict_time(t5, a100, efficiency_of(a100.device)).caution


def test_more_ranks_than_devices() -> None:
    with pytest.raises(LayoutError, match=r"= 16 ranks, but 1 × 8 .* has 8 devices"):
        predict_time(setup(layout=Layout(dp=16)), ideal(), IDEAL)


@pytest.mark.timeout(60)  # Milliseconds; step by step, as a schedule of 32,768 forwards goes, it takes minutes.
def test_two_trillion_parameters_are_planned_at_once() -> None:
    machines = cluster("1024-a100")
    wanted = Setup(
        shape=model("2t"),
        layout=Layout(dp=2, tp=8, pp=64),
        zero_stage=1,
        dtype="bfloat16",
        micro_size=1,
        accumulation=512,
        checkpointing="block",
    )
    assert predict_time(wanted, machines, efficiency_of(machines.device)).step_seconds > 0


def test_ranks_along_cp_share_attention_and_what_they_send_takes_time() -> None:
    machines = cluster("1024-a100")
    long = replace(model("gpt3-175b"), sequence_length=32_768, context=32_768)

    def parts(cp: int, cp_heads: int | None) -> dict[str, float]:
        wanted = setup(shape=long, layout=Layout(cp=cp, tp=2), cp_heads=cp_heads, checkpointing="block")
        return predict_time(wanted, machines, efficiency_of(machines.device)).parts

    alone, heads, ring = parts(1, 2), parts(4, 4), parts(4, 1)
    assert alone["context parallel"] == 0, "whatever cp_heads says of another cp"
    assert 0 < heads["context parallel"] < ring["context parallel"]
    for part in ("forward", "backward", "recompute"):
        assert heads[part] == ring[part]
        assert heads[part] == pytest.approx(alone[part] / 4, rel=0.05)


def test_a_ring_of_sparse_attention_sends_what_is_needed() -> None:
    machines = cluster("1024-a100")
    long = replace(model("gpt3-175b"), sequence_length=32_768, context=32_768)

    def seconds(**pattern: Any) -> float:
        sparse = AttentionConfig(kind="block_sparse", **pattern) if pattern else None
        kind = "sparse" if pattern else "fused"
        wanted = setup(shape=long, layout=Layout(cp=8), cp_heads=1, micro_size=1, attention=kind, pattern=sparse)
        parts = predict_time(wanted, machines, efficiency_of(machines.device)).parts
        return parts["context parallel"] / wanted.accumulation

    dense, near, chunk = seconds(), seconds(window=128), seconds(window=2048)
    wide = seconds(pattern="strided", window=128, stride=128)
    # Of 7 turns 2, in each of which a rank that is in the middle is sent one chunk of two; gradients go home at once.
    link = rings(Layout(cp=8), machines, efficiency_of(machines.device)).cp
    own = 32_768 // 8 * long.hidden * 2
    assert chunk == pytest.approx(long.layers * 3 * 2 * link.send(own))
    assert near < 0.2 * chunk
    assert chunk < 0.2 * dense
    assert chunk < wide < dense

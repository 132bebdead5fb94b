"""Predicted memory: against numbers that are worked out here, and against what must hold in every set-up."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from speedlab.config import ModelConfig, RunConfig
from speedlab.display.figure_style import COLOURS
from speedlab.layout import Layout
from speedlab.planner.formulas import parameter_count
from speedlab.planner.memory.activation_sizes import ActivationSizes
from speedlab.planner.memory.pipeline_stage import held, step_peak, walk
from speedlab.planner.memory.predict import flat_elements, memory_by_rank, memory_timeline, predict_memory
from speedlab.planner.memory.rank_memory import CATEGORIES
from speedlab.planner.setup import ModelShape, Setup
from speedlab.telemetry.records import CATEGORIES as LEDGER

GPT2 = ModelConfig(preset="gpt2")


def setup(**changes: Any) -> Setup:
    first = {
        "shape": ModelShape.of_config(GPT2, 512),
        "layout": Layout(),
        "zero_stage": 0,
        "dtype": "float32",
        "micro_size": 2,
        "accumulation": 1,
    }
    return Setup(**{**first, **changes})


def test_categories_are_the_ledgers() -> None:
    assert CATEGORIES == LEDGER == tuple(COLOURS)


def test_flats_are_aligned_and_divide() -> None:
    # In 16 bits parameters start at multiples of 8: 3 → 8, 8 + 5 = 13 → 16, 16 + 1 = 17, which becomes 2 × 16.
    assert flat_elements([3, 5, 1], 2, 2) == 32
    assert flat_elements([3, 5, 1], 4, 1) == 16
    assert flat_elements([8, 8], 2, 1) == 16


@pytest.mark.parametrize(("dtype", "states"), [("float32", 16), ("bfloat16", 16)])
def test_a_single_rank_holds_16_bytes_a_parameter(dtype: Any, states: int) -> None:
    """ZeRO's 16 bytes (arXiv:1910.02054, section 3.1): nothing of GPT-2 needs padding but its odd table."""
    (rank,) = predict_memory(setup(dtype=dtype))
    assert rank.model_states == pytest.approx(states * parameter_count(GPT2), rel=1e-6)
    assert rank.communication_buffers == 0


def test_of_a_blocks_input_tensor_ranks_keep_a_part() -> None:
    """At the peak, before backward, all are in parts. Under sequence parallelism they are anyway."""
    whole = setup(layout=Layout(tp=2), checkpointing="block", micro_size=16)
    cut = replace(whole, partition_inputs=True)
    size = 16 * 512 * 768 * 4
    kept = [walk(ActivationSizes(each, "cpu"), blocks=12, first=True, last=True).kept for each in (whole, cut)]
    assert kept[0] - kept[1] == 12 * size // 2
    assert predict_memory(whole)[0].activations - predict_memory(cut)[0].activations == 12 * size // 2
    for same in (replace(whole, layout=Layout()), replace(whole, sequence_parallel=True)):
        assert predict_memory(replace(same, partition_inputs=True)) == predict_memory(same)


def test_stage_3_leaves_a_share() -> None:
    whole = predict_memory(setup(dtype="bfloat16"))[0].model_states
    (rank,) = predict_memory(setup(dtype="bfloat16", layout=Layout(dp=8), zero_stage=3))
    assert rank.model_states == pytest.approx(whole / 8, rel=1e-5)
    assert rank.ranks == 8
    # Two whole gradients of each kind of unit are borrowed, and the root and two blocks gathered.
    root, block = 38_597_376 + 786_432 + 2 * 768, 7_087_872
    assert rank.communication_buffers == pytest.approx(2 * 2 * (root + block) + 2 * (root + 2 * block), rel=1e-4)


ALL = list(
    product(
        ("float32", "bfloat16"),
        ("none", "block", "selective"),
        (1, 2),
        (False, True),
        (0.0, 0.1),
        ("rms", "layer"),
        ("cpu", "cuda"),
        ((True, True), (True, False), (False, False), (False, True)),
    )
)


def test_backward_frees_everything_that_forward_took() -> None:
    """In every form of the model, at every place of a pipeline: a check of the bookkeeping, layer by layer."""
    for dtype, checkpointing, tp, sequence, dropout, norm, device, (first, last) in ALL:
        for attention, chunked, position in (("fused", True, "rotary"), ("plain", False, "learned")):
            shape = replace(setup().shape, dropout=dropout, norm=norm, chunked_loss=chunked, position=position)
            case = setup(
                shape=shape,
                dtype=dtype,
                checkpointing=checkpointing,
                layout=Layout(tp=tp),
                sequence_parallel=sequence,
                attention=attention,
            )
            done = walk(ActivationSizes(case, device), blocks=3, first=first, last=last)
            assert done.backward[-1].live == (0 if first else ActivationSizes(case, device).local), case
            assert done.kept <= done.backward_peak


@pytest.mark.parametrize(
    "form",
    [
        {"gated": True, "kv_heads": 2},
        {"gated": True, "norms": 4, "head_norms": True},
        {"norm": "layer", "parallel": True},
        {"norm": "layer", "parallel": True, "norms": 1, "stepwise": True},
    ],
)
def test_other_families_free_everything_too(form: dict[str, Any]) -> None:
    for dtype, checkpointing, tp, sequence, dropout, norm, device, (first, last) in ALL:
        shape = replace(setup().shape, **{"dropout": dropout, "norm": norm, "position": "rotary", **form})
        case = setup(
            shape=shape,
            dtype=dtype,
            checkpointing=checkpointing,
            layout=Layout(tp=tp),
            sequence_parallel=sequence,
        )
        done = walk(ActivationSizes(case, device), blocks=3, first=first, last=last)
        assert done.backward[-1].live == (0 if first else ActivationSizes(case, device).local), case


def test_a_gate_keeps_four_tensors() -> None:
    """What it lets through, its own input and function, and the product; without a gate an input and a function."""
    for gated, tensors in ((True, 4), (False, 2)):
        kept = []
        for width in (3072, 4096):
            shape = replace(setup().shape, gated=gated, ffn_hidden=width, chunked_loss=True)
            sizes = ActivationSizes(setup(shape=shape), "cuda")
            kept.append(walk(sizes, blocks=12, first=True, last=True).kept)
        case = setup()
        tokens = case.micro_size * case.shape.sequence_length
        assert kept[1] - kept[0] == 12 * tensors * 1024 * tokens * 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_peak_of_a_step_is_that_of_its_actions(schedule: Any) -> None:
    """The short cut beside the walk through all actions."""
    for pp, micro_batches in ((2, 1), (2, 5), (4, 3), (4, 16)):
        case = setup(layout=Layout(pp=pp), accumulation=micro_batches, schedule=schedule)
        for rank in range(pp):
            stages = [walk(ActivationSizes(case, "cpu"), blocks=3, first=rank == 0, last=rank == pp - 1)]
            assert step_peak(case, stages, rank) == max(p for *_, p in held(case, stages, rank, micro_batches))


def test_one_forward_one_backward_holds_fewer_micro_batches_than_gpipe() -> None:
    case = setup(layout=Layout(pp=4), accumulation=16, cut=(3, 3, 3, 3))
    eager = predict_memory(case)
    late = predict_memory(replace(case, schedule="gpipe"))
    assert all(a.activations < b.activations for a, b in zip(eager, late, strict=True))
    assert eager[0].activations > eager[1].activations > eager[2].activations


def test_checkpointing_keeps_less() -> None:
    plain, checkpointed = (predict_memory(setup(checkpointing=kind, micro_size=8))[0] for kind in ("none", "block"))
    assert checkpointed.activations < plain.activations / 2


def test_a_timeline_peaks_where_the_prediction_does() -> None:
    for layout in (Layout(), Layout(pp=3)):
        case = setup(layout=layout, accumulation=3, shape=replace(setup().shape, vocab_size=1000))
        for rank in predict_memory(case):
            line = memory_timeline(case, (rank.pipeline, rank.tensor))
            assert max(sum(held.values()) for _, held in line) == rank.total
            assert line[0][0] == "between steps"


def test_an_uneven_vocabulary_has_two_kinds_of_ranks() -> None:
    found = predict_memory(setup(shape=replace(setup().shape, vocab_size=1003), layout=Layout(tp=4)))
    assert sorted(rank.ranks for rank in found) == [1, 3]
    assert found[0].parameters != found[1].parameters


def test_every_rank_gets_what_its_own_position_holds() -> None:
    """Of 1,002 rows, four ranks have 250, 251, 250 and 251: the list of positions has two, and the third rank is like
    the first."""
    uneven = setup(shape=replace(setup().shape, vocab_size=1002), layout=Layout(pp=3, dp=2, tp=4))
    first, held = memory_by_rank(uneven, predict_memory(uneven)), []
    for rank, memory in enumerate(first):
        at = uneven.layout.coordinates(rank)
        assert memory.pipeline == at["pp"]
        held.append(memory.parameters)
    pattern = [held[0], held[1], held[0], held[1]]
    assert held[0] < held[1]
    assert held[:8] == pattern * 2
    assert len(set(held[8:16])) == 1  # Blocks only: all alike.
    assert held[16:20] == held[20:] == [held[16], held[17]] * 2


def test_refusals_name_the_numbers() -> None:
    with pytest.raises(ValueError, match="12 heads do not divide by tp 5"):
        predict_memory(setup(layout=Layout(tp=5)))
    with pytest.raises(ValueError, match=r"cut 3 \+ 3 is not the model's 12 blocks"):
        predict_memory(setup(layout=Layout(pp=2), cut=(3, 3)))
    with pytest.raises(ValueError, match="decoders only"):
        memory_timeline(setup(shape=replace(setup().shape, decoder_layers=12)))


def test_thousands_of_ranks_take_milliseconds() -> None:
    shape = replace(setup().shape, layers=128, hidden=36864, heads=288, ffn_hidden=4 * 36864, vocab_size=51200)
    case = setup(shape=shape, layout=Layout(dp=2, tp=8, pp=64), dtype="bfloat16", accumulation=512)
    best = min(_seconds(case) for _ in range(5))
    assert best < 0.05


def _seconds(case: Setup) -> float:
    start = time.process_time()
    predict_memory(case)
    return time.process_time() - start


def test_a_configuration_says_the_same() -> None:
    config = RunConfig(model="gpt2", data={"sequence_length": 512}, zero=0, batch={"micro_size": 2})
    assert predict_memory(Setup.of_config(config, 1, dtype="float32")) == predict_memory(setup())

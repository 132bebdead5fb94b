"""Parameter counts, FLOP and model states against known numbers and the real model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speedlab.config import MODEL_PRESETS, ModelConfig, OptimizerConfig
from speedlab.layout import Layout
from speedlab.models import GPT
from speedlab.parallel.tensor.slicing import cut_along
from speedlab.planner import explain_stage, flops_per_token, model_states, parameter_count, rank_parameters


def config(**fields) -> ModelConfig:
    return ModelConfig.model_validate(fields)


def real_count(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(model).parameters())


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_sizes_are_those_of_the_released_models(preset, count):
    assert parameter_count(config(preset=preset)) == count


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_the_count_is_the_real_models(preset):
    assert parameter_count(config(preset=preset)) == real_count(config(preset=preset))


def test_the_tiny_preset_is_about_three_million():
    assert 2.5e6 < parameter_count(config(preset="gpt-tiny")) < 3.5e6


@settings(deadline=None, max_examples=60)
@given(
    layers=st.integers(1, 3),
    head=st.integers(1, 4),
    heads=st.integers(1, 3),
    ffn=st.integers(1, 20),
    vocabulary=st.integers(2, 30),
    position=st.sampled_from(["rotary", "learned"]),
    norm=st.sampled_from(["rms", "layer"]),
    tied=st.booleans(),
    bias=st.booleans(),
)
def test_the_count_is_exact_for_any_model(layers, head, heads, ffn, vocabulary, position, norm, tied, bias):
    model = config(
        layers=layers,
        hidden=2 * head * heads,
        heads=heads,
        ffn_hidden=ffn,
        vocab_size=vocabulary,
        context=7,
        position=position,
        norm=norm,
        tied=tied,
        bias=bias,
    )
    assert parameter_count(model) == real_count(model)


ROWS_CUT = ("qkv.weight", "qkv.bias", "up.weight", "up.bias", "embedding.weight", "head.weight")
COLUMNS_CUT = ("out.weight", "down.weight")


def counted_by_hand(model: ModelConfig, layout: Layout, counts: list[int]) -> list[int]:
    """Every parameter of the real model given to the ranks that hold it, and cut there."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT(model).named_parameters()}
    stage_of_block = [stage for stage, count in enumerate(counts) for _ in range(count)]
    held = [0] * layout.world_size
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        for name, shape in shapes.items():
            if name.startswith("blocks."):
                stages = {stage_of_block[int(name.split(".")[1])]}
            elif name.startswith(("norm", "head")):
                stages = {len(counts) - 1}
            else:
                stages = {0, len(counts) - 1} if model.tied and name.startswith("embedding") else {0}
            if at["pp"] not in {stage % layout.pp for stage in stages}:
                continue
            sizes = list(shape)
            for names, dim in ((ROWS_CUT, 0), (COLUMNS_CUT, 1)):
                if name.endswith(names):
                    sizes[dim] = cut_along(shape, dim, layout.tp, at["tp"]).own_shape[dim]
            held[rank] += torch.Size(sizes).numel()
    return held


@settings(deadline=None, max_examples=60)
@given(
    pp=st.integers(1, 3),
    chunks=st.integers(1, 2),
    dp=st.integers(1, 2),
    tp=st.sampled_from([1, 2, 4]),
    vocabulary=st.integers(4, 30),
    position=st.sampled_from(["rotary", "learned"]),
    norm=st.sampled_from(["rms", "layer"]),
    tied=st.booleans(),
    bias=st.booleans(),
    data=st.data(),
)
def test_what_each_rank_holds_is_exact(pp, chunks, dp, tp, vocabulary, position, norm, tied, bias, data):
    counts = data.draw(st.lists(st.integers(1, 3), min_size=pp * chunks, max_size=pp * chunks))
    model = config(
        layers=sum(counts),
        hidden=16,
        heads=4,
        ffn_hidden=20,
        vocab_size=vocabulary,
        context=7,
        position=position,
        norm=norm,
        tied=tied,
        bias=bias,
    )
    layout = Layout(pp=pp, dp=dp, tp=tp)
    assert rank_parameters(model, layout, counts) == counted_by_hand(model, layout, counts)


def test_one_rank_holds_everything():
    model = config(preset="gpt2")
    assert rank_parameters(model, Layout(dp=2), [12]) == [124_439_808] * 2


def test_gpt2_flops_follow_the_published_convention():
    """6 × (124,439,808 − 1,024 × 768) + 12 × 12 layers × 768 × 1,024: the figure that is in use for GPT-2's MFU."""
    assert flops_per_token(config(preset="gpt2"), 1024) == 855_166_464


def test_flops_are_those_that_torch_counts():
    """Torch counts forward and backward of the products alone; norms and biases are the small difference."""
    from torch.utils.flop_counter import FlopCounterMode

    model = config(layers=2, hidden=64, heads=4, ffn_hidden=256, vocab_size=128, context=32, tied=False, loss="full")
    gpt, tokens = GPT(model), torch.zeros(3, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = gpt(tokens, tokens).loss
        loss.backward()
    per_token = counter.get_total_flops() / tokens.numel()
    assert flops_per_token(model, 32) == pytest.approx(per_token, rel=0.02)


def test_longer_sequences_cost_more_by_the_attention_term():
    model = config(preset="gpt2")
    assert flops_per_token(model, 2048) - flops_per_token(model, 1024) == 12 * 12 * 768 * 1024


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_figures_of_the_zero_paper(stage, gigabytes):
    """7.5 billion parameters on 64 ranks in float16 (arXiv:1910.02054, figure 1)."""
    states = model_states(7_500_000_000, dp=64, stage=stage, dtype="float16")
    assert round(states.total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("dtype", "optimizer", "each"),
    [
        ("float32", "adamw", (4, 4, 0, 8)),
        ("bfloat16", "adamw", (2, 2, 4, 8)),
        ("float16", "adamw", (2, 2, 4, 8)),
        ("float32", "sgd", (4, 4, 0, 4)),
        ("bfloat16", "sgd", (2, 2, 4, 4)),
        ("bfloat16", OptimizerConfig.model_validate({"name": "sgd", "momentum": 0.0}), (2, 2, 4, 0)),
    ],
)
def test_bytes_for_each_parameter(dtype, optimizer, each):
    states = model_states(1000, dp=4, stage=0, dtype=dtype, optimizer=optimizer)
    found = states.parameters, states.gradients, states.master_weights, states.optimizer_moments
    assert found == tuple(1000 * size for size in each)
    states = model_states(1000, dp=4, stage=3, dtype=dtype, optimizer=optimizer)
    found = states.parameters, states.gradients, states.master_weights, states.optimizer_moments
    assert found == tuple(250 * size for size in each)


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, (20, 20, 40, 80)), (1, (20, 20, 16, 32)), (2, (20, 8, 16, 32)), (3, (8, 8, 16, 32))]
)
def test_what_each_stage_partitions_with_ten_elements_on_three_ranks(stage, expected):
    states = model_states(10, dp=3, stage=stage, dtype="bfloat16")
    assert (states.parameters, states.gradients, states.master_weights, states.optimizer_moments) == expected
    assert states.total == sum(expected)


@given(parameters=st.integers(0, 10**12), dp=st.integers(1, 4096), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_a_higher_stage_never_holds_more(parameters, dp, dtype):
    totals = [model_states(parameters, dp=dp, stage=stage, dtype=dtype).total for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    if dp == 1:
        assert len(set(totals)) == 1


def test_stages_are_explained_in_the_panels_words():
    assert model_states(1, dp=1, stage=2, dtype="float32").explain() == "gradients and optimizer states in 1/dp"
    assert explain_stage(3) == "parameters, gradients and optimizer states in 1/dp"
    assert explain_stage(0) == "everything whole on every rank"


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="resolve 'auto' for the device first"):
        model_states(1, dp=1, stage=0, dtype="auto")
    with pytest.raises(ValueError, match="stage 4 is not one of"):
        model_states(1, dp=1, stage=4, dtype="float32")
    with pytest.raises(ValueError, match="dp 0 must be at least 1"):
        model_states(1, dp=0, stage=0, dtype="float32")
    with pytest.raises(ValueError, match="adamw"):
        model_states(1, dp=1, stage=0, dtype="float32", optimizer="adagrad")  # type: ignore[arg-type] # a wrong one on purpose


def test_of_sparse_attention_the_blocks_that_are_seen_count():
    """Windows of 2 blocks of 16 over 4 blocks: 7 of the 10 that a causal mask leaves."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 256, "vocab_size": 128, "context": 64}
    sparse = {"kind": "block_sparse", "pattern": "longformer", "block": 16, "window": 32, "global_blocks": 0}
    dense, seen = flops_per_token(config(**sizes), 64), flops_per_token(config(**sizes, attention=sparse), 64)
    assert dense - seen == pytest.approx(12 * 2 * 64 * 64 * 0.3, rel=1e-12)

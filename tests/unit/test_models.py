"""The GPT against transformers' GPT-2, on meta, in 16 bits, and under activation checkpointing; sampling."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cuda_ops.block_sparse_attention import token_mask
from speedlab.config import MODEL_PRESETS, AttentionConfig, ModelConfig
from speedlab.models import GPT, GPTOutput, generate
from speedlab.models.gpt import CausalAttention, SparseAttend, layout_of, rotate, rotation_table

SMALL = {"layers": 2, "hidden": 48, "heads": 4, "ffn_hidden": 96, "vocab_size": 101, "context": 32}
GPT2_LIKE = {"position": "learned", "norm": "layer", "tied": True, "bias": True}
KINDS = [{}, GPT2_LIKE, {"tied": False}, {"bias": True}, {"norm": "layer", "tied": False}]


def config(**fields) -> ModelConfig:
    return ModelConfig.model_validate({**SMALL, **fields})


def build(seed: int = 0, **fields) -> GPT:
    torch.manual_seed(seed)
    return GPT(config(**fields))


def batch(rows: int = 3, length: int = 20, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 101, (rows, length + 1), generator=generator)
    return whole[:, :-1], whole[:, 1:]


# ---- parity with transformers ----------------------------------------------------------------------------------------

_OURS_BY_THEIRS = {
    "wte.weight": "embedding.weight",
    "wpe.weight": "positions.weight",
    "ln_f": "norm",
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    "h.": "blocks.",
}


def load_gpt2_state(model: GPT, theirs: dict[str, torch.Tensor]) -> None:
    state = {}
    for name, tensor in theirs.items():
        if name == "lm_head.weight":
            continue
        ours = name.removeprefix("transformer.")
        for old, new in _OURS_BY_THEIRS.items():
            ours = ours.replace(old, new)
        transposed = ".c_" in name and name.endswith("weight")  # they keep linear weights as (inputs, outputs)
        state[ours] = tensor.t() if transposed else tensor
    model.load_state_dict(state)


@pytest.fixture(scope="module")
def hf_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=48, n_head=4, n_inner=96, vocab_size=101, n_positions=32, use_cache=False
        )
    )
    with torch.no_grad():  # biases and norms are born 0 and 1: an exchange of two would not show
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs.eval()


def test_logits_loss_and_every_gradient_agree_with_transformers_gpt2(hf_gpt2):
    ours = build(**GPT2_LIKE)
    load_gpt2_state(ours, hf_gpt2.state_dict())
    tokens, targets = batch()
    torch.testing.assert_close(ours(tokens).logits, hf_gpt2(tokens).logits, rtol=1e-5, atol=1e-5)

    hf_gpt2.zero_grad()
    their_loss = nn.functional.cross_entropy(hf_gpt2(tokens).logits.flatten(0, 1), targets.flatten())
    their_loss.backward()
    loss = ours(tokens, targets).loss
    loss.backward()
    torch.testing.assert_close(loss, their_loss)
    expected = build(**GPT2_LIKE)
    load_gpt2_state(expected, {name: parameter.grad for name, parameter in hf_gpt2.named_parameters()})
    for (name, parameter), gradient in zip(ours.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


# ---- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_shapes_of_the_contract(kind):
    model = build(**kind)
    tokens, targets = batch()
    output = model(tokens)
    assert isinstance(output, GPTOutput)
    assert output.loss is None
    assert output.logits.shape == (3, 20, 101)
    trained = model(tokens, targets)
    assert trained.logits is None
    expected = nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(trained.loss, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one(kind):
    model = build(**kind)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 101
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert (before[:, 12:] - after[:, 12:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_the_order_of_earlier_tokens_matters():
    for kind in ({}, GPT2_LIKE):
        model = build(**kind)
        logits = [model(torch.tensor([ids])).logits[0, -1] for ids in ([5, 9, 7], [9, 5, 7])]
        assert not torch.allclose(*logits, atol=1e-4)


def test_the_loss_at_the_start_is_that_of_guessing():
    tokens, targets = batch(rows=16)
    assert build(tied=False)(tokens, targets).loss.item() == pytest.approx(math.log(101), abs=0.05)


def test_targets_of_minus_100_do_not_count():
    model = build()
    tokens, targets = batch()
    masked = targets.clone()
    masked[:, 10:] = -100
    torch.testing.assert_close(model(tokens, masked).loss, model(tokens[:, :10], targets[:, :10]).loss)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="a sequence of 33 tokens is longer than the model's context of 32"):
        build()(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize("kind", [*KINDS, {"dropout": 0.1}])
def test_a_model_built_on_meta_is_whole_after_reset(kind):
    """The same numbers as a model that is built in place: nothing is left out, nothing depends on the constructor."""
    with torch.device("meta"):
        model = GPT(config(**kind))
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    owners = [module for module in model.modules() if list(module.parameters(recurse=False))]
    torch.manual_seed(0)
    for module in owners:
        module.reset_parameters()  # type: ignore[operator] # every owner has one: that is what is tested
    expected = build(**kind)
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def test_initialisation_is_gpt2s():
    model = build(layers=8, hidden=128, ffn_hidden=512, **GPT2_LIKE)
    block = model.blocks[3]
    for parameter, std in (
        (model.embedding.weight, 0.02),
        (block.attention.qkv.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attention.out.weight, 0.02 / 4),  # by the root of 2 × 8 layers
        (block.mlp.down.weight, 0.02 / 4),
    ):
        assert parameter.std().item() == pytest.approx(std, rel=0.05)
        assert parameter.mean().abs().item() < std / 20
    assert all((linear.bias == 0).all() for linear in model.modules() if isinstance(linear, nn.Linear))
    assert (model.norm.weight == 1).all()


@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_every_preset_runs_through_on_meta(preset):
    with torch.device("meta"):
        model = GPT(ModelConfig.model_validate({"preset": preset}))
        tokens = torch.zeros(2, model.config.context, dtype=torch.int64)
        assert model(tokens).logits.shape == (2, model.config.context, model.config.vocab_size)


def test_tied_and_untied_heads():
    assert "head.weight" not in dict(build().named_parameters())
    untied = build(tied=False)
    assert untied.head is not None
    assert untied.head.weight is not untied.embedding.weight


# ---- precision, checkpointing, dropout -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, GPT2_LIKE])
def test_bfloat16_keeps_the_loss_in_float32(kind):
    model = build(**kind)
    tokens, targets = batch()
    exact = model(tokens, targets).loss.item()
    model.bfloat16()
    output = model(tokens, targets)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact, abs=0.01)
    output.loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    low = model(tokens).logits
    expected = nn.functional.cross_entropy(low.float().flatten(0, 1), targets.flatten())
    assert output.loss.item() == expected.item()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_blocks_give_the_same_gradients(kind, monkeypatch):
    tokens, targets = batch()
    plain, saved = build(**kind), build(**kind)
    for block in saved.blocks:
        original = block.forward
        monkeypatch.setattr(
            block, "forward", lambda *args, original=original: checkpoint(original, *args, use_reentrant=False)
        )
    plain(tokens, targets).loss.backward()
    saved(tokens, targets).loss.backward()
    for a, b in zip(plain.parameters(), saved.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_head_drops_by_its_own_number_whoever_has_it():
    whole, some = CausalAttention(0.3), CausalAttention(0.3)
    some.first_head = 2
    q, k, v = torch.randn(3, 2, 6, 16, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    expected, state = whole(q, k, v), torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(some(q[:, 2:4], k[:, 2:4], v[:, 2:4]), expected[:, 2:4])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(whole(q, k, v), expected)
    same = torch.ones(2, 6, 16, 8)
    dropped = whole(same, same, same)[:, :, :, 0]
    assert all(not torch.equal(dropped[:, 0], dropped[:, head]) for head in range(1, 6))
    assert whole.eval()(same, same, same).allclose(same)


def test_attention_never_draws_for_more_than_one_head():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if "bernoulli" in str(func):
                self.elements = max(self.elements, result.numel())
            return result

    q = torch.randn(2, 6, 16, 8)
    with Largest() as largest:
        CausalAttention(0.3)(q, q, q)
    assert largest.elements == 2 * 16 * 16


# ---- block-sparse attention ------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Dense attention with the mask of a pattern."""

    def __init__(self, attention: AttentionConfig) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q, k, v):
        length = q.shape[2]
        mask = token_mask(layout_of(self.attention, length), length, length)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("length", [64, 57, 5])
@pytest.mark.parametrize(
    "fields",
    [
        {"pattern": "sliding", "window": 21},
        {"pattern": "bigbird", "window": 16, "random_blocks": 1},
        {"pattern": "custom", "mask": ("x...", "x...", ".xx.", "x..x")},
    ],
)
def test_sparse_attention_is_dense_attention_with_a_mask(fields, length):
    """A length that blocks do not divide too: values and every gradient."""
    shape = {"hidden": 64, "context": 64, "attention": {"kind": "block_sparse", "block": 16, **fields}}
    sparse, masked = build(**shape), build(**shape)
    for block in masked.blocks:
        assert isinstance(block.attention.attend, SparseAttend)
        block.attention.attend = Masked(masked.config.attention)
    tokens, targets = batch(length=length)
    torch.testing.assert_close(sparse(tokens).logits, masked(tokens).logits, rtol=1e-5, atol=1e-5)
    losses = [model(tokens, targets).loss for model in (sparse, masked)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for a, b in zip(sparse.parameters(), masked.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5 * b.grad.abs().max().item())


def test_dropout_acts_in_training_only():
    model = build(dropout=0.5)
    tokens, _ = batch()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    plain = build(dropout=0.0)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_a_model_learns_a_small_text_by_heart():
    model = build()
    tokens, targets = batch(rows=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss = model(tokens, targets).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


# ---- rotary positions ------------------------------------------------------------------------------------------------


def test_rotation_keeps_lengths_and_leaves_the_first_position():
    x = torch.randn(2, 3, 10, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotation_table(torch.arange(10), 8))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])


def test_products_of_rotated_vectors_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    table = rotation_table(torch.arange(40), 8)
    queries = rotate(q.expand(1, 1, 40, 8), table)[0, 0]
    keys = rotate(k.expand(1, 1, 40, 8), table)[0, 0]
    products = queries @ keys.t()  # (40, 40)
    for distance in (0, 1, 5, 30):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (products[5, 0] - products[6, 0]).abs() > 1e-3


def test_rotation_is_computed_in_float32_whatever_the_dtype():
    x = torch.randn(1, 1, 32, 8, generator=torch.Generator().manual_seed(0))
    table = rotation_table(torch.arange(32), 8)
    assert table.dtype == torch.float32
    low = x.bfloat16()
    assert torch.equal(rotate(low, table), rotate(low.float(), table).bfloat16())


# ---- generation ------------------------------------------------------------------------------------------------------


class Counter:
    """A model that has learned to count, and remembers how much it was shown."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, tokens: torch.Tensor) -> GPTOutput:
        self.lengths.append(tokens.shape[1])
        return GPTOutput(None, 50.0 * nn.functional.one_hot((tokens + 1) % 10, 10).float())


def test_any_callable_can_be_sampled_from():
    assert generate(Counter(), torch.tensor([[3]]), 5).tolist() == [[3, 4, 5, 6, 7, 8]]
    assert generate(Counter(), torch.tensor([[3, 8]]), 2, temperature=0).tolist() == [[3, 8, 9, 0]]
    assert generate(Counter(), torch.tensor([[3]]), 0).tolist() == [[3]]
    assert max(generate(Counter(), torch.tensor([[3]]), 9, vocabulary=6).flatten().tolist()) == 5


def test_the_context_is_cropped():
    counter = Counter()
    generate(counter, torch.zeros(1, 3, dtype=torch.int64), 4, context=5)
    assert counter.lengths == [3, 4, 5, 5]
    assert generate(build(), torch.zeros(1, 30, dtype=torch.int64), 8).shape == (1, 38)  # GPT's own context is 32


def test_a_wrapped_gpt_is_cropped_too():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = build()
            self.config = "another kind of configuration"

        def forward(self, tokens):
            return self.module(tokens)

    assert generate(Wrapper(), torch.zeros(1, 30, dtype=torch.int64), 8).shape == (1, 38)


def test_the_seed_decides():
    model, start = build(), torch.tensor([[1, 2, 3]])
    first = generate(model, start, 20, seed=1)
    torch.manual_seed(99)  # the global state plays no part
    assert torch.equal(generate(model, start, 20, seed=1), first)
    assert not torch.equal(generate(model, start, 20, seed=2), first)
    state = torch.get_rng_state()
    generate(model, start, 3, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])

    def constant(tokens):
        return GPTOutput(None, probabilities.log().expand(1, tokens.shape[1], 4))

    def shares(**options):
        drawn = generate(constant, torch.tensor([[0]]), 4000, context=1, **options)[0, 1:]
        return torch.bincount(drawn, minlength=4) / 4000

    torch.testing.assert_close(shares(), probabilities, atol=0.03, rtol=0)
    torch.testing.assert_close(shares(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    squared = probabilities**2 / (probabilities**2).sum()
    torch.testing.assert_close(shares(temperature=0.5), squared, atol=0.03, rtol=0)
    assert shares(top_k=99).count_nonzero() == 4
    assert shares(temperature=1e-30)[0] == 1


def test_generation_leaves_the_mode_as_it_was_and_keeps_no_graph():
    model = build(dropout=0.5)
    start = torch.tensor([[1]])
    out = generate(model, start, 5, temperature=0)
    assert model.training
    assert not out.requires_grad
    assert torch.equal(out, generate(model, start, 5, temperature=0))  # no dropout meanwhile
    model.eval()
    generate(model, start, 1)
    assert not model.training


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([[]], {}, "shape \\(1, 0\\)"),
        ([1, 2], {}, "shape \\(2,\\)"),
        ([[1], [2]], {}, "shape \\(2, 1\\)"),
        ([[1]], {"count": -1}, "count is -1"),
        ([[1]], {"temperature": -0.1}, "temperature is -0.1"),
        ([[1]], {"temperature": math.nan}, "temperature is nan"),
        ([[1]], {"top_k": 0}, "top_k is 0"),
        ([[1]], {"context": 0}, "context is 0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(prompt, options, message):
    options = {"count": 1, **options}
    with pytest.raises(ValueError, match=message):
        generate(Counter(), torch.tensor(prompt, dtype=torch.int64), options.pop("count"), **options)

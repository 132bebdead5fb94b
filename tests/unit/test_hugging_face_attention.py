"""Block-sparse attention in models of transformers: beside their own eager attention under a mask that is written out
here, and what is refused. On ranks: tests/ranks/test_hugging_face_attention.py."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedlab.config import AttentionConfig, ConfigError, ModelConfig
from speedlab.engine.sparse_attention import BlockSparse, check_attention
from speedlab.models import GPT, hf_attention
from speedlab.models.hf_attention import registered

transformers: Any = pytest.importorskip("transformers")

LENGTH, VOCABULARY = 41, 61
"""Two whole blocks of 16 tokens and a part of one."""

SLIDING = {"pattern": "sliding", "window": 19}
LONGFORMER = {"pattern": "longformer", "window": 16, "global_blocks": 1}
CUSTOM = {"pattern": "custom", "mask": ("x.x", "xx.", "x.x")}

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True},
    "bert": {"intermediate_size": 48, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
}


def attention(**fields: Any) -> AttentionConfig:
    return AttentionConfig.model_validate({"kind": "block_sparse", "block": 16, **fields})


def model(kind: str, **fields: Any) -> Any:
    """Small, with values in which no bias is 0."""
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **special, **KINDS.get(kind, {}), **fields})
    made = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        whole = made.from_config(config, attn_implementation="eager")
        for parameter in whole.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return whole.train()


def sparse(kind: str, pattern: dict[str, Any], **fields: Any) -> Any:
    whole = model(kind, **fields)
    assert BlockSparse(attention(**pattern)).within(whole) is whole
    return whole


def seen(pattern: dict[str, Any], length: int = LENGTH, *, causal: bool = True) -> Tensor:
    """(length, length) bool, by the words of the configuration's description."""
    token = torch.arange(length)
    query, key = token[:, None], token
    if pattern is SLIDING:
        return (query >= key) & (query - key < 19)
    if pattern is LONGFORMER:
        near = query // 16 == key // 16
        both = near | (key // 16 == 0) | ((query // 16 == 0) & (not causal))
    else:
        rows = torch.tensor([[mark == "x" for mark in row] for row in pattern["mask"]])
        both = rows[query // 16, key // 16]
    return both & (query >= key) if causal else both


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(7))


def added(allowed: Tensor) -> Tensor:
    """(B or 1, T, S) bool as what is added to scores, (B, 1, T, S)."""
    return (
        torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None].expand(2, 1, -1, -1)
    )


def trained(whole: Any, **inputs: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch, and the gradient of every parameter."""
    loss = whole(**{"input_ids": tokens(), "labels": tokens(), **inputs}).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def compare(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        # Gradients of biases of keys are zero but for rounding.
        error = (found[1][name] - gradient).abs().max().item()
        assert error <= 1e-5 * max(gradient.abs().max().item(), 1e-2), f"{name}: {error:.1e}"


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is said once is said anew."""
    hf_attention._say_dense.cache_clear()
    caplog.set_level(logging.WARNING, logger="speedlab.models")
    return caplog


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [SLIDING, LONGFORMER, CUSTOM], ids=lambda each: each["pattern"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders(kind: str, pattern: dict[str, Any], reported: pytest.LogCaptureFixture) -> None:
    expected = trained(model(kind), attention_mask=added(seen(pattern)[None]))
    compare(trained(sparse(kind, pattern)), expected)
    assert abs(trained(model(kind))[0] - expected[0]) > 1e-3, "the pattern makes no difference here"
    assert "model.attention" not in reported.text, "not by the kernel"


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_more_decoders(kind: str) -> None:
    compare(trained(sparse(kind, SLIDING)), trained(model(kind), attention_mask=added(seen(SLIDING)[None])))


def test_a_models_own_window_that_the_pattern_lies_within(reported: pytest.LogCaptureFixture) -> None:
    found = trained(sparse("mistral", SLIDING, sliding_window=19))
    compare(found, trained(model("mistral", sliding_window=19)))
    assert "model.attention" not in reported.text, "not by the kernel"


@pytest.mark.parametrize("pattern", [LONGFORMER, CUSTOM], ids=lambda each: each["pattern"])
def test_encoders_see_both_ways(pattern: dict[str, Any], reported: pytest.LogCaptureFixture) -> None:
    expected = trained(model("bert"), attention_mask=added(seen(pattern, causal=False)[None]))
    compare(trained(sparse("bert", {**pattern, "both_ways": pattern is LONGFORMER})), expected)
    assert "model.attention" not in reported.text, "not by the kernel"


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padding_is_dense_exact_and_told_once(kind: str, reported: pytest.LogCaptureFixture) -> None:
    causal = kind == "llama"
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, 30:] = 0
    labels = tokens().masked_fill(mask == 0, -100)  # A padded token may see none at all: nothing is promised of it.
    both = seen(LONGFORMER, causal=causal) & (mask == 1)[:, None]
    expected = trained(model(kind), labels=labels, attention_mask=added(both))
    whole = sparse(kind, LONGFORMER)
    compare(trained(whole, labels=labels, attention_mask=mask), expected)
    whole.zero_grad()
    compare(trained(whole, labels=labels, attention_mask=both[:, None]), expected)  # A mask of one's own.
    whole.zero_grad()
    compare(trained(whole, labels=labels, attention_mask=added(both)), expected)
    assert reported.text.count("model.attention: a batch came with a mask") == 1


def test_a_mask_that_hides_nothing_costs_nothing(reported: pytest.LogCaptureFixture) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    compare(trained(sparse("llama", SLIDING), attention_mask=mask), trained(sparse("llama", SLIDING)))
    assert "model.attention" not in reported.text


def test_packed_sequences_do_not_see_each_other(reported: pytest.LogCaptureFixture) -> None:
    first = torch.arange(LENGTH) < 12
    together = first[:, None] == first
    places = torch.cat([torch.arange(12), torch.arange(LENGTH - 12)]).expand(2, -1)
    expected = trained(model("llama"), attention_mask=added((seen(LONGFORMER) & together)[None]), position_ids=places)
    # transformers looks at positions only where there is no cache.
    compare(trained(sparse("llama", LONGFORMER, use_cache=False), position_ids=places), expected)
    assert "model.attention: a batch came with a mask" in reported.text


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generation_with_a_cache_sees_the_same_blocks(kind: str) -> None:
    whole = sparse(kind, LONGFORMER).eval()
    begin = tokens()[:, :14].clamp(min=1)  # 0 would be taken for padding.
    arguments = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    cached, anew = (whole.generate(begin, use_cache=use, **arguments) for use in (True, False))
    assert cached.sequences.equal(anew.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(anew.logits), rtol=1e-4, atol=1e-4)
    mask = seen(LONGFORMER, 33)[None]
    reference = model(kind).eval()(input_ids=anew.sequences[:, :33], attention_mask=added(mask)).logits[:, -1]
    torch.testing.assert_close(anew.logits[-1], reference, rtol=1e-4, atol=1e-4)


# ---- whose attention is changed, and for how long --------------------------------------------------------------------


def test_a_configuration_that_is_shared_stays_as_it_is() -> None:
    config = model("llama").config
    one, other = (transformers.LlamaForCausalLM(config) for _ in range(2))
    before = copy.deepcopy(config.__dict__)
    change = BlockSparse(attention(**SLIDING))
    change.within(nn.ModuleDict({"inner": one}))  # Also within a module of the user's.
    assert {each.config._attn_implementation for each in one.modules() if hasattr(each, "config")} == {
        registered(attention(**SLIDING))
    }
    assert other.config is config
    assert config.__dict__ == before
    change.undo()
    assert all(each.config is config for each in one.modules() if hasattr(each, "config"))


def test_dense_changes_nothing() -> None:
    whole = model("llama")
    config = whole.config
    change = BlockSparse(AttentionConfig())
    assert change.within(whole) is whole
    assert whole.config is config
    anything = nn.Linear(2, 2)
    assert change.within(anything) is anything
    assert change.within(model) is model


def test_the_built_in_gpt_needs_the_attention_of_the_configuration() -> None:
    shape = {"hidden": 64, "heads": 4, "context": 64}
    check_attention(GPT(ModelConfig(**shape, attention=attention(**SLIDING))), attention(**SLIDING))
    assert "model: the GPT given was built with another attention (" in refusal(
        GPT(ModelConfig(**shape, attention=attention(**LONGFORMER))), SLIDING
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


def refusal(whole: nn.Module, pattern: dict[str, Any] = SLIDING) -> str:
    change = BlockSparse(attention(**pattern))
    configs = [each.__dict__.get("config") for each in whole.modules()]
    with pytest.raises(ConfigError) as error:
        change.within(whole)
    assert all(a is b.__dict__.get("config") for a, b in zip(configs, whole.modules(), strict=True)), "changed already"
    return str(error.value)


@pytest.mark.parametrize("build", [lambda: nn.Linear(2, 2), lambda: GPT(ModelConfig())])
def test_modules_that_compute_their_own_attention(build: Any) -> None:
    whole = build()
    assert refusal(whole) == (
        f"model.attention.kind: 'block_sparse' has no effect on a {type(whole).__name__}, which computes its attention "
        "itself; set model.attention.kind to 'dense', or give a GPT(config.model) or a model of transformers"
    )


def without_interface() -> Any:
    return transformers.FunnelModel(
        transformers.FunnelConfig(vocab_size=VOCABULARY, block_sizes=[1], d_model=16, n_head=1, d_head=16, d_inner=16)
    )


def test_models_without_the_interface() -> None:
    assert refusal(without_interface()) == (
        "model: FunnelModel computes its attention without transformers' attention interface, so that nothing can "
        "stand in its place; set model.attention.kind to 'dense', or take a model whose attention is exchangeable, as "
        "those of Llama, Qwen, Mistral, GPT-2 and BERT are"
    )


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    )


GEMMA = {**GROUPED, "query_pre_attn_scalar": 16, "attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("build", "pattern", "message"),
    [
        (
            t5,
            SLIDING,
            "T5ForConditionalGeneration attends from one sequence to another, which 'block_sparse' does not; set "
            "model.attention.kind to 'dense'",
        ),
        (
            lambda: model("llama", attention_dropout=0.1),
            SLIDING,
            "'block_sparse' drops no attention probabilities, and 0.1 are to be dropped; set attention_dropout of the "
            "model's configuration to 0",
        ),
        (
            lambda: model("gpt2", attn_pdrop=0.2),
            SLIDING,
            "'block_sparse' drops no attention probabilities, and 0.2 are to be dropped; set attn_pdrop of the model's "
            "configuration to 0",
        ),
        (
            lambda: model("llama"),
            {**LONGFORMER, "both_ways": True},
            "model.attention.both_ways is for encoders, and model.layers.0.self_attn is causal; give an encoder of "
            "transformers as the model, or set both_ways to false",
        ),
        (
            lambda: model("bert"),
            SLIDING,
            "pattern 'sliding' counts tokens before a query, and this is an encoder, whose queries see both ways; "
            "pattern 'longformer' with global_blocks 0 and window 32 shows whole blocks on both sides",
        ),
        (
            lambda: model("mistral", sliding_window=18),
            SLIDING,
            "'block_sparse' with pattern 'sliding' would show keys beyond the model's own sliding_window of 18 tokens; "
            "set sliding_window to None in the model's configuration, or pattern to 'sliding' with a window of at most "
            "18",
        ),
        (
            lambda: model("mistral", sliding_window=4096),
            LONGFORMER,
            "'block_sparse' with pattern 'longformer' would show keys beyond the model's own sliding_window of 4096 "
            "tokens; set sliding_window to None in the model's configuration, or pattern to 'sliding' with a window of "
            "at most 4096",
        ),
        (
            lambda: model("gemma2", **GEMMA, sliding_window=64),
            SLIDING,
            "scores are capped at 50.0, which 'block_sparse' does not; set attn_logit_softcapping to None",
        ),
        (
            lambda: model("llama", head_dim=8),
            SLIDING,
            "'block_sparse' takes heads of a multiple of 8 elements from 16 to 256, and those of "
            "model.layers.0.self_attn have 8; set model.attention.kind to 'dense', or choose other heads",
        ),
        (
            lambda: model("llama", output_attentions=True),
            SLIDING,
            "LlamaForCausalLM is to return attention probabilities, which are never made; set output_attentions to "
            "False",
        ),
    ],
)
def test_what_blocks_would_not_compute(build: Any, pattern: dict[str, Any], message: str) -> None:
    assert f"model: {message}" in refusal(build(), pattern).splitlines()


def test_layers_of_another_kind_and_sinks() -> None:
    hybrid = model("qwen3")
    for each in hybrid.modules():
        if hasattr(each, "layer_idx"):
            each.config.layer_types = ["full_attention", "linear_attention"]
    assert "model: layers of kind linear_attention do not attend as 'block_sparse' would; set" in refusal(hybrid)
    sinks = model("gpt_oss", **GROUPED, num_local_experts=2, sliding_window=64)
    assert (
        "model: model.layers.0.self_attn has sinks in addition to its keys, which 'block_sparse' has not; set"
        in refusal(sinks)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.5}, "model.attention 'block_sparse' drops no attention probabilities, and 0.5 came; set the"),
        ({"softcap": 30.0, "s_aux": 1}, "the model asks its attention for s_aux, softcap besides; set model.attention"),
        ({"output_attentions": True}, "the model asks its attention for output_attentions besides; set"),
        ({"sliding_window": 18}, "model.attention 'block_sparse' with pattern 'sliding' would show keys beyond the"),
        ({"keys": 12}, "is for sequences that attend to themselves, and 16 queries came with 12 keys; set"),
        ({"keys": 20, "is_causal": False}, "and 16 queries came with 20 keys; set model.attention.kind to 'dense'"),
    ],
)
def test_what_an_unknown_model_may_ask_of_its_attention(arguments: dict[str, Any], message: str) -> None:
    """Where nothing told it before."""
    attend = hf_attention.InterfaceAttention(attention(**SLIDING))
    keys = torch.zeros(1, 2, arguments.pop("keys", 16), 16)
    with pytest.raises(ValueError, match=r"^model\.attention") as error:
        attend(nn.Module(), torch.zeros(1, 2, 16, 16), keys, keys, None, **arguments)
    assert message in str(error.value)
    attend(nn.Module(), *[torch.zeros(1, 2, 16, 16)] * 3, None, softcap=None, sliding_window=19, position_ids=tokens())


def test_caches_that_keep_room_are_refused() -> None:
    whole = sparse("llama", SLIDING).eval()
    with pytest.raises(ValueError, match="takes keys that end with the queries, and a cache gave keys 0 to 19 for"):
        whole.generate(tokens()[:, :10], max_new_tokens=10, cache_implementation="static")


def test_transformers_that_make_masks_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.masking_utils

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", lambda cache_position: None)
    assert refusal(model("llama")) == (
        f"model: transformers {transformers.__version__} makes masks in another way; upgrade it to 5.23, or set "
        "model.attention.kind to 'dense'"
    )

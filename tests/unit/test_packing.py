"""Documents that stand in one sequence: cut from real text, and in models as if each stood alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from speedlab.config import ConfigError, DataConfig, ModelConfig, RunConfig
from speedlab.data import check, prepare, separated, write_tokens
from speedlab.engine.loss import loss_of
from speedlab.engine.loss_weights import targets_of
from speedlab.engine.model_check import validate_model
from speedlab.models import GPT
from speedlab.models.hf_attention import PACKED_FAMILIES, packing_problem
from speedlab.models.packing import document_starts

LENGTHS = ([1, 19, 4, 24], [48], [30, 17, 1])
"""Of the documents in three sequences of 48 tokens."""

SPARSE = {"kind": "block_sparse", "block": 16, "window": 19}
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "ffn_hidden": 48, "vocab_size": 61, "context": 48}


def positions_of(lengths: Any = LENGTHS) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def batch_of(vocabulary: int = 61) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions (3, 48); the last target of a document but the sequence's last does not count."""
    generator = torch.Generator().manual_seed(4)
    tokens, targets = torch.randint(1, vocabulary, (2, 3, 48), generator=generator)
    for row, lengths in zip(targets, LENGTHS, strict=True):
        row[np.cumsum(lengths)[:-1] - 1] = -100
    return tokens, targets, positions_of()


def pieces(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each document by itself, (1, its length)."""
    rows = [zip(*(each[number].split(row) for each in tensors), strict=True) for number, row in enumerate(LENGTHS)]
    return [tuple(part[None] for part in parts) for row in rows for parts in row]


# ---- where documents are ---------------------------------------------------------------------------------------------


def test_starts_follow_from_positions() -> None:
    positions = torch.tensor([[0, 1, 0, 0, 1, 2], [5, 6, 7, 9, 10, 0]])
    assert document_starts(positions).tolist() == [[0, 0, 2, 3, 3, 3], [0, 0, 0, 3, 3, 5]]


def test_rows_are_cut_behind_each_end_token() -> None:
    rows = np.array([[9, 3, 0, 5, 6, 0, 0], [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]])
    inputs, targets, positions = separated(rows, 0)
    assert inputs.tolist() == rows[:, :-1].tolist()
    assert targets.tolist() == [[3, 0, -100, 6, 0, -100], [-100, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert {each.dtype for each in (inputs, targets, positions)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_text_files_are_documents(tokenizer: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [f"file {number} says {'so ' * number}\n" for number in range(40)]
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    config = DataConfig(
        source=str(folder), tokenizer=tokenizer, vocab_size=300, sequence_length=32, documents="separate"
    )
    corpus = prepare(config, cache=tmp_path / "cache", progress=None)
    assert corpus.end is not None
    assert corpus.end == corpus.tokenizer.end_of_text
    whole = np.asarray(corpus.train, dtype=np.int64)
    inputs, targets, positions = separated(whole[None], corpus.end)
    documents = np.split(inputs[0], np.flatnonzero(positions[0] == 0)[1:])
    reported = {corpus.tokenizer.decode(each[each != corpus.end].tolist()) for each in documents}
    assert len(documents) > 30
    assert reported <= set(texts)
    for document in documents[:-1]:
        assert (document == corpus.end).nonzero()[0].tolist() == [len(document) - 1]
    crossing = targets[0] == -100
    assert crossing.sum() == len(documents) - 1
    assert (inputs[0][crossing] == corpus.end).all()
    assert (targets[0] == corpus.end).sum() == len(documents)  # Every end is predicted, by its own document.
    joined = prepare(config.model_copy(update={"documents": "joined"}), cache=tmp_path / "cache", progress=None)
    assert joined.end is None
    assert np.array_equal(joined.train, corpus.train)


# ---- the built-in GPT ------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "dense-rotary": {"heads": 4},
    "dense-learned": {"heads": 4, "position": "learned", "norm": "layer", "tied": False},
    "heads-too-small-for-kernels": {"heads": 8},
    "sliding-rotary": {"heads": 4, "attention": SPARSE},
    "sliding-learned": {"heads": 2, "position": "learned", "attention": SPARSE},
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_is_what_documents_are_alone(name: str) -> None:
    """Loss, logits and every gradient beside a loop over the documents, by the number of their counted targets."""
    torch.manual_seed(2)
    model = GPT(ModelConfig(**SHAPE, **MODELS[name]))
    tokens, targets, positions = batch_of()
    loss = model(tokens, targets=targets, positions=positions).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    counted = int((targets != -100).sum())
    alone = torch.zeros(())
    for own_tokens, own_targets in pieces(tokens, targets):
        count = int((own_targets != -100).sum())
        if count:
            alone = alone + model(own_tokens, targets=own_targets).loss * (count / counted)
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(alone, list(model.parameters()))
    for (key, _), mine, other in zip(model.named_parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * other.abs().max().item(), msg=key)
    logits = torch.cat([model(own).logits for (own,) in pieces(tokens)], dim=1)
    torch.testing.assert_close(model(tokens, positions=positions).logits.flatten(0, 1), logits[0], rtol=1e-5, atol=1e-5)
    joined = model(tokens, targets=targets).loss
    assert abs(joined.item() - loss.item()) > 1e-5  # Else nothing was kept apart.


def test_angles_are_those_of_positions() -> None:
    """Scores depend on differences alone, so that no loss tells; the precision of long sequences does."""
    model = GPT(ModelConfig(**SHAPE, heads=4))
    positions = positions_of()
    rotation, table = model.rotation(torch.zeros(3, 48, 64), positions), model.rotation(torch.zeros(3, 48, 64))
    assert rotation is not None
    assert table is not None
    assert rotation.shape == (2, 3, 1, 48, 8)
    assert torch.equal(rotation[:, :, 0], table[:, positions])


def test_one_document_a_sequence_is_no_other_model() -> None:
    model = GPT(ModelConfig(**SHAPE, heads=4))
    tokens, targets, _ = batch_of()
    positions = torch.arange(48).expand(3, 48)
    packed, plain = model(tokens, targets, positions).loss, model(tokens, targets).loss
    torch.testing.assert_close(packed, plain, rtol=1e-6, atol=0)


def test_dropout_drops_within_documents() -> None:
    """Of each kept probability as much more as others are dropped: the mean over many draws is attention without."""
    model = GPT(ModelConfig(**SHAPE, heads=4, dropout=0.3))
    attend = model.blocks[0].attention.attend.train()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    q, k, v = torch.randn(3, 3, 4, 48, 16, generator=torch.Generator().manual_seed(0))
    starts = document_starts(positions_of())
    v[1:] = 1.0
    torch.manual_seed(0)
    mean = torch.stack([attend(q, k, v, starts) for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, attend.eval()(q, k, v, starts), rtol=0, atol=0.3)
    marked = v.clone()
    marked[0, :, :20] = 1e6  # Documents behind see nothing of it.
    assert attend.train()(q, k, marked, starts)[0, :, 20:].abs().max() < 100


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.zeros(3, 47, dtype=torch.int64), r"positions: torch.int64 of shape \(3, 47\), expected int64 of .*48"),
        (torch.zeros(48, dtype=torch.int64), r"positions: torch.int64 of shape \(48,\), expected"),
        (torch.zeros(3, 48), "positions: torch.float32 of shape"),
    ],
)
def test_positions_of_another_shape_are_refused(positions: Tensor, message: str) -> None:
    model = GPT(ModelConfig(**SHAPE, heads=4))
    with pytest.raises(ValueError, match=message):
        model(batch_of()[0], positions=positions)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks
def test_compiled_blocks_do_the_same() -> None:
    model: Any = GPT(ModelConfig(**SHAPE, heads=4))
    batch = batch_of()
    expected = torch.autograd.grad(model(*batch).loss, list(model.parameters()))
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    found = torch.autograd.grad(model(*batch).loss, list(model.parameters()))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


# ---- models of others ------------------------------------------------------------------------------------------------


def family(kind: str, **changes: Any) -> Any:
    """A tiny model of a family of transformers'."""
    transformers = pytest.importorskip("transformers")
    default = transformers.AutoConfig.for_model(kind)
    wanted: dict[str, Any] = {
        **dict.fromkeys(("hidden_size", "n_embd"), 32),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
        **dict.fromkeys(("num_attention_heads", "n_head"), 2),
        **dict.fromkeys(("intermediate_size", "n_inner"), 48),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 61,
        "num_local_experts": 4,
    }
    fields = {name: value for name, value in wanted.items() if hasattr(default, name)}
    implementation = changes.pop("implementation", "eager")
    torch.manual_seed(1)
    config = type(default)(**fields, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("kind", PACKED_FAMILIES)
def test_families_of_transformers_keep_documents_apart(kind: str) -> None:
    model = family(kind)
    assert packing_problem(model) is None
    tokens, targets, positions = batch_of()
    loss = loss_of(model, (tokens, targets, positions), None)
    total = torch.zeros(())
    for own, aims in pieces(tokens, targets):
        logits = model(input_ids=own, use_cache=False).logits.flatten(0, 1)
        total = total + nn.functional.cross_entropy(logits, aims.flatten(), reduction="sum")
    torch.testing.assert_close(loss, total / (targets != -100).sum(), rtol=2e-6, atol=1e-6)
    # The same in keyword arguments, as collators of packed documents give them.
    labels = nn.functional.pad(targets[:, :-1], (1, 0), value=-100)
    labels = labels.masked_fill(positions == 0, -100)
    given = {"input_ids": tokens, "labels": labels, "position_ids": positions, "attention_mask": tokens.new_ones(3, 48)}
    counted = targets_of(model, given)
    assert counted is not None
    total = total - nn.functional.cross_entropy(
        model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, -1], targets[:, -1], reduction="sum"
    )
    torch.testing.assert_close(loss_of(model, given, None), total / counted.number, rtol=2e-6, atol=1e-6)
    assert model.config.use_cache  # As before.


@pytest.mark.parametrize("implementation", ["sdpa", "speedlab"])
def test_other_attention_of_transformers_does_too(implementation: str) -> None:
    from speedlab.config import AttentionConfig
    from speedlab.models.hf_attention import registered

    name = implementation
    if implementation == "speedlab":
        name = registered(AttentionConfig(kind="block_sparse", block=16, window=48))
    model, plain = family("llama", implementation=name), family("llama")
    assert packing_problem(model) is None
    batch = batch_of()
    torch.testing.assert_close(loss_of(model, batch, None), loss_of(plain, batch, None), rtol=2e-6, atol=1e-6)


class Bigram(nn.Module):
    """A model of somebody's, which knows nothing of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 300)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.table(tokens).flatten(0, 1), targets.flatten())


def test_models_that_would_join_documents_are_refused() -> None:
    config = RunConfig(data={"documents": "separate", "vocab_size": 300, "sequence_length": 16}, model={"context": 16})
    device = torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"Bigram.forward takes no `positions`, nor is it of a type .*'joined', or gi"
    ):
        validate_model(config, 1, model=Bigram, device=device)
    reported = (
        "with attention 'flash_attention_2' does not keep those of several sequences separate; load it by from_pretr"
    )
    model = family("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match=reported):
        loss_of(model, batch_of(), None)
    with pytest.raises(ConfigError, match=r"OPTForCausalLM.forward takes no `positions`, nor is it of a type"):
        loss_of(family("opt", ffn_dim=32, word_embed_proj_dim=32), batch_of(), None)

    def own_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        tokens, targets, positions = batch
        return model(tokens, targets) + 0 * positions.sum()

    assert validate_model(config, 1, model=Bigram, loss=own_loss, device=device)["untried"] == ""
    assert validate_model(config, 1, device=device)["untried"] == ""


# ---- what is refused -------------------------------------------------------------------------------------------------


def no_end(path: Path) -> Path:
    """A tokenizer.json of one word a letter, and no end."""
    vocabulary = {chr(97 + number): number for number in range(26)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **nothing}))
    return path


def test_data_without_ends_are_refused(tmp_path: Path) -> None:
    tokens, text = tmp_path / "ids.tokens", tmp_path / "text.txt"
    write_tokens(tokens, [np.arange(400) % 20], 300)
    text.write_text("a b c d\n" * 50)
    options: dict[str, Any] = {"documents": "separate", "sequence_length": 8}
    own = str(no_end(tmp_path / "own.json"))
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"source": "task:copy"},
            "task:copy has no documents, each of its sequences is a row of its own; set data.doc",
        ),
        ({"source": str(tokens)}, "ids.tokens is of token ids without a tokenizer, so that it is unknown which"),
        ({"source": str(text), "tokenizer": own}, "has no token that ends a document (such as <|endoftext|> or </s>)"),
        ({"source": str(tokens), "tokenizer": own}, "has no token that ends a document"),
    ]
    for given, message in cases:
        config = DataConfig(**options, **given)
        for way in (check, lambda config: prepare(config, cache=tmp_path / "cache", progress=None)):
            with pytest.raises(ConfigError, match=re.escape(message)):
                way(config)
        check(config.model_copy(update={"documents": "joined"}))
    absent = DataConfig(**options, source=str(tokens), tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"token 256, which ends a document, is nowhere in .*ids.tokens; write the"):
        prepare(absent, cache=tmp_path / "cache", progress=None)
    write_tokens(tokens, [np.where(np.arange(400) % 30 == 29, 256, 65)], 300)
    assert prepare(absent, cache=tmp_path / "cache", progress=None).end == 256


def test_a_mask_is_not_taken_for_positions() -> None:
    tokens = torch.randint(9, (2, 8))
    for other in (torch.ones_like(tokens), -tokens - 1, torch.tensor([[5, 6, 7, 3, 4, 5, 6, 7]]).expand(2, -1)):
        with pytest.raises(ValueError, match="do not count from 0 in each document"):
            loss_of(family("llama"), (tokens, tokens, other), None)
    with pytest.raises(ValueError, match=r"positions: torch\.bool"):
        loss_of(family("llama"), (tokens, tokens, tokens > 0), None)
    # The first may have begun before its sequence.
    loss_of(family("llama"), (tokens, tokens, torch.tensor([[5, 6, 7, 0, 1, 2, 0, 1]]).expand(2, -1)), None)


def test_blocks_for_flex_attention_are_real_though_a_plan_asks_first() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from cuda_ops.block_layout import BlockLayout
    from cuda_ops.block_sparse_attention import flex_blocks

    layout = BlockLayout.local(128, 2, causal=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        flex_blocks(layout, 128, 128, torch.device("cpu"))
    assert not isinstance(flex_blocks(layout, 128, 128, torch.device("cpu")).kv_indices, FakeTensor)

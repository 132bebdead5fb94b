"""Which targets count in a loss, and that each form of batch has the loss of exactly these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedlab.config import ConfigError
from speedlab.engine.loss import loss_of
from speedlab.engine.loss_weights import targets_of, with_one_counted
from speedlab.models.hf_attention import hides_nothing_more, keep_separate
from speedlab.models.labels import Labels, label_rule

VOCABULARY = 41


def model_of(kind: str, name: str, **fields: Any) -> Any:
    """A tiny model of transformers."""
    transformers = pytest.importorskip("transformers")
    shape = {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
        **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 40),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
        "vocab_size": VOCABULARY,
    }
    default = transformers.AutoConfig.for_model(kind)
    known = {key: value for key, value in shape.items() if hasattr(default, key)}
    torch.manual_seed(3)
    return getattr(transformers, name)(type(default)(**{**known, **fields})).eval()


def pair() -> tuple[Tensor, Tensor]:
    """Tokens and targets (3, 9): a masked prompt, holes, and the last target counts."""
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(1, VOCABULARY, (2, 3, 9), generator=generator)
    targets[0, :5] = -100
    targets[1, ::2] = -100
    targets[2, :8] = -100
    return tokens, targets


CAUSAL = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "bart": "BartForCausalLM",  # Compares label t with output t.
    "mamba": "MambaForCausalLM",
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_given_targets_are_honoured(kind: str) -> None:
    model = model_of(kind, CAUSAL[kind])
    tokens, targets = pair()
    expected = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss_of(model, (tokens, targets), None), expected)


class Own(nn.Module):
    """Somebody's own module with Hugging Face's names."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head, self.moves = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), moves

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.table(input_ids).cumsum(1))
        if labels is None:
            return SimpleNamespace(logits=logits)
        outputs, aims = (logits[:, :-1], labels[:, 1:]) if self.moves else (logits, labels)
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(outputs.flatten(0, 1), aims.flatten()))


def test_a_model_that_moves_labels_by_itself_has_all_targets_all_the_same() -> None:
    model, (tokens, targets) = Own(moves=True), pair()
    expected = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss_of(model, (tokens, targets), None), expected)


def test_a_model_with_the_loss_of_other_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the loss of Own belongs to other targets: it is \d.*`shift_labels`"):
        loss_of(Own(moves=False), pair(), None)


def test_how_models_read_labels() -> None:
    assert label_rule(model_of("llama", "LlamaForCausalLM")) is Labels.SHIFTED
    assert label_rule(model_of("t5", "T5ForConditionalGeneration", num_heads=2, d_kv=16, d_ff=40)) is Labels.ALIGNED
    assert label_rule(model_of("bert", "BertForSequenceClassification")) is Labels.ALIGNED
    assert label_rule(nn.Sequential(model_of("llama", "LlamaForCausalLM"))) is Labels.SHIFTED  # Inside another module.


def test_which_targets_count() -> None:
    model, (tokens, targets) = model_of("llama", "LlamaForCausalLM"), pair()
    found = targets_of(model, (tokens, targets))
    assert found is not None
    assert found.number == 4 + 4 + 1
    assert torch.equal(found.counts, targets != -100)
    labels = tokens.clone()  # The first label of a sequence has no output.
    found = targets_of(model, {"input_ids": tokens, "labels": labels})
    assert found is not None
    assert found.number == 3 * 8
    assert (labels == tokens).all()
    found = targets_of(model_of("bert", "BertForMaskedLM"), {"input_ids": tokens, "labels": labels})
    assert found is not None
    assert found.number == 3 * 9
    assert targets_of(model, {"input_ids": tokens}) is None
    assert targets_of(model, tokens) is None
    found = targets_of(nn.Linear(2, 2), (torch.zeros(5, 2), torch.zeros(5, 2)))
    assert found is not None
    assert found.number == 10


@pytest.mark.parametrize("form", ["pair", "dict"])
def test_the_loss_of_no_targets_is_a_number(form: str) -> None:
    model, (tokens, targets) = model_of("llama", "LlamaForCausalLM"), pair()
    none = torch.full_like(targets, -100)
    batch: Any = (tokens, none) if form == "pair" else {"input_ids": tokens, "labels": none}
    assert loss_of(model, batch, None).isnan()
    found = targets_of(model, batch)
    assert found is not None
    assert found.number == 0
    assert loss_of(model, with_one_counted(batch, found), None).isfinite()
    assert (none == -100).all()
    batch = (tokens, targets) if form == "pair" else {"input_ids": tokens, "labels": targets}
    found = targets_of(model, batch)
    assert found is not None
    assert with_one_counted(batch, found) is batch


# ---- masks next to packed positions ----------------------------------------------------------------------------------

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]).expand(3, -1)


def packed(**more: Any) -> dict[str, Any]:
    tokens, _ = pair()
    return {"input_ids": tokens, "labels": tokens, "position_ids": POSITIONS, **more}


def test_a_mask_that_hides_nothing_more_is_left_out() -> None:
    model = model_of("llama", "LlamaForCausalLM")
    ones, end, middle = torch.ones(3, 9, dtype=torch.int64), torch.ones(3, 9), torch.ones(3, 9)
    end[:, 7:], middle[:, 4] = 0, 0
    for mask in (ones, end):
        assert keep_separate(model, packed(attention_mask=mask)).keys() == packed().keys()
    with pytest.raises(ConfigError, match="attention_mask: next to packed position_ids it would let documents see"):
        keep_separate(model, packed(attention_mask=middle))
    with pytest.raises(ConfigError, match="use_cache: with a cache the documents"):
        keep_separate(model, packed(use_cache=True))
    with pytest.raises(ConfigError, match=r"position_ids: documents are to be separate, and MambaForCausalLM"):
        keep_separate(model_of("mamba", "MambaForCausalLM"), packed())
    one = packed(attention_mask=middle) | {"position_ids": torch.arange(9).expand(3, 9)}
    assert keep_separate(model, one) is one
    # Positions of padding may be anything.
    padded = packed(attention_mask=end) | {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 1, 1]])}
    assert keep_separate(model, padded) is padded


def test_what_a_mask_hides() -> None:
    right, left = torch.tensor([[1, 1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 1, 1]])
    assert hides_nothing_more(right)
    assert not hides_nothing_more(left)
    assert hides_nothing_more(left, torch.tensor([[1, 1, 0, 1, 2]]))  # Its document begins after what is hidden.
    assert not hides_nothing_more(left, torch.tensor([[0, 1, 2, 3, 4]]))

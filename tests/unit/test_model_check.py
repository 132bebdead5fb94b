"""Models of the user's that are tried before a run: what can be trained, what cannot, and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedlab.config import ConfigError, RunConfig
from speedlab.engine.loss import loss_of
from speedlab.engine.model_check import validate_model
from speedlab.engine.model_construction import make_whole

CPU = torch.device("cpu")
CONFIG = RunConfig(
    data={"sequence_length": 8, "vocab_size": 512}, batch={"global_size": 8, "micro_size": 2}, precision="bfloat16"
)


class Net(nn.Module):
    """What people write: values of its own, a buffer, a parameter beside layers, a layer that remembers its weights."""

    def __init__(self, vocabulary: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.positions = nn.Parameter(torch.full((8, 4), 0.5))
        self.register_buffer("mask", torch.ones(4))
        self.middle = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, vocabulary)
        nn.init.constant_(self.out.bias, 0.25)

    def logits(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.middle((self.embedding(tokens) + self.positions) * self.mask.to(self.out.weight.dtype))
        return self.out(hidden)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return self.loss(tokens, targets)


def with_forward(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return type("Changed", (Net,), {"forward": forward})


def hugging_face() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=512, n_positions=8, n_embd=4, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(512, 4), nn.Linear(4, 512))


def sequential_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def looks_at_values(self: Net, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = self.loss(tokens, targets)
    return loss if loss.item() > 0 else -loss


def leaves_torch(self: Net, tokens: Tensor, targets: Tensor) -> Tensor:
    return self.loss(tokens, targets) * float(tokens.numpy().size)


COUNT = 512 * 4 + 8 * 4 + 2 * 4 * 4 * 4 + 2 * 4 * 4 + 4 * 512 + 512


@pytest.mark.parametrize(
    ("given", "parameters", "nbytes", "untried"),
    [
        ({"model": Net}, COUNT, 4 * COUNT + 16, ""),
        ({"model": Net()}, COUNT, 4 * COUNT + 16, ""),
        ({"model": with_forward(lambda self, x, y: self.loss(x, y))}, COUNT, 4 * COUNT + 16, ""),
        (
            {"model": with_forward(lambda self, x, targets=None: {"loss": self.loss(x, targets)})},
            COUNT,
            4 * COUNT + 16,
            "",
        ),
        ({"model": hugging_face}, 2332, 4 * 2332, ""),
        ({"model": on_meta, "loss": sequential_loss}, 512 * 9, 0, ""),
        (
            {"model": with_forward(looks_at_values)},
            COUNT,
            4 * COUNT + 16,
            "DataDependentOutputException.*looks_at_values",
        ),
        ({"model": with_forward(leaves_torch)}, COUNT, 4 * COUNT + 16, "numpy.*in leaves_torch"),
    ],
)
def test_what_can_be_trained(given: dict[str, Any], parameters: int, nbytes: int, untried: str) -> None:
    found = validate_model(CONFIG, 4, device=CPU, **given)
    assert (found["parameters"], found["nbytes"], found["dtype"]) == (parameters, nbytes, "bfloat16")
    assert re.search(untried, found["untried"]) if untried else not found["untried"]


class NeedsWidth(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)


EXPECTED = r"[\s\S]*forward\(tokens, targets\)[\s\S]*forward\(input_ids=.*labels=[\s\S]*loss=f"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"model": with_forward(lambda self, tokens: self.logits(tokens))},
            r"forward\(tokens\) takes no targets" + EXPECTED,
        ),
        (
            {"model": with_forward(lambda self, x, y: self.logits(x))},
            r"gave a tensor of shape \(2, 8, 512\)" + EXPECTED,
        ),
        (
            {"model": with_forward(lambda self, x, y: (self.logits(x), 1))},
            "gave a tuple of 2, which is no loss" + EXPECTED,
        ),
        ({"model": with_forward(lambda self, x, y: None)}, "gave None, which is no loss" + EXPECTED),
        ({"model": with_forward(lambda self, x, y, z: 1)}, "TypeError.*missing 1 required.*'z'" + EXPECTED),
        ({"model": with_forward(lambda self, x, y: self.out(x.float()))}, r"RuntimeError: .* in <lambda>, line \d+"),
        ({"model": with_forward(lambda self, x, y: self.loss(x, y).detach())}, "depends on none of its parameters"),
        (
            {"model": Net, "loss": lambda model, batch: model},
            r"^loss: <lambda>\(model, batch\) gave a Net, which is",
        ),
        (
            {"model": Net, "loss": lambda m: m},
            r"^loss: <lambda>\(m\) cannot be called so \(too many positional.*\); .* is called as loss\(model, batch\)",
        ),
        (
            {"model": Net, "loss": lambda model, batch, weight: weight},
            r"^loss: <lambda>\(model, batch, weight\) .*missing a required argument: 'weight'.* loss\(model, batch\)",
        ),
        ({"model": Net, "loss": 3}, r"^loss: it is a int; give a function that is called as loss\(model, batch\)"),
        ({"model": lambda: Net(300)}, "embedding has 300 tokens and the data have 512; .* data.vocab_size to 300"),
        ({"model": lambda: Net(100)}, "embedding has 100 tokens and the data have 512; make it larger$"),
        (
            {"model": NeedsWidth},
            r"NeedsWidth is called without arguments and needs width; .*model=lambda: NeedsWidth\(",
        ),
        ({"model": dict}, r"dict\(\) gave a dict; it has to give a torch.nn.Module"),
        ({"model": "gpt"}, "it is a str; give a torch.nn.Module, or a function"),
        ({"model": lambda: 1 / 0}, r"<lambda>\(\) raised ZeroDivisionError: division by zero, in <lambda>, line"),
        ({"model": nn.ReLU}, "ReLU has no parameter that can be trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_would_do(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        validate_model(CONFIG, 4, device=CPU, **given)


def test_layouts_that_the_model_does_not_allow_are_refused() -> None:
    def tried(parallel: dict[str, int], **given: Any) -> None:
        validate_model(CONFIG.replace(parallel=parallel), 4, device=CPU, **{"model": Net} | given)

    with pytest.raises(ConfigError, match=r"parallel.pp 2: Net is not known to be one list of blocks"):
        tried({"pp": 2})
    with pytest.raises(ConfigError, match=r"loss: under pp 2 .* set parallel.pp to 1"):
        tried({"pp": 2}, loss=sequential_loss)
    with pytest.raises(ConfigError, match=r"parallel.tp 2: Net carries no plan .* give one as tp_plan="):
        tried({"tp": 2})
    with pytest.raises(ConfigError, match=r"parallel.tp 2: tp_plan: 'outt' names no module of Net; nearest: 'out'"):
        tried({"tp": 2}, tp_plan={"outt": "colwise_gather_output"})
    tried({"tp": 2}, tp_plan={"out": "colwise_gather_output"})
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ConfigError, match=r"\(Net\) was built on meta and has no reset_parameters\(\)"):
        tried({}, model=model)


def test_a_model_has_the_values_that_its_constructor_gave_it_and_nothing_else_changes() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, second, other = make_whole(Net, 1), make_whole(Net, 1), make_whole(Net, 2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.out.weight, second.out.weight)
    assert not torch.equal(first.out.weight, other.out.weight)
    assert torch.equal(first.out.bias, torch.full((512,), 0.25))
    assert make_whole(first, 1) is first


def test_the_loss_of_each_kind_of_batch() -> None:
    model, tokens, targets = make_whole(Net, 0), torch.arange(16).view(2, 8), torch.arange(1, 17).view(2, 8)
    own = model(tokens, targets)
    assert torch.equal(loss_of(model, (tokens, targets), None), own)
    assert torch.equal(loss_of(model, {"tokens": tokens, "targets": targets}, None), own)
    assert torch.equal(loss_of(model, "anything", lambda model, batch: model(tokens, targets)), own)
    theirs = hugging_face().eval()
    expected = nn.functional.cross_entropy(theirs(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss_of(theirs, (tokens, targets), None), expected)
    expected = theirs(input_ids=tokens, labels=tokens).loss
    assert torch.equal(loss_of(theirs, {"input_ids": tokens, "labels": tokens}, None), expected)
    with pytest.raises(ConfigError, match="batch: it is a Tensor; give"):
        loss_of(model, tokens, None)


def test_attention_over_blocks_is_tried_and_refused() -> None:
    blocks = {"attention": {"kind": "block_sparse", "block": 16, "window": 8}}
    with pytest.raises(ConfigError, match="'block_sparse' has no effect on a Net"):
        validate_model(CONFIG.replace(model=blocks), 1, model=Net, device=CPU)
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="'block_sparse' takes heads of a multiple of 8 elements"):
        validate_model(CONFIG.replace(model=blocks), 1, model=hugging_face, device=CPU)
    assert validate_model(CONFIG.replace(model=blocks), 1, model=larger_hugging_face, device=CPU)["untried"] == ""


def larger_hugging_face() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=512, n_positions=8, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=512, num_local_experts=2, max_position_embeddings=16,
        )
    )  # fmt: skip


@pytest.mark.parametrize("given", ["function", "module"])
def test_a_failure_of_fake_tensors_alone_does_not_blame_the_model(given: str) -> None:
    """torch's fake grouped product takes bfloat16 only, and kernels take float32, too."""
    config = CONFIG.model_copy(update={"precision": RunConfig(precision="float32").precision})
    found = validate_model(config, 2, device=CPU, model=mixtral if given == "function" else mixtral())
    assert found["dtype"] == "float32"
    assert found["parameters"] == sum(parameter.numel() for parameter in mixtral().parameters())
    assert not found["untried"], "it was tried with real tensors"

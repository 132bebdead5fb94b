"""The feed-forward layer in tiles: the numbers of the whole one, and never its inner activation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from speedlab.config import ConfigError, ModelConfig, RunConfig
from speedlab.models import GPT, generate
from speedlab.models.gpt import FeedForward

SMALL = {"layers": 2, "hidden": 48, "heads": 4, "ffn_hidden": 96, "vocab_size": 101, "context": 32}
LENGTH = 20


def build(**fields) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig.model_validate({**SMALL, **fields}))


def batch(rows: int = 3) -> tuple[Tensor, Tensor]:
    whole = torch.randint(0, 101, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return whole[:, :-1], whole[:, 1:]


def gradients(model: nn.Module, *, autocast: bool = False) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(7)  # For dropout.
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*batch()).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]  # pyright: ignore[reportReturnType]  # all are used


def compare(tiled: nn.Module, whole: nn.Module, *, rounding: float, autocast: bool = False) -> None:
    (loss, own), (expected_loss, expected) = (gradients(each, autocast=autocast) for each in (tiled, whole))
    torch.testing.assert_close(loss, expected_loss, rtol=rounding, atol=0)
    for a, b in zip(own, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=rounding * b.abs().max().item())


@pytest.mark.parametrize("tile", [1, 7, 10, 19, 20, 21])
@pytest.mark.parametrize("fields", [{}, {"bias": True, "norm": "layer", "tied": False, "dropout": 0.2}])
def test_tiles_give_the_whole_layers_loss_and_gradients(tile, fields):
    """Sizes around the length, and one that does not divide it. Dropout draws the same mask."""
    compare(build(**fields, ffn_tile=tile), build(**fields), rounding=1e-5)


def test_logits_and_generation_are_those_of_the_whole_layer():
    whole, tiled = build().eval(), build(ffn_tile=3).eval()
    with torch.no_grad():
        torch.testing.assert_close(tiled(batch()[0]).logits, whole(batch()[0]).logits)
    first = batch()[0][:1]
    assert torch.equal(*(generate(model, first, 4, temperature=0, seed=0) for model in (whole, tiled)))


def test_sums_over_tiles_are_not_rounded_to_16_bits_in_between():
    """20 tiles summed in bfloat16 lose up to 20 roundings of 2^-9; one sum in float32 loses one, as the whole does."""
    exact, whole, tiled = build(), build().bfloat16(), build(ffn_tile=1).bfloat16()
    with torch.no_grad():
        for model in (exact, tiled):
            model.load_state_dict(whole.state_dict())
    errors = []
    for model in (whole, tiled):
        gradients(model)
    gradients(exact)
    for model in (whole, tiled):
        pairs = zip(model.blocks[-1].mlp.parameters(), exact.blocks[-1].mlp.parameters(), strict=True)
        errors.append([(a.grad.float() - b.grad).norm() / b.grad.norm() for a, b in pairs])
    assert all(ours < 1.25 * theirs for theirs, ours in zip(*errors, strict=True)), errors


def test_under_autocast_the_backward_computes_in_the_forwards_dtype():
    seen = []
    tiled = build(ffn_tile=7)
    tiled.blocks[0].mlp.up.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    compare(tiled, build(), rounding=2**-6, autocast=True)
    assert seen == [torch.bfloat16] * 6  # Three tiles, forward and again.


def test_in_a_block_that_is_recomputed():
    whole, tiled = build(), build(ffn_tile=7)
    for block in tiled.blocks:
        block.forward = lambda *args, forward=block.forward: checkpoint(forward, *args, use_reentrant=False)
    compare(tiled, whole, rounding=1e-5)


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_parameter_receives_one_gradient_in_a_backward(recomputed):
    model = build(ffn_tile=7)
    if recomputed:
        for block in model.blocks:
            block.forward = lambda *args, forward=block.forward: checkpoint(forward, *args, use_reentrant=False)
    received = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: received.append(name))
    model(*batch()).loss.backward()
    assert sorted(received) == sorted(name for name, _ in model.named_parameters())


def test_gradients_add_up_over_micro_batches():
    whole, tiled = build(), build(ffn_tile=7)
    for model in (whole, tiled):
        gradients(model)
    compare(tiled, whole, rounding=1e-5)


@pytest.mark.parametrize("frozen", ["up", "down"])
def test_what_is_frozen_gets_no_gradient(frozen):
    whole, tiled = build(bias=True), build(bias=True, ffn_tile=7)
    for model in (whole, tiled):
        model.blocks[1].mlp.get_submodule(frozen).requires_grad_(False)
        model(*batch()).loss.backward()
    for (name, a), b in zip(tiled.named_parameters(), whole.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) == (f"blocks.1.mlp.{frozen}" in name), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-5 * b.grad.abs().max().item())


def test_an_input_that_wants_no_gradient():
    model = build(ffn_tile=7).blocks[0].mlp
    model(torch.randn(2, LENGTH, 48)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_changed_before_the_backward_are_noticed():
    model = build(ffn_tile=7)
    loss = model(*batch()).loss
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Largest(TorchDispatchMode):
    """The most elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_the_inner_activation_is_never_whole():
    layer = FeedForward(ModelConfig.model_validate({**SMALL, "hidden": 16, "ffn_hidden": 512, "ffn_tile": 4}))
    with Largest() as largest:
        layer(torch.randn(1, 1024, 16, requires_grad=True)).sum().backward()
    assert largest.elements == 1024 * 16  # The input; a tile inside has 4 · 512, all of it would have 1024 · 512.


def test_a_tile_is_at_least_a_token():
    with pytest.raises(ConfigError, match="ffn_tile"):
        ModelConfig(ffn_tile=0)
    assert RunConfig(model={"ffn_tile": 512}).model.ffn_tile == 512
    assert RunConfig().model.ffn_tile is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look
def test_compiled_blocks():
    """torch.compile takes the tiles as they are."""
    whole, tiled = build(), build(ffn_tile=7)
    for block in tiled.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    compare(tiled, whole, rounding=1e-5)

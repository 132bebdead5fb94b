"""What tests of tensor parallelism run on each rank: a whole model beside its parts, on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import models
from speedlab.comm import Group, Traffic
from speedlab.config import ModelConfig
from speedlab.models import GPT
from speedlab.parallel.tensor import TensorParallel, put, take

Arguments = dict[str, Any]

VOCABULARY = 61  # Not divisible by any tp.


def group_of_all() -> Group:
    return Group(range(dist.get_world_size()), Traffic(), torch.device("cpu"))


# ---- models and batches ----------------------------------------------------------------------------------------------


def gpt(**fields: Any) -> nn.Module:
    """Small, with values in which no exchange stays unseen: biases and norms are born 0 and 1."""
    shape = {"layers": 2, "hidden": 48, "heads": 12, "ffn_hidden": 80, "vocab_size": VOCABULARY, "context": 24}
    return shaken(lambda: GPT(ModelConfig.model_validate({**shape, **fields})))


def shaken(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = build()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    whole = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    targets = whole[:, 1:].clone()
    targets[0, :3] = -100
    return whole[:, :-1], targets


def hugging_face(kind: str, **fields: Any) -> nn.Module:
    import transformers

    shapes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "gpt2": (
            transformers.GPT2Config,
            transformers.GPT2LMHeadModel,
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "attn_pdrop": 0.0, "use_cache": False},
        ),
        "llama": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {
                "hidden_size": 32,
                "intermediate_size": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "use_cache": False,
            },
        ),
        "t5": (
            transformers.T5Config,
            transformers.T5ForConditionalGeneration,
            {"d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        ),
        "bert": (
            transformers.BertConfig,
            transformers.BertForMaskedLM,
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 44,
                "attention_probs_dropout_prob": 0.0,
            },
        ),
    }
    config, model, shape = shapes[kind]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
    return shaken(lambda: model(config(**{**special, **shape, **fields})))


def loss_of(model: nn.Module, *, rows: int = 3, length: int = 12) -> Tensor:
    """Of one batch, the same on all ranks."""
    inputs, targets = tokens(rows, length)
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model(input_ids=inputs, labels=targets.roll(1, 1)).loss
    if hasattr(model, "base_model"):
        return model(input_ids=inputs, labels=targets).loss
    output = model(inputs, targets)
    return getattr(output, "loss", output)


def transformer() -> nn.Module:
    """A model of somebody's own, tied; its batch is other than the others' only in its vocabulary."""
    return shaken(lambda: models.Transformer(tied=True))


# ---- comparing -------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, seed: int, steps: int, **batch: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps and the sum of their gradients."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, **batch)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def checkpointed(model: Any) -> None:
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)


def compare(
    build: Callable[..., nn.Module],
    arguments: tuple[Any, ...] = (),
    fields: Arguments | None = None,
    *,
    plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    recompute: bool = False,
    steps: int = 1,
    length: int = 12,
    tolerance: float = 2e-5,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], list[str]]:
    """(losses, what is wrong) of a model's parts on this rank, beside the whole model in this same process."""
    whole, model = (build(*arguments, **(fields or {})).to(dtype).train() for _ in range(2))
    expected, whole_gradients = gradients(whole, 11, steps, length=length)
    random_state = torch.get_rng_state()

    group = group_of_all()
    tensor = TensorParallel(model, group, plan=plan, sequence=sequence)
    names = [name for name, _ in model.named_parameters()]
    before = {name: p for name, p in model.named_parameters()}
    tensor.cut(dict(model.named_parameters()))
    wrong = [f"{name} is another object" for name, p in model.named_parameters() if p is not before[name]]
    wrong += [] if [name for name, _ in model.named_parameters()] == names else ["other names"]
    tensor.attach()
    if recompute:
        checkpointed(model)
    losses, own_gradients = gradients(model, 11, steps, length=length)

    wrong += [f"loss {a} for {b}" for a, b in zip(losses, expected, strict=True) if abs(a - b) > tolerance * abs(b)]
    if not torch.equal(torch.get_rng_state(), random_state):
        wrong.append("the random state is another one")
    for name, p in model.named_parameters():
        part = tensor.parts.get(name)
        full = dict(whole.named_parameters())[name]
        if not p.equal(full if part is None else take(part, full)):
            wrong.append(f"{name}: other values")
        gradient = own_gradients.get(name)
        if (gradient is None) != (name not in whole_gradients):
            wrong.append(f"{name}: gradient {'missing' if gradient is None else 'that should not be'}")
        if gradient is None:
            continue
        if name in tensor.partial:
            gradient = group.sum(gradient)
        right = whole_gradients[name] if part is None else take(part, whole_gradients[name])
        scale = whole_gradients[name].abs().max().item()
        error = (gradient - right).abs().max().item()
        if not error <= tolerance * scale:
            wrong.append(f"{name}: gradient is {error:.2e} off, of {scale:.2e}")
    wrong += covered(tensor, group, whole)
    tensor.detach()
    return losses, wrong


def covered(tensor: TensorParallel, group: Group, whole: nn.Module) -> list[str]:
    """Every element of every parameter has one rank that answers for it."""
    wrong = []
    for name, parameter in whole.named_parameters():
        owners = torch.zeros(parameter.shape)
        if name not in tensor.duplicates:
            part = tensor.parts.get(name)
            if part is None:
                owners += 1
            else:
                put(part, torch.ones(part.own_shape), owners)
        if not group.sum(owners).eq(1).all():
            wrong.append(f"{name}: not every element has one owner")
    return wrong

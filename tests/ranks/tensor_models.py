"""What tests of tensor parallelism run on each rank: a whole model beside its parts, on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import models
from speedlab.comm import CommStats, Group
from speedlab.config import ModelConfig
from speedlab.layout import share_of
from speedlab.models import GPT, generate
from speedlab.parallel.tensor import TensorParallel, put, take
from speedlab.parallel.tensor.vocab_parallel_loss import vocabulary_cross_entropy

Arguments = dict[str, Any]

VOCABULARY = 61  # Not divisible by any tp.

ROUNDING = 1e-8
"""What gradients that are zero, those of biases of keys, may be."""


def group_of_all() -> Group:
    return Group(range(dist.get_world_size()), CommStats(), torch.device("cpu"))


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
        "apertus": (
            transformers.ApertusConfig,
            transformers.ApertusForCausalLM,
            {
                "hidden_size": 32,
                "intermediate_size": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "use_cache": False,
            },
        ),
        "t5": (
            transformers.T5Config,
            transformers.T5ForConditionalGeneration,
            {
                "d_model": 32,
                "d_kv": 6,
                "d_ff": 44,
                "num_layers": 2,
                "num_heads": 4,
                "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
            },
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
    return shaken(lambda: model(config(**{**special, **shape, **fields})).float())


def loss_of(model: nn.Module, *, rows: int = 3, length: int = 12) -> Tensor:
    """Of one batch, the same on all ranks."""
    if isinstance(model, models.Transformer):
        return model(*models.tokens(0, 0))
    inputs, targets = tokens(rows, length)
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model(input_ids=inputs, labels=targets.roll(1, 1)).loss
    if hasattr(model, "base_model"):
        return model(input_ids=inputs, labels=targets).loss
    output = model(inputs, targets)
    return getattr(output, "loss", output)


def transformer() -> nn.Module:
    """A model of somebody's own, tied."""
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
    before = dict(model.named_parameters())
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
        if not error <= tolerance * scale + ROUNDING:
            wrong.append(f"{name}: gradient is {error:.2e} off, of {scale:.2e}")
    wrong += covered(tensor, group, whole)
    tensor.detach()
    return losses, wrong


def generate_and_evaluate(fields: Arguments, *, sequence: bool) -> tuple[float, list[str]]:
    """Lengths that do not divide by tp, without training; then the model as it was before."""
    whole, model = gpt(**fields).eval(), gpt(**fields).eval()
    originals = [dict(module.__dict__) for module in model.modules()]
    tensor = TensorParallel(model, group_of_all(), sequence=sequence)
    tensor.cut(dict(model.named_parameters()))
    tensor.attach()
    inputs, targets = tokens(2, 11)
    with torch.no_grad():
        error = (model(inputs).logits - whole(inputs).logits).abs().max().item()
        error = max(error, (model(inputs, targets).loss - whole(inputs, targets).loss).abs().item())
    written = generate(model, inputs[:1, :5], 8, temperature=0)
    wrong = [] if written.equal(generate(whole, inputs[:1, :5], 8, temperature=0)) else ["another text"]
    tensor.detach()
    for module, original in zip(model.modules(), originals, strict=True):
        changed = [key for key in {*original, *module.__dict__} if module.__dict__.get(key) != original.get(key)]
        wrong += [f"{type(module).__name__}.{key} is left changed" for key in changed if key != "_forward_hooks"]
        wrong += [f"{type(module).__name__} keeps hooks"] * bool(module._forward_hooks)
    return error, wrong


def traffic_of_a_step(build: Callable[..., nn.Module], *arguments: Any, sequence: bool = False) -> dict[str, int]:
    """Bytes that this rank sends, by collective."""
    model, group = build(*arguments), group_of_all()
    tensor = TensorParallel(model, group, sequence=sequence)
    tensor.cut(dict(model.named_parameters()))
    tensor.attach()
    loss_of(model).backward()
    tensor.detach()
    return group.traffic.take()[0]


def indivisible(length: int) -> str:
    model = gpt()
    tensor = TensorParallel(model, group_of_all(), sequence=True)
    tensor.cut(dict(model.named_parameters()))
    tensor.attach()
    try:
        model(*tokens(1, length))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def losses_over_parts(dtype: torch.dtype, scale: float, *, counted: bool = True) -> list[str]:
    """vocabulary_cross_entropy beside torch's, with logits as large as `scale` makes them."""
    group = group_of_all()
    generator = torch.Generator().manual_seed(2)
    rows, vocabulary, width = 700, 5003, 16  # Several chunks, and several blocks of the vocabulary.
    hidden = (torch.randn(rows, width, generator=generator) * scale).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    weight[: vocabulary // 2] *= (
        0.01  # No rank knows of the great logits of another one when it takes its exponentials.
    )
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[: 50 if counted else None] = -100
    start, end = share_of(vocabulary, group.size, group.index)

    whole = [each.float().clone().requires_grad_() for each in (hidden, weight)]
    expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*whole), targets)
    expected.backward()
    own = [hidden.clone().requires_grad_(), weight[start:end].clone().requires_grad_()]
    loss = vocabulary_cross_entropy(*own, targets, group, vocabulary)
    (4 * loss).backward(retain_graph=True)
    loss.backward()  # A pipeline goes over it once for the inputs and once for the weights.
    with torch.no_grad():
        without = vocabulary_cross_entropy(*own, targets, group, vocabulary)
    if not counted:
        return [] if loss.isnan() and expected.isnan() else [f"loss {loss} where nothing counts"]
    wrong = [] if without.equal(loss) else [f"loss {without} without gradients, {loss} with"]
    # Logits are rounded to the dtype, as those of one process are.
    rounding = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 8e-3}[dtype]
    if not abs(loss.item() - expected.item()) <= rounding / 100 * abs(expected.item()):
        wrong.append(f"loss {loss.item()} for {expected.item()}")
    for name, mine, right in (
        ("hidden", group.sum(own[0].grad.float()), whole[0].grad),
        ("weight", own[1].grad.float(), whole[1].grad[start:end]),
    ):
        error = (mine / 5 - right).norm() / right.norm()
        if not error <= rounding:
            wrong.append(f"gradient of {name} is {error:.2e} off")
    return wrong


def inputs_then_weights() -> list[str]:
    """Backward as a pipeline's zero-bubble schedules do it: gradients of the inputs first, those of weights later."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    whole, model = gpt(bias=True), gpt(bias=True)
    tensor = TensorParallel(model, group_of_all())
    tensor.cut(dict(model.named_parameters()))
    tensor.attach()
    gradients = []
    for each in (whole, model):
        x = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x
        for block in each.blocks:
            y = block(y, each.rotation(x))
        upstream = torch.ones_like(y).cumsum(1)
        if each is whole:
            y.backward(upstream)
            gradients.append(x.grad)
        else:
            found, groups = stage_backward_input([y], [upstream], [x], each.blocks.parameters())
            stage_backward_weight(each.blocks.parameters(), groups)
            gradients.append(found[0])
    wrong = [] if torch.allclose(*gradients, rtol=1e-4, atol=1e-4) else ["gradients of the inputs differ"]
    for (name, p), right in zip(model.named_parameters(), whole.parameters(), strict=True):
        if right.grad is not None:
            grad = take(tensor.parts[name], right.grad) if name in tensor.parts else right.grad
            if p.grad is None or not torch.allclose(p.grad, grad, rtol=1e-4, atol=1e-3 * grad.abs().max().item()):
                wrong.append(name)
    return wrong


def covered(tensor: TensorParallel, group: Group, whole: nn.Module) -> list[str]:
    """Every element of every parameter has one rank that answers for it."""
    wrong = []
    for name, parameter in whole.named_parameters():
        owners = torch.zeros(parameter.shape)
        if tensor.first_holder(name) == tensor.group.index:
            part = tensor.parts.get(name)
            if part is None:
                owners += 1
            else:
                put(part, torch.ones(part.own_shape), owners)
        if not group.sum(owners).eq(1).all():
            wrong.append(f"{name}: not every element has one owner")
    return wrong

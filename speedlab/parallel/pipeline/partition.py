"""Cutting a model into pipeline stages along its list of blocks. A stage keeps the names of the whole model.

1. `block_costs` says what each block costs, and what stands before and after them.
2. `speedlab.layout.layer_counts` chooses how many blocks each pipeline stage takes.
3. `cut_model` makes one stage: a copy of the model's modules that hold others, with what belongs elsewhere left out.
   Blocks, embeddings and heads are the model's own; a list of blocks keeps the numbers of those that stay.

Finding the parts of a Hugging Face decoder that a pipeline cuts: its list of layers, and what is on either side.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.models import GPT

_FAMILIES = (
    "gemma",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
"""Models whose decoder, given the output of its first layers as `inputs_embeds`, goes on with the others: it adds and
scales nothing beside what its embedding modules do."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A causal language model, taken apart."""

    model: Any
    base_name: str
    base: Any
    blocks: nn.ModuleList
    before: list[nn.Module]
    """Embeddings, of tokens and perhaps of positions."""
    after: list[nn.Module]
    """The final norm."""
    head_name: str
    head: nn.Module

    def left_out(self, name: str, *, keep_embedding: bool) -> nn.Module | None:
        """What stands in the place of embedding `name` behind the first pipeline stage."""
        module = self.base._modules[name]
        if module is self.base.get_input_embeddings():
            tied = self.head.weight is module.weight
            return module if keep_embedding and tied else None
        return AddsNothing()


class AddsNothing(nn.Module):
    """In the place of an embedding of positions, where they were added on an earlier pipeline stage."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros(*positions.shape, 1, device=positions.device, dtype=torch.get_default_dtype())


def decoder_of(model: nn.Module) -> Decoder:
    """Take a causal language model apart. Raises ValueError, saying why, for one that a pipeline cannot be made of."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _FAMILIES or not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"{type(model).__name__}{f' (model type {kind})' if kind else ''} is not known to be one list of blocks "
            f"between an embedding and a head, so it cannot be cut into pipeline stages; a pipeline takes the built-in "
            f"GPT and causal language models of the types {', '.join(_FAMILIES)}. Use pp 1 with this one"
        )
    whole: Any = model
    base, head = whole.base_model, whole.get_output_embeddings()
    if base is whole or head is None:
        raise ValueError(
            f"{type(model).__name__} has no head that predicts tokens; a pipeline takes causal language models: use "
            f"the class of this family whose name ends in ForCausalLM or LMHeadModel, or pp 1"
        )
    lists = [child for child in base.children() if isinstance(child, nn.ModuleList)]
    (blocks,) = [child for child in lists if len(child) == whole.config.num_hidden_layers]
    owners = [child for child in base.children() if child is not blocks and any(True for _ in child.parameters())]
    before: list[nn.Module] = [child for child in owners if isinstance(child, nn.Embedding)]
    return Decoder(
        model=whole,
        base_name=whole.base_model_prefix,
        base=base,
        blocks=blocks,
        before=before,
        after=[child for child in owners if child not in before],
        head_name=next(name for name, child in whole.named_children() if child is head),
        head=head,
    )


class StageModule(nn.Module):
    """What every pipeline stage has beside its modules. Its `forward` takes tokens (B, T) on the first stage, else
    activations (B, T, C), and gives activations, or on the last stage logits, or with `targets` the loss. `positions`
    (B, T) of documents every stage is given."""

    hidden: int
    """C"""
    is_first: bool
    is_last: bool
    behind: list[nn.Module]
    """What stands behind the blocks: on the last stage, the final norm and the head."""


class GPTStage(StageModule):
    """A pipeline stage of the built-in GPT."""

    def forward(self: Any, x: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if self.is_first:
            x = self.embed(x, positions)
        rotation, starts = self.rotation(x, positions), self.starts(positions)
        for block in self.blocks:
            x = block(x, rotation, starts)
        if not self.is_last:
            return x
        output = self.output(x, targets)
        return output.logits if targets is None else output.loss


class DecoderStage(StageModule):
    """A pipeline stage of a Hugging Face decoder."""

    def forward(self: Any, x: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        inputs = {"input_ids" if self.is_first else "inputs_embeds": x, "position_ids": positions, "use_cache": False}
        if not self.is_last:
            return self.base_model(**inputs)[0]
        # The model's own forward moves labels by one place, but not those that are given as moved.
        inputs |= {"labels": targets, "shift_labels": targets}
        output = super().forward(**inputs)  # type: ignore[call-arg]  # of nn.Module, as a type checker sees it
        return output.logits if targets is None else output.loss


def block_costs(model: nn.Module) -> tuple[list[float], float, float]:
    """(parameters of each block, of what stands before the blocks, of what stands after them); `model` may be on meta.

    A tied embedding stands on both sides. Raises ValueError, as `cut_model` does, for a model that cannot be cut.
    """
    blocks, before, after = _anatomy(model)
    return [_numel([block]) for block in blocks], _numel(before), _numel(after)


def cut_model(model: nn.Module, counts: Sequence[int], stage: int) -> nn.Module:
    """Pipeline stage `stage` (a StageModule, and of the model's class) when they take `counts` blocks each.

    Parameters are those of `model`, with their names there; only the stage's own are in it. Tied embeddings are in the
    first and in the last one. `model` stays as it is. Raises ValueError for a model that cannot be cut.
    """
    blocks, _, after = _anatomy(model)
    if sum(counts) != len(blocks) or min(counts) < 1:
        raise ValueError(
            f"cut {' + '.join(map(str, counts))} = {sum(counts)} blocks, but {type(model).__name__} has {len(blocks)}; "
            f"every pipeline stage takes at least one, and all together take them all"
        )
    begin = sum(counts[:stage])
    own = range(begin, begin + counts[stage])
    is_first, is_last = stage == 0, stage == len(counts) - 1
    if isinstance(model, GPT):
        part: Any = _fork(model)
        part._modules["blocks"] = _thinned(model.blocks, own)
        if not (is_first or (is_last and model.head is None)):
            part._modules["embedding"] = None
        if not is_first:
            part._modules["positions"] = None
        if not is_last:
            part._modules.update(norm=None, head=None)
        kind, part.hidden = GPTStage, model.config.hidden
    else:
        part = _cut_decoder(decoder_of(model), own, is_first=is_first, is_last=is_last)
        kind, part.hidden = DecoderStage, part.config.hidden_size
    part.is_first, part.is_last = is_first, is_last
    part.behind = after if is_last else []
    part.__class__ = type(f"{type(model).__name__}Stage", (kind, type(model)), {"__module__": __name__})
    return part


def _anatomy(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """(blocks, what stands before them, what stands after them)."""
    if isinstance(model, GPT):
        head = model.embedding if model.head is None else model.head
        before: list[nn.Module] = [module for module in (model.embedding, model.positions) if module is not None]
        return list(model.blocks), before, [model.norm, head]
    decoder = decoder_of(model)
    return list(decoder.blocks), decoder.before, [*decoder.after, decoder.head]


def _numel(modules: Iterable[nn.Module]) -> float:
    return float(sum(parameter.numel() for module in modules for parameter in module.parameters()))


def _cut_decoder(decoder: Decoder, own: range, *, is_first: bool, is_last: bool) -> Any:
    """The model of `decoder` without what belongs to other stages, so that its own forward computes this one's part."""
    part, base = _fork(decoder.model), _fork(decoder.base)
    part._modules[decoder.base_name] = base
    config = copy.copy(decoder.model.config)
    config.num_hidden_layers = len(own)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types[own.start : own.stop])
    part.config = base.config = config
    for name, child in decoder.base.named_children():
        if child is decoder.blocks:
            base._modules[name] = _thinned(decoder.blocks, own)
        elif child in decoder.before and not is_first:
            base._modules[name] = decoder.left_out(name, keep_embedding=is_last)
        elif (isinstance(child, nn.Dropout) and not is_first) or (child in decoder.after and not is_last):
            base._modules[name] = nn.Identity()
    if not is_last:
        part._modules[decoder.head_name] = None
    return part


def _thinned(blocks: nn.ModuleList, own: range) -> nn.ModuleList:
    """The blocks of `own` under the numbers that they have in the whole model."""
    thin = _fork(blocks)
    thin._modules = {key: block for number, (key, block) in enumerate(blocks._modules.items()) if number in own}
    return thin


def _fork(module: nn.Module) -> Any:
    """Another module object with the same children, parameters and attributes, in dicts of its own."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update({k: v.copy() if isinstance(v, dict | set) else v for k, v in module.__dict__.items()})
    return twin

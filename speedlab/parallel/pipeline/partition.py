"""Cut a model into pipeline stages along its list of blocks. Parameters keep their names of the full model.

1. `block_costs` returns the cost of each block, and of the modules before and after the blocks.
2. `speedlab.layout.layer_counts` chooses how many blocks each pipeline stage takes.
3. `cut_model` builds one stage: it copies the container modules and leaves out what other stages have. Blocks,
   embeddings and heads are the model's own modules. A list of blocks keeps the original numbers.

`decoder_of` finds these parts in a Hugging Face decoder.
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
"""Model types whose decoder can continue from the output of earlier layers, given as `inputs_embeds`. They add or
scale nothing outside of their embedding modules."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts of a causal language model."""

    model: Any
    base_name: str
    base: Any
    blocks: nn.ModuleList
    before: list[nn.Module]
    """Embeddings of tokens, and possibly of positions."""
    after: list[nn.Module]
    """The final norm."""
    head_name: str
    head: nn.Module

    def left_out(self, name: str, *, keep_embedding: bool) -> nn.Module | None:
        """Return the module that replaces an embedding on stages after the first one.

        Args:
            name: Name of the embedding in the base model.
            keep_embedding: Whether the stage needs the token embedding as its tied head.
        """
        module = self.base._modules[name]
        if module is self.base.get_input_embeddings():
            tied = self.head.weight is module.weight
            return module if keep_embedding and tied else None
        return AddsNothing()


class AddsNothing(nn.Module):
    """Replaces an embedding of positions on stages that follow the first one. An earlier stage has added the
    positions.
    """

    def forward(self, positions: Tensor) -> Tensor:
        """Return zeros (…, 1) for positions (…)."""
        return torch.zeros(*positions.shape, 1, device=positions.device, dtype=torch.get_default_dtype())


def decoder_of(model: nn.Module) -> Decoder:
    """Return the parts of a causal language model.

    Args:
        model: A Hugging Face model, possibly on meta.

    Raises:
        ValueError: A pipeline cannot cut this model; the message says why.
    """
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
    """The interface of a pipeline stage.

    Its `forward` takes tokens (B, T) on the first stage, else activations (B, T, C). It returns activations. The last
    stage returns logits, or the loss if `targets` are given. Every stage gets the `positions` (B, T) of documents.
    """

    hidden: int
    """C, the width of activations."""
    is_first: bool
    is_last: bool
    following: list[nn.Module]
    """Modules after the blocks: the final norm and the head, on the last stage only."""


class GPTStage(StageModule):
    """A pipeline stage of the built-in GPT."""

    def forward(self: Any, x: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Run this stage; see `StageModule`."""
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
        """Run this stage; see `StageModule`."""
        inputs = {"input_ids" if self.is_first else "inputs_embeds": x, "position_ids": positions, "use_cache": False}
        if not self.is_last:
            return self.base_model(**inputs)[0]
        # The model shifts `labels` by one position, but not `shift_labels`, which are already shifted.
        inputs |= {"labels": targets, "shift_labels": targets}
        output = super().forward(**inputs)  # type: ignore[call-arg]  # of nn.Module, as a type checker sees it
        return output.logits if targets is None else output.loss


def block_costs(model: nn.Module) -> tuple[list[float], float, float]:
    """Return (parameters of each block, parameters before the blocks, parameters after the blocks). A tied embedding
    counts on both sides.

    Args:
        model: The full model, possibly on meta.

    Raises:
        ValueError: The model cannot be cut.
    """
    blocks, before, after = _anatomy(model)
    return [_numel([block]) for block in blocks], _numel(before), _numel(after)


def cut_model(model: nn.Module, counts: Sequence[int], stage: int) -> nn.Module:
    """Return one pipeline stage: a StageModule that is also of the model's class.

    The stage has the parameters of `model`, under the same names, but only its own. Tied embeddings are on the first
    and on the last stage. `model` does not change.

    Args:
        model: The full model, possibly on meta.
        counts: Number of blocks of each stage.
        stage: Index of the stage.

    Raises:
        ValueError: The model cannot be cut, or `counts` do not match its blocks.
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
    part.following = after if is_last else []
    part.__class__ = type(f"{type(model).__name__}Stage", (kind, type(model)), {"__module__": __name__})
    return part


def _anatomy(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Return (blocks, modules before them, modules after them)."""
    if isinstance(model, GPT):
        head = model.embedding if model.head is None else model.head
        before: list[nn.Module] = [module for module in (model.embedding, model.positions) if module is not None]
        return list(model.blocks), before, [model.norm, head]
    decoder = decoder_of(model)
    return list(decoder.blocks), decoder.before, [*decoder.after, decoder.head]


def _numel(modules: Iterable[nn.Module]) -> float:
    return float(sum(parameter.numel() for module in modules for parameter in module.parameters()))


def _cut_decoder(decoder: Decoder, own: range, *, is_first: bool, is_last: bool) -> Any:
    """Return the decoder without the modules of other stages, so that its own forward computes this stage."""
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
    """Return the blocks in `own` under their numbers of the full model."""
    thin = _fork(blocks)
    thin._modules = {key: block for number, (key, block) in enumerate(blocks._modules.items()) if number in own}
    return thin


def _fork(module: nn.Module) -> Any:
    """Return a new module object with the same children, parameters and attributes, in separate dicts."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update({k: v.copy() if isinstance(v, dict | set) else v for k, v in module.__dict__.items()})
    return twin

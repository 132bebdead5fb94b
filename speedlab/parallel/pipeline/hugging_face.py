"""Finding the parts of a Hugging Face decoder that a pipeline cuts: its list of layers, and what is on either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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

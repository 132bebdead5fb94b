"""Patches of the built-in GPT in addition to cut layers: head, loss, dropout and sequence parallelism.

Head and loss work on shards of the vocabulary. Dropout matches one process: each head has its own number for its
random mask, so a rank draws only for its own heads.

Sequence parallelism (arXiv:2205.05198): between the cut layers each rank has T / tp of the tokens.

1. The sum of the embedding is split by tokens.
2. Norms, residuals and dropout use this rank's tokens. Dropout masks are drawn for all tokens and sliced.
3. A column-parallel layer gathers the tokens. A row-parallel layer returns this rank's tokens of the sum.
4. Head and loss gather the tokens a last time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from speedlab.comm import Group
from speedlab.layout import LayoutError
from speedlab.models.gpt import Dropout
from speedlab.parallel.module_patches import ModulePatch
from speedlab.parallel.tensor.autograd_collectives import TOKENS, copy, gather, gather_tokens, split
from speedlab.parallel.tensor.tp_plan import LayerSharding, PlanError, Style, is_gpt
from speedlab.parallel.tensor.vocab_parallel_loss import vocabulary_cross_entropy


class BuiltIn:
    """The patches of one built-in GPT."""

    def __init__(self, name: str, model: Any, group: Group, cut: set[nn.Module], *, sequence: bool) -> None:
        """Change nothing yet.

        Args:
            name: Name of the GPT in the model.
            model: The GPT, or a pipeline stage of it.
            group: The tensor-parallel ranks.
            cut: The modules that are cut.
            sequence: Whether to use sequence parallelism.
        """
        self._prefix = f"{name}." if name else ""
        self._model, self._group, self._cut, self._sequence = model, group, cut, sequence
        self._length: int | None = None
        """Tokens of the last sequence, before it was padded for the split."""

    @staticmethod
    def in_model(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Find the built-in GPTs in a model.

        Args:
            model: Any module.

        Returns:
            (name, module) of each one.
        """
        return ((name, module) for name, module in model.named_modules() if is_gpt(module))

    def check(self, styles: Mapping[str, Style]) -> None:
        """Check that a plan does not cut through heads, and that it fits sequence parallelism.

        Args:
            styles: Styles by module name.

        Raises:
            PlanError: The plan does not fit.
        """
        ends = ("embedding", self._model.embedding), ("head", self._model.head)  # A pipeline stage may have neither.
        layers = [(name, module) for name, module in ends if module is not None]
        for k, block in self._model.blocks.named_children():  # A pipeline stage keeps the numbers of its blocks.
            name = f"blocks.{k}.attention.qkv"
            layers += [
                (name, block.attention.qkv),
                (f"blocks.{k}.attention.out", block.attention.out),
                (f"blocks.{k}.mlp.up", block.mlp.up),
                (f"blocks.{k}.mlp.down", block.mlp.down),
            ]
            style = styles.get(self._prefix + name)
            if style is not None and style.cut is LayerSharding.OUTPUT and style.packed != 3:
                raise PlanError(f"tp_plan: {self._prefix}{name} packs three matrices; cut it as packed_colwise_3")
        whole = [name for name, module in layers if module not in self._cut]
        if self._sequence and whole:
            raise PlanError(
                f"sequence parallelism needs every large layer cut, and the plan leaves {whole[0]} whole; give no "
                f"plan, or set sequence: false"
            )

    def partial(self) -> Iterator[str]:
        """Yield the parameters that see only this rank's tokens: those of norms, and biases that are added to sums."""
        if self._sequence:
            for name, _ in self._model.named_parameters():
                module, _, key = name.rpartition(".")
                layer = module.rpartition(".")[2]
                if layer in ("norm", "attention_norm", "mlp_norm") or (layer in ("out", "down") and key == "bias"):
                    yield self._prefix + name

    def changes(self) -> Iterator[ModulePatch]:
        """Yield the patches of the model."""
        model = self._model
        table = model.embedding if model.head is None else model.head
        if table in self._cut:
            yield ModulePatch(model.prediction, "logits", lambda _: self._logits)
            yield ModulePatch(model.prediction, "loss", lambda _: self._loss)
        for block in model.blocks:
            attention = block.attention
            if attention.qkv in self._cut and model.config.dropout:
                first = self._group.index * (model.config.heads // self._group.size)
                yield ModulePatch(attention.attend, "first_head", lambda _, first=first: first)
        if self._sequence:
            yield ModulePatch(model.dropout, "forward", lambda _: partial(self._enter, model.dropout))
            for block in model.blocks:
                for dropout in (block.attention.dropout, block.mlp.dropout):
                    yield ModulePatch(dropout, "forward", lambda _, each=dropout: partial(self._drop_tokens, each))
            if model.rotary is not None:
                yield ModulePatch(model.rotary, "forward", lambda _: partial(self._rotation_of_all, model.rotary))

    # ---- head and loss -----------------------------------------------------------------------------------------------

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        x = self._whole_input(x)
        if self._sequence and self._length is not None:
            x = x[:, : self._length]
        return gather(self._model.prediction.product(x, weight), self._group, -1, self._model.config.vocab_size)

    def _loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        x = self._whole_input(x)[:, : targets.shape[1]]
        vocabulary = self._model.config.vocab_size
        return vocabulary_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), self._group, vocabulary)

    def _whole_input(self, x: Tensor) -> Tensor:
        return gather_tokens(x, self._group) if self._sequence else copy(x, self._group)  # 4

    # ---- dropout as in one process -----------------------------------------------------------------------------------

    def _drop_tokens(self, module: Dropout, x: Tensor) -> Tensor:
        if not module.training or module.p == 0:
            return x
        batch, length, hidden = x.shape
        every = x.new_empty(1).expand(batch, length * self._group.size, hidden)
        return module.masked(x, module.mask(every).narrow(TOKENS, length * self._group.index, length))  # 2

    # ---- sequence parallelism ----------------------------------------------------------------------------------------

    def _enter(self, module: Dropout, x: Tensor) -> Tensor:
        self._length = x.shape[TOKENS]
        missing = -self._length % self._group.size
        if missing and module.training:
            raise LayoutError(
                f"sequence parallelism: a sequence of {self._length} tokens does not divide by tp {self._group.size}; "
                f"use {self._length - self._length % self._group.size} tokens, or sequence: false"
            )
        # No token attends to a later one, so padding changes no result. Text generation needs any length.
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return self._drop_tokens(module, split(x, self._group, TOKENS))  # 1

    def _rotation_of_all(self, rotary: Any, x: Tensor, positions: Tensor | None = None) -> Tensor:
        # Calls the class's forward: pipeline stages of one rank may share this module, and each of them patches it.
        return type(rotary).forward(rotary, x[:, :1].expand(-1, x.shape[TOKENS] * self._group.size, -1), positions)

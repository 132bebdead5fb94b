"""Patches of a built-in GPT whose sequences are cut over ranks.

1. Every rank gets full sequences, and embeds only its own positions.
2. All layers except attention work on each token separately.
3. Dropout draws masks for full sequences on every rank, and keeps those of its own tokens. So the same elements are
   dropped as in one process.
4. In attention, the ranks that share heads (`heads`) exchange tokens for heads. Among the ranks of a ring, keys and
   values rotate.
5. The loss on every rank is the mean over full sequences. Each rank computes the terms of its own targets. ZeRO
   averages the ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import lcm
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from cuda_ops.linear_cross_entropy import check_range
from speedlab.comm import Group
from speedlab.config import ModelConfig, ParallelConfig
from speedlab.config.layout_rules import context_problem, dropout_rule, heads_shared, ring_block, ways_out
from speedlab.layout import Layout, LayoutError, own_positions, sequence_multiple
from speedlab.models import GPT
from speedlab.models.gpt import CausalAttention, Dropout, GPTBlock, GPTOutput, SparseAttend
from speedlab.models.packing import IGNORED
from speedlab.parallel.context.ring_attention import ring_attention
from speedlab.parallel.context.sparse_ring_attention import sparse_ring_attention
from speedlab.parallel.context.ulysses import share_heads, share_tokens
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.module_patches import ModulePatch, ModulePatches


def check_model(model: nn.Module, layout: Layout, parallel: ParallelConfig, device: str) -> GPT:
    """Return the GPT, if its sequences can be cut under this layout.

    Args:
        model: The model.
        layout: Sizes of the axes.
        parallel: The section `parallel` of the configuration.
        device: Device type.

    Raises:
        LayoutError: The model cannot be cut; the message says what would work.
    """
    kind: Any = type(model)
    if not isinstance(model, GPT) or kind.embed is not GPT.embed or kind.output is not GPT.output:
        raise LayoutError(
            f"parallel.cp {layout.cp}: sequences are cut for this package's GPT as it is, not for {kind.__name__}; set "
            "parallel.cp to 1, and use tp, pp or dp for more devices"
        )
    if (problem := context_problem(model.config, layout, parallel)) is not None:
        raise LayoutError(f"parallel: {problem}")
    if heads_shared(model.config, layout, parallel.cp_heads) == layout.cp:
        return model
    attends = [block.attention.attend for block in cast(Iterable[GPTBlock], model.blocks)]
    if own := [each for each in attends if not _as_configured(each, model.config)]:
        raise LayoutError(
            f"parallel.cp {layout.cp}: the attention of this model is a {type(own[0]).__name__} of its own, which "
            "sees whole sequences only where all cp ranks share heads; choose a cp that divides the heads, without "
            "cp_heads"
        )
    for what, is_so, instead in (
        ("block_sparse attention", model.config.attention.kind != "dense", "dense attention"),
        (f"attention that drops {model.config.dropout:g}", model.config.dropout > 0, "no dropout"),
    ):
        if is_so and device != "cpu":
            raise LayoutError(
                f"parallel.cp {layout.cp}: {what} goes round a ring of CPU ranks only, not on {device}; choose a cp "
                f"that divides the heads, without cp_heads, so that all cp ranks share heads, or {instead}"
            )
    return model


def _as_configured(attend: nn.Module, config: ModelConfig) -> bool:
    """Return whether `attend` matches the model's configuration."""
    kind = CausalAttention if config.attention.kind == "dense" else SparseAttend
    same = getattr(attend, "attention", config.attention) == config.attention
    return type(attend) is kind and same and "forward" not in vars(attend)


class ContextParallel:
    """Context parallelism of one module over the ranks along cp. With one rank nothing changes."""

    def __init__(self, model: nn.Module, mesh: Mesh, parallel: ParallelConfig) -> None:
        """Create the groups and the patches. Collective over all ranks.

        Args:
            model: The model.
            mesh: This rank's groups.
            parallel: Section of the configuration: how many ranks share heads, whether sequences are padded, and
                whether tp ranks split tokens between layers.

        Raises:
            LayoutError: The model cannot be cut along its sequences.
        """
        sequence = parallel.sequence and mesh.layout.tp > 1
        self._group, self._sequence, self._pads = mesh["cp"], sequence, parallel.cp_pad
        self._token_share = mesh.layout.tp if sequence else 1
        self._made = ModulePatches()
        self._changes: list[ModulePatch] = []
        self.multiple = 1
        """Sequence lengths are padded to a multiple of this. In training they must already be one, unless `cp_pad` is
        set."""
        self._length = 0
        """Sequence length of the last embedding."""
        if self._group.size > 1:
            gpt = check_model(model, mesh.layout, parallel, self._group.device.type)
            shared = heads_shared(gpt.config, mesh.layout, parallel.cp_heads)
            ring, place = divmod(self._group.index, shared)
            self._heads = mesh.group("cp heads", self._group.ranks[ring * shared :][:shared])
            self._ring = mesh.group("cp ring", self._group.ranks[place::shared])
            cut = sequence_multiple(self._group.size, shared, ring_block(gpt.config))
            self.multiple = lcm(cut, self._group.size * mesh.layout.tp) if sequence else cut
            self._dropout = gpt.config.dropout
            self._attention = gpt.config.attention
            self._own_heads = gpt.config.heads // mesh.layout.tp // shared
            self._changes += self._of_gpt(gpt)

    def own_length(self, length: int) -> int:
        """Return the number of tokens on this rank.

        Args:
            length: Tokens of the full sequence.
        """
        return -(-length // self.multiple) * self.multiple // self._group.size

    def check_length(self, length: int) -> None:
        """Check that training can use a sequence length.

        Args:
            length: Tokens of the full sequence.

        Raises:
            LayoutError: cp does not divide the length, and padding is off or there is dropout.
        """
        if length % self.multiple == 0:
            return
        reported = f"parallel.cp {self._group.size}: a sequence of {length} tokens does not divide by {self.multiple}"
        if not self._pads:
            raise LayoutError(f"{reported}; {ways_out(length, self.multiple)}")
        if self._dropout:
            raise LayoutError(f"{reported}, and {dropout_rule(self._dropout)}")

    def attach(self) -> None:
        """Apply the patches."""
        self._made.make(self._changes)

    def detach(self) -> None:
        """Undo the patches."""
        self._made.undo()

    def _of_gpt(self, model: GPT) -> Iterator[ModulePatch]:
        # The patches call the classes' methods: pipeline stages of one rank may share these modules, and each stage
        # patches them.
        vocabulary = model.config.vocab_size
        yield ModulePatch(model.places, "forward", lambda _: partial(self._positions, model.config))
        yield ModulePatch(model.places, "own", lambda _: partial(self._embedded, model.places, vocabulary))
        yield ModulePatch(model.prediction, "forward", lambda _: partial(self._predict, model.prediction, vocabulary))
        dropouts, first_own = [cast(Dropout, model.dropout)], self._heads.index * self._own_heads
        for block in cast(Iterable[GPTBlock], model.blocks):
            attention = block.attention
            dropouts += [attention.dropout, block.mlp.dropout]
            yield ModulePatch(attention.attend, "forward", partial(self._across_ranks, attention.attend))
            if model.config.dropout:
                yield ModulePatch(attention.attend, "first_head", lambda first: first + first_own)
        for dropout in dropouts if model.config.dropout else []:
            yield ModulePatch(dropout, "mask", lambda _, each=dropout: partial(self._own_mask, each))
            if not self._sequence:  # With sequence parallelism, the tensor-parallel patch slices this mask further.
                yield ModulePatch(dropout, "forward", lambda _, each=dropout: partial(self._drop, each))

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _positions(self, config: ModelConfig, length: int, device: torch.device, given: Tensor | None = None) -> Tensor:
        last = config.context - 1
        if given is None:
            # Padding follows the sequence, possibly past the end of the position table.
            return self._own_places(length * self._group.size, device).clamp_(max=last)
        looked_up = config.position == "learned" and given.is_cpu
        # All ranks check all positions, so that all ranks raise.
        if looked_up and ((given < 0) | (given > last)).any():
            raise IndexError(f"positions: {int(given.min())} to {int(given.max())}, expected 0 to {last}")
        return self._own(given, 0)

    def _own_places(self, whole: int, device: torch.device) -> Tensor:
        own = own_positions(whole, self._group.size, self._heads.size, self._group.index)
        return torch.cat([torch.arange(part.start, part.stop, device=device) for part in own])

    def _embedded(self, places: nn.Module, vocabulary: int, tokens: Tensor) -> Tensor:
        self._length = tokens.shape[1]
        if places.training and torch.is_grad_enabled():
            self.check_length(self._length)
        # All ranks check all tokens, so that all ranks raise.
        if tokens.is_cpu and ((tokens < 0) | (tokens >= vocabulary)).any():
            raise IndexError(f"tokens: {int(tokens.min())} to {int(tokens.max())}, expected 0 to {vocabulary - 1}")
        return self._own(tokens, 0)

    def _own(self, tokens: Tensor, padding: int) -> Tensor:
        """Return this rank's tokens. No token attends to a later one, so padding changes no result."""
        missing = -tokens.shape[1] % self.multiple
        padded = F.pad(tokens, (0, missing), value=padding) if missing else tokens
        return padded[:, self._own_places(padded.shape[1], tokens.device)]

    # ---- dropout ---------------------------------------------------------------------------------------------------

    def _own_mask(self, module: Dropout, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        whole = type(module).mask(module, x.new_empty(1).expand(batch, length * self._group.size, hidden))
        return whole[:, self._own_places(whole.shape[1], x.device)]

    @staticmethod
    def _drop(module: Dropout, x: Tensor) -> Tensor:
        return module.masked(x, module.mask(x)) if module.training and module.p else x

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _across_ranks(self, attend: nn.Module, forward: Any) -> Any:
        return torch.compiler.disable(partial(self._attend, attend, forward))  # Not compiled, because it communicates.

    def _attend(
        self, attend: nn.Module, forward: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None
    ) -> Tensor:
        """Compute attention across ranks. `starts`: of full sequences, if there are documents."""
        heads, ring = self._heads, self._ring
        if heads.size > 1:
            q, k, v = share_heads(torch.stack((q, k, v)), heads).unbind()
        if ring.size == 1:
            y = forward(q, k, v) if starts is None else forward(q, k, v, starts)
        elif isinstance(attend, CausalAttention):
            y = ring_attention(q, k, v, ring, attend=attend, starts=starts)
        else:
            y = sparse_ring_attention(q, k, v, self._attention, ring, starts=starts)
        return share_tokens(y, heads) if heads.size > 1 else y

    # ---- head and loss -----------------------------------------------------------------------------------------------

    def _predict(
        self, prediction: Any, vocabulary: int, x: Tensor, weight: Tensor, targets: Tensor | None
    ) -> GPTOutput:
        if targets is None:
            return GPTOutput(None, self._all_logits(prediction.logits(x, weight)))
        same = self.own_length(targets.shape[1]) == x.shape[1] * self._token_share
        # Only the first pipeline stage embeds, so later stages do not know `_length`.
        if not same or (self._length and targets.shape[1] != self._length):
            raise ValueError(
                f"targets: {targets.shape[1]} of a sequence, expected one for each token; give as many, with "
                f"{IGNORED} where none counts"
            )
        if targets.is_cpu:
            check_range(targets.flatten(), vocabulary, IGNORED)
        own = self._own(targets, IGNORED)
        count, total = (((each >= 0) & (each < vocabulary)).sum() for each in (own, targets))
        # The mean over no targets would be NaN. So a rank without targets gets one, with weight 0. If no rank has
        # targets, the loss stays NaN.
        own[:, 0] = torch.where((count > 0) | (total == 0), own[:, 0], 0)
        # The mean over this rank's targets, weighted by their fraction of all targets.
        loss = prediction.loss(x, weight, own) * (count / total.clamp(min=1))
        return GPTOutput(_SumOfRanks.apply(loss, self._group), None)

    def _all_logits(self, own: Tensor) -> Tensor:
        """Return (B, T, V) in sequence order, on every rank."""
        every = _GatherSequence.apply(own, self._group)
        length = every.shape[1]
        size, heads = self._group.size, self._heads.size
        order = torch.cat(
            [torch.arange(part.start, part.stop) for k in range(size) for part in own_positions(length, size, heads, k)]
        )
        every = every.index_select(1, order.argsort().to(own.device))
        return every[:, : self._length] if self._length > length - self.multiple else every


# ZeRO averages gradients over ranks with the same loss. So the backwards below multiply by the number of ranks: each
# term is computed by only one rank.


class _SumOfRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.size = group.size
        return group.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.size, None


class _GatherSequence(Function):
    """Concatenates the ranks' tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.gather_along(x, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.chunk(ctx.group.size, 1)[ctx.group.index] * ctx.group.size, None

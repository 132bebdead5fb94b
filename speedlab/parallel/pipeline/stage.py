"""One pipeline stage on one rank: forwards, and backwards in one or two halves. Each of these is a pass of the stage's
Zero.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedlab.comm import PeerLost
from speedlab.parallel.pipeline.partition import StageModule
from speedlab.parallel.zero import Unit, Zero


@dataclass
class _Micro:
    """A micro-batch between its forward and the end of its backward."""

    given: Tensor | None
    """Activation from the previous stage, which waits for the gradient of this activation."""
    made: Tensor
    """Activation for the next stage, or the loss."""


class PipelineStage:
    """A stage's module, its Zero, and the micro-batches in progress."""

    def __init__(self, module: StageModule, zero: Zero, *, split: bool) -> None:
        """Start without micro-batches.

        Args:
            module: The stage.
            zero: The Zero of the module.
            split: Whether backward runs in two halves. If not, the first half computes everything.
        """
        self.module, self.zero = module, zero
        # No stage needs gradients of tokens, so on the first stage the second half computes everything.
        self.split = split and not module.is_first
        self._micros: dict[int, _Micro] = {}
        self._put_off: dict[int, list[dict[str, Any]]] = {}
        """Between the two halves of a backward: parameters, and the inputs of their gradients, as
        torch.distributed.pipelining stores them."""

    @property
    def halves(self) -> tuple[bool, bool]:
        """Whether the (first, second) half of a backward computes anything."""
        return not self.module.is_first, self.split or self.module.is_first

    def forward(self, micro_batch: int, given: Tensor, targets: Tensor | None, positions: Tensor | None) -> Tensor:
        """Run the forward of a micro-batch, and keep its graph for the backward.

        Args:
            micro_batch: Number of the micro-batch.
            given: Tokens (B, T) on the first stage, else activations (B, T, C).
            targets: (B, T), on the last stage.
            positions: (B, T) of documents.

        Returns:
            The activation or, on the last stage, the loss; detached.
        """
        # The previous stage needs the gradient of this input. Tokens have none.
        x = given if self.module.is_first else given.requires_grad_()
        made = self.module(x, targets, positions)
        self._micros[micro_batch] = _Micro(None if self.module.is_first else x, made)
        return made.detach()

    @torch.no_grad()
    def evaluate(self, given: Tensor, targets: Tensor | None, positions: Tensor | None) -> Tensor:
        """Run a forward without a graph.

        Args:
            given: Tokens (B, T) on the first stage, else activations (B, T, C).
            targets: (B, T), on the last stage; None: return logits.
            positions: (B, T) of documents.

        Returns:
            The activation or, on the last stage, the loss or the logits.
        """
        made: Tensor = self.module(given, targets, positions)
        return made

    def backward(
        self, micro_batch: int, gradient: Tensor | None, *, scale: float | Tensor, sync: bool
    ) -> Tensor | None:
        """Run the full backward of a micro-batch.

        Args:
            micro_batch: Number of the micro-batch.
            gradient: Gradient of the stage's output; None on the last stage, which differentiates loss × `scale`.
            scale: Factor on the loss.
            sync: Whether to reduce the gradients of parameters.

        Returns:
            The gradient of the stage's input; None on the first stage.
        """
        micro = self._micros.pop(micro_batch)
        self.zero.begin_backward(sync=sync)
        if micro.made.requires_grad:  # A first stage that is fully frozen has no graph.
            torch.autograd.backward(*self._root(micro.made, gradient, scale))
        self.zero.end_backward(leave_root=True)
        return None if micro.given is None else micro.given.grad

    def backward_input(self, micro_batch: int, gradient: Tensor | None, *, scale: float | Tensor) -> Tensor | None:
        """Run the first half of a backward: the gradient of the stage's input.

        The modules after the blocks get their parameter gradients here, too. A head that computes these gradients
        together with the loss returns them only once, and they cost little.

        Args:
            micro_batch: Number of the micro-batch.
            gradient: Gradient of the stage's output; None on the last stage.
            scale: Factor on the loss.

        Returns:
            The gradient of the stage's input.
        """
        # Imported here, because the import loads the compiler and takes more than a second.
        from torch.distributed.pipelining._backward import stage_backward_input

        micro = self._micros.pop(micro_batch)
        assert micro.given is not None
        made, gradient = self._root(micro.made, gradient, scale)
        # stage_backward_input detaches its output in place, which a view does not allow.
        made = made.clone() if made._is_view() else made
        self.zero.begin_backward(sync=False)
        following = {id(p): p for module in self.module.following for p in module.parameters() if p.requires_grad}
        others = [p for p in self.module.parameters() if p.requires_grad and id(p) not in following]
        try:
            (given, *_), self._put_off[micro_batch] = stage_backward_input(
                [made], None if gradient is None else [gradient], [micro.given, *following.values()], iter(others)
            )
        except PeerLost:
            raise
        except RuntimeError as error:
            # torch's own error only lists tensors, so raise its cause. A PeerLost must keep its type.
            raise error.__cause__ or error from None
        # Takes gradients now: micro-batches are summed in the flat's dtype, not in the parameter's.
        self.zero.collect()
        self.zero.end_backward()
        return given

    def backward_weight(self, micro_batch: int, *, sync: bool) -> None:
        """Run the second half of a backward: gradients of parameters. It runs unit by unit, so that only one unit is
        gathered at a time.

        Args:
            micro_batch: Number of the micro-batch.
            sync: Whether to reduce the gradients.
        """
        from torch.distributed.pipelining._backward import stage_backward_weight

        order = self.zero.backward_order
        turn = {id(p): number for number, unit in enumerate(order) for flat in unit.flats for p in flat.parameters}
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for group in self._put_off.pop(micro_batch):
            if "grads" in group:  # Without "grads", no gradient reached this group.
                # A group may span several units. Compute it with the unit that backward meets first.
                first = min(turn[id(node.variable)] for node in group["params"])
                groups[order[first].name].append(group)

        def compute(unit: Unit) -> None:
            own = groups[unit.name]
            stage_backward_weight(iter([node.variable for group in own for node in group["params"]]), own)

        self.zero.backward_by_unit(compute, sync=sync, leave_root=True)

    def _root(self, made: Tensor, gradient: Tensor | None, scale: float | Tensor) -> tuple[Tensor, Tensor | None]:
        return (made * scale, None) if self.module.is_last else (made, gradient)

    def forget(self) -> None:
        """Drop all micro-batches in progress, and their gradients."""
        self._micros.clear()
        self._put_off.clear()
        self.zero.clear_gradients()

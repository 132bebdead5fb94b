"""One pipeline stage on one rank: its forwards, and its backwards whole or in two halves, each a pass of its Zero."""

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
    """The activation from the stage before; its gradient is what that one waits for."""
    made: Tensor
    """The activation for the stage behind, or the loss."""


class PipelineStage:
    """A stage's module, the Zero that drives it, and its micro-batches under way.

    `split`: whether the halves of a backward are computed apart. Where they are not, the first one does it all.
    """

    def __init__(self, module: StageModule, zero: Zero, *, split: bool) -> None:
        self.module, self.zero = module, zero
        # Nobody waits for gradients of tokens, so on the first stage the second half does it all.
        self.split = split and not module.is_first
        self._micros: dict[int, _Micro] = {}
        self._put_off: dict[int, list[dict[str, Any]]] = {}
        """Between the two halves of a backward: parameters, and what their gradients are computed from, as
        torch.distributed.pipelining keeps them."""

    @property
    def halves(self) -> tuple[bool, bool]:
        """Whether there is something to do in the (first, second) half of a backward."""
        return not self.module.is_first, self.split or self.module.is_first

    def forward(self, micro_batch: int, given: Tensor, targets: Tensor | None, positions: Tensor | None) -> Tensor:
        """What the stage makes of `given`: an activation, or with `targets` on the last stage the loss, without a
        graph; the graph is kept for the backward."""
        x = given if self.module.is_first else given.requires_grad_()
        made = self.module(x, targets, positions)
        self._micros[micro_batch] = _Micro(None if self.module.is_first else x, made)
        return made.detach()

    @torch.no_grad()
    def evaluate(self, given: Tensor, targets: Tensor | None, positions: Tensor | None) -> Tensor:
        """The same without a graph; on the last stage logits without `targets`."""
        made: Tensor = self.module(given, targets, positions)
        return made

    def backward(
        self, micro_batch: int, gradient: Tensor | None, *, scale: float | Tensor, sync: bool
    ) -> Tensor | None:
        """The whole backward; returns the gradient of what was given. `gradient`: of what was made; None on the last
        stage, where loss × `scale` is differentiated."""
        micro = self._micros.pop(micro_batch)
        self.zero.begin_backward(sync=sync)
        if micro.made.requires_grad:  # A first stage that is frozen as a whole has no graph.
            torch.autograd.backward(*self._root(micro.made, gradient, scale))
        self.zero.end_backward(leave_root=True)
        return None if micro.given is None else micro.given.grad

    def backward_input(self, micro_batch: int, gradient: Tensor | None, *, scale: float | Tensor) -> Tensor | None:
        """The first half; returns the gradient of what was given.

        Of what stands behind the blocks, it computes gradients of parameters too: a head that makes them together with
        the loss hands them out once, and they cost little.
        """
        # Imported here: it takes more than a second, because the compiler comes along.
        from torch.distributed.pipelining._backward import stage_backward_input

        micro = self._micros.pop(micro_batch)
        assert micro.given is not None
        made, gradient = self._root(micro.made, gradient, scale)
        # torch takes the graph off in place, which a view does not allow.
        made = made.clone() if made._is_view() else made
        self.zero.begin_backward(sync=False)
        behind = {id(p): p for module in self.module.behind for p in module.parameters() if p.requires_grad}
        others = [p for p in self.module.parameters() if p.requires_grad and id(p) not in behind]
        try:
            (given, *_), self._put_off[micro_batch] = stage_backward_input(
                [made], None if gradient is None else [gradient], [micro.given, *behind.values()], iter(others)
            )
        except PeerLost:
            raise
        except RuntimeError as error:
            # torch's own text only lists tensors; a PeerLost must stay one.
            raise error.__cause__ or error from None
        self.zero.collect()  # Several micro-batches' are added in the flat's dtype, not in the parameter's.
        self.zero.end_backward()
        return given

    def backward_weight(self, micro_batch: int, *, sync: bool) -> None:
        """The second half. It goes unit by unit, so that no more than one is whole where parameters are partitioned."""
        from torch.distributed.pipelining._backward import stage_backward_weight

        order = self.zero.backward_order
        turn = {id(p): number for number, unit in enumerate(order) for flat in unit.flats for p in flat.parameters}
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for group in self._put_off.pop(micro_batch):
            if "grads" in group:  # else nothing flowed there
                first = min(turn[id(node.variable)] for node in group["params"])
                groups[order[first].name].append(group)

        def compute(unit: Unit) -> None:
            own = groups[unit.name]
            stage_backward_weight(iter([node.variable for group in own for node in group["params"]]), own)

        self.zero.backward_by_unit(compute, sync=sync, leave_root=True)

    def _root(self, made: Tensor, gradient: Tensor | None, scale: float | Tensor) -> tuple[Tensor, Tensor | None]:
        return (made * scale, None) if self.module.is_last else (made, gradient)

    def forget(self) -> None:
        """Drop all micro-batches under way and what gradients they have left."""
        self._micros.clear()
        self._put_off.clear()
        self.zero.clear_gradients()

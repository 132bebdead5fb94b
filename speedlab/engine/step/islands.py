"""Islands of ranks that train by themselves and meet every few steps (DiLoCo, arXiv:2311.08105, algorithm 1).

All islands begin with the same parameters, the *anchor*. Each makes `outer.every_steps` steps of its own; then:

1. The outer gradient is the anchor minus an island's parameters, in the mean over the islands (`Meeting`).
2. An SGD with (Nesterov) momentum takes it: momentum = outer.momentum × momentum + gradient, and the new anchor is the
   anchor minus outer.lr × (gradient + outer.momentum × momentum). All islands compute the same bits.
3. The anchor is every island's parameters: the next steps begin there. Inner moments stay each island's own.

With `outer.fragments` every k-th flat meets by itself, in turn (streaming DiLoCo, arXiv:2501.18512): as many bytes, no
longer all at once. With `outer.delay_steps` 2 and 3 come so many steps behind 1, which those steps hide, and a share
`outer.mixing` of an island's own parameters stays.

A save needs one model: `make_one` ends the meetings under way, and gives all islands the mean of their parameters and
moments, in float32. Anchor, outer momentum and the count of steps go on as they were, so that the next meeting comes
when it would have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from speedlab.comm import PeerLost
from speedlab.config import ConfigError, OuterConfig
from speedlab.engine.step.errors import NonFiniteError
from speedlab.engine.step.meeting import (
    ANCHOR,
    Meeting,
    island_buffer,
    kept_by_islands,
    partition_size,
    pieces_of,
    sum_bytes,
)
from speedlab.engine.step.optimizer import PartitionedOptimizer
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.zero import Flat, Gradient
from speedlab.placement import Home


class Islands:
    """The meetings of this rank's island with the others. With one island nothing is ever exchanged or kept."""

    def __init__(
        self, optimizer: PartitionedOptimizer, mesh: Mesh, outer: OuterConfig, *, before_change: Callable[[], None]
    ) -> None:
        """`before_change`: called before parameters change, on all ranks. Raises ConfigError, on all ranks alike, where
        parameters of one are wider than outer gradients. Collective of several islands."""
        self.group, self.index = mesh["islands"], mesh["islands"].index
        self.several = self.group.size > 1
        self._optimizer, self._everyone, self._outer = optimizer, mesh.everyone, outer
        self._before_change = before_change
        self._told: dict[str, float | Tensor] = {}
        self._under_way: dict[int, tuple[int, Meeting]] = {}
        """By fragment: the step behind which its meeting ends. They end in the order in which they began, which is this
        one: transfers count what peers have read of them."""
        self._cut = False
        """Whether meetings under way have lost their connections."""
        self.apart = False
        """Whether parameters or moments may differ between islands."""
        self._fresh = True
        """Whether nothing was updated since the anchor was taken."""
        if self.several:
            problem = next(filter(None, self._everyone.collect(self._too_wide())), "")
            if problem:
                raise ConfigError(problem)
            self.begin_anew()

    def _too_wide(self) -> str:
        """What stands against meetings of this rank's parameters; its peers may have other pipeline stages."""
        for flat in self._optimizer.flats:
            if flat.master.dtype is not torch.float32:
                return (
                    f"parallel.islands {self.group.size}: {flat.slots[0].name} is trained in {flat.master.dtype}, and "
                    "islands meet in float32; make the model in float32, or set parallel.islands to 1"
                )
        return ""

    @property
    def kept(self) -> Mapping[str, Home]:
        """What is kept beside gradients, in checkpoints too."""
        return kept_by_islands(self._outer, self.group.size) or {}

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Parameters are the same in all islands, and nothing is known of the last meeting: they are the anchor."""
        self.give_up()
        self.apart = False
        for flat, gradient in self._with_gradients() if self.several else ():
            gradient.forget_kept()
            gradient.kept[ANCHOR].copy_(flat.own_master)
        self._fresh = True

    def anchored(self) -> None:
        """The anchor came with the parameters, from a checkpoint."""
        self._fresh = False

    @torch.no_grad()
    def before_update(self) -> None:
        """Parameters are about to be updated: what a caller has written into them before the first update, as
        pretrained ones, is where islands begin."""
        for flat, gradient in self._with_gradients() if self.several and self._fresh else ():
            gradient.kept[ANCHOR].copy_(flat.own_master)
        self._fresh = False

    def give_up(self) -> None:
        """End meetings under way, whose parameters are gone, without a use. Collective, unless peers are lost."""
        pending, self._under_way = list(self._under_way.values()), {}
        for _, meeting in pending:
            try:
                meeting.give_up(wait=not self._cut)
            except PeerLost:
                self._cut = True

    def disconnect(self) -> None:
        """Connections go: meetings under way do not end any more, and keep their memory until `reconnect`."""
        self._cut = True

    def reconnect(self) -> None:
        """There are connections again."""
        self.disconnect()  # Those of before are gone, whoever let go of them.
        self.give_up()
        self._cut = False

    @torch.no_grad()
    def stepped(self, step: int) -> None:
        """Step number `step`, counted from 1, has updated the parameters: end and begin the meetings for which it is
        time. Collective then. Raises NonFiniteError, on all ranks alike."""
        if not self.several:
            return
        self.apart = True
        outer, flats = self._outer, self._optimizer.flats
        waits = [
            (-step - outer.every_steps * number // outer.fragments) % outer.every_steps for number in self._numbers
        ]
        self._told = {"met": 0.0, "steps_to_meeting": min(wait or outer.every_steps for wait in waits)}
        self._told |= {"sent_bytes": 0.0, "float32_bytes": sum_bytes(self.group, sum(map(partition_size, flats)))}
        self._end([number for number, (end, _) in self._under_way.items() if end == step])
        for number in (number for number, wait in enumerate(waits) if wait == 0):
            self._begin(number, step)
        self._end([number for number, (end, _) in self._under_way.items() if end == step])

    def told(self) -> dict[str, float]:
        """What the record of the step that has just ended says of meetings: met (0 or 1), steps_to_meeting, sent_bytes
        to other islands, float32_bytes that sums of gradients would have sent them in this step, and where compressed
        meetings ended error_norm of this rank."""
        return {name: float(value) for name, value in self._told.items()}

    # ---- meetings ----------------------------------------------------------------------------------------------------

    @property
    def _numbers(self) -> range:
        return range(self._outer.fragments)

    def _begin(self, number: int, step: int) -> None:  # 1
        outer = self._outer
        meeting = Meeting(self.group, self._with_gradients()[number :: outer.fragments], outer)
        self._refuse_non_finite(meeting, step)
        meeting.send()
        self._told["sent_bytes"] += meeting.sent_bytes
        self._under_way[number] = step + outer.delay_steps, meeting

    def _end(self, numbers: Iterable[int]) -> None:  # 2, 3
        numbers = list(numbers)
        if not numbers:
            return
        self._before_change()
        squares = torch.zeros((), dtype=torch.float64, device=self.group.device)
        for number in numbers:
            _, meeting = self._under_way.pop(number)
            squares += meeting.end(self._outer.mixing if self._outer.delay_steps else 0.0)
            self._publish(self._optimizer.flats[number :: self._outer.fragments])
        self._told["met"] = 1.0
        if self._outer.compression != "none":
            self._told["error_norm"] = squares.sqrt()

    def _refuse_non_finite(self, meeting: Meeting, step: int) -> None:
        """Before anything that is not a number comes into a momentum or a feedback, from where it would never leave."""
        counts = torch.zeros(self.group.size, dtype=torch.float64)
        counts[self.index] = float(not meeting.finite)
        found = self._everyone.sum_scalars(counts).nonzero().flatten().tolist()
        if found:
            raise NonFiniteError(
                f"step {step}: parameters of island {', '.join(map(str, found))} are not finite. The islands did not "
                "meet: anchor, outer momentum and error feedback are those of the last meeting. Go back to a "
                "checkpoint with load_checkpoint, and lower optimizer.lr or outer.lr",
                step=step,
                ranks=[],
                tensors=[],
            )

    # ---- one model ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def make_one(self) -> None:
        """End the meetings under way, and give all islands the mean of their parameters and moments. Collective."""
        self._before_change()
        self._end(list(self._under_way))
        for flat in self._optimizer.flats:
            with self._optimizer.visit(flat, changed=True):
                states = [flat.master, *(state for _, state in sorted(self._optimizer.states_of(flat).items()))]
                low = flat.state_range[0]
                own = [state[flat.start - low : flat.end - low] for state in states]
                together = island_buffer(self.group, len(own) * partition_size(flat))
                pieces = pieces_of(together, [partition_size(flat)] * len(own))
                for piece, state in zip(pieces, own, strict=True):
                    piece.copy_(state)
                self.group.all_reduce(together).wait()
                self.group.wait_until_read(together)
                for piece, state in zip(pieces, own, strict=True):
                    state.copy_(piece.div_(self.group.size))
                for state in states[1:]:
                    _whole(flat, state)
        self._publish(self._optimizer.flats)
        self.apart = False

    @staticmethod
    def _publish(flats: Iterable[Flat]) -> None:
        """Bring this rank's partition of the masters to the masters and parameters of its island."""
        for flat in flats:
            _whole(flat, flat.master)
            sent = flat.publish()
            if sent is not None:
                sent.wait()

    def _with_gradients(self) -> list[tuple[Flat, Gradient]]:
        return list(zip(self._optimizer.flats, self._optimizer.gradients, strict=True))


def _whole(flat: Flat, state: Tensor) -> None:
    """Where every rank of the island has a whole state, fill it from the ranks' own partitions."""
    if flat.state_range == (0, flat.padded) and flat.gather_group.size > 1:
        flat.gather_group.all_gather(state, state[flat.start : flat.end]).wait()
        flat.gather_group.wait_until_all_read()

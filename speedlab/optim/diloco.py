"""Islands of ranks that train by themselves and meet every few steps (DiLoCo, arXiv:2311.08105, algorithm 1).

All islands begin with the same parameters, the *anchor*. Each makes `outer.every_steps` steps of its own; then:

1. The outer gradient is the anchor minus an island's parameters, in the mean over the islands (`OuterStep`).
2. An SGD with (Nesterov) momentum takes it: momentum = outer.momentum × momentum + gradient, and the new anchor is the
   anchor minus outer.lr × (gradient + outer.momentum × momentum). All islands compute the same bits.
3. The anchor is every island's parameters: the next steps begin there. Inner moments stay each island's own.

With `outer.fragments` every k-th flat meets by itself, in turn (streaming DiLoCo, arXiv:2501.18512): as many bytes, no
longer all at once. With `outer.delay_steps` 2 and 3 come so many steps behind 1, which those steps hide, and a share
`outer.mixing` of an island's own parameters stays.

A save needs one model: `average_replicas` ends the meetings under way, and gives all islands the mean of their
parameters and moments, in float32. Anchor, outer momentum and the count of steps go on as they were, so that the next
meeting comes when it would have come.

One meeting of islands: the mean outer gradient of some flats, on its way, and the outer update that takes it.

Each rank exchanges what belongs to its own partition with the ranks of other islands that have the same, at every ZeRO
stage, so that nothing is sent twice. It travels in float32, or compressed with error feedback (`CompressedMeans`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from speedlab.comm import Group, PeerLost
from speedlab.comm.compressed_allreduce import Code, CompressedMeans, LargestElements, Signs
from speedlab.config import ConfigError, OuterConfig
from speedlab.layout import padded_numel
from speedlab.optim.errors import NonFiniteError
from speedlab.optim.sharded_optimizer import PartitionedOptimizer
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.zero import FlatParam, Gradient
from speedlab.placement import Replication, StatePlacement

ANCHOR, MOMENTUM, ERROR = "anchor", "outer_momentum", "outer_error"

_FLOAT32 = 4


def kept_by_diloco(outer: OuterConfig, islands: int) -> Mapping[str, StatePlacement] | None:
    """What islands keep beside each gradient, over a rank's partition; None where there is but one."""
    if islands == 1:
        return None
    kept = {ANCHOR: StatePlacement(holders=Replication.OWN_PART, form="float32")}
    if outer.momentum:
        kept[MOMENTUM] = StatePlacement(holders=Replication.OWN_PART, form="float32")
    if outer.compression != "none":
        kept[ERROR] = StatePlacement(holders=Replication.ISLANDS_PART, form="float32")
    return kept


class OuterStep:
    """Outer gradients of `flats` on their way; all ranks begin and end meetings in one order."""

    def __init__(self, group: Group, flats: Sequence[tuple[FlatParam, Gradient]], outer: OuterConfig) -> None:
        """`flats` with their gradients. Nothing is sent before `send`."""
        self._group, self._flats, self._outer = group, flats, outer
        self._sizes = [partition_size(flat) for flat, _ in flats]
        self._together = island_buffer(group, sum(self._sizes))
        self._given = pieces_of(self._together, self._sizes)
        for own, (flat, gradient) in zip(self._given, flats, strict=True):
            torch.sub(gradient.kept[ANCHOR], flat.own_master, out=own)
        self._codes: CompressedMeans | None = None
        if outer.compression != "none":
            codes: dict[str, Code] = {"signs": Signs(), "topk": LargestElements(outer.topk_share)}
            self._codes = CompressedMeans(group, codes[outer.compression], self._sizes)
        self.sent_bytes = self._codes.sent_bytes if self._codes else sum_bytes(group, self._together.numel())
        """What this rank sends."""
        group.traffic.buffers.add(self._together.nbytes)

    @property
    def finite(self) -> bool:
        """Whether this rank's outer gradients are. Waits for the device."""
        return bool(self._together.isfinite().all())

    def send(self) -> None:
        """Begin the exchange, once `finite` is known to be so on all ranks."""
        if self._codes is None:
            self._transfer = self._group.all_reduce(self._together)
        else:
            self._codes.send(self._given, [gradient.kept[ERROR] for _, gradient in self._flats])

    def end(self, mixing: float) -> Tensor:
        """Wait for the means, move the anchors, and bring own masters there, but for a share `mixing` of what they are;
        the squared norm of what was not sent. Whatever is raised while it waits, what is kept stays as it was."""
        squares = torch.zeros((), dtype=torch.float64, device=self._group.device)
        means = self._means()
        self._group.traffic.buffers.add(-self._together.nbytes)
        for mean, missed, (flat, gradient) in zip(means, self._given, self._flats, strict=True):
            if self._codes is not None:
                # Codes of what is no parameter's are errors that no checkpoint would have.
                for tensor in (mean, missed):
                    gradient.zero_gaps(tensor, gradient.own_range[0])
                gradient.kept[ERROR].copy_(missed)
                squares += torch.linalg.vector_norm(missed).double().square()
            self._update(gradient.kept, mean)
            flat.own_master.lerp_(gradient.kept[ANCHOR], 1 - mixing)
        return squares

    def give_up(self, *, wait: bool) -> None:
        """Nobody uses what has been sent; `wait`: until all of it is here, as peers that are there still read it."""
        try:
            if wait:
                self._means()
        finally:
            self._group.traffic.buffers.add(-self._together.nbytes)

    def _means(self) -> list[Tensor]:
        if self._codes is not None:
            return self._codes.take()
        self._transfer.wait()
        self._group.wait_until_read(self._together)
        self._together.div_(self._group.size)
        return self._given

    def _update(self, kept: Mapping[str, Tensor], mean: Tensor) -> None:
        """The outer update of an anchor; `mean`, the outer gradient, is written over."""
        outer = self._outer
        if outer.momentum:
            momentum = kept[MOMENTUM].mul_(outer.momentum).add_(mean)
            mean = mean.add_(momentum, alpha=outer.momentum) if outer.nesterov else momentum
        kept[ANCHOR].add_(mean, alpha=-outer.lr)


def partition_size(flat: FlatParam) -> int:
    """Elements of a rank's partition."""
    return flat.end - flat.start


def island_buffer(group: Group, numel: int) -> Tensor:
    """Zeros (n × m,) for at least so many elements, where sums over the islands are fastest."""
    return group.empty(padded_numel(numel, group.size), torch.float32).zero_()


def pieces_of(together: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The beginning of a tensor as tensors of these sizes, end to end."""
    return list(together[: sum(sizes)].split(list(sizes)))


def sum_bytes(group: Group, numel: int) -> float:
    """What a rank sends in a sum of so many elements of float32 over the islands."""
    return 2 * (group.size - 1) * numel * _FLOAT32 / group.size


class DiLoCo:
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
        self._under_way: dict[int, tuple[int, OuterStep]] = {}
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
    def kept(self) -> Mapping[str, StatePlacement]:
        """What is kept beside gradients, in checkpoints too."""
        return kept_by_diloco(self._outer, self.group.size) or {}

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
        meeting = OuterStep(self.group, self._with_gradients()[number :: outer.fragments], outer)
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

    def _refuse_non_finite(self, meeting: OuterStep, step: int) -> None:
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
    def average_replicas(self) -> None:
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
    def _publish(flats: Iterable[FlatParam]) -> None:
        """Bring this rank's partition of the masters to the masters and parameters of its island."""
        for flat in flats:
            _whole(flat, flat.master)
            sent = flat.publish()
            if sent is not None:
                sent.wait()

    def _with_gradients(self) -> list[tuple[FlatParam, Gradient]]:
        return list(zip(self._optimizer.flats, self._optimizer.gradients, strict=True))


def _whole(flat: FlatParam, state: Tensor) -> None:
    """Where every rank of the island has a whole state, fill it from the ranks' own partitions."""
    if flat.state_range == (0, flat.padded) and flat.gather_group.size > 1:
        flat.gather_group.all_gather(state, state[flat.start : flat.end]).wait()
        flat.gather_group.wait_until_all_read()

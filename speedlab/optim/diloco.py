"""DiLoCo: islands of ranks train alone and average every few steps (arXiv:2311.08105, algorithm 1).

All islands begin with equal parameters, the *anchor*. Each island makes `outer.every_steps` steps. Then:

1. The outer gradient is the anchor minus the island's parameters, averaged over the islands (`OuterStep`).
2. SGD with (Nesterov) momentum uses it: momentum = outer.momentum × momentum + gradient. The new anchor is the anchor
   minus outer.lr × (gradient + outer.momentum × momentum). All islands compute equal bits.
3. Every island takes the anchor as its parameters. The inner moments of each island stay unchanged.

With `outer.fragments` every k-th flat parameter meets alone, in turn (streaming DiLoCo, arXiv:2501.18512): equal bytes
in total, lower peaks. With `outer.delay_steps`, parts 2 and 3 happen some steps after 1, and these steps hide the
transfer; a share `outer.mixing` of the island's own parameters remains.

A save needs one model. `average_replicas` ends the pending meetings and gives all islands the float32 mean of their
parameters and moments. Anchor, outer momentum and the step count do not change, so the next meeting keeps its time.

Each rank exchanges its own partition with the same ranks of other islands, at every ZeRO stage, so nothing is sent
twice. Transfers are float32, or compressed with error feedback (`CompressedMeans`).
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
    """Return the extra tensors of islands, per gradient, over a rank's partition.

    Args:
        outer: The settings of the outer optimizer.
        islands: Number of islands.

    Returns:
        Their placement by name; None with one island.
    """
    if islands == 1:
        return None
    kept = {ANCHOR: StatePlacement(holders=Replication.OWN_PART, form="float32")}
    if outer.momentum:
        kept[MOMENTUM] = StatePlacement(holders=Replication.OWN_PART, form="float32")
    if outer.compression != "none":
        kept[ERROR] = StatePlacement(holders=Replication.ISLANDS_PART, form="float32")
    return kept


class OuterStep:
    """One meeting: outer gradients of some flat parameters in transfer.

    All ranks begin and end meetings in the same order.
    """

    def __init__(self, group: Group, flats: Sequence[tuple[FlatParam, Gradient]], outer: OuterConfig) -> None:
        """Compute the outer gradients. `send` starts the transfer.

        Args:
            group: The same rank in all islands.
            flats: Flat parameters with their gradients.
            outer: The settings of the outer optimizer.
        """
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
        """Bytes that this rank sends."""
        group.traffic.buffers.add(self._together.nbytes)

    @property
    def finite(self) -> bool:
        """Return whether this rank's outer gradients are finite. Causes a device sync."""
        return bool(self._together.isfinite().all())

    def send(self) -> None:
        """Start the exchange. Call this after all ranks have checked `finite`."""
        if self._codes is None:
            self._transfer = self._group.all_reduce(self._together)
        else:
            self._codes.send(self._given, [gradient.kept[ERROR] for _, gradient in self._flats])

    def end(self, mixing: float) -> Tensor:
        """Wait for the means, update the anchors, and set this rank's masters.

        On an error during the wait, the extra tensors stay unchanged.

        Args:
            mixing: Share of the own parameters that remains; 0 takes the anchor.

        Returns:
            () float64, the squared norm of the compression error.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._group.device)
        # Wait first: after an error nothing below has changed.
        means = self._means()
        self._group.traffic.buffers.add(-self._together.nbytes)
        for mean, missed, (flat, gradient) in zip(means, self._given, self._flats, strict=True):
            if self._codes is not None:
                # Padding must have no error: checkpoints do not store values of padding.
                for tensor in (mean, missed):
                    gradient.zero_gaps(tensor, gradient.own_range[0])
                gradient.kept[ERROR].copy_(missed)
                squares += torch.linalg.vector_norm(missed).double().square()
            self._update(gradient.kept, mean)
            # With mixing 0 the anchor replaces the parameters.
            flat.own_master.lerp_(gradient.kept[ANCHOR], 1 - mixing)
        return squares

    def give_up(self, *, wait: bool) -> None:
        """Drop a meeting.

        Args:
            wait: Wait for its transfer, because peers that are still connected read this rank's buffer.
        """
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
        """Apply the outer update to an anchor. `mean`, the outer gradient, is overwritten."""
        outer = self._outer
        if outer.momentum:
            momentum = kept[MOMENTUM].mul_(outer.momentum).add_(mean)
            mean = mean.add_(momentum, alpha=outer.momentum) if outer.nesterov else momentum
        kept[ANCHOR].add_(mean, alpha=-outer.lr)


def partition_size(flat: FlatParam) -> int:
    """Return the number of elements of a rank's partition.

    Args:
        flat: The flat parameter.
    """
    return flat.end - flat.start


def island_buffer(group: Group, numel: int) -> Tensor:
    """Return a zeroed buffer for reductions over the islands.

    Args:
        group: The same rank in all islands.
        numel: Least number of elements.

    Returns:
        (n,) float32, padded to a multiple that the group reduces fastest.
    """
    return group.empty(padded_numel(numel, group.size), torch.float32).zero_()


def pieces_of(together: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split the beginning of a tensor.

    Args:
        together: (n,) tensor.
        sizes: Number of elements of each piece.

    Returns:
        Views of consecutive ranges.
    """
    return list(together[: sum(sizes)].split(list(sizes)))


def sum_bytes(group: Group, numel: int) -> float:
    """Return the bytes that a rank sends in a float32 sum over the islands.

    Args:
        group: The same rank in all islands.
        numel: Number of elements.
    """
    return 2 * (group.size - 1) * numel * _FLOAT32 / group.size


class DiLoCo:
    """The meetings of this rank's island with the other islands. With one island nothing is exchanged or stored."""

    def __init__(
        self, optimizer: PartitionedOptimizer, mesh: Mesh, outer: OuterConfig, *, before_change: Callable[[], None]
    ) -> None:
        """Take the present parameters as the anchor. Collective with several islands.

        Args:
            optimizer: The optimizer over this rank's partitions.
            mesh: The process groups.
            outer: The settings of the outer optimizer.
            before_change: Called on all ranks before parameters change.

        Raises:
            ConfigError: On all ranks, if a parameter is not trained in float32.
        """
        self.group, self.index = mesh["islands"], mesh["islands"].index
        self.several = self.group.size > 1
        self._optimizer, self._everyone, self._outer = optimizer, mesh.everyone, outer
        self._before_change = before_change
        self._reported: dict[str, float | Tensor] = {}
        self._under_way: dict[int, tuple[int, OuterStep]] = {}
        """By fragment: the step after which its meeting ends, and the meeting.

        Meetings end in the order in which they began, which is the order of this dict: transfers count the reads of
        peers.
        """
        self._cut = False
        """Whether pending meetings have lost their connections."""
        self.replicas_differ = False
        """Whether parameters or moments may differ between islands."""
        self._fresh = True
        """Whether there was no update after the anchor was set."""
        if self.several:
            problem = next(filter(None, self._everyone.collect(self._too_wide())), "")
            if problem:
                raise ConfigError(problem)
            self.begin_again()

    def _too_wide(self) -> str:
        """Return the problem with this rank's parameters, "" without one.

        Other ranks may have other pipeline stages.
        """
        for flat in self._optimizer.flats:
            if flat.master.dtype is not torch.float32:
                return (
                    f"parallel.islands {self.group.size}: {flat.slots[0].name} is trained in {flat.master.dtype}, and "
                    "islands meet in float32; make the model in float32, or set parallel.islands to 1"
                )
        return ""

    @property
    def kept(self) -> Mapping[str, StatePlacement]:
        """Return the extra tensors per gradient, which checkpoints contain too."""
        return kept_by_diloco(self._outer, self.group.size) or {}

    @torch.no_grad()
    def begin_again(self) -> None:
        """Take the present parameters, equal in all islands, as the anchor, and drop all other state."""
        self.give_up()
        self.replicas_differ = False
        for flat, gradient in self._with_gradients() if self.several else ():
            gradient.forget_kept()
            gradient.kept[ANCHOR].copy_(flat.own_master)
        self._fresh = True

    def anchored(self) -> None:
        """Record that a checkpoint brought the anchor together with the parameters."""
        self._fresh = False

    @torch.no_grad()
    def before_update(self) -> None:
        """Set the anchor again before the first update, because the caller may have loaded pretrained parameters."""
        for flat, gradient in self._with_gradients() if self.several and self._fresh else ():
            gradient.kept[ANCHOR].copy_(flat.own_master)
        self._fresh = False

    def give_up(self) -> None:
        """Drop pending meetings, whose parameters are gone. Collective, unless peers are lost."""
        pending, self._under_way = list(self._under_way.values()), {}
        for _, meeting in pending:
            try:
                meeting.give_up(wait=not self._cut)
            except PeerLost:
                self._cut = True

    def disconnect(self) -> None:
        """Mark connections as lost: pending meetings keep their memory until `reconnect`."""
        self._cut = True

    def reconnect(self) -> None:
        """Drop pending meetings and use new connections."""
        self.disconnect()  # The old connections are gone, even without a disconnect on this rank.
        self.give_up()
        self._cut = False

    @torch.no_grad()
    def stepped(self, step: int) -> None:
        """End and begin the meetings that are due after an update. Collective then.

        Args:
            step: Number of the step, from 1.

        Raises:
            NonFiniteError: On all ranks, if parameters of an island are not finite.
        """
        if not self.several:
            return
        self.replicas_differ = True
        outer, flats = self._outer, self._optimizer.flats
        # Steps until each fragment's meeting; fragments are spread evenly over `every_steps`.
        waits = [
            (-step - outer.every_steps * number // outer.fragments) % outer.every_steps for number in self._numbers
        ]
        self._reported = {"met": 0.0, "steps_to_meeting": min(wait or outer.every_steps for wait in waits)}
        self._reported |= {"sent_bytes": 0.0, "float32_bytes": sum_bytes(self.group, sum(map(partition_size, flats)))}
        self._end([number for number, (end, _) in self._under_way.items() if end == step])
        # Without a delay these meetings end below, in the same step.
        for number in (number for number, wait in enumerate(waits) if wait == 0):
            self._begin(number, step)
        self._end([number for number, (end, _) in self._under_way.items() if end == step])

    def reported(self) -> dict[str, float]:
        """Return figures of meetings for the record of the step that has just ended.

        - met: 0 or 1.
        - steps_to_meeting: steps to the next meeting.
        - sent_bytes: bytes sent to other islands.
        - float32_bytes: bytes that float32 sums of gradients would have sent in this step.
        - error_norm: compression error of this rank, only after a compressed meeting.
        """
        return {name: float(value) for name, value in self._reported.items()}

    # ---- meetings ----------------------------------------------------------------------------------------------------

    @property
    def _numbers(self) -> range:
        return range(self._outer.fragments)

    def _begin(self, number: int, step: int) -> None:  # 1
        outer = self._outer
        meeting = OuterStep(self.group, self._with_gradients()[number :: outer.fragments], outer)
        self._refuse_non_finite(meeting, step)
        meeting.send()
        self._reported["sent_bytes"] += meeting.sent_bytes
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
        self._reported["met"] = 1.0
        if self._outer.compression != "none":
            self._reported["error_norm"] = squares.sqrt()

    def _refuse_non_finite(self, meeting: OuterStep, step: int) -> None:
        """Raise before a non-finite value enters momentum or feedback, because it would remain there."""
        counts = torch.zeros(self.group.size, dtype=torch.float64)
        # One slot per island, so that the sum shows which islands are not finite.
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

    # ---- average replicas --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_replicas(self) -> None:
        """End pending meetings, and give all islands the mean of their parameters and moments. Collective."""
        self._before_change()
        self._end(list(self._under_way))
        for flat in self._optimizer.flats:
            with self._optimizer.visit(flat, changed=True):
                states = [flat.master, *(state for _, state in sorted(self._optimizer.states_of(flat).items()))]
                low = flat.state_range[0]
                own = [state[flat.start - low : flat.end - low] for state in states]
                # One message for masters and moments.
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
        self.replicas_differ = False

    @staticmethod
    def _publish(flats: Iterable[FlatParam]) -> None:
        """Copy this rank's partition of the masters to the masters and parameters of its island."""
        for flat in flats:
            _whole(flat, flat.master)
            sent = flat.publish()
            if sent is not None:
                sent.wait()

    def _with_gradients(self) -> list[tuple[FlatParam, Gradient]]:
        return list(zip(self._optimizer.flats, self._optimizer.gradients, strict=True))


def _whole(flat: FlatParam, state: Tensor) -> None:
    """If every rank of the island has whole states, gather the state from the partitions."""
    if flat.state_range == (0, flat.padded) and flat.gather_group.size > 1:
        flat.gather_group.all_gather(state, state[flat.start : flat.end]).wait()
        flat.gather_group.wait_until_all_read()

"""Flats: the classes of equal rows of the placement table, each end to end in one piece of memory.

Where the states of a flat lie: room for them where its zero_policy says, and the way there when that changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cuda_ops.blockwise8 import BLOCK as CODES
from cuda_ops.stochastic import round_stochastically
from speedlab.comm import CodedGathers, Group, MappedShards
from speedlab.layout import padded_numel, partition_range
from speedlab.offload import OffloadedState, OffloadedTensor, RepinnableTensor, StoreRegistry, visit
from speedlab.parallel.zero.comm_groups import (
    CODECS,
    ReadThenGathered,
    SecondaryPartition,
    TakenBySecondary,
    Work,
    ZeroCommGroups,
)
from speedlab.parallel.zero.gradient import Gradient, gradient_of
from speedlab.parallel.zero.param_slot import ParamSlot, lay_out, refuse_shape
from speedlab.parallel.zero.param_views import ParamViews
from speedlab.placement import EIGHT_BITS, MemoryKind, ParamPlacement, Replication, ZeroPolicy


class FlatParamStates:
    """The states of one flat, by name: "parameter", "master", an optimizer's own for moments.

    One that simply lies on the device is a tensor, and its owner's. One that *comes*, because it lies away from the
    device or is coded there, is in `away`, and has values during a visit only.
    """

    def __init__(self, stores: StoreRegistry, group: Group, *, padded: int, coded: bool) -> None:
        """`stores`: the places beside the device. `group`: over which the flat's `padded` elements are partitioned.
        `coded`: whether moments are kept in blocks of 8 bits."""
        self._stores, self._group, self._padded, self._coded = stores, group, padded, coded
        self._start, self._end = partition_range(padded, group.size, group.index)
        self.zero_policy = ZeroPolicy.of_stage(0, 1)
        self.offloaded: dict[str, OffloadedTensor] = {}

    @property
    def range(self) -> tuple[int, int]:
        """[start, end) of the flat for which this rank holds master weights and moments."""
        if self.zero_policy.optimizer_states is Replication.PARTITIONED:
            return self._start, self._end
        return 0, self._padded

    def comes(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a state of this name and dtype has values during a visit only."""
        return self.zero_policy.place_of(name) is not MemoryKind.DEVICE or self._is_coded(name, dtype)

    def _is_coded(self, name: str, dtype: torch.dtype) -> bool:
        return self._coded and name not in ("parameter", "master") and dtype is torch.float32

    def room(self, name: str, dtype: torch.dtype) -> Tensor:
        """A new state over the present `range`, zeros, where optimizer states lie."""
        low, high = self.range
        if not self.comes(name, dtype):
            return torch.zeros(high - low, dtype=dtype, device=self._group.device)
        return self._keep(name, high - low, dtype).tensor

    def _keep(self, name: str, numel: int, dtype: torch.dtype) -> OffloadedTensor:
        """Room for a state that comes."""
        where = self.zero_policy.place_of(name)

        def keep() -> OffloadedState:
            if self._is_coded(name, dtype):
                return self._stores.eight_bits(name, numel, where)
            return self._stores.of(where).keep(numel, dtype)

        self.offloaded[name] = OffloadedTensor(keep)
        return self.offloaded[name]

    def widen(self, narrow: Tensor) -> Tensor:
        """What stands for the masters of parameters that have none, of the `narrow` parameters over `range`."""
        kept = self._stores.widened(narrow, self.zero_policy.states_at)
        self.offloaded["master"] = OffloadedTensor(lambda: kept)
        return self.offloaded["master"].tensor

    def put(self, name: str, values: Tensor) -> Tensor:
        """`values` of a state in memory of their own, where the zero_policy has it."""
        if self.comes(name, values.dtype):
            state = self._keep(name, values.numel(), values.dtype)
            state.kept.write(values.contiguous()).wait()
            return state.tensor
        if name == "parameter":  # Where peers read it.
            return self._group.empty(values.numel(), values.dtype, place=self._start).copy_(values)
        return torch.empty_like(values, device=self._group.device).copy_(values)

    def moved(self, name: str, state: Tensor, before: ZeroPolicy) -> Tensor:
        """A state over the `range` of `before`, where it was then, as one over the present range (cut, gathered or as
        it was), where it is now. Collective when it comes together."""
        was, now = before.optimizer_states, self.zero_policy.optimizer_states
        if was is now and before.states_at is self.zero_policy.states_at:
            return state
        old = self.offloaded.get(name)
        with visit([old] if old is not None else []):
            if was is now:
                moved = state
            elif now is Replication.PARTITIONED:
                moved = state[self._start : self._end]
            else:
                moved = torch.empty(self._padded, dtype=state.dtype, device=state.device)
                self._group.all_gather(moved, state).wait()
            own = self.put(name, moved)
        if old is not None:
            self.drop(name, old)
        return own

    def drop(self, name: str, state: OffloadedTensor | None = None) -> None:
        """Give up what lay away: a `state` that has gone elsewhere, or the present one of that name."""
        state = state or self.offloaded.get(name)
        if state is not None:
            state.kept.drop()
            if self.offloaded.get(name) is state:
                del self.offloaded[name]


_ALIGNMENT_BYTES = 16
"""Parameters start at multiples of this inside a flat: matrix kernels on GPUs need it."""


class FlatParam:
    """The parameters of one unit that share a dtype and whether they train, with their float32 master and `gradient`.

    | tensor     | parameters stay (`ZeroPolicy`)   | parameters come: partitioned, or away              |
    |------------|---------------------------------|----------------------------------------------------|
    | `shard`    | this rank's slice of `full`     | memory of its own, or what stands for it           |
    | `full`     | always there                    | without memory unless gathered (`RepinnableTensor`)          |
    | `master`   | float32 of the whole or of the partition, as optimizer states are; shares memory with       |
    |            | `full` or `shard` when the parameters are float32 (or wider) themselves; where narrow ones  |
    |            | have none, it is them, widened for a visit                                                  |

    What does not lie on the device, or is coded there, is in `away`, by its name ("parameter", "master", an optimizer's
    own for moments); `shard`, `master` and moments then have values during a visit only.

    Parameters are views of `full`, whose Storage stays the same object when it is released and gathered again: tensors
    that autograd saved (a transposed weight, say) then see the gathered values. What a released parameter shows is in
    `ParamViews`.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[ParamPlacement],
        parameters: Mapping[str, nn.Parameter],
        *,
        ways: ZeroCommGroups,
        axes: Mapping[str, Group],
        stores: StoreRegistry,
        alike: Group | None = None,
    ) -> None:
        """`rows`: of one class of the placement table, in the order in which their parameters shall lie; `parameters`:
        by full name. `ways`: the groups they travel over. `axes`: the groups over which a gradient is summed before
        each reduction, by the names in `summed_over`. `stores`: the places beside the device. `alike`: all ranks that
        begin with the same values, where those of the gather group are not all.

        Rank 0's values count. Collective.
        """
        first, group = rows[0], ways.gather
        self.name, self.trainable = name, first.trainable
        self._form = first.states["parameter"].form
        self.dtype = dtype = getattr(torch, self._form)
        self._narrow = trainable_in_low_precision(dtype) and self.trainable
        self._rounded = self._narrow and "master" not in first.states
        """Whether there are no masters beside the parameters, which are rounded stochastically."""
        self._coded = self.trainable and first.states["moments"].form == EIGHT_BITS
        """Whether moments are kept in blocks of 8 bits."""
        self.gather_group, self._ways, self._stores = group, ways, stores
        self.buffers = group.traffic.buffers
        self.parameters: list[nn.Parameter] = [parameters[row.name] for row in rows]
        step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
        self.slots: list[ParamSlot] = lay_out(rows, [parameter.shape for parameter in self.parameters], step)
        self.numel = self.slots[-1].offset + self.slots[-1].numel
        self.padded = padded_numel(self.numel, group.size * (CODES if self._coded else step))
        self.start, self.end = partition_range(self.padded, group.size, group.index)
        self.states = FlatParamStates(stores, group, padded=self.padded, coded=self._coded)
        """Where its states lie."""
        self.full = self._new_full()
        self._coming: RepinnableTensor | MappedShards | None = None
        """Whose tensor `full` is, where parameters come."""
        self._joins = False
        """Whether that is a `MappedShards` one, where the link between the ranks has such."""
        self.master: Tensor = self.full
        self._take_values(alike or group)
        self._sent = ""
        """As what it is gathered, where that is a codec's."""
        self.gathering = ways.gathering(self._sent)
        self.secondary: SecondaryPartition | None = None
        """A second partition, where parameters have one."""
        self._shown = ParamViews(self.parameters, self.slots, dtype, group.device)
        self._shown.use_unsharded_views(self.full)
        self._shown.count_from_now()
        self.shard = self.full[self.start : self.end]
        self.gradient: Gradient | None = None
        """None when the flat does not train."""
        if self.trainable:
            self.gradient = gradient_of(
                rows, self.slots, padded=self.padded, partition=(self.start, self.end), ways=ways, axes=axes
            )
        self.ahead = False
        """Whether masters are, or become, an update newer than the parameters."""

    def _take_values(self, alike: Group) -> None:
        """The parameters' values, as the group's first rank has them, are the masters' and those of `full`."""
        if self._narrow:
            # Made from the values given, before they are rounded to the compute dtype.
            self.master = torch.zeros(self.padded, dtype=torch.float32, device=self.gather_group.device)
        for parameter, slot in zip(self.parameters, self.slots, strict=True):
            with torch.no_grad():
                self.master[slot.range].view(slot.shape).copy_(parameter)
        alike.broadcast(self.master)
        if self._narrow:
            self.full.copy_(self.master)

    # ---- the ZeRO policy --------------------------------------------------------------------------------------------

    @property
    def zero_policy(self) -> ZeroPolicy:
        """Where its states are now."""
        return self.states.zero_policy

    @property
    def state_range(self) -> tuple[int, int]:
        """[start, end) of the flat for which this rank holds master weights and moments."""
        return self.states.range

    @property
    def offloaded(self) -> dict[str, OffloadedTensor]:
        """What does not lie on the device, or is coded there, by name."""
        return self.states.offloaded

    @property
    def own_master(self) -> Tensor:
        """The masters of this rank's partition, at every stage; of what lies away, during a visit."""
        low = self.state_range[0]
        return self.master[self.start - low : self.end - low]

    @property
    def lies_away(self) -> bool:
        """Whether some of its states lie away from the device, or are coded there."""
        at_home = self.zero_policy.states_at is self.zero_policy.parameters_at is MemoryKind.DEVICE
        return not at_home or self._rounded or self._coded

    @property
    def gathered(self) -> bool:
        """Whether `full` holds memory now."""
        return self._coming is None or self._coming.here

    @property
    def _own_master(self) -> bool:
        """Whether the master is something else than the parameters' memory."""
        return self._narrow or (self.trainable and self.zero_policy.separate_masters)

    @torch.no_grad()
    def place(self, zero_policy: ZeroPolicy) -> None:
        """Move this rank's part of the flat to where `zero_policy` says. Between two steps only; gathers wait for all
        ranks.

        1. Parameters come together, are cut, or change their place; those that a codec has rounded are made anew.
        2. Masters are cut, come together, or change their place.
        3. Gradients are allocated anew.
        4. Parameters that are sent otherwise from now on, and stay, are sent.
        """
        if self.rounded:  # 1
            self._narrow_down(self.shard, 0)
            self.gather_group.all_gather(self.full, self.shard).wait()
        before, had_own = self.zero_policy, self._own_master
        self.states.zero_policy = zero_policy
        # What is frozen and stays on every rank travels once, as it is.
        travels = self.trainable or zero_policy.params_unsharded_on_demand
        self._sent = zero_policy.sent_as("parameter", self._form) if travels else ""
        self.gathering = self._ways.gathering(self._sent)
        moved = (before.parameters, before.parameters_at) != (zero_policy.parameters, zero_policy.parameters_at)
        joined_before, self._joins = self._joins, zero_policy.shards_stay
        if moved or self._joins is not joined_before:  # 1
            self._place_parameters(before)
        if self._rounded:  # 2
            narrow = self.narrow
            assert narrow is not None  # A master is something else, see `_own_master`.
            self.master = self.states.widen(narrow)
        elif self._own_master:
            low, high = self.state_range
            if had_own:
                self.master = self.states.moved("master", self.master, before)
            else:  # It has the parameters' values, which are this rank's part where they come.
                with visit([self.offloaded["parameter"]] if "parameter" in self.offloaded else []):
                    values = self.shard if zero_policy.params_unsharded_on_demand else self.full[low:high]
                    self.master = self.states.put("master", values)
        else:
            if had_own:
                self.states.drop("master")
            partitioned = zero_policy.optimizer_states is Replication.PARTITIONED
            self.master = self.shard if partitioned or zero_policy.params_unsharded_on_demand else self.full
        if self.gradient is not None:
            self.gradient.place(zero_policy, self._stores)  # 3
        if self.rounded and (sent := self.publish()) is not None:  # 4
            sent.wait()

    @property
    def rounded(self) -> bool:
        """Whether parameters that stay are what came of a codec, other values than their masters."""
        return bool(self._sent) and not self.zero_policy.params_unsharded_on_demand

    def _place_parameters(self, before: ZeroPolicy) -> None:
        """Parameters go from where they were `before` to where they shall be now."""
        old = self.offloaded.get("parameter")
        with visit([] if old is None else [old]):
            if self.zero_policy.params_unsharded_on_demand:
                self.shard = self.states.put("parameter", self.shard)
                self._coming = self._room()
                self.full = self._coming.tensor
            else:
                self.full, self._coming = self._new_full(), None
                if before.parameters is Replication.PARTITIONED:
                    self.gather_group.all_gather(self.full, self.shard.to(self.full.device)).wait()
                else:
                    self.full.copy_(self.shard)
                self.shard = self.full[self.start : self.end]
        if old is not None:
            self.states.drop("parameter", old)
        self.secondary = None
        if self.zero_policy.secondary_ranks:
            assert self._ways.secondary is not None  # Made where the configuration asks for it.
            self.secondary = SecondaryPartition(self._ways.secondary, self.padded, self.dtype)
        if self.zero_policy.params_unsharded_on_demand:
            self._shown.use_placeholder_views()
        else:
            self._shown.use_unsharded_views(self.full)

    def _room(self) -> RepinnableTensor | MappedShards:
        """For parameters that come. Not where peers read: it is emptied and filled, or mapped."""
        group = self.gather_group
        joined = group.joined(self.padded, self.dtype) if self._joins else None
        return joined or self._stores.pages.room(self.padded, self.dtype, group.device)

    @property
    def is_used_in_place(self) -> bool:
        """Whether peers may use this rank's shard where it lies, whatever this one does with theirs."""
        return self._joins

    # ---- parameters --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> Work:
        """Start to fill `full` from all shards. Parameters that come only."""
        self.take_changes()
        assert self._coming is not None  # Parameters come.
        self._coming.materialize()
        self._shown.use_unsharded_views(self.full)
        self.buffers.add(self.full.nbytes)
        try:
            away, secondary = self.offloaded.get("parameter"), self.secondary
            if away is not None:
                own = self.full[self.start : self.end]
                return ReadThenGathered(away.kept.read(own), self.gathering, self.full, own)
            if secondary is not None and secondary.fresh:
                return secondary.gather(self.full, in_place_of=self.gather_group)
            if isinstance(self._coming, MappedShards):
                return self.gather_group.join(self._coming, self.shard)
            gather = self.gathering.all_gather(self.full, self.shard)
            return gather if secondary is None else TakenBySecondary(gather, secondary, self.full)
        except BaseException:
            self.release()  # Nothing is on its way.
            raise

    def offer(self) -> None:
        """Announce what the next gather takes of this rank, as `Group.offer`."""
        if self.secondary is not None and self.secondary.fresh:
            self.secondary.group.offer([self.secondary.shard])
        else:
            self.gathering.offer([self.shard])

    def all_read(self) -> None:
        """Peers need nothing more of what was offered."""
        if isinstance(self.gathering, CodedGathers):
            self.gathering.all_read()

    def invalidate(self) -> None:
        """What ranks hold beside their shards is of other parameters, or not of all ranks."""
        if self.secondary is not None:
            self.secondary.fresh = False

    @property
    def at_hand(self) -> bool:
        """Whether parameters that lie on disk are gathered on the host, from where they need not be read again."""
        on_disk = self.zero_policy.parameters_at is MemoryKind.DISK and not self._sent
        return on_disk and self.gathered and self.full.device.type == "cpu"

    def take_gathered(self) -> None:
        """Give `shard`, which is visited, the values of its part of `full`."""
        self.shard.copy_(self.full[self.start : self.end])

    def release(self) -> None:
        """Free `full`; only the partition stays. Parameters that come only."""
        self.buffers.add(-self.full.nbytes)
        self._shown.use_placeholder_views()
        assert self._coming is not None  # Parameters come.
        self._coming.free()

    def _new_full(self) -> Tensor:
        """Memory for the whole, in which peers may read this rank's slice."""
        return self.gather_group.empty(self.padded, self.dtype).zero_()

    @torch.no_grad()
    def take_changes(self) -> None:
        """What the caller has written into parameters, or put in their place (`.data`), are their values from now on,
        the masters' too. Call before masters are read.

        Writes through `parameter.data` to values narrower than their masters cannot be seen, and are lost, as all are
        while an update is under way (`ahead`).
        Raises RuntimeError for a partitioned parameter, where the values were written to nowhere.
        """
        replaced, changed = False, list[tuple[slice, Tensor]]()
        written = set(self._shown.written())
        for index, (parameter, slot) in enumerate(zip(self.parameters, self.slots, strict=True)):
            if index not in written:
                continue
            if parameter.shape != slot.shape:
                refuse_shape(slot.name, slot.shape, parameter.shape)
            moved = self._shown.is_replaced(index)
            self._shown.told(index)  # Once: whoever destroys the engine then can.
            self._refuse_change(slot.name)
            replaced = replaced or moved
            if self.ahead:  # Values that come take its place, of which `TrainingState` tells.
                continue
            value = parameter.detach().reshape(-1)
            if moved:
                self.full[slot.range].copy_(value)
            changed.append((slot.range, value))
        if self._own_master and changed:
            self._change_masters(changed)
        if replaced:
            self._shown.use_unsharded_views(self.full)

    def refuse_old_graphs(self) -> None:
        """Parameters that stay are about to change, by more than what the caller wrote: see `ParamViews`. (Graphs of
        those that come are refused by their saved tensors.)"""
        if self.trainable and not self.zero_policy.params_unsharded_on_demand:
            self._shown.refuse_old_graphs()

    def _refuse_change(self, name: str) -> None:
        if self.zero_policy.params_unsharded_on_demand:
            lies = "partitioned" if self.zero_policy.parameters is Replication.PARTITIONED else "away from the device"
            raise RuntimeError(
                f"{name} was changed while it is {lies}, where the change has no effect; change it before initialize, "
                "or at a ZeRO stage below 3"
            )

    def written(self) -> list[str]:
        """Names of the parameters that `take_changes` would take."""
        return [self.slots[index].name for index in self._shown.written()]

    def is_written(self, index: int) -> bool:
        return self._shown.is_written(index)

    def _change_masters(self, changed: Sequence[tuple[slice, Tensor]]) -> None:
        """Elements that show something else than the value they are given take it, the others keep all their bits."""
        low, high = self.state_range
        with visit(self._master_away, changed=True):
            shown = self.master.to(self.dtype)
            if self.rounded:
                shown = CodedGathers.shown(CODECS[self._sent], shown)
            for here, value in changed:
                start, stop = max(here.start, low), min(here.stop, high)
                if start < stop:
                    own = slice(start - low, stop - low)
                    new = value[start - here.start : stop - here.start].to(self.master.device)
                    same = shown[own] == new.to(self.dtype)
                    self.master[own] = torch.where(same, self.master[own], new.to(self.master.dtype))

    @property
    def _master_away(self) -> list[OffloadedTensor]:
        """What a visit of the masters visits, parameters first where they are made of these."""
        names = ["parameter", "master"] if self._rounded else ["master" if self._own_master else "parameter"]
        return [self.offloaded[name] for name in names if name in self.offloaded]

    @property
    def lasting_master(self) -> Tensor:
        """The masters, or the parameters where there are none beside them: what a checkpoint keeps."""
        narrow = self.narrow if self._rounded else None
        return self.master if narrow is None else narrow

    def kept(self, state: str) -> OffloadedState | None:
        """What keeps `lasting_master` ("master") or an optimizer's state away from the device, or coded there; None
        where it simply lies there."""
        if state == "master" and (self._rounded or not self._own_master):
            state = "parameter"
        return self.offloaded[state].kept if state in self.offloaded else None

    def whole_master(self) -> Tensor:
        """The master values whole, on every rank. Collective where they are partitioned."""
        self.take_changes()
        away = self._master_away
        with visit(away):
            if self.zero_policy.optimizer_states is Replication.REPLICATED:
                return self.master.to(self.full.device, copy=True) if away else self.master
            whole = torch.empty(self.padded, dtype=self.master.dtype, device=self.full.device)
            self.gather_group.all_gather(whole, self.master.to(self.full.device)).wait()
            return whole

    @torch.no_grad()
    def give_back(self) -> None:
        """Give every parameter memory of its own with its whole master value. Collective where they are partitioned."""
        whole = self.whole_master()
        self._shown.show([whole[slot.range].view(slot.shape).clone() for slot in self.slots])

    @property
    def narrow(self) -> Tensor | None:
        """The parameters of `state_range` in the compute dtype, where masters are apart."""
        if not self._own_master:
            return None
        cut = (
            self.zero_policy.optimizer_states is Replication.PARTITIONED or self.zero_policy.params_unsharded_on_demand
        )
        return self.shard if cut else self.full

    @torch.no_grad()
    def publish(self, *, copied: bool = False, update: int = 0) -> Work | None:
        """After an update of `master`: bring the parameters of all ranks up to date. None when nothing has to be sent.

        `copied`: `narrow` holds the new values already. `update`: its number, for what is rounded at random; values
        that parameters hold as they are stay, whatever it is. What lies away has to be visited.
        """
        narrow = self.narrow
        if narrow is not None and (self.rounded or not copied):
            if narrow.device == self.master.device:
                self._narrow_down(narrow, update)
            else:
                made = torch.empty(narrow.numel(), dtype=narrow.dtype, pin_memory=narrow.is_cuda)
                self._narrow_down(made, update)
                self._stores.copies.to_device(made, narrow).wait()
        if (
            self.zero_policy.optimizer_states is Replication.PARTITIONED
            and not self.zero_policy.params_unsharded_on_demand
        ):
            return self.gathering.all_gather(self.full, self.shard)
        return None

    def _narrow_down(self, out: Tensor, update: int) -> None:
        """The masters in the parameters' dtype."""
        if not self._rounded:
            out.copy_(self.master)
            return
        # Another key for each flat; the same on all ranks that hold its parameters, of which each rounds elements by
        # their place in the whole.
        seed = zlib.crc32(self.slots[0].name.encode())
        round_stochastically(self.master, out, seed=seed, step=update, offset=self.state_range[0])

    @property
    def written_by_update(self) -> Tensor | None:
        """The narrow parameters, where a kernel that updates masters can write them on its way. (A codec puts others
        in the place of those that it sends, so that these are made of the masters each time.)"""
        narrow = None if self._rounded or self.rounded or self.zero_policy.grads_double_buffered else self.narrow
        return narrow if narrow is not None and narrow.device == self.master.device else None


def trainable_in_low_precision(dtype: torch.dtype) -> bool:
    """Whether parameters of this dtype need float32 master weights to be trained."""
    return dtype in (torch.float16, torch.bfloat16)

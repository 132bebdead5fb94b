"""Flat parameters: one FlatParam per class of equal rows of the placement table, and the memory of its states.

`FlatParam` owns the parameters of a unit as views of one flat tensor. `FlatParamStates` allocates each state in the
memory that the `ZeroPolicy` names, and moves states when the policy changes.
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
    PendingWork,
    ReadThenGathered,
    SecondaryPartition,
    TakenBySecondary,
    ZeroCommGroups,
)
from speedlab.parallel.zero.gradient import Gradient, gradient_of
from speedlab.parallel.zero.param_slot import ParamSlot, lay_out, refuse_shape
from speedlab.parallel.zero.param_views import ParamViews
from speedlab.placement import EIGHT_BITS, MemoryKind, ParamPlacement, Replication, ZeroPolicy


class FlatParamStates:
    """The states of one flat, by name: "parameter", "master", and the optimizer's names for moments.

    A state that stays on the device, uncoded, is a plain tensor that its user keeps. An offloaded or 8-bit state is in
    `offloaded`, and has values only during a visit.
    """

    def __init__(self, stores: StoreRegistry, group: Group, *, padded: int, coded: bool) -> None:
        """Create no memory yet.

        Args:
            stores: The host and disk stores.
            group: Ranks over which the flat is partitioned.
            padded: Elements of the flat, padding included.
            coded: Whether moments are kept in blocks of 8 bits.
        """
        self._stores, self._group, self._padded, self._coded = stores, group, padded, coded
        self._start, self._end = partition_range(padded, group.size, group.index)
        self.zero_policy = ZeroPolicy.of_stage(0, 1)
        self.offloaded: dict[str, OffloadedTensor] = {}

    @property
    def range(self) -> tuple[int, int]:
        """[start, end) of the flat for which this rank holds masters and moments."""
        if self.zero_policy.optimizer_states is Replication.PARTITIONED:
            return self._start, self._end
        return 0, self._padded

    def comes(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a state has values only during a visit: it is offloaded, or kept in 8 bits.

        Args:
            name: Name of the state.
            dtype: Its dtype during a visit.
        """
        return self.zero_policy.place_of(name) is not MemoryKind.DEVICE or self._is_coded(name, dtype)

    def _is_coded(self, name: str, dtype: torch.dtype) -> bool:
        return self._coded and name not in ("parameter", "master") and dtype is torch.float32

    def room(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a new state of zeros over `range`, in the memory of optimizer states.

        Args:
            name: Name of the state.
            dtype: Its dtype during a visit.

        Returns:
            A tensor (end - start,); without values until a visit if the state is offloaded or coded.
        """
        low, high = self.range
        if not self.comes(name, dtype):
            return torch.zeros(high - low, dtype=dtype, device=self._group.device)
        return self._keep(name, high - low, dtype).tensor

    def _keep(self, name: str, numel: int, dtype: torch.dtype) -> OffloadedTensor:
        """Allocate an offloaded or coded state."""
        where = self.zero_policy.place_of(name)

        def keep() -> OffloadedState:
            if self._is_coded(name, dtype):
                return self._stores.eight_bits(name, numel, where)
            return self._stores.of(where).keep(numel, dtype)

        self.offloaded[name] = OffloadedTensor(keep)
        return self.offloaded[name]

    def widen(self, narrow: Tensor) -> Tensor:
        """Return masters that are computed from low-precision parameters during each visit.

        Args:
            narrow: The parameters over `range`, in the compute dtype.
        """
        kept = self._stores.widened(narrow, self.zero_policy.states_at)
        self.offloaded["master"] = OffloadedTensor(lambda: kept)
        return self.offloaded["master"].tensor

    def put(self, name: str, values: Tensor) -> Tensor:
        """Return a copy of a state in the memory that the policy names.

        Args:
            name: Name of the state.
            values: Its values, 1-D.
        """
        if self.comes(name, values.dtype):
            state = self._keep(name, values.numel(), values.dtype)
            state.kept.write(values.contiguous()).wait()
            return state.tensor
        if name == "parameter":  # Peers read this memory, so the group allocates it.
            return self._group.empty(values.numel(), values.dtype, place=self._start).copy_(values)
        return torch.empty_like(values, device=self._group.device).copy_(values)

    def moved(self, name: str, state: Tensor, before: ZeroPolicy) -> Tensor:
        """Return a state over the current `range`, in its current memory. Collective if the state has to be gathered.

        Args:
            name: Name of the state.
            state: The state over the `range` of `before`.
            before: The previous policy.
        """
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
        """Free an offloaded state.

        Args:
            name: Name of the state.
            state: An object that was replaced under this name; None: the current one.
        """
        state = state or self.offloaded.get(name)
        if state is not None:
            state.kept.drop()
            if self.offloaded.get(name) is state:
                del self.offloaded[name]


_ALIGNMENT_BYTES = 16
"""Offsets of parameters in a flat are multiples of this, because matrix kernels on GPUs need aligned addresses."""


class FlatParam:
    """The parameters of one unit that share dtype and trainability, with their float32 master and `gradient`.

    | tensor   | parameters stay on every rank    | parameters on demand: partitioned or offloaded        |
    |----------|----------------------------------|-------------------------------------------------------|
    | `shard`  | this rank's slice of `full`      | its own memory, or an offloaded tensor                |
    | `full`   | always has values                | no memory unless gathered (`RepinnableTensor`)        |

    `master` is float32, of the full flat or of the partition, like the other optimizer states:

    - It shares memory with `full` or `shard` if the parameters are float32 or wider.
    - Low-precision parameters may have no stored master; then each visit computes it from the parameters.

    States that are offloaded, or kept in 8 bits, are in `offloaded` under their names ("parameter", "master", the
    optimizer's names for moments). Then `shard`, `master` and moments have values only during a visit.

    Parameters are views of `full`. Its Storage object stays the same when `full` is released and gathered again. So
    tensors that autograd saved (a transposed weight, for example) see the gathered values. `ParamViews` says what a
    released parameter shows.
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
        """Create the flat with the values of rank 0. Collective.

        Args:
            name: Name of the flat.
            rows: Rows of one class of the placement table, in the order of their parameters in the flat.
            parameters: Parameters by full name.
            ways: The groups for gathers and reductions.
            axes: Groups over which gradients are summed before each reduction, by the names in `summed_over`.
            stores: The host and disk stores.
            alike: All ranks that start with the same values; None: the gather group.
        """
        first, group = rows[0], ways.gather
        self.name, self.trainable = name, first.trainable
        self._form = first.states["parameter"].form
        self.dtype = dtype = getattr(torch, self._form)
        self._narrow = trainable_in_low_precision(dtype) and self.trainable
        self._rounded = self._narrow and "master" not in first.states
        """Whether no masters are stored. Updates then round the parameters stochastically."""
        self._coded = self.trainable and first.states["moments"].form == EIGHT_BITS
        """Whether moments are kept in blocks of 8 bits."""
        self.gather_group, self._ways, self._stores = group, ways, stores
        self.buffers = group.traffic.buffers
        self.parameters: list[nn.Parameter] = [parameters[row.name] for row in rows]
        step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
        self.slots: list[ParamSlot] = lay_out(rows, [parameter.shape for parameter in self.parameters], step)
        self.numel = self.slots[-1].offset + self.slots[-1].numel
        # So each partition starts aligned, and contains only full blocks of 8-bit states.
        self.padded = padded_numel(self.numel, group.size * (CODES if self._coded else step))
        self.start, self.end = partition_range(self.padded, group.size, group.index)
        self.states = FlatParamStates(stores, group, padded=self.padded, coded=self._coded)
        """Allocates and moves the states."""
        self.full = self._new_full()
        self._coming: RepinnableTensor | MappedShards | None = None
        """The owner of the memory of `full`, if parameters are gathered on demand."""
        self._joins = False
        """Whether parameters are gathered by mapping the peers' memory (`MappedShards`), if the link supports this."""
        self.master: Tensor = self.full
        self._take_values(alike or group)
        self._sent = ""
        """Codec of parameters in gathers; "" for none."""
        self.gathering = ways.gathering(self._sent)
        self.secondary: SecondaryPartition | None = None
        """The secondary partition, if the policy has one."""
        self._shown = ParamViews(self.parameters, self.slots, dtype, group.device)
        self._shown.use_unsharded_views(self.full)
        self._shown.count_from_now()
        self.shard = self.full[self.start : self.end]
        self.gradient: Gradient | None = None
        """None if the flat is frozen."""
        if self.trainable:
            self.gradient = gradient_of(
                rows, self.slots, padded=self.padded, partition=(self.start, self.end), ways=ways, axes=axes
            )
        self.ahead = False
        """Whether masters already have, or are getting, an update that the parameters do not have yet."""

    def _take_values(self, alike: Group) -> None:
        """Copy the parameters' values, from the first rank of the group, into `master` and `full`."""
        if self._narrow:
            # Masters keep the original values, before these are rounded to the compute dtype.
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
        """The current policy."""
        return self.states.zero_policy

    @property
    def state_range(self) -> tuple[int, int]:
        """[start, end) of the flat for which this rank holds masters and moments."""
        return self.states.range

    @property
    def offloaded(self) -> dict[str, OffloadedTensor]:
        """States that are offloaded or kept in 8 bits, by name."""
        return self.states.offloaded

    @property
    def own_master(self) -> Tensor:
        """Masters of this rank's partition, at every stage. If they are offloaded, only during a visit."""
        low = self.state_range[0]
        return self.master[self.start - low : self.end - low]

    @property
    def is_offloaded(self) -> bool:
        """Whether some states are offloaded or need decoding."""
        at_home = self.zero_policy.states_at is self.zero_policy.parameters_at is MemoryKind.DEVICE
        return not at_home or self._rounded or self._coded

    @property
    def gathered(self) -> bool:
        """Whether `full` has memory now."""
        return self._coming is None or self._coming.here

    @property
    def _own_master(self) -> bool:
        """Whether the master has memory of its own, separate from the parameters."""
        return self._narrow or (self.trainable and self.zero_policy.separate_masters)

    @torch.no_grad()
    def place(self, zero_policy: ZeroPolicy) -> None:
        """Move this rank's states to the memory and partition of a new policy. Call it between two steps only.
        Collective.

        1. Gather, partition, offload or fetch parameters. Recompute parameters that a codec has rounded.
        2. Gather, partition, offload or fetch masters.
        3. Allocate gradients again.
        4. Send parameters that stay on every rank, if they now use a codec.

        Args:
            zero_policy: The new policy.
        """
        if self.rounded:  # 1
            self._narrow_down(self.shard, 0)
            self.gather_group.all_gather(self.full, self.shard).wait()
        before, had_own = self.zero_policy, self._own_master
        self.states.zero_policy = zero_policy
        # Frozen parameters that stay on every rank are sent only once, so a codec would only lose bits.
        travels = self.trainable or zero_policy.params_unsharded_on_demand
        self._sent = zero_policy.sent_as("parameter", self._form) if travels else ""
        self.gathering = self._ways.gathering(self._sent)
        moved = (before.parameters, before.parameters_at) != (zero_policy.parameters, zero_policy.parameters_at)
        joined_before, self._joins = self._joins, zero_policy.shards_stay
        if moved or self._joins is not joined_before:  # 1
            self._place_parameters(before)
        if self._rounded:  # 2
            narrow = self.narrow
            assert narrow is not None  # `_own_master` is True for rounded parameters.
            self.master = self.states.widen(narrow)
        elif self._own_master:
            low, high = self.state_range
            if had_own:
                self.master = self.states.moved("master", self.master, before)
            # A new master starts with the parameters' values. On-demand parameters are already this rank's shard.
            else:
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
        """Whether parameters stay on every rank with values that a codec rounded. They then differ from their
        masters.
        """
        return bool(self._sent) and not self.zero_policy.params_unsharded_on_demand

    def _place_parameters(self, before: ZeroPolicy) -> None:
        """Move the parameters from their memory and partition under `before` to those of the current policy."""
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
            # The group exists if the configuration asks for secondary partitions.
            assert self._ways.secondary is not None
            self.secondary = SecondaryPartition(self._ways.secondary, self.padded, self.dtype)
        if self.zero_policy.params_unsharded_on_demand:
            self._shown.use_placeholder_views()
        else:
            self._shown.use_unsharded_views(self.full)

    def _room(self) -> RepinnableTensor | MappedShards:
        """Return memory for gathered parameters: a private buffer, or a mapping of the peers' shards. Peers never read
        it.
        """
        group = self.gather_group
        joined = group.joined(self.padded, self.dtype) if self._joins else None
        return joined or self._stores.pages.room(self.padded, self.dtype, group.device)

    @property
    def is_used_in_place(self) -> bool:
        """Whether peers read this rank's shard in place, without a copy."""
        return self._joins

    # ---- parameters --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> PendingWork:
        """Start to gather `full` from all shards. Only for parameters on demand.

        Returns:
            Pending work; `full` has its values after `wait`.

        Raises:
            RuntimeError: The caller changed a released parameter.
        """
        self.take_changes()
        assert self._coming is not None  # Parameters are on demand.
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
            self.release()  # No transfer is pending, so the memory can be freed.
            raise

    def offer(self) -> None:
        """Announce this rank's shard for the next gather; see `Group.offer`."""
        if self.secondary is not None and self.secondary.fresh:
            self.secondary.group.offer([self.secondary.shard])
        else:
            self.gathering.offer([self.shard])

    def all_read(self) -> None:
        """Free the coded copies of the offered shard, because all peers have read them."""
        if isinstance(self.gathering, CodedGathers):
            self.gathering.all_read()

    def invalidate(self) -> None:
        """Mark the secondary partition as stale: its values are of older parameters, or missing on some ranks."""
        if self.secondary is not None:
            self.secondary.fresh = False

    @property
    def at_hand(self) -> bool:
        """Whether parameters that are offloaded to disk are gathered in host memory now, so that reading the disk
        again is not necessary.
        """
        on_disk = self.zero_policy.parameters_at is MemoryKind.DISK and not self._sent
        return on_disk and self.gathered and self.full.device.type == "cpu"

    def take_gathered(self) -> None:
        """Copy this rank's part of `full` into `shard`. Call it during a visit of `shard`."""
        self.shard.copy_(self.full[self.start : self.end])

    def release(self) -> None:
        """Free `full`; only the shard remains. Only for parameters on demand."""
        self.buffers.add(-self.full.nbytes)
        self._shown.use_placeholder_views()
        assert self._coming is not None  # Parameters are on demand.
        self._coming.free()

    def _new_full(self) -> Tensor:
        """Return memory for the full flat. Peers may read this rank's slice of it."""
        return self.gather_group.empty(self.padded, self.dtype).zero_()

    @torch.no_grad()
    def take_changes(self) -> None:
        """Copy values that the caller wrote into parameters, or assigned through `.data`, into the masters. Call it
        before masters are read.

        Two kinds of changes are lost: in-place writes through `parameter.data` to low-precision parameters, because no
        version counter sees them; and all writes while an update is under way (`ahead`).

        Raises:
            RuntimeError: The caller changed the shape of a parameter, or wrote to a parameter whose values are
                partitioned or offloaded.
        """
        replaced, changed = False, list[tuple[slice, Tensor]]()
        written = set(self._shown.written())
        for index, (parameter, slot) in enumerate(zip(self.parameters, self.slots, strict=True)):
            if index not in written:
                continue
            if parameter.shape != slot.shape:
                refuse_shape(slot.name, slot.shape, parameter.shape)
            moved = self._shown.is_replaced(index)
            self._shown.reported(index)  # Raise only once, so that engine.destroy still works afterwards.
            self._refuse_change(slot.name)
            replaced = replaced or moved
            if self.ahead:  # The update under way overwrites these values; `TrainingState` reports the loss.
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
        """Invalidate autograd graphs that saved these parameters, before the engine changes the values. See
        `ParamViews`. Graphs of parameters on demand are refused by their saved tensors instead.
        """
        if self.trainable and not self.zero_policy.params_unsharded_on_demand:
            self._shown.refuse_old_graphs()

    def _refuse_change(self, name: str) -> None:
        if self.zero_policy.params_unsharded_on_demand:
            is_at = "partitioned" if self.zero_policy.parameters is Replication.PARTITIONED else "away from the device"
            raise RuntimeError(
                f"{name} was changed while it is {is_at}, where the change has no effect; change it before initialize, "
                "or at a ZeRO stage below 3"
            )

    def written(self) -> list[str]:
        """Return the names of the parameters that `take_changes` would copy."""
        return [self.slots[index].name for index in self._shown.written()]

    def is_written(self, index: int) -> bool:
        """Return whether the caller wrote to a parameter.

        Args:
            index: Index of the parameter in `slots`.
        """
        return self._shown.is_written(index)

    def _change_masters(self, changed: Sequence[tuple[slice, Tensor]]) -> None:
        """Copy new values into masters, but only for elements whose displayed value changed. Other elements keep all
        bits of their masters.
        """
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
                    # Compare what parameters show: the caller cannot see the other bits of a master.
                    same = shown[own] == new.to(self.dtype)
                    self.master[own] = torch.where(same, self.master[own], new.to(self.master.dtype))

    @property
    def _master_away(self) -> list[OffloadedTensor]:
        """The offloaded states that a visit of the masters needs. Parameters are first if masters are computed from
        them.
        """
        names = ["parameter", "master"] if self._rounded else ["master" if self._own_master else "parameter"]
        return [self.offloaded[name] for name in names if name in self.offloaded]

    @property
    def lasting_master(self) -> Tensor:
        """The values that a checkpoint stores: the masters, or the parameters if there are no masters."""
        narrow = self.narrow if self._rounded else None
        return self.master if narrow is None else narrow

    def kept(self, state: str) -> OffloadedState | None:
        """Return the store entry of `lasting_master` or of a moment; None if the state is a plain tensor on the
        device.

        Args:
            state: "master", or the optimizer's name of a moment.
        """
        if state == "master" and (self._rounded or not self._own_master):
            state = "parameter"
        return self.offloaded[state].kept if state in self.offloaded else None

    def whole_master(self) -> Tensor:
        """Return the full master values on every rank, (padded,). Collective if masters are partitioned."""
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
        """Replace every parameter's view by its own copy of the full master values. Collective if masters are
        partitioned.
        """
        whole = self.whole_master()
        self._shown.show([whole[slot.range].view(slot.shape).clone() for slot in self.slots])

    @property
    def narrow(self) -> Tensor | None:
        """Parameters over `state_range` in the compute dtype; None if the parameters are their own masters."""
        if not self._own_master:
            return None
        cut = (
            self.zero_policy.optimizer_states is Replication.PARTITIONED or self.zero_policy.params_unsharded_on_demand
        )
        return self.shard if cut else self.full

    @torch.no_grad()
    def publish(self, *, copied: bool = False, update: int = 0) -> PendingWork | None:
        """Copy updated masters to the parameters, and start the gather that updates the other ranks. Visit offloaded
        states before.

        Args:
            copied: Whether `narrow` already holds the new values.
            update: Number of the update; part of the random key of stochastic rounding. Values that are exact in the
                compute dtype do not depend on it.

        Returns:
            The pending gather; None if there is nothing to send.
        """
        narrow = self.narrow
        if narrow is not None and (self.rounded or not copied):
            if narrow.device == self.master.device:
                self._narrow_down(narrow, update)
            else:
                # The update ran on the host. Round there, so that fewer bytes are copied to the device.
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
        """Write the masters to `out` in the parameters' dtype."""
        if not self._rounded:
            out.copy_(self.master)
            return
        # Each flat has its own key. Ranks that hold shards of one flat use the same key, and random numbers depend on
        # the position in the full flat. So the result does not depend on the partition.
        seed = zlib.crc32(self.slots[0].name.encode())
        round_stochastically(self.master, out, seed=seed, step=update, offset=self.state_range[0])

    @property
    def written_by_update(self) -> Tensor | None:
        """Low-precision parameters that the update kernel can write directly; None if it cannot. Parameters that a
        codec replaces after a gather are always computed from the masters.
        """
        narrow = None if self._rounded or self.rounded or self.zero_policy.grads_double_buffered else self.narrow
        return narrow if narrow is not None and narrow.device == self.master.device else None


def trainable_in_low_precision(dtype: torch.dtype) -> bool:
    """Return whether parameters need float32 masters for training.

    Args:
        dtype: Dtype of the parameters.
    """
    return dtype in (torch.float16, torch.bfloat16)

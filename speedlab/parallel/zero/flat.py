"""Flats: the classes of equal rows of the placement table, each end to end in one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from speedlab.comm import Group, Transfer
from speedlab.layout import padded_numel, partition_range
from speedlab.parallel.zero.gradient import Gradient
from speedlab.parallel.zero.slot import Slot
from speedlab.placement import Holders, Residency, Row

_ALIGNMENT_BYTES = 16
"""Parameters start at multiples of this inside a flat: matrix kernels on GPUs need it."""


class Flat:
    """The parameters of one unit that share a dtype and whether they train, with their float32 master and `gradient`.

    | tensor     | replicated                      | partitioned                                        |
    |------------|---------------------------------|----------------------------------------------------|
    | `shard`    | this rank's slice of `full`     | memory of its own                                  |
    | `full`     | always there                    | storage of size 0 unless gathered                  |
    | `master`   | float32 of the whole or of the partition, as optimizer states are; shares memory with       |
    |            | `full` or `shard` when the parameters are float32 (or wider) themselves                     |

    Parameters are views of `full`, whose Storage stays the same object when it is released and filled again: tensors
    that autograd saved (a transposed weight, say) then see the gathered values. A released parameter shows NaN in its
    true shape, because torch would read memory that is not there.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Row],
        parameters: Mapping[str, nn.Parameter],
        *,
        gather_group: Group,
        reduce_group: Group,
        axes: Mapping[str, Group],
    ) -> None:
        """`rows`: of one class of the placement table, in the order in which their parameters shall lie; `parameters`:
        by full name. `axes`: the groups over which a gradient is summed before each reduction, by the names in
        `summed_over`.

        Rank 0's values count. Collective.
        """
        first = rows[0]
        self.name, self.trainable = name, first.trainable
        self.dtype = dtype = _dtype(first.states["parameter"].form)
        self.gather_group = gather_group
        self.buffers = gather_group.traffic.buffers
        self.parameters: list[nn.Parameter] = [parameters[row.name] for row in rows]
        self.slots: list[Slot] = []
        summed_first: dict[tuple[Group, ...], list[Slot]] = {}
        step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
        end = 0
        for row, parameter in zip(rows, self.parameters, strict=True):
            offset = padded_numel(end, step)
            slot = Slot(name=row.name, offset=offset, numel=parameter.numel(), shape=parameter.shape, group=row.group)
            self.slots.append(slot)
            groups = tuple(axes[axis] for axis in row.summed_over[:-1])
            if groups:
                summed_first.setdefault(groups, []).append(slot)
            end = offset + parameter.numel()
        self.numel = end
        self.padded = padded_numel(end, gather_group.size * step)
        self.start, self.end = partition_range(self.padded, gather_group.size, gather_group.index)
        self._own_master = "master" in first.states
        self.full = self._new_full()
        self.master: Tensor = self.full
        if self._own_master:
            # Made from the values given, before they are rounded to the compute dtype.
            self.master = torch.zeros(self.padded, dtype=torch.float32, device=gather_group.device)
        # What a released parameter shows: its true shape, and in the place of values NaN, in the memory of one element.
        nothing = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=gather_group.device)
        self._placeholders = [nothing.expand(slot.shape) for slot in self.slots]
        for parameter, slot in zip(self.parameters, self.slots, strict=True):
            with torch.no_grad():
                self.master[slot.range].view(slot.shape).copy_(parameter)
        gather_group.broadcast(self.master)
        if self._own_master:
            self.full.copy_(self.master)
        self._shown: list[Tensor] = []
        """What parameters are views of: of `full`, or placeholders."""
        self._show(self._views)
        self._versions = [parameter._version for parameter in self.parameters]
        """How often each was written to in place; by the caller, as nothing here writes to parameters."""
        self.shard = self.full[self.start : self.end]
        self.gradient: Gradient | None = None
        """None when the flat does not train."""
        if self.trainable:
            self.gradient = Gradient(
                self.slots,
                padded=self.padded,
                partition=(self.start, self.end),
                dtype=_dtype(first.states["gradient"].form),
                group=reduce_group,
                summed_first=summed_first,
                kept={state: _dtype(home.form) for state, home in first.states.items() if home.holders is Holders.OWN},
            )
        self.residency = Residency.of_stage(0, 1)

    # ---- residency ---------------------------------------------------------------------------------------------------

    @property
    def state_range(self) -> tuple[int, int]:
        """[start, end) of the flat for which this rank holds master weights and moments."""
        if self.residency.optimizer_states is Holders.PARTITIONED:
            return self.start, self.end
        return 0, self.padded

    @property
    def gathered(self) -> bool:
        """Whether `full` holds memory now."""
        return self.full.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def place(self, residency: Residency) -> None:
        """Move this rank's part of the flat to where `residency` says. Between two steps only; gathers wait for all
        ranks.

        1. Parameters come together when they were partitioned and shall be replicated.
        2. Masters are cut, or come together.
        3. Parameters are cut, and the whole is freed.
        4. Gradients are allocated anew.
        """
        before, self.residency = self.residency, residency
        was, now = before.parameters, residency.parameters
        if was is Holders.PARTITIONED and now is Holders.REPLICATED:  # 1
            self.full = self._new_full()
            self.gather_group.all_gather(self.full, self.shard).wait()
            self.shard = self.full[self.start : self.end]
            self._show(self._views)
        if self._own_master:  # 2
            self.master = self.move_state(self.master, before)
        if was is Holders.REPLICATED and now is Holders.PARTITIONED:  # 3
            self.shard = self.gather_group.empty(self.end - self.start, self.dtype).copy_(self.shard)
            self._show(self._placeholders)
            # Not where peers read it: its Storage must be one that can be emptied and filled.
            self.full = torch.empty(self.padded, dtype=self.dtype, device=self.full.device)
            self._free(self.full)
        if not self._own_master:
            partitioned = residency.optimizer_states is Holders.PARTITIONED
            self.master = self.shard if partitioned else self.full
        if self.gradient is not None:
            self.gradient.place(residency)  # 4

    def move_state(self, state: Tensor, before: Residency) -> Tensor:
        """A state tensor over the old `state_range`, as one over the present one (cut, gathered, or as it was)."""
        was, now = before.optimizer_states, self.residency.optimizer_states
        if was is now:
            return state
        if now is Holders.PARTITIONED:
            return state[self.start : self.end].clone()
        whole = torch.empty(self.padded, dtype=state.dtype, device=state.device)
        self.gather_group.all_gather(whole, state).wait()
        return whole

    # ---- parameters --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> Transfer:
        """Start to fill `full` from all shards. Partitioned parameters only."""
        self.take_changes()
        self._allocate(self.full)
        self._show(self._views)
        self.buffers.add(self.full.nbytes)
        return self.gather_group.all_gather(self.full, self.shard)

    def release(self) -> None:
        """Free `full`; only the partition stays. Partitioned parameters only."""
        self.buffers.add(-self.full.nbytes)
        self._show(self._placeholders)
        self._free(self.full)

    def _new_full(self) -> Tensor:
        """Memory for the whole, in which peers may read this rank's slice."""
        return self.gather_group.empty(self.padded, self.dtype).zero_()

    @property
    def _views(self) -> list[Tensor]:
        return [self.full[slot.range].view(slot.shape) for slot in self.slots]

    def _show(self, values: list[Tensor]) -> None:
        self._shown = values
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    @torch.no_grad()
    def take_changes(self) -> None:
        """What the caller has written into parameters, or put in their place (`.data`), are their values from now on,
        the masters' too. Call before masters are read.

        Writes through `parameter.data` to values narrower than their masters cannot be seen, and are lost.
        Raises RuntimeError for a partitioned parameter, where the values were written to nowhere.
        """
        replaced = False
        for index, (parameter, slot) in enumerate(zip(self.parameters, self.slots, strict=True)):
            moved = not _is_same(parameter, self._shown[index])
            if not moved and parameter._version == self._versions[index]:
                continue
            self._versions[index] = parameter._version
            if self.residency.parameters is Holders.PARTITIONED:
                raise RuntimeError(
                    f"{slot.name} was changed while it is partitioned, where the change has no effect; change it "
                    "before initialize, or at a ZeRO stage below 3"
                )
            here = slice(slot.offset, slot.offset + slot.numel)
            value, replaced = parameter.detach().reshape(-1), replaced or moved
            if moved:
                self.full[here].copy_(value)
            if self._own_master:
                self._change_master(here, value)
        if replaced:
            self._show(self._views)

    def _change_master(self, here: slice, value: Tensor) -> None:
        """Elements whose rounded master is something else than `value` take it; the others keep all their bits."""
        low, high = self.state_range
        start, stop = max(here.start, low), min(here.stop, high)
        if start < stop:
            master, new = self.master[start - low : stop - low], value[start - here.start : stop - here.start]
            master.copy_(torch.where(master.to(self.dtype) == new.to(self.dtype), master, new.to(master.dtype)))

    def whole_master(self) -> Tensor:
        """The master values whole, on every rank. Collective where they are partitioned."""
        self.take_changes()
        if self.residency.optimizer_states is Holders.REPLICATED:
            return self.master
        whole = torch.empty(self.padded, dtype=self.master.dtype, device=self.full.device)
        self.gather_group.all_gather(whole, self.master).wait()
        return whole

    @torch.no_grad()
    def give_back(self) -> None:
        """Give every parameter memory of its own with its whole master value. Collective where they are partitioned."""
        whole = self.whole_master()
        self._show([whole[slot.range].view(slot.shape).clone() for slot in self.slots])

    @property
    def narrow(self) -> Tensor | None:
        """The parameters of `state_range` in the compute dtype, where it is narrower than the masters'."""
        if not self._own_master:
            return None
        return self.shard if self.residency.optimizer_states is Holders.PARTITIONED else self.full

    @torch.no_grad()
    def publish(self, *, copied: bool = False) -> Transfer | None:
        """After an update of `master`: bring the parameters of all ranks up to date. None when nothing has to be sent.

        `copied`: `narrow` holds the new values already.
        """
        if self.narrow is not None and not copied:
            self.narrow.copy_(self.master)
        if self.residency.optimizer_states is Holders.PARTITIONED and self.residency.parameters is Holders.REPLICATED:
            return self.gather_group.all_gather(self.full, self.shard)
        return None

    # ---- memory ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _allocate(tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.nbytes)

    @staticmethod
    def _free(tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(0)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether both stand at the same place of the same memory."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.dtype is other.dtype
    )


def _dtype(form: str) -> torch.dtype:
    return getattr(torch, form)


def trainable_in_low_precision(dtype: torch.dtype) -> bool:
    """Whether parameters of this dtype need float32 master weights to be trained."""
    return dtype in (torch.float16, torch.bfloat16)

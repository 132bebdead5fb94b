"""Where the states of a flat lie: room for them where its residency says, and the way there when that changes."""

from __future__ import annotations

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.layout import partition_range
from speedlab.offload import AwayState, Kept, Stores, visit
from speedlab.placement import Holders, Residency, Where


class FlatStates:
    """The states of one flat, by name: "parameter", "master", an optimizer's own for moments.

    One that simply lies on the device is a tensor, and its owner's. One that *comes*, because it lies away from the
    device or is coded there, is in `away`, and has values during a visit only.
    """

    def __init__(self, stores: Stores, group: Group, *, padded: int, coded: bool) -> None:
        """`stores`: the places beside the device. `group`: over which the flat's `padded` elements are partitioned.
        `coded`: whether moments are kept in blocks of 8 bits."""
        self._stores, self._group, self._padded, self._coded = stores, group, padded, coded
        self._start, self._end = partition_range(padded, group.size, group.index)
        self.residency = Residency.of_stage(0, 1)
        self.away: dict[str, AwayState] = {}

    @property
    def range(self) -> tuple[int, int]:
        """[start, end) of the flat for which this rank holds master weights and moments."""
        if self.residency.optimizer_states is Holders.PARTITIONED:
            return self._start, self._end
        return 0, self._padded

    def comes(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a state of this name and dtype has values during a visit only."""
        return self.residency.place_of(name) is not Where.DEVICE or self._is_coded(name, dtype)

    def _is_coded(self, name: str, dtype: torch.dtype) -> bool:
        return self._coded and name not in ("parameter", "master") and dtype is torch.float32

    def room(self, name: str, dtype: torch.dtype) -> Tensor:
        """A new state over the present `range`, zeros, where optimizer states lie."""
        low, high = self.range
        if not self.comes(name, dtype):
            return torch.zeros(high - low, dtype=dtype, device=self._group.device)
        return self._keep(name, high - low, dtype).tensor

    def _keep(self, name: str, numel: int, dtype: torch.dtype) -> AwayState:
        """Room for a state that comes."""
        where = self.residency.place_of(name)

        def keep() -> Kept:
            if self._is_coded(name, dtype):
                return self._stores.eight_bits(name, numel, where)
            return self._stores.of(where).keep(numel, dtype)

        self.away[name] = AwayState(keep)
        return self.away[name]

    def widen(self, narrow: Tensor) -> Tensor:
        """What stands for the masters of parameters that have none, of the `narrow` parameters over `range`."""
        kept = self._stores.widened(narrow, self.residency.states_at)
        self.away["master"] = AwayState(lambda: kept)
        return self.away["master"].tensor

    def put(self, name: str, values: Tensor) -> Tensor:
        """`values` of a state in memory of their own, where the residency has it."""
        if self.comes(name, values.dtype):
            state = self._keep(name, values.numel(), values.dtype)
            state.kept.write(values.contiguous()).wait()
            return state.tensor
        if name == "parameter":  # Where peers read it.
            return self._group.empty(values.numel(), values.dtype, place=self._start).copy_(values)
        return torch.empty_like(values, device=self._group.device).copy_(values)

    def moved(self, name: str, state: Tensor, before: Residency) -> Tensor:
        """A state over the `range` of `before`, where it was then, as one over the present range (cut, gathered or as
        it was), where it is now. Collective when it comes together."""
        was, now = before.optimizer_states, self.residency.optimizer_states
        if was is now and before.states_at is self.residency.states_at:
            return state
        old = self.away.get(name)
        with visit([old] if old is not None else []):
            if was is now:
                moved = state
            elif now is Holders.PARTITIONED:
                moved = state[self._start : self._end]
            else:
                moved = torch.empty(self._padded, dtype=state.dtype, device=state.device)
                self._group.all_gather(moved, state).wait()
            own = self.put(name, moved)
        if old is not None:
            self.drop(name, old)
        return own

    def drop(self, name: str, state: AwayState | None = None) -> None:
        """Give up what lay away: a `state` that has gone elsewhere, or the present one of that name."""
        state = state or self.away.get(name)
        if state is not None:
            state.kept.drop()
            if self.away.get(name) is state:
                del self.away[name]

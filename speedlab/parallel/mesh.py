"""The mesh of a layout from the view of one rank: one group of ranks per named axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from speedlab.comm import CommStats, Group, World
from speedlab.comm.process_groups import groups_of_world
from speedlab.layout import AXES, REPLICATED, Layout

ENDS = "ends"
"""Name of the group of the first and the last pipeline rank with equal other coordinates. Both hold tied embeddings,
so gradients are summed over this group. Not an axis of the mesh."""


class Mesh:
    """This rank's groups. `mesh["tp"]` contains the ranks that differ from this rank only along tp."""

    def __init__(self, layout: Layout, world: World, traffic: CommStats) -> None:
        """Create all groups. Collective over all ranks.

        Args:
            layout: Sizes of the axes.
            world: The connected world.
            traffic: Counts transfers.
        """
        rank, device = world.rank, world.device
        self.layout, self.rank, self.device = layout, rank, device
        self._traffic = traffic
        self._others: dict[tuple[str, tuple[int, ...]], Group] = {}
        self.axes = {axis: Group(layout.peers(rank, axis), traffic, device, channel=axis) for axis in AXES}
        # Ranks along cp also exchange activations, so gathers get separate connections there.
        channel = "dp" if layout.cp == 1 else "gather"
        members = layout.peers(rank, *REPLICATED)
        alike = layout.peers(rank, "islands", *REPLICATED)
        self.gather = self.axes["dp"] if channel == "dp" else Group(members, traffic, device, channel=channel)
        """The ranks that hold the same part of the model. Parameters are gathered over this group."""
        self.alike = self.gather if alike == members else Group(alike, traffic, device, channel="alike")
        """The same ranks in all islands, which start with the same values."""
        # On a GPU, each communicator costs memory and start-up time, and gathers and reductions have the same order on
        # all ranks. So both use one communicator.
        self.reduce = Group(self.gather.ranks, traffic, device, channel="reduce" if device.type == "cpu" else channel)
        """The same ranks, for the reduction of gradients. On CPUs a separate channel, so that reductions have their
        own order."""
        self.everyone = Group(range(layout.world_size), traffic, device, channel="everyone")
        line = self.axes["pp"].ranks
        ends = [line[0], line[-1]] if layout.pp > 1 else []
        channel = "pp" if ends == line else ENDS
        self.ends = Group(ends, traffic, device, channel=channel) if rank in ends else None
        self._lacks_ends = bool(ends) and rank not in ends
        self._make_spare_wires()

    def __getitem__(self, axis: str) -> Group:
        return self.axes[axis]

    @property
    def data_index(self) -> int:
        """The share of the global batch that this rank reads."""
        return self.layout.data_index(self.rank)

    @property
    def counts_losses(self) -> bool:
        """Whether this rank's losses count. Its peers along tp and cp have the same losses."""
        return self.axes["tp"].index == self.axes["cp"].index == 0

    @property
    def summed_first(self) -> dict[str, Group]:
        """Groups over which gradients are summed before the reduction over the dp ranks, by their names in the
        placement table.
        """
        found = {"tp": self.axes["tp"]}
        return found if self.ends is None else found | {ENDS: self.ends}

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order of their creation."""
        made = [*self.axes.values(), self.gather, self.alike, self.reduce, self.everyone]
        return list(dict.fromkeys([*made, *([self.ends] if self.ends is not None else []), *self._others.values()]))

    def group(self, channel: str, ranks: Sequence[int]) -> Group:
        """Return a group of ranks, created on the first call. Collective: all ranks must ask for the same channels in
        the same order.

        Args:
            channel: Name of the group's connections.
            ranks: Global ranks, this one included.
        """
        key = channel, tuple(ranks)
        if key not in self._others:
            self._others[key] = Group(ranks, self._traffic, self.device, channel=channel)
        return self._others[key]

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch's DeviceMesh on the same connections, for DTensor or FSDP next to the engine. The first
        access is collective over all ranks, because axes of size 1 get new groups.
        """
        groups = [groups_of_world(axis, tuple(group.ranks)).group for axis, group in self.axes.items()]
        ranks = torch.arange(self.layout.world_size).view(self.layout.mesh_shape)
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=AXES)

    def _make_spare_wires(self) -> None:
        # torch names groups by a counter, so every rank must create the same number of groups.
        if self._lacks_ends:
            groups_of_world(ENDS, (dist.get_rank(),))

    def disconnect(self) -> None:
        """Close all connections."""
        for group in self.groups:
            group.disconnect()
        self.__dict__.pop("device_mesh", None)

    def reconnect(self) -> None:
        """Use the connections of the current world. Collective, in the order of the groups' creation."""
        for group in self.groups:
            group.reconnect()
        self._make_spare_wires()

"""The rank grid is a bijection, peers agree with each other, and partitions tile a flat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedlab.layout import (
    AXES,
    KINDS,
    Layout,
    LayoutError,
    own_positions,
    padded_numel,
    partition_range,
    sequence_multiple,
)

axis = st.integers(1, 6)
few = st.integers(1, 3)
layouts = st.builds(Layout, dp=axis, tp=few, pp=axis, cp=few, islands=st.integers(1, 2))


@given(layouts)
def test_coordinates_and_rank_undo_each_other_for_every_rank(layout: Layout) -> None:
    seen = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({tuple(coordinates.values()) for coordinates in seen}) == layout.world_size
    sizes = (layout.islands, layout.pp, layout.dp, layout.cp, layout.tp)
    assert layout.world_size == prod(sizes) == prod(layout.mesh_shape)
    assert [layout.rank(**coordinates) for coordinates in seen] == list(range(layout.world_size))
    for rank, coordinates in enumerate(seen):
        assert coordinates == {axis: layout.index(rank, axis) for axis in AXES}
        assert rank == sum(index * layout.stride(axis) for axis, index in coordinates.items())


@given(layouts)
def test_tensor_index_is_fastest_and_that_of_islands_slowest(layout: Layout) -> None:
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == [
        {"islands": i, "pp": p, "dp": d, "cp": c, "tp": t}
        for i in range(layout.islands)
        for p in range(layout.pp)
        for d in range(layout.dp)
        for c in range(layout.cp)
        for t in range(layout.tp)
    ]


@given(layouts)
def test_sizes_are_named_from_slow_to_fast(layout: Layout) -> None:
    assert AXES == ("islands", "pp", "dp", "cp", "tp")
    assert list(layout.sizes.values()) == [layout.islands, layout.pp, layout.dp, layout.cp, layout.tp]
    assert layout.mesh_shape == (layout.islands, layout.pp, layout.dp, layout.cp, layout.tp)
    assert [layout.size(axis) for axis in AXES] == list(layout.mesh_shape)


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_peers_partition_the_ranks(layout: Layout, axes: set[str]) -> None:
    groups = {tuple(layout.peers(rank, *axes)) for rank in range(layout.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) == prod(layout.size(axis) for axis in axes)
        assert all(layout.peers(rank, *axes) == list(group) for rank in group)


@given(layouts, st.sets(st.sampled_from(AXES)), st.data())
def test_peers_differ_along_the_named_axes_only(layout: Layout, axes: set[str], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    own = layout.coordinates(rank)
    for peer in layout.peers(rank, *axes):
        assert {axis for axis, index in layout.coordinates(peer).items() if index != own[axis]} <= axes


@given(layouts, st.sampled_from(AXES))
def test_a_rank_is_at_its_own_index_among_its_peers(layout: Layout, axis: str) -> None:
    for rank in range(layout.world_size):
        assert layout.peers(rank, axis)[layout.index(rank, axis)] == rank


@given(layouts)
def test_all_axes_together_reach_every_rank_and_none_reaches_only_itself(layout: Layout) -> None:
    last = layout.world_size - 1
    assert layout.peers(last, *AXES) == list(range(layout.world_size))
    assert layout.peers(last) == [last]


@given(layouts)
def test_data_index_is_the_same_along_tensor_and_pipeline_axes_and_counts_the_shares(layout: Layout) -> None:
    assert layout.data_size == layout.islands * layout.dp
    for rank in range(layout.world_size):
        seen = {layout.data_index(peer) for peer in layout.peers(rank, "pp", "cp", "tp")}
        assert seen == {layout.index(rank, "islands") * layout.dp + layout.index(rank, "dp")}
        assert sorted(map(layout.data_index, layout.peers(rank, "islands", "dp"))) == list(range(layout.data_size))


def test_an_axis_says_who_sees_other_data_and_who_holds_other_parameters() -> None:
    said = {axis.name: (axis.sees_other_data, axis.holds_other_parameters) for axis in KINDS.values()}
    assert said == {
        "islands": (True, True),
        "pp": (False, True),
        "dp": (True, False),
        "cp": (False, False),
        "ep": (True, True),
        "tp": (False, True),
    }
    assert list(KINDS) == ["islands", "pp", "dp", "cp", "ep", "tp"]


@dataclass(frozen=True, kw_only=True)
class Wider(Layout):
    """With the axis that is to come."""

    ep: int = 1


@given(
    st.builds(
        Wider,
        dp=st.integers(1, 3),
        tp=st.integers(1, 3),
        pp=st.integers(1, 3),
        cp=st.integers(1, 3),
        ep=st.integers(1, 3),
    )
)
def test_an_axis_to_come_needs_only_a_field(layout: Wider) -> None:
    assert layout.mesh_shape == (1, layout.pp, layout.dp, layout.cp, layout.ep, layout.tp)
    assert layout.data_size == layout.dp * layout.ep
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank
        shares = [layout.data_index(peer) for peer in layout.peers(rank, "dp", "ep")]
        assert shares == list(range(layout.data_size))
        assert {layout.data_index(peer) for peer in layout.peers(rank, "pp", "cp", "tp")} == {layout.data_index(rank)}
    assert Wider.for_world(layout.world_size, **{a: n for a, n in layout.sizes.items() if a != "dp"}) == layout


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_every_position_is_on_one_rank_and_late_ones_on_all(ring: int, heads: int, times: int) -> None:
    cp = ring * heads
    length = times * sequence_multiple(cp, heads)
    own = [[place for part in own_positions(length, cp, heads, k) for place in part] for k in range(cp)]
    assert sorted(place for places in own for place in places) == list(range(length))
    assert {len(places) for places in own} == {length // cp}
    assert all(places == sorted(places) for places in own)
    # Under a causal mask a token costs as much as it has before it: all ranks of a ring cost the same.
    of_ring = [sum(sum(places) for places in own[k * heads :][:heads]) for k in range(ring)]
    assert len(set(of_ring)) == 1


def test_positions_of_a_ring_of_two_with_two_that_share_heads() -> None:
    """Chunks of 3 to the ranks 0 1 1 0 of the ring, each in halves."""
    own = [own_positions(12, 4, 2, k) for k in range(4)]
    assert own == [[range(3)], [range(9, 12)], [range(3, 6)], [range(6, 9)]]
    assert sequence_multiple(4, 2) == 4
    assert sequence_multiple(4, 1) == 8
    assert sequence_multiple(3, 3) == 3
    assert sequence_multiple(6, 2) == 6


def test_every_field_of_a_layout_is_an_axis() -> None:
    assert {field.name for field in fields(Layout)} == set(AXES)


@given(axis, axis, axis)
def test_dp_follows_from_the_number_of_engines(dp: int, tp: int, pp: int) -> None:
    assert Layout.for_world(dp * tp * pp, tp=tp, pp=pp) == Layout(dp=dp, tp=tp, pp=pp)


def test_one_rank_is_its_own_peer() -> None:
    assert Layout.for_world(1) == Layout()
    assert Layout().peers(0, "dp") == [0]
    assert str(Layout(dp=4, tp=2)) == "pp 1 × dp 4 × tp 2"


@pytest.mark.parametrize(
    ("world", "axes", "message"),
    [
        (4, {"tp": 3}, "4 ranks do not divide by pp 1 × tp 3 = 3"),
        (4, {"dp": 3}, "pp 1 × dp 3 × tp 1 = 3 ranks, but there are 4 engines"),
        (5, {"dp": 2, "tp": 2}, "pp 1 × dp 2 × tp 2 = 4 ranks, but there are 5 engines"),
        (4, {"tp": 0}, "tp is 0; every axis of a layout is at least 1"),
        (4, {"dp": 0}, "dp is 0; every axis of a layout is at least 1"),
        (4, {"pp": -1}, "pp is -1; every axis of a layout is at least 1"),
        (0, {}, "0 engines hold no rank; start at least one"),
    ],
)
def test_impossible_layouts_are_refused_with_the_equation(world: int, axes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError) as refusal:
        Layout.for_world(world, **axes)
    assert str(refusal.value) == message


def test_what_is_outside_the_grid_has_no_rank_and_no_coordinates() -> None:
    layout = Layout(dp=2, tp=3)
    with pytest.raises(LayoutError, match=r"rank 6 is not in 0\.\.5"):
        layout.coordinates(6)
    with pytest.raises(LayoutError, match=r"dp index 2 is not in 0\.\.1 of pp 1 × dp 2 × tp 3"):
        layout.rank(dp=2)
    with pytest.raises(LayoutError, match="tp index -1"):
        layout.rank(tp=-1)
    assert layout.rank() == 0
    assert layout.rank(dp=1) == 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda layout: layout.size("ep"),
        lambda layout: layout.stride("ep"),
        lambda layout: layout.index(0, "ep"),
        lambda layout: layout.rank(ep=0),
        lambda layout: layout.peers(0, "dp", "ep"),
    ],
)
def test_an_axis_that_the_layout_does_not_have_is_refused(ask: Callable[[Layout], object]) -> None:
    with pytest.raises(LayoutError, match="'ep' is no axis of a layout; its axes are islands, pp, dp, cp, tp"):
        ask(Layout())


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_partitions_tile_the_padded_flat(numel: int, dp: int) -> None:
    padded = padded_numel(numel, dp)
    assert padded % dp == 0
    assert 0 <= padded - numel < dp
    ranges = [partition_range(padded, dp, index) for index in range(dp)]
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == padded
    assert len({end - start for start, end in ranges}) == 1

"""The rank grid is a bijection, peers agree with each other, and partitions tile a flat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedlab.layout import Layout, LayoutError, padded_numel, partition_range

axis = st.integers(1, 6)
layouts = st.builds(Layout, dp=axis, tp=axis, pp=axis)


@given(layouts)
def test_coordinates_and_rank_undo_each_other_for_every_rank(layout: Layout) -> None:
    seen = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size == layout.pp * layout.dp * layout.tp
    assert [layout.rank(*coordinates) for coordinates in seen] == list(range(layout.world_size))


@given(layouts)
def test_tensor_index_is_fastest_and_pipeline_index_slowest(layout: Layout) -> None:
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == sorted(
        (p, d, t) for p in range(layout.pp) for d in range(layout.dp) for t in range(layout.tp)
    )


@given(layouts, st.data())
def test_dp_peers_differ_in_data_index_only_and_agree_on_the_group(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    pipeline, _, tensor = layout.coordinates(rank)
    peers = layout.dp_peers(rank)
    assert [layout.coordinates(peer) for peer in peers] == [(pipeline, d, tensor) for d in range(layout.dp)]
    assert all(layout.dp_peers(peer) == peers for peer in peers)


@given(axis, axis, axis)
def test_dp_follows_from_the_number_of_engines(dp: int, tp: int, pp: int) -> None:
    assert Layout.for_world(dp * tp * pp, tp=tp, pp=pp) == Layout(dp=dp, tp=tp, pp=pp)


def test_one_rank_is_its_own_peer() -> None:
    assert Layout.for_world(1) == Layout()
    assert Layout().dp_peers(0) == [0]
    assert str(Layout(dp=4, tp=2)) == "pp 1 × dp 4 × tp 2"


@pytest.mark.parametrize(
    ("world", "axes", "message"),
    [
        (4, {"tp": 3}, "4 ranks do not divide by pp 1 × tp 3 = 3; use a multiple of 3 engines"),
        (4, {"dp": 3}, "pp 1 × dp 3 × tp 1 = 3 ranks, but there are 4 engines; dp 4 would fit"),
        (5, {"dp": 2, "tp": 2}, "pp 1 × dp 2 × tp 2 = 4 ranks, but there are 5 engines; 4 engines would fit"),
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
        layout.rank(0, 2, 0)
    with pytest.raises(LayoutError, match="tp index -1"):
        layout.rank(0, 0, -1)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_partitions_tile_the_padded_flat(numel: int, dp: int) -> None:
    padded = padded_numel(numel, dp)
    assert padded % dp == 0
    assert 0 <= padded - numel < dp
    ranges = [partition_range(padded, dp, index) for index in range(dp)]
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == padded
    assert len({end - start for start, end in ranges}) == 1

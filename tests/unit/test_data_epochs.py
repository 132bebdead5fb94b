"""The order in which ranks read a dataset: shared out, shuffled anew in each epoch, and gone back to anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedlab.config import ConfigError
from speedlab.data import Epochs


def orders(size: int, *, micro_size: int, shares: int, seed: int = 0) -> list[Epochs]:
    return [Epochs(size, micro_size=micro_size, shares=shares, share=share, seed=seed) for share in range(shares)]


def together(ranks: list[Epochs], micro_size: int) -> list[list[int]]:
    """The micro-batches of all ranks in a pass, each put together."""
    passes = [list(rank) for rank in ranks]
    starts = range(0, len(passes[0]), micro_size)
    return [[item for own in passes for item in own[start : start + micro_size]] for start in starts]


@given(size=st.integers(1, 200), micro=st.integers(1, 4), shares=st.integers(1, 4), seed=st.integers(0, 9))
def test_an_epoch_has_every_item_once(size, micro, shares, seed):
    if -(-size // shares) < micro:
        with pytest.raises(ConfigError, match=f"training_data has {size} items"):
            orders(size, micro_size=micro, shares=shares)
        return
    ranks = orders(size, micro_size=micro, shares=shares, seed=seed)
    batches = together(ranks, micro)
    seen = [item for batch in batches for item in batch]
    assert len(seen) == len(ranks[0]) * shares
    assert set(seen) <= set(range(size))
    assert len(set(seen)) == min(size, len(seen)), "items come twice only where ranks lack less than one each"


@given(
    size=st.integers(24, 200),
    shape=st.sampled_from([(1, 4), (2, 2), (4, 1)]),
    stop=st.integers(0, 5),
    epochs=st.integers(0, 2),
)
def test_what_is_left_is_the_same_under_every_layout(size, shape, stop, epochs):
    (first,) = orders(size, micro_size=4, shares=1)
    for _ in range(epochs):
        for _ in first:
            pass
        first.advance(len(first))
    iterator = iter(first)
    for _ in range(4 * stop):
        next(iterator)
    first.advance(4 * stop)
    rest = list(iterator)
    micro, shares = shape
    ranks = orders(size, micro_size=micro, shares=shares)
    for rank in ranks:
        rank.go_to({"epoch": epochs, "items": 4 * stop, "size": size}, trained=0)
    theirs = [item for batch in together(ranks, micro) for item in batch]
    assert theirs[: len(rest)] == rest
    assert first.position() == {"epoch": epochs, "items": 4 * stop, "size": size}


def test_looking_takes_nothing_and_training_begins_the_next_epoch():
    (order,) = orders(10, micro_size=2, shares=1)
    whole = list(order)
    assert list(order) == whole, "nothing was trained"
    order.advance(10)
    second = list(order)
    assert second != whole
    assert sorted(second) == sorted(whole)
    order.advance(4)
    assert order.position() == {"epoch": 1, "items": 4, "size": 10}
    third = list(order)  # A new pass is a new epoch, as of any loader.
    assert third != second
    assert order.position() == {"epoch": 2, "items": 0, "size": 10}


def test_steps_on_other_data_do_not_count():
    (order,) = orders(10, micro_size=2, shares=1)
    iterator = iter(order)
    next(iterator), next(iterator)
    order.advance(100)
    assert order.position() == {"epoch": 0, "items": 2, "size": 10}


def test_a_position_at_the_end_is_the_next_epochs_beginning():
    (order,), (fresh,) = orders(10, micro_size=4, shares=1), orders(10, micro_size=4, shares=1)
    order.go_to({"epoch": 0, "items": 8, "size": 10}, trained=0)
    assert len(list(order)) == 8
    assert order.position()["epoch"] == 1
    fresh.go_to(None, trained=20)  # A checkpoint of before: two epochs of 8 and half of one.
    assert len(list(fresh)) == 4
    assert fresh.position()["epoch"] == 2


def test_other_data_begin_the_epoch_anew():
    (order,) = orders(10, micro_size=2, shares=1)
    with pytest.warns(UserWarning, match=r"the data had 12 items .* have 10 now: epoch 3 begins again"):
        order.go_to({"epoch": 3, "items": 4, "size": 12}, trained=0)
    assert len(list(order)) == 10

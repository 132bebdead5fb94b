"""Data order: every window once an epoch, a pure function of (seed, step), independent of the layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedlab.config import ConfigError
from speedlab.data import Sampler
from speedlab.data.sampler import _keys, permute


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_keyed_permutation_hits_every_place_once(size, seed, epoch):
    image = permute(np.arange(size), size, _keys(seed, epoch))
    assert np.array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65])
def test_permutations_at_the_borders_of_powers_of_two(size):
    assert sorted(permute(np.arange(size), size, _keys(0, 0)).tolist()) == list(range(size))


def test_single_places_of_a_huge_corpus_agree_with_the_whole():
    size = 10**12
    places = np.array([0, 1, 12345, size - 1])
    whole = permute(places, size, _keys(7, 3))
    assert [int(permute(places[i : i + 1], size, _keys(7, 3))[0]) for i in range(4)] == whole.tolist()
    assert ((whole >= 0) & (whole < size)).all()


def test_the_order_is_the_same_for_ever():
    """Resuming an old run must see the data it would have seen: these numbers may not change."""
    assert permute(np.arange(10), 10, _keys(0, 0)).tolist() == [6, 9, 4, 1, 8, 3, 5, 7, 0, 2]


def test_the_order_looks_random():
    """Neighbours are a third of the corpus apart on average, and few windows stay in their place."""
    size = 20_000
    image = permute(np.arange(size), size, _keys(1, 0))
    assert abs(np.abs(np.diff(image)).mean() / size - 1 / 3) < 0.01
    assert (image == np.arange(size)).sum() < 12
    assert abs(np.corrcoef(image, np.arange(size))[0, 1]) < 0.03


def test_seeds_and_epochs_have_their_own_order():
    orders = [permute(np.arange(1000), 1000, _keys(seed, epoch)) for seed in (0, 1, 2) for epoch in (0, 1)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 15


@given(
    count=st.integers(9, 500),
    length=st.integers(1, 8),
    dp=st.integers(1, 5),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_any_layout_sees_the_same_global_batches(count, length, dp, micro, accumulation, seed):
    tokens = np.arange(count, dtype=np.uint16)
    total = dp * micro * accumulation
    for step in (0, 1, 17):
        whole = Sampler(tokens, length, seed).rows(step, total, 0, total)
        assert whole.shape == (total, length + 1)
        assert whole.dtype == np.int64
        for d in range(dp):
            for m in range(accumulation):
                start = (m * dp + d) * micro
                part = Sampler(tokens, length, seed).rows(step, total, start, start + micro)
                assert np.array_equal(part, whole[start : start + micro])


@given(count=st.integers(5, 400), length=st.integers(1, 4), total=st.integers(1, 7), seed=st.integers(0, 5))
def test_each_window_is_seen_once_an_epoch(count, length, total, seed):
    sampler = Sampler(np.arange(count), length, seed)
    steps = -(-2 * sampler.windows // total)
    firsts = np.concatenate([sampler.rows(step, total, 0, total)[:, 0] for step in range(steps)])
    for epoch in (0, 1):
        seen = firsts[epoch * sampler.windows : (epoch + 1) * sampler.windows]
        assert np.array_equal(np.sort(seen), np.arange(sampler.windows) * length)


def test_rows_are_consecutive_tokens_and_nothing_is_left_over():
    sampler = Sampler(np.arange(13), 4, 0)
    assert sampler.windows == 3
    rows = sampler.rows(0, 3, 0, 3)
    assert (np.diff(rows, axis=1) == 1).all()
    assert set(rows.ravel()) == set(range(13))
    assert sampler.rows(0, 3, 2, 2).shape == (0, 5)


def test_one_window_exactly_fits():
    assert Sampler(np.arange(5), 4, 0).rows(3, 2, 0, 2).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_sequence_longer_than_the_corpus_is_refused_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"sequence_length 5 is longer than the held-out text.*6 tokens, there are 5; .*most 4"
    ):
        Sampler(np.arange(5), 5, 0, name="the held-out text")
    with pytest.raises(ConfigError, match="there are 0; give more text"):
        Sampler(np.arange(0), 1, 0)
    with pytest.raises(ConfigError, match="at least 1"):
        Sampler(np.arange(5), 0, 0)


@pytest.mark.parametrize(("step", "start", "stop"), [(-1, 0, 1), (0, 3, 5), (0, -1, 1), (0, 2, 1)])
def test_rows_outside_the_batch_are_refused(step, start, stop):
    with pytest.raises(ValueError, match="are not in a global batch of 4"):
        Sampler(np.arange(50), 4, 0).rows(step, 4, start, stop)

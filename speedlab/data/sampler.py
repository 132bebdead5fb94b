"""The sequences of a step: a pure function of (seed, step), the same for every layout.

The corpus is cut into windows of `sequence_length` tokens. Sample number i of the run belongs to epoch i // windows,
and is the window at index i % windows of that epoch's order. The order is never stored. It is a keyed permutation (a
Feistel network with cycle walking): each index costs the same few multiplications for any corpus size, and resuming at
a step needs no state.
"""

from __future__ import annotations

import hashlib

import numpy as np

from speedlab.config import ConfigError

_ROUNDS = 6
# Multipliers of SplitMix64's mixing function.
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Sampler:
    """Rows of the global batch of any step.

    Args:
        tokens: 1-D array of token ids, for instance `Corpus.train`; only requested rows are read.
        sequence_length: Tokens of one row; a row has one more, so that inputs and targets overlap.
        seed: Seed of the run.
        name: Name of the tokens in errors.

    Raises:
        ConfigError: If the tokens are shorter than one row.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, seed: int, *, name: str = "the corpus") -> None:
        if sequence_length < 1:
            raise ConfigError(f"data.sequence_length {sequence_length} must be at least 1")
        if len(tokens) < sequence_length + 1:
            raise ConfigError(
                f"data.sequence_length {sequence_length} is longer than {name}: a sequence and its target need "
                f"{sequence_length + 1:,} tokens, there are {len(tokens):,}; {_shorter(len(tokens))}"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.seed = seed
        self.windows = (len(tokens) - 1) // sequence_length
        """Number of windows in one epoch; each is read once."""

    def rows(self, step: int, global_size: int, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of the global batch of `step`.

        Args:
            step: Number of the step, from 0.
            global_size: Rows of the global batch.
            start: First row.
            stop: Row after the last one.

        Returns:
            (stop - start, sequence_length + 1) int64. Inputs are `rows[:, :-1]`, targets `rows[:, 1:]`.

        Raises:
            ValueError: If rows are outside the global batch.
        """
        if step < 0 or not 0 <= start <= stop <= global_size:
            raise ValueError(f"rows [{start}, {stop}) of step {step} are not in a global batch of {global_size}")
        windows = self.window_of(step * global_size + np.arange(start, stop, dtype=np.int64))
        rows = np.empty((stop - start, self.sequence_length + 1), dtype=np.int64)
        for row, window in zip(rows, windows.tolist(), strict=True):
            first = window * self.sequence_length
            row[:] = self.tokens[first : first + self.sequence_length + 1]
        return rows

    def window_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the window of each sample.

        Args:
            samples: Sample numbers over the whole run, (N,) int64.

        Returns:
            Window numbers, (N,) int64.
        """
        epochs, places = np.divmod(samples, self.windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            windows[mine] = shuffled(places[mine], self.windows, self.seed, epoch)
        return windows


def shuffled(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the items at some indices of an epoch's order.

    Args:
        places: Indices in the order, (N,) int64.
        size: Number of items.
        seed: Seed of the orders.
        epoch: Number of the epoch.

    Returns:
        Items, (N,) int64.
    """
    return permute(places, size, _keys(seed, epoch))


def permute(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Apply a keyed permutation of range(size).

    A Feistel network permutes the smallest even power of two that holds `size`. A result outside the range is permuted
    again until it is inside ("cycle walking"), fewer than four times on average.

    Args:
        places: (N,) int64, below `size`.
        size: Size of the range.
        keys: One 64-bit key for each round.

    Returns:
        (N,) int64.
    """
    # Half the bits of the smallest even power of two that holds `size`.
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    values = _feistel(places.astype(np.uint64), half, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        mixed = (right ^ key) * _MIX_A
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX_B
        # A Feistel round is invertible for any mixing function, so the result is a permutation.
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
    return (left << half) | right


def _keys(seed: int, epoch: int) -> np.ndarray:
    """Return one 64-bit key for each round. Keys are hashes, so close seeds and epochs have unrelated orders."""
    digest = hashlib.shake_256(f"speedlab sampler {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _shorter(count: int) -> str:
    if count < 2:
        return "give more text"
    return f"a length of at most {count - 1:,} would fit, or give more text"

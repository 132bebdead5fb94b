"""The order in which one rank reads a dataset over epochs, and its current position.

1. Each epoch has its own order of all items, which is computed and never stored (`sampler.permute`).
2. A micro-batch over all ranks is the next `micro_size × shares` items. Each rank takes its share, so the items of a
   global batch are the same under every layout.
   - The last items of an epoch that do not fill a micro-batch on every rank are skipped.
   - If ranks lack less than one item each, items from the epoch's start are repeated.
3. One pass over the order is an epoch, or the rest of the epoch in which training stopped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping

import numpy as np

from speedlab.config import ConfigError
from speedlab.data.sampler import shuffled


class Epochs:
    """Indices of a dataset's items for one share of the ranks; a sampler for torch's DataLoader.

    One iteration passes through the rest of the current epoch; the next iteration passes through the next epoch. Items
    count as done only if a step followed (`advance`), so that reading ahead changes nothing.
    """

    def __init__(self, size: int, *, micro_size: int, shares: int, share: int, seed: int) -> None:
        """Begin at epoch 0.

        Args:
            size: Number of items of the dataset.
            micro_size: Items of one rank's micro-batch.
            shares: Number of rank groups that read different data.
            share: Number of this rank's group.
            seed: Seed of the orders.

        Raises:
            ConfigError: If an epoch has no complete micro-batch.
        """
        self._size, self._micro_size, self._shares, self._share, self._seed = size, micro_size, shares, share, seed
        self._batches = math.ceil(size / shares) // micro_size
        """Number of micro-batches in an epoch."""
        if not self._batches:
            raise ConfigError(
                f"training_data has {size} items, and a micro-batch of all ranks takes {micro_size * shares}: "
                f"batch.micro_size {micro_size} × {shares}; lower it, or give more data"
            )
        self._epoch = 0
        self._begin = 0
        """Items of the epoch, over all ranks, before the current pass."""
        self._handed = 0
        """Items, over all ranks, that the current pass has yielded."""
        self._trained = 0
        """Items used by steps during the current pass."""

    def __len__(self) -> int:
        """Return the number of items of this rank in a whole epoch."""
        return self._batches * self._micro_size

    def __iter__(self) -> Iterator[int]:
        if self._done:
            self._epoch, self._begin = self._epoch + 1, 0
        each = self._micro_size * self._shares
        # The rest of this epoch has no complete micro-batch.
        if self._begin + each > self._batches * each:
            self._epoch, self._begin = self._epoch + 1, 0
        self._handed = self._trained = 0
        return self._pass(self._epoch, self._begin, each)

    def _pass(self, epoch: int, begin: int, each: int) -> Iterator[int]:
        for number in range((self._batches * each - begin) // each):
            first = begin + number * each + self._share * self._micro_size
            # The remainder repeats items from the epoch's start if the last micro-batch lacks some.
            places = np.arange(first, first + self._micro_size, dtype=np.int64) % self._size
            self._handed = (number + 1) * each
            yield from shuffled(places, self._size, self._seed, epoch).tolist()

    @property
    def _done(self) -> int:
        """Items of the current pass that are yielded and trained."""
        return min(self._handed, self._trained)

    def advance(self, items: int) -> None:
        """Count a step.

        Args:
            items: Items of the step over all ranks.
        """
        self._trained += items

    def position(self) -> dict[str, int]:
        """Return the current position as plain integers, independent of the layout."""
        return {"epoch": self._epoch, "items": self._begin + self._done, "size": self._size}

    def go_to(self, position: Mapping[str, int] | None, *, trained: int) -> None:
        """Start the next pass at `position`.

        Args:
            position: Result of `position`; None if unknown.
            trained: Items trained so far, from which the position is computed if it is unknown.
        """
        whole = len(self) * self._shares
        epoch, items = divmod(trained, whole)
        if position is not None:
            epoch, items = position["epoch"], position["items"]
            if position["size"] != self._size:
                warnings.warn(
                    f"the data had {position['size']} items when the checkpoint was written and have {self._size} now: "
                    f"epoch {epoch} begins again",
                    UserWarning,
                    stacklevel=2,
                )
                items = 0
        self._epoch, self._begin = epoch, items
        self._handed = self._trained = 0

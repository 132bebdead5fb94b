"""In which order one rank reads a dataset, epoch after epoch, and where it stands in it.

1. An epoch is an order of all items, its own one; it is never written down (`sampler.permute`).
2. A micro-batch of all ranks is the next `micro_size × shares` items of it, a rank's micro-batch its share of these. So
   the items of a global batch are the same under every layout. The last items of an epoch that make no whole
   micro-batch on every rank are left out; where ranks lack less than one item each, items from the epoch's start come
   again.
3. A pass over the order is an epoch, or what is left of the one in which training stopped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping

import numpy as np

from speedlab.config import ConfigError
from speedlab.data.sampler import shuffled


class Epochs:
    """Indices of a dataset's items, for one share of the ranks: what torch's DataLoader takes as a sampler.

    Iterating goes through the present epoch from where it stands, then the next iteration through the next one. Items
    are done when a step was made after they had been handed out (`advance`): looking at some changes nothing.
    """

    def __init__(self, size: int, *, micro_size: int, shares: int, share: int, seed: int) -> None:
        """`size`: items of the dataset. `shares`: groups of ranks that see different data, this rank is in number
        `share`.

        Raises ConfigError when an epoch has no micro-batch.
        """
        self._size, self._micro_size, self._shares, self._share, self._seed = size, micro_size, shares, share, seed
        self._batches = math.ceil(size / shares) // micro_size
        """Micro-batches of an epoch."""
        if not self._batches:
            raise ConfigError(
                f"training_data has {size} items, and a micro-batch of all ranks takes {micro_size * shares}: "
                f"batch.micro_size {micro_size} × {shares}; lower it, or give more data"
            )
        self._epoch = 0
        self._begin = 0
        """Items of the epoch, over all ranks, before the present pass."""
        self._handed = 0
        """Items, over all ranks, that the present pass has handed out."""
        self._trained = 0
        """Items that went into steps during the present pass."""

    def __len__(self) -> int:
        """Items of this rank in a whole epoch."""
        return self._batches * self._micro_size

    def __iter__(self) -> Iterator[int]:
        if self._done:
            self._epoch, self._begin = self._epoch + 1, 0
        each = self._micro_size * self._shares
        if self._begin + each > self._batches * each:
            self._epoch, self._begin = self._epoch + 1, 0
        self._handed = self._trained = 0
        return self._pass(self._epoch, self._begin, each)

    def _pass(self, epoch: int, begin: int, each: int) -> Iterator[int]:
        for number in range((self._batches * each - begin) // each):
            first = begin + number * each + self._share * self._micro_size
            places = np.arange(first, first + self._micro_size, dtype=np.int64) % self._size
            self._handed = (number + 1) * each
            yield from shuffled(places, self._size, self._seed, epoch).tolist()

    @property
    def _done(self) -> int:
        """Items of the present pass that are done with."""
        return min(self._handed, self._trained)

    def advance(self, items: int) -> None:
        """A step was made, with so many items over all ranks."""
        self._trained += items

    def position(self) -> dict[str, int]:
        """Where training stands, for any layout, as plain numbers."""
        return {"epoch": self._epoch, "items": self._begin + self._done, "size": self._size}

    def go_to(self, position: Mapping[str, int] | None, *, trained: int) -> None:
        """The next pass goes on from `position`; where that is not known, from what `trained` items make."""
        whole = len(self) * self._shares
        epoch, items = divmod(trained, whole)
        if position is not None:
            epoch, items = position["epoch"], position["items"]
            if position["size"] != self._size:
                warnings.warn(
                    f"the data had {position['size']} items when the checkpoint was written and have {self._size} now: "
                    f"epoch {epoch} begins anew",
                    UserWarning,
                    stacklevel=2,
                )
                items = 0
        self._epoch, self._begin = epoch, items
        self._handed = self._trained = 0

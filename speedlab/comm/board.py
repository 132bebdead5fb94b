"""Words that ranks leave for each other in the store in which they have met: that takes no group, and harms none."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Board:
    """One word of each rank of the present world. It can be read by who has left that world meanwhile."""

    def __init__(self, name: str) -> None:
        """`name`: of its own in this world, and the same on all ranks."""
        self._rank = dist.get_rank()
        self._keys = [f"speedlab/{name}/{rank}" for rank in range(dist.get_world_size())]
        self._store = distributed_c10d._get_default_store()

    def leave(self, word: str) -> None:
        """This rank's word. Raises RuntimeError where the store is gone."""
        self._store.set(self._keys[self._rank], word)

    def read(self) -> list[str] | None:
        """Every rank's word, in rank order; None as long as one is missing. Waits for nobody. Raises RuntimeError where
        the store is gone."""
        if not self._store.check(self._keys):
            return None
        return [self._store.get(key).decode() for key in self._keys]

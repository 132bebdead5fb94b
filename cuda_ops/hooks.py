"""What hooks on modules are in copies of these."""

from __future__ import annotations


class Nothing:
    """A hook that does nothing: what a copy of a module (copy.deepcopy, a file of torch.save) has in place of ours."""

    def __call__(self, *ignored: object) -> None: ...

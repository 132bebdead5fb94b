"""Masks of ring attention in addition to causality: keys of other documents, and dropout.

There are B sequences of T tokens, and H heads. A turn has n queries of this rank and m keys of another rank, all
ascending.

1. `starts` (B, T) give the first visible key of each query, in full sequences. For a turn they become positions among
   the m keys. So the block-sparse kernel uses them as for full sequences.
2. Three cases use explicit scores, (n, m) in float32 for one head at a time: head sizes that the kernel does not
   support, other devices than CPUs, and dropout.
3. Dropout masks are drawn for full sequences, as in one process. This rank keeps those of its queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ops.block_layout import BlockLayout, whole_layout
from cuda_ops.block_sparse_attention import partial_attention, partial_gradients
from cuda_ops.tensor_checks import FLOATS
from speedlab.config.attention import head_fits
from speedlab.models.gpt import CausalAttention
from speedlab.models.selective_checkpointing import computed_once


@dataclass(frozen=True, kw_only=True)
class Masks:
    """The masks of one attention call on one rank."""

    starts: Tensor | None
    """(B, T) int32; None: each sequence is one document."""
    kept: Tensor | None
    """(B, H, own queries, T) bool: probabilities that are not dropped; None: all."""
    dropout: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, places: TokenPositions) -> tuple[Tensor, Tensor]:
        """Return (output, natural logarithm of the sum of exponentials (B, H, n)) of a turn. The logarithm is -inf for
        a query that sees no key.

        Args:
            q: (B, H, n, D) queries.
            k: (B, H, m, D) keys.
            v: (B, H, m, D) values.
            scale: Factor on the scores.
            places: Positions of the queries and keys.
        """
        if self._takes_kernel(q):
            q, k, v = (each.contiguous() for each in (q, k, v))
            return partial_attention(q, k, v, places.layout, scale=scale, starts=places.local(self.starts))
        outs, logarithms = [], []
        for head in range(q.shape[1]):
            scores = self._scores(q[:, head], k[:, head], scale, places)
            logarithm = scores.logsumexp(-1)
            p = scores.sub_(_finite(logarithm)).exp_()
            outs.append(self._dropped(p, head, places) @ v[:, head].to(p.dtype))
            logarithms.append(logarithm)
        return torch.stack(outs, 1), torch.stack(logarithms, 1)

    def gradients(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logarithm: Tensor,
        scale: float,
        places: TokenPositions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v in a turn.

        Args:
            gradient: (B, H, n, D), gradient of the combined output.
            q: (B, H, n, D) queries.
            k: (B, H, m, D) keys.
            v: (B, H, m, D) values.
            out: (B, H, n, D), output of all turns combined.
            logarithm: (B, H, n), logarithms of all turns combined.
            scale: Factor on the scores.
            places: Positions of the queries and keys.
        """
        if self._takes_kernel(q):
            gradient, q, k, v, out, logarithm = (each.contiguous() for each in (gradient, q, k, v, out, logarithm))
            starts = places.local(self.starts)
            return partial_gradients(gradient, q, k, v, out, logarithm, places.layout, scale=scale, starts=starts)
        found = []
        for head in range(q.shape[1]):
            here = (each[:, head].to(logarithm.dtype) for each in (gradient, q, k, v, out))
            incoming, queries, keys, values, result = here
            p = self._scores(queries, keys, scale, places).sub_(_finite(logarithm[:, head])).exp_()
            of_p = self._dropped(incoming @ values.mT, head, places)
            of_values = self._dropped(p, head, places).mT @ incoming
            of_scores = of_p.sub_((incoming * result).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            found.append((of_scores @ keys, of_scores.mT @ queries, of_values))
        of_queries, of_keys, of_values = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return of_queries, of_keys, of_values

    def _takes_kernel(self, q: Tensor) -> bool:
        return self.kept is None and q.is_cpu and q.dtype in FLOATS and head_fits(q.shape[3])

    def _scores(self, q: Tensor, k: Tensor, scale: float, places: TokenPositions) -> Tensor:
        """Return the scores (B, n, m); -inf if a query does not see a key."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).mT).mul_(scale)
        if places.causal:
            scores.masked_fill_(places.queries[:, None] < places.keys, -torch.inf)
        if self.starts is not None:
            scores.masked_fill_(places.keys < self.starts[:, places.queries, None], -torch.inf)
        return scores

    def _dropped(self, p: Tensor, head: int, places: TokenPositions) -> Tensor:
        """Apply dropout to the probabilities `p` (B, n, m) of one head."""
        if self.kept is None:
            return p
        kept = self.kept[:, head, places.rows][..., places.keys]
        return p * kept * (1 / (1 - self.dropout))


@dataclass(frozen=True, kw_only=True)
class TokenPositions:
    """The positions of a turn's tokens in their sequences."""

    rows: slice
    """This rank's queries that take part in the turn."""
    queries: Tensor
    """(n,) int64."""
    keys: Tensor
    """(m,) int64."""
    causal: bool
    """Whether some keys are later than some queries. True only if both are the same tokens."""

    @property
    def layout(self) -> BlockLayout:
        """The block layout of the turn's queries and keys."""
        return whole_layout(len(self.queries), len(self.keys), causal=self.causal)

    def local(self, starts: Tensor | None) -> Tensor | None:
        """Return `starts` of full sequences as positions among the keys, (B, n) int32."""
        return None if starts is None else local_starts(starts, self.queries, self.keys)


def local_starts(starts: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return how many keys are before the start of each query, (B, n) int32.

    Args:
        starts: (B, T), first visible key of each query, in full sequences.
        queries: (n,) positions.
        keys: (m,) positions, ascending.
    """
    return torch.searchsorted(keys.to(starts.dtype), starts[:, queries].contiguous(), out_int32=True)  # 1


def kept_of(attend: CausalAttention, q: Tensor, length: int, own: Tensor) -> Tensor | None:
    """Return which probabilities dropout keeps for this rank's queries, (B, H, n, T) bool; None outside of training or
    without dropout. The random state advances as in one process.

    Args:
        attend: The attention module.
        q: (B, H, n, D) queries of this rank.
        length: T, tokens of a full sequence.
        own: (n,) positions of the queries.
    """
    if not attend.training or attend.dropout == 0:
        return None
    seed = attend.draw_seed()

    def drawn() -> tuple[Tensor]:  # 3
        shape = q.shape[0], 1, length, length
        return (torch.cat([attend.kept(shape, seed + head)[:, :, own] for head in range(q.shape[1])], 1),)

    return computed_once(drawn)[0]


def _finite(logarithm: Tensor) -> Tensor:
    """Return the logarithms as (…, 1), with 0 instead of -inf. Otherwise -inf - (-inf) gives NaN."""
    return logarithm.masked_fill(logarithm == -torch.inf, 0).unsqueeze(-1)

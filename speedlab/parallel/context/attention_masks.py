"""What the queries of a ring do not see besides what is later: keys of other documents, and what dropout drops.

B sequences of T tokens, H heads; in a turn n queries of this rank and m keys of another one, all ascending.

1. `starts` (B, T) are of whole sequences: the first key that each query may see. In a turn that is a place among the m
   keys, so that the kernel for blocks takes it as it takes one of whole sequences.
2. Heads that the kernel does not take, other devices than CPUs, and dropout go through scores, of one head at a time
   (n, m) in float32.
3. What is dropped is drawn for whole sequences, as one process draws it, and kept for this rank's queries.
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
    """Of one call of attention on one rank."""

    starts: Tensor | None
    """(B, T) int32; None: each sequence is one document."""
    kept: Tensor | None
    """(B, H, own queries, T) bool: which probabilities are not dropped; None: all."""
    dropout: float

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, places: TokenPositions) -> tuple[Tensor, Tensor]:
        """Of a turn (output, natural logarithm of the sum of exponentials (B, H, n), -inf where a query sees no key)"""
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
        """Of q, k and v in a turn, where `gradient`, `out` and `logarithm` are those of all turns together."""
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
        """(B, n, m), -inf where a query does not see a key."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).mT).mul_(scale)
        if places.causal:
            scores.masked_fill_(places.queries[:, None] < places.keys, -torch.inf)
        if self.starts is not None:
            scores.masked_fill_(places.keys < self.starts[:, places.queries, None], -torch.inf)
        return scores

    def _dropped(self, p: Tensor, head: int, places: TokenPositions) -> Tensor:
        """`p` (B, n, m) of a head, without what is dropped."""
        if self.kept is None:
            return p
        kept = self.kept[:, head, places.rows][..., places.keys]
        return p * kept * (1 / (1 - self.dropout))


@dataclass(frozen=True, kw_only=True)
class TokenPositions:
    """Where the tokens of a turn are in their sequences."""

    rows: slice
    """Of this rank's queries, those of the turn."""
    queries: Tensor
    """(n,) int64."""
    keys: Tensor
    """(m,) int64."""
    causal: bool
    """Whether some keys are later than some queries: those of the same tokens."""

    @property
    def layout(self) -> BlockLayout:
        """Of the turn's queries and keys, among themselves."""
        return whole_layout(len(self.queries), len(self.keys), causal=self.causal)

    def local(self, starts: Tensor | None) -> Tensor | None:
        """`starts` of whole sequences as places among the keys: (B, n) int32."""
        return None if starts is None else local_starts(starts, self.queries, self.keys)


def local_starts(starts: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Of `starts` (B, T) for these queries (n,), how many of the ascending `keys` (m,) come before: (B, n) int32."""
    return torch.searchsorted(keys.to(starts.dtype), starts[:, queries].contiguous(), out_int32=True)  # 1


def kept_of(attend: CausalAttention, q: Tensor, length: int, own: Tensor) -> Tensor | None:
    """What `attend` keeps of the probabilities of its heads, for this rank's queries, which stand at `own` (n,) in
    whole sequences of `length`: (B, H, n, T) bool, in training with dropout. The random state moves as in one process.
    """
    if not attend.training or attend.dropout == 0:
        return None
    seed = attend.draw_seed()

    def drawn() -> tuple[Tensor]:  # 3
        shape = q.shape[0], 1, length, length
        return (torch.cat([attend.kept(shape, seed + head)[:, :, own] for head in range(q.shape[1])], 1),)

    return computed_once(drawn)[0]


def _finite(logarithm: Tensor) -> Tensor:
    """(…, 1), where no key is seen 0: else -inf would be taken from -inf."""
    return logarithm.masked_fill(logarithm == -torch.inf, 0).unsqueeze(-1)

"""Packed attention written out: every rule, every device, one sequence after the other.

Scores are taken in float32 at least, block of queries by block, so that they never exist whole.
Block sizes depend on the sequence alone: a neighbour cannot change a job's rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_fx.ops.attention_rule import AttentionRule, Sequences

# Scores of one block: they stay in a CPU's cache, or within 256 MiB on a GPU.
_CPU_SCORES, _CUDA_SCORES = 1 << 20, 1 << 26


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of scores and log-sum-exp: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries of one sequence, and the weights that they give to the keys they see."""

    queries: slice  # within the sequence
    keys: slice
    weights: Tensor  # [Hkv, G * queries, keys], before dropout
    slope: Tensor | None  # derivative of the soft cap
    keep: Tensor | None  # of dropout


@dataclass(frozen=True, slots=True)
class SequenceMath:
    """One sequence's queries and keys, heads first, in the wide type.

    q [Hkv, G, L, D], k [Hkv, L, D], v [Hkv, L, Dv]; G query heads share a key head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rule: AttentionRule
    sequences: Sequences
    start: int

    @classmethod
    def take(
        cls, q: Tensor, k: Tensor, v: Tensor, span: slice, rule: AttentionRule, rows: Sequences
    ) -> "SequenceMath":
        """Cut one sequence out of a row of q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv]."""
        wide, groups = wide_dtype(q.dtype), k.shape[1]
        heads = torch.unflatten(q[span].to(wide), 1, (groups, q.shape[1] // groups))
        return cls(
            heads.permute(1, 2, 0, 3).contiguous(),
            k[span].to(wide).transpose(0, 1).contiguous(),
            v[span].to(wide).transpose(0, 1).contiguous(),
            rule,
            rows,
            span.start,
        )

    def forward(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The attention of the sequence: out [L, H, Dv] and lse [H, L], wide."""
        groups, share, length, _ = self.q.shape
        out = self.v.new_empty(groups, share, length, self.v.shape[2])
        lse = self.q.new_empty(groups, share, length)
        for queries, keys in self._pieces():
            scores, _ = self._scores(queries, keys)
            total = torch.logsumexp(scores, -1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.to(total.dtype).view(groups, share, 1))
            block = self._block(queries, keys, scores, total, None)
            lse[:, :, queries] = total
            product = self._dropped(block.weights, block.keep) @ self.v[:, keys]
            out[:, :, queries] = torch.unflatten(product, 1, (share, -1))
        return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1)

    def backward(self, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients dq [L, H, D], dk [L, Hkv, D], dv [L, Hkv, Dv], wide.

        dout [L, H, Dv], lse [H, L] as `forward` gave it
        """
        groups, share, _, _ = self.q.shape
        dout = torch.unflatten(dout.to(self.q.dtype), 1, (groups, share)).permute(1, 2, 0, 3)
        lse = torch.unflatten(lse, 0, (groups, share))
        dq, dk, dv = torch.empty_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        for queries, keys in self._pieces():
            scores, slope = self._scores(queries, keys)
            block = self._block(queries, keys, scores, lse[:, :, queries], slope)
            grad = dout[:, :, queries].flatten(1, 2)
            dv[:, keys] += self._dropped(block.weights, block.keep).mT @ grad
            dscores = self._score_gradient(block, grad)
            dq[:, :, queries] = torch.unflatten(dscores @ self.k[:, keys], 1, (share, -1))
            dk[:, keys] += dscores.mT @ self.q[:, :, queries].flatten(1, 2)
        return dq.flatten(0, 1).transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        groups, share, length, _ = self.q.shape
        budget = _CUDA_SCORES if self.q.is_cuda else _CPU_SCORES
        step = max(16, budget // (groups * share * length))
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield slice(start, stop), slice(*self.rule.visible(start, stop, length))

    def _scores(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Scores [Hkv, G, queries, keys], -inf where hidden, and the soft cap's derivative."""
        rule, slope = self.rule, None
        q = self.q[:, :, queries]
        product = q.flatten(1, 2) @ self.k[:, keys].mT
        scores = torch.unflatten(product.mul_(rule.scale), 1, (q.shape[1], -1))
        if rule.softcap:
            bent = scores.div_(rule.softcap).tanh_()
            slope = 1 - bent.square()
            scores = bent.mul_(rule.softcap)
        rows, columns = range(queries.start, queries.stop), range(keys.start, keys.stop)
        hidden = rule.hidden(rows, columns, scores.device)
        return (scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)), slope

    def _block(
        self, queries: slice, keys: slice, scores: Tensor, lse: Tensor, slope: Tensor | None
    ) -> _Block:
        """Turn scores into weights, in place."""
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().flatten(1, 2)
        keep = None
        if self.rule.drops:
            heads, rows = scores.shape[0] * scores.shape[1], self.start
            keep = self.sequences.keep(_shift(queries, rows), _shift(keys, rows), heads)
            keep = keep.reshape(weights.shape)
        return _Block(queries, keys, weights, slope, keep)

    def _dropped(self, values: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None:
            return values
        return torch.where(keep, values * self.sequences.keep_scale, 0)

    def _score_gradient(self, block: _Block, grad: Tensor) -> Tensor:
        """The gradient of the unscaled products q kᵀ, [Hkv, G * queries, keys]."""
        dweights = self._dropped(grad @ self.v[:, block.keys].mT, block.keep)
        mean = (block.weights * dweights).sum(-1, keepdim=True)
        dscores = dweights.sub_(mean).mul_(block.weights)
        if block.slope is not None:
            dscores.mul_(block.slope.flatten(1, 2))
        return dscores.mul_(self.rule.scale)


def _shift(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)

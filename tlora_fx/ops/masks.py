"""Keyed dropout masks of the jobs of a row.

The mask of a token depends on its job's seed and step, the site, its index in the job's step and
the column, on nothing else: not on neighbours, packing or order.
"""

from dataclasses import dataclass

from torch import Tensor

from tlora_fx.ops.philox import keep_rows, keep_scale, threshold_of
from tlora_fx.ops.tables import check_keys, check_rates, check_token_index, token_bounds


@dataclass(frozen=True, slots=True)
class JobMasks:
    """The masks of one site of a row, drawn job by job on demand."""

    bounds: list[int]
    rates: list[float]
    keys: list[tuple[int, int]]
    token_index: Tensor | None  # int64 [tokens], None when no job drops
    site: int

    @classmethod
    def read(
        cls,
        rates: Tensor,
        segments: Tensor,
        keys: Tensor,
        token_index: Tensor,
        site: Tensor | int,
        tokens: int,
    ) -> "JobMasks":
        """Check the tables of a row; keys and indices only when some job drops.

        raises  SegmentError, MaskKeyError
        """
        bounds = token_bounds(segments, tokens)
        values = check_rates(rates, len(bounds) - 1)
        if not any(threshold_of(rate) for rate in values):
            return cls(bounds, values, [], None, 0)
        pairs = check_keys(keys, len(values))
        return cls(bounds, values, pairs, check_token_index(token_index, tokens), int(site))

    def drops(self, job: int) -> bool:
        """Whether the job has tokens and a rate above zero."""
        return self.bounds[job] < self.bounds[job + 1] and threshold_of(self.rates[job]) > 0

    def keep(self, job: int, columns: int) -> Tensor:
        """The mask of the job's tokens, bool [its tokens, columns]; True is kept."""
        assert self.token_index is not None
        rows = self.token_index[self.bounds[job] : self.bounds[job + 1]]
        return keep_rows(rows, columns, threshold_of(self.rates[job]), self.keys[job], self.site)

    def apply_(self, job: int, part: Tensor) -> Tensor:
        """Drop and rescale the job's tokens [its tokens, columns] in place."""
        keep = self.keep(job, part.shape[1])
        return part.mul_(keep_scale(self.rates[job])).masked_fill_(keep.logical_not_(), 0)

"""Each job's loss, from the last hidden state to a sum, without the logits of the whole row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from tlora_fx.config.base_spec import Objective
from tlora_fx.model.batch import IGNORED, SIGNED
from tlora_fx.model.objectives import TokenTerms, token_losses
from tlora_fx.ops import cross_entropy, segment_spread, segment_sum, tp_argmax, tp_cross_entropy
from tlora_fx.ops.parallel import GROUP

#: Of a chunk's logits in float32.
CHUNK_BYTES = 512 * 2**20
# Rows that chunks begin at multiples of: compiled code copies tables at odd addresses.
_ALIGNED = 16

#: From a chunk's hidden states, targets and tables to the loss of each row.
Chunk: TypeAlias = Callable[..., Tensor]
#: From logits [n, V] of the next n target rows, float32 or wider, to a token of each, int64 [n].
Draw: TypeAlias = Callable[[Tensor], Tensor]
#: What is done to hidden states, each by itself.
Finish: TypeAlias = Callable[[Tensor], Tensor]


class ChunkedLoss(nn.Module):
    """Sums of token losses, a job each.

    head         the graph from the last hidden state to the logits
    vocabulary   size of the logits' last dimension
    tables       names of the row tables that the head takes after the hidden state
    lines        whether jobs own lines, as in batch form: each row is then a line of one token
    shards       processes that hold the logits of a piece of the vocabulary each; `vocabulary` is
                 then a piece's size
    frozen       no job trains anything in the head

    The hidden state's gradient, and that of what is trained in the head, is taken in the forward,
    chunk by chunk, so that no logits are computed twice. For a head that is not frozen this needs
    `weights`, losses that depend on no other row's, and one process.

    `objective` says what a row's loss is of: its next token, or a classifier's label.

    `pieces` is set while a program is exported: the number of chunks, whatever the row. Chunks of
    such a program are not computed again in the backward.

    `weights` is set while rows run whose losses are then multiplied by it, [J]: gradients are taken
    for it, so that their numbers are those of a loss that was weighted at once.

    `predicted` is set while a model is evaluated. Each forward then adds a tensor to it, int64 [N]:
    the most likely token at each target row. `token_losses` likewise gets the loss of each, [N].
    """

    def __init__(
        self,
        head: nn.Module,
        vocabulary: int,
        tables: tuple[str, ...],
        *,
        lines: bool = False,
        shards: int = 1,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.shards = shards
        self.frozen = frozen
        self.head = head
        self.tables = tables
        self.objective: Objective = "tokens"
        self.pieces: int | None = None
        self.weights: Tensor | None = None
        self.predicted: list[Tensor] | None = None
        self.token_losses: list[Tensor] | None = None
        self._draw: Draw | None = None
        self._is_by_row = False
        self._terms: TokenTerms | None = None
        self._logprobs: dict[int, Tensor] = {}
        self.width_dim = 1 if lines else 0
        self.chunk_rows = max(64, CHUNK_BYTES // (4 * vocabulary) // _ALIGNED * _ALIGNED)

    def forward(
        self,
        hidden: Tensor,
        target_rows: Tensor,
        targets: Tensor,
        target_segments: Tensor,
        *tables: Tensor,
        finish: Finish | None = None,
    ) -> Tensor:
        """The loss sum of each job.

        hidden            [1, T, H], in batch form [B, S, H]
        target_rows       int64 [N], flat positions with a target
        targets           int64 [N]
        target_segments   int32 [J + 1] on the CPU
        tables            the row's tables, as named by `tables`
        finish            done to each hidden state before the head: a norm that is compiled with it
        returns           [J], float32, or wider where the logits are; by row, [N]
        """
        chunk: Chunk = self.chunk if finish is None else partial(self.finished_chunk, finish)
        if self.pieces is not None:
            row = (hidden, target_rows, targets, target_segments)
            return self._in_pieces(chunk, self.pieces, *row, *tables)
        if self._terms is not None:
            means = partial(self._chunk_with_means, finish) if self._terms.smooths else None
            chunk = partial(_chunk_by_terms, means or chunk, self._logprobs)
        row_tables = dict(zip(self.tables, tables, strict=True))
        flat = hidden.reshape(-1, hidden.shape[-1])
        if target_rows.shape[0] == 0:
            wide = torch.promote_types(torch.float32, hidden.dtype)
            if self.predicted is not None:
                self.predicted.append(target_rows)
            jobs = target_segments.shape[0] - 1
            return flat[:0].sum().to(wide).expand(0 if self._is_by_row else jobs)
        shared = (target_rows, targets, target_segments, row_tables)
        if self.predicted is not None:
            losses = self._scored(self._chunks(flat, *shared), finish)
            if self._terms is not None and self.token_losses is None:
                losses = token_losses(-losses, self._terms.values)
        elif self._is_taken_ahead():
            weights = self._row_weights(flat, target_segments, target_rows.shape[0])
            losses = self._losses_ahead(chunk, flat, weights, *shared)
        else:
            chunks = self._chunks(flat, *shared)
            losses = torch.cat([self._losses(chunk, args) for args in chunks])
        if self.token_losses is not None:
            self.token_losses.append(losses)
        return losses if self._is_by_row else cast(Tensor, segment_sum(losses, target_segments))

    @contextmanager
    def by_terms(self, terms: TokenTerms) -> Iterator[None]:
        """Inside, target rows have other losses, and their log-probabilities are kept."""
        self._terms, self._logprobs = terms, {}
        try:
            yield
            if self._logprobs:
                kept = [self._logprobs[start] for start in sorted(self._logprobs)]
                terms.logprobs = torch.cat(kept)
                terms.keep(terms.logprobs)
        finally:
            self._terms, self._logprobs = None, {}

    @contextmanager
    def by_row(self) -> Iterator[None]:
        """Inside, each forward gives the loss of each target row: some depend on other rows'."""
        self._is_by_row = True
        try:
            yield
        finally:
            self._is_by_row = False

    @contextmanager
    def scoring(self) -> Iterator[list[Tensor]]:
        """Inside, no forward keeps anything for a backward; each adds its token losses, [N]."""
        predicted, self.predicted, self.token_losses = self.predicted, [], []
        try:
            yield self.token_losses
        finally:
            self.predicted, self.token_losses = predicted, None

    @contextmanager
    def drawing(self, draw: Draw) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Inside, each forward draws a token at each target row, whatever the target there.

        yields   for each forward so far the tokens, int64 [N], and their losses, [N]
        """
        self._draw = draw
        try:
            with self.scoring() as losses:
                assert self.predicted is not None
                yield self.predicted, losses
        finally:
            self._draw = None

    def pieces_for(self, rows: int) -> int:
        """Number of chunks that so many target rows need."""
        return max(1, -(-rows // self.chunk_rows))

    def _cuts(self, rows: int) -> list[int]:
        """Where chunks of target rows begin, and where the last one ends; as few as fit, and alike.

        Of a model that is compiled as one their number is a power of two, so that code is made
        again only when the rows of targets double.
        """
        if torch.compiler.is_compiling():
            pieces = 1
            while pieces * self.chunk_rows < rows:
                pieces *= 2
            return [rows * piece // pieces for piece in range(pieces + 1)]
        pieces, unit = self.pieces_for(rows), math.gcd(self.chunk_rows, _ALIGNED)
        starts = (-(-rows * piece // (pieces * unit)) * unit for piece in range(pieces))
        return [*starts, rows]

    def _chunks(
        self,
        flat: Tensor,
        target_rows: Tensor,
        targets: Tensor,
        target_segments: Tensor,
        row_tables: dict[str, Tensor],
    ) -> Iterator[tuple[Tensor, ...]]:
        """What `chunk` takes, for one chunk's rows after the other."""
        for start, stop in pairwise(self._cuts(target_rows.shape[0])):
            rows = target_rows[start:stop]
            # What is evaluated or scored is the log-probability first, whatever a job trains by.
            asked = None if self.predicted is not None else self._terms
            terms = () if asked is None else (start, asked.values[start:stop])
            yield (
                flat.index_select(0, rows).unsqueeze(self.width_dim),
                targets[start:stop],
                *self._tables_of(row_tables, rows, target_segments, start, stop),
                *terms,
            )

    def _losses(self, chunk: Chunk, args: tuple[Tensor, ...]) -> Tensor:
        """The losses of one chunk's rows; its logits are computed again in the backward."""
        losses = checkpoint(chunk, *args, use_reentrant=False, preserve_rng_state=False)
        return cast(Tensor, losses)

    def _is_taken_ahead(self) -> bool:
        """Whether the hidden state's gradient is taken in the forward.

        Not where the whole model is compiled as one: Dynamo traces no backward inside a forward.
        """
        # FSDP2 gathers a head, and sums its gradients, around its forward and backward.
        alone = self.weights is not None and not torch.distributed.is_initialized()
        known = alone and not self._is_by_row
        still = torch.compiler.is_compiling()
        return (self.frozen or known) and torch.is_grad_enabled() and not still

    def _losses_ahead(
        self,
        chunk: Chunk,
        flat: Tensor,
        weights: Tensor,
        target_rows: Tensor,
        targets: Tensor,
        *rest: Any,
    ) -> Tensor:
        """The losses of all rows, which know their gradients; `rest` as `_chunks` takes it."""
        ahead: Any = _LossAhead.apply
        trained = () if self.frozen else [p for p in self.head.parameters() if p.requires_grad]
        chunks = self._chunks(flat.detach(), target_rows, targets, *rest)
        # Rows that fill up a captured row name its last one again: they go behind all others.
        row_index = torch.where(targets == IGNORED, flat.shape[0], target_rows)
        return cast(Tensor, ahead(flat, row_index, weights, chunks, chunk, *trained))

    def _row_weights(self, hidden: Tensor, target_segments: Tensor, rows: int) -> Tensor:
        """What each row's loss is going to be multiplied with, as far as that is known, [rows]."""
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        if self.weights is None:
            return hidden.new_ones(rows, dtype=dtype)
        # A weight that is none gives a gradient all the same, if one is asked for.
        own = torch.where(self.weights == 0, 1, self.weights) if self.frozen else self.weights
        own = own.to(dtype)
        return cast(Tensor, segment_spread(own, target_segments, rows))

    def _scored(self, chunks: Iterator[tuple[Tensor, ...]], finish: Finish | None) -> Tensor:
        """The losses of all rows, [N]; what is predicted there is kept."""
        assert self.predicted is not None
        scored = [
            self._chunk_scores(hidden if finish is None else finish(hidden), *rest)
            for hidden, *rest in chunks
        ]
        self.predicted.append(torch.cat([tokens for _, tokens in scored]))
        return torch.cat([losses for losses, _ in scored])

    def _in_pieces(
        self,
        chunk: Chunk,
        pieces: int,
        hidden: Tensor,
        target_rows: Tensor,
        targets: Tensor,
        target_segments: Tensor,
        *tables: Tensor,
    ) -> Tensor:
        """The same loss sums by code that is the same for every number of targets.

        Rows of zeros, which no job's loss counts, fill each piece to one size of at least two.

        pieces    how many chunks there are; all else as for `forward`
        """
        count = target_rows.shape[0]
        size = count // pieces + 2
        padding = pieces * size - count
        flat = F.pad(hidden.reshape(-1, hidden.shape[-1])[target_rows], (0, 0, 0, padding))
        wanted = F.pad(targets, (0, padding), value=IGNORED)
        segments = torch.cat([target_segments[:-1], target_segments[-1:] + padding])
        row_tables = dict(zip(self.tables, tables, strict=True))
        if "token_index" in row_tables:
            index = row_tables["token_index"].reshape(-1)[target_rows]
            row_tables["token_index"] = F.pad(index, (0, padding))
        every = torch.arange(pieces * size, device=flat.device)
        losses = [
            chunk(
                flat[start : start + size].unsqueeze(self.width_dim),
                wanted[start : start + size],
                *self._tables_of(
                    row_tables, every[start : start + size], segments, start, start + size
                ),
            )
            for start in (piece * size for piece in range(pieces))
        ]
        return cast(Tensor, segment_sum(torch.cat(losses)[:count], target_segments))

    def chunk_sizes(self) -> list[tuple[int, ...]]:
        """Dimensions of size n, for each argument of `chunk`."""
        rows = (1 - self.width_dim,)
        return [rows, (0,), *(rows if name == "token_index" else () for name in self.tables)]

    def _tables_of(
        self, row_tables: dict[str, Tensor], rows: Tensor, segments: Tensor, start: int, stop: int
    ) -> tuple[Tensor, ...]:
        """The row's tables for the rows of one chunk."""
        chunk_tables: dict[str, Any] = dict(row_tables)
        if "segments" in row_tables:
            chunk_tables["segments"] = _segments_of_chunk(segments, start, stop)
        if "token_index" in row_tables:
            index = row_tables["token_index"].reshape(-1).index_select(0, rows)
            chunk_tables["token_index"] = index.unsqueeze(self.width_dim)
        return tuple(chunk_tables[name] for name in self.tables)

    def chunk(self, hidden: Tensor, targets: Tensor, *tables: Tensor) -> Tensor:
        """The loss of each of n rows.

        hidden    [1, n, H], in batch form [n, 1, H]
        targets   int64 [n]
        tables    the row's tables for these rows
        returns   [n]
        """
        return self._token_losses(self._logits(hidden, tables), targets)

    def finished_chunk(
        self, finish: Finish, hidden: Tensor, targets: Tensor, *tables: Tensor
    ) -> Tensor:
        """The loss of each of n rows whose hidden states are to be finished; as `chunk`."""
        return self.chunk(finish(hidden), targets, *tables)

    def _chunk_with_means(
        self, finish: Finish | None, hidden: Tensor, targets: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `chunk`, and the mean log-probability of all tokens at each row, [n]."""
        logits = _wide(self._logits(hidden if finish is None else finish(hidden), tables))
        return self._token_losses(logits, targets), logits.mean(-1) - logits.logsumexp(-1)

    def _chunk_scores(
        self, hidden: Tensor, targets: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of each of n rows and its most likely token, int64 [n]; as `chunk`."""
        logits = _wide(self._logits(hidden, tables))
        if self._draw is not None:
            drawn = self._draw(logits)
            return self._token_losses(logits, drawn), drawn
        tokens = tp_argmax(logits, GROUP) if self.shards > 1 else predicted(logits, self.objective)
        return self._token_losses(logits, targets), tokens

    def _logits(self, hidden: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """The logits of n rows, [n, V]."""
        logits: Tensor = self.head(hidden, *tables).squeeze(self.width_dim)
        return logits

    def _token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.shards > 1:
            return tp_cross_entropy(_wide(logits), targets, GROUP)
        # What is exported holds operators that others know; a CPU's compiler fuses torch's own.
        if self.objective == "tokens" and logits.is_cuda and self.pieces is None:
            losses, _ = cross_entropy(logits, targets)
            return cast(Tensor, losses)
        return row_losses(_wide(logits), targets, self.objective)


def _chunk_by_terms(
    chunk: Callable[..., Any], kept: dict[int, Tensor], hidden: Tensor, targets: Tensor, *rest: Any
) -> Tensor:
    """The loss of each of n rows by its terms, which stand behind the tables.

    kept   gets the rows' log-probabilities, by the place of the first row
    """
    *tables, start, values = rest
    found: Any = chunk(hidden, targets, *tables)
    losses, means = found if isinstance(found, tuple) else (found, None)
    kept[start] = -losses.detach()
    return token_losses(-losses, values, means)


#: By a row's table of target rows, those of its chunks: while it lives, they keep their places.
_CHUNKS: MutableMapping[Tensor, dict[tuple[int, int], Tensor]] = WeakIdKeyDictionary()


def _segments_of_chunk(segments: Tensor, start: int, stop: int) -> Tensor:
    """A row's segments as those of some of its target rows, int32 [J + 1] on the CPU."""
    own = (segments.clamp(start, stop) - start).to(torch.int32)
    if torch.compiler.is_compiling() or type(segments) is not Tensor:
        return own
    kept = _CHUNKS.setdefault(segments, {}).setdefault((start, stop), own)
    # What did not change has no new version: its copies on the device are still right.
    return kept if torch.equal(kept, own) else kept.copy_(own)


def segments_of_chunks(segments: Tensor) -> list[Tensor]:
    """Tables that forwards made of a row's, as it is now; a captured graph reads copies of them."""
    return [_segments_of_chunk(segments, *cut) for cut in _CHUNKS.get(segments, {})]


def _wide(logits: Tensor) -> Tensor:
    """Logits in float32 or wider."""
    return logits.to(torch.promote_types(torch.float32, logits.dtype))


def row_losses(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """The loss of each row, [n]; 0 where there is no target.

    logits    [n, V]
    targets   int64 [n], as `predicted` gives them; IGNORED where there is none
    source    transformers' ForSequenceClassificationLoss, of one sample
    """
    if objective == "regression":
        is_signed = targets >= SIGNED >> 1
        codes = torch.where(is_signed, targets - SIGNED, targets)
        away = logits.squeeze(-1) - codes.to(torch.int32).view(torch.float32).to(logits.dtype)
        losses = torch.where(is_signed, away, away.square())
    elif objective == "multi_label_classification":
        marks = (targets[:, None] >> torch.arange(logits.shape[-1], device=logits.device)) & 1
        every = F.binary_cross_entropy_with_logits(logits, marks.to(logits.dtype), reduction="none")
        losses = every.mean(-1)
    else:
        return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    return torch.where(targets == IGNORED, 0.0, losses)


def predicted(logits: Tensor, objective: Objective) -> Tensor:
    """The most likely token or class of each row; a mark a bit for labels; a number's bits.

    logits    [n, V]
    returns   int64 [n]
    """
    if objective == "regression":
        return logits.squeeze(-1).to(torch.float32).view(torch.int32).to(torch.int64)
    if objective == "multi_label_classification":
        bits = torch.arange(logits.shape[-1], device=logits.device)
        return ((logits > 0).to(torch.int64) << bits).sum(-1)
    return logits.argmax(-1)


class _LossAhead(torch.autograd.Function):
    """Row losses whose gradient is taken in the forward, with the weights that they will have.

    A row's gradient is linear in the weight of its loss, so the backward multiplies by what the
    weight turned out to be over what was said, which is 1 to the bit where it was known.

    All chunks are one function: their gradients meet in one buffer. Were each chunk's rows taken
    out of the hidden states by autograd, every chunk would fill and add a gradient of all rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        row_index: Tensor,
        weights: Tensor,
        chunks: Iterator[tuple[Tensor, ...]],
        losses_of: Chunk,
        *trained: Tensor,
    ) -> Tensor:
        """The losses, [N], of rows of hidden states.

        flat        [T, H]
        row_index   int64 [N], where a row's gradient belongs, each once; T: nowhere
        weights     [N], what each loss is going to be multiplied with
        chunks      as `ChunkedLoss._chunks` makes them
        losses_of   a chunk's losses, as `ChunkedLoss.chunk`
        trained     what else they depend on; the weights are exact then
        """
        gradients: list[Tensor] = []
        losses: list[Tensor] = []
        start = 0
        with _without_gradients(trained) as own:
            for hidden, targets, *tables in chunks:
                stop = start + len(targets)
                with torch.enable_grad():
                    leaf = hidden.requires_grad_()
                    chunk_losses = losses_of(leaf, targets, *tables)
                    # Not autograd.grad, under which hooks such as a FLOP counter's do not work.
                    chunk_losses.backward(weights[start:stop].to(chunk_losses.dtype))  # type: ignore[no-untyped-call]
                assert leaf.grad is not None
                gradients.append(leaf.grad)
                losses.append(chunk_losses.detach())
                start = stop
        ctx.size = flat.shape
        ctx.own, ctx.exact = own, bool(trained)
        ctx.save_for_backward(row_index, weights, *gradients)
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        """The hidden states' gradient, in their dtype; zeros in rows without a target."""
        row_index, weights, *gradients = ctx.saved_tensors
        exact = weights.new_ones(len(weights)) if ctx.exact else grad_losses[0] / weights
        factors = exact.unsqueeze(1)
        tokens, width = ctx.size
        rows = gradients[0].new_empty(len(row_index), width)
        start = 0
        for gradient in gradients:
            part = slice(start, start := start + gradient.shape[0] * gradient.shape[1])
            # The product is rounded where it is written: no float32 of all rows exists.
            torch.mul(gradient.reshape(-1, width), factors[part], out=rows[part])
        whole = rows.new_zeros(tokens + 1, width).index_copy_(0, row_index, rows)
        return whole[:tokens], None, None, None, None, *ctx.own


@contextmanager
def _without_gradients(trained: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Inside, these have no gradients; what they get is in the list afterwards, and not theirs."""
    before, found = [each.grad for each in trained], list[Tensor | None]()
    for each in trained:
        each.grad = None
    try:
        yield found
    finally:
        found += [each.grad for each in trained]
        for each, gradient in zip(trained, before, strict=True):
            each.grad = gradient

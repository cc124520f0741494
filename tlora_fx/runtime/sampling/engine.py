"""Continuous batching: completions of many jobs grow together, and a finished one gives its place.

The rows are those of training: the fused graph runs them, with the adapters as they are. A row
holds either whole prompts or the last token of each completion. Prompts come first, so all places
are taken whenever something waits. A completion takes all pages that it may need when it begins:
none has to wait or to begin again for want of a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from tlora_fx.model.batch import IGNORED, JobTokens, PackedBatch, pack
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops import norms_kept
from tlora_fx.ops.paged_attention import KeyValuePages, RowPages, page_tokens
from tlora_fx.runtime.sampling.draw import DrawOptions
from tlora_fx.runtime.sampling.token_graphs import TokenGraphs, TokenRow, draw_row, size_for

FinishReason = Literal["stop", "length", "not_finite"]


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """Request for one or more completions of one prompt.

    job      slot in the model
    limit    tokens of a completion at most
    """

    job: int
    prompt: tuple[int, ...]
    limit: int

    @property
    def kept(self) -> int:
        """Tokens whose keys and values a completion needs at most: the last one's, nobody reads."""
        return len(self.prompt) + self.limit - 1


@dataclass(eq=False, slots=True)
class GrowingSequence:
    """A completion while it is drawn.

    numbers   float64 [limit], uniform: the n-th token is drawn by the n-th
    pages     where its keys and values are; the prompt's may be others' too
    """

    request: Request
    numbers: np.ndarray[tuple[int], np.dtype[np.float64]]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    pages: list[int] = field(default_factory=list)


class PageAllocation:
    """Which pages are free, and how many sequences read each of the others."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))
        self._readers = [0] * pages

    def take(self, count: int) -> list[int]:
        """Pages of one reader; so many are free."""
        taken = [self.free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Count one reader more."""
        for page in pages:
            self._readers[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one reader less; what nobody reads is free."""
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                self.free.append(page)


class Engine:
    """Draws completions until all are finished.

    model           has its weights; its adapters do not change meanwhile
    pages           of keys and values; enough for any one completion
    max_sequences   completions that grow at a time
    max_row_tokens  prompts share a row up to so many tokens; a longer one has a row for itself
    stops           whether a completion ends with its last token
    graphs          rows of single tokens run by these, in their pages, where they are given
    between         called after each token; it lets no job in or out, and changes none that draws
    """

    def __init__(
        self,
        model: SuperModel,
        device: torch.device,
        options: DrawOptions,
        *,
        pages: int,
        max_sequences: int,
        max_row_tokens: int,
        stops: Callable[[Sequence[int]], bool],
        graphs: TokenGraphs | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.device, self.options, self.stops = model, device, options, stops
        self.max_sequences, self.max_row_tokens = max_sequences, max_row_tokens
        self.between = between
        self.page_tokens = page_tokens(device)
        self.graphs = graphs
        self.cache = KeyValuePages(pages, self.page_tokens) if graphs is None else graphs.cache
        self.pages = PageAllocation(pages)
        self.growing: list[GrowingSequence] = []

    def run(self, sequences: Iterable[GrowingSequence]) -> None:
        """Draw these; fills in their tokens."""
        waiting = deque(sequences)
        with norms_kept():
            while waiting or self.growing:
                if groups := self._admit(waiting):
                    self._read_prompts(groups)
                else:
                    self._go_on()
                self.between()

    def _admit(self, waiting: deque[GrowingSequence]) -> list[list[GrowingSequence]]:
        """Sequences that begin now, grouped by request, with their pages."""
        groups: list[list[GrowingSequence]] = []
        places, tokens = self.max_sequences - len(self.growing), 0
        while waiting and places:
            request, new = waiting[0].request, True
            shared: list[int] = []
            if groups and groups[-1][0].request is request:
                new = False
                shared = groups[-1][0].pages[: len(request.prompt) // self.page_tokens]
            needed = -(-request.kept // self.page_tokens) - len(shared)
            fits = not new or not groups or tokens + len(request.prompt) <= self.max_row_tokens
            if needed > len(self.pages.free) or not fits:
                break
            sequence = waiting.popleft()
            self.pages.share(shared)
            sequence.pages = shared + self.pages.take(needed)
            places -= 1
            if new:
                tokens += len(request.prompt)
                groups.append([])
            groups[-1].append(sequence)
        return groups

    def _read_prompts(self, groups: list[list[GrowingSequence]]) -> None:
        """Run each request's prompt once; its completions go on from it, each by its own pages."""
        groups.sort(key=lambda group: group[0].request.job)
        requests = [group[0].request for group in groups]
        row = self._row(requests, [request.prompt for request in requests])
        counts = torch.tensor([len(group) for group in groups])
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        row = replace(
            row,
            target_rows=row.target_rows.repeat_interleave(counts),
            targets=row.targets.repeat_interleave(counts),
            target_segments=bounds[row.target_segments.long()].to(torch.int32),
        )
        slots = [
            self._slot(group[0], position)
            for group in groups
            for position in range(len(group[0].request.prompt))
        ]
        sequences = [sequence for group in groups for sequence in group]
        given = self._given(row, RowPages(torch.tensor(slots)), sequences)
        tokens, logprobs = self._draw(given, len(sequences))
        self._copy_last_pages(groups)
        self.growing += sequences
        self._take(sequences, tokens, logprobs)

    def _copy_last_pages(self, groups: list[list[GrowingSequence]]) -> None:
        """Give each completion its own copy of the page that its prompt fills in part."""
        sources, targets = [], []
        for first, *others in groups:
            whole, rest = divmod(len(first.request.prompt), self.page_tokens)
            if rest:
                sources += [first.pages[whole]] * len(others)
                targets += [other.pages[whole] for other in others]
        if targets:
            self.cache.copy(sources, targets)

    def _go_on(self) -> None:
        """One more token of each completion that grows."""
        self.growing.sort(key=lambda sequence: sequence.request.job)
        growing, graphs = list(self.growing), self.graphs
        positions = [len(each.request.prompt) + len(each.tokens) - 1 for each in growing]
        slots = [self._slot(*each) for each in zip(growing, positions, strict=True)]
        requests = [each.request for each in growing]
        tokens = [each.tokens[-1:] for each in growing]
        tables, lengths = [each.pages for each in growing], [at + 1 for at in positions]
        width, longest = max(map(len, tables)), max(lengths)
        if graphs is not None:
            # What fills up the row counts as the last job's, and has a page that nobody reads.
            width, longest = graphs.width, graphs.width * self.page_tokens
            spare = graphs.cache.pages - 1
            more = size_for(len(growing)) - len(growing)
            slots += [spare * self.page_tokens] * more
            requests, tokens = requests + requests[-1:] * more, tokens + [[0]] * more
            tables, lengths = tables + [[spare]] * more, lengths + [1] * more
            positions += [0] * more
        row = self._row(requests, tokens)
        row.position_ids[0, : len(positions)] = torch.tensor(positions)
        pages = RowPages(
            torch.tensor(slots),
            torch.tensor([each + [0] * (width - len(each)) for each in tables], dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            longest,
        )
        given = self._given(row, pages, growing, len(slots))
        self._take(growing, *self._draw(given, len(growing), graphs))

    def _row(self, requests: Sequence[Request], ids: Sequence[Sequence[int]]) -> PackedBatch:
        """A row of these tokens, by job, each sequence with a target behind its last one."""
        parts = [JobTokens((), (), shift=0) for _ in self.model.jobs]
        pairs = zip(requests, ids, strict=True)
        for job, own in groupby(pairs, key=lambda pair: pair[0].job):
            sequences = [tokens for _, tokens in own]
            labels = [[IGNORED] * (len(tokens) - 1) + [0] for tokens in sequences]
            parts[job] = JobTokens(sequences, labels, shift=0)
        return pack(parts)

    def _given(
        self, row: PackedBatch, pages: RowPages, sequences: Sequence[GrowingSequence], size: int = 0
    ) -> TokenRow:
        """A row with the numbers that draw its sequences' next tokens, and others up to a size."""
        numbers = torch.zeros(max(size, len(sequences)), dtype=torch.float64)
        drawn = [each.numbers[len(each.tokens)] for each in sequences]
        numbers[: len(drawn)] = torch.tensor(drawn, dtype=torch.float64)
        return TokenRow(row, pages, numbers)

    def _draw(
        self, given: TokenRow, count: int, graphs: TokenGraphs | None = None
    ) -> tuple[list[int], list[float]]:
        """The next token of each of the row's first sequences, and its log-probability."""
        if graphs is None:
            moved = given.to(self.device)
            tokens, logprobs = draw_row(self.model, self.cache, moved, self.options)
        else:
            tokens, logprobs = graphs.draw(given)
        return tokens.tolist()[:count], logprobs.tolist()[:count]

    def _take(
        self, sequences: Sequence[GrowingSequence], tokens: list[int], logprobs: list[float]
    ) -> None:
        """Append a token to each sequence, and free the places of those that it finishes."""
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if not np.isfinite(logprob):
                sequence.finish_reason = "not_finite"
                continue
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if self.stops(sequence.tokens):
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) == sequence.request.limit:
                sequence.finish_reason = "length"
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self.pages.release(sequence.pages)
        self.growing = [each for each in self.growing if each.finish_reason is None]

    def _slot(self, sequence: GrowingSequence, position: int) -> int:
        page, offset = divmod(position, self.page_tokens)
        return sequence.pages[page] * self.page_tokens + offset

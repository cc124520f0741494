"""`tlora-fx data`: what jobs train on, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import typer
from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from tlora_fx.cli.arguments.options import JobFilePath, TrustRemoteCode, option, takes_options
from tlora_fx.cli.terminal import Console, Working, echo, print_whole
from tlora_fx.config.job import Job
from tlora_fx.config.job_file import JobFile, load_job_file
from tlora_fx.errors import TloraError, UnknownJob, nearest
from tlora_fx.inspect.wording import plural
from tlora_fx.runtime.data.samples import JobData, Sample, load_job_data
from tlora_fx.runtime.data.tables import NO_TARGET, MixedTable, SampleTable, lengths_of

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

#: Tokens of a sample that are shown at its beginning, and as many at its end.
SHOWN_AT_EACH_END = 100
_INDENT = "    "
_NO_CHARACTER = "\ufffd"
_WORD_START = "▁"
#: Rows of a histogram.
MAX_BARS = 10
BAR_COLUMNS = 40
#: Places of dropped samples that are named.
_NAMED = 8
LEGEND = "[ab] is a trained token, · parts tokens that are not trained, ↵ is a line break, ⇥ a tab"


@takes_options
def run(
    jobs: JobFilePath,
    job: list[str] | None = option(
        None, "Name of a job to show; repeatable. If not given, all jobs are shown."
    ),
    rows: int = option(3, "Samples to show of each job, token by token.", min=0),
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what each job trains on: samples token by token, lengths, what was left out.

    Reads and tokenises the data of each job as `train` does; compiles nothing and loads no weights.
    Prints how the rows are read, the optimizer steps, the tokens that are masked, cut or dropped
    and why, the first samples with trained tokens in brackets, and a histogram of lengths. The same
    of the evaluation data. If the data of a job is wrong, prints the error, shows the other jobs,
    and exits with 1.
    """
    wanted = _chosen(load_job_file(jobs, trust_remote_code=trust_remote_code), job)
    reader, out, is_right = _Reader(), Console(highlight=False), True
    if rows:
        out.print(Text(f"{LEGEND}\n", style="dim"), soft_wrap=True)
    for number, chosen in enumerate(wanted):
        out.print(Text(f"\n{chosen.name}" if number else chosen.name, style="bold"))
        try:
            data = reader.read(chosen)
        except TloraError as error:
            echo(error.with_notes(), err=True)
            is_right = False
            continue
        _show(out, data, rows)
    if not is_right:
        raise typer.Exit(1)


def _chosen(job_file: JobFile, names: Sequence[str] | None) -> list[Job]:
    """The jobs with these names, in the order of the file; raises UnknownJob."""
    known = [job.name for job in job_file.jobs]
    for name in names or ():
        if name not in known:
            raise UnknownJob(
                f"the job file has no job '{name}'",
                file=job_file.path,
                nearest=nearest(name, known),
                help="its jobs are " + ", ".join(known),
            )
    return [job for job in job_file.jobs if not names or job.name in names]


class _Reader:
    """Reads the data of jobs of one base."""

    def __init__(self) -> None:
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def read(self, job: Job) -> JobData:
        """The data of a job; raises DataError, TokenizerNotLoadable.

        What is wrong with a file or its columns is told before torch is imported.
        """
        from tlora_fx.runtime.data.tokenizer import load_tokenizer
        from tlora_fx.runtime.launching.early_checks import require_data

        require_data([job])
        with Working(Console(stderr=True), f"reading the data of {job.name}"):
            self._tokenizer = self._tokenizer or load_tokenizer(job.base)
            return load_job_data(job, self._tokenizer)


def _show(out: Console, data: JobData, rows: int) -> None:
    assert data.tokenizer is not None
    texts, job = TokenTexts(data.tokenizer), data.job
    _print_lines(out, data.report.lines())
    _print_lines(out, [_steps_line(data), *_clock_lines(data)])
    for samples in filter(None, (data.samples, data.evaluation)):
        is_evaluation = samples is data.evaluation
        if is_evaluation:
            out.print(Text(f"\n  evaluation of {job.name}", style="bold"))
        for own, table in _tables(job, samples):
            if own is not job:
                out.print(Text(f"\n  {own.data.path}", style="bold"))
            _print_lines(out, _changes(own, table, is_evaluation=is_evaluation))
            for number in range(min(rows, len(table) // job.sequences_per_sample)):
                _print_sample(out, own, table, number, texts)
        out.print()
        print_whole(out, _histogram(lengths_of(samples)))


def _tables(job: Job, samples: Sequence[Sample]) -> Iterator[tuple[Job, SampleTable]]:
    """The samples of each data set, and the job as it reads that one alone."""
    if isinstance(samples, MixedTable):
        parts = zip(job.data.parts, samples.tables, strict=True)
        for number, (part, table) in enumerate(parts):
            own = table.take(samples.places[samples.origin == number])
            if own:
                yield job.model_copy(update={"data": part}), own
    else:
        assert isinstance(samples, SampleTable)
        yield job, samples


def _print_lines(out: Console, lines: Iterable[str]) -> None:
    for line in lines:
        out.print(Text(f"  {line}"), soft_wrap=True)


def _steps_line(data: JobData) -> str:
    job, steps = data.job, data.steps
    batch, times = job.per_device_train_batch_size, job.gradient_accumulation_steps
    what = plural(batch * times, "packed sequence" if job.packing else "sample")
    size = f"at most {what} in a step" + (f" ({batch} × {times})" if times > 1 else "")
    if job.data.streaming:
        return f"steps: {steps:,} in all, {size}; the data is streamed and read as far as they need"
    epochs = steps / data.steps_per_epoch
    counts = f"{data.steps_per_epoch:,} per epoch, {steps:,} in all ({epochs:.3g} epochs)"
    return f"steps: {counts}, {size}"


def _clock_lines(data: JobData) -> Iterator[str]:
    if data.clock is not None:
        yield f"the chat template asks for the time, and is told {data.clock:%Y-%m-%d %H:%M}"


def _changes(job: Job, samples: SampleTable, *, is_evaluation: bool) -> Iterator[str]:
    """What of the tokens is masked, cut and dropped, and why."""
    table, cut = samples.table, samples.cut
    trained, total = samples.targets(job.label_shift).sum(), samples.lengths.sum()
    if not cut.labelled:
        use = "counted" if is_evaluation else "trained"
        why = _masked_because(samples)
        yield f"masked: {total - trained:,} of {total:,} tokens are not {use}: {why}"
    longer = table.lengths[samples.rows] - samples.lengths
    if longer.any():
        which = " of ".join(
            (plural(int(longer.sum()), "token"), plural(int((longer > 0).sum()), "sequence"))
        )
        yield f"cut: {which}, which are beyond max_length {cut.max_length}"
    # What is held out is of one table with what is trained, where it has been told.
    if not (is_evaluation and isinstance(job.eval_split, float)):
        yield from _dropped(job, samples)


def _masked_because(samples: SampleTable) -> str:
    layout = samples.table.counts.layout
    if layout is None or (samples.cut.whole and not samples.table.final.any()):
        return "nothing predicts the first token of a sequence"
    if samples.cut.odd_spans:
        return "the first of each chosen sequence, and what stands before a rejected completion"
    if samples.cut.whole:
        return "the first of each sequence, and turns that the data leaves out"
    if layout.format in ("messages", "sharegpt"):
        return "they are not in a turn of the assistant that is trained"
    if layout.format == "tokens":
        return "labels or masks leave them out"
    return "they stand before a completion"


def _dropped(job: Job, samples: SampleTable) -> Iterator[str]:
    """Samples of the table that have nothing to train on, by what is to blame."""
    import numpy as np

    table, cut, each = samples.table, samples.cut, job.sequences_per_sample
    longest = int(table.lengths.max(initial=0))

    def trains(max_length: int) -> np.ndarray:
        counts = table.trained(job.label_shift, max_length, whole=cut.whole).reshape(-1, each)
        return np.asarray(counts.all(axis=1))

    dropped, never = ~trains(cut.max_length), ~trains(longest)
    for which, why in (
        (dropped & ~never, f"max_length {cut.max_length} cuts before the first token to train"),
        (never, "no token is to be trained"),
    ):
        if which.any():
            places = (np.flatnonzero(which) + 1).tolist()
            named = ", ".join(map(str, places[:_NAMED])) + (", …" if places[_NAMED:] else "")
            rows = "good rows" if table.counts.bad_rows else "rows"
            rows = rows[:-1] if len(places) == 1 else rows
            yield f"dropped: {plural(len(places), 'sample')}, {why} ({rows} {named})"


def _print_sample(
    out: Console, job: Job, samples: SampleTable, number: int, texts: TokenTexts
) -> None:
    """A sample, or both sequences of a pair."""
    each = job.sequences_per_sample
    parts = samples[number * each : (number + 1) * each]
    for what, part in zip(("chosen", "rejected") if each == 2 else ("",), parts, strict=True):
        trained = [label != NO_TARGET for label in part.labels]
        # No token predicts the first one.
        trained[: job.label_shift] = [False] * job.label_shift
        facts = [plural(len(trained), "token")]
        if job.base.is_classifier:
            facts.append(f"label {_label(job, part)}, read at the token in brackets")
        else:
            facts.append(f"{sum(trained):,} trained")
        title = f"  sample {number + 1}{what and ', '}{what}: {', '.join(facts)}"
        out.print(Text(title, style="cyan"), soft_wrap=True)
        out.print(marked_text(part.input_ids, trained, texts), soft_wrap=True)


def _label(job: Job, sample: Sample) -> str:
    import numpy as np

    from tlora_fx.runtime.data.labels import decoded

    codes = np.array([label for label in sample.labels if label != NO_TARGET], np.int64)
    [value] = decoded(codes, job.base)
    if job.base.objective == "regression":
        return f"{value:g}"
    names = job.base.label_names
    if job.base.objective == "single_label_classification":
        return repr(names[int(value)])
    return ", ".join(repr(name) for name, on in zip(names, value, strict=True) if on) or "none"


def _histogram(lengths: np.ndarray) -> Table:
    """Lengths of sequences, as bars."""
    import numpy as np

    ordered = np.sort(lengths)
    middle = int(ordered[len(ordered) // 2])
    said = f"lengths: {ordered[0]:,} to {ordered[-1]:,} tokens, median {middle:,}"
    table = Table(box=None, pad_edge=False, title=f"  {said}", title_justify="left", title_style="")
    table.add_column("  tokens", justify="right", no_wrap=True)
    table.add_column("", width=BAR_COLUMNS, no_wrap=True)
    table.add_column("sequences", justify="right", no_wrap=True)
    bars = _bars(ordered)
    most = max(count for *_, count in bars)
    for low, high, count in bars:
        span = f"{low:,}" if low == high else f"{low:,}–{high:,}"
        table.add_row(f"  {span}", Bar(most, 0, count, width=BAR_COLUMNS), f"{count:,}")
    return table


def _bars(ordered: np.ndarray) -> list[tuple[int, int, int]]:
    """At most MAX_BARS ranges: first and last length of each, and how many there are.

    They are equally wide, and begin at multiples of that.
    """
    import numpy as np

    shortest, longest = int(ordered[0]), int(ordered[-1])
    width = next(
        width
        for power in range(20)
        for width in (10**power, 2 * 10**power, 5 * 10**power)
        if longest // width - shortest // width < MAX_BARS
    )
    first, last = shortest // width, longest // width
    counts = np.bincount(ordered // width - first, minlength=last - first + 1).tolist()
    return [
        (max(at * width, shortest), min(at * width + width - 1, longest), count)
        for at, count in enumerate(counts, first)
    ]


class TokenTexts:
    """The text of single tokens, as people can read it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {at for at, token in added if token.special} | {*tokenizer.all_special_ids}
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def is_special(self, token: int) -> bool:
        """Whether a token stands for no text, such as the end of a sequence."""
        return token in self._special

    def _text(self, token: int) -> str:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return f"<token {token}>"
        if self.is_special(token):
            return piece
        if piece.startswith(_WORD_START):
            # Decoding one such token alone would drop the space.
            return piece.replace(_WORD_START, " ")
        text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        # A part of a character is no text: then as the vocabulary writes it.
        return piece if not isinstance(text, str) or not text or _NO_CHARACTER in text else text


def marked_text(ids: Sequence[int], trained: Sequence[bool], texts: TokenTexts) -> Text:
    """A sequence as text, which is broken where its own lines end.

    ids       token ids
    trained   of each token, whether it is trained
    """
    middle = range(SHOWN_AT_EACH_END, len(ids) - SHOWN_AT_EACH_END)
    marked, joins = Text(_INDENT), False
    for at, token in enumerate(ids):
        if at in middle:
            if at == middle.start:
                others = sum(trained[middle.start : middle.stop])
                what = f"{len(middle):,} tokens left out, {others:,} of them trained"
                marked.append(f"\n{_INDENT}… {what} …\n{_INDENT}", style="dim")
            joins = False
            continue
        text = texts.text(token)
        shown = text.replace("\n", "↵").replace("\t", "⇥")
        if trained[at]:
            marked.append(f"[{shown}]", style="bold green")
        else:
            marked.append("·" if joins else "", style="dim")
            marked.append(shown, style="magenta" if texts.is_special(token) else "")
        joins = not trained[at]
        if text.endswith("\n") and at + 1 not in {len(ids), middle.start if middle else None}:
            marked.append(f"\n{_INDENT}")
            joins = False
    return marked

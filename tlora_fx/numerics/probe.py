"""Try a fused graph against the base itself: what no rule foresaw shows in the numbers.

Each job runs alone, a sequence at a time, on the base as its author wrote it, wrapped by PEFT:
nothing traced, packed or fused. The fused graph runs all sequences in one row. Logits of every
sequence and gradients of every tensor that a job trains must agree. Dropout is off on both sides;
the model is in training mode.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.codegen.ahead import ahead
from tlora_fx.config.job import Job
from tlora_fx.errors import FusedDiffers
from tlora_fx.ir.graph import HEAD, GroupGraph, TensorRef, is_call
from tlora_fx.model.backbone import Backbone, longest_sequence, text_config
from tlora_fx.model.batch import JobTokens, PackedBatch, pack, pad
from tlora_fx.numerics.base_alone import (
    BaseAlone,
    BaseFails,
    Outcome,
    layers_left_out,
    token_loss,
)
from tlora_fx.numerics.evaluate import BOUNDS, bound_of, relative
from tlora_fx.numerics.interpreter import (
    ATTENTION,
    ATTENTION_RATE,
    HALF,
    CannotRun,
    Interpreter,
    Setting,
    is_dropout,
)
from tlora_fx.numerics.reading import GraphLocation
from tlora_fx.numerics.rows import LARGEST_ID
from tlora_fx.numerics.tensors import Seeded, Unchecked, band_of, buffers_of
from tlora_fx.tracing.adapters import trained_bias
from tlora_fx.tracing.rope import has_longrope, original_length

logger = logging.getLogger(__name__)

#: Lengths that models branch on: short, odd, beyond a usual block.
LENGTHS = (2, 17, 17, 65)
#: So many of the jobs that are not compared bring so many tokens.
NEIGHBOURS, NEIGHBOUR = 4, 3
#: Layers of a base with fewer parameters all run, of a larger one the first and last of each kind.
SMALL_BASE = 1 << 26
#: Multiplications that a probe of a large base may take, and its bytes of weights.
PRODUCTS, WEIGHTS = 4e10, 6 << 30
#: Rows of a large base's output embeddings that are drawn: all that the probe's tokens name, and
#: some more.
HEAD_ROWS = 1024
#: Tokens of a probe at most: attention grows with their square.
TOKENS = 1024
#: What passes where half precision runs wider, and the graph has constants that were rounded to it.
ROUNDED = 1e-2
#: The base's own noise lifts a bound to so many times what it is, and to so many times the bound
#: at most; by less where the bound is wide already, as in half precision. There two runs of equal
#: code part by about the noise: 2 to 4 % of bfloat16's logits and 2 to 6 % of its gradients at 32
#: layers.
TIMES_NOISE, MAX_NARROW = 10.0, 10.0
TIMES_NOISE_WIDE, MAX_WIDE = 4.0, 6.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe.

    lengths    of the sequences that ran
    logits     the largest relative difference of a sequence's logits from those alone
    gradient   the same of all gradients of a job
    bound      what passes
    skipped    why nothing was compared, "" where it was
    rounding   how far the base's half precision parts, where float32 agrees; "" where it does not
    """

    lengths: tuple[int, ...] = ()
    logits: float = 0.0
    gradient: float = 0.0
    bound: float = 0.0
    skipped: str = ""
    rounding: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"not tried against the base alone: {self.skipped}"
        return (
            f"equals the base alone at lengths {', '.join(map(str, self.lengths))}: logits within "
            f"{self.logits:.1e}, gradients within {self.gradient:.1e}"
        )


def probe_compiled(group: GroupGraph, backbone: Backbone, jobs: Sequence[Job]) -> ProbeResult:
    """Try a fused graph on random weights on the CPU, half precision as float32.

    A base that is large runs with the first and the last layer of each structure, and `HEAD_ROWS`
    rows of its output embeddings; one beyond the stated memory is not tried before its weights are
    there.

    raises    FusedDiffers, naming job, sequence and the first module whose values part
    """
    wide = torch.float32 if backbone.dtype in HALF else None
    layers = _layers(group, backbone)
    count = _parameters(backbone, layers)
    if count * (wide or backbone.dtype).itemsize > WEIGHTS:
        return ProbeResult(skipped=f"{count / 1e9:.1f} billion parameters are too many to draw")
    affordable = int(PRODUCTS / (8 * count))
    lengths = _lengths(backbone, min(TOKENS, max(sum(LENGTHS[:2]), affordable)))
    if head := _large_head(backbone):
        tensors = _Wide(group, backbone, wide, head)
        try:
            found = _Probe(group, backbone, jobs, tensors, layers, lengths, wide).run()
            if not found.skipped:
                return found
            why = found.skipped
        except (FusedDiffers, RuntimeError, IndexError) as error:
            why = str(error)
        # The graph or the base counts the vocabulary, or they differ: the whole head tells.
        logger.info("tried with all rows of the output embeddings: %s", why)
    tensors = _Wide(group, backbone, wide)
    return _Probe(group, backbone, jobs, tensors, layers, lengths, wide).run()


def probe_loaded(
    group: GroupGraph,
    backbone: Backbone,
    jobs: Sequence[Job],
    value: Callable[[str], Tensor],
    longest: int,
    tokens: int = 2048,
    ids: Sequence[Sequence[int]] = (),
) -> ProbeResult:
    """Try a fused graph on the base's weights, where they lie.

    A base that is large runs with the first and the last layer of each structure: deeper, half
    precision makes much of rounding, and less is seen in more time. A router that chooses experts
    by little makes any difference of a rounding. So where half precision differs, both run in
    float32 too: there they must agree, and the fused graph's half precision must be about as near
    to it as the base's own.

    value     a tensor of the base by canonical name
    longest   tokens of the jobs' longest sample
    tokens    how many run at most
    ids       of each job, those that its samples hold: a model may treat one unlike all others
    raises    FusedDiffers, naming job, sequence and the first module whose values part
    """
    lengths, layers = _lengths(backbone, tokens, longest), _layers(group, backbone)

    def probe(wide: torch.dtype | None) -> _Probe:
        tensors = _Loaded(group, value, wide)
        return _Probe(group, backbone, jobs, tensors, layers, lengths, wide, ids)

    half = probe(None)
    try:
        return half.run()
    except FusedDiffers as differs:
        if backbone.dtype not in HALF:
            raise
        exact = probe(torch.float32)
        try:
            found = exact.run()
        except torch.OutOfMemoryError:
            raise differs from None
        if found.skipped or not half.is_as_near_as_the_base(exact):
            raise
        kind = str(backbone.dtype).removeprefix("torch.")
        return replace(found, rounding=f"{differs.facts['found']} in {kind}")


class _Damped(Seeded):
    """Seeded tensors whose adapters add about as much whatever their scaling.

    Beside branches that outweigh the base, rounding is all that is seen.

    wide        in place of half precision
    compared    jobs that are; others are there as neighbours, whose adapters share their memory
                and learn nothing
    """

    def __init__(
        self, group: GroupGraph, buffers: Mapping[str, Tensor], wide: torch.dtype | None
    ) -> None:
        super().__init__(0, buffers)
        self._wide = wide
        self.compared: Collection[str] = ()
        self._factors = {
            job.name: 1 / max([1.0, *(abs(site.scaling) for site in job.sites.values())])
            for job in group.jobs
        }

    def own(self, job: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that a job trains."""
        dtype = self._dtype(dtype)
        is_up = any(up in name for up in ("lora_B", "lora_embedding_B"))
        if job not in self.compared and len(shape) > 1:
            cut = self._cut(f"job {job} {name}", shape, dtype)
            return cut * self._factors[job] if is_up else cut
        known = (job, name, shape) in self._own
        tensor = super().own(job, name, shape, dtype)
        if not known and is_up:
            with torch.no_grad():
                tensor.mul_(self._factors[job])
        if not known and tensor.requires_grad:
            # A part of the gradient of all jobs' adapters would keep the whole.
            tensor.register_hook(torch.clone)  # type: ignore[no-untyped-call]
        return tensor

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._wide if self._wide is not None and dtype in HALF else dtype


class _Wide(_Damped):
    """Seeded tensors of a base, half precision in a wider dtype.

    head   parameters of the output embeddings of which `HEAD_ROWS` rows are drawn, by canonical
           name
    """

    def __init__(
        self,
        group: GroupGraph,
        backbone: Backbone,
        wide: torch.dtype | None,
        head: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(group, buffers_of(backbone), wide)
        self._head = head
        self._tables = _embeddings(backbone)
        rows = self._head | self._tables
        for each in backbone.model.parameters():
            if each.dim() > 1 and backbone.names[id(each)] not in rows:
                band = band_of(each.shape[-1])
                self._largest[band] = max(each.numel(), self._largest.get(band, 0))

    def base(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of the base; of an embedding the rows that the probe's tokens read."""
        dtype = self._dtype(dtype)
        if name in self._head:
            shape = (HEAD_ROWS, *shape[1:])
        elif name in self._tables and name not in self._base:
            table = torch.empty(shape, dtype=dtype)
            rows = min(shape[0], LARGEST_ID)
            table[:rows] = self._draw(f"base {name}", (rows, *shape[1:]), dtype)
            self._base[name] = table
        return super().base(name, shape, dtype)


def _embeddings(backbone: Backbone) -> set[str]:
    """The tables of embeddings that nothing else reads, by canonical name."""
    readers: dict[str, set[type[nn.Module]]] = {}
    for module in backbone.model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                readers.setdefault(backbone.names[id(parameter)], set()).add(type(module))
    return {name for name, kinds in readers.items() if kinds == {nn.Embedding}}


def _large_head(backbone: Backbone) -> frozenset[str]:
    """Parameters of a large base's output embeddings, by canonical name."""
    find = getattr(backbone.model, "get_output_embeddings", None)
    head = find() if find is not None else None
    weight = getattr(head, "weight", None)
    if not isinstance(head, nn.Linear) or weight is None or weight.numel() <= SMALL_BASE:
        return frozenset()
    return frozenset(backbone.names[id(each)] for each in head.parameters())


class _Loaded(_Damped):
    """The base's own tensors; those of jobs are drawn."""

    def __init__(
        self, group: GroupGraph, value: Callable[[str], Tensor], wide: torch.dtype | None
    ) -> None:
        super().__init__(group, {}, wide)
        self._value = value

    def base(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of the base, where it lies."""
        return self._value(name).detach().to(self._dtype(dtype))

    def _draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return super()._draw(name, shape, dtype).to(self.device)

    device = torch.device("cpu")


def _layers(group: GroupGraph, backbone: Backbone) -> frozenset[str]:
    """Which layers run: of a large base the first and the last of each structure."""
    every = [block.instances for block in group.blocks.values() if block.name != HEAD]
    if sum(parameter.numel() for parameter in backbone.model.parameters()) <= SMALL_BASE:
        return frozenset(path for paths in every for path in paths)
    return frozenset(path for paths in every for path in (paths[0], paths[-1]))


def _parameters(backbone: Backbone, layers: frozenset[str]) -> int:
    """How many numbers the base has outside of the layers that do not run."""
    left_out = tuple(f"{path}." for path in layers_left_out(backbone.model, layers))
    return sum(
        parameter.numel()
        for name, parameter in backbone.model.named_parameters()
        if not name.startswith(left_out)
    )


def _lengths(backbone: Backbone, tokens: int, longest: int = 0) -> tuple[int, ...]:
    """Lengths of the sequences to run, of so many tokens together; the first two always.

    longest    is run, as far as the tokens go
    """
    config = text_config(backbone.model)
    most = longest_sequence(backbone.model) or math.inf
    windows = {
        value + 2
        for name, value in (vars(config).items() if config is not None else ())
        if type(value) is int and value > 1 and ("window" in name or "chunk" in name)
    }
    # A job's sequences share one set of longrope's frequencies, so all lie on one side of it.
    turn = original_length(config) if has_longrope(backbone.model) else 0
    short = sum(length <= turn for length in LENGTHS) > 1
    longest = min(longest, tokens - sum(LENGTHS))
    wanted = [*LENGTHS[:2], longest, *LENGTHS[2:], *sorted(windows)]
    taken: list[int] = []
    for length in wanted:
        if turn and (length <= turn) != short:
            continue
        if 1 < length <= most and (len(taken) < 2 or sum(taken) + length <= tokens):
            taken.append(length)
    return tuple(taken)


class _Probe:
    """One comparison of a fused graph with the base alone."""

    def __init__(
        self,
        group: GroupGraph,
        backbone: Backbone,
        jobs: Sequence[Job],
        tensors: _Damped,
        layers: frozenset[str],
        lengths: tuple[int, ...],
        wide: torch.dtype | None,
        ids: Sequence[Sequence[int]] = (),
    ) -> None:
        self.group, self.backbone, self.jobs, self.ids = group, backbone, list(jobs), ids
        self.tensors, self.layers, self.lengths, self.wide = tensors, layers, lengths, wide
        self.device = torch.device("cpu")
        vocabulary = group.vocabulary
        if backbone.spec.is_classifier:
            vocabulary = backbone.config.get_text_config().vocab_size or vocabulary
        self.largest = min(vocabulary, LARGEST_ID) - 1
        self.chosen = _one_of_each(group, self.jobs)
        tensors.compared = {self.jobs[index].name for index in self.chosen}
        still = wide is not None or _drops(group, backbone)
        self.alone = BaseAlone(backbone, tensors, layers, wide, still=still)
        self.outcomes: dict[int, tuple[Outcome, Outcome]] = {}

    def is_as_near_as_the_base(self, exact: _Probe) -> bool:
        """Whether fused numbers are about as near to exact ones as the base's own, after `run`.

        exact    the same in a wider dtype
        """
        if self.lengths != exact.lengths:
            return False
        base, fused = 0.0, 0.0
        for index, sides in self.outcomes.items():
            wide, _ = exact.outcomes[index]
            base, fused = (
                max([known, *_differences(wide, own)])
                for known, own in zip((base, fused), sides, strict=True)
            )
        return fused <= max(TIMES_NOISE_WIDE * base, self._bound())

    def run(self) -> ProbeResult:
        """Compare, at all lengths at which the base runs.

        raises    FusedDiffers
        """
        refs = (node.meta.get("tensor") for graph in self.group.graphs() for node in graph.nodes)
        stored = next((ref for ref in refs if isinstance(ref, TensorRef) and ref.form), None)
        if stored is not None:
            return ProbeResult(
                skipped=f"the graph holds {stored.name} in another form than the base"
            )
        while self.lengths:
            try:
                return self._compared()
            except BaseFails as failure:
                self.lengths = tuple(n for n in self.lengths if n < failure.tokens)
                reason = str(failure)
            except Unchecked as unchecked:
                return ProbeResult(skipped=str(unchecked))
        return ProbeResult(skipped=reason)

    def _compared(self) -> ProbeResult:
        self.alone.load()
        self.device = self.alone.device
        if isinstance(self.tensors, _Loaded):
            self.tensors.device = self.device
        if self.device.type == "cuda":  # the fused graph's kernels compile while the base runs
            ahead.try_once("probe", self.backbone, self._fused)
        alone = {
            index: self.alone.run(self.jobs[index], self._sequences(index)) for index in self.chosen
        }
        fused = self._fused()
        self.outcomes = {
            index: (outcome, fused[self.jobs[index].name]) for index, outcome in alone.items()
        }
        worst_logits = worst_gradient = 0.0
        for index, outcome in alone.items():
            job, bound = self.jobs[index], self._bound()
            values = [*outcome.logits, *outcome.gradients.values()]
            if not all(bool(torch.isfinite(part).all()) for part in values):
                return ProbeResult(skipped="the base's numbers are not finite on these weights")
            mine = fused[job.name]
            logits = [relative(a, b) for a, b in zip(outcome.logits, mine.logits, strict=True)]
            gradient = relative(_flat(outcome.gradients), _flat(mine.gradients, outcome.gradients))
            if max([*logits, gradient]) > bound:
                bound = self._lifted(job, index, outcome, bound)
            if max([*logits, gradient]) > bound:
                raise self._differs(job, index, logits, gradient, bound)
            worst_logits = max([worst_logits, *logits])
            worst_gradient = max(worst_gradient, gradient)
        return ProbeResult(self.lengths, worst_logits, worst_gradient, self._bound())

    def _bound(self) -> float:
        """What passes: by the narrowest dtype in which the graph computes, or runs here."""
        if self.wide is not None:
            rounded = any(value.dtype in HALF for value in self.group.constants.values())
            return ROUNDED if rounded else BOUNDS[self.wide]
        return bound_of(self.group)

    def _lifted(self, job: Job, index: int, alone: Outcome, bound: float) -> float:
        """The bound, lifted by the base's own noise.

        That is what becomes of a sequence that runs in two lines, and of one whose embeddings are
        moved by a rounding.
        """
        sequences = self._sequences(index)
        others = [
            self.alone.run(job, sequences, copies=2),
            self.alone.run(job, sequences, disturbed=True),
        ]
        noise = max(difference for other in others for difference in _differences(alone, other))
        wide = bound >= ROUNDED
        times, most = (TIMES_NOISE_WIDE, MAX_WIDE) if wide else (TIMES_NOISE, MAX_NARROW)
        return max(bound, min(times * noise, most * bound))

    def _sequences(self, index: int) -> list[list[int]]:
        """The tokens of a job: all lengths where it is compared.

        Every second one is of its samples, but in the longest: no line pads that one.
        """
        source = Random(f"probe {index}")  # noqa: S311  (tokens to try, no secrets)
        largest = self.largest
        lengths = self.lengths if index in self.chosen else self._beside(index)
        drawn = [[source.randint(min(1, largest), largest) for _ in range(n)] for n in lengths]
        if len(self.ids) > index and self.ids[index]:
            ids = cycle(self.ids[index])
            for sequence in drawn:
                if len(sequence) < max(lengths):
                    sequence[1::2] = islice(ids, len(sequence) // 2)
        return drawn

    def _beside(self, index: int) -> tuple[int, ...]:
        """What a job brings that is not compared: one short sequence, or none."""
        neighbours = [n for n in range(len(self.jobs)) if n not in self.chosen]
        return (NEIGHBOUR,) if index in neighbours[:NEIGHBOURS] else ()

    def _row(self) -> PackedBatch:
        """One row of all jobs; what pads a line are tokens that a model could take for some."""
        parts = []
        for index, job in enumerate(self.jobs):
            sequences = self._sequences(index)
            parts.append(JobTokens(sequences, sequences, seed=job.seed))
        if self.group.form == "packed":
            return pack(parts).to(self.device)
        row, source = pad(parts), Random("padding")  # noqa: S311  (tokens to try, no secrets)
        largest = self.largest
        width = row.input_ids.shape[1]
        for line, sequence in enumerate(ids for part in parts for ids in part.sequences):
            padding = [source.randint(0, largest) for _ in range(width - len(sequence))]
            row.input_ids[line, len(sequence) :] = torch.tensor(padding, dtype=torch.int64)
        return row.to(self.device)

    def _fused(self, watch: Any = None) -> dict[str, Outcome]:
        row = self._row()
        names = [job.name for job in self.jobs]
        setting = Setting(row, names, self.layers, watch, silent=True, logits=True, wide=self.wide)
        interpreter = Interpreter(self.group, setting, self.tensors, {})
        try:
            with torch.enable_grad():
                logits = interpreter.run()
        except CannotRun as error:
            raise Unchecked(str(error)) from error
        leaves = interpreter.reader.leaves
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        losses = []
        for name, slot in self._slots():
            part = logits[slot]
            ids = row.input_ids[slot]
            parts[name].append(part.detach())
            losses.append(token_loss(part, ids))
        gradients = torch.autograd.grad(
            torch.stack(losses).sum(), list(leaves.values()), allow_unused=True
        )
        outcomes = {name: Outcome(parts[name], {}) for name in names}
        for (name, key), gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                outcomes[name].gradients[key] = gradient
        return outcomes

    def _slots(self) -> Iterator[tuple[str, Any]]:
        """Whose each sequence of the row is, and where its tokens lie."""
        start = line = 0
        for index, job in enumerate(self.jobs):
            for sequence in self._sequences(index):
                length = len(sequence)
                packed = self.group.form == "packed"
                yield job.name, (0, slice(start, start + length)) if packed else (
                    line, slice(0, length)
                )  # fmt: skip
                start, line = start + length, line + 1

    def _differs(
        self, job: Job, index: int, logits: list[float], gradient: float, bound: float
    ) -> FusedDiffers:
        worst = max(range(len(logits)), key=lambda number: logits[number])
        forward = logits[worst] > bound
        where = self._first_part(job, index, worst, bound) if forward else {}
        what = (
            f"logits of {self.lengths[worst]} tokens differ by {logits[worst]:.1e}"
            if forward
            else f"logits agree, gradients differ by {gradient:.1e}"
        )
        return FusedDiffers(
            f"the base does not compute for job '{job.name}' in a shared row what it does alone",
            job=job.name,
            form=self.group.form,
            **where,
            expected=f"a relative difference of at most {bound:.0e}",
            found=what,
            help="the base's code depends on something that tracing does not keep, such as the "
            "length, its own state, a mask, a dropout of attention or an autograd function; "
            + (
                "set base.attention: batch"
                if self.group.form == "packed"
                else "it cannot be shared by jobs"
            ),
        )

    def _first_part(self, job: Job, index: int, worst: int, bound: float) -> dict[str, object]:
        """The first module, as the base runs, whose value is another one in the fused graph."""
        slots = [slot for name, slot in self._slots() if name == job.name]
        values: dict[str, tuple[Any, Tensor]] = {}

        def watch(node: Any, place: GraphLocation, value: Any) -> None:
            if node.op == "call_function" and isinstance(value, Tensor) and value.dim() > 1:
                path = place.path(str(node.meta.get("path", "")))
                values[path] = (node, value.detach())

        self._fused(watch)
        slot = slots[worst]
        for path, value in self.alone.outputs(job, self._sequences(index)[worst]):
            if path not in values:
                continue
            node, whole = values[path]
            if whole.dim() != value.dim() or whole.shape[-1] != value.shape[-1]:
                continue
            line, tokens = slot
            # A value that all lines share has one.
            part = whole[min(line, len(whole) - 1)][tokens]
            if part.shape == value[0].shape and relative(value[0], part) > bound:
                return {
                    "module": path,
                    "node": node.format_node(),
                    "source": node.meta.get("source") or None,
                }
        return {}


def _drops(group: GroupGraph, backbone: Backbone) -> bool:
    """Whether the base as its author wrote it, or an adapter, has a dropout."""
    module = backbone.spec.module
    if module is None or any(isinstance(part, nn.Dropout) and part.p for part in module.modules()):
        return True
    if any(site.dropout for job in group.jobs for site in job.sites.values()):
        return True
    nodes = [node for graph in group.graphs() for node in graph.nodes]
    return any("rate" in node.meta or is_dropout(node) for node in nodes) or any(
        is_call(node, ATTENTION) and node.args[ATTENTION_RATE] for node in nodes
    )


def _one_of_each(group: GroupGraph, jobs: Sequence[Job]) -> list[int]:
    """The first job of each structure: what it trains, and of which kind.

    A job is left out whose every adapter stands, of that kind, among those of another.
    """
    seen: dict[frozenset[Hashable], int] = {}
    for index, job in enumerate(jobs):
        rest = (trained_bias(job), job.adapter_dtype)
        sites = group.jobs[index].sites
        kinds = frozenset((path, site.kind, rest) for path, site in sites.items())
        seen.setdefault(kinds, index)
    return [index for kinds, index in seen.items() if not any(kinds < other for other in seen)]


def _differences(one: Outcome, other: Outcome) -> Iterator[float]:
    """How far another outcome is from one: all gradients together, and each sequence's logits."""
    yield relative(_flat(one.gradients), _flat(other.gradients, one.gradients))
    yield from (relative(a, b) for a, b in zip(one.logits, other.logits, strict=True))


def _flat(gradients: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> Tensor:
    """All gradients as one vector, zeros for those that are not there."""
    names = sorted(like if like is not None else gradients)
    parts = [
        gradients[name] if name in gradients else torch.zeros_like((like or gradients)[name])
        for name in names
    ]
    return torch.cat([part.flatten().double() for part in parts]) if parts else torch.zeros(0)

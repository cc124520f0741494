"""What a profile says of a base, as tables that many groups are costed with at once.

Everything that does not depend on a group is computed here, once a base: curves by tensor-parallel
size on common grids, slopes for the work that adapters bring, sizes, and the optimizer. Times are
milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlora_fx.cost.demand import Array
from tlora_fx.cost.fit import Curve, Launches, LayerTimes, Term, Timed, Work
from tlora_fx.cost.hardware import GIB, gpu_of_device
from tlora_fx.cost.model_facts import LayerFacts, ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.planners.nonnegative import fit
from tlora_fx.planners.scaling import carried
from tlora_fx.scheduler.estimator_curves import Pieces, Places, highest, summed

TP = (1, 2, 4, 8)
#: As tlora_fx/cost/memory.py has them: what is not given out, and the part lost in gaps.
RESERVED_GIB, GAPS = 1.5, 0.04
#: Milliseconds that one adapter adds to one linear, forward and backward, where no kernel is
#: fused: each adapter is two small products in turn. Measured: benchmarks/results/
#: site-2026-11-22.json, row layer-8, arm `loop` in eager mode, (21.68 - 9.49) ms over 56 adapters.
UNFUSED_MS = 0.2177
#: Names of the curves of a row's tokens; the number of a curve is its place times the sizes of tp.
ROW_CURVES = ("forward", "backward", "root", "saved", "forward peak", "backward peak", "root saved")
LOSS_CURVES = ("forward", "backward", "saved", "peak")
#: Slopes of a term beside its curve.
SLOPES = ("squares", "sites", "job_sites", "site_tokens", "rank_tokens")


@dataclass(frozen=True, slots=True)
class BaseFit:
    """Tables of one base on one kind of GPU.

    Those by tp have a row for each of `tp` where small rows run as CUDA graphs, and then one for
    each of `tp` where they do not (see Plan.captures).

    row, loss, host     curves: of a row's tokens, of its targets, of a round's tokens
    forward, backward   [tp, 5] milliseconds by SLOPES of all layers
    forward_host, backward_host   [tp, 6] of the host, however many tokens: of a row, by SLOPES;
                        nothing where rows run as CUDA graphs
    saved               [tp, 5] bytes by SLOPES of all layers
    forward_peak, backward_peak   [tp, 5] bytes by SLOPES of the dearest layer
    narrower            [tp] an adapter's columns in one process, over all of them
    optimizer           milliseconds a job, a tensor, a number
    sites               linears of a layer that may have adapters
    columns             of these linears, in and out
    exact               [tp] whether layers of that size were measured as they are
    peak_flops          operations a second: of the data sheet, else of the fastest row measured
    """

    facts: ModelFacts
    profile: Profile
    tp: tuple[int, ...]
    row: Pieces
    loss: Pieces
    host: Pieces
    forward: Array
    backward: Array
    forward_host: Array
    backward_host: Array
    saved: Array
    forward_peak: Array
    backward_peak: Array
    narrower: Array
    optimizer: tuple[float, float, float]
    sites: int
    columns: float
    exact: tuple[bool, ...]
    peak_flops: float

    @classmethod
    def of(cls, facts: ModelFacts, profile: Profile, tp: Sequence[int] = TP) -> BaseFit:
        """Fitted to a profile's points as the planners fit them, small rows as CUDA graphs.

        tp   sizes of tensor parallelism that may be chosen; what cannot be cut is left out
        """
        sizes = tuple(size for size in tp if divides(facts, size))
        profiles = (profile.as_captured(), profile)
        every = [_LayersAt.of(facts, one, size) for one in profiles for size in sizes]
        root = [_root(one) for one in profiles for _ in sizes]
        loss = [_loss(one) for one in profiles]
        curves = [[one.curves[name] if name in one.curves else beside[name]
                   for one, beside in zip(every, root, strict=True)]
                  for name in ROW_CURVES]  # fmt: skip
        host = Curve.through([(float(one.tokens), one.ms) for one in profile.host])
        shapes = _adapted(facts)
        columns = float(sum(inner + outer for inner, outer in shapes))
        cut = [sum(narrow(inner + outer, facts.hidden, size) for inner, outer in shapes)
               for _ in profiles for size in sizes]  # fmt: skip
        return cls(
            facts=facts,
            profile=profile,
            tp=sizes,
            row=Pieces.of([curve for own in curves for curve in own]),
            loss=Pieces.of([one[name] for one in loss for name in LOSS_CURVES]),
            host=Pieces.of([host]),
            forward=_table(every, "forward"),
            backward=_table(every, "backward"),
            forward_host=np.array([one.host["forward"] for one in every]),
            backward_host=np.array([one.host["backward"] for one in every]),
            saved=_table(every, "saved"),
            forward_peak=_table(every, "forward peak"),
            backward_peak=_table(every, "backward peak"),
            narrower=np.array(cut) / columns if columns else np.ones(len(cut)),
            optimizer=_optimizer(profile),
            sites=len(shapes),
            columns=columns,
            exact=tuple(one.exact for one in every),
            peak_flops=_peak(profile, facts.dtype),
        )

    def curve(self, name: str) -> int:
        """The number of a row's curve at the first tp; the others follow."""
        return ROW_CURVES.index(name) * 2 * len(self.tp)

    def loss_curve(self, name: str, size: Places) -> Places:
        """The numbers of a loss's curve for places in tables by tp."""
        launched = size >= len(self.tp)
        return np.asarray(LOSS_CURVES.index(name) + len(LOSS_CURVES) * launched)

    @property
    def usable_bytes(self) -> float:
        """What the allocator may give out; endless where the profile does not say."""
        size = self.profile.hardware.memory_gib
        return max(0.0, size - RESERVED_GIB) * GIB * (1 - GAPS) if size else float("inf")


def divides(facts: ModelFacts, tp: int) -> bool:
    """Whether heads, key-value heads and widths can be cut into so many parts."""
    if tp == 1:
        return True
    attended = [one for layer in facts.layers for one in layer.attention]
    heads = [n for one in attended for n in (one.heads, one.key_value_heads)]
    widths = [n for layer in facts.layers for pair in layer.matrices for n in pair]
    return bool(attended) and not any(n % tp for n in heads + widths)


def narrow(width: float, hidden: int, tp: int) -> float:
    """Columns of an adapter in one process: those of the hidden state stay whole."""
    return width if tp == 1 else hidden + (width - hidden) / tp


def _adapted(facts: ModelFacts) -> list[tuple[int, int]]:
    """(in, out) of the linears that jobs adapt in a layer; all of them where there are no jobs."""
    layer = next((one for one in facts.layers if one.sites), facts.layers[0])
    return [(site.inner, site.outer) for site in layer.sites] or list(layer.matrices)


@dataclass(frozen=True, slots=True)
class _LayersAt:
    """All layers at one tp, summed.

    curves   by name, of a row's tokens
    slopes   by the same names [5]
    host     by direction [6] what the host takes (see BaseFit)
    """

    curves: dict[str, Curve]
    slopes: dict[str, Array]
    host: dict[str, Array]
    exact: bool

    @classmethod
    def of(cls, facts: ModelFacts, profile: Profile, tp: int) -> _LayersAt:
        kinds: dict[str, LayerFacts] = {}
        for layer in facts.layers:
            kinds.setdefault(layer.structure, layer)
        counts = Counter(layer.structure for layer in facts.layers)
        found = {name: carried(profile, layer, facts, tp) for name, layer in kinds.items()}
        whole = {name: carried(profile, layer, facts, 1) for name, layer in kinds.items()}
        times = {
            name: LayerTimes.of(one.profile, whole[name].profile) for name, one in found.items()
        }
        lowest = facts.layers[0].structure
        rest = Counter(counts)
        rest[lowest] -= 1
        each = [(float(counts[name]), one) for name, one in times.items()]
        timed: dict[str, list[tuple[float, Timed]]] = {
            "forward": [(n, one.forward) for n, one in each],
            "backward": [(float(rest[name]), one.backward) for name, one in times.items()]
            + [(1.0, times[lowest].first)],
        }
        terms: dict[str, list[tuple[float, Term]]] = {
            name: [(n, one.device) for n, one in own] for name, own in timed.items()
        }
        terms["saved"] = [(n, one.saved) for n, one in each]
        curves = {name: summed([(n, term.curve) for n, term in own]) for name, own in terms.items()}
        slopes = {name: np.sum([n * _slopes(term.slopes) for n, term in own], axis=0)
                  for name, own in terms.items()}  # fmt: skip
        peaks = {
            "forward peak": [one.forward_peak for one in times.values()],
            "backward peak": [one.backward_peak for one in times.values()],
        }
        for name, largest in peaks.items():
            curves[name] = highest([term.curve for term in largest])
            slopes[name] = np.max([_slopes(term.slopes) for term in largest], axis=0)
        host = {name: np.sum([n * _launches(one.host) for n, one in own], axis=0)
                for name, own in timed.items()}  # fmt: skip
        return cls(curves, slopes, host, all(one.exact for one in found.values()))


def _slopes(work: Work) -> Array:
    return np.array([getattr(work, name) for name in SLOPES])


def _launches(host: Launches) -> Array:
    return np.array([host.start, 0.0, host.site, host.job_site, 0.0, 0.0])


def _table(every: Sequence[_LayersAt], name: str) -> Array:
    return np.array([one.slopes[name] for one in every])


def _root(profile: Profile) -> dict[str, Curve]:
    """Embedding, positions and last norm."""
    there = Curve.through([(float(one.tokens), one.forward_ms) for one in profile.root])
    back = Curve.through([(float(one.tokens), one.backward_ms) for one in profile.root])
    saved = Curve.through([(float(one.tokens), one.saved_bytes) for one in profile.root])
    return {"root": summed([(1.0, there), (1.0, back)]), "root saved": saved}


def _loss(profile: Profile) -> dict[str, Curve]:
    return {
        "forward": Curve.through([(float(one.targets), one.forward_ms) for one in profile.loss]),
        "backward": Curve.through([(float(one.targets), one.backward_ms) for one in profile.loss]),
        "saved": Curve.through([(float(one.targets), one.saved_bytes) for one in profile.loss]),
        "peak": Curve.through([(float(one.targets), one.peak_bytes) for one in profile.loss]),
    }


def _peak(profile: Profile, dtype: str) -> float:
    gpu = gpu_of_device(profile.hardware.gpu)
    if gpu is not None:
        return gpu.peak_tflops(dtype) * 1e12
    rows = [(layer, point) for layer in profile.layers if layer.tp == 1 for point in layer.points]
    return max(
        (4 * layer.elements * point.tokens / max(point.forward_ms + point.backward_ms, 1e-9) * 1e3
         for layer, point in rows),
        default=0.0,
    )  # fmt: skip


def _optimizer(profile: Profile) -> tuple[float, float, float]:
    """As cost.py fits it: milliseconds a job, a tensor, a number."""
    if not profile.optimizer:
        return 0.0, 0.0, 0.0
    rows = np.array([[1.0, one.tensors, one.parameters] for one in profile.optimizer])
    start, tensor, number = fit(rows, np.array([one.ms for one in profile.optimizer]))
    return float(start), float(tensor), float(number)

"""Model for planning, as data: its layers, their weights, sites and attention.

`facts.py` reads it from graphs; here nothing needs torch, so that what only computes with it starts
quickly. Sizes are those of the whole model, also where a pass has cut its tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tlora_fx.errors import BaseUnknown, nearest

#: Rows of up to so many tokens a process of tp run as CUDA graphs: larger ones are bound by the GPU
#: anyway, and a graph keeps its memory.
CAPTURED_TOKENS = 6144
#: Bytes of a number, by its dtype's name.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """One frozen linear that jobs adapt in a shared operator.

    ranks   of each job's adapter, 0 for jobs without one
    """

    inner: int
    outer: int
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """Columns that an adapter reads and writes for each token."""
        return self.inner + self.outer


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention operator of a layer."""

    heads: int
    key_value_heads: int
    head_dim: int
    window: int = -1

    @property
    def width(self) -> int:
        """Columns of q, and of what attention gives."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer.

    path           in the base
    structure      what makes layers of a base alike: the shapes of their matrices, their attention
    weight_bytes   frozen tensors
    tail_bytes     what compiled layers leave free behind adapted weights on CUDA
    matrices       (in, out) of each frozen matrix
    sites          where jobs have adapters in shared operators
    trained        numbers that each job trains here
    """

    path: str
    structure: str
    weight_bytes: int
    tail_bytes: int
    matrices: tuple[tuple[int, int], ...]
    attention: tuple[Attention, ...]
    sites: tuple[SiteFacts, ...]
    trained: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers that each token is multiplied with."""
        return sum(inner * outer for inner, outer in self.matrices)

    @property
    def adapted(self) -> bool:
        """Whether any job trains anything here."""
        return any(self.trained)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model.

    title            as people call the base
    dtype            of the base, such as "bfloat16"
    hidden           columns between layers
    layers           in the order in which they run
    jobs             names, in the order of every table
    root_bytes       frozen tensors outside of layers and head, the embedding among them
    head_bytes       frozen tensors of the head; 0 where they are the embedding's own
    root_trained     numbers that each job trains outside of layers
    tensors          trained tensors of each job
    trained_bytes    of one number of an adapter
    states           tensors of a parameter's size that each job's optimizer keeps, in float32
    launched         why no row runs as a CUDA graph: names of operators that read tables of jobs on
                     the host, "batch form"; empty where rows may (see `row_graphs`)
    """

    title: str
    dtype: str
    hidden: int
    vocabulary: int
    layers: tuple[LayerFacts, ...]
    jobs: tuple[str, ...]
    root_bytes: int
    head_bytes: int
    root_trained: tuple[int, ...]
    tensors: tuple[int, ...]
    trained_bytes: int
    states: tuple[int, ...]
    launched: tuple[str, ...] = ()

    @property
    def captures(self) -> bool:
        """Whether rows may run as CUDA graphs, under plans that can."""
        return not self.launched

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the base."""
        return ITEM_BYTES[self.dtype]

    @property
    def lowest(self) -> int:
        """The first layer whose backward anybody needs; below it nothing needs a gradient."""
        if any(self.root_trained):
            return -1
        return next((i for i, one in enumerate(self.layers) if one.adapted), len(self.layers))

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers that each job trains."""
        per_layer = [layer.trained for layer in self.layers]
        return tuple(map(sum, zip(self.root_trained, *per_layer, strict=True)))

    @property
    def base_bytes(self) -> int:
        """All frozen tensors."""
        return self.root_bytes + self.head_bytes + sum(one.weight_bytes for one in self.layers)


# Bases that are known by name, so that a job on them can be described without loading anything.
#
# Traces name no files: of their jobs only the base's name, a rank, a batch and lengths are known.
# A known base also gives the `ModelFacts` that a profile is carried to.


ALL_LINEAR = "all-linear"
#: Adapters and their gradients in float32, and two states of AdamW.
ADAPTER_BYTES, ADAM_STATES = 4, 2
#: Behind an adapted weight is space for this many ranks, or a multiple: see ops/kernels/packed.py.
TAIL, WIDEST_TAIL = 64, 128


@dataclass(frozen=True, slots=True)
class BaseShape:
    """The sizes of a base whose layers are all alike, in the way of Llama.

    name     short, as traces and tables say it
    norms    numbers of a layer's norms
    tied     the head is the embedding
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    norms: int
    dtype: str = "bfloat16"
    tied: bool = False

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) of each linear of a layer, by the end of its name."""
        q, kv = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def facts(self, ranks: Mapping[str, int] | None = None) -> ModelFacts:
        """The base as planners know it.

        ranks   of jobs with adapters on all linears, by name; None: no jobs
        """
        jobs = dict(ranks or {})
        item = ITEM_BYTES[self.dtype]
        sites = tuple(
            SiteFacts(inner, outer, tuple(jobs.values())) for inner, outer in self.linears.values()
        )
        layer = self._layer(sites)
        embedding = self.vocabulary * self.hidden * item
        return ModelFacts(
            title=self.name,
            dtype=self.dtype,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            layers=(layer,) * self.layers,
            jobs=tuple(jobs),
            root_bytes=embedding + self.hidden * item,
            head_bytes=0 if self.tied else embedding,
            root_trained=(0,) * len(jobs),
            tensors=(2 * len(sites) * self.layers,) * len(jobs),
            trained_bytes=ADAPTER_BYTES,
            states=(ADAM_STATES,) * len(jobs),
        )

    def _layer(self, sites: tuple[SiteFacts, ...]) -> LayerFacts:
        matrices = tuple(sorted(self.linears.values()))
        attention = Attention(self.heads, self.key_value_heads, self.head_dim)
        item = ITEM_BYTES[self.dtype]
        width = sum(site.width for site in sites)
        trained = tuple(width * rank for rank in (sites[0].ranks if sites else ()))
        return LayerFacts(
            path="layers",
            structure=structure_of(matrices, (attention,)),
            weight_bytes=item * (sum(a * b for a, b in matrices) + self.norms),
            tail_bytes=sum(item * tail * (site.width + tail) for site in sites
                           if (tail := tail_of(sum(site.ranks)))),
            matrices=matrices,
            attention=(attention,),
            sites=sites,
            trained=trained,
        )  # fmt: skip


def structure_of(matrices: Iterable[tuple[int, int]], attention: Iterable[Attention]) -> str:
    """A text that layers of one structure share, whatever the base is called."""
    counted = sorted(Counter(matrices).items())
    words = [f"{inner}x{outer}*{times}" for (inner, outer), times in counted]
    for one in attention:
        window = "" if one.window < 0 else f"w{one.window}"
        words.append(f"attention{one.heads}/{one.key_value_heads}x{one.head_dim}{window}")
    return " ".join(words)


def tail_of(ranks: int) -> int:
    """Columns that compiled layers leave behind a weight for so many ranks."""
    tail = -(-ranks // TAIL) * TAIL
    return tail if tail <= WIDEST_TAIL else 0


def chunk_rows(vocabulary: int) -> int:
    """Rows of which logits exist at the same time: see model/loss.py."""
    return max(64, 2**29 // (4 * vocabulary) // 16 * 16)


#: Known bases by short name: the shapes of their published configs.
BASES: Mapping[str, BaseShape] = {
    "llama-3-8b": BaseShape(
        "llama-3-8b", 4096, 14336, 32, 8, 128, layers=32, vocabulary=128256, norms=2 * 4096
    ),
    "qwen3-8b": BaseShape(
        "qwen3-8b", 4096, 12288, 32, 8, 128, layers=36, vocabulary=151936, norms=2 * (4096 + 128)
    ),
}


def find_base(name: str) -> BaseShape:
    """The known base of a short name; raises BaseUnknown."""
    if name in BASES:
        return BASES[name]
    raise BaseUnknown(
        f"the sizes of base '{name}' are not known",
        nearest=nearest(name, BASES),
        help=f"known by name: {', '.join(BASES)}; others are read from a job file",
    )

"""What planning knows of a model, as data: its layers, their weights, sites and attention.

`facts.py` reads it from graphs; here nothing needs torch, so that what only computes with it starts
quickly. Sizes are those of the whole model, also where a pass has cut its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    room_bytes     what compiled layers leave free behind adapted weights on CUDA
    matrices       (in, out) of each frozen matrix
    sites          where jobs have adapters in shared operators
    trained        numbers that each job trains here
    """

    path: str
    structure: str
    weight_bytes: int
    room_bytes: int
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

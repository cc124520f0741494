"""The data that every view of a Shared Super-Model is made of: `ssm.json`.

`ssm.txt`, `report.txt` and the screen of `tlora-fx inspect` are rendered from this alone, so none
of them needs torch. Within one `schema` number fields are only ever added, and readers pass over
what they do not know; a field that changes its meaning, or leaves, raises the number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tlora_fx.errors import DumpNotReadable
from tlora_fx.inspect.read_back import from_json, to_json

T = TypeVar("T")
SCHEMA = 1
FILE = "ssm.json"


@dataclass(frozen=True, slots=True)
class BaseEntry:
    """The frozen base.

    title          as the job file names it
    architecture   class of its module
    dtype          of its parameters, such as "bfloat16"
    layers         paths of all layers, in the order in which they run
    """

    title: str
    architecture: str
    dtype: str
    layers: list[str]


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job and its adapters.

    ranks, scalings, dropouts   what its sites have, each value once, ascending
    kinds                       "lora", "dora", "embedding", "saved" (a trained copy), ...
    targets                     last names of the modules that it adapts
    sites, lowered              its sites, and how many of them run in a shared operator
    parameters                  numbers that it trains
    """

    name: str
    ranks: list[int]
    scalings: list[float]
    dropouts: list[float]
    kinds: list[str]
    targets: list[str]
    sites: int
    lowered: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Branch:
    """What one job has at one row of the listing.

    ranks            of the layers that the row stands for, each value once
    kind             as in JobEntry
    lowered          it runs in the row's operator, with the other jobs
    as_it_is         why it does not
    parameters       that it trains in one layer, mean over the layers
    flop_per_token   of the job's own tokens, mean over the layers; None where unknown
    """

    job: str
    ranks: list[int]
    kind: str
    lowered: bool
    as_it_is: str | None
    parameters: float
    flop_per_token: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One module of a layer, or of the root.

    module            path; relative to the layer inside a block, "" for the layer itself
    operator          the operator that matters, or the arithmetic in short
    shape, dtype      of its result; T tokens, or B lines of S tokens, J jobs
    flop_per_token    forward, shared work and the branches of all jobs at equal shares of tokens;
                      two a multiply-add, one an element of other arithmetic; None where unknown
    flop_per_length   forward, per token and token of its sequence (attention)
    flop_per_row      forward, once a row whatever its length (DoRA's norms)
    weight_bytes      frozen tensors that it reads, for one layer
    adapter_bytes     what all jobs train here, for one layer, mean over the layers
    role              "shared" or "loss"
    nodes             operators that it stands for
    source            the line of model code that it comes from
    """

    module: str
    operator: str
    detail: str
    shape: list[int | str]
    dtype: str
    flop_per_token: float | None
    flop_per_length: float
    flop_per_row: float
    weight_bytes: int
    adapter_bytes: float
    role: str
    nodes: int
    source: str
    branches: list[Branch]


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A run of rows: code that equal layers share, or a part of the root.

    name      of the class in ssm.py
    layers    paths of the layers that it stands for, empty for parts of the root
    folded    the layers share one class
    why       what tells this structure apart from the first one, "" for the first
    """

    name: str
    layers: list[str]
    folded: bool
    why: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention operator.

    layers    paths of the layers that have it
    window    tokens that a token sees, -1 for all before it
    """

    layers: list[str]
    heads: int
    key_value_heads: int
    head_dim: int
    causal: bool
    window: int
    softcap: float
    sinks: bool
    dropout: float


@dataclass(frozen=True, slots=True)
class Dropout:
    """A dropout that draws the masks of its job; those of lowered adapters are in JobEntry.

    jobs    whom it serves
    """

    layers: list[str]
    module: str
    rate: float
    jobs: list[str]


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that a pass wants reported."""

    by: str
    text: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the whole model.

    sites             modules of the base at which any job trains something
    adapters          pairs of job and site
    lowered           those that run in a shared operator
    shared_nodes      operators that run once for all jobs, all layers counted
    branch_nodes      operators that run for one job only
    flop_per_token    forward, None where a part is unknown
    training_...      forward and backward, products of matrices and attention only; None where a
                      part is unknown, and in what versions before 0.2 wrote
    """

    shared_parameters: int
    shared_bytes: int
    adapter_parameters: int
    adapter_bytes: int
    sites: int
    adapters: int
    lowered: int
    shared_nodes: int
    branch_nodes: int
    flop_per_token: float | None
    flop_per_length: float
    training_flop_per_token: float | None = None
    training_flop_per_length: float | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A Shared Super-Model as plain data.

    schema    number of this layout
    version   of the tlora-fx that wrote it
    form      "packed" (all tokens in one line) or "batch" (padded lines)
    blocks    in the order in which they run
    """

    schema: int
    version: str
    base: BaseEntry
    form: str
    adapter_dtype: str
    jobs: list[JobEntry]
    blocks: list[BlockEntry]
    attention: list[Attention]
    dropouts: list[Dropout]
    totals: Totals
    notes: list[Note]

    def to_json(self) -> str:
        """The listing as text."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Listing:
        """Read a listing back; fields that this version does not know are passed over.

        raises    ValueError, KeyError or TypeError for what is no listing of this schema
        """
        return from_json(cls, text, SCHEMA)


def load_listing(folder: Path) -> Listing:
    """The listing in a dump folder, or in a file.

    raises    DumpNotReadable
    """
    return read_dump(folder / FILE if folder.is_dir() else folder, Listing.from_json)


def read_dump(path: Path, read: Callable[[str], T]) -> T:
    """What a file of a dump holds.

    raises    DumpNotReadable
    """
    try:
        return read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DumpNotReadable(
            "there is no compiled model here",
            file=path,
            found=error.strerror,
            help="write one with: tlora-fx compile jobs.yaml -o FOLDER",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DumpNotReadable(
            "this is no compiled model that this version reads",
            file=path,
            found=f"{type(error).__name__}: {error}",
            help="write it anew with: tlora-fx compile jobs.yaml -o FOLDER",
        ) from error

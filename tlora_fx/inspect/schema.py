"""The data that every view of a Shared Super-Model is made of: `ssm.json`.

`ssm.txt`, `report.txt` and the screen of `tlora-fx inspect` are rendered from this alone, so none
of them needs torch. Within one `schema` number fields are only ever added, and readers pass over
what they do not know; a field that changes its meaning, or leaves, raises the number.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tlora_fx.errors import DumpNotReadable

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
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Listing:
        """Read a listing back; fields that this version does not know are passed over.

        raises    ValueError, KeyError or TypeError for what is no listing of this schema
        """
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, expected {SCHEMA}")
        return cast(Listing, _build(cls, data))


def load_listing(folder: Path) -> Listing:
    """The listing in a dump folder, or in a file.

    raises    DumpNotReadable
    """
    path = folder / FILE if folder.is_dir() else folder
    try:
        return Listing.from_json(path.read_text(encoding="utf-8"))
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


def _build(kind: Any, data: Any) -> Any:
    """A value of a type of this file from what json.loads made of it."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        # A field with a default is one that came later: an older file may lack it.
        known = [
            f
            for f in dataclasses.fields(kind)
            if f.name in data or f.default is dataclasses.MISSING
        ]
        make: Any = kind
        return make(**{f.name: _build(hints[f.name], data[f.name]) for f in known})
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        return [_build(inner, item) for item in data]
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(data) in options or (float in options and type(data) is int):
        return data
    raise TypeError(f"{data!r} is no {kind}")

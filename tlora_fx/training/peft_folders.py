"""PEFT folders that users send, made into versions; without torch, for who answers HTTP.

The two files stay as they came. `state.json` beside them says what models here have otherwise: the
scaling, and the linears of a part of the base that the adapter leaves out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from tlora_fx.config.adapter_folder import CONFIG, WEIGHTS, read_adapter_config
from tlora_fx.config.fields import LoraSpec
from tlora_fx.errors import AdapterFolderError, TloraError
from tlora_fx.host.durable import sync_folder, write_synced
from tlora_fx.host.formats import stamp
from tlora_fx.training.folders import FORMAT, STATE
from tlora_fx.training.options import ALPHA

#: More is no adapter of anybody's, and may have no float.
MAX_ALPHA = 1 << 16
#: Of a config and of a safetensors header, at most; and numbers that are checked at a time.
CONFIG_BYTES, HEADER_BYTES, CHECKED = 1 << 20, 8 << 20, 1 << 20
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: Of each dtype of safetensors, the one in which its numbers are read; numpy has no bfloat16.
_DTYPES: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
#: Of a number of an adapter here: adapters are trained and saved in float32.
MAX_NUMBER = float(np.finfo(np.float32).max)
#: Fields of a LoraConfig by which adapters may differ: they say which tensors there are and how
#: they are scaled, or matter only to who trains them.
_FREE = frozenset({
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "lora_dropout", "init_lora_weights",
})  # fmt: skip


def adopt(folder: Path, layout: Mapping[str, Mapping[str, Any]], max_rank: int) -> dict[str, Any]:
    """Check a PEFT folder against the base, and make it a version; returns its config.

    layout     of the base: by part and path of its linears, what they return and read
    max_rank   of a model
    raises     AdapterFolderError
    """
    fields = _fields(folder)
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    if rank > max_rank or alpha > MAX_ALPHA:
        raise AdapterFolderError(
            "the adapter's rank or alpha is too large", found=f"{rank} and {alpha}"[:80],
            expected=f"{max_rank} and {MAX_ALPHA} at most",
            help="ask the operator for a larger --tinker-rank",
        )  # fmt: skip
    linears = {path: shape for own in layout.values() for path, shape in own.items()}
    scaling = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    scale = scaling / (ALPHA / rank)
    here = _require_sites(folder / WEIGHTS, linears, fields, {"A": 1.0, "B": scale}, rank)
    config: dict[str, Any] = {part: bool(here & own.keys()) for part, own in layout.items()}
    absent = {
        f"base_model.model.{path}.lora_{half}.weight": shape
        for part, own in layout.items()
        for path, (outs, ins) in own.items()
        for half, shape in (("A", (rank, ins)), ("B", (outs, rank)))
        if config[part] and path not in here
    }
    config |= {"rank": rank, "seed": 0}
    content = {"config": config, "absent": absent, "scale": scale}
    write_synced(folder / STATE, json.dumps(stamp(FORMAT) | content).encode())
    sync_folder(folder)
    return config


def largest_bytes(layout: Mapping[str, Mapping[str, Any]], max_rank: int) -> int:
    """Bytes of the weights of the largest adapter at most, in float32; as of `adopt`."""
    rows: int = sum(outs + ins for own in layout.values() for outs, ins in own.values())
    return 4 * max_rank * rows + HEADER_BYTES


def _fields(folder: Path) -> dict[str, Any]:
    """What a LoRA's config says that models here can be."""
    if (size := (folder / CONFIG).stat().st_size) > CONFIG_BYTES:
        raise AdapterFolderError(f"{CONFIG} is too large", expected=CONFIG_BYTES, found=size)
    try:
        fields = read_adapter_config(folder)
    except TloraError as error:
        # The user knows nothing of our folders.
        facts = {name: fact for name, fact in error.facts.items() if name != "folder"}
        raise AdapterFolderError(error.what, help=error.help, **facts) from None
    for name, value in fields.items():
        spec = LoraSpec.model_fields.get(name)
        default = spec and spec.get_default(call_default_factory=True)
        if name not in _FREE and value not in (None, default):
            raise AdapterFolderError(
                f"{CONFIG} has a field that models of this service cannot have",
                field=name, expected=default, found=str(value)[:200],
            )  # fmt: skip
    return fields


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of its tensors, and where their bytes begin."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            if size > HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            # It holds names, shapes and places against each other and the file's size.
            with safetensors.safe_open(file, framework="numpy"):
                header = json.loads(content.read(size))
    except (ValueError, safetensors.SafetensorError) as error:
        raise AdapterFolderError(
            f"{WEIGHTS} cannot be read", reason=str(error)[:200],
            help="save the adapter again with PEFT's save_pretrained",
        ) from None  # fmt: skip
    header.pop("__metadata__", None)
    return header, 8 + size


def _require_sites(
    file: Path, linears: Mapping[str, Any], fields: Mapping[str, Any], scales: Mapping[str, float],
    rank: int,
) -> frozenset[str]:  # fmt: skip
    """The linears that tensors belong to, each with its A and B of the right shapes.

    scales   by which A and B are multiplied when they are loaded
    """
    header, start = _header(file)
    halves: dict[str, set[str]] = {"A": set(), "B": set()}
    for name, said in header.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in linears:
            raise AdapterFolderError(
                "the adapter has a tensor that models of this base do not have",
                tensor=name[:200], expected="A and B of linears of attention, MLP and head",
                help="adapt those alone; save with save_embedding_layers=False",
            )  # fmt: skip
        (outs, ins), half = linears[match[1]], match[2]
        shape = [rank, ins] if half == "A" else [outs, rank]
        if said["shape"] != shape or said["dtype"] not in _DTYPES:
            raise AdapterFolderError(
                "a tensor of the adapter does not fit the base, or its rank", tensor=name,
                expected=f"{shape}, of {', '.join(_DTYPES)}",
                found=f"{said['shape']}, {said['dtype']}",
                help="send it to a service of the base that it was trained on",
            )  # fmt: skip
        _require_numbers(file, start + said["data_offsets"][0], name, said, scales[half])
        halves[half].add(match[1])
    wanted = {path for path in linears if _is_target(path, fields)}
    if lacking := sorted((halves["A"] ^ halves["B"]) | (wanted - halves["A"])):
        raise AdapterFolderError("the adapter lacks tensors", expected=f"A and B of {lacking[0]}")
    if not header:
        raise AdapterFolderError("the adapter has no tensors")
    return frozenset(halves["A"])


def _is_target(path: str, fields: Mapping[str, Any]) -> bool:
    """Whether a config that lists its targets names a linear; of others it is not known."""
    targets, parts = fields.get("target_modules"), path.split(".")
    if fields.get("layers_to_transform") or fields.get("exclude_modules"):
        return False
    ends = {".".join(parts[at:]) for at in range(len(parts))}
    return isinstance(targets, list) and not ends.isdisjoint(targets)


def _require_numbers(file: Path, at: int, name: str, said: Mapping[str, Any], scale: float) -> None:
    """Raise AdapterFolderError for a number that is not finite, or not once it is loaded."""
    dtype, left, limit = said["dtype"], math.prod(said["shape"]), _limit(scale)
    with file.open("rb") as content:
        content.seek(at)
        while left:
            numbers = np.fromfile(content, _DTYPES[dtype], min(left, CHECKED))
            left -= len(numbers)
            if dtype == "BF16":
                numbers = (numbers.astype("<u4") << 16).view("<f4")
            # Not the other way round: NaN is not above either.
            wrong = numbers[~(np.abs(numbers.astype(np.float64)) <= limit)]
            if len(wrong):
                raise _unfit(file, name, float(wrong[0]), scale)


def _limit(scale: float) -> float:
    """The largest finite number that still fits once it is multiplied by a scale."""
    largest = float(np.finfo(np.float64).max)
    return min(largest, MAX_NUMBER / abs(scale)) if scale else largest


def _unfit(file: Path, name: str, value: float, scale: float) -> AdapterFolderError:
    if not math.isfinite(value):
        return AdapterFolderError(
            "a tensor of the adapter has numbers that are not finite", file=file.name, tensor=name,
            found=str(value),
        )  # fmt: skip
    return AdapterFolderError(
        "a tensor of the adapter has a number that float32 cannot hold", file=file.name,
        tensor=name, expected=f"{_limit(scale):.4g} at most", found=str(value),
        help="models train in float32: scale the adapter down, or save it again in float32",
    )  # fmt: skip

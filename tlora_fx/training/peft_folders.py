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
#: Of each dtype: bits of a number, and those that are all ones where it is not finite.
_EXPONENTS: Mapping[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48), "F32": ("<u4", 0x7F80 << 16), "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}  # fmt: skip
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
    here = _require_sites(folder / WEIGHTS, linears, fields, rank)
    config: dict[str, Any] = {part: bool(here & own.keys()) for part, own in layout.items()}
    absent = {
        f"base_model.model.{path}.lora_{half}.weight": shape
        for part, own in layout.items()
        for path, (outs, ins) in own.items()
        for half, shape in (("A", (rank, ins)), ("B", (outs, rank)))
        if config[part] and path not in here
    }
    config |= {"rank": rank, "seed": 0}
    scaling = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    content = {"config": config, "absent": absent, "scale": scaling / (ALPHA / rank)}
    write_synced(folder / STATE, json.dumps(stamp(FORMAT) | content).encode())
    sync_folder(folder)
    return config


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
    file: Path, linears: Mapping[str, Any], fields: Mapping[str, Any], rank: int
) -> frozenset[str]:
    """The linears that tensors belong to, each with its A and B of the right shapes."""
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
        if said["shape"] != shape or said["dtype"] not in _EXPONENTS:
            raise AdapterFolderError(
                "a tensor of the adapter does not fit the base, or its rank", tensor=name,
                expected=f"{shape}, of {', '.join(_EXPONENTS)}",
                found=f"{said['shape']}, {said['dtype']}",
                help="send it to a service of the base that it was trained on",
            )  # fmt: skip
        if not _is_finite(file, start + said["data_offsets"][0], said):
            what = "a tensor of the adapter has numbers that are not finite"
            raise AdapterFolderError(what, tensor=name)
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


def _is_finite(file: Path, at: int, said: Mapping[str, Any]) -> bool:
    dtype, mask = _EXPONENTS[said["dtype"]]
    left = math.prod(said["shape"])
    with file.open("rb") as content:
        content.seek(at)
        while left:
            numbers = np.fromfile(content, dtype, min(left, CHECKED))
            if ((numbers & mask) == mask).any():
                return False
            left -= len(numbers)
    return True

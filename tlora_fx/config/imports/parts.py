"""Options that several tools have in common: the base's dtype, its bits, target modules, data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tlora_fx.config.imports.draft import OFF, Draft, names, truth
from tlora_fx.config.imports.trainer import number
from tlora_fx.config.job_file import DATA_SUFFIXES

_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_HALF = (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("pure_bf16", "bfloat16"),
         ("fp16", "float16"), ("float16", "float16"))  # fmt: skip
FILE = "a file has no splits and configurations, and is read whole"
BITS = "a base is stored in nf4, int8 or float8"
NF4 = "a base in 4 bits is stored in nf4, with a float32 scale for each 64 numbers"
_NESTS = "scales are float32, and not rounded again: docs/quantised-base.md"
_ROUNDS_INPUTS = "bitsandbytes rounds what a matrix in int8 is multiplied with too"
_STORED: Mapping[str, Mapping[Any, str]] = {
    "load_in_4bit": {True: "nf4"},
    "load_in_8bit": {True: "int8"},
    "quantization_bit": {4: "nf4", 8: "int8"},
}


def carry_model(draft: Draft, key: str) -> None:
    """Carry the base model, without which there is no job."""
    value = draft.take(key)
    if value is None:
        draft.refuse(key, "the base model is not named")
    else:
        draft.put(key, "base.model", draft.path(value))


def carry_dtype(draft: Draft, keys: Sequence[str] = ()) -> None:
    """Carry the base's dtype: of keys that name it, else of those that say bf16 or fp16."""
    dtype = None
    for key in keys:
        value = draft.take(key)
        if value is None:
            continue
        if value == "auto":
            draft.leave(
                key, value, "the dtype is bfloat16, whatever the weights have", changes=True
            )
        elif dtype is None:
            dtype = str(value).removeprefix("torch.")
            draft.put(key, "base.dtype", _DTYPES.get(dtype, dtype))
        else:
            draft.leave(key, value, "another key says the dtype", changes=value != dtype)
    half = {key: truth(draft.rest[key]) for key, _ in _HALF if draft.has(key)}
    for key, name in _HALF:
        value = draft.take(key)
        if value is None:
            continue
        is_on = half[key] in (True, "auto", "full")
        if is_on and "dtype" not in draft.base:
            draft.put(key, "base.dtype", name)
        elif is_on and dtype is not None and draft.base["dtype"] != name:
            why = "the base computes in its own dtype, not by autocast"
            draft.leave(key, value, why, changes=True)
        else:
            draft.leave(key, value, OFF)
    if "dtype" not in draft.base and half:
        draft.base["dtype"] = "float32"


def carry_quantisation(
    draft: Draft, *keys: str, options: Sequence[str] = (), nested: str = "", nests: bool = False
) -> None:
    """Carry the form in which the base is stored.

    options   keys of bitsandbytes, which say how
    nested    the one of them that says that scales are rounded too; nests: its default
    """
    for key in keys:
        if (value := draft.take(key)) is None:
            continue
        form = _STORED[key].get(truth(value))
        if form is not None:
            draft.put(key, "base.quantize", form)
        else:
            is_off = truth(value) in (False, 0)
            draft.leave(key, value, OFF if is_off else BITS, changes=not is_off)
        if form == "int8":
            draft.leave(key, value, _ROUNDS_INPUTS, changes=True)
        if form == "nf4" and (draft.rest.get(nested) is None and nests):
            draft.leave(key, value, _NESTS, changes=True)
    form = draft.base.get("quantize")
    for key in options:
        value = truth(draft.take(key)) if draft.has(key) else None
        if value is None:
            continue
        why = "the base is not quantised" if form is None else OFF
        changes = form == "nf4" and value not in (False, "nf4", "bnb", "bitsandbytes")
        if changes and key != "bnb_4bit_quant_storage":
            draft.leave(key, value, _NESTS if key == nested else NF4, changes=True)
        else:
            draft.leave(key, value, why)


def carry_targets(draft: Draft, key: str, *, all_names: Sequence[str] = ()) -> None:
    """Carry the modules that get adapters.

    all_names    how the tool says: all linear modules
    """
    value = draft.take(key)
    if value is None:
        return
    listed = names(value) if isinstance(value, str) and "," in value else value
    one = listed[0] if isinstance(listed, list) and len(listed) == 1 else listed
    if isinstance(one, str) and one in (*all_names, "all-linear"):
        listed = "all-linear"
    draft.put(key, "lora.target_modules", listed)


def carry_share(draft: Draft, key: str) -> None:
    """Carry the part of the samples that is held out; a count of samples is left out."""
    share = draft.take(key)
    if share is None:
        return
    try:
        size = float(number(share))
    except (TypeError, ValueError):
        draft.refuse(key, f"expected a number, found {share!r}")
        return
    has_data = "eval_data" in draft.job
    if not size:
        draft.leave(key, share, OFF)
    elif has_data:
        draft.leave(key, share, "eval_data counts")
    elif 0 < size < 1:
        draft.put(key, "eval_split", size)
    else:
        why = "eval_split is a part of the samples, a number below 1"
        draft.leave(key, share, why, changes=True)


def data_list(draft: Draft, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The data sets of a key, each with the name by which mistakes call it."""
    value = draft.take(key)
    entries = value if isinstance(value, list) else [value]
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            draft.refuse(f"{key}.{index}", "a data set is a mapping with a path")
        else:
            yield f"{key}.{index}", dict(entry)


def put_data(
    draft: Draft, key: str, entries: Sequence[Mapping[str, Any]], where: str = "data"
) -> None:
    """Carry data sets: one as a mapping, several as a list."""
    if not entries:
        draft.refuse(key, "no data set is left that a job can read")
        return
    first, *more = [_whole(draft, f"{key}.{n}", entry) for n, entry in enumerate(entries)]
    draft.put(key, where, [first, *more] if more else first)


def _whole(draft: Draft, key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A data set; a file has no splits and configurations."""
    if not is_data_file(entry.get("path")):
        return dict(entry)
    for name in ("split", "name"):
        if name in entry:
            is_all = name == "split" and entry[name] == "train"
            draft.leave(f"{key}.{name}", entry[name], OFF if is_all else FILE, changes=not is_all)
    return {name: value for name, value in entry.items() if name not in ("split", "name")}


def is_data_file(path: Any) -> bool:
    """Whether a path of data names a file."""
    return isinstance(path, str) and path.endswith(DATA_SUFFIXES)

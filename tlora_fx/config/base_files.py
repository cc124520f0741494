"""Checks of a base's files, before anything is built of them or read into memory.

A base comes from elsewhere: a copy may have been cut, a disk may have lost a block, and in a
service its folder may be a stranger's. JSON files are parsed here, and of each safetensors file the
header is read and compared with the size of the file and with the index. No tensor is read, and
what was found right is read again only once it has changed.

source   https://huggingface.co/docs/safetensors, format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.config.hub import hub_cache, is_hub_id
from tlora_fx.config.paths import is_file, is_folder, is_there, with_home
from tlora_fx.errors import BaseFileDamaged, BaseFileRefused, RemoteCodeRefused, TloraError

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER = "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files of a tokenizer that hold a JSON object; a base may lack any of them.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json",
)  # fmt: skip
#: Endings of weights that are pickles, or that transformers would have to convert.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf")
#: That a JSON file of a base may have. The largest known, of a tokenizer, has 35 MB.
MAX_JSON_BYTES = 128 << 20
#: The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
#: Bits of an element, by the format's name of its dtype.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
#: Fields of a config that no checkpoint fits where they exceed its number of tensors. Modules would
#: be built before that is seen.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: Fields that no checkpoint fits where they exceed its largest dimension, as far as a packed form
#: may have shortened that.
_WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "n_embd", "n_inner",
    "d_model", "head_dim", "num_attention_heads", "num_key_value_heads", "n_head", "num_experts",
    "num_local_experts", "n_routed_experts",
)  # fmt: skip
_PACKED = 16
#: Limits of these fields where there are no weights to compare with. No known model is near them.
MAX_LAYERS, MAX_WIDTH = 4096, 1 << 22
_AGAIN = "copy or download the base again"
#: Signatures of files that were found right; a file that is written to has another signature.
_right: dict[object, None] = {}
_MAX_REMEMBERED = 64
#: Dimensions of a tensor; torch has fewer.
_MAX_DIMENSIONS = 64


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, as the file's header has it.

    begin, end   bytes from the start of the file
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def require_base_files(spec: BaseSpec) -> None:
    """Check all files of a base that lie on this machine: config, tokenizer and weights.

    Of a base on the hub, what is cached is checked; nothing is downloaded.

    raises   BaseFileDamaged, BaseFileRefused
    """
    require_base_config(spec)
    require_tokenizer_files(spec)
    require_weight_files(spec)


def require_base_there(spec: BaseSpec) -> None:
    """Check that a base's folder has a config and weights, without reading any file of it.

    raises   BaseFileDamaged where one is missing; BaseFileRefused where the weights are pickled
    """
    folder = base_folder(spec)
    if folder is None or is_hub_id(spec.model):
        return
    if not is_there(folder / CONFIG):
        raise _damaged(folder / CONFIG, "a file of the base is missing")
    if not _has_weights(folder):
        raise _no_weights(spec, folder)


def require_base_config(spec: BaseSpec) -> None:
    """Check a base's config.json, and what it says of generating; raises BaseFileDamaged."""
    path = config_file(spec)
    if path is None or (is_hub_id(spec.model) and not is_there(path)):
        return
    beside = [other] if is_there(other := path.with_name(GENERATION)) else []
    signature = _signature([path, *beside])
    if signature not in _right:
        _require_fields(path, read_json(path))
        for each in beside:
            read_json(each)
        _remember(signature)


def require_tokenizer_files(spec: BaseSpec) -> None:
    """Check the JSON files of a base's tokenizer, as far as they are there.

    raises   BaseFileDamaged
    """
    folder = _tokenizer_folder(spec)
    files = [folder / name for name in TOKENIZER_FILES] if folder is not None else []
    files = [path for path in files if is_there(path)]
    signature = _signature(files)
    if signature not in _right:
        for path in files:
            read_json(path)
        _remember(signature)


def require_weight_files(spec: BaseSpec) -> None:
    """Check the files of a base's weights: their headers, sizes, names, and the config's sizes.

    raises   BaseFileDamaged; BaseFileRefused where the weights are pickled or lie elsewhere
    """
    folder = base_folder(spec)
    if folder is None:
        return
    signature = _signature([folder / name for name in (CONFIG, INDEX, ADAPTER)])
    signature += _signature(sorted(folder.glob("*.safetensors")))
    if signature in _right:
        return
    if is_file(folder / ADAPTER):
        raise BaseFileRefused(
            "the folder of the base holds an adapter, which would bring a base of its own",
            base=spec.model,
            found=folder / ADAPTER,
            help="name the adapter's base as base.model, and the adapter under the job's 'adapter'",
        )
    index = weight_index(folder)
    files = _named_files(folder, index)
    if is_hub_id(spec.model):
        # The others are still to be downloaded.
        files = [path for path in files if is_file(path)]
    elif not _has_weights(folder):
        raise _no_weights(spec, folder)
    _require_headers(folder, files, index)
    _remember(signature)


def _require_headers(folder: Path, files: list[Path], index: Mapping[str, str] | None) -> None:
    there = {path.name: safetensors_header(path) for path in files}
    for name, file in (index or {}).items():
        if file in there and name not in there[file]:
            what = "a file of the base lacks a tensor that the index says it has"
            raise _damaged(folder / file, what, name)
    if index is None or set(index.values()) <= there.keys():
        _require_sizes(folder, [tensor for header in there.values() for tensor in header.values()])


def refuse_remote_code(spec: BaseSpec, error: Exception) -> None:
    """Say so where a library failed because a base needs Python code that comes with it.

    raises   RemoteCodeRefused
    """
    if not spec.trust_remote_code and "trust_remote_code" in str(error):
        raise RemoteCodeRefused(
            "the base needs Python code that comes with it",
            base=spec.model or spec.config,
            found="auto_map, and no class of transformers for it",
            help="read that code; if you trust it, set base.trust_remote_code: true and say "
            "--trust-remote-code on the command line",
        ) from error


def base_folder(spec: BaseSpec) -> Path | None:
    """Folder of a base's config and weights on this machine.

    returns   None where the base has none here: it is on the hub and not cached, is a config
              without weights, or a module
    """
    if spec.model is None:
        return None
    if not is_hub_id(spec.model):
        folder = with_home(spec.model)
        return folder if is_folder(folder) else None
    return cached_folder(spec.model)


def config_file(spec: BaseSpec) -> Path | None:
    """The config.json of a base, which need not be there; None where there can be none here."""
    if spec.config is not None:
        return spec.config / CONFIG if is_folder(spec.config) else spec.config
    folder = base_folder(spec)
    return None if folder is None else folder / CONFIG


def weight_files(spec: BaseSpec) -> list[Path] | None:
    """The safetensors files that a base is loaded from; None where there are none to look into.

    raises   BaseFileDamaged, BaseFileRefused of the index
    """
    folder = base_folder(spec)
    return None if folder is None else _named_files(folder, weight_index(folder))


def weight_index(folder: Path) -> Mapping[str, str] | None:
    """By tensor the file that holds it, as an index says; None where no index is read.

    raises   BaseFileDamaged; BaseFileRefused where it names a file outside the folder
    """
    path = folder / INDEX
    if is_file(folder / WEIGHTS) or not is_there(path):
        return None
    content = read_json(path)
    named = content.get("weight_map")
    if not isinstance(named, dict) or not named or not isinstance(content.get("metadata"), dict):
        expected = "mappings 'metadata', and 'weight_map' from tensors to files"
        raise _damaged(path, "the index of the base's weights has no tensors", expected)
    if not all(isinstance(file, str) for file in named.values()):
        raise _elsewhere(path, next(f for f in named.values() if not isinstance(f, str)))
    for file in set(named.values()):
        if PurePosixPath(file).name != file or file in ("", ".", ".."):
            raise _elsewhere(path, file)
        if not file.endswith(".safetensors"):
            raise BaseFileRefused(
                "the index of the base's weights names a file that is no safetensors file",
                file=path,
                found=repr(file),
                help="save the base with save_pretrained of transformers; pickles are not read",
            )
    return named


def _elsewhere(path: Path, file: object) -> BaseFileRefused:
    return BaseFileRefused(
        "the index of the base's weights names a file outside its folder",
        file=path,
        expected="the name of a .safetensors file in the same folder",
        found=repr(file)[:200],
        help="use an index that the base's author wrote",
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file of a base holds.

    raises   BaseFileDamaged
    """
    try:
        content = json.loads(_content(path).decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "a file of the base is no JSON", found=_words(error)) from error
    if not isinstance(content, dict):
        found = type(content).__name__
        raise _damaged(path, "a file of the base holds no JSON object", found=found)
    return content


def safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, once its header fits the file.

    raises   BaseFileDamaged
    """
    size, header, length = _header(path)
    begin, ends = 8 + length, 0
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name] = tensor = _stored(path, name, entry, begin)
        ends = max(ends, tensor.end)
    # Tensors fill the file without a gap, or other bytes would be read than were written.
    at = begin
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != at:
            raise _damaged_header(path, "tensors that follow on each other", f"a gap at byte {at}")
        at = tensor.end
    if at != size:
        what = "a file of the base is cut" if at > size else "a file of the base is too long"
        raise _damaged(path, what, f"{at} bytes, as its header says", f"{size} bytes")
    return tensors


def _header(path: Path) -> tuple[int, dict[str, Any], int]:
    """Size of a safetensors file, its header, and the length of that in bytes."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                most = max(0, min(MAX_HEADER_BYTES, size - 8))
                raise _damaged_header(path, f"2 to {most} bytes of it", f"{length} bytes")
            content = file.read(length)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        header = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise _damaged_header(path, "JSON", _words(error)) from error
    if not isinstance(header, dict):
        raise _damaged_header(path, "a JSON object", type(header).__name__)
    return size, header, length


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if not (_are_sizes(shape) and _are_sizes(offsets)) or len(offsets) != 2 or bits is None:
        expected = "a known dtype, a shape, and where it begins and ends"
        raise _damaged_header(path, f"of tensor '{name}' {expected}", json.dumps(entry)[:200])
    begin, end = offsets
    nbits = math.prod(shape) * bits
    if 8 * (end - begin) != nbits:
        expected = f"{nbits // 8} bytes of tensor '{name}', {dtype} {shape}"
        raise _damaged_header(path, expected, f"{end - begin} bytes")
    return StoredTensor(dtype, tuple(shape), start + begin, start + end)


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of few numbers of bytes or elements."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return not value or (
        set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 1 << 63
    )


def _require_fields(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config whose fields are of kinds that nothing can be made of."""
    kinds: Mapping[str, tuple[type, str]] = {
        "model_type": (str, "text"),
        "architectures": (list, "a list of class names"),
        "auto_map": (dict, "a mapping"),
    }
    for name, (kind, told) in kinds.items():
        value = config.get(name)
        right = value is None or isinstance(value, kind)
        if name == "architectures" and isinstance(value, list):
            right = all(isinstance(each, str) for each in value)
        if not right:
            what = f"the base's config has a wrong '{name}'"
            raise _damaged(path, what, told, repr(value)[:200])
    _require_limits(path, config, MAX_LAYERS, MAX_WIDTH, "any known model has")


def _require_sizes(folder: Path, tensors: list[StoredTensor]) -> None:
    """Refuse a config that asks for far more memory than the checkpoint has to put there."""
    path = folder / CONFIG
    if not is_file(path):
        return
    widest = max((dim for tensor in tensors for dim in tensor.shape), default=0)
    _require_limits(path, read_json(path), len(tensors), widest * _PACKED, "its weights hold")


def _require_limits(
    path: Path, config: Mapping[str, Any], layers: int, width: int, told: str
) -> None:
    limits = dict.fromkeys(_LAYERS, layers) | dict.fromkeys(_WIDTHS, width)
    for holder in (config, config.get("text_config")):
        for name, most in limits.items():
            value = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(value, int | float) and value > most:
                raise BaseFileDamaged(
                    f"the base's config asks for more than {told}",
                    file=path,
                    expected=f"{name} of at most {most}",
                    found=value,
                    help="give the config that belongs to the weights",
                )


def _named_files(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    if index is not None:
        return sorted(folder / name for name in set(index.values()))
    whole = folder / WEIGHTS
    return [whole] if is_there(whole) else sorted(folder.glob("*.safetensors"))


def _has_weights(folder: Path) -> bool:
    """Whether a folder has a file from which transformers begins to load."""
    return is_there(folder / WEIGHTS) or is_there(folder / INDEX)


def _no_weights(spec: BaseSpec, folder: Path) -> TloraError:
    try:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_WEIGHTS)
    except OSError as error:
        return _unreadable(folder, error)
    if others:
        return BaseFileRefused(
            "the base's weights are no safetensors files, and a pickle may run any code",
            base=spec.model,
            found=", ".join(others[:3]),
            expected=f"{WEIGHTS}, or several files and {INDEX}",
            help="load the base once with transformers, and save it with save_pretrained",
        )
    parts = ", ".join(sorted(path.name for path in folder.glob("*.safetensors"))[:3])
    return BaseFileDamaged(
        "the folder of the base holds no weights"
        if not parts
        else "the folder of the base holds weights in several files, and no index",
        base=spec.model,
        found=parts or None,
        expected=f"{WEIGHTS}, or several files and {INDEX}",
        help=f"{_AGAIN}; for random weights name its config.json as base.config",
    )


def _tokenizer_folder(spec: BaseSpec) -> Path | None:
    if spec.tokenizer is not None:
        return base_folder(BaseSpec(model=spec.tokenizer))
    path = config_file(spec)
    return None if path is None else path.parent


def cached_folder(name: str) -> Path | None:
    """Folder of a model of the hub in the cache of the hub's libraries."""
    stored = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        folder = stored / "snapshots" / (stored / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return folder if is_folder(folder) else None


def _signature(files: list[Path]) -> tuple[object, ...]:
    """Says whether files are the same as before; a missing one counts too."""
    return tuple((str(path), *_status(path)) for path in files)


def _status(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ()
    return (
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
    )  # fmt: skip


def _remember(signature: object) -> None:
    _right[signature] = None
    while len(_right) > _MAX_REMEMBERED:
        del _right[next(iter(_right))]


def _content(path: Path) -> bytes:
    """The content of a file that is not too large."""
    try:
        if not path.is_file():
            raise _damaged(path, "a file of the base is missing")
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if len(content) > MAX_JSON_BYTES:
        most = f"at most {MAX_JSON_BYTES} bytes"
        raise _damaged(path, "a file of the base is too large", most)
    return content


def _unreadable(path: Path, error: Exception) -> BaseFileDamaged:
    words = getattr(error, "strerror", None) or str(error)
    return _damaged(path, "a file of the base cannot be read", found=words)


def _damaged_header(path: Path, expected: str, found: object) -> BaseFileDamaged:
    return _damaged(path, "a file of the base is damaged: its header is wrong", expected, found)


def _damaged(
    path: Path, what: str, expected: object = None, found: object = None
) -> BaseFileDamaged:
    """The error for a file that another copy of the base mends."""
    return BaseFileDamaged(what, file=path, expected=expected, found=found, help=_AGAIN)


def _words(error: Exception) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]

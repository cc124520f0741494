"""Kernels of other packages: generated from their templates, kept, tuned and listed as ours are.

A `KernelTemplate` is a frozen dataclass; its fields are what a kernel is specialised on, its tile
says how the work is cut. Tables of measured tiles lie in the user's cache, and beside the package.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch

from tlora_fx.codegen.importing import import_generated
from tlora_fx.codegen.kernels import first_line, headed
from tlora_fx.codegen.loading import keep_triton_cache, stored
from tlora_fx.codegen.spec import Tile
from tlora_fx.config.plugins import Plugin, plugins_of
from tlora_fx.errors import KernelSpecError, UnknownKernel, nearest
from tlora_fx.host.environment import kernel_mode
from tlora_fx.host.paths import cache_folder
from tlora_fx.ops.kernels import select, support
from tlora_fx.ops.kernels.launch import gpu_name

KERNELS = "tlora_fx.kernels"
_IMPORTS = "import triton\nimport triton.language as tl\n"


class KernelTemplate:
    """A kind of kernel; derive a frozen dataclass, whose fields a kernel is specialised on.

    name      what `tlora-fx kernels` calls it
    shipped   folder of the package's tables, a file for each GPU
    """

    name: ClassVar[str]
    shipped: ClassVar[Path | None] = None

    def tiles(self) -> tuple[Tile, ...]:
        """Tiles that tuning tries; the first is taken where nothing was measured."""
        raise NotImplementedError

    def source(self, tile: Tile) -> str:
        """Python code that defines `kernel`, a `@triton.jit` function, and `launch`.

        `triton`, `tl`, and the tile's META, {"num_warps": 4, "num_stages": 2}, are there.
        """
        raise NotImplementedError

    def example(self, tokens: int, device: torch.device) -> Callable[[Any], object]:
        """A launch to be timed, given the module that `load_kernel` returns."""
        raise NotImplementedError


class KernelFile(NamedTuple):
    """A generated module: its name without the ending, and its text."""

    name: str
    text: str


def uses_kernels(device: torch.device) -> bool:
    """Whether operators take kernels on a device, by TLORA_FX_KERNELS; else they take PyTorch."""
    asked = kernel_mode()
    if asked == "off" or not support.has_triton():
        return False
    return device.type == "cuda" or asked == "interpret"


def kernel_text(template: KernelTemplate, tile: Tile | None = None) -> KernelFile:
    """The module that a template gives for a tile, by default that of its rule."""
    tile = tile or template.tiles()[0]
    meta = {"num_warps": tile.warps, "num_stages": tile.stages}
    body = f"{_IMPORTS}\nMETA = {meta}\n\n\n{template.source(tile).strip()}\n"
    spec = " ".join(_values(template))
    rows = {"spec": spec, "tile": str(tile), "again": f"tlora-fx kernels package {spec}"}
    title = f"{template.name}: {first_line(inspect.getdoc(type(template)))}"
    text = f"{headed(title, rows, body)}\n{body}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return KernelFile(f"{template.name.replace('-', '_')}_{digest}", text)


def load_kernel(template: KernelTemplate, tokens: int, device: torch.device) -> Any:
    """The module of a template's kernel for rows of so many tokens, with the measured tile.

    raises   KernelCacheError, KernelToolMissing where Triton is not there
    """
    return _module(template, _tile_for(template, select.bucket(tokens), gpu_name(device)))


@cache
def _module(template: KernelTemplate, tile: Tile | None) -> Any:
    module = import_generated(stored(kernel_text(template, tile)))
    keep_triton_cache()
    return module


@cache
def _tile_for(template: KernelTemplate, tokens: int, gpu: str) -> Tile | None:
    """The tile measured nearest to so many tokens, None where none was."""
    near = [
        (abs(math.log2(entry["at"][0] / tokens)), entry)
        for path in _tables(template, gpu)
        for entry in select.entries_in(path)
        if entry["family"] == " ".join(_values(template))
    ]
    return Tile(**min(near, key=lambda pair: pair[0])[1]["tile"]) if near else None


def _tables(template: KernelTemplate, gpu: str) -> Iterator[Path]:
    if gpu:
        yield own_table(template, gpu)
        if template.shipped is not None:
            yield template.shipped / select.file_name(gpu)


def own_table(template: KernelTemplate, gpu: str) -> Path:
    """The file of the user's measurements."""
    return cache_folder() / "tables" / template.name / select.file_name(gpu)


def tune_kernel(
    template: KernelTemplate,
    tokens: int,
    device: torch.device,
    path: Path | None = None,
) -> tuple[Path, dict[Tile, float]]:
    """Time each tile of a template on a device, and add the fastest to a table.

    path      by default the user's own table
    returns   the table, and the microseconds of each tile that ran
    raises    KernelSpecError where no tile runs
    """
    from tlora_fx.ops.kernels.tune import microseconds, versions

    times, failures = {}, {}
    for tile in template.tiles():
        try:
            launch = partial(template.example(tokens, device), _module(template, tile))
            (times[tile],) = microseconds([launch], device)
        except Exception as error:  # noqa: BLE001  (whatever a compiler or a launch raises)
            failures[str(tile)] = f"{type(error).__name__}: {error}"
    if not times:
        raise KernelSpecError(
            f"no tile of kernel {template.name} runs on {device}",
            found="; ".join(failures.values()),
        )
    gpu = gpu_name(device) or "cpu"
    path = path or own_table(template, gpu)
    best, at = min(times, key=times.__getitem__), [select.bucket(tokens)]
    family = " ".join(_values(template))
    kept = [
        entry
        for entry in select.entries_of(path, versions())
        if (entry["family"], entry["at"]) != (family, at)
    ]
    kept.append({"family": family, "at": at, "us": times[best], "tile": select.tile_fields(best)})
    select.write_table(path, gpu, {**versions(), "left_out": failures}, kept)
    select.forget()
    _tile_for.cache_clear()
    return path, times


def _values(template: KernelTemplate) -> list[str]:
    """A template as `tlora-fx kernels package` takes it."""
    own: Any = template
    return [template.name, *(f"{each.name}={getattr(own, each.name)}" for each in fields(own))]


def plugin_templates() -> list[Plugin]:
    """The templates of other packages, broken ones too, by name."""
    return plugins_of(KERNELS)


def template_of(name: str, words: Mapping[str, str]) -> KernelTemplate:
    """The template of a package, with the values of its fields.

    raises   UnknownKernel, PluginBroken, KernelSpecError
    """
    known = {plugin.name: plugin for plugin in plugin_templates()}
    if name not in known:
        raise UnknownKernel(
            f"no package offers a kernel '{name}'",
            nearest=nearest(name, known),
            help="`tlora-fx kernels list` lists them",
        )
    cls: Any = known[name].found
    if cls is None:
        raise known[name].error(f"kernel '{name}'")
    kinds = {each.name: get_type_hints(cls)[each.name] for each in fields(cls)}
    try:
        values = {key: int(word) if kinds[key] is int else word for key, word in words.items()}
        template: KernelTemplate = cls(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise KernelSpecError(
            f"kernel '{name}' cannot be generated with these values",
            expected=" ".join(
                f"{key}={getattr(kind, '__name__', kind)}" for key, kind in kinds.items()
            ),
            found=" ".join(f"{key}={word}" for key, word in words.items()) or "none",
        ) from error
    return template

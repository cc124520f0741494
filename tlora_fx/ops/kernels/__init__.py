"""Generated kernels behind the operators: which plan serves, its tables, its launches."""

from tlora_fx.codegen.spec import Tile
from tlora_fx.codegen.template import fill
from tlora_fx.ops.kernels.device_tables import adapters_on, refresh, release, segments_on
from tlora_fx.ops.kernels.packed import extend_weight
from tlora_fx.ops.kernels.select import force_plan, strict
from tlora_fx.ops.kernels.templates import KernelTemplate, load_kernel, tune_kernel, uses_kernels

__all__ = [
    "KernelTemplate",
    "Tile",
    "adapters_on",
    "extend_weight",
    "fill",
    "force_plan",
    "load_kernel",
    "refresh",
    "release",
    "segments_on",
    "strict",
    "tune_kernel",
    "uses_kernels",
]

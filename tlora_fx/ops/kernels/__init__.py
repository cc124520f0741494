"""Generated kernels behind the operators: which plan serves, its tables, its launches."""

from tlora_fx.ops.kernels.device_tables import refresh, release
from tlora_fx.ops.kernels.packed import extend_weight
from tlora_fx.ops.kernels.select import force_plan, strict

__all__ = ["extend_weight", "force_plan", "refresh", "release", "strict"]

"""Generated kernels behind the operators: which plan serves, its tables, its launches."""

from tlora_fx.ops.kernels.device_tables import refresh, release
from tlora_fx.ops.kernels.packed import with_room
from tlora_fx.ops.kernels.select import force_plan, strict, weight_copies

__all__ = ["force_plan", "refresh", "release", "strict", "weight_copies", "with_room"]

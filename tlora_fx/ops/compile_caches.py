"""Keep what torch.compile stores on disk apart by what decides our operators' shapes.

Keys of torch's caches hold the names of operators, not what their fake implementations give. Those
depend on which implementation serves (see kernels/serving.py), so code that was compiled under
another mode, or by another version, would be called with results that it does not expect. Nor do
they hold which processes a tensor-parallel graph sums over (see tensor_groups.py).
"""

from __future__ import annotations

import os
import re
from functools import cache
from hashlib import sha256

import torch
import torch.compiler.config as settings

from tlora_fx.ops.kernels.support import mode
from tlora_fx.ops.tensor_groups import facts as groups
from tlora_fx.version import __version__

_OURS = re.compile(r";?tlora_fx=[0-9a-f]+")


def mark_compile_caches() -> None:
    """Write our part into `torch.compiler.config.cache_key_tag`, behind what the user has there.

    To be called where something is about to be compiled: the environment may have changed.
    """
    users = _OURS.sub("", settings.cache_key_tag)
    settings.cache_key_tag = f"{users};{_part()}" if users else _part()


def _part() -> str:
    strict = os.environ.get("TLORA_FX_STRICT", "")
    facts = (__version__, *_schemas(), mode(), strict, *groups())
    return f"tlora_fx={sha256(repr(facts).encode()).hexdigest()[:16]}"


@cache
def _schemas() -> tuple[str, ...]:
    """The signatures of all our operators; asked for when all of them are there."""
    every = map(str, torch._C._jit_get_all_schemas())
    return tuple(sorted(one for one in every if one.startswith("tlora_fx::")))

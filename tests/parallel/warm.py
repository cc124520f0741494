"""What the processes of a group need, imported by the server that they are forked from.

A first compilation is part of it: much of torch, transformers and PEFT is imported only then. It
computes no gradient, for autograd does not survive a fork.

What there is then stays. Processes that are forked look for garbage less often, and never there.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from tests import models
from tests.parallel import training
from tlora_fx.compiler import compile

__all__ = ["training"]

with tempfile.TemporaryDirectory() as folder:
    base = models.base_of(Path(folder), "llama", num_hidden_layers=1)
    compile([models.job("one", base, r=2, target_modules=["q_proj"])])

gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 100)

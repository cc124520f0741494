"""Whether passes keep losses and gradients: graphs run before and after each pass.

`Numerics` is the instrument (instrument.py). It copies the graphs before a pass (state.py), runs
one layer of each structure on a small row (rows.py, evaluate.py, interpreter.py, reading.py) with
seeded weights (tensors.py) where they fit a stated memory (memory.py), compares what comes out,
and names the node at which values first diverge (instrument.py).
"""

from tlora_fx.numerics.evaluate import BOUNDS
from tlora_fx.numerics.instrument import Numerics, Result, watch_numerics

__all__ = ["BOUNDS", "Numerics", "Result", "watch_numerics"]

"""How much of a group's GPUs is left over.

The key that groups are sorted by is one number: GPUs' worth of roofline that a group leaves idle,
1 - busy times its GPUs. Times the tokens that a GPU at the knee of its roofline takes in a second
it is a headroom in tokens; that factor is one for all groups of a base, so sorting leaves it out.
Memory is no key: a group that does not fit takes infinitely long.

source   tLoRA, section 3.4, r_j; field notes: token headroom to the roofline's knee
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tlora_fx.cost.demand import Array
from tlora_fx.scheduler.estimating import Estimator


def residuals(
    estimator: Estimator, bases: Sequence[str], demands: Array, gpus: Array, seconds: Array
) -> Array:
    """Idle GPUs' worth of roofline of each of n groups; none of one that does not fit.

    bases     of each
    demands   [n, 12] rows of `Demand`
    gpus      [n] GPUs of each
    seconds   [n] of one step
    """
    left = np.zeros(len(bases))
    names = np.array(bases)
    for base in dict.fromkeys(bases):
        own = names == base
        busy = estimator.busy(base, demands[own], gpus[own], seconds[own])
        left[own] = (1.0 - np.asarray(busy)) * gpus[own]
    return np.where(np.isfinite(seconds), left, 0.0)

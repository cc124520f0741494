"""Hand-written bases by what is nasty about them, and some that must run.

Each is a tiny decoder with one thing in it. RIGHT must run and equal training alone; all others
must equal it or be refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.silence.cases.autograd import AUTOGRAD
from tests.silence.cases.environment import ENVIRONMENT
from tests.silence.cases.folding import FOLDING
from tests.silence.cases.hidden import HIDDEN_MIXERS
from tests.silence.cases.lengths import GUARDS
from tests.silence.cases.masks import ARGUMENTS, MASKS
from tests.silence.cases.mixers import MIXERS
from tests.silence.cases.positions import POSITIONS
from tests.silence.cases.right import RIGHT_EVERYWHERE, RIGHT_IN_BATCH_FORM
from tests.silence.cases.sizes import SIZES
from tests.silence.cases.state import STATE
from tests.silence.modules import Cases

RIGHT: Mapping[str, Cases] = {"right": RIGHT_EVERYWHERE, "right padded": RIGHT_IN_BATCH_FORM}
NASTY: Mapping[str, Cases] = {
    "folding": FOLDING,
    "masks": MASKS,
    "arguments": ARGUMENTS,
    "guards": GUARDS,
    "positions": POSITIONS,
    "sizes": SIZES,
    "autograd": AUTOGRAD,
    "state": STATE,
    "hidden mixers": HIDDEN_MIXERS,
    "environment": ENVIRONMENT,
    "mixers": MIXERS,
}

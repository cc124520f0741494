"""The mistakes that tlora-fx knows, each a class with a code.

An error says what went wrong, where, what was expected, what was found, and what to do. The
docstring of each class is its entry on the page `docs/errors.md`, which
`python -m tlora_fx.errors` prints.
"""

from tlora_fx.errors.compiling import *
from tlora_fx.errors.planning import *
from tlora_fx.errors.root import *
from tlora_fx.errors.running import *
from tlora_fx.errors.serving import *

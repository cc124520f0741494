"""Find the pass, and the rewrite inside it, after which a check fails.

search.py halves a row of states, states.py makes a state from the traced graphs, check.py and
numbers.py judge one, folder.py writes it down for a command, touched.py tells what a rewrite did,
and hunt.py puts them together.
"""

from tlora_fx.bisect.hunt import Finding, Hunt
from tlora_fx.bisect.numbers import NumericsCheck
from tlora_fx.bisect.search import Bracket, Verdict, first_bad
from tlora_fx.bisect.states import State, States, run_everywhere, trace_states
from tlora_fx.tools.bisect import Check, CommandCheck, Judged

__all__ = [
    "Bracket",
    "Check",
    "CommandCheck",
    "Finding",
    "Hunt",
    "Judged",
    "NumericsCheck",
    "State",
    "States",
    "Verdict",
    "first_bad",
    "run_everywhere",
    "trace_states",
]

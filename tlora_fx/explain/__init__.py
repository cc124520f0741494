"""Why a module is lowered, keyed, shared or folded, and why not."""

from tlora_fx.explain.ask import why_not
from tlora_fx.explain.text import render
from tlora_fx.tools.explain import Attempt, Explanation, JobAnswer

__all__ = ["Attempt", "Explanation", "JobAnswer", "render", "why_not"]

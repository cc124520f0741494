"""Passes, and the pipelines that run them.

A pass is a frozen dataclass whose fields are its options (passes.py). It is known by its name
(registry.py), stands in a pipeline that has a text form (text.py), and runs under checks (run.py)
while instruments watch (instrument.py).
"""

from tlora_fx.pipeline.instrument import Change, Done, Event, Instrument
from tlora_fx.pipeline.passes import GroupPass, JobPass, Numerics, Pass, PassOption, options_of
from tlora_fx.pipeline.registry import (
    REGISTRY,
    Plugin,
    find_pass,
    pass_names,
    plugin_passes,
    plugin_planners,
    register,
)
from tlora_fx.pipeline.rewrites import Rewrites, counting, rewrite_allowed
from tlora_fx.pipeline.run import Halted, Runner, Verify
from tlora_fx.pipeline.text import Pipeline, checked, parse_pass, parse_pipeline

__all__ = [
    "REGISTRY",
    "Change",
    "Done",
    "Event",
    "GroupPass",
    "Halted",
    "Instrument",
    "JobPass",
    "Numerics",
    "Pass",
    "PassOption",
    "Pipeline",
    "Plugin",
    "Rewrites",
    "Runner",
    "Verify",
    "checked",
    "counting",
    "find_pass",
    "options_of",
    "parse_pass",
    "parse_pipeline",
    "pass_names",
    "plugin_passes",
    "plugin_planners",
    "register",
    "rewrite_allowed",
]

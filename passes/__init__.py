"""The passes: one rewrite of a job's or a group's graph a file, found by walking this package."""

if __name__ != "tlora_fx.passes":
    raise ImportError(
        f"this package is imported as 'tlora_fx.passes', not as {__name__!r}; "
        "install the project (make venv) or take its folder passes/ off sys.path",
        name=__name__,
    )

import importlib
import pkgutil

# After the guard: passes name our operators, which must be registered by then.
import tlora_fx.ops  # noqa: F401


def find_passes() -> None:
    """Make all of our own passes known to pipelines by importing their files."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)

"""The options of the backend: its own few, and Inductor's by their own names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from tlora_fx.errors import BackendOptionError, nearest

COMPUTE = ("float32", "base")


@dataclass(frozen=True, slots=True)
class Options:
    """What `torch.compile(model, backend="tlora-fx", options=...)` may say.

    strict     raise BackendUnsupported where a LoRA branch cannot be lowered
    compute    "float32": adapters are multiplied in the dtype that PEFT gives them, which is
               float32 unless told otherwise; "base": in the base's dtype
    inductor   options of Inductor, by Inductor's names
    """

    strict: bool = False
    compute: Literal["float32", "base"] = "float32"
    inductor: dict[str, Any] = field(default_factory=dict)


OWN = tuple(item.name for item in fields(Options) if item.name != "inductor")


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """The options of one compilation.

    mode      a mode of torch.compile, such as "max-autotune": Inductor's options under one name
    options   our own options and Inductor's
    raises    BackendOptionError for what neither knows, and for values of a wrong type
    """
    own: dict[str, Any] = {}
    inductor = _of_mode(mode)
    for name, value in (options or {}).items():
        if name in OWN:
            own[name] = _checked(name, value)
        else:
            inductor[_inductor_name(name, value)] = value
    return Options(**own, inductor=inductor)


def _of_mode(mode: str | None) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    modes = cast("dict[str, dict[str, Any]]", list_mode_options())
    if mode is None:
        return {}
    if mode not in modes:
        raise BackendOptionError(
            f"there is no mode '{mode}'",
            nearest=nearest(mode, modes),
            help="modes: " + ", ".join(modes),
        )
    return dict(modes[mode])


def _checked(name: str, value: Any) -> Any:
    if name == "strict" and not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    if name == "compute" and value not in COMPUTE:
        raise _wrong(name, " or ".join(COMPUTE), value)
    return value


def _inductor_name(name: str, value: Any) -> str:
    """An option of Inductor as Inductor spells it, its value checked."""
    from torch._inductor import config

    known: dict[str, Any] = config.get_config_copy()
    key = name.replace("-", "_")
    if key not in known:
        raise BackendOptionError(
            f"there is no option '{name}'",
            nearest=_nearest_option(name, known),
            help=f"own options: {', '.join(OWN)}; all others are Inductor's, as "
            "torch._inductor.list_options() lists them",
        )
    usual = known[key]
    plain = isinstance(usual, (bool, int, float, str))
    if plain and not isinstance(value, type(usual)):
        raise _wrong(name, type(usual).__name__, value)
    return key


def _nearest_option(name: str, known: Iterable[str]) -> str | None:
    """One of our few options where it comes near, else one of Inductor's hundreds."""
    return nearest(name, OWN) or nearest(name, known)


def _wrong(name: str, expected: str, value: Any) -> BackendOptionError:
    return BackendOptionError(
        f"wrong value of option '{name}'",
        expected=expected,
        found=repr(value),
    )

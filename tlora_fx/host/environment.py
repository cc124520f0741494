"""The environment variables named TLORA_FX_*: this module alone reads them.

A variable is read when a function is called, and an empty one counts as unset. docs/environment.md
lists all of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, cast

from tlora_fx.errors import EnvironmentVariableWrong, nearest

CACHE = "TLORA_FX_CACHE"
PROFILES = "TLORA_FX_PROFILES"
KERNELS = "TLORA_FX_KERNELS"
STRICT = "TLORA_FX_STRICT"
PDL = "TLORA_FX_PDL"
FLASH4 = "TLORA_FX_FLASH4"
PEER_COPIES = "TLORA_FX_PEER_COPIES"
LOG = "TLORA_FX_LOG"
#: Largest size of kept traces, in MiB.
TRACE_CACHE = "TLORA_FX_TRACE_CACHE"
#: Largest size of kept tables of tokens, in GiB.
DATA_CACHE = "TLORA_FX_DATA_CACHE"
#: `tlora-fx bisect` sets it for the command of `--check`.
STATE = "TLORA_FX_STATE"
#: `train --gpus` sets it for its processes: where they meet, and leave how they ended.
START_FOLDER = "TLORA_FX_START_FOLDER"
#: Defaults of options of `tlora-fx client`, which typer reads.
SERVER, TOKEN, AUTHORITY = "TLORA_FX_SERVER", "TLORA_FX_TOKEN", "TLORA_FX_CA"

#: What a folder of kept results may hold where its variable is not set, in bytes.
MAX_BYTES = {TRACE_CACHE: 256 * 2**20, DATA_CACHE: 32 * 2**30}
_UNITS = {TRACE_CACHE: ("MiB", 2**20), DATA_CACHE: ("GiB", 2**30)}

KernelMode = Literal["auto", "on", "off", "interpret"]
#: The values that a variable may have, its default first.
CHOICES = {
    KERNELS: ("auto", "on", "off", "interpret"),
    STRICT: ("0", "1"),
    PDL: ("1", "0"),
    FLASH4: ("1", "0"),
    PEER_COPIES: ("on", "off"),
}


def require_known_values() -> None:
    """Refuse a misspelt value of any variable; raises EnvironmentVariableWrong."""
    for name in CHOICES:
        _choice(name)
    for name in MAX_BYTES:
        max_bytes(name)


def kernel_mode() -> KernelMode:
    """Which jobs use generated kernels; raises EnvironmentVariableWrong."""
    return cast(KernelMode, _choice(KERNELS))


def wants_strict_kernels() -> bool:
    """Whether no job's numbers may depend on its neighbours; raises EnvironmentVariableWrong."""
    return _choice(STRICT) == "1"


def settle_products() -> None:
    """In strict mode, let MKL round alike wherever its operands lie in memory.

    MKL reads its variable when it first computes: `import tlora_fx` calls this.

    source   oneMKL Developer Guide, Obtaining Numerically Reproducible Results
    """
    if os.environ.get(STRICT) == "1":
        os.environ.setdefault("MKL_CBWR", "COMPATIBLE")


def overlaps_kernels() -> bool:
    """Whether a kernel may start while the one before ends; raises EnvironmentVariableWrong."""
    return _choice(PDL) == "1"


def allows_flash_attention_4() -> bool:
    """Whether FlashAttention-4 may be used; raises EnvironmentVariableWrong."""
    return _choice(FLASH4) == "1"


def wants_peer_copies() -> bool:
    """Whether GPUs may copy shards out of each other's memory (`parallel.peer_copies`).

    raises   EnvironmentVariableWrong
    """
    return _choice(PEER_COPIES) == "on"


def log_words() -> str:
    """Words of TLORA_FX_LOG, as `inspect.instruments` reads them."""
    return os.environ.get(LOG, "")


def folder_in(variable: str) -> Path | None:
    """The folder that a variable names, with `~` expanded; None where it is not set.

    raises   EnvironmentVariableWrong
    """
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise EnvironmentVariableWrong(
            f"the environment variable {variable} names no folder", found=text, reason=error
        ) from error


def max_bytes(variable: str) -> int:
    """How large a folder of kept results may be; 0 where nothing is to be kept.

    raises   EnvironmentVariableWrong
    """
    text, (unit, factor) = os.environ.get(variable), _UNITS[variable]
    if not text:
        return MAX_BYTES[variable]
    try:
        size = int(float(text) * factor)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise EnvironmentVariableWrong(
            f"the environment variable {variable} is no size",
            expected=f"a number of {unit}, 0 to keep nothing",
            found=text,
        )
    return size


def _choice(name: str) -> str:
    allowed = CHOICES[name]
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        raise EnvironmentVariableWrong(
            f"the environment variable {name} has an unknown value",
            expected=", ".join(allowed),
            found=value,
            nearest=nearest(value.lower(), allowed),
            help=f"set it to one of these, or unset it: the default is {allowed[0]}",
        )
    return value

"""The device that a user names."""

from __future__ import annotations

import torch

from tlora_fx.errors import DeviceUnknown


def device_named(name: str | None) -> torch.device:
    """The CPU, or a CUDA device of this machine; without a name the first one where there is one.

    name      "cpu", "cuda" (the first one), "cuda:1", ...
    raises    DeviceUnknown
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = name or ("cuda" if count else "cpu")
    kind, _, place = wanted.partition(":")
    if wanted == "cpu":
        return torch.device("cpu")
    if kind == "cuda" and place in ("", *map(str, range(count))) and count:
        return torch.device("cuda", int(place or 0))
    known = ["cpu", *(f"cuda:{place}" for place in range(count))]
    raise DeviceUnknown(
        f"this machine has no device '{wanted}'",
        expected=", ".join(known),
        found=wanted,
        help="leave --device out: then it is a GPU where there is one",
    )

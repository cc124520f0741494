"""Colours of jobs and of the base: Okabe and Ito's, which colour-blind people tell apart."""

from __future__ import annotations

CALM = "#7A93A8"
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442")


def colour_of(style: str) -> str:
    """The colour of "job 3"."""
    return PALETTE[int(style.removeprefix("job ")) % len(PALETTE)]

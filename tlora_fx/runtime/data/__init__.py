"""From the rows of a file to the batches of a round."""

from __future__ import annotations

from tlora_fx.host.moved import moved_to

__getattr__ = moved_to(__name__, "tlora_fx.runtime.data.samples")

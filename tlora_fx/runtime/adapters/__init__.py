"""Adapters as files: PEFT folders, starting values, model cards, the Hub."""

from __future__ import annotations

from tlora_fx.host.moved import moved_to

__getattr__ = moved_to(__name__, "tlora_fx.runtime.adapters.files")

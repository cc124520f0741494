"""Several callbacks of a trainer as one, and callbacks that a user names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from tlora_fx.errors import CallbackWrong
from tlora_fx.runtime.trainer import TrainerCallback
from tlora_fx.runtime.user_code import user_object


class Callbacks(TrainerCallback):
    """Hands on what it hears, in order.

    A callback that raises costs a warning, never a step: it hears no more. What asks the run to
    stop, such as KeyboardInterrupt, goes through.
    """

    def __init__(self, callbacks: Iterable[TrainerCallback]) -> None:
        self.callbacks = list(callbacks)
        for event in (name for name in vars(TrainerCallback) if not name.startswith("_")):
            setattr(self, event, partial(self._tell, event))

    def _tell(self, event: str, *facts: Any) -> None:
        for callback in list(self.callbacks):
            try:
                getattr(callback, event)(*facts)
            except Exception as error:  # noqa: BLE001  (a user's code may raise anything)
                self.callbacks.remove(callback)
                name = type(callback).__qualname__
                self.warned(
                    f"the callback {name} failed in {event} and hears no more: "
                    f"{type(error).__name__}: {error}"
                )


def callback_named(name: str) -> TrainerCallback:
    """A callback of the class that MODULE:CLASS or FILE.py:CLASS names.

    raises    CallbackWrong
    """
    try:
        callback = user_object(name)()
    except Exception as error:
        raise CallbackWrong(
            "a callback cannot be made",
            callback=name,
            found=f"{type(error).__name__}: {error}",
            help="write FILE.py:CLASS, a subclass of tlora_fx.TrainerCallback without arguments",
        ) from error
    if not isinstance(callback, TrainerCallback):
        raise CallbackWrong(
            "a callback is no tlora_fx.TrainerCallback",
            callback=name,
            found=type(callback).__name__,
            help="derive its class from tlora_fx.TrainerCallback",
        )
    return callback

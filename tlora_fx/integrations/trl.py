"""Train with TRL's `SFTTrainer`, or any transformers `Trainer`, under the tlora-fx backend.

accelerate, which compiles for them, refuses names of backends that it does not list. A callback
compiles the model in place instead: behind accelerate's autocast, inside DDP's wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from transformers import TrainerCallback

from tlora_fx.backend import branches_of, read_options, say
from tlora_fx.errors import BackendOptionError

#: Compiled forwards that callbacks made.
_compiled: WeakSet[Any] = WeakSet()


class TloraFxCallback(TrainerCallback):
    """Compile a trainer's PEFT model with `backend="tlora-fx"` while it trains.

    mode, options, dynamic   as of torch.compile; `options` also `strict` and `compute`
    raises                   BackendOptionError for options that the backend does not know, and
                             when training begins with a model that is compiled already

    lowered, left            branches that became operators, and that Inductor compiled as they
                             were; known when training has ended, which hands the model back as it
                             was
    """

    def __init__(
        self,
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        dynamic: bool | None = None,
    ) -> None:
        read_options(mode, options)
        self.settings = {"mode": mode, "options": options and dict(options), "dynamic": dynamic}
        self.lowered = self.left = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Compile the model; nothing runs before the first step."""
        if model._compiled_call_impl in _compiled:
            model._compiled_call_impl = None  # an interrupted training did not hand it back
        if args.torch_compile or model._compiled_call_impl is not None:
            raise BackendOptionError(
                "the model that is to be trained is compiled already",
                found="torch_compile=True" if args.torch_compile else "model.compile() was called",
                help="leave it out; TloraFxCallback compiles the model",
            )
        model.compile(backend="tlora-fx", **self.settings)
        _compiled.add(model._compiled_call_impl)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Hand the model back as it was, and warn where no branch was lowered."""
        model._compiled_call_impl = None
        self.lowered, self.left = branches_of(model)
        if not self.lowered:
            say("tlora-fx: no LoRA branch of the model that was trained was lowered")

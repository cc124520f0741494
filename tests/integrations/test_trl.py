"""TRL's trainer runs a PEFT model under the tlora-fx backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from tests.backend.models import assert_equal_steps, net, train
from tests.models import error_of
from tlora_fx.backend import BackendWarning, forget
from tlora_fx.errors import BackendOptionError
from tlora_fx.integrations.trl import TloraFxCallback

BASE = Path(__file__).parents[2] / "examples/quickstart/base"
PLAIN = SimpleNamespace(torch_compile=False)


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    """What the backend lowers is compiled by AOTAutograd alone, which takes no C++ compiler."""
    torch._dynamo.reset()
    forget()
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **_: aot_eager(gm, inputs)
    )


def test_a_model_is_compiled_while_it_trains():
    """A step between begin and end equals eager mode's under autocast; then all is as it was."""
    model, x, callback = net(), torch.randn(4, 12), TloraFxCallback(options={"strict": True})

    with torch.autocast("cpu", torch.bfloat16):
        expected = train(model, model, x)
        callback.on_train_begin(PLAIN, None, None, model=model)
        compiled = train(model, model, x)
        callback.on_train_end(PLAIN, None, None, model=model)

    assert_equal_steps(compiled, expected, 2e-2)
    assert (callback.lowered, callback.left) == (2, 0)
    assert model._compiled_call_impl is None


def test_a_training_without_a_lowered_branch_warns():
    """A bias of B is left to Inductor, and the end of training says that all was."""
    model, callback = net(lora_bias=True), TloraFxCallback()
    callback.on_train_begin(PLAIN, None, None, model=model)
    with pytest.warns(BackendWarning, match="leaves 2 of 2"):
        model(torch.randn(4, 12))

    with pytest.warns(BackendWarning, match="no LoRA branch of the model that was trained"):
        callback.on_train_end(PLAIN, None, None, model=model)
    assert (callback.lowered, callback.left) == (0, 2)


def test_a_model_is_not_compiled_twice():
    """`torch_compile=True` beside the callback is refused, and so is a model compiled before."""
    model, callback = net(), TloraFxCallback()

    told = error_of(
        lambda: callback.on_train_begin(
            SimpleNamespace(torch_compile=True), None, None, model=model
        ),
        BackendOptionError,
    )
    assert "torch_compile=True" in told
    model.compile(backend="eager")
    assert "model.compile() was called" in error_of(
        lambda: callback.on_train_begin(PLAIN, None, None, model=model), BackendOptionError
    )


def test_a_model_trains_again_after_an_interrupt():
    """transformers does not tell callbacks of it, so the model is still compiled."""
    model, x, callback = net(), torch.randn(4, 12), TloraFxCallback()
    callback.on_train_begin(PLAIN, None, None, model=model)
    first = train(model, model, x)

    again = TloraFxCallback(options={"strict": True})
    again.on_train_begin(PLAIN, None, None, model=model)
    assert_equal_steps(train(model, model, x), first, 1e-5)
    again.on_train_end(PLAIN, None, None, model=model)

    assert model._compiled_call_impl is None


def test_wrong_options_are_refused_where_the_callback_is_made():
    """Nothing has to be traced first."""
    told = error_of(lambda: TloraFxCallback(options={"strickt": True}), BackendOptionError)

    assert "nearest  strict" in told


@pytest.mark.slow
def test_an_sft_trainer_trains_as_without_the_callback(tmp_path):
    """TRL's defaults: eager's losses, all branches lowered, no graph or break more than theirs."""
    pytest.importorskip("trl")
    losses, counted = {}, {}
    arms = {"eager": [], "theirs": [Theirs()], "tlora-fx": [TloraFxCallback()]}
    for name, callbacks in arms.items():
        torch._dynamo.reset()
        counters.clear()
        losses[name] = sft_losses(tmp_path / name, callbacks)
        counted[name] = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    (callback,) = arms["tlora-fx"]
    assert (callback.lowered, callback.left) == (7, 0)
    assert losses["tlora-fx"] == pytest.approx(losses["eager"], rel=5e-3)
    assert counted["tlora-fx"] == counted["theirs"] > counted["eager"]


class Theirs(TrainerCallback):
    """Compiles a trainer's model with what Inductor does before its code."""

    def on_train_begin(self, args, state, control, model=None, **_):
        """Nothing runs before the first step."""
        model.compile(backend=aot_eager)


def sft_losses(folder, callbacks):
    """The losses of three steps of TRL's trainer on a small base."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    base = str(BASE)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(base, num_hidden_layers=1)
    rows = [{"prompt": f"{n} + {n} = ", "completion": str(2 * n)} for n in range(12)]
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_config(config),
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        callbacks=callbacks,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

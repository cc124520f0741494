"""Callbacks hear of a run together, and none of them can end it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runtime.groups import make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.errors import CallbackWrong
from tlora_fx.runtime.callbacks import Callbacks, callback_named
from tlora_fx.runtime.trainer import Trainer, TrainerCallback

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"


class Listen(TrainerCallback):
    """Keeps the names of what it hears, and the texts of warnings."""

    def __init__(self, fails=""):
        self.heard, self.texts, self.fails = [], [], fails

    def stepped(self, report):
        self._note("stepped")

    def evaluating(self):
        self._note("evaluating")

    def evaluated(self, report):
        self._note("evaluated")

    def ended(self, run):
        self._note("ended")

    def warned(self, text):
        self.texts.append(text)

    def _note(self, event):
        self.heard.append(event)
        if event == self.fails:
            raise ValueError("no more")


LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    base = tiny_base(tmp_path_factory.mktemp("base"))
    return make_job(base, "a", max_steps=2, eval_data={"path": "unused.jsonl"})


def test_a_callback_that_fails_hears_no_more_and_the_run_goes_on(job, tmp_path):
    """The others hear everything, and a warning that names it."""
    bad, good = Listen(fails="stepped"), Listen()
    data = make_data([job])
    Trainer(
        compile([job]), output=tmp_path, device="cpu", data=data, callback=Callbacks([bad, good])
    ).run()

    assert bad.heard == ["stepped"]
    assert good.heard == ["stepped", "stepped", "evaluating", "evaluated", "ended"]
    [told] = [text for text in good.texts if "Listen failed in stepped" in text]
    line = next(n for n, text in enumerate(LINES, 1) if 'raise ValueError("no more")' in text)
    assert told.endswith(f"ValueError: no more (test_callbacks.py:{line})")


def test_a_callback_that_lacks_an_event_costs_a_warning():
    """As an object with the methods that it needs, which is no subclass."""
    heard, good = [], Listen()
    callbacks = Callbacks([SimpleNamespace(stepped=heard.append), good])
    callbacks.ended("run")
    callbacks.stepped("report")

    assert heard == []
    assert good.heard == ["ended", "stepped"]
    [told] = good.texts
    assert told.startswith("the callback SimpleNamespace failed in ended and hears no more: ")


def test_ctrl_c_in_a_callback_is_none_of_its_failures():
    """It goes through."""

    class Stop(TrainerCallback):
        def warned(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Callbacks([Stop()]).warned("x")


def test_the_example_of_the_page_is_a_callback(tmp_path):
    """What docs/callbacks.md shows is found by file and class."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    (tmp_path / "tell.py").write_text(code)

    assert type(callback_named(f"{tmp_path}/tell.py:Tell")).__name__ == "Tell"


def test_every_method_stands_on_the_page():
    """By its name."""
    events = [name for name in vars(TrainerCallback) if not name.startswith("_")]

    assert [name for name in events if f"`{name}(" not in PAGE.read_text("utf-8")] == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tell.py:Tell", "tell.py"),
        ("pathlib:Path", "is no tlora_fx.TrainerCallback"),
        ("nothing", "write FILE.py:CLASS"),
    ],
)
def test_what_is_no_callback_is_refused(tmp_path, monkeypatch, name, told):
    """Before anything is trained."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CallbackWrong) as caught:
        callback_named(name)

    assert told in str(caught.value)

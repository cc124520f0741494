"""The trainer's process: bits in strict mode, and how it tells why it does not start."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from tests import forked, fresh
from tlora_fx.errors import BaseFileDamaged
from tlora_fx.server.answering import Answering
from tlora_fx.server.tinker import trainer
from tlora_fx.server.tinker.trainer import training
from tlora_fx.training.options import EngineOptions, write_small_base

_SCRIPT = """
import hashlib, json, sys
from pathlib import Path

from tests.training.clients import Client, cycle_of, datum, run_all
from tlora_fx.training.engine import Engine
from tlora_fx.training.options import EngineOptions

folder = Path(sys.argv[1])
engine = Engine(EngineOptions(folder / "base", compiled=sys.argv[2] == "compiled"))
data = [datum([(7 * at * at + size) % 250 + 5 for at in range(size)]) for size in (20, 33, 9)]
configs = {"a": {"rank": 4, "seed": 5}, "b": {"rank": 8, "seed": 5, "train_unembed": False}}
found = {}
for order in ("ab", "ba", "a", "b"):
    cycle = cycle_of(folder / order, engine)
    clients = {}
    for name in order:
        clients[name] = Client(cycle.log, config=configs[name])
        run_all(cycle)
    for name, client in clients.items():
        futures = []
        for _ in range(3):
            futures += [client.forward_backward(data), client.optim_step(learning_rate=1e-2)]
        run_all(cycle)
        bodies = b"".join(cycle.log.answer("ada", each).body for each in futures)
        found[f"{name} of {order}"] = hashlib.sha256(bodies).hexdigest()
assert cycle.layers.state == {"plain": "off", "compiled": "compiled"}[sys.argv[2]]
print(json.dumps(found))
"""


@pytest.fixture
def begins_at_once():
    """A process that the service starts is, in a whole run, the fork of one with all imports."""
    with forked.interpreter():
        yield


@pytest.mark.parametrize("layers", ["plain", pytest.param("compiled", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_where_a_model_lies(tmp_path, layers):
    """Alone, or in the first or second place of two; in float32, as on the small base."""
    env = os.environ | {"TLORA_FX_STRICT": "1"}
    done = fresh.run("-c", _SCRIPT, tmp_path, layers, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])

    for name in "ab":
        assert len({found[f"{name} of {order}"] for order in ("ab", "ba", name)}) == 1


def test_what_the_trainer_notes_is_a_line_of_the_services_log():
    """Such as why layers are compiled before the first cycle."""
    done = fresh.run(
        "-c",
        "from tlora_fx.server.log_lines import log_to_stderr\n"
        "from tlora_fx.training.engine import logger\n"
        "log_to_stderr('json')\n"
        "logger.info('layers are compiled before the first cycle: strict mode')\n",
    )
    said = json.loads(done.stderr.splitlines()[-1])

    assert said["message"] == "layers are compiled before the first cycle: strict mode"
    assert said["level"] == "info"


def test_a_base_that_cannot_be_used_is_told_at_the_start(tmp_path, begins_at_once):
    """As the error that the trainer's process had."""
    base = tmp_path / "base"
    options = EngineOptions(tmp_path / "tinker", base=str(write_small_base(base)))

    with (
        pytest.raises(BaseFileDamaged, match="holds no weights"),
        training(options, "text", lambda text: None),
    ):
        pass


def start_for_ever(begun, options, sockets, parent):
    """A trainer that compiles layers for a long time before its first request."""
    from tlora_fx.training import engine

    def compiling(options):
        begun.touch()
        time.sleep(600)

    engine.Engine = compiling
    trainer._train(options, begun, "text", None, sockets, parent)


def test_a_trainer_that_is_still_starting_ends_with_the_run(tmp_path, begins_at_once):
    """At once: nobody waits until it is ready."""
    begun = tmp_path / "begun"
    options = EngineOptions(tmp_path / "tinker", compiled=True)
    process = Answering(partial(start_for_ever, begun, options), [], print, "trains")
    process.start(begun.exists)
    child = process._process
    process.close()

    assert child.exitcode == 0


def test_a_run_that_shall_end_starts_no_process(tmp_path):
    """Also not later."""
    begun = tmp_path / "begun"
    process = Answering(partial(start_for_ever, begun, None), [], print, "trains")
    process.start(lambda: True)
    process.keep()
    process.close()

    assert process._process is None


def test_a_small_base_that_a_kill_cut_short_is_written_anew(tmp_path, monkeypatch):
    """Whatever file was half there."""
    from transformers import LlamaConfig

    def cut(config, folder):
        (Path(folder) / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LlamaConfig, "save_pretrained", cut)
        with pytest.raises(KeyboardInterrupt):
            write_small_base(tmp_path / "base")
    folder = write_small_base(tmp_path / "base")

    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert [each.name for each in tmp_path.iterdir()] == ["base"]

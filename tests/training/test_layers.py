"""Compiled layers take over between two cycles; models, samplers and what runs again stay right."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.clocks import machine  # noqa: F401  (a fixture)
from tests.training.clients import VOCABULARY, Client, cycle_of, datum, run_all
from tests.training.test_sampling import PROMPT, drawn
from tlora_fx.config.base_spec import BaseSpec
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.rounds import compilation
from tlora_fx.training import datums
from tlora_fx.training.engine import Engine, LogRecord
from tlora_fx.training.log import LAYERS, TOOK_OVER, CommandLog
from tlora_fx.training.options import EngineOptions
from tlora_fx.training.times import trace

CONFIGS = {"a": {"rank": 4, "seed": 1}, "b": {"rank": 8, "seed": 2, "train_mlp": False}}
TURNS, PIECES = 3, 3


@dataclass(frozen=True, slots=True)
class WideOptions(EngineOptions):
    """On a base that computes in its own dtype alone; norms of the small one round to float32."""

    def spec(self):
        from transformers import GPTNeoXConfig

        folder = self.folder / "wide"
        GPTNeoXConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=256, hidden_dropout=0.0,
            attention_dropout=0.0, architectures=["GPTNeoXForCausalLM"],
        ).save_pretrained(folder)  # fmt: skip
        return BaseSpec(config=folder, dtype="float64", seed=3)


class Beside:
    """Stands for the process that compiles, which is done when a test says so."""

    code = None

    def __init__(self, request):
        Beside.code = None

    @property
    def returncode(self):
        return Beside.code

    def reason(self):
        return "exit status 1"

    def end(self):
        pass


def data_of(name, turn):
    """Data of a request; that of the second turn runs in several pieces."""
    size = 40 if turn == 1 else 12
    lines = [[(7 * at * at + size * each + ord(name)) % 250 + 5 for at in range(size)]
             for each in range(PIECES if turn == 1 else 1)]  # fmt: skip
    return [datum(each) for each in lines]


def sampled(cycle, client, at):
    client.send("save_weights_for_sampler", sampling_session_seq_id=at)
    run_all(cycle)
    number = client.sample(f"{client.session}:sample:{at}", 0, PROMPT)
    run_all(cycle)
    [(tokens, logprobs, _)], _ = drawn(client, number)
    return tokens, logprobs


class Play:
    """Some clients' turns on an engine.

    answers    by client, losses of requests and norms of steps
    sampled    by the first client's version before its second turn: then, and at the end
    adapters   by client, at the end
    """

    def __init__(self, folder, own, names, switch=lambda: None):
        self.folder, self.own = folder, own
        self.cycle = cycle_of(folder, own)
        self.clients = {name: Client(self.cycle.log, config=CONFIGS[name]) for name in names}
        run_all(self.cycle)
        numbers = {name: [] for name in names}
        for turn in range(TURNS):
            if turn == 1:
                self.sampled = [sampled(self.cycle, self.clients[names[0]], 0)]
            for name, client in self.clients.items():
                numbers[name].append(client.forward_backward(data_of(name, turn)))
                numbers[name].append(client.optim_step(learning_rate=1e-2))
            if turn == 1:
                self.cycle.run()
                switch()
            run_all(self.cycle)
        client = self.clients[names[0]]
        number = client.sample(f"{client.session}:sample:0", 1, PROMPT)
        run_all(self.cycle)
        self.sampled.append(drawn(client, number)[0][0][:2])
        self.adapters = {name: self.adapter(self.cycle, name) for name in names}
        self.answers = {name: self._numbers(name, own) for name, own in numbers.items()}

    def _numbers(self, name, numbers):
        found = map(self.clients[name].result, numbers)
        return [
            each[0]["loss:sum"] if isinstance(each, tuple) else each["metrics"]["grad_norm"]
            for each in found
        ]

    def adapter(self, cycle, name):
        """An adapter, after what runs again to bring it."""
        model = self.clients[name].model
        cycle.bring(model)
        parameters = cycle.tenants.member(model).parameters
        return {path: each.detach().clone() for path, each in parameters.items()}


@pytest.fixture(scope="module")
def switched():
    """One client whose layers are compiled after the first piece of its second request."""
    with TemporaryDirectory() as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compilation, "CompileProcess", Beside)
            patch.setattr(datums, "MICRO_TOKENS", 41)
            own = Engine(WideOptions(Path(folder), residents=3, compiled=True))
            play = Play(Path(folder) / "log", own, "a", lambda: setattr(Beside, "code", 0))
        yield play


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two clients whose layers are never compiled."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datums, "MICRO_TOKENS", 41)
        own = Engine(WideOptions(folder, residents=3))
        return Play(folder / "log", own, "ab")


@pytest.fixture
def cuts(monkeypatch):
    monkeypatch.setattr(datums, "MICRO_TOKENS", 41)


def test_a_model_is_the_same_before_and_after_layers_are_compiled(switched, plain):
    """Cycles go on meanwhile; a request may have pieces before and behind it."""
    facts = switched.cycle.log.facts()

    assert switched.own.step.model.is_compiled
    assert not plain.own.step.model.is_compiled
    assert (facts[LAYERS], plain.cycle.log.facts()[LAYERS]) == ("compiled", "off")
    assert 0 < facts[TOOK_OVER]["cycle"] < switched.cycle.log.last_cycle()
    assert switched.answers["a"] == pytest.approx(plain.answers["a"], rel=1e-10)


def test_a_model_among_others_on_compiled_layers_is_what_it_is_alone(
    switched, plain, cuts, tmp_path
):
    """And what both are without: a trainer that is started again compiles at once."""
    among = Play(tmp_path, switched.own, "ab")

    assert among.cycle.log.facts()[TOOK_OVER]["cycle"] == 0
    assert among.answers["a"] == pytest.approx(switched.answers["a"], rel=1e-10)
    for name, answers in plain.answers.items():
        assert among.answers[name] == pytest.approx(answers, rel=1e-10)


def test_a_sampler_goes_on_with_the_same_weights(switched):
    """Its version draws the same tokens from compiled layers, as likely as before."""
    (tokens, logprobs), (again, others) = switched.sampled

    assert again == tokens
    assert others == pytest.approx(logprobs, rel=1e-6)


def test_what_runs_again_runs_as_it_ran(switched, cuts):
    """After a kill, pieces of before compiled layers run without them, to the same bits."""
    ran, log = switched.adapters["a"], switched.cycle.log
    cycle = cycle_of(switched.folder, switched.own)
    done = log.done_since(switched.clients["a"].model, 0)
    plain = [cycle.layers.plain_pieces(each) for each in done if each.cuts]
    again = switched.adapter(cycle, "a")
    took_over = log.facts()[TOOK_OVER]
    log.tell({TOOK_OVER: took_over | {"cycle": 0}})
    all_compiled = switched.adapter(cycle_of(switched.folder, switched.own), "a")
    log.tell({TOOK_OVER: took_over})

    assert plain == [1, 1, 0]
    assert all(torch.equal(ran[name], each) for name, each in again.items())
    assert not all(torch.equal(ran[name], each) for name, each in all_compiled.items())


def test_a_trace_says_when_compiled_layers_took_over(switched):
    """And of each piece, whether they ran it."""
    log, client = switched.cycle.log, switched.clients["a"]
    took_over = log.facts()[TOOK_OVER]
    rows, pieces = log.times("ada", session=client.session), log.cycles("ada", client.session)
    events = [*trace(rows, pieces, took_over)]
    by_cycle = {
        each["args"]["cycle"]: each["args"]["compiled"]
        for each in events
        if "compiled" in each.get("args", {})
    }

    [event] = [each for each in events if each["name"] == "compiled layers take over"]
    assert event["args"] == {"cycle": took_over["cycle"]}
    assert event["ts"] == pytest.approx(1e6 * took_over["began"])
    assert {at for at, compiled in by_cycle.items() if not compiled} == {
        at for at in by_cycle if at <= took_over["cycle"]
    }
    assert any(by_cycle.values())


def test_a_trainer_without_compiled_layers_drops_the_record(tmp_path, plain):
    """What it runs counts as of before they take over, should they be compiled again."""
    log = cycle_of(tmp_path, plain.own).log
    log.tell({TOOK_OVER: {"cycle": 7, "began": 0.0, "seconds": 1.0}})
    cycle_of(tmp_path, plain.own)

    assert log.facts()[TOOK_OVER] is None


def test_a_start_without_compiled_layers_leaves_the_bits_of_who_waits(
    switched, plain, cuts, tmp_path
):
    """Once layers are compiled again, a model that did not run meanwhile is what it was."""
    play = Play(tmp_path, switched.own, "a")
    between = cycle_of(tmp_path, plain.own)
    other = Client(between.log, config=CONFIGS["b"])
    number = other.forward_backward(data_of("b", 0))
    run_all(between)
    after = between.log.last_cycle()
    cycle = cycle_of(tmp_path, switched.own)
    again = play.adapter(cycle, "a")
    [command] = [each for each in cycle.log.done_since(other.model, 0) if each.number == number]
    own = [each for each in cycle.log.done_since(play.clients["a"].model, 0) if each.cuts]

    assert cycle.layers.state == "compiled"
    assert cycle.log.facts()[TOOK_OVER]["cycle"] == after
    assert cycle.layers.plain_pieces(command) == len(command.cuts)
    assert [cycle.layers.plain_pieces(each) for each in own] == [0, 0, 0]
    assert all(torch.equal(play.adapters["a"][name], each) for name, each in again.items())


def test_what_runs_on_without_compiled_layers_keeps_its_own_bits(switched, plain, cuts, tmp_path):
    """A model that another code ran again is kept as that left it, whatever comes next."""
    play = Play(tmp_path, switched.own, "a")
    between, client = cycle_of(tmp_path, plain.own), play.clients["a"]
    client.forward_backward(data_of("a", 1))
    client.optim_step(learning_rate=1e-2)
    run_all(between)
    ran = play.adapter(between, "a")
    again = play.adapter(cycle_of(tmp_path, switched.own), "a")

    assert all(torch.equal(ran[name], each) for name, each in again.items())


def test_layers_are_compiled_beside_again_once_nothing_of_them_runs_again(tmp_path, plain):
    """A record of which no model has anything to run again is let go."""
    log = cycle_of(tmp_path, plain.own).log
    log.tell({TOOK_OVER: {"cycle": 7, "began": 0.0, "seconds": 1.0}})
    cycle_of(tmp_path, plain.own)
    cycle_of(tmp_path, plain.own)

    assert LogRecord(log, log.now()).read() is None


def test_a_trainer_that_cannot_compile_drops_the_record(tmp_path, monkeypatch):
    """What it runs is plain; the next start would take it for what compiled layers ran."""

    def fail(step):
        raise RuntimeError("no compiler")

    own = Engine(WideOptions(tmp_path, residents=2, compiled=True))
    log = CommandLog(tmp_path / "log")
    log.tell({TOOK_OVER: {"cycle": 0, "began": 0.0, "seconds": 1.0}})
    monkeypatch.setattr(GroupStep, "compile", fail)
    cycle = cycle_of(tmp_path / "log", own)

    assert cycle.layers.state == log.facts()[LAYERS] == "failed"
    assert log.facts()[TOOK_OVER] is None


def test_a_take_over_is_told_by_the_clock_of_the_cycles(tmp_path, machine):  # noqa: F811
    """Somebody sets the machine's clock back meanwhile; a trace shows it among its cycles."""
    log = CommandLog(tmp_path)
    record = LogRecord(log, began := log.now())
    machine.pass_by(3)
    machine.day -= 3600
    record.write(5)

    assert log.facts()[TOOK_OVER] == {"cycle": 5, "began": began, "seconds": 3}


@pytest.mark.slow
def test_a_process_compiles_for_the_trainer(tmp_path, monkeypatch, fresh_dynamo):
    """Layers, the loss, and forwards for samplers; in float32 numbers are the same to rounding."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    own = Engine(EngineOptions(tmp_path / "base", residents=2, compiled=True))
    cycle = cycle_of(tmp_path / "log", own)
    client, data = Client(cycle.log), data_of("a", 0)
    numbers = [client.forward_backward(data), client.optim_step(learning_rate=0.0)]
    run_all(cycle)
    counters.clear()
    while cycle.layers.state == "compiling":
        time.sleep(0.1)
        run_all(cycle)
    numbers += [client.forward_backward(data), client.optim_step(learning_rate=0.0)]
    run_all(cycle)
    loss, norm, again, its = map(client.result, numbers)

    assert cycle.layers.state == "compiled"
    assert counters["aot_autograd"]["autograd_cache_hit"] == 3
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0
    assert again[0]["loss:sum"] == pytest.approx(loss[0]["loss:sum"], rel=1e-5)
    assert its["metrics"]["grad_norm"] == pytest.approx(norm["metrics"]["grad_norm"], rel=1e-5)

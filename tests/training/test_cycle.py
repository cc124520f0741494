"""The cycle: each tenant among others is what it is alone, and what PEFT with torch.optim makes."""

from __future__ import annotations

import math
import os
import random
import sqlite3
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import get_peft_model, set_peft_model_state_dict

from tests.training.clients import (
    VOCABULARY,
    Client,
    cycle_of,
    datum,
    engine,
    request,
    run_all,
)
from tlora_fx.ops.kernels.select import strict
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.tracing.adapters import written_config
from tlora_fx.training import cycle as cycle_module
from tlora_fx.training import datums, tenants
from tlora_fx.training.log import CommandLog
from tlora_fx.training.times import REASONS, explained

#: An eps beside which the moments vanish: the step is as large as the gradients, not their signs.
#: Tokens of a long sample: two fit a small micro-batch, three do not.
LONG = 112
SCALED = {"learning_rate": 30.0, "eps": 1e3}
CLIPPED = {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "grad_clip_norm": 0.7}
DECAYED = {"learning_rate": 1e-2, "weight_decay": 0.1}
CONFIGS = (
    {"rank": 4, "seed": 1},
    {"rank": 12, "seed": 2, "train_unembed": False},
    {"rank": 8, "seed": 3, "train_attn": False, "train_unembed": False},
)


@dataclass(frozen=True)
class Step:
    """Some requests for gradients, each a loss and its data, and the optimizer step behind."""

    forwards: tuple
    adam: dict


@cache
def script(key, steps=2):
    """Steps of one tenant, drawn from a key."""
    draw = random.Random(key)
    made = []
    for number in range(steps):
        forwards = []
        for _ in range(draw.randint(1, 2)):
            loss = draw.choice(["cross_entropy", "importance_sampling", "ppo", "gspo"])
            forwards.append(
                (loss, tuple(drawn_datum(draw, loss) for _ in range(draw.randint(1, 3))))
            )
        adam = draw.choice([SCALED, CLIPPED, DECAYED]) if number else SCALED
        made.append(Step(tuple(forwards), adam))
    return made


def drawn_datum(draw, loss):
    count = draw.randint(2, 12)
    tokens = [draw.randrange(3, VOCABULARY) for _ in range(count)]
    # Targets of one's own: not the next tokens.
    targets = [draw.randrange(3, VOCABULARY) for _ in range(count)]
    numbers = {
        "logprobs": [float(np.float32(-draw.uniform(5, 6))) for _ in range(count)],
        "advantages": [float(np.float32(draw.uniform(-1, 1))) for _ in range(count)],
    }
    weights = [float(np.float32(draw.choice([0, 1, 0.5]))) for _ in range(count)]
    return datum(tokens, targets, **({"weights": weights} if loss == "cross_entropy" else numbers))


def send(client, step):
    """Append a step's requests; their futures."""
    futures = [client.forward_backward(list(data), loss) for loss, data in step.forwards]
    return [*futures, client.optim_step(**step.adam)]


def adapter(cycle, client):
    """The adapter as it is now, brought from disk where it is parked."""
    cycle.bring(client.model)
    tensors = cycle.tenants.member(client.model).final_adapter()
    return {name: each.detach().clone() for name, each in tensors.items()}


def by_peft(job, start, steps):
    """Losses of each request and the adapter, by PEFT and torch.optim alone."""
    backbone = engine().step.model.backbone
    torch.manual_seed(0)
    model = get_peft_model(plain_base(backbone), written_config(job, backbone))
    set_peft_model_state_dict(model, {name: each.clone() for name, each in start.items()})
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0)
    losses = []
    for step in steps:
        for loss, data in step.forwards:
            total = sum(alone_loss(model, loss, each) for each in data)
            total.backward()
            losses.append(float(total.detach()))
        adam, [group] = step.adam, optimizer.param_groups
        group["betas"] = (adam.get("beta1", 0.9), adam.get("beta2", 0.95))
        group["lr"], group["eps"] = adam.get("learning_rate", 1e-4), adam.get("eps", 1e-12)
        group["weight_decay"] = adam.get("weight_decay", 0.0)
        if adam.get("grad_clip_norm"):
            torch.nn.utils.clip_grad_norm_(trained, adam["grad_clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
    found = {
        name.replace(".default", ""): each.detach()
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    return losses, found


def alone_loss(model, loss, one):
    """The loss of one datum, written down apart from the product."""
    targets = torch.tensor(one["target_tokens"])
    logits = model(input_ids=torch.tensor([one["tokens"]])).logits[0].log_softmax(-1)
    lp = logits[torch.arange(len(targets)), targets]
    if loss == "cross_entropy":
        return -(torch.tensor(one["weights"], dtype=torch.float64) * lp).sum()
    old = torch.tensor(one["logprobs"], dtype=torch.float64)
    gain = torch.tensor(one["advantages"], dtype=torch.float64)
    ratio = torch.exp(lp - old)
    if loss == "importance_sampling":
        return -(ratio * gain).sum()
    if loss == "gspo":
        ratio = torch.exp((lp.detach() - old).mean()) * torch.exp(lp - lp.detach())
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum()


def assert_same(found, expected, bound=1e-9):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=bound, atol=bound)


def play(folder, clients, order, *, killed=lambda at: False, **how):
    """Tenants' steps in an order of turns; their answers and adapters, and what they began with.

    clients   by name: config and script
    order     names; a tenant's next step is sent, and all that can run does
    killed    whether the trainer is replaced after a turn
    """
    cycle = cycle_of(folder, **how)
    made, futures, sent = {}, {name: [] for name in clients}, dict.fromkeys(clients, 0)
    starts = {}
    for at, name in enumerate(order):
        config, steps = clients[name]
        if name not in made:
            made[name] = Client(cycle.log, config=config)
            run_all(cycle)
            starts[name] = adapter(cycle, made[name]), cycle.tenants.member(made[name].model).job
        futures[name] += send(made[name], steps[sent[name]])
        sent[name] += 1
        if at % 3 != 1:  # Two turns share a cycle.
            run_all(cycle)
        if killed(at):
            cycle.tenants.close()
            cycle.log.close()
            cycle = cycle_of(folder, **how)
            for client in made.values():
                client.log = cycle.log
    run_all(cycle)
    answers = {name: [made[name].result(each) for each in futures[name]] for name in made}
    return answers, {name: adapter(cycle, made[name]) for name in made}, starts


ORDER = ("a", "b", "c", "b", "c", "a")
TENANTS = {name: (CONFIGS[at], script(name)) for at, name in enumerate("abc")}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return play(tmp_path_factory.mktemp("together"), TENANTS, ORDER)


@pytest.mark.parametrize("name", "abc")
def test_a_tenant_among_others_is_what_peft_makes_of_it(together, name):
    """Losses are sums, gradients add over requests, a step clears them, and has its numbers."""
    answers, adapters, starts = together
    losses, expected = by_peft(starts[name][1], starts[name][0], TENANTS[name][1])

    found = [each[0]["loss:sum"] for each in answers[name] if isinstance(each, tuple)]
    assert found == pytest.approx(losses, rel=1e-9)
    assert_same(adapters[name], expected)


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6))
def test_a_tenant_among_others_is_what_it_is_alone(tmp_path_factory, seed):
    """Whatever the others do, and whenever they do it."""
    draw = random.Random(seed)
    clients = {
        name: (draw.choice(CONFIGS) | {"seed": seed}, script(f"{seed} {name}")) for name in "abc"
    }
    order = [name for name in clients for _ in range(2)]
    draw.shuffle(order)
    answers, adapters, _ = play(tmp_path_factory.mktemp("run"), clients, order)
    name = draw.choice("abc")
    alone, own, _ = play(tmp_path_factory.mktemp("run"), {name: clients[name]}, [name, name])

    assert_same(adapters[name], own[name])
    for found, expected in zip(answers[name], alone[name], strict=True):
        if isinstance(found, dict):
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        else:
            assert found[0] == pytest.approx(expected[0], rel=1e-9)


def test_a_killed_trainer_goes_on_where_it_was(tmp_path, together):
    """Killed after each turn, with and without snapshots, with gathered gradients.

    What runs again runs alone, in rows of another size, so the last bit may differ.
    """
    for every in (1, 64):
        folder = tmp_path / str(every)
        answers, adapters, _ = play(
            folder,
            TENANTS,
            ORDER,
            killed=lambda at: True,
            snapshot_every=every,
            snapshot_share=math.inf,
        )
        for name in TENANTS:
            assert_same(adapters[name], together[1][name], 1e-12)
            for found, expected in zip(answers[name], together[0][name], strict=True):
                if isinstance(found, dict):
                    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
                else:
                    assert found[0] == pytest.approx(expected[0], rel=1e-12)


HEADS = {
    "a": {"rank": 4, "seed": 1},
    "b": {"rank": 12, "seed": 2},
    "c": {"rank": 8, "seed": 3, "train_attn": False, "train_mlp": False},
    "d": {"rank": 8, "seed": 4, "train_unembed": False},
    "e": {"rank": 4, "seed": 5, "train_mlp": False},
}


def test_adapted_heads_train_as_alone_through_kills_parking_and_copies(tmp_path):
    """Of several ranks, beside one that is not adapted, and more than have a place."""
    clients = {name: (config, script(name)) for name, config in HEADS.items()}
    answers, adapters, starts = play(
        tmp_path, clients, "abcdecadbe", killed=lambda at: at % 2, parked_bytes=0,
        snapshot_every=1, snapshot_share=math.inf,
    )  # fmt: skip
    for name in clients:
        losses, expected = by_peft(starts[name][1], starts[name][0], clients[name][1])
        found = [each[0]["loss:sum"] for each in answers[name] if isinstance(each, tuple)]
        assert found == pytest.approx(losses, rel=1e-9)
        assert_same(adapters[name], expected)
        heads = [each for at, each in adapters[name].items() if "lm_head" in at]
        assert [bool(each.any()) for each in heads] == ([] if name == "d" else [True, True])


def test_snapshots_take_a_share_of_the_time_at_most(tmp_path, monkeypatch):
    """Large models are snapshotted less often: what runs again after a kill takes no longer."""
    cycle = cycle_of(tmp_path, snapshot_every=2)
    client, kept = Client(cycle.log), []
    monkeypatch.setattr(CommandLog, "keep", lambda log, model, seq: kept.append(seq))
    counts = []
    for keep_seconds, since in ((0.0, 0.0), (1e6, 0.0), (1e6, 1e8)):
        send(client, script("a")[0])
        cycle.tenants.keep_seconds = keep_seconds
        if client.model in cycle.tenants.resident:
            cycle.tenants.resident[client.model].since = since
        run_all(cycle)
        cycle.tenants.settle()
        counts.append(len(kept))

    assert 0 < counts[0] == counts[1] < counts[2]


def test_models_share_the_time_from_which_snapshots_take_a_part(tmp_path, monkeypatch):
    """However many models run together, and however many requests: seconds count once."""
    cycle, seconds, finish = cycle_of(tmp_path), [], CommandLog.finish

    def noted(log, outcomes, ran=None):
        seconds.append(ran.seconds if ran else 0.0)
        finish(log, outcomes, ran)

    monkeypatch.setattr(CommandLog, "finish", noted)
    clients = [Client(cycle.log) for _ in range(3)]
    run_all(cycle)
    for client in clients:
        for _ in range(2):
            client.forward_backward([datum([1, 2, 3, 4])])
    run_all(cycle)
    parts = [cycle.tenants.resident[client.model].since for client in clients]
    assert sum(parts) == pytest.approx(sum(seconds))
    assert max(parts) == pytest.approx(min(parts))


def test_what_was_not_written_down_runs_again(tmp_path, monkeypatch, together):
    """The disk takes no answers now and then; nothing is counted twice."""
    draw, finish, failed = random.Random(4), CommandLog.finish, []

    def full(log, outcomes, ran=None):
        if draw.random() < 0.3:
            failed.append(len(outcomes))
            raise sqlite3.OperationalError("database or disk is full")
        finish(log, outcomes, ran)

    cycle = cycle_of(tmp_path)
    clients = {name: Client(cycle.log, config=TENANTS[name][0]) for name in TENANTS}
    futures = {
        name: [each for step in TENANTS[name][1] for each in send(client, step)]
        for name, client in clients.items()
    }
    monkeypatch.setattr(CommandLog, "finish", full)
    ran = True
    while ran:
        try:
            ran = cycle.run()
        except sqlite3.OperationalError:
            cycle.forget()
    monkeypatch.undo()

    assert len(failed) > 3
    for name, client in clients.items():
        assert_same(adapter(cycle, client), together[1][name], 1e-12)
        last = client.result(futures[name][-1])["metrics"]
        assert last == pytest.approx(together[0][name][-1]["metrics"], rel=1e-12)


@pytest.mark.parametrize("parked_bytes", [0, 1 << 16, 1 << 30])
def test_more_models_than_slots_wait_in_memory_and_on_disk(tmp_path, parked_bytes):
    """Parked and brought back between their steps, one with gathered gradients."""
    clients = {name: (CONFIGS[0], script(name)) for name in "uvwxyz"}
    answers, adapters, _ = play(
        tmp_path / "many", clients, [*"uvwxyz", *"uvwxyz"], parked_bytes=parked_bytes
    )

    for name in "uz":
        alone, own, _ = play(tmp_path / name, {name: clients[name]}, [name, name])
        assert_same(adapters[name], own[name])
        assert answers[name][-1]["metrics"] == pytest.approx(alone[name][-1]["metrics"], rel=1e-9)


@pytest.mark.parametrize("parked_bytes", [0, 1 << 30])
def test_gathered_gradients_survive_others_that_take_the_slots(tmp_path, parked_bytes):
    cycle = cycle_of(tmp_path, parked_bytes=parked_bytes)
    first, alone = Client(cycle.log), Client(cycle.log)
    data = [drawn_datum(random.Random(5), "cross_entropy")]
    first.forward_backward(data)
    run_all(cycle)
    for _ in range(engine().options.residents + 1):
        other = Client(cycle.log)
        other.forward_backward(data)
        run_all(cycle)
    assert first.model not in cycle.tenants.resident
    assert (first.model in cycle.tenants.parked) == bool(parked_bytes)
    first.optim_step(**SCALED)
    alone.forward_backward(data)
    alone.optim_step(**SCALED)
    run_all(cycle)

    assert_same(adapter(cycle, first), adapter(cycle, alone), 0)


@pytest.mark.parametrize(("dirty", "late", "stays"), [(1, 0, True), (1, 1, False), (4, 0, False)])
def test_gradients_that_a_step_is_about_to_use_keep_their_place(
    tmp_path, monkeypatch, dirty, late, stays
):
    """While others can make room, and for a while; that of who waits longest is free first."""
    cycle = cycle_of(tmp_path)
    clients = [Client(cycle.log) for _ in range(engine().options.residents)]
    for at, client in enumerate(clients):
        run_all(cycle)
        client.forward_backward(GOOD)
        if at >= dirty:
            client.optim_step()
        run_all(cycle)
    monkeypatch.setattr(tenants, "STEP_SECONDS", 0.0 if late else math.inf)
    other = Client(cycle.log)
    step = [other.forward_backward(GOOD), other.optim_step()][1]
    run_all(cycle)

    assert other.result(step)["metrics"]["step"] == 1
    assert (clients[0].model in cycle.tenants.resident) == stays
    assert (clients[1].model in cycle.tenants.resident) != stays
    step = clients[0].optim_step()
    run_all(cycle)
    assert clients[0].result(step)["metrics"]["step"] == 1


@pytest.mark.usefixtures("small_micro_batches")
@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_the_log_says_who_has_waited_for_a_place(tmp_path, monkeypatch, seconds):
    """As long as it waits, and from when it has for a while."""
    monkeypatch.setattr(cycle_module, "WAITING_SECONDS", seconds)
    cycle = cycle_of(tmp_path)
    clients = [Client(cycle.log) for _ in range(engine().options.residents)]
    run_all(cycle)
    for each in clients:
        each.forward_backward(long_data())
    last = Client(cycle.log)
    waiting = []
    while cycle.run():
        waiting.append([cycle.log.waits_for_place(each) for each in (1, last.created)])

    assert waiting[0] == [False, not seconds]
    assert waiting[-1] == [False, False]
    assert cycle.log.facts().get("waiting", []) == []
    assert last.result(last.created)["model_id"] == last.model


GOOD = [datum([5, 6, 7, 8])]
FAR = [datum([5, 6], [6, 7], logprobs=[-1e6, -1e6], advantages=[1.0, 1.0])]
WRONG = {
    "no such loss": (GOOD, "stable_reinforce", "importance_sampling"),
    "unknown token": ([datum([5, VOCABULARY, 7])], "cross_entropy", "does not know"),
    "unknown target": ([datum([5, 6], [6, VOCABULARY])], "cross_entropy", "does not know"),
    "negative": ([datum([5, -6, 7])], "cross_entropy", "whole numbers"),
    "targets": ([datum([5, 6, 7], [6])], "cross_entropy", "a target for each"),
    "too long": ([datum([5] * 2050)], "cross_entropy", "too long"),
    "missing": (GOOD, "ppo", "do not fit the loss"),
    "not finite": (FAR, "importance_sampling", "not finite"),
    "no data": ([], "cross_entropy", "no data"),
    "not read": ([datum([5, 6], [6, 7], mask=[1, 1])], "cross_entropy", "does not read mask"),
}


def test_a_wrong_request_is_an_error_of_itself_alone(tmp_path):
    """What its model has gathered stays, and its neighbours' numbers too."""
    cycle = cycle_of(tmp_path)
    clients = [Client(cycle.log, config=CONFIGS[0]) for _ in range(3)]
    clean, hurt, neighbour = clients
    wrong = []
    for each in clients:
        each.forward_backward(GOOD)
    for data, loss, _ in WRONG.values():
        wrong.append(hurt.forward_backward(data, loss))
        neighbour.forward_backward(GOOD)
    wrong.append(hurt.send("optim_step", adam_params={"learning_rate": -1}))
    steps = [each.optim_step(**SCALED) for each in (clean, hurt)]
    sums = neighbour.optim_step(**SCALED)
    again = hurt.optim_step(**SCALED)
    run_all(cycle)

    for number, (_, _, text) in zip(wrong, WRONG.values(), strict=False):
        error = hurt.result(number)
        assert error["category"] == "user"
        assert text in error["error"]
    assert "learning_rate" in hurt.result(wrong[-1])["error"]
    assert clean.result(steps[0]) == hurt.result(steps[1])
    assert "no gradients" in hurt.result(again)["error"]
    assert_same(adapter(cycle, hurt), adapter(cycle, clean), 0)
    one, many = (clean.result(steps[0]), neighbour.result(sums))
    times = 1 + len(WRONG)
    assert many["metrics"]["grad_norm"] == pytest.approx(times * one["metrics"]["grad_norm"])


def test_gradients_that_are_not_finite_end_the_step_and_not_the_model(tmp_path, strictly):
    cycle = cycle_of(tmp_path)
    client, clean = Client(cycle.log, config=CONFIGS[0]), Client(cycle.log, config=CONFIGS[0])
    # Its loss is finite, and the squares of its gradients are not.
    large = [datum([5, 6], [6, 7], logprobs=[-600.0, -600.0], advantages=[1e38, 1e38])]
    forward = client.forward_backward(large, "importance_sampling")
    step = client.optim_step(**SCALED)
    run_all(cycle)
    assert math.isfinite(client.result(forward)[0]["loss:sum"])
    assert client.result(step)["category"] == "user"
    assert "not finite" in client.result(step)["error"]

    for each in (client, clean):
        each.forward_backward(GOOD)
        each.optim_step(**SCALED)
    run_all(cycle)
    assert_same(adapter(cycle, client), adapter(cycle, clean), 0)


@pytest.mark.parametrize("loss", ["cross_entropy", "dro", "gspo"])
def test_a_forward_gathers_nothing_and_says_the_same(tmp_path, loss):
    cycle, draw = cycle_of(tmp_path), random.Random(3)
    client = Client(cycle.log)
    data = [drawn_datum(draw, loss) for _ in range(3)]
    forward = client.forward_backward(data, loss, forward_only=True)
    step = client.optim_step()
    both = client.forward_backward(data, loss)
    run_all(cycle)

    assert "no gradients" in client.result(step)["error"]
    (metrics, logprobs), (expected, others) = map(client.result, (forward, both))
    assert metrics == pytest.approx(expected, rel=1e-9)
    for found, other in zip(logprobs, others, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-6)


@pytest.mark.usefixtures("small_micro_batches")
def test_a_long_request_is_cut_by_its_own_size(tmp_path):
    """Its loss and gradients are those of its data one by one."""
    cycle = cycle_of(tmp_path)
    whole, parts = Client(cycle.log, config=CONFIGS[0]), Client(cycle.log, config=CONFIGS[0])
    data = long_data()
    future = whole.forward_backward(data)
    futures = [parts.forward_backward([each]) for each in data]
    for each in (whole, parts):
        each.optim_step(**SCALED)
    run_all(cycle)

    total = sum(parts.result(each)[0]["loss:sum"] for each in futures)
    assert whole.result(future)[0]["loss:sum"] == pytest.approx(total, rel=1e-9)
    assert_same(adapter(cycle, whole), adapter(cycle, parts))


def long_data(count=5, key=1):
    draw = random.Random(key)
    return [datum([draw.randrange(3, VOCABULARY) for _ in range(LONG)]) for _ in range(count)]


@pytest.mark.usefixtures("small_micro_batches")
@pytest.mark.parametrize("noted", [True, False])
def test_what_runs_again_is_cut_as_it_was(tmp_path, monkeypatch, strictly, noted):
    """Also where requests are cut otherwise by now; a log that does not say how is read too."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log, config=CONFIGS[0])
    number = client.forward_backward(long_data())
    run_all(cycle)
    answer = client.result(number)
    client.optim_step(**SCALED)
    run_all(cycle)
    expected = adapter(cycle, client)
    assert cycle.log.done_since(client.model, 0)[0].cuts == (2, 2, 1)
    if not noted:
        with cycle.log._change() as base:
            base.execute("DROP TABLE cuts")
    cycle.log.close()
    monkeypatch.setattr(datums, "MICRO_TOKENS", 3 * LONG)
    cycle = cycle_of(tmp_path)
    client.log, found = cycle.log, adapter(cycle, client)

    assert client.result(number)[0] == answer[0]
    assert_same(found, expected, 0 if noted else 1e-9)
    if not noted:
        with pytest.raises(AssertionError):
            assert_same(found, expected, 0)


@pytest.mark.usefixtures("small_micro_batches")
def test_a_small_request_waits_for_a_piece_of_a_large_one(tmp_path):
    """And the large one's numbers are what they are without it."""
    cycle = cycle_of(tmp_path)
    large, small, alone = (Client(cycle.log, config=CONFIGS[0]) for _ in range(3))
    run_all(cycle)
    slow = large.forward_backward(long_data())
    step = large.optim_step(**SCALED)
    cycle.run()
    quick = small.forward_backward(GOOD), small.optim_step(**SCALED)
    cycle.run()
    assert [cycle.log.answer("ada", each) is not None for each in (*quick, slow)] == [1, 1, 0]
    run_all(cycle)
    other = alone.forward_backward(long_data()), alone.optim_step(**SCALED)
    run_all(cycle)

    assert large.result(slow)[0] == pytest.approx(alone.result(other[0])[0], rel=1e-9)
    assert large.result(step)["metrics"] == pytest.approx(
        alone.result(other[1])["metrics"], rel=1e-9
    )
    assert_same(adapter(cycle, large), adapter(cycle, alone))


def test_losses_of_sequences_have_rows_of_their_own(tmp_path, monkeypatch):
    """A tenant's rows run alike, whatever loss a neighbour has."""
    cycle, together, accumulate = cycle_of(tmp_path), [], engine().step.accumulate
    clients = [Client(cycle.log) for _ in range(4)]
    run_all(cycle)

    def noted(batches):
        together.append(sorted(batch.loss for batch in batches.values()))
        return accumulate(batches)

    monkeypatch.setattr(engine().step, "accumulate", noted)
    told = {"logprobs": [-5.5] * 3, "advantages": [0.5] * 3}
    for client, loss in zip(clients, ("ppo", "gspo", "cross_entropy", "gspo"), strict=True):
        client.forward_backward([{**GOOD[0], **({} if "cross" in loss else told)}], loss)
    run_all(cycle)

    assert sorted(together) == [["cross_entropy", "ppo"], ["gspo", "gspo"]]


@pytest.mark.usefixtures("small_micro_batches")
def test_models_that_do_not_fit_a_cycle_take_turns(tmp_path):
    """The log says which pieces ran together; what they compute is the same, to the bit."""
    with strict():
        cycle = cycle_of(tmp_path)
        cycle.shares.budget = 250
        clients = [Client(cycle.log, config=CONFIGS[0]) for _ in range(4)]
        run_all(cycle)
        *many, small = clients
        futures = [(each.forward_backward(long_data()), each.optim_step(**SCALED)) for each in many]
        small.forward_backward(GOOD)
        small.optim_step(**SCALED)
        cycle.run()
        assert small.model not in cycle.log.runnable()
        run_all(cycle)
        results = [
            (one.result(a), one.result(b)) for one, (a, b) in zip(many, futures, strict=True)
        ]

    assert repr(results[0]) == repr(results[1]) == repr(results[2])
    rows = cycle.log.cycles("ada", small.session)
    assert rows[0]["together"] == 2
    [forward] = [row for row in cycle.log.times(model=many[0].model) if row["seq"] == 1]
    assert forward["pieces"] == 3
    assert 0 < forward["own"] <= forward["computed"]
    said = explained(forward)
    assert said["slowdown"] >= 1
    assert sum(said["seconds"].values()) == pytest.approx(said["done"] - said["made"], abs=1e-3)
    assert said["why"] == REASONS[max(said["seconds"], key=said["seconds"].get)]


@pytest.mark.usefixtures("small_micro_batches")
def test_a_large_request_that_fails_at_its_end_leaves_nothing(tmp_path, strictly):
    """Its model keeps what it had gathered before, and that alone."""
    cycle = cycle_of(tmp_path)
    hurt, clean = (Client(cycle.log, config=CONFIGS[0]) for _ in range(2))
    for each in (hurt, clean):
        each.forward_backward(GOOD)
    told = {"logprobs": [-5.5] * (LONG - 1), "advantages": [0.5] * (LONG - 1)}
    data = [{**each, **told} for each in long_data()] + FAR
    number = hurt.forward_backward(data, "importance_sampling")
    for each in (hurt, clean):
        each.optim_step(**SCALED)
    run_all(cycle)

    assert "not finite" in hurt.result(number)["error"]
    assert_same(adapter(cycle, hurt), adapter(cycle, clean), 0)


def test_a_model_of_another_base_or_rank_is_never_made(tmp_path):
    """Its creation fails, and so does what was sent after it."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log, config={"rank": 512})
    step = client.forward_backward(GOOD)
    other = Client(cycle.log, config={"rank": 4, "train_more": True})
    muon = Client(cycle.log, optimizer_config={"type": "dimuon"})
    nothing = {f"train_{part}": False for part in ("attn", "mlp", "unembed")}
    idle = Client(cycle.log, config={"rank": 4, **nothing})
    run_all(cycle)

    error = client.result(client.created)["error"]
    assert "rank of 64 at most" in error
    assert "ask the operator for a larger --tinker-rank" in error
    assert "never made" in client.result(step)["error"]
    assert "train_more" in other.result(other.created)["error"]
    assert "adapts nothing" in idle.result(idle.created)["error"]
    assert "'dimuon' is not served: use adamw" in muon.result(muon.created)["error"]


def test_a_gap_keeps_what_comes_behind_it(tmp_path):
    """The last request comes first: chunks of one call arrive so."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    late = client.log.append(
        "ada", client.model, 2, "forward_backward", request(client.model, 2, GOOD)
    )
    run_all(cycle)
    assert client.log.answer("ada", late) is None
    client.forward_backward(GOOD)
    run_all(cycle)

    assert client.result(late)[0]["tokens:sum"] == 3


def test_completions_are_judged_by_kto(tmp_path):
    """By log-probabilities of the adapter and of one that is still the base, and TRL's formula."""
    cycle = cycle_of(tmp_path)
    client, fresh = Client(cycle.log), Client(cycle.log, config={"rank": 2, "seed": 2})
    draw = random.Random(5)
    lines = [[draw.randrange(1, 200) for _ in range(draw.randint(5, 9))] for _ in range(3)]
    starts, wanted = [2, 3, 1], [1.0, 0.0, 1.0]
    client.forward_backward([datum(line) for line in lines])
    client.optim_step(learning_rate=1e-2)
    mixed = [[*own[:start], *lines[at - 1][starts[at - 1] :]]
             for at, (own, start) in enumerate(zip(lines, starts, strict=True))]  # fmt: skip
    every = [datum(line) for line in [*lines, *mixed]]
    scores = [each.forward_backward(every, forward_only=True) for each in (client, fresh)]
    judged = [
        datum(line, weights=np.arange(1, len(line)) >= start, desirable=[good] * (len(line) - 1))
        for line, start, good in zip(lines, starts, wanted, strict=True)
    ]
    options = {"beta": 0.3, "undesirable_weight": 0.5}
    future = client.forward_backward(judged, "kto", options)
    alone = client.forward_backward(judged, "kto", forward_only=True)
    wrong = client.forward_backward(every, "kto")
    run_all(cycle)

    mine, base = (client.result(scores[0])[1], fresh.result(scores[1])[1])
    gains = [
        float((own[start - 1 :] - other[start - 1 :]).sum())
        for own, other, start in zip(mine, base, starts * 2, strict=True)
    ]
    far = max(sum(gains[3:]) / 3, 0.0)
    assert any(abs(gain) > 1e-3 for gain in gains)
    expected = sum(
        (1.0 if good else 0.5) / (1 + math.exp(0.3 * (gain - far) * (1 if good else -1)))
        for gain, good in zip(gains[:3], wanted, strict=True)
    )
    found, logprobs = client.result(future)
    assert found["loss:sum"] == pytest.approx(expected, abs=1e-5)
    assert [len(each) for each in logprobs] == [
        len(x) - s for x, s in zip(lines, starts, strict=True)
    ]
    assert "call forward_backward" in str(client.result(alone))
    assert "desirable: 1 or 0 for all tokens" in str(client.result(wrong))


@pytest.mark.slow
def test_two_thousand_parked_models_take_no_more_memory_than_two_hundred(tmp_path):
    """All but a few wait on disk; each goes on from where it was."""
    cycle, resident = cycle_of(tmp_path, parked_bytes=1 << 22), []
    clients = []
    for number in range(2000):
        clients.append(Client(cycle.log, config={"rank": 4, "seed": number}))
        run_all(cycle)
        if number % 200 == 199:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    first = clients[0]
    first.forward_backward(GOOD)
    step = first.optim_step(**SCALED)
    run_all(cycle)

    assert first.result(step)["metrics"]["step"] == 1
    assert len(cycle.tenants.parked) < 100
    assert resident[-1] < resident[0] + 60, resident


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_log_probability_above_zero_is_refused_by_name(tmp_path, loss):
    """Also of a forward alone; a loss of the client's own reads numbers as it likes."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    told = {"logprobs": [-1.0, 0.25, 1e-6], "advantages": [1.0, 1.0, 1.0]}
    wrong = [
        client.forward_backward([datum([5, 6, 7, 8], **told)], loss, forward_only=alone)
        for alone in (False, True)
    ]
    right = client.forward_backward(
        [datum([5, 6, 7, 8], **told | {"logprobs": [-1.0, 1e-6, 0.0]})], loss
    )
    run_all(cycle)

    for number in wrong:
        error = client.result(number)["error"]
        assert "logprobs of datum 0 are no log-probabilities" in error
        assert "0.25 of target 1" in error
    assert np.isfinite(client.result(right)[0]["loss:sum"])

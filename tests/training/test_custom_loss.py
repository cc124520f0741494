"""Losses of clients' own: graphs that are checked, rebuilt, and run like losses with a name."""

from __future__ import annotations

import json
import math
import operator

import pytest
import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from tests.training.clients import Client, cycle_of, datum, run_all
from tlora_fx.training.custom_loss import _elements

TOLD = {"logprobs": [-5.5, -5.4, -5.6], "advantages": [1.0, -0.5, 0.2]}
DATA = [datum([5, 6, 7, 8], **TOLD), datum([9, 10, 11, 12], **TOLD)]
STEP = {"learning_rate": 1e-2}


def graph_of(function):
    """A function as clients send it."""

    def encoded(value):
        if isinstance(value, fx.Node):
            return {"ref": value.name}
        if isinstance(value, tuple):
            return {"tuple": [encoded(each) for each in value]}
        if isinstance(value, dict):
            return {"dict": {key: encoded(each) for key, each in value.items()}}
        return value

    nodes = []
    for node in fx.symbolic_trace(function).graph.nodes:
        target = node.target if isinstance(node.target, str) else _get_qualified_name(node.target)
        nodes.append(
            {
                "op": node.op, "name": node.name, "target": target.replace("_operator", "operator"),
                "args": [encoded(each) for each in node.args],
                "kwargs": {key: encoded(each) for key, each in node.kwargs.items()},
            }
        )  # fmt: skip
    return {"format": 1, "nodes": nodes}


def sent(client, graph, *names, ranks=None):
    """The future of a new loss."""
    inputs = [{"name": name, "rank": (ranks or {}).get(name, 1)} for name in ("logprobs", *names)]
    body = {
        "session_id": client.session, "custom_loss_seq_id": 0, "name": "own", "inputs": inputs,
        "graph": graph,
    }  # fmt: skip
    return client.log.add_loss(client.user, client.session, 0, json.dumps(body).encode())


def sampled(logprobs, old, advantages):
    """Importance sampling, in more ways than one."""
    ratio = torch.exp(logprobs - old)
    count = logprobs.shape[0]
    loss = -(ratio * advantages).sum() * (count / count)
    metrics = {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": torch.ones_like(old).sum()}
    return loss, metrics


def test_a_loss_of_ones_own_is_what_the_same_loss_with_a_name_is(tmp_path):
    """Its gradients, value and log-probabilities; killed in between, it is known still."""
    cycle = cycle_of(tmp_path)
    own, named = Client(cycle.log), Client(cycle.log)
    made = sent(own, graph_of(sampled), "old", "advantages")
    run_all(cycle)
    assert own.result(made) == {"type": "create_custom_loss", "loss_id": f"{own.session}:loss:0"}
    loss_id = {"loss_id": own.result(made)["loss_id"]}
    renamed = [
        {("old" if name == "logprobs" else name): each for name, each in one.items()}
        for one in DATA
    ]
    futures = [own.forward_backward(renamed, "custom", loss_id)]
    futures.append(named.forward_backward(DATA, "importance_sampling"))
    run_all(cycle)
    cycle = cycle_of(tmp_path)
    steps = [each.optim_step(**STEP) for each in (own, named)]
    alone = own.forward_backward(renamed, "custom", loss_id, forward_only=True)
    run_all(cycle)

    (found, logprobs), (expected, others) = own.result(futures[0]), named.result(futures[1])
    assert found["loss:sum"] == pytest.approx(expected["loss:sum"], rel=1e-9)
    assert found["custom/tokens:sum"] == 6
    ratios = [math.exp(lp - q) for own in logprobs for lp, q in zip(own, TOLD["logprobs"])]  # noqa: B905
    assert found["custom/ratio:mean"] == pytest.approx(sum(ratios) / 6, rel=1e-5)
    assert [each.tolist() for each in logprobs] == [each.tolist() for each in others]
    metrics, wanted = (each.result(step)["metrics"] for each, step in zip((own, named), steps))  # noqa: B905
    assert metrics == pytest.approx(wanted, rel=1e-9)
    assert own.result(alone)[0]["loss:sum"] != found["loss:sum"]


def node(op, target, *args, name="n"):
    return {"op": op, "name": name, "target": target, "args": list(args)}


START = node("placeholder", "logprobs", name="x")
REF = {"ref": "x"}
END = node("output", "output", {"tuple": [{"ref": "n"}, {"dict": {}}]}, name="end")
LAST = node("output", "output", {"tuple": [REF, {"dict": {}}]}, name="end")
WRONG = {
    "a file": ([START, node("call_function", "torch.load", "/etc/passwd"), END], "torch.load"),
    "a module": ([START, node("call_function", "os.system", "true"), END], "os.system"),
    "a private name": ([START, node("call_method", "__class__", REF), END], "__class__"),
    "an attribute": (
        [START, node("call_function", "builtins.getattr", REF, "__dict__"), END], "attribute"
    ),
    "in place": ([START, node("call_method", "zero_", REF), END], "zero_"),
    "the future": ([node("call_function", "torch.exp", REF), START, END], "before"),
    "an object": ([START, node("call_function", "torch.exp", {"object": 1}), END], "object"),
    "no metrics": ([START, node("output", "output", REF, name="end")], "loss, metrics"),
    "no end": ([START], "loss, metrics"),
    "two inputs": ([START, node("placeholder", "y", name="y"), LAST], "number of inputs"),
    "two results": ([START, node("output", "output", REF, REF, name="end")], "loss, metrics"),
    **{
        f"a wrong {kind}": (
            [START, node("call_function", "torch.exp", {kind: value}), END], "cannot be read"
        )
        for kind, value in {
            "slice": [1, 2, 3, 4], "float": "x", "tuple": 5, "ref": [1], "dict": 5,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_not_listed_is_refused_by_name(tmp_path, kind):
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    nodes, text = WRONG[kind]
    made = sent(client, {"nodes": nodes})
    future = client.forward_backward(DATA, "custom", {"loss_id": f"{client.session}:loss:0"})
    run_all(cycle)

    assert client.result(made)["category"] == "user"
    assert text in client.result(made)["error"]
    assert "no such loss" in client.result(future)["error"]


def test_numbers_that_grow_end_the_request_and_not_the_trainer(tmp_path):
    """Ten to the ten thousand millionth is a number of Python's, and takes for ever."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    power = node("call_function", "operator.pow", 10, 10**10)
    sent(client, {"nodes": [START, power, LAST]})
    future = client.forward_backward(DATA, "custom", {"loss_id": f"{client.session}:loss:0"})
    good = client.forward_backward(DATA, "importance_sampling")
    run_all(cycle)

    assert "error" in client.result(future)
    assert client.result(good)[0]["tokens:sum"] == 6


FAILS = {
    "a shape": (lambda logprobs: (logprobs.view(7).sum(), {}), "invalid for input of size 3"),
    "an index": (lambda logprobs: (logprobs[100], {}), "out of bounds"),
    "two numbers": (lambda logprobs: (logprobs, {}), "no single number"),
    "no dependence": (lambda logprobs: (logprobs.detach().sum(), {}), "no log-probability"),
    "a metric": (lambda logprobs: (logprobs.sum(), {"custom/x:sum": logprobs}), "scalar"),
}


@pytest.mark.parametrize("kind", FAILS)
def test_a_graph_that_fails_is_its_clients_error(tmp_path, kind):
    """With gradients and without; what torch says reaches the client."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    function, text = FAILS[kind]
    sent(client, graph_of(function))
    loss_id = {"loss_id": f"{client.session}:loss:0"}
    futures = [client.forward_backward(DATA, "custom", loss_id) for _ in range(2)]
    futures.append(client.forward_backward(DATA, "custom", loss_id, forward_only=True))
    run_all(cycle)

    for number in futures:
        assert client.result(number)["category"] == "user"
        assert text in client.result(number)["error"]


def cubed(logprobs):
    square = logprobs.unsqueeze(0) * logprobs.unsqueeze(1)
    return (square.unsqueeze(0) * logprobs.view(-1, 1, 1)).sum(), {}


def indexed(logprobs):
    square = logprobs.unsqueeze(0) * logprobs.unsqueeze(1)
    return square[(square > 0).long()].sum(), {}


def squared_often(logprobs):
    own = logprobs.unsqueeze(0) * logprobs.unsqueeze(1)
    for _ in range(80):
        own = own * logprobs
    return own.sum(), {}


@pytest.mark.parametrize("function", [cubed, indexed, squared_often])
def test_a_graph_that_needs_too_much_memory_is_refused_before_it_has_it(tmp_path, function):
    """A killed trainer would run it again, and be killed again; a few tokens are no matter."""
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    sent(client, graph_of(function))
    loss_id = {"loss_id": f"{client.session}:loss:0"}
    data = [datum([5 + at % 200 for at in range(1901)])]
    large = client.forward_backward(data, "custom", loss_id)
    small = client.forward_backward([datum([5, 6, 7, 8])], "custom", loss_id)
    run_all(cycle)

    assert "computes too much" in client.result(large)["error"]
    assert client.result(small)[0]["tokens:sum"] == 3


@pytest.mark.parametrize(
    "index",
    [
        0, None, ..., slice(0, 2), [0] * 50, ([0] * 50,), [[0] * 50], [[0] * 50, [0] * 50],
        (slice(None), [0] * 50), ([[0]] * 50, [0] * 50), [torch.zeros(50).long(), [0] * 50],
        torch.zeros(50, 1).long(), (torch.zeros(50, 1).long(), torch.zeros(50).long()),
        [True], torch.ones(1, 7).bool(), [],
    ],
)  # fmt: skip
def test_indexing_gives_no_more_than_was_counted(index):
    """Lists choose as tensors do."""
    tensor = torch.ones(1, 7)

    assert _elements(operator.getitem, [tensor, index]) >= tensor[index].numel()


def test_a_datum_without_what_the_loss_reads_is_refused(tmp_path):
    cycle = cycle_of(tmp_path)
    client = Client(cycle.log)
    sent(client, graph_of(sampled), "old", "advantages", ranks={"old": 0})
    loss_id = {"loss_id": f"{client.session}:loss:0"}
    scalar = [{**each, "old": [-5.5]} for each in DATA]
    futures = [client.forward_backward(data, "custom", loss_id) for data in (DATA, scalar)]
    run_all(cycle)

    assert "datum 0 has no old" in client.result(futures[0])["error"]
    assert client.result(futures[1])[0]["custom/tokens:sum"] == 2

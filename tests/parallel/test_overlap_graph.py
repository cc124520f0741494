"""The schedule on graphs of torch.compile: what moves, what may not, what Inductor makes of it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.utils import run_and_get_code

from tests.parallel.eager_backend import eager_backend
from tlora_fx.parallel.nano_batches import inductor_options, kind_of, schedule_graph

collectives = torch.ops._c10d_functional


@pytest.fixture(scope="module")
def group():
    """A group of one process: sums change nothing, and still start and wait."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


class Copy(torch.autograd.Function):
    """Identity; sums in the backward."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return collectives.wait_tensor(collectives.all_reduce(grad, "sum", ctx.name)), None


class Reduce(torch.autograd.Function):
    """Sums; identity in the backward."""

    @staticmethod
    def forward(ctx, x, name):
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", name))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def two_layers(name):
    """Two residual layers over two nano-batches, each of two products and two sums."""

    def run(one, two, up, down):
        parts = [one, two]
        for _ in range(2):
            for place, x in enumerate(parts):
                inner = torch.tanh(Copy.apply(x, name) @ up)
                parts[place] = x + Reduce.apply(inner @ down, name)
        return parts[0].sum() + 2 * parts[1].sum()

    return run


def arguments():
    """Two nano-batches and two matrices, all of which learn."""
    torch.manual_seed(0)
    shapes = ((6, 8), (5, 8), (8, 16), (16, 8))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def told(graph):
    """Starts, waits and matrix products of a graph."""
    return "".join(
        kind_of(node)[0]
        for node in graph.nodes
        if kind_of(node) != "compute" or node.target is torch.ops.aten.mm.default
    )


def gradients(function):
    given = arguments()
    loss = function(*given)
    loss.backward()
    return [loss.detach(), *(value.grad for value in given)]


def test_forward_and_backward_overlap_and_stay_exact(group):
    """Between each start and its wait, but the last, stand products of the other nano-batch."""
    torch._dynamo.reset()
    graphs: list[fx.Graph] = []
    compiled = torch.compile(two_layers(group), backend=eager_backend(seen=graphs))

    found = gradients(compiled)

    for one, other in zip(found, gradients(two_layers(group)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    assert told(graphs[0]) == "ccsccswccswccsww"
    backward = told(graphs[1])
    starts = [place for place, letter in enumerate(backward) if letter == "s"]
    waits = [place for place, letter in enumerate(backward) if letter == "w"]
    hidden = ["c" in backward[a:b] for a, b in zip(starts, waits, strict=True)]
    assert len(hidden) == 4
    assert all(hidden)


def test_inductor_keeps_the_order(group):
    """The code that it writes starts, computes and waits as the schedule says."""
    torch._dynamo.reset()
    compiled = torch.compile(two_layers(group), options=inductor_options())
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: gradients(compiled))

    pattern = r"\b(all_reduce_?|wait_tensor|extern_kernels\.mm)(?:\.default)?\("
    letters = {"a": "s", "w": "w", "e": "c"}
    orders = ["".join(letters[name[0]] for name in re.findall(pattern, code)) for code in codes]
    assert orders[0] == "ccsccswccswccsww"
    assert orders[1].index("w") > orders[1].index("s", orders[1].index("s") + 1)


def test_what_writes_into_a_value_keeps_its_place():
    """A copy into a value comes after all that read it before, before all that read it later."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(collectives.all_reduce.default, (x, "sum", "0"))
    wait = graph.call_function(collectives.wait_tensor.default, (start,))
    before = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    write = graph.call_function(torch.ops.aten.copy_.default, (x, wait))
    after = graph.call_function(torch.ops.aten.mul.Tensor, (x, 3))
    graph.output((before, write, after))

    schedule_graph(graph)

    names = [node.name for node in graph.nodes]
    assert names.index(before.name) < names.index(write.name) < names.index(after.name)
    assert names.index(before.name) < names.index(wait.name)

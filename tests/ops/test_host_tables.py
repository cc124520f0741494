"""Which operators read tables of jobs on the host: what is declared is what their code does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import networkx as nx
import pytest
import torch

import tlora_fx.ops
from tests.ops.calls import calls
from tlora_fx.errors import TableNotOnDevice
from tlora_fx.ops import host_tables, tables

FOLDER = Path(tlora_fx.ops.__file__).parent
READS = "tlora_fx.ops.tables.check_table"
NEWER = """
import torch
from tlora_fx.ops import tables
from tlora_fx.ops.tables import check_rate

def bounds(x, segments):
    return tables.token_bounds(segments, len(x))

@torch.library.custom_op("tlora_fx::newer", mutates_args=())
def newer(x, segments):
    return x[: bounds(x, segments)[1]]

@torch.library.custom_op("tlora_fx::newest", mutates_args=())
def newest(x, segments):
    return x

def backward(ctx, grad):
    return torch.ops.tlora_fx.newer(grad, ctx.segments), None

newest.register_autograd(backward)

@torch.library.custom_op("tlora_fx::oldest", mutates_args=())
def oldest(x, rate):
    return x * check_rate(rate)

@oldest.register_fake
def fake(x, rate):
    return bounds(x, rate)
"""
DEFINED = re.compile(r"\"tlora_fx::([a-z0-9_]+)\"")


@pytest.fixture(scope="module")
def operators():
    """All that are registered, by torch's own list."""
    every = torch._C._dispatch_get_all_op_names()
    return frozenset(
        name.removeprefix("tlora_fx::") for name in every if name.startswith("tlora_fx::")
    )


#: What some operators are made of and differentiated by; no model's graph holds a call of them.
PARTS = frozenset(
    {
        "multi_lora_forward",
        "multi_lora_gated_forward",
        "multi_lora_input_gradient",
        "multi_lora_adapter_gradients",
        "multi_lora_add_forward",
        "multi_lora_add_input_gradient",
        "multi_lora_experts_forward",
        "multi_lora_experts_backward",
        "dora_norms",
        "dora_columns",
        "dora_columns_backward",
        "packed_attention_backward",
    }
)


@pytest.fixture(scope="module")
def graph(operators):
    return calls(FOLDER, operators)


def test_every_operator_that_can_come_to_a_table_is_declared(graph, operators):
    """Read from the source: an operator that begins to read tables fails here."""
    reading = {name for name in operators if nx.has_path(graph, f"::{name}", READS)}

    assert reading == host_tables.RULES.keys() | PARTS
    assert not host_tables.RULES.keys() & PARTS


def test_no_operator_is_overlooked(graph, operators):
    """Each has code behind it that the source shows; and some have nothing to do with tables."""
    written = {name for path in FOLDER.rglob("*.py") for name in DEFINED.findall(path.read_text())}

    assert written == operators
    assert all(graph.out_degree(f"::{name}") > 0 for name in operators)
    assert "tp_copy" not in host_tables.RULES


def test_an_operator_more_is_found(tmp_path, operators):
    """Through a function of its own, in another module than its backward."""
    folder = tmp_path / "ops"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "newer.py").write_text(NEWER)
    graph = calls(folder, operators | {"newer", "newest", "oldest"})

    assert nx.has_path(graph, "::newer", READS)
    assert nx.has_path(graph, "::newest", READS)
    assert not nx.has_path(graph, "::oldest", READS)


@pytest.mark.parametrize(
    "name", [name for name, rule in host_tables.RULES.items() if rule is host_tables._always]
)
def test_what_is_declared_to_read_always_refuses_to_be_captured(monkeypatch, name):
    """On whatever device: their one code is what would run on a GPU."""
    monkeypatch.setattr(tables, "_is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    segments = torch.tensor([0, 2, 5], dtype=torch.int32)
    x, rates = torch.zeros(5), torch.zeros(2, dtype=torch.float64)
    keys, index = torch.zeros(2, 2, dtype=torch.int64), torch.arange(5, dtype=torch.int32)
    given = {
        "segment_read": (x, segments, 0, 0),
        "segment_write": (x, x[:2], segments, 0, 0),
        "segment_switch": (x.view(1, 5, 1), x.view(1, 5, 1), index.view(1, 5), segments, 3),
        "embedding_noise": (
            x.view(1, 5, 1),
            [1.0, 0.0],
            segments,
            keys,
            index.view(1, 5),
            segments,
        ),
        "keyed_dropout": (x.view(5, 1), rates, segments, keys, index, torch.tensor(1), 1),
        "nano_tables": (segments, segments, 1, 0),
    }

    with pytest.raises(TableNotOnDevice, match="while a CUDA graph is captured"):
        getattr(torch.ops.tlora_fx, name)(*given[name])


def attention(dtype=torch.bfloat16, width=64, out=64, **fields):
    given = {"scale": 1.0, "causal": True, "window": -1, "softcap": 0.0, "dropout": 0.0}
    q, v = torch.empty(8, 4, width, dtype=dtype), torch.empty(8, 2, out, dtype=dtype)
    return {"q": q, "v": v, "sinks": None} | given | fields


@pytest.mark.parametrize(
    ("given", "reads"),
    [
        (attention(), False),
        (attention(window=4), False),
        (attention(width=256, out=256), False),
        (attention(width=264, out=264), True),
        (attention(width=60, out=60), True),
        (attention(out=32), True),
        (attention(torch.float32), True),
        (attention(dropout=0.1), True),
        (attention(softcap=50.0), True),
        (attention(sinks=torch.zeros(4)), True),
    ],
)
def test_attention_reads_tables_where_no_kernel_does_whole_rows(given, reads):
    """Sequence by sequence then, whose bounds the host has to know."""
    assert host_tables.reads_on_host("packed_attention", given) is reads


def adapters(x=torch.bfloat16, a=torch.float32, compute=torch.bfloat16, inner=32, outer=48):
    table = torch.zeros(3, dtype=torch.int32)
    return {
        "x": torch.empty(1, 5, inner, dtype=x),
        "weight": torch.empty(outer, inner, dtype=x),
        "bias": None,
        "a": torch.empty(8, inner, dtype=a),
        "b": torch.empty(8, outer, dtype=a),
        "compute_dtype": compute,
        "max_rank": 4,
        "drops": True,
    } | dict.fromkeys(
        ("ranks", "scales", "rates", "segments", "keys", "token_index", "site"), table
    )


@pytest.mark.parametrize(
    ("given", "reads"),
    [
        (adapters(), False),
        (adapters(a=torch.bfloat16), False),
        (adapters(compute=torch.float32), True),
        (adapters(torch.float32, compute=torch.float32), True),
        (adapters(inner=40), True),
        (adapters(outer=53), True),
    ],
)
def test_adapters_read_tables_where_no_kernel_serves_them(monkeypatch, given, reads):
    """Job by job then; nobody's machine, and no Triton, is asked."""
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    monkeypatch.setattr(host_tables.support, "has_triton", lambda: False)
    several = {
        f"{name}s" if name in ("weight", "site") else name: [value]
        if name in ("weight", "a", "b", "ranks", "scales", "rates", "site")
        else value
        for name, value in given.items()
    }

    assert host_tables.reads_on_host("multi_lora_linear", given) is reads
    assert host_tables.reads_on_host("multi_lora_linears", several) is reads
    without = {name: value for name, value in given.items() if name not in ("weight", "bias")}
    assert host_tables.reads_on_host("multi_lora_add", without | {"y": given["x"]}) is reads
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    assert host_tables.reads_on_host("multi_lora_linear", given)


def test_sums_of_losses_read_none():
    """And an operator of nobody's that is asked for does not either."""
    assert not host_tables.reads_on_host("segment_sum", {})
    assert not host_tables.reads_on_host("tp_reduce", {})

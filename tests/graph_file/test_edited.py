"""Texts of graphs that were edited are verified when they are read; those that were not are not."""

from __future__ import annotations

import re
from random import Random

import pytest

from tests.models import base_of, job
from tests.sampled import sampled
from tlora_fx.compiler import run_passes
from tlora_fx.errors import GraphFileNotReadable
from tlora_fx.graph_file import graph_text, graphs_of_text, parser
from tlora_fx.ir.verifier import fingerprint

TYPES = ("f32", "f64", "i64", "i32", "b8", "bf16")
OTHER = ("aten.mul.Tensor", "aten.add.Tensor", "aten.sin.default", "aten.cos.out")


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The text of two jobs' graphs, lowered."""
    base = base_of(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=2)
    jobs = [job("a", base, r=4, target_modules=["q_proj"]), job("b", base, r=2)]
    return graph_text(run_passes(jobs))


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The same of jobs before they are fused."""
    base = base_of(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=2)
    jobs = [job("a", base, r=4, target_modules=["q_proj"]), job("b", base, r=2)]
    return graph_text(run_passes(jobs, stop_after="check-token-parallel"))


def refusal(text):
    """What is said of a text."""
    with pytest.raises(GraphFileNotReadable) as error:
        graphs_of_text(text)
    return str(error.value)


def edited(text, old, new):
    """The text with the first of these replaced, without its fingerprint; and the line's number."""
    lines = text.splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if re.search(old, line))
    lines[place] = re.sub(old, new, lines[place], count=1)
    return "".join(line for line in lines if not line.startswith("fingerprint")), place


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"aten\.embedding\.default", "aten.embedding.out", "does not take the values"),
        (r"(embed_tokens: )f64", r"\1f32", "another type of a value"),
        (r"(embed_tokens: f64\[1, s\d+, )\d+", r"\g<1>7", "another type of a value"),
        (r"aten\.cos\.default", "aten.nosuch.default", "aten.nosuch.default"),
        (r"= aten\.cos\.default\((\w+)\)", r"= aten.cat.default(\1)", "does not take the values"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_stands(fused, old, new, said):
    """An overload, a type, a size, an operator that nobody has, an argument."""
    text, line = edited(fused, old, new)
    message = refusal(text)

    assert said in message
    assert re.search(rf"line +{line}\n", message), message
    assert re.search(r"column +\d", message)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"embed_tokens", "embed\0tokens", "null bytes"),
        (r"^fingerprint.*", 'fingerprint("0", "0")', "another fingerprint"),
        (r"^graphs\(\d", "graphs(99", "another format"),
        (r"^o\[", "q[", "says what no graph file says"),
        (r'@ shared\("[^"]+"', "@ shared(nan", "says what no graph file says"),
    ],
)
def test_damage_outside_of_operators_has_a_line_and_a_column(fused, old, new, said):
    """A byte, a fingerprint, the format, an origin, a tag."""
    lines = fused.splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if re.search(old, line))
    lines[place] = re.sub(old, new, lines[place], count=1)

    message = refusal("".join(lines))

    assert said in message
    assert re.search(rf"line +{place + 1}\n", message), message
    assert re.search(r"column +\d", message)


def test_a_tensor_stored_where_another_is_gets_refused(fused):
    """Both would be one in the model."""
    free, _ = edited(fused, "^fingerprint", "fingerprint")
    jobs, base, group = free.rpartition('base("mlp.up_proj.weight"')
    message = refusal(f'{jobs}base("mlp.gate_proj.weight", name="mlp.up_proj.weight"{group}')

    assert base
    assert "two tensors at one path" in message
    assert re.search(rf"line +{jobs.count(chr(10)) + 1}\n", message), message


def test_a_type_is_verified_where_the_fingerprint_stands(fused):
    """It holds no types: what is behind them does."""
    text = fused.replace("embed_tokens: f64", "embed_tokens: f32", 1)

    assert "another type of a value" in refusal(text)


def test_a_branch_that_leads_nowhere_is_refused(stages):
    """The job's lines say that it has a site there."""
    reads = r"(= aten\.add\.Tensor\(\w+), q_proj_mul\)"
    assert re.search(reads, stages), "the branch is added to what the linear gives"
    text, _ = edited(stages, reads, r"\1, 0.0)")

    message = refusal(text)

    assert "lacks adapters of a job" in message
    assert "q_proj" in message


def test_what_was_written_is_read_without_running_operators(fused, monkeypatch):
    """Neither is the fingerprint computed again."""
    monkeypatch.setattr(parser, "verify_values", None)
    monkeypatch.setattr(parser, "fingerprint", None)

    assert graph_text(graphs_of_text(fused)) == fused


@pytest.mark.parametrize("seed", sampled(range(200), 50))
def test_a_random_edit_is_refused_in_place_or_changes_what_may_change(fused, seed):
    """No other error, and nothing that does not hold together."""
    random = Random(seed)
    lines = [line for line in fused.splitlines() if not line.startswith("fingerprint")]
    nodes = [number for number, line in enumerate(lines) if line.startswith("  ") and " = " in line]
    place = random.choice(nodes)
    line = lines[place]
    lines[place] = random.choice([
        lambda: re.sub(r"\b(f32|f64|i64|i32)\b", random.choice(TYPES), line, count=1),
        lambda: re.sub(r"= [a-z_]+\.\w+\.\w+", "= " + random.choice(OTHER), line, count=1),
        lambda: re.sub(r"\d+", str(random.randrange(100)), line, count=1),
        lambda: re.sub(r"@ \w+\(", "@ " + random.choice(parser.ROLES) + "(", line),
        lambda: re.sub(r"\((\w+),", r"(nobody,", line, count=1),
        lambda: "",
    ])()  # fmt: skip
    text = "\n".join(lines) + "\n"

    graphs, refused = None, None
    try:
        graphs = graphs_of_text(text)
    except GraphFileNotReadable as error:
        refused = error

    if graphs is None:
        assert refused.facts.get("line") or "lacks adapters" in refused.what, refused
    else:
        assert fingerprint(graphs_of_text(graph_text(graphs))) == fingerprint(graphs)

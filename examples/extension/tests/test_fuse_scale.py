"""`fuse-scale`: what it rewrites, what it leaves alone, and that numbers stay."""

import tlora_fx
from tlora_fx.compiler import resolve_pipeline
from tlora_fx.inspect.listing import make_listing
from tlora_fx.inspect.text import render_text
from tlora_fx.testing import around, assert_equivalent

ADDED = "fuse-scale@after:fuse-backbone"


def products(group, job):
    """How the products of a job's branches read: "mul(B, 4.0)" or "mul(result, 4.0)"."""
    return {
        ("B" if node.args[0].op == "get_attr" else "result", node.args[1])
        for graph in group.graphs()
        for node in graph.nodes
        if "mul" in str(node.target) and node.meta.get("jobs") == (job,)
    }


def test_numbers_stay(jobs):
    """Losses and gradients are the same, up to rounding."""
    before, after = around(jobs, ADDED)

    assert_equivalent(before, after)


def test_the_scale_moves_into_b(jobs):
    """A scale of 1 stays where it is: there is nothing to fuse."""
    before, after = around(jobs, ADDED)

    assert products(before, "scaled") == {("result", 4.0)}
    assert products(after, "scaled") == {("B", 4.0)}
    assert products(after, "plain") == {("result", 1.0)}


def test_it_compiles_and_says_what_is_not_lowered(jobs, golden):
    """The rewritten branch runs as it is; the listing names the reason."""
    model = tlora_fx.compile(jobs, resolve_pipeline(None, [ADDED]))
    text = render_text(make_listing(model))

    golden("fuse-scale.txt", text.replace(str(jobs[0].base.config), "BASE"))

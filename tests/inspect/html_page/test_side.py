"""The HTML page in a browser: the selected node, its code, the drawing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.inspect.pages import stages
from tlora_fx.inspect.schema import PassStage


def test_a_click_shows_the_node(opened):
    """Arguments, users, shape, FLOPs, source line and provenance."""
    found = opened()
    found.open_all()

    found.row("l0_q_linear").click()

    panel = found.page.text_content("#node-panel")
    for told in (
        "multi_lora_linear(x, l0_q_weight)", "[1, T, 64] bfloat16", "8.45 k a token",
        "modeling.py:12", "Reads 2", "Read by 1", "made by lower-adapters",
        "group/branch_0 made by fuse-backbone", "base/l0_q_linear made by trace",
    ):  # fmt: skip
        assert told in panel


def test_an_argument_leads_to_its_node(opened):
    """The names under "Reads" are links."""
    found = opened()
    found.open_all()
    found.row("l0_q_linear").click()

    found.page.locator("#node-panel .links").first.get_by_text("l0_q_weight").click()

    assert found.page.text_content("#node-panel h3") == "l0_q_weight"


def test_provenance_leads_to_the_pass_that_still_had_the_node(opened):
    """A node that is gone is shown where it was last."""
    found = opened()
    found.open_all()
    found.row("l0_q_linear").click()

    found.page.locator(".origins").get_by_text("group/branch_1").click()

    assert found.page.text_content("#stage-name") == "1  fuse-backbone"
    assert found.page.text_content("#node-panel h3") == "branch_1"


def test_the_code_marks_the_line_of_the_selected_node(opened):
    """The whole code of its graph, a line a node."""
    found = opened()
    found.open_all()
    found.row("l0_add").click()

    found.page.click("#code-tab")

    own = found.page.locator(".line[aria-current=true]")
    assert own.all_text_contents() == ["l0_add = add(l0_odd, x)  # [1, T, 64]"]
    assert found.page.locator(".line").count() == 3


def test_a_line_of_code_leads_to_its_node(opened):
    """Code and tree select each other."""
    found = opened()
    found.page.click("#code-tab")

    found.page.locator(".line", has_text="l0_odd =").click()

    assert found.page.locator("[aria-selected=true] .label").text_content() == "l0_odd"


def test_the_block_of_the_selected_row_is_drawn(opened):
    """Modules are boxes, data flows downwards, weights are left out."""
    found = opened()
    found.row("layers.0-3 ×4").click()
    boxes = found.page.locator("#canvas .box")

    assert boxes.locator(".title").all_text_contents() == ["x", "attn", "add", "block_output"]
    assert found.page.locator("#canvas .edge").count() == 4
    tops = boxes.evaluate_all("boxes => boxes.map(box => box.getBoundingClientRect().top)")
    assert tops == sorted(tops)


def test_a_double_click_opens_a_box(opened):
    """And the arrow beside the title leads back."""
    found = opened()
    found.row("layers.0-3 ×4").click()

    found.page.locator("#canvas .box.folder").dblclick()
    assert found.page.text_content("#draw-title") == "model › layers.0-3 ×4 › attn"

    found.page.click("#draw-up")
    assert found.page.text_content("#draw-title") == "model › layers.0-3 ×4"


def test_a_box_selects_its_row(opened):
    """Without losing the drawing."""
    found = opened()
    found.row("layers.0-3 ×4").click()

    found.page.locator("#canvas .box", has_text="add").click()

    assert found.page.text_content("#node-panel h3") == "l0_add"
    assert found.page.text_content("#draw-title") == "model › layers.0-3 ×4"
    assert found.page.locator("#canvas .box.selected .title").text_content() == "add"


def test_every_node_can_be_drawn(opened):
    """With modules dissolved, and weights where they are wanted."""
    found = opened()

    found.page.check("#draw-flat")
    assert found.page.locator("#canvas .box").count() == 5

    found.page.check("#draw-extras")
    assert found.page.locator("#canvas .box").count() == 6


def test_the_page_opens_on_all_jobs_with_their_ranks(opened):
    """A box a module from the top, and a branch with its rank where a job has an adapter."""
    found = opened(ranked({"math-r16": "8–16", "chat-r4": "4"}))
    canvas = found.page.locator("#canvas")

    titles = canvas.locator(".box .title").all_text_contents()
    assert titles == ["layers.0-3 ×4", "attn.q_proj"]
    assert canvas.locator(".rank text").all_text_contents() == ["8–16", "4"]
    assert canvas.locator(".job").all_text_contents() == ["math-r16", "chat-r4"]
    assert canvas.locator(".mark").all_text_contents() == ["◆", "▲"]
    legend = found.page.locator("#legend li").all_inner_texts()
    assert legend == ["■ all jobs: the base", "◆ math-r16", "▲ chat-r4"]


def test_a_click_in_the_picture_of_all_jobs_leads_to_the_module(opened):
    """The picture stays; a double click draws the module, and the button leads back."""
    found = opened(ranked({"math-r16": "8–16", "chat-r4": "4"}))
    box = found.page.locator("#canvas .box", has_text="attn.q_proj")

    box.click()
    assert found.page.locator("[aria-selected=true] .label").text_content() == "q_proj"
    assert "math-r16 8–16, chat-r4 4" in found.page.text_content("#node-panel")
    assert box.get_attribute("class").split()[-1] == "selected"

    box.dblclick()
    assert found.page.text_content("#draw-title") == "model › layers.0-3 ×4 › attn › q_proj"

    found.page.click("#draw-jobs")
    assert box.count() == 1


@pytest.mark.parametrize("count", [8, 32])
def test_many_jobs_have_a_column_each(opened, count):
    """In sight all at once, in the colours of the legend."""
    jobs = [f"job-{number}" for number in range(count)]
    found = opened(ranked(dict.fromkeys(jobs, "128")))
    ranks = found.page.locator("#canvas .rank")

    assert ranks.count() == count
    canvas, last = found.page.locator("#canvas").bounding_box(), ranks.last.bounding_box()
    assert last["x"] + last["width"] <= canvas["x"] + canvas["width"]
    widths = ranks.evaluate_all("all => all.map(r => r.getBBox().x)")
    assert widths == sorted(set(widths))
    strokes = ranks.locator("rect").evaluate_all(
        "all => [...new Set(all.map(r => getComputedStyle(r).stroke))]"
    )
    chips = found.page.locator("#legend .chip").evaluate_all(
        "all => all.map(c => getComputedStyle(c).backgroundColor)"
    )
    assert set(strokes) == set(chips[1:])


def test_modules_are_called_by_what_they_do(opened, recorded):
    """Not by an operator in them, which of a norm is a power."""
    found = opened(recorded)
    found.row("layers.0-1 ×2").locator(".twisty").click()

    roles = {
        name: found.row(name).locator(".operator").text_content()
        for name in ("rotary_emb", "layers.0-1 ×2", "self_attn", "input_layernorm", "mlp", "norm")
    }
    assert roles == {
        "rotary_emb": "rotary embedding", "layers.0-1 ×2": "decoder layer", "norm": "RMSNorm",
        "self_attn": "attention", "input_layernorm": "RMSNorm", "mlp": "MLP",
    }  # fmt: skip


def test_a_long_line_of_code_scrolls_inside_its_pane(opened):
    """The pane is as wide as before, and the line is whole."""
    first, *_, last = stages()
    long = "l0_add = add(" + ", ".join(["l0_odd"] * 80) + ")"
    graphs = [
        replace(g, nodes=[replace(n, code=long) if n.id == "l0_add" else n for n in g.nodes])
        for g in last.program.graphs
    ]
    found = opened([first, replace(last, program=replace(last.program, graphs=graphs))])
    found.page.click("#code-tab")

    panel = found.page.locator("#code-panel")
    before = panel.bounding_box()
    assert panel.evaluate("panel => panel.scrollWidth > 2 * panel.clientWidth")
    panel.evaluate("panel => { panel.scrollLeft = 9999; }")
    assert panel.evaluate("panel => panel.scrollLeft") > 0
    assert panel.bounding_box() == before


def ranked(ranks: dict[str, str]) -> list[PassStage]:
    """The last stage for these jobs, with their ranks at the one adapted module."""
    last = stages(tuple(ranks))[-1]
    numbers = [[int(end) for end in rank.split("–")] for rank in ranks.values()]
    graphs = [
        replace(g, nodes=[replace(n, ranks=numbers) if n.site else n for n in g.nodes])
        for g in last.program.graphs
    ]
    return [replace(last, place=0, program=replace(last.program, graphs=graphs))]

"""The HTML page in a browser: the selected node, its code, the drawing."""

from __future__ import annotations


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
    boxes = found.page.locator("#canvas .box")

    assert boxes.locator(".title").all_text_contents() == ["x", "attn", "add", "block_output"]
    assert found.page.locator("#canvas .edge").count() == 4
    tops = boxes.evaluate_all("boxes => boxes.map(box => box.getBoundingClientRect().top)")
    assert tops == sorted(tops)


def test_a_double_click_opens_a_box(opened):
    """And the arrow beside the title leads back."""
    found = opened()

    found.page.locator("#canvas .box.folder").dblclick()
    assert found.page.text_content("#draw-title") == "model › layers.0-3 ×4 › attn"

    found.page.click("#draw-up")
    assert found.page.text_content("#draw-title") == "model › layers.0-3 ×4"


def test_a_box_selects_its_row(opened):
    """Without losing the drawing."""
    found = opened()

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

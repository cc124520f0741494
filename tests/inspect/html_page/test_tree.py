"""The HTML page in a browser: passes, tree, search, bars, colours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.inspect.pages import stages
from tlora_fx.inspect.schema import PassStage

EVIL = "<img src=x onerror=document.title='run'>"
TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def test_every_pass_of_a_compilation_can_be_looked_at(opened, recorded):
    """Real graphs, each beside the one before, tree and drawing and code: nothing goes wrong."""
    found = opened(recorded)
    page = found.page
    page.select_option("#compare", "previous")
    page.check("#draw-flat")
    page.click("#code-tab")

    for index, stage in enumerate(recorded):
        page.locator("#slider").fill(str(index))
        assert page.text_content("#stage-name") == f"{stage.place}  {stage.text}"
        page.fill("#search", "q_proj linear")
        page.press("#search", "Enter")
        assert page.locator("#canvas .box").count()
        assert page.locator(".line").count()
        page.press("#search", "Escape")

    assert found.console == []


def test_folded_layers_and_adapters_of_a_compilation_are_shown(opened, recorded):
    """Two equal layers are one row, and both jobs have something of their own in it."""
    found = opened(recorded)

    row = found.row("layers.0-1 ×2")
    assert row.locator(".chip").all_text_contents() == ["◆", "▲"]


def test_the_page_opens_at_the_last_pass_with_layers_folded(opened):
    """Equal layers are one row, and the model is open down to them."""
    found = opened()

    assert found.labels() == ["inputs and output", "model", "embed", "layers.0-3 ×4"]
    assert found.page.text_content("#stage-name") == "3  idle"


def test_using_all_of_it_leaves_the_console_empty_and_asks_for_no_file(opened):
    """No error, no warning, and no request but the page itself."""
    found = opened()
    page = found.page

    for _ in stages():
        for colour in ("job", "stage", "cost", "role"):
            page.select_option("#colour", colour)
        page.select_option("#compare", "previous")
        found.open_all()
        page.click("#code-tab")
        page.check("#draw-flat")
        page.check("#draw-extras")
        page.fill("#search", "q_proj")
        page.press("#search", "Enter")
        page.press("#search", "Escape")
        page.click("#node-tab")
        page.press("body", "[")

    assert found.console == []
    assert found.requests == [page.url]


def test_a_name_of_a_job_stays_text(opened):
    """A job called like an image with a handler is shown as it is called, everywhere."""
    found = opened(stages((EVIL, "other")))
    page = found.page
    page.select_option("#colour", "job")
    page.select_option("#compare", "0")
    found.open_all()
    page.fill("#search", "<img")

    assert page.locator("img").count() == 0
    assert page.title() == "a page"
    assert EVIL in page.text_content("#legend")


def test_the_slider_walks_through_the_passes(opened):
    """Each place of the slider shows the graphs after that pass."""
    found = opened()

    found.page.locator("#slider").fill("0")

    assert found.page.text_content("#stage-name") == "0  trace"
    assert found.page.get_attribute("#slider", "aria-valuetext") == "0  trace"
    assert "job math-r16" in found.labels()


def test_a_selected_node_stays_selected_along_the_passes(opened):
    """At an earlier pass, the first of what the node was made of takes its place."""
    found = opened()
    found.open_all()
    found.row("l0_q_linear").click()

    found.page.press("body", "[")
    found.page.press("body", "[")

    picked = found.page.locator("[aria-selected=true] .label")
    assert picked.text_content() == "branch_0"


def test_search_filters_the_tree_and_marks_what_it_found(opened):
    """All words must be found; the rows above stay to say where."""
    found = opened()

    found.page.fill("#search", "multi q_proj")

    labels = found.labels()
    assert labels == ["model", "layers.0-3 ×4", "attn", "q_proj", "l0_q_linear"]
    assert found.page.text_content("#found") == "1 found"
    assert "1 row found" in found.page.text_content("#status")


def test_enter_goes_to_what_was_found(opened):
    """From the search field to the details of the next hit."""
    found = opened()
    found.page.press("body", "/")
    found.page.keyboard.type("multi_lora")

    found.page.keyboard.press("Enter")

    assert found.page.text_content("#node-panel h3") == "l0_q_linear"


def test_a_search_without_a_hit_says_so(opened):
    """An empty tree is explained."""
    found = opened()

    found.page.fill("#search", "nowhere")

    assert found.page.locator("#empty").is_visible()


def test_unknown_flops_are_a_question_mark(opened):
    """Not a nought: and whatever holds such an operator says so too."""
    found = opened()
    found.open_all()

    assert found.row("l0_odd").locator(".cost").text_content() == "?"
    assert found.row("model").locator(".cost").text_content().endswith("?")


def test_before_and_after_stand_side_by_side(opened):
    """One row for the same thing; what is new, gone or changed is marked without colour."""
    found = opened()
    found.page.select_option("#compare", "previous")
    found.page.locator("#slider").fill("2")
    found.open_all()

    multi, branch = found.page.locator(".row.new").last, found.page.locator(".row.gone").first
    assert found.page.text_content("#before-name") == "before: 1  fuse-backbone"
    assert multi.locator(".side").count() == 2
    assert multi.locator(".side.empty").count() == 1
    assert multi.locator(".change").text_content() == "+"
    assert branch.locator(".change").text_content() == "−"
    assert branch.get_attribute("aria-label").endswith("gone")
    assert found.page.text_content("#status").startswith("After lower-adapters{compute=float32}: ")


def test_before_the_fusion_the_base_stands_beside_the_group(opened):
    """Layers that a pass folded stand in the row of the first of them."""
    found = opened()
    found.page.select_option("#compare", "previous")
    found.page.locator("#slider").fill("1")
    found.open_all()

    found.page.press("#tree", "Home")
    sides = found.page.locator(".row", has_text="0-3 ×4").locator(".side .label")
    assert sides.all_text_contents() == ["0", "0-3 ×4"]


def test_another_name_is_no_change(opened):
    """Passes number names anew; a node with the same key that computes the same is the same."""
    *earlier, last = stages()
    root, block = last.program.graphs
    nodes = [
        replace(
            entry,
            id=entry.id.replace("odd", "odd_7"),
            inputs=[name.replace("odd", "odd_7") for name in entry.inputs],
            code=entry.code.replace("odd", "odd_7"),
        )
        for entry in block.nodes
    ]
    program = replace(last.program, graphs=[root, replace(block, nodes=nodes)])
    found = opened([*earlier, replace(last, program=program)])

    found.page.select_option("#compare", "previous")

    assert found.page.text_content("#status") == "After idle: 0 new, 0 gone, 0 changed"


def test_both_sides_scroll_as_one(opened):
    """However far: the two sides of a row stay on one line."""
    found = opened(stages([f"job-{number}" for number in range(40)]))
    found.page.select_option("#compare", "0")
    found.page.locator("#slider").fill("1")
    found.open_all()
    found.page.locator("#tree").evaluate("tree => { tree.scrollTop = tree.scrollHeight / 2; }")
    found.page.evaluate(TWO_FRAMES)

    tops = found.page.locator(".row").evaluate_all(
        "rows => rows.map(row => [...row.children].map(side => side.getBoundingClientRect().top))"
    )
    assert found.page.locator(".row").first.evaluate("row => row.offsetTop") > 100
    assert all(left == right for left, right in tops)


def test_rows_out_of_sight_have_no_elements(opened):
    """A tree of thousands of rows costs no more than one that fills the window."""
    found = opened(stages([f"job-{number}" for number in range(300)]))
    found.page.locator("#slider").fill("0")

    found.page.press("#tree", "End")

    assert found.page.locator("#tree .rows").evaluate("rows => rows.clientHeight") > 300 * 20
    assert found.page.locator("[role=treeitem]").count() < 120
    assert found.active().get_attribute("aria-label").startswith("job job-299")


def test_each_layer_has_a_bar(opened):
    """As high as it is dear, with its cost in its name; a click selects its row."""
    found = opened()
    bars = found.page.locator("#bars-after button.layer")

    assert bars.count() == 4
    assert bars.nth(3).get_attribute("aria-label") == "model.layers.3: 8.51 k FLOP/token, 25 %"
    bars.nth(3).click()
    assert found.page.text_content("#node-panel h3") == "layers.0-3 ×4"


def test_the_cost_of_attention_grows_with_the_sequence(opened):
    """FLOPs per token of the sequence are multiplied with its length."""
    given = stages()
    last = given[-1]
    root, block = last.program.graphs
    nodes = [replace(n, flop_per_length=10.0) if n.id == "l0_add" else n for n in block.nodes]
    program = replace(last.program, graphs=[root, replace(block, nodes=nodes)])
    found = opened([*given[:-1], replace(last, program=program)])
    found.open_all()

    found.page.fill("#length", "2000")
    found.page.press("#length", "Tab")

    assert found.row("l0_add").locator(".cost").text_content() == "20.1 k"


@pytest.mark.parametrize(
    ("mode", "mark"),
    [
        ("role", "◆ adapter"),
        ("job", "▲ chat-r4"),
        ("stage", "2 lower-adapters"),
        ("cost", "4 up to the largest"),
    ],
)
def test_colours_are_explained(opened, mode, mark):
    """Every way to colour has a legend of marks and names."""
    found = opened()

    found.page.select_option("#colour", mode)

    assert mark in found.page.locator("#legend li").all_inner_texts()


@pytest.mark.parametrize("mode", ["role", "job", "stage", "cost"])
def test_no_two_categories_look_alike(opened, mode):
    """Neither by mark nor by colour, as long as there are colours."""
    found = opened()
    found.page.select_option("#colour", mode)
    chips = found.page.locator("#legend .chip")

    marks = chips.all_text_contents()
    colours = chips.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(marks) > 1
    assert len(set(marks)) == len(set(colours)) == len(marks)


def test_a_compiled_model_alone_says_how_to_see_the_passes(opened):
    """A dump without states has one stage, which no pass is told of."""
    last = stages()[-1]
    alone = PassStage(0, "compiled", False, 0.0, replace(last.program, state="compiled"))
    found = opened([alone])

    assert "the compiled model alone" in found.page.text_content("#stage-facts")
    assert "--states" in found.page.text_content("#stage-facts")
    assert "traced" not in found.page.text_content("#stage-facts")


def test_rows_are_coloured_by_job(opened):
    """The swatch of an operator that serves two jobs has the colours of both."""
    found = opened()
    found.open_all()

    found.page.select_option("#colour", "job")

    stripes = (
        found.row("l0_q_linear")
        .locator(".swatch")
        .evaluate("swatch => swatch.style.getPropertyValue('--stripes')")
    )
    assert "--job-0" in stripes
    assert "--job-1" in stripes

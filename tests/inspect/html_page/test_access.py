"""The HTML page in a browser: keyboard, screen readers, contrast, zoom."""

from __future__ import annotations

import pytest


def test_slash_focuses_the_search(opened):
    """And is not typed into it."""
    found = opened()

    found.page.press("body", "/")

    assert found.page.evaluate("document.activeElement.id") == "search"
    assert found.page.input_value("#search") == ""


def test_keys_of_one_letter_can_be_turned_off(opened):
    """For those who speak to their computer."""
    found = opened()
    found.page.press("body", "?")
    found.page.uncheck("#shortcuts")
    found.page.press("#shortcuts", "Escape")

    found.page.press("body", "[")

    assert found.page.text_content("#stage-name") == "3  idle"


def test_the_tree_works_by_keyboard(opened):
    """Arrows move, open and close; Enter selects."""
    found = opened()
    found.page.focus("#tree")
    tree = found.page.locator("#tree")
    tree.press("Home")
    tree.press("ArrowDown")
    assert found.active().get_attribute("aria-label").startswith("model")

    tree.press("ArrowLeft")
    assert found.active().get_attribute("aria-expanded") == "false"

    tree.press("ArrowRight")
    tree.press("ArrowRight")
    tree.press("Enter")
    assert found.page.text_content("#node-panel h3") == "embed"


def test_rows_say_to_screen_readers_what_they_show(opened):
    """Level, place among its siblings, and a name with operator, shape and cost."""
    found = opened()
    found.open_all()
    row = found.row("l0_q_linear")

    told = {
        name: row.get_attribute(name) for name in ("aria-level", "aria-posinset", "aria-setsize")
    }
    assert told == {"aria-level": "5", "aria-posinset": "2", "aria-setsize": "2"}
    assert row.get_attribute("aria-label") == (
        "l0_q_linear, multi_lora_linear, [1, T, 64], 8.45 k FLOP/token, math-r16, chat-r4"
    )


def test_controls_have_names_and_parts_have_landmarks(opened):
    """What assistive technology lists."""
    page = opened().page

    for role, name in (
        ("slider", "Pass"), ("combobox", "Beside it"), ("combobox", "Colour"), ("combobox", "Cost"),
        ("searchbox", "Search"), ("tree", "Modules and nodes"), ("tab", "Code"), ("button", "Help"),
        ("complementary", "The selected row"), ("region", "What is shown"),
    ):  # fmt: skip
        assert page.get_by_role(role, name=name, exact=True).count() == 1, (role, name)
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("banner").count() == 1


def test_every_focus_stop_has_a_name(opened):
    """Nothing that the tab key reaches is silent."""
    page = opened().page
    unnamed = page.locator("button, input, select, [tabindex='0']").evaluate_all(
        "all => all.filter(e => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() ||"
        " e.labels?.length || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML)"
    )

    assert unnamed == []


def test_the_drawing_works_by_keyboard(opened):
    """Arrows follow the data, Enter opens a module."""
    found = opened()
    page = found.page
    found.row("layers.0-3 ×4").click()
    page.focus("#canvas .box[tabindex='0']")

    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.querySelector('.title').textContent") == "attn"

    page.keyboard.press("Enter")
    assert page.text_content("#draw-title") == "model › layers.0-3 ×4 › attn"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(opened, scheme):
    """Contrast of at least 4.5 in both schemes, for text and for marks on colours."""
    found = opened(color_scheme=scheme)
    found.page.select_option("#compare", "previous")
    found.page.select_option("#colour", "job")
    found.open_all()

    assert found.page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("size", [(1400, 900), (800, 600), (700, 450), (360, 640)])
def test_nothing_is_cut_off_sideways(opened, size):
    """From a wide window to 200 % zoom and a telephone, the page never scrolls sideways."""
    found = opened(size={"width": size[0], "height": size[1]})
    found.page.select_option("#compare", "previous")

    page = found.page.locator("html")
    assert page.evaluate("html => html.scrollWidth <= html.clientWidth")
    assert found.page.locator("#tree").bounding_box()["height"] >= 120


# Texts whose colour is too close to the first opaque background below them.
CONTRAST = """() => {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgba(colour).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const faint = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility() || element.matches(":disabled, option")) continue;
    const style = getComputedStyle(element);
    const front = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(front), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.add(`${element.className} ${text} ${front}`);
  }
  return [...faint];
}"""

/** The code of the graph that the selected row lies in, a line a node. */
const CodeView = (() => {
  const { el } = Dom;
  const MOST = 3000;

  /** item: what is selected; keys: of its nodes, which are marked. */
  function show(box, item, context) {
    if (!item) {
      box.replaceChildren(el("p", { class: "quiet" }, "Select a row to see its code."));
      return;
    }
    const graph = item.kind === "layers" ? item.block : item.graph;
    const own = new Set(item.kind === "layers" ? [] : Items.nodesOf(item).map((node) => node.key));
    const told = graph.nodes.filter((node) => node.code);
    const lines = told.slice(0, MOST).map((node) => line(node, own.has(node.key), context));
    const first = lines.find((each) => each.classList.contains("own")) || lines[0];
    first?.setAttribute("tabindex", 0);
    const focused = box.contains(document.activeElement);
    const where = graph.layers.length ? `${graph.name}: ${graph.label}` : `the ${graph.owner}'s graph`;
    const rest = told.length - lines.length;
    box.replaceChildren(el("p", { class: "quiet" }, where), el("div", { class: "code" }, lines),
      rest > 0 ? el("p", { class: "quiet" }, `and ${Words.plural(rest, "line")} more`) : "");
    // Scrolls this box alone; scrollIntoView would move the page too.
    if (focused) first?.focus({ preventScroll: true });
    if (first) box.scrollTop = Math.max(0, first.offsetTop - box.clientHeight / 3);
  }

  function line(node, own, { rowOfKey, select }) {
    const row = rowOfKey(node.key);
    const stripe = Colours.partsOf(node)[0];
    const shape = node.shape && !node.code.includes("  # ") ? `  # ${node.shape}` : "";
    return el("button", {
      type: "button", tabindex: -1, class: own ? "line own" : "line",
      "aria-current": own ? "true" : undefined, disabled: !row,
      vars: { "--stripes": `var(--${stripe.colour})` }, onclick: () => row && select(row),
    }, el("span", {}, node.code), shape ? el("span", { class: "aside" }, shape) : "");
  }

  return { show };
})();

/** One bar a layer, as high as the layer is dear, striped by what the colours show. */
const LayerBars = (() => {
  /** The steps of a graph in order: modules, and layers one by one. */
  function stepsOf(rows, side) {
    const steps = [];
    for (const row of rows) {
      const item = side ? row.right : row.left;
      if (!item || item.label === Items.BOUNDARY) continue;
      if (item.kind === "layers") {
        for (const path of item.block.layers) steps.push({ row, item, name: path, layer: true });
      } else if (holdsLayers(row, side)) {
        steps.push(...stepsOf(row.children, side));
      } else if (Costs.of(item)) {
        const layer = isLayer(item);
        steps.push({ row, item, name: item.path || item.label, layer });
      }
    }
    return inOrder(steps);
  }

  /** Whether there are layers below a row that is none itself. */
  function holdsLayers(row, side) {
    const item = side ? row.right : row.left;
    if (!item || item.kind === "node" || isLayer(item)) return false;
    return row.children.some((child) => {
      const own = side ? child.right : child.left;
      return (own && isLayer(own)) || holdsLayers(child, side);
    });
  }

  const isLayer = (item) => item.kind === "layers" || (item.kind === "module" && /^\d+$/.test(item.label));

  /** Layers of interleaved structures in the order of their numbers. */
  function inOrder(steps) {
    const layers = steps.filter((step) => step.layer).sort((a, b) => numberOf(a) - numberOf(b));
    let next = 0;
    return steps.map((step) => (step.layer ? layers[next++] : step));
  }

  const numberOf = (step) => Number(step.name.slice(step.name.lastIndexOf(".") + 1));

  /** The dearest step of both sides, so that their bars have one scale. */
  function largestOf(rows, sides) {
    return Math.max(0, ...sides.flatMap((side) => stepsOf(rows, side).map((step) => Costs.of(step.item))));
  }

  /** box: where the bars go; rows: of the graph; side: 0 before, 1 after. */
  function show(box, rows, side, largest, select) {
    const steps = stepsOf(rows, side);
    const costs = steps.map((step) => Costs.of(step.item));
    const whole = Costs.sum(costs);
    box.replaceChildren(...steps.map((step, place) => Dom.el("button", {
      type: "button",
      class: step.layer ? "step layer" : "step",
      tabindex: place === 0 ? 0 : -1,
      title: `${step.name}: ${Costs.show(costs[place])} ${Costs.name()}, ${Words.percent(costs[place], whole)}`,
      "aria-label": `${step.name}: ${Costs.show(costs[place])} ${Costs.name()}, ${Words.percent(costs[place], whole)}`,
      vars: { "--height": largest ? costs[place] / largest : 0, "--stripes": Colours.stripes(step.item) },
      onclick: () => select(step.row),
    }, Dom.el("span", { class: "fill" }))));
  }

  return { show, largestOf };
})();

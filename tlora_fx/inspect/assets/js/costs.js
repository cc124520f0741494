/** What nodes, modules and layers cost, by the measure that is chosen. */
const Costs = (() => {
  const MEASURES = {
    flop: { name: "FLOP/token", unit: "", of: (node, length) => flop(node, length) },
    bytes: { name: "bytes", unit: "B", of: (node) => node.bytes },
    launches: { name: "launches", unit: "", of: (node) => node.launches },
  };
  let measure = MEASURES.flop;
  let length = 1024;
  let kept = new WeakMap();
  const open = new WeakMap();

  function flop(node, tokens) {
    return node.flop_per_token === null ? 0 : node.flop_per_token + node.flop_per_length * tokens;
  }

  function choose(name, tokens) {
    measure = MEASURES[name];
    length = tokens;
    kept = new WeakMap();
  }

  const ofNode = (node) => measure.of(node, length);

  /** An item's own cost: of folded layers, one layer's. */
  function of(item) {
    if (item.kind === "node") return ofNode(item.node);
    if (!kept.has(item)) kept.set(item, sum(item.children.map((child) => of(child) * child.count)));
    return kept.get(item);
  }

  /** The cost of all its layers. */
  const total = (item) => of(item) * item.count;

  const sum = (values) => values.reduce((all, value) => all + value, 0);

  /** Whether something in it has FLOPs that nobody knows. */
  function unknown(item) {
    if (measure !== MEASURES.flop) return false;
    if (item.kind === "node") return item.node.kind === "call" && item.node.flop_per_token === null;
    if (!open.has(item)) open.set(item, item.children.some(unknown));
    return open.get(item);
  }

  /** "34.0 M", "34.0 M ?" where a part is unknown, "" for nothing. */
  function text(item) {
    const value = of(item);
    const mark = unknown(item) ? "?" : "";
    return value ? `${Words.scaled(value, measure.unit)} ${mark}`.trimEnd() : mark;
  }

  /** FLOPs in full: "17.9 k + 16.4 k·L". */
  function formula(node) {
    if (node.flop_per_token === null) return "? (no formula for this operator)";
    const parts = [Words.scaled(node.flop_per_token)];
    if (node.flop_per_length) parts.push(`${Words.scaled(node.flop_per_length)}·L`);
    return parts.join(" + ") + " a token" +
      (node.flop_per_row ? `, and ${Words.scaled(node.flop_per_row)} once a row` : "");
  }

  return {
    choose, of, total, ofNode, text, formula, sum,
    show: (value) => Words.scaled(value, measure.unit),
    name: () => measure.name,
  };
})();

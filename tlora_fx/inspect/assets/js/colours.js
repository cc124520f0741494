/**
 * Colours and marks: by role, job, the pass that made a node, or cost.
 *
 * A category is {mark, name, colour}; colour names a CSS variable. The mark says without colour
 * what the colour says.
 */
const Colours = (() => {
  const PALETTE = 32;
  const calm = { mark: "■", name: "all jobs: the base", colour: "calm" };
  const ROLES = {
    backbone: { mark: "□", name: "backbone", colour: "role-base" },
    shared: { mark: "■", name: "shared", colour: "calm" },
    adapter: { mark: "◆", name: "adapter", colour: "role-adapter" },
    table: { mark: "▤", name: "table", colour: "role-table" },
    loss: { mark: "∑", name: "loss", colour: "role-loss" },
    "": { mark: "·", name: "no role yet", colour: "none" },
  };
  const COSTS = [
    { mark: "0", name: "nothing", colour: "none", from: -1 },
    { mark: "1", name: "up to 1/1000 of the largest", colour: "cost-1", from: 0 },
    { mark: "2", name: "up to 1/100", colour: "cost-2", from: 1e-3 },
    { mark: "3", name: "up to 1/10", colour: "cost-3", from: 1e-2 },
    { mark: "4", name: "up to the largest", colour: "cost-4", from: 1e-1 },
  ];
  let mode = "role";
  let jobs = new Map();
  let passes = new Map();
  let largest = 0;
  let kept = new WeakMap();

  /** Choose what is coloured by, for the graphs of a stage. */
  function choose(name, program, stage) {
    mode = name;
    jobs = new Map([...program.jobs].map(([job, entry]) => [job, partyOf(entry)]));
    passes = new Map(program.stages.map((each) => [each.state, passOf(each)]));
    kept = new WeakMap();
    largest = 0;
    if (mode !== "cost") return;
    for (const graph of stage.graphs) {
      for (const node of graph.nodes) largest = Math.max(largest, Costs.ofNode(node));
    }
  }

  const parties = new Map();

  function partyOf({ name, mark, party }) {
    const known = parties.get(party);
    if (!known) parties.set(party, { mark, name, names: [name], colour: `job-${party % PALETTE}` });
    else if (!known.names.includes(name)) known.names.push(name);
    return parties.get(party);
  }

  function passOf({ place, state }) {
    const colour = place === 0 ? "calm" : `job-${(place - 1) % PALETTE}`;
    return { mark: String(place), name: state, colour };
  }

  function costOf(value) {
    const share = largest ? value / largest : 0;
    return share ? [...COSTS].reverse().find((each) => share > each.from) : COSTS[0];
  }

  /** The categories of a node, as parts of one. */
  function partsOf(node) {
    if (mode === "cost") return [costOf(Costs.ofNode(node))];
    if (mode === "role") return [ROLES[node.role] || ROLES[""]];
    if (mode === "stage") return [passes.get(node.made_by) || { mark: "?", name: node.made_by, colour: "none" }];
    return node.role === "adapter" && node.jobs.length ? marksOf(node) : [calm];
  }

  /** The parties whose jobs alone a node serves, each once; none for what all share. */
  function marksOf(node) {
    return node.role === "adapter"
      ? [...new Set(node.jobs.map((job) => jobs.get(job)).filter(Boolean))]
      : [];
  }

  /** The categories of an item with their shares of its operators, largest first. */
  function shares(item) {
    const weights = [...weigh(item)];
    const whole = Costs.sum(weights.map(([, weight]) => weight)) || 1;
    return weights.map(([category, weight]) => [category, weight / whole]).sort((a, b) => b[1] - a[1]);
  }

  function weigh(item) {
    if (!kept.has(item)) kept.set(item, mix(item));
    return kept.get(item);
  }

  function mix(item) {
    const found = new Map();
    const add = (category, weight) => found.set(category, (found.get(category) || 0) + weight);
    if (item.kind === "node") {
      const parts = partsOf(item.node);
      parts.forEach((part) => add(part, 1 / parts.length));
    } else if (mode === "cost") {
      add(costOf(Math.max(0, ...item.children.map(Costs.of))), 1);
    } else {
      for (const child of item.children) {
        if (child.kind === "node" && child.node.kind !== "call") continue;
        for (const [category, weight] of weigh(child)) add(category, weight * child.count);
      }
    }
    return found;
  }

  /** A CSS gradient that shows shares as stripes. */
  function stripes(item) {
    let start = 0;
    const stops = shares(item).map(([{ colour }, share]) => {
      const from = start;
      start += 100 * share;
      return `var(--${colour}) ${from}% ${start}%`;
    });
    return stops.length ? `linear-gradient(to bottom, ${stops.join(", ")})` : "none";
  }

  /** The categories of the legend, in order. */
  function legend() {
    if (mode === "cost") return COSTS;
    if (mode === "stage") return [...new Set(passes.values())];
    if (mode === "job") return [calm, ...new Set(jobs.values())];
    return [ROLES.backbone, ROLES.shared, ROLES.adapter, ROLES.table, ROLES.loss];
  }

  /** A mark on its colour. */
  function chip(category) {
    return Dom.el("span", {
      class: `chip ${category.colour}`, title: category.names?.join(", ") || category.name,
    }, category.mark);
  }

  return { choose, shares, stripes, marksOf, partsOf, partyOf, legend, chip };
})();

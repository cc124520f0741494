/**
 * The picture of all jobs on one backbone: its modules from the top, a column a job, and a branch
 * where a job has an adapter, with its rank. It is a drawing as `Layout` makes them: boxes and edges.
 */
const Overview = (() => {
  const { svg } = Dom;
  const LINE = 24;
  const LETTER = 7.3;
  const INDENT = 14;
  const FEW = 10;
  const WIDEST = 18;

  /** owner: the row above all; stage: whose adapters are drawn; jobs: as the page's data has them. */
  function plan(owner, stage, jobs) {
    const side = owner.right ? 1 : 0;
    const adapters = adaptersOf(stage);
    const boxes = [];
    for (const row of owner.children) collect(row, side, { adapters, boxes, depth: 0, prefix: "" });
    const drawn = [...jobs.values()].map((job) => ({ ...job, ...Colours.partyOf(job), name: job.name }));
    const few = drawn.length <= FEW;
    const step = few ? 52 : 26;
    const spine = Math.max(120, ...boxes.map(widthOf(few)));
    const head = Math.max(20, ...drawn.map(({ name }) => Words.cut(name, WIDEST).length * LETTER * (few ? 0.72 : 1))) + 40;
    boxes.forEach((box, place) => Object.assign(box, {
      x: box.indent + (spine - box.indent) / 2, y: LINE * (place + 0.5), width: spine - box.indent, height: LINE - 5,
    }));
    const edges = boxes.slice(1).map((to, place) => ({ from: boxes[place], to }));
    drawn.forEach((job, place) => { job.x = spine + (few ? 44 : 30) + place * step; });
    const right = spine + (few ? 44 : 30) + drawn.length * step + (few ? head * 0.6 : 0);
    return { boxes, edges, jobs: drawn, few, step, spine, left: -8, top: -head, width: right + 8, height: LINE * boxes.length + head + 12 };
  }

  const widthOf = (few) => ({ label, what, indent }) =>
    (label.length + (few && what ? what.length + 2 : 0)) * LETTER + indent + 24;

  /** Ranks by the path of the module, then by job. */
  function adaptersOf(stage) {
    const found = new Map();
    for (const graph of stage.graphs) {
      for (const node of graph.nodes) {
        if (node.role !== "adapter" || !node.site) continue;
        const path = Words.join(graph.layers[0] || "", node.site);
        if (!found.has(path)) found.set(path, new Map());
        node.jobs.forEach((job, place) => found.get(path).set(job, node.ranks[place] || ""));
      }
    }
    return found;
  }

  /** Boxes of the modules that hold weights, adapters or attention, in the order in which they run. */
  function collect(row, side, around) {
    const item = side ? row.right : row.left;
    if (!item || item.label === Items.BOUNDARY) return;
    const { adapters, boxes, depth, prefix } = around;
    const add = (what) => boxes.push({
      row, item, what, ranks: adapters.get(item.path) || new Map(), indent: depth * INDENT,
      label: Words.cut(item.kind === "layers" ? row.labels[side] : nameOf(item, prefix), 30),
    });
    if (item.kind === "node") {
      if (/attention$/.test(Words.operator(item.node.target))) add("attention");
    } else if (item.kind === "layers") {
      add(Roles.of(item));
      const inside = { ...around, depth: depth + 1, prefix: item.path };
      row.children.forEach((child) => collect(child, side, inside));
    } else if (adapters.has(item.path) || !modulesOf(row)) {
      if (adapters.has(item.path) || weighs(item)) add(Roles.of(item));
    } else {
      row.children.forEach((child) => collect(child, side, around));
    }
  }

  const modulesOf = (row) => row.children.some(({ shown }) => shown.kind !== "node");
  const weighs = (item) => item.children.some(({ node }) => node?.kind === "tensor");

  function nameOf({ kind, node, path, label }, prefix) {
    if (kind === "node") return Words.operator(node.target);
    return (prefix ? path.slice(prefix.length + 1) : path.replace(/^model\./, "")) || label;
  }

  /** What stands behind and before the boxes: a line a job, names, branches and ranks. */
  function picture({ boxes, jobs, few, step, spine, height, top }) {
    const largest = Math.max(1, ...boxes.flatMap(({ ranks }) => [...ranks.values()].map(sizeOf)));
    const bottom = height + top - 6;
    const columns = jobs.map(({ x, name, mark, colour }) => svg("g", {},
      svg("title", {}, name),
      svg("path", { class: `trunk line-${colour}`, d: `M${x} -4V${bottom}` }),
      svg("text", { x, y: -10, class: "mark" }, mark),
      svg("text", {
        class: "job", transform: `translate(${few ? x + 2 : x + 4} -26) rotate(${few ? -45 : -90})`,
      }, Words.cut(name, WIDEST))));
    const branches = boxes.flatMap((box) => jobs
      .filter(({ name }) => box.ranks.has(name))
      .map((job, place, all) => branch(box, job, spread(place, all.length), few, spine, step, largest)));
    return [...columns, ...branches.map(([line]) => line), ...branches.map(([, rank]) => rank)];
  }

  /** Where a branch leaves its box, so that many of them are a ribbon and none hides another. */
  const spread = (place, count) => ((place + 0.5) / count - 0.5) * (LINE - 9);

  function branch(box, { x, name, colour }, from, few, spine, step, largest) {
    const rank = box.ranks.get(name);
    const room = step - 3;
    const width = Math.max(Math.min(room, 8 + rank.length * LETTER), room * Math.sqrt(sizeOf(rank) / largest));
    const turn = x - width / 2 - 8;
    const line = svg("path", {
      class: `branch line-${colour} ${few ? "few" : ""}`,
      d: `M${spine} ${box.y + from}H${turn}Q${turn + 4} ${box.y + from} ${turn + 8} ${box.y}`,
    });
    return [line, svg("g", { class: "rank", "data-job": name },
      svg("title", {}, `${name}: rank ${rank || "unknown"} at ${box.label}`),
      svg("rect", { x: x - width / 2, y: box.y - 8, width, height: 16, rx: 8, class: `line-${colour}` }),
      svg("text", { x, y: box.y + 4, class: few ? "" : "small" }, rank))];
  }

  /** The rank as a number: the largest of several, the largest of all for a trained copy. */
  const sizeOf = (rank) => Number(rank.split("–").pop()) || 1;

  return { plan, picture };
})();

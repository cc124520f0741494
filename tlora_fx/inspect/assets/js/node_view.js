/** What there is to know of the selected row: a node, a module, or layers that share code. */
const NodeView = (() => {
  const { el } = Dom;
  const DEPTH = 8;
  const BREADTH = 12;

  /** context: {program, stage, rowOfKey(key), select(row), goTo(stage, key)}. */
  function show(box, row, context) {
    if (!row) {
      box.replaceChildren(el("p", { class: "quiet" }, "Select a row to see what it is."));
      return;
    }
    const item = row.shown;
    const title = el("h3", {}, item.kind === "node" ? item.node.id : row.labels[row.right ? 1 : 0]);
    const gone = row.right ? null : el("p", { class: "note" }, "Gone after this pass; this is how it was before.");
    const body = item.kind === "node" ? nodeParts(row, item, context) : moduleParts(row, item);
    const focused = box.contains(document.activeElement);
    box.replaceChildren(title, ...[gone, ...body].filter(Boolean));
    if (focused) box.focus();
  }

  function nodeParts(row, item, context) {
    const { node, graph } = item;
    return [
      node.code ? el("pre", { class: "statement" }, node.code) : null,
      differences(row),
      table([
        [node.kind === "call" ? "operator" : node.kind, node.target],
        ["module", placeOf(item, graph)],
        ["role", node.role || "not tagged yet"],
        ["jobs", jobs(node.jobs, context.program)],
        ["adapter on", node.site],
        ["ranks", ranks([node])],
        ["value", `${node.shape} ${node.dtype}`.trim()],
        ["FLOPs", node.kind === "call" ? Costs.formula(node) : ""],
        ["bytes", node.bytes ? Words.scaled(node.bytes, "B") : ""],
        ["launches", node.launches ? String(node.launches) : ""],
        ["layers", graph.layers.length ? `${Words.plural(graph.layers.length, "layer")} (${graph.name})` : ""],
        ["source", node.source],
        ["note", node.note],
      ]),
      links("Reads", graph.inputsOf(node), context),
      links("Read by", graph.usersOf(node), context),
      el("h4", {}, "Where it comes from"),
      el("ul", { class: "origins" }, origin(node, context, 0, new Set())),
    ];
  }

  function moduleParts(row, item) {
    const changes = Rows.counts(row);
    const parties = TreeView.parties(item);
    const inside = item.kind === "layers" ? item.children.flatMap(Items.nodesOf) : Items.nodesOf(item);
    const open = Object.entries(changes).filter(([, count]) => count);
    return [
      table([
        [item.kind === "owner" ? "graph of" : "module", placeOf(item, item.graph)],
        ["does", item.kind === "owner" ? "" : Roles.of(item)],
        ["nodes", String(inside.length)],
        [Costs.name(), Costs.text(item)],
        ["all layers", item.count > 1 ? `${Costs.show(Costs.total(item))} (${item.count} ×)` : ""],
        ["ranks", ranks(inside)],
        ["jobs", parties.flatMap((party) => [Colours.chip(party), ` ${party.names.join(", ")} `])],
        ["changes", open.map(([sign, count]) => `${sign}${count}`).join("  ")],
      ]),
      item.kind === "layers" ? list("Layers that share this code", item.block.layers) : null,
    ];
  }

  /** Each job's rank, where the nodes are those of one site. */
  function ranks(nodes) {
    const adapters = nodes.filter((node) => node.role === "adapter" && node.site);
    if (new Set(adapters.map((node) => node.site)).size !== 1) return "";
    const found = adapters.flatMap((node) => node.ranks.map((rank, place) => `${node.jobs[place]} ${rank}`));
    return [...new Set(found)].join(", ");
  }

  /** A module path; inside a block relative to its layers. */
  function placeOf(item, graph) {
    if (item.kind === "owner") return item.label;
    if (item.kind === "layers") return item.path.slice(0, item.path.lastIndexOf(".") + 1) + item.label;
    if (!graph.layers.length) return item.path || "the model itself";
    const inside = item.path.slice(graph.layers[0].length + 1);
    return inside ? `${inside} in ${graph.label}` : graph.label;
  }

  function table(entries) {
    const told = entries.filter(([, value]) => value && value.length);
    return el("dl", {}, told.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }

  function jobs(names, program) {
    if (!names.length) return "";
    if (names.length === program.jobs.size && names.length > 1) return `all ${names.length}`;
    return names.join(", ");
  }

  /** Before and after, where a pass changed the node. */
  function differences({ left, right }) {
    if (!left || !right) return null;
    const names = Rows.changed(left.node, right.node);
    if (!names.length) return null;
    const cells = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name),
      el("td", {}, told(left.node[name])), el("td", {}, told(right.node[name]))));
    const head = ["changed", "before", "after"].map((word) => el("th", { scope: "col" }, word));
    return el("table", { class: "differences" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, cells));
  }

  function told(value) {
    if (value === null) return "?";
    return Array.isArray(value) ? value.join(", ") : String(value) || "–";
  }

  function links(title, nodes, context) {
    if (!nodes.length) return null;
    return el("section", { class: "links" }, el("h4", {}, `${title} ${nodes.length}`),
      el("ul", {}, nodes.map((node) => el("li", {}, link(node, context)))));
  }

  function link(node, { rowOfKey, select }) {
    const row = rowOfKey(node.key);
    const label = `${node.id} ${node.shape}`.trim();
    return row ? el("button", { type: "button", class: "link", onclick: () => select(row) }, label) : label;
  }

  function list(title, names) {
    return el("section", { class: "links" }, el("h4", {}, title),
      el("ul", {}, names.map((name) => el("li", {}, name))));
  }

  /** A node and what it was made from, back to the tracer. */
  function origin(known, context, depth, seen) {
    seen.add(known.key);
    const line = el("li", {}, name(known, context, depth), ` made by ${known.made_by}`);
    if (depth >= DEPTH || !known.made_from.length) return line;
    const fresh = known.made_from.filter((key) => !seen.has(key));
    const shown = fresh.slice(0, BREADTH).map((key) => origin(find(key, context), context, depth + 1, seen));
    const rest = fresh.length - shown.length;
    if (rest > 0) shown.push(el("li", { class: "quiet" }, `and ${rest} more`));
    line.append(" from", el("ul", {}, shown));
    return line;
  }

  function find(key, { program, stage }) {
    const last = program.lastStageOf(key);
    const graphs = last ? (last.index > stage.index ? stage : last).graphs : [];
    for (const graph of graphs) {
      const node = graph.nodes.find((each) => each.key === key);
      if (node) return node;
    }
    return program.ancestor(key) || { key, target: "", made_by: "an unknown pass", made_from: [] };
  }

  function name(known, { program, stage, rowOfKey, select, goTo }, depth) {
    if (depth === 0) return el("code", {}, known.key);
    const row = rowOfKey(known.key);
    if (row) return el("button", { type: "button", class: "link", onclick: () => select(row) }, known.key);
    const last = program.lastStageOf(known.key);
    if (!last || last.index >= stage.index) return el("code", {}, known.key);
    const title = `last seen after ${last.text}: show that stage`;
    return el("button", { type: "button", class: "link past", title, onclick: () => goTo(last, known.key) }, known.key);
  }

  return { show };
})();

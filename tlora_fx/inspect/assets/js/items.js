/**
 * A stage as a tree: owners, modules, folded layers, nodes.
 *
 * An item: {kind: "owner" | "module" | "layers" | "node", key, label, path, graph, children}.
 * `key` finds the same item in another stage; `graph` is the graph that its nodes lie in. A "layers"
 * item has `block`, the graph that its layers share, `calls`, the nodes that run them, and `count`.
 */
const Items = (() => {
  const BOUNDARY = "inputs and output";

  function item(kind, key, label, path, graph) {
    return { kind, key, label, path, graph, children: [], modules: new Map(), count: 1 };
  }

  /** The owners of a stage, in order: "base", "job NAME", "group". */
  function build(stage) {
    const owners = new Map();
    for (const graph of stage.graphs) {
      if (!owners.has(graph.owner)) owners.set(graph.owner, { root: null, blocks: [] });
      const own = owners.get(graph.owner);
      if (graph.layers.length) own.blocks.push(graph);
      else own.root = graph;
    }
    const made = [...owners].filter(([, own]) => own.root).map(([name, own]) => owner(name, own));
    // Before the jobs are fused, the base stands where the group will be.
    if (!owners.has("group")) for (const top of made) if (top.label === "base") top.key = "o:group";
    return made;
  }

  function owner(name, { root, blocks }) {
    const top = item("owner", `o:${name}`, name, "", root);
    const blockOf = new Map();
    for (const block of blocks) for (const layer of block.layers) blockOf.set(layer, block);
    // The loss is called by the name of its module, and runs the block of what it holds.
    const within = (path) => blocks.find((block) => block.layers[0].startsWith(`${path}.`));
    fill(top, root, "", (node) => {
      const block = node.kind === "layer" ? blockOf.get(node.target) || within(node.target) : undefined;
      if (block) layers(top, block, root).calls.push(node);
      return Boolean(block);
    });
    return top;
  }

  /** Place all nodes but those that are taken; modules stand in the order in which they run. */
  function fill(top, graph, prefix, taken = () => false) {
    const tensors = [];
    for (const node of graph.nodes) {
      if (node.kind === "tensor") tensors.unshift(node);
      else if (!taken(node)) parentOf(top, node, graph, prefix).children.push(leaf(node, graph, prefix));
    }
    for (const node of tensors) parentOf(top, node, graph, prefix).children.unshift(leaf(node, graph, prefix));
  }

  /** The row of a block's layers, made when the first of them is called. */
  function layers(top, block, root) {
    const [parent, name] = split(block.layers[0]);
    const inside = module(top, parent, root, "");
    if (!inside.modules.has(name)) {
      const label = block.label.slice(block.label.indexOf(".") + 1);
      const made = item("layers", `m:${name}`, label, block.layers[0], root);
      Object.assign(made, { block, calls: [], count: block.layers.length });
      fill(made, block, made.path);
      inside.modules.set(name, made);
      inside.children.push(made);
    }
    return inside.modules.get(name);
  }

  function parentOf(top, node, graph, prefix) {
    const edge = node.kind === "input" || node.kind === "output";
    return module(top, edge ? BOUNDARY : moduleOf(node, graph), graph, prefix, edge);
  }

  function leaf(node, graph, prefix) {
    const path = moduleOf(node, graph);
    const label = node.kind === "tensor" ? node.target.replace(`${path}.`, "") : node.id;
    const made = item("node", `n:${node.key}`, label, Words.join(prefix, path), graph);
    made.node = node;
    return made;
  }

  /** Where a node stands; what a pass made for one adapter, with the node that reads it. */
  function moduleOf(node, graph) {
    if (node.module || node.site) return node.module || node.site;
    if (node.kind === "tensor") return split(node.target)[0];
    const reader = node.role === "adapter" ? graph.usersOf(node)[0] : undefined;
    return reader ? reader.module || reader.site : "";
  }

  /** The item of a module path below `top`, made with its parents where it is new. */
  function module(top, path, graph, prefix, whole = false) {
    let found = top;
    let full = prefix;
    for (const name of path ? (whole ? [path] : path.split(".")) : []) {
      full = Words.join(full, name);
      if (!found.modules.has(name)) {
        const made = item("module", `m:${name}`, name, full, graph);
        found.modules.set(name, made);
        found.children.push(made);
      }
      found = found.modules.get(name);
    }
    return found;
  }

  function split(path) {
    const dot = path.lastIndexOf(".");
    return dot < 0 ? ["", path] : [path.slice(0, dot), path.slice(dot + 1)];
  }

  /** The nodes of an item in the graph that its row lies in: of folded layers, their calls. */
  function nodesOf(given) {
    if (given.kind === "node") return [given.node];
    if (given.kind === "layers") return given.calls;
    return given.children.flatMap(nodesOf);
  }

  /** The node that says best what a module computes: its last call. */
  function lastCall(given) {
    for (let place = given.children.length - 1; place >= 0; place--) {
      const child = given.children[place];
      if (child.kind === "node" && child.node.kind === "call") return child.node;
    }
    return undefined;
  }

  const holdsLayers = (item) =>
    item.kind === "layers" || (item.kind !== "node" && item.children.some(holdsLayers));

  /** The node that says best what a module does: the call with most FLOPs in it, or its last. */
  function mainCall(given) {
    if (holdsLayers(given)) return lastCall(given);
    const calls = [...nodesOf(given)].filter((node) => node.kind === "call");
    const cost = (node) => (node.flop_per_token || 0) + 1024 * (node.flop_per_length || 0);
    const most = calls.reduce((best, node) => (best && cost(best) >= cost(node) ? best : node), undefined);
    return most && cost(most) ? most : lastCall(given) || calls[calls.length - 1];
  }

  return { build, nodesOf, lastCall, mainCall, BOUNDARY };
})();

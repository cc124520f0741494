/**
 * The rows of the tree: one stage, or two side by side with the same things in the same row.
 *
 * A row: {id, left, right, depth, parent, children, change}. `right` is the item after, `left` the
 * item before; with one stage there is no left. `change` is "" (same), "+", "−" or "~".
 */
const Rows = (() => {
  const NAME = /(?<![\w.])[A-Za-z_]\w*/g;
  const TOLD = [
    "kind", "target", "code", "shape", "dtype", "role", "note", "bytes", "flop_per_token",
    "flop_per_length", "flop_per_row", "launches",
  ];

  /**
   * Rows of a stage, beside those of an earlier one if it is given.
   *
   * returns   {rows, owners}; a lone owner has no row, its children stand at the top
   */
  function build(after, before) {
    const right = Items.build(after);
    const left = before ? Items.build(before) : null;
    const top = { id: "", depth: 0, parent: null, left: null, right: null, children: [] };
    top.children = join(left || [], right, top, Boolean(left));
    const owners = top.children;
    const rows = owners.length === 1 ? owners[0].children : owners;
    for (const row of owners) {
      row.parent = null;
      row.labels = [row.left?.label, row.right?.label];
    }
    for (const row of rows) {
      row.parent = null;
      settle(row, 1);
    }
    return { rows, owners };
  }

  function join(left, right, parent, compared) {
    const places = new Map(left.map((item, place) => [item.key, place]));
    const kept = new Set(right.map((item) => item.key));
    const rows = [];
    let next = 0;
    const dropUntil = (end) => {
      for (; next < end; next++) {
        if (!kept.has(left[next].key)) rows.push(row(left[next], null, parent, compared));
      }
    };
    for (const item of right) {
      const place = places.get(item.key);
      if (place !== undefined) dropUntil(place);
      rows.push(row(place === undefined ? null : left[place], item, parent, compared));
    }
    dropUntil(left.length);
    return rows;
  }

  function row(left, right, parent, compared) {
    const shown = right || left;
    const made = { id: `${parent.id}/${shown.key}`, left, right, parent, shown, compared };
    made.children = join(left ? left.children : [], right ? right.children : [], made, compared);
    made.change = compared ? changeOf(made) : "";
    return made;
  }

  function changeOf({ left, right, children }) {
    if (!left) return "+";
    if (!right) return "−";
    if (right.kind === "node") return changed(left.node, right.node).length ? "~" : "";
    return children.some((child) => child.change) || left.count !== right.count ? "~" : "";
  }

  /** The names of the fields in which a node differs; other names for the same values are none. */
  function changed(left, right) {
    if (left.row === right.row) return [];
    const fields = TOLD.filter((name) => fieldOf(left, name) !== fieldOf(right, name));
    return left.jobs.join() === right.jobs.join() ? fields : [...fields, "jobs"];
  }

  function fieldOf(node, name) {
    const { graph } = node;
    if (name === "code") return node.code.replace(NAME, (word) => graph.byId.get(word)?.key ?? word);
    const relative = name === "target" && node.kind === "tensor" && graph.layers.length;
    return relative ? `${graph.layers[0]}.${node.target}` : node[name];
  }

  /** Depths, and modules that hold one module only shown as one row: "self_attn.rotary_emb". */
  function settle(row, depth) {
    row.depth = depth;
    row.labels = [row.left?.label, row.right?.label];
    while (row.shown.kind === "module" && lone(row)) {
      const [child] = row.children;
      row.labels = row.labels.map((label, side) =>
        Words.join(label, (side ? child.right : child.left)?.label));
      Object.assign(row, { id: child.id, left: child.left, right: child.right, shown: child.shown });
      Object.assign(row, { children: child.children, change: child.change });
    }
    for (const child of row.children) {
      child.parent = row;
      settle(child, depth + 1);
    }
  }

  function lone({ left, right, children }) {
    if (children.length !== 1) return false;
    const [child] = children;
    return child.shown.kind !== "node" && Boolean(left) === Boolean(child.left) &&
      Boolean(right) === Boolean(child.right);
  }

  /** Every row, parents before children. */
  function* walk(rows) {
    for (const row of rows) {
      yield row;
      yield* walk(row.children);
    }
  }

  /** How many nodes a row adds, drops and changes. */
  function counts(row) {
    const found = { "+": 0, "−": 0, "~": 0 };
    for (const one of walk([row])) if (one.shown.kind === "node" && one.change) found[one.change]++;
    return found;
  }

  return { build, walk, counts, changed };
})();

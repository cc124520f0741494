/** The boxes and arrows of a drawing, and where dagre puts them. */
const Layout = (() => {
  const MOST = 320;
  const LETTER = 7.3;
  const WIDEST = 34;
  const LINE = 16;
  const EDGE = 12;

  /**
   * What a row holds, as boxes.
   *
   * options   {flat: every node instead of modules, extras: weights and tables too}
   * returns   {boxes, edges: [[box, box]]}; a box outside the row has no row of its own
   */
  function boxesOf(scope, side, { flat, extras }) {
    const item = side ? scope.right : scope.left;
    const graph = item.kind === "layers" ? item.block : item.graph;
    const boxes = [];
    const boxOf = new Map();
    const add = (row) => {
      const own = side ? row.right : row.left;
      if (!own || hidden(own, extras)) return;
      if (own.label === Items.BOUNDARY || (flat && own.kind === "module")) row.children.forEach(add);
      else boxes.push(boxFor(row, own, side, boxOf));
    };
    scope.children.forEach(add);
    const edges = join(graph, boxes, boxOf, extras);
    return { boxes, edges };
  }

  function hidden(item, extras) {
    if (extras) return false;
    if (item.kind !== "node") return item.children.length > 0 && item.children.every((child) => hidden(child, false));
    return item.node.minor;
  }

  function boxFor(row, item, side, boxOf) {
    const operator = TreeView.operatorOf(item);
    const label = item.kind === "node" && item.node.kind === "call" ? operator : row.labels[side];
    const what = item.kind === "node" ? TreeView.shapeOf(item) : `${operator} ${TreeView.shapeOf(item)}`;
    const box = sized({ row, item, label, what: what.trim() });
    for (const node of Items.nodesOf(item)) boxOf.set(node.id, box);
    return box;
  }

  function sized(box) {
    box.label = Words.cut(box.label, WIDEST);
    box.what = Words.cut(box.what, WIDEST);
    box.width = Math.max(box.label.length, box.what.length, 6) * LETTER + 30;
    box.height = (box.what ? 2 : 1) * LINE + 12;
    return box;
  }

  function join(graph, boxes, boxOf, extras) {
    const edges = new Map();
    const outside = new Map();
    const link = (from, to) => {
      if (from !== to) edges.set(`${boxes.indexOf(from)} ${boxes.indexOf(to)}`, [from, to]);
    };
    const beyond = (key, label, what) => {
      if (!outside.has(key)) {
        outside.set(key, sized({ row: null, item: null, label, what }));
        boxes.push(outside.get(key));
      }
      return outside.get(key);
    };
    for (const node of graph.nodes) {
      const to = boxOf.get(node.id);
      for (const input of graph.inputsOf(node)) {
        const from = boxOf.get(input.id);
        if (from && to) link(from, to);
        else if (to && (extras || !input.minor)) {
          link(beyond(`from ${input.id}`, `from ${placeOf(input)}`, input.shape), to);
        } else if (from) link(from, beyond(`to ${placeOf(node)}`, `to ${placeOf(node)}`, ""));
      }
    }
    return [...edges.values()];
  }

  function placeOf(node) {
    if (node.kind !== "call") return node.kind === "output" ? "the output" : node.target;
    const operator = Words.operator(node.target);
    return node.module ? node.module : operator;
  }

  /** Put the boxes in place: each gets x and y of its middle, each edge points. */
  function place({ boxes, edges }) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 26 });
    graph.setDefaultEdgeLabel(() => ({}));
    boxes.forEach((box, number) => graph.setNode(String(number), { width: box.width, height: box.height }));
    const number = new Map(boxes.map((box, place_) => [box, String(place_)]));
    for (const [from, to] of edges) graph.setEdge(number.get(from), number.get(to));
    dagre.layout(graph);
    boxes.forEach((box, place_) => Object.assign(box, pick(graph.node(String(place_)))));
    const points = (from, to) => graph.edge(number.get(from), number.get(to)).points;
    const paths = edges.map(([from, to]) => ({ from, to, points: points(from, to) }));
    // From the top, as the data flows and as people read.
    boxes.sort((a, b) => a.y - b.y || a.x - b.x);
    return { boxes, edges: paths, ...frame(boxes, paths) };
  }

  /** What boxes and edges cover; dagre's own size leaves out edges that swing wide. */
  function frame(boxes, edges) {
    const points = edges.flatMap((edge) => edge.points);
    const xs = [...boxes.flatMap(({ x, width }) => [x - width / 2, x + width / 2]), ...points.map(({ x }) => x)];
    const ys = [...boxes.flatMap(({ y, height }) => [y - height / 2, y + height / 2]), ...points.map(({ y }) => y)];
    const [left, top] = [Math.min(...xs) - EDGE, Math.min(...ys) - EDGE];
    return { left, top, width: Math.max(...xs) + EDGE - left, height: Math.max(...ys) + EDGE - top };
  }

  const pick = ({ x, y }) => ({ x, y });

  return { boxesOf, place, MOST };
})();

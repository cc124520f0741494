/** The drawing of a block: boxes in the order of the data's flow. */
const Drawing = (() => {
  const { el, svg, byId } = Dom;
  const state = { scope: null, side: 1, drawn: null, zoom: 1, fitted: true, looked: "", overview: true };
  let context = null;

  function start(given) {
    context = given;
    const again = () => { state.looked = ""; show(context.selected() || state.scope, !state.overview); };
    byId("draw-flat").addEventListener("change", again);
    byId("draw-extras").addEventListener("change", again);
    byId("draw-in").addEventListener("click", () => scale(state.zoom * 1.25));
    byId("draw-out").addEventListener("click", () => scale(state.zoom / 1.25));
    byId("draw-fit").addEventListener("click", () => fit());
    byId("draw-up").addEventListener("click", up);
    byId("draw-jobs").addEventListener("click", () => showOverview(true));
    Dom.roving(byId("canvas"), (key, from) => neighbour(key, state.drawn.boxes[Number(from.dataset.box)])?.element);
    new ResizeObserver(() => state.drawn && state.fitted && fit()).observe(byId("canvas"));
  }

  /** Draw what a row holds: of a node, the module that it lies in. `keep`: not if it is in sight. */
  function show(row, keep) {
    if (state.overview && (keep || state.stay)) {
      state.stay = false;
      state.scope = context.top(row);
      return draw();
    }
    showOverview(false);
    const scope = row.children.length ? row : row.parent || context.top(row);
    if (!keep || !state.scope || !within(row, state.scope)) state.scope = scope;
    state.side = state.scope.right ? 1 : 0;
    return draw();
  }

  /** All jobs on their backbone, or what a row holds. */
  function showOverview(wanted) {
    if (state.overview !== wanted) state.looked = "";
    state.overview = wanted;
    if (!wanted) return;
    state.scope = context.top(context.selected() || state.scope);
    draw();
  }

  function within(row, scope) {
    for (let up_ = row.parent || context.top(row); up_; up_ = up_.parent) if (up_ === scope) return true;
    return false;
  }

  function up() {
    const { scope } = state;
    if (scope === context.top(scope)) return showOverview(true);
    state.scope = scope.parent || context.top(scope);
    draw();
  }

  function draw() {
    const { scope, side, overview } = state;
    if (!scope) return;
    byId("draw-jobs").setAttribute("aria-pressed", String(overview));
    byId("draw-name").closest("aside").classList.toggle("overview", overview);
    if (overview) return layOutOverview(scope);
    const options = { flat: byId("draw-flat").checked, extras: byId("draw-extras").checked };
    if (state.lastScope !== scope || !state.looked) layOut(scope, side, options);
    return mark();
  }

  function layOutOverview(scope) {
    if (state.lastScope !== scope || !state.looked) {
      Object.assign(state, { lastScope: scope, looked: "yes", drawn: null });
      byId("draw-title").textContent = "All jobs on the backbone; numbers are ranks";
      byId("draw-up").disabled = true;
      const plan = Overview.plan(scope, context.stage, context.program.jobs);
      if (plan.boxes.length > Layout.MOST) {
        say(`${plan.boxes.length} modules are too many to draw. Select one in the tree.`);
      } else {
        state.drawn = plan;
        for (const edge of plan.edges) edge.points = downwards(edge);
        render(Overview.picture(plan));
        fit(true);
      }
    }
    mark();
  }

  /** From a box to the one below it, along the left. */
  function downwards({ from, to }) {
    const x = Math.max(from.indent, to.indent) + 10;
    return [{ x, y: from.y + from.height / 2 }, { x, y: to.y - to.height / 2 }];
  }

  function layOut(scope, side, options) {
    Object.assign(state, { lastScope: scope, looked: "yes", drawn: null });
    byId("draw-title").textContent = titleOf(scope, side);
    byId("draw-up").disabled = false;
    const found = Layout.boxesOf(scope, side, options);
    if (found.boxes.length > Layout.MOST) {
      const other = options.flat ? ", or draw modules as one box each" : "";
      say(`${found.boxes.length} boxes are too many to draw. Open a smaller module${other}.`);
    } else if (!found.boxes.length) {
      say("There is nothing to draw here but weights and tables.");
    } else {
      state.drawn = Layout.place(found);
      render();
      fit(true);
      reveal(state.drawn.boxes.find((box) => box.row) || state.drawn.boxes[0]);
    }
  }

  function titleOf(scope, side) {
    const names = [];
    for (let row = scope; row; row = row.parent) names.unshift(row.labels[side] ?? row.labels[1 - side]);
    return names.join(" › ");
  }

  function say(text) {
    byId("canvas").replaceChildren(el("p", { class: "quiet" }, text));
  }

  /** extras: what else is drawn, between the arrows and the boxes. */
  function render(extras = []) {
    const { boxes, edges, left, top, width, height } = state.drawn;
    const arrow = svg("marker", {
      id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8,
      markerUnits: "userSpaceOnUse", orient: "auto",
    }, svg("path", { d: "M0 0L8 4L0 8z", class: "tip" }));
    boxes.forEach((box, number) => { box.element = boxElement(box, number); });
    const first = boxes.find((box) => box.row);
    first?.element.setAttribute("tabindex", 0);
    byId("canvas").replaceChildren(svg("svg", {
      viewBox: `${left} ${top} ${width} ${height}`, role: "group",
      "aria-label": `Drawing of ${byId("draw-title").textContent}`,
    }, svg("defs", {}, arrow), edges.map(edgeElement), extras, boxes.map((box) => box.element)));
  }

  function edgeElement(edge) {
    edge.element = svg("path", { class: "edge", d: curve(edge.points), "marker-end": "url(#arrow)" });
    return edge.element;
  }

  /** A smooth line through dagre's points. */
  function curve(points) {
    const at = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
    let path = `M${at(points[0])}`;
    for (let place = 1; place < points.length - 1; place++) {
      const [here, next] = [points[place], points[place + 1]];
      const end = place === points.length - 2 ? next : { x: (here.x + next.x) / 2, y: (here.y + next.y) / 2 };
      path += `Q${at(here)} ${at(end)}`;
    }
    return points.length === 2 ? `${path}L${at(points[1])}` : path;
  }

  function boxElement(box, number) {
    const { x, y, width, height, label, what, row, item } = box;
    const flat = Boolean(box.ranks);
    const folder = Boolean(row?.children.length);
    const change = row ? TreeView.CHANGES[row.change] : "";
    const kind = row ? `box ${folder ? "folder" : ""} ${change}` : "box outside";
    return svg("g", {
      class: kind, "data-box": number, transform: `translate(${x - width / 2} ${y - height / 2})`,
      role: row ? "button" : "img", tabindex: row ? -1 : undefined,
      "aria-label": [label, what, ranksOf(box), change, folder ? "a module, Enter opens it" : ""].filter(Boolean).join(", "),
      onclick: () => row && context.select(row, true), ondblclick: () => folder && open(row),
      onkeydown: (event) => press(event, box, folder),
    }, svg("title", {}, item?.path || label),
      svg("rect", { width, height, rx: 4, class: "body" }), item ? stripe(item, height) : null,
      svg("text", { x: 15, y: flat ? 14 : 18, class: "title" }, label),
      what && !flat ? svg("text", { x: 15, y: 34, class: "what" }, what) : null,
      what && flat && width > (label.length + what.length + 1) * 7.3 + 20
        ? svg("text", { x: width - 8, y: 14, class: "what end" }, what) : null,
      row && !flat ? svg("text", { x: width - 6, y: 18, class: "corner" }, `${row.change}${folder ? "▸" : ""}`) : null);
  }

  function ranksOf({ ranks }) {
    const told = [...(ranks || [])].map(([job, rank]) => `${job} ${rank}`);
    return told.length > 3 ? Words.plural(told.length, "job") : told.join(", ");
  }

  function stripe(item, height) {
    let from = 0;
    return Colours.shares(item).map(([{ colour }, share]) => {
      const part = svg("rect", { x: 0, y: from * height, width: 7, height: share * height, class: `fill-${colour}` });
      from += share;
      return part;
    });
  }

  function press(event, { row }, folder) {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    if (!row) return;
    context.select(row, true);
    if (folder && event.key === "Enter") open(row);
  }

  function open(row) {
    showOverview(false);
    state.scope = row;
    state.side = row.right ? 1 : 0;
    draw();
    byId("canvas").querySelector('[tabindex="0"]')?.focus();
  }

  /** Up and down follow the arrows, left and right go along a rank. */
  function neighbour(key, box) {
    const real = (found) => found.find((each) => each.row);
    const { edges, boxes } = state.drawn;
    if (key === "ArrowDown") return real(edges.filter((edge) => edge.from === box).map((edge) => edge.to));
    if (key === "ArrowUp") return real(edges.filter((edge) => edge.to === box).map((edge) => edge.from));
    const sign = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!sign) return undefined;
    const rank = boxes.filter((each) => each.row && Math.abs(each.y - box.y) < 20 && (each.x - box.x) * sign > 0);
    return rank.sort((a, b) => (a.x - b.x) * sign)[0];
  }

  function scale(zoom) {
    if (!state.drawn) return;
    const { width, height } = state.drawn;
    Object.assign(state, { zoom: Math.max(0.15, Math.min(3, zoom)), fitted: false });
    const drawing = byId("canvas").querySelector("svg");
    drawing.setAttribute("width", width * state.zoom);
    drawing.setAttribute("height", height * state.zoom);
  }

  /** As large as there is room for; a new drawing stays readable and may need to be scrolled. */
  function fit(readable = false) {
    if (!state.drawn) return;
    const { clientWidth, clientHeight } = byId("canvas");
    const { width, height } = state.drawn;
    const all = Math.min(1, (clientWidth - 4) / width, (clientHeight - 4) / height);
    const least = state.overview ? 0.5 : 0.6;
    scale(readable ? Math.max(least, all) : all);
    state.fitted = !readable || all >= least;
  }

  /** Mark the box that is selected, or that holds what is, and the arrows at it. */
  function mark() {
    if (!state.drawn) return;
    const chosen = new Set();
    for (let row = context.selected(); row; row = row.parent) chosen.add(row);
    for (const box of state.drawn.boxes) {
      const own = chosen.has(box.row);
      box.element.classList.toggle("selected", own);
      if (own) reveal(box);
    }
    for (const { from, to, element } of state.drawn.edges) {
      element.classList.toggle("near", chosen.has(from.row) || chosen.has(to.row));
    }
  }

  function reveal({ x, y }) {
    const canvas = byId("canvas");
    const { scrollLeft, scrollTop, clientWidth, clientHeight } = canvas;
    const left = (x - state.drawn.left) * state.zoom;
    const top = (y - state.drawn.top) * state.zoom;
    if (top < scrollTop || top > scrollTop + clientHeight) canvas.scrollTop = top - clientHeight / 2;
    if (left < scrollLeft || left > scrollLeft + clientWidth) canvas.scrollLeft = left - clientWidth / 2;
  }

  return { start, show, showsAll: () => state.overview, reset: () => Object.assign(state, { scope: null, looked: "", stay: state.overview }) };
})();

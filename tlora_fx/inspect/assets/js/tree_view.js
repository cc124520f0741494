/**
 * The tree on the screen. Only the rows in sight have elements, so its length costs nothing; both
 * sides of a comparison are one row, so they scroll as one.
 */
const TreeView = (() => {
  const SPARE = 12;
  const CHANGES = { "+": "new", "−": "gone", "~": "changed", "": "" };

  /** box: the element with role "tree"; on: {select(row), toggle(row)}. */
  function make(box, on) {
    const view = { rows: [], active: -1, look: null, drawn: "" };
    const inner = Dom.el("div", { class: "rows", role: "none" });
    box.append(inner);

    const height = () => parseFloat(getComputedStyle(inner).getPropertyValue("line-height"));

    function show(rows, active, look) {
      Object.assign(view, { rows, active, look, drawn: "" });
      box.classList.toggle("compared", look.compared);
      draw();
    }

    function draw() {
      const size = height();
      const first = Math.max(0, Math.floor(box.scrollTop / size) - SPARE);
      const last = Math.min(view.rows.length, Math.ceil((box.scrollTop + box.clientHeight) / size) + SPARE);
      const wanted = `${first} ${last} ${view.active} ${size}`;
      if (wanted === view.drawn) return;
      view.drawn = wanted;
      Dom.setVars(inner, { "--count": view.rows.length });
      const places = Array.from({ length: last - first }, (_, step) => first + step);
      // The active row stays, however far it is scrolled: screen readers follow it.
      if (view.active >= 0 && (view.active < first || view.active >= last)) places.push(view.active);
      inner.replaceChildren(...places.map((place) => rowElement(view, place, on)));
      if (view.active >= 0) box.setAttribute("aria-activedescendant", rowId(view.active));
      else box.removeAttribute("aria-activedescendant");
    }

    /** Make a row the active one, in sight. */
    function activate(place, centre = false) {
      view.active = place;
      reveal(place, centre);
      draw();
    }

    function reveal(place, centre) {
      const size = height();
      const top = place * size;
      const room = box.clientHeight;
      if (top >= box.scrollTop && top + size <= box.scrollTop + room) return;
      if (centre) box.scrollTop = top - room / 2;
      else box.scrollTop = top < box.scrollTop ? top : top + size - room;
    }

    box.addEventListener("scroll", draw, { passive: true });
    new ResizeObserver(draw).observe(box);
    box.addEventListener("keydown", (event) => keys(event, view, activate, on));
    return { show, activate, view };
  }

  const rowId = (place) => `row-${place}`;

  function rowElement(view, place, on) {
    const row = view.rows[place];
    const { look } = view;
    const folder = row.children.length > 0;
    const sides = look.compared ? [row.left, row.right] : [row.right];
    return Dom.el("div", {
      role: "treeitem",
      id: rowId(place),
      class: `row ${CHANGES[row.change]} ${place === view.active ? "active" : ""}`,
      "aria-level": row.depth,
      "aria-expanded": folder ? String(look.isOpen(row)) : undefined,
      "aria-selected": String(row === look.selected),
      "aria-posinset": row.place,
      "aria-setsize": row.siblings,
      "aria-label": spoken(row),
      vars: { "--place": place, "--depth": row.depth - 1 },
      onclick: (event) => (event.target.closest(".twisty") ? on.toggle(row) : on.select(row)),
      ondblclick: () => on.toggle(row),
    }, sides.map((item, side) => sideElement(row, item, look.compared ? side : 1, folder, look)));
  }

  function sideElement(row, item, side, folder, look) {
    if (!item) return Dom.el("span", { class: "side empty" });
    const mark = folder ? (look.isOpen(row) ? "▾" : "▸") : "";
    const change = look.compared && (side === 1 || row.change === "−") ? row.change : "";
    return Dom.el("span", { class: `side ${item.kind} ${item.node?.kind || ""}` },
      Dom.el("span", { class: "swatch", vars: { "--stripes": Colours.stripes(item) } }),
      Dom.el("span", { class: "change" }, change),
      Dom.el("span", { class: "name" },
        Dom.el("span", { class: "twisty" }, mark),
        Dom.el("span", { class: "label", title: item.path || item.label }, Dom.marked(row.labels[side], look.words))),
      Dom.el("span", { class: "operator" }, operatorOf(item)),
      Dom.el("span", { class: "shape" }, shapeOf(item)),
      Dom.el("span", { class: "who" }, whoOf(item)),
      Dom.el("span", { class: "cost" }, Costs.text(item)),
      Dom.el("span", { class: "bar", vars: { "--share": look.shareOf(row, item) } }));
  }

  function operatorOf(item) {
    if (item.kind !== "node") return Roles.of(item);
    return item.node.kind === "call" ? Words.operator(item.node.target) : item.node.kind;
  }

  function shapeOf(item) {
    const last = () => Items.lastCall(item) || Items.mainCall(item);
    const node = item.node || (item.kind === "module" ? last() : undefined);
    return node ? node.shape : "";
  }

  const whoKept = new WeakMap();

  /** The parties that have something of their own in an item. */
  function parties(item) {
    if (!whoKept.has(item)) {
      const own = item.kind === "node" ? Colours.marksOf(item.node) : item.children.flatMap(parties);
      whoKept.set(item, [...new Set(own)]);
    }
    return whoKept.get(item);
  }

  function whoOf(item) {
    return parties(item).map(Colours.chip);
  }

  function spoken(row) {
    const item = row.shown;
    const parts = [row.labels[row.right ? 1 : 0], operatorOf(item), shapeOf(item)];
    parts.push(spokenCost(row));
    const names = parties(item).flatMap((party) => party.names);
    if (names.length) parts.push(names.length > 3 ? Words.plural(names.length, "job") : names.join(", "));
    if (row.change) parts.push(CHANGES[row.change]);
    return parts.filter(Boolean).join(", ");
  }

  function spokenCost({ left, right, shown }) {
    const [before, after] = [left, right].map((item) => (item ? Costs.text(item) || "nothing" : ""));
    if (left && right && before !== after) return `${before} ${Costs.name()} before, ${after} after`;
    const cost = Costs.text(shown);
    return cost && `${cost} ${Costs.name()}`;
  }

  function keys(event, view, activate, on) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { rows, active, look } = view;
    const row = rows[active];
    const step = Math.max(1, Math.floor(event.currentTarget.clientHeight / 30));
    const moves = {
      ArrowDown: active + 1, ArrowUp: active - 1, Home: 0, End: rows.length - 1,
      PageDown: active + step, PageUp: active - step,
    };
    if (event.key in moves) {
      activate(Math.max(0, Math.min(rows.length - 1, moves[event.key])));
    } else if (!row) {
      return;
    } else if (event.key === "Enter" || event.key === " ") {
      on.select(row);
    } else if (event.key === "ArrowRight" && row.children.length) {
      if (look.isOpen(row)) activate(active + 1);
      else on.toggle(row);
    } else if (event.key === "ArrowLeft") {
      if (row.children.length && look.isOpen(row)) on.toggle(row);
      else if (row.parent) activate(rows.indexOf(row.parent));
    } else {
      return;
    }
    event.preventDefault();
  }

  return { CHANGES, make, operatorOf, shapeOf, parties };
})();

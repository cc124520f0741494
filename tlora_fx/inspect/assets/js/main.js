/** The page: what is chosen, and what follows from it. */
const Page = (() => {
  const { byId, el } = Dom;
  const state = {
    stage: null, before: null, query: "", found: null, open: new Set(), folded: new Set(), seen: new Set(),
    selected: null, rows: [], owners: [], byKey: new Map(), flat: [],
  };
  let program = null;
  let tree = null;

  async function start() {
    program = await Data.load(byId("data").textContent);
    tree = TreeView.make(byId("tree"), { select, toggle });
    const context = {
      program, select, goTo, top,
      rowOfKey: (key) => state.byKey.get(key), selected: () => state.selected,
    };
    Object.defineProperty(context, "stage", { get: () => state.stage });
    state.context = context;
    Drawing.start(context);
    fillControls();
    // The drawing that the page opens with has the jobs' colours.
    if (program.jobs.size > 1) byId("colour").value = "job";
    listen();
    setStage(program.stages.length - 1);
    const first = [...Rows.walk(state.rows)].find((row) => row.shown.kind === "layers") || state.rows[0];
    if (first) select(first, true);
    document.body.classList.add("ready");
    performance.mark("list-shown");
  }

  function fillControls() {
    const jobs = Words.plural(program.jobs.size, "job");
    byId("facts").textContent = [program.base, jobs, `tlora-fx ${program.version}`].filter(Boolean).join(" · ");
    Object.assign(byId("slider"), { min: 0, max: program.stages.length - 1 });
    byId("compare").append(...program.stages.map((stage) => el("option", { value: stage.index }, nameOf(stage))));
  }

  const nameOf = ({ place, text }) => `${place}  ${text}`;

  /** The owner's row above a row; it is not in the tree where it is the only one. */
  function top(row) {
    let found = row;
    while (found.parent) found = found.parent;
    return state.owners.includes(found) ? found : state.owners[0];
  }

  // ---- what follows from a choice

  function setStage(index) {
    state.stage = program.stages[Math.max(0, Math.min(program.stages.length - 1, index))];
    rebuild();
    const { stage } = state;
    const slider = byId("slider");
    slider.value = stage.index;
    slider.setAttribute("aria-valuetext", nameOf(stage));
    byId("earlier").disabled = stage.index === 0;
    byId("later").disabled = stage.index === program.stages.length - 1;
    byId("stage-name").textContent = nameOf(stage);
    byId("stage-facts").textContent = factsOf(stage);
    Dom.announce(told());
  }

  function factsOf(stage) {
    if (stage.state === "compiled") {
      return "the compiled model alone; to see every pass, compile with --states or inspect the job file";
    }
    if (stage.place === 0) return "what was traced";
    return `${stage.changed ? "changed the graphs" : "changed nothing"}, ${Words.seconds(stage.seconds)}`;
  }

  function beforeStage() {
    const choice = byId("compare").value;
    if (choice === "") return null;
    const index = choice === "previous" ? state.stage.index - 1 : Number(choice);
    return program.stages[Math.max(0, index)];
  }

  function rebuild() {
    const kept = state.selected;
    state.before = beforeStage();
    choose();
    Object.assign(state, Rows.build(state.stage, state.before));
    openToLayers();
    state.byId = new Map();
    state.byKey = new Map();
    for (const row of Rows.walk(state.rows)) {
      state.byId.set(row.id, row);
      for (const item of [row.left, row.right]) if (item?.node) state.byKey.set(item.node.key, row);
    }
    state.selected = kept && sameRow(kept);
    for (let up = state.selected?.parent; up; up = up.parent) state.open.add(up.id);
    Drawing.reset();
    list(state.selected);
    showSides(false);
  }

  function choose() {
    Costs.choose(byId("measure").value, Math.max(1, Number(byId("length").value) || 1));
    Colours.choose(byId("colour").value, program, state.stage);
    legend();
  }

  /** At another stage: the same row, what it was made of or became, or the module around it. */
  function sameRow(row) {
    if (state.byId.has(row.id)) return state.byId.get(row.id);
    const { node } = row.shown;
    if (node) {
      const known = [node.key, ...node.made_from].find((key) => state.byKey.has(key));
      if (known) return state.byKey.get(known);
      const heir = [...state.byKey.values()].find((each) => each.shown.node.made_from.includes(node.key));
      if (heir) return heir;
    }
    return row.parent ? sameRow(row.parent) : null;
  }

  /** Open what leads to the layers; what people closed stays closed. */
  function openToLayers() {
    for (const row of Rows.walk(state.owners.slice(0, 1))) {
      const leads = row.children.some(({ labels, shown }) =>
        shown.kind === "layers" || /^(layers|h|blocks)\b/.test(labels.find(Boolean)));
      if (leads) for (let up = row; up && !state.seen.has(up.id); up = up.parent) {
        state.open.add(up.id);
        state.seen.add(up.id);
      }
    }
  }

  /** Show the tree; `active` becomes the active row. */
  function list(active) {
    state.found = state.query ? Find.search(state.rows, state.query) : null;
    state.flat = [];
    flatten(state.found ? state.rows.filter((row) => state.found.shown.has(row)) : state.rows);
    const place = state.flat.indexOf(active);
    tree.show(state.flat, place < 0 && state.flat.length ? 0 : place, {
      compared: Boolean(state.before), selected: state.selected, isOpen,
      words: Find.words(state.query), shareOf,
    });
    byId("columns").classList.toggle("compared", Boolean(state.before));
    byId("before-name").textContent = state.before ? `before: ${nameOf(state.before)}` : "";
    byId("after-name").textContent = state.before ? `after: ${nameOf(state.stage)}` : "";
    byId("empty").hidden = state.flat.length > 0;
    byId("cost-head").textContent = Costs.name();
    bars();
  }

  function flatten(rows) {
    rows.forEach((row, place) => {
      Object.assign(row, { place: place + 1, siblings: rows.length });
      state.flat.push(row);
      const filtered = inside(row);
      if (isOpen(row)) flatten(row.children.filter((child) => !filtered || state.found.shown.has(child)));
    });
  }

  /** Whether the search found something inside a row. */
  const inside = (row) => state.found !== null && row.children.some((child) => state.found.shown.has(child));
  const isOpen = (row) => (inside(row) ? !state.folded.has(row.id) : state.open.has(row.id));

  /** A row's part of the layer or model that it lies in. */
  function shareOf(row, item) {
    const side = item === row.left ? "left" : "right";
    let around = row.parent;
    while (around && around.shown.kind !== "layers") around = around.parent;
    const whole = (around || top(row))[side];
    return whole && Costs.of(whole) ? Costs.total(item) / Costs.of(whole) : 0;
  }

  function bars() {
    const owner = state.selected ? top(state.selected) : state.owners[0];
    // Made anew only when they are others, so that the bar in focus stays.
    const chosen = ["colour", "measure", "length"].map((id) => byId(id).value);
    const wanted = [state.stage.index, state.before?.index, owner.id, ...chosen].join();
    if (state.bars === wanted) return;
    state.bars = wanted;
    const whose = state.owners.length > 1 ? ` of ${owner.shown.label}` : "";
    byId("bars-name").textContent = `${Costs.name()} by layer${whose}`;
    const largest = LayerBars.largestOf(owner.children, state.before ? [0, 1] : [owner.right ? 1 : 0]);
    for (const [side, id] of [[0, "bars-before"], [1, "bars-after"]]) {
      const shown = side ? owner.right || owner.left : state.before && owner.left;
      byId(id).hidden = !shown;
      if (shown) LayerBars.show(byId(id), owner.children, side && owner.right ? 1 : 0, largest, (row) => select(row));
    }
  }

  function showSides(keep) {
    const { selected, context } = state;
    NodeView.show(byId("node-panel"), selected, context);
    if (!byId("code-panel").hidden) CodeView.show(byId("code-panel"), selected?.shown, context);
    Drawing.show(selected || state.owners[0], keep);
  }

  function legend() {
    const named = ({ names, name }) => (names?.length > 1 ? Words.plural(names.length, "job") : name);
    const changes = state.before ? [["+", "new"], ["−", "gone"], ["~", "changed"]] : [];
    byId("legend").replaceChildren(
      ...Colours.legend().map((category) => el("li", {}, Colours.chip(category), ` ${named(category)}`)),
      ...changes.map(([sign, name]) => el("li", {}, el("span", { class: `chip ${name}` }, sign), ` ${name}`)));
  }

  /** What the status line says of the stage. */
  function told() {
    const after = `After ${state.stage.text}: `;
    if (!state.before) return after + Words.plural(state.byKey.size, "node");
    const all = state.rows.map(Rows.counts);
    const [plus, minus, same] = ["+", "−", "~"].map((sign) => Costs.sum(all.map((each) => each[sign])));
    return `${after}${plus} new, ${minus} gone, ${same} changed`;
  }

  // ---- what people do

  function select(row, fromDrawing = false) {
    // A row that the picture of all jobs has selected is drawn first, and opened by the next click.
    const again = state.selected === row && !Drawing.showsAll();
    state.selected = row;
    if (again && !fromDrawing && row.children.length) return toggle(row);
    for (let up = row.parent; up; up = up.parent) state.open.add(up.id);
    if (state.found && !state.found.shown.has(row)) setQuery("");
    list(row);
    tree.activate(state.flat.indexOf(row), true);
    showSides(fromDrawing);
    return undefined;
  }

  function toggle(row) {
    if (!row.children.length) return;
    const set = inside(row) ? state.folded : state.open;
    if (!set.delete(row.id)) set.add(row.id);
    list(row);
  }

  function goTo(stage, key) {
    setStage(stage.index);
    const row = state.byKey.get(key);
    if (row) select(row);
  }

  function setQuery(text) {
    state.query = text.trim();
    state.folded.clear();
    byId("search").value = text;
    list(state.selected);
    const hits = state.found?.hits || [];
    const nodes = hits.filter((row) => row.shown.kind === "node");
    byId("found").textContent = state.found ? `${hits.length} found` : "";
    Dom.announce(state.found
      ? `${Words.plural(hits.length, "row")} found, ${Words.plural(nodes.length, "node")}`
      : told());
  }

  /** Go to the next or previous thing that was found. */
  function nextHit(step) {
    const hits = state.found?.hits.filter((row) => row.shown.kind === "node" || !inside(row)) || [];
    if (!hits.length) return;
    const place = hits.indexOf(state.selected);
    const next = place < 0 ? (step > 0 ? 0 : hits.length - 1) : (place + step + hits.length) % hits.length;
    if (hits[next] !== state.selected) select(hits[next]);
  }

  function showTab(name) {
    for (const each of ["node", "code"]) {
      const tab = byId(`${each}-tab`);
      tab.setAttribute("aria-selected", String(each === name));
      tab.tabIndex = each === name ? 0 : -1;
      byId(`${each}-panel`).hidden = each !== name;
    }
    showSides(true);
  }

  function listen() {
    const on = (id, kind, act) => byId(id).addEventListener(kind, act);
    on("slider", "input", () => setStage(Number(byId("slider").value)));
    on("earlier", "click", () => setStage(state.stage.index - 1));
    on("later", "click", () => setStage(state.stage.index + 1));
    on("compare", "change", () => setStage(state.stage.index));
    for (const id of ["colour", "measure", "length"]) on(id, "change", paint);
    on("search", "input", () => setQuery(byId("search").value));
    on("search", "keydown", (event) => {
      if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") setQuery("");
      else if (event.key === "ArrowDown") byId("tree").focus();
      else return;
      event.preventDefault();
    });
    for (const name of ["node", "code"]) on(`${name}-tab`, "click", () => showTab(name));
    for (const id of ["bars-before", "bars-after"]) Dom.alongList(byId(id), "ArrowLeft", "ArrowRight");
    Dom.alongList(byId("tabs"), "ArrowLeft", "ArrowRight");
    Dom.alongList(byId("code-panel"), "ArrowUp", "ArrowDown");
    on("help-button", "click", () => byId("help").showModal());
    document.addEventListener("keydown", shortcut);
  }

  function shortcut(event) {
    const typing = event.target.closest("input:not([type=range], [type=checkbox]), select, textarea, dialog");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !byId("shortcuts").checked) return;
    const acts = {
      "/": () => byId("search").select(),
      "[": () => setStage(state.stage.index - 1),
      "]": () => setStage(state.stage.index + 1),
      c: compareOrNot,
      "?": () => byId("help").showModal(),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }

  /** Colours or costs changed, the rows did not. */
  function paint() {
    choose();
    list(state.selected);
    Drawing.reset();
    showSides(false);
  }

  function compareOrNot() {
    byId("compare").value = byId("compare").value === "" ? "previous" : "";
    setStage(state.stage.index);
  }

  return { start };
})();

await Page.start();

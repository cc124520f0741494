// The page of a service: everything comes from /api/v1, and what changes comes by its stream.

import { axisOf } from "./axis.js";
import { COLUMNS, ORDER, byColumn, byState, nextSort } from "./columns.js";

const POINTS = 120, EVENTS = 200, ROW = 26, PAGE = 200, LAST = 2 ** 53, SVG = "http://www.w3.org/2000/svg";
const find = (id) => document.getElementById(id);
const body = document.querySelector("#jobs tbody");
const jobs = new Map(), curves = new Map(), rows = new Map();
let groups = [], facts = null, shown = [], picked = null, sort = null;
// Ended jobs are loaded by pages, the newest first: `oldest` is the last one's number, 0 at the end.
let oldest = LAST, loading = null;

// Small helpers of the document.

function make(name, attributes = {}, text = "") {
  const svg = ["svg", "path", "rect", "line", "text", "title", "g"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  return node;
}

const number = (value, digits) => (value === null ? "" : value.toFixed(digits));
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const when = (seconds) => seconds && new Date(seconds * 1000).toLocaleString([], { hour12: false });

// The service.

async function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) {
    await enter();
    return ask(path, options);
  }
  if (!answer.ok) throw new Error((await answer.json()).text);
  return answer;
}

const read = async (path) => (await ask(`api/v1/${path}`)).json();

let entering = null;
function enter() {
  entering ??= new Promise((resolve) => {
    find("enter").showModal();
    find("enter").addEventListener("close", () => {
      sessionStorage.setItem("token", find("token").value.trim());
      entering = null;
      resolve();
    }, { once: true });
  });
  return entering;
}

async function load() {
  facts = await read("overview");
  jobs.clear();
  curves.clear();
  oldest = LAST;
  for (let after = 0; ;) {
    const list = await loadPage(`ended=false&limit=${PAGE}&after=${after}`);
    if (list.length < PAGE) break;
    after = list.at(-1).number;
  }
  await loadOlder();
  if (picked && !jobs.has(picked)) await loadOne(picked);
  arrange();
  document.body.classList.add("ready");
  const [spans, told] = await Promise.all([read("groups"), read("events")]);
  groups = spans;
  find("events").replaceChildren();
  tell(told);
  drawAll();
}

async function loadPage(query) {
  const [list, lines] = await Promise.all([read(`jobs?${query}`), read(`curves?${query}`)]);
  for (const job of list) jobs.set(job.name, job);
  for (const [name, points] of Object.entries(lines)) curves.set(name, points);
  return list;
}

// The next page of ended jobs, once at a time.
function loadOlder() {
  if (!oldest) return Promise.resolve();
  loading ??= loadPage(`ended=true&limit=${PAGE}&before=${oldest}`).then((list) => {
    oldest = list.length < PAGE ? 0 : list.at(-1).number;
    arrange();
  }).finally(() => { loading = null; });
  return loading;
}

async function loadOne(name) {
  const path = `jobs/${encodeURIComponent(name)}`;
  try {
    const [job, points] = await Promise.all([read(path), read(`${path}/curve`)]);
    jobs.set(job.name, job);
    curves.set(job.name, points);
  } catch {
    picked = null;
  }
}

async function listen() {
  for (;;) {
    try {
      await load();
      const answer = await ask("api/v1/stream");
      say("live");
      await take(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch (error) {
      say(`lost the service: ${error.message.split("\n")[0]}`, true);
    }
    await new Promise((again) => setTimeout(again, 2000));
  }
}

async function take(reader) {
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("it ended");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const match = /^event: (\w+)\ndata: (.*)$/s.exec(part);
      if (match) news[match[1]](JSON.parse(match[2]));
    }
  }
}

const news = {
  jobs(list) {
    for (const job of list) {
      const before = jobs.get(job.name);
      jobs.set(job.name, job);
      if (job.loss !== null && (!before || before.step !== job.step)) grow(job);
    }
    arrange();
    if (list.some((job) => job.name === picked)) showJob();
  },
  removed(names) {
    for (const name of names) { jobs.delete(name); curves.delete(name); }
    arrange();
    if (names.includes(picked)) showJob();
  },
  groups(spans) {
    groups = spans;
    drawTimeline();
  },
  events: tell,
};

// As the service thins it: pairs become their means when a curve is full.
function grow(job) {
  const points = curves.get(job.name) ?? curves.set(job.name, []).get(job.name);
  while (points.length && points.at(-1)[0] >= job.step) points.pop();
  points.push([job.step, job.loss]);
  if (points.length < POINTS) return;
  const half = [];
  for (let i = 0; i + 1 < points.length; i += 2) half.push([points[i + 1][0], (points[i][1] + points[i + 1][1]) / 2]);
  curves.set(job.name, half);
}

function say(text, lost = false) {
  find("state").textContent = text;
  find("state").classList.toggle("lost", lost);
}

// The table: rows that nobody sees are not in the document.

function arrange() {
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (job) => words.every((word) => `${job.name} ${job.state}`.toLowerCase().includes(word));
  shown = [...jobs.values()].filter(matches).sort(sort ? byColumn(sort.id, sort.descending) : byState);
  const all = Object.values(facts?.visible ?? {}).reduce((sum, count) => sum + count, 0);
  find("count").textContent = `${shown.length} of ${jobs.size}` + (oldest ? ` loaded, ${Math.max(all, jobs.size)} in all` : "");
  find("older").hidden = !oldest;
  find("none").hidden = jobs.size > 0;
  drawRows();
  drawFacts();
}

function drawRows() {
  const box = body.closest(".scroll");
  const from = Math.max(0, Math.floor(box.scrollTop / ROW) - 5);
  const to = Math.min(shown.length, from + Math.ceil(box.clientHeight / ROW) + 12);
  const visible = shown.slice(from, to);
  const names = new Set(visible.map((job) => job.name));
  for (const [name, row] of rows) if (!names.has(name)) { row.remove(); rows.delete(name); }
  const spacer = (height) => {
    const row = make("tr", { "aria-hidden": "true" });
    row.append(make("td"));
    row.firstChild.style.height = `${height}px`;
    row.firstChild.style.padding = 0;
    return row;
  };
  const focused = document.activeElement?.dataset?.job;
  const parts = visible.map((job, index) => drawRow(job, from + index));
  body.replaceChildren(spacer(from * ROW), ...parts, spacer((shown.length - to) * ROW));
  find("jobs").setAttribute("aria-rowcount", shown.length + 1);
  if (focused && rows.has(focused)) rows.get(focused).focus({ preventScroll: true });
}

function drawRow(job, index) {
  let row = rows.get(job.name);
  if (!row) {
    row = make("tr", { tabindex: 0, "data-job": job.name });
    for (const column of COLUMNS) row.append(make("td", { class: `${column.id}${column.number ? " n" : ""}` }));
    rows.set(job.name, row);
  }
  row.setAttribute("aria-rowindex", index + 2);
  row.setAttribute("aria-selected", job.name === picked);
  const points = curves.get(job.name) ?? [];
  const stamp = `${job.state} ${job.step} ${job.steps} ${job.gpus} ${points.length} ${job.loss} ${job.eval_loss} ${job.rank} ${job.learning_rate}`;
  if (row.dataset.stamp === stamp) return row;
  row.dataset.stamp = stamp;
  COLUMNS.forEach(({ key, text }, at) => {
    const value = key?.(job) ?? null;
    row.children[at].textContent = value === null ? "" : text(value);
  });
  const cell = (id) => row.querySelector(`.${id}`);
  cell("job").title = job.name;
  row.children[1].className = `state ${job.state}`;
  cell("step").textContent = `${job.step}/${job.steps || "?"}`;
  cell("curve").replaceChildren(spark(points));
  cell("units").textContent = job.gpus.join(",");
  return row;
}

// The table's head: each title that sorts is a button.

function drawHead() {
  const cells = COLUMNS.map((column) => {
    const title = column.id === "units" ? unit() : column.title;
    const cell = make("th", { scope: "col", class: `${column.id}${column.number ? " n" : ""}` });
    if (column.hint) cell.title = column.hint;
    if (!column.key) {
      cell.textContent = title;
      return cell;
    }
    const own = sort?.id === column.id;
    if (own) cell.setAttribute("aria-sort", sort.descending ? "descending" : "ascending");
    cell.append(make("button", { type: "button", "data-sort": column.id }, `${title}${own ? (sort.descending ? " ▾" : " ▴") : ""}`));
    return cell;
  });
  const focused = document.activeElement?.dataset?.sort;
  find("titles").replaceChildren(...cells);
  if (focused) document.querySelector(`[data-sort=${focused}]`).focus();
}

const unit = () => (facts?.gpu === "cpu" ? "CPU" : "GPU");

function pathOf(points, width, height, low, high) {
  const steps = points.map((point) => point[0]), first = steps[0];
  const x = (step) => ((step - first) / (steps.at(-1) - first || 1)) * width;
  const y = (loss) => height - ((loss - low) / (high - low || 1)) * height;
  return points.map(([step, loss], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(loss).toFixed(1)}`).join("");
}

const ends = (points) => [Math.min(...points.map((point) => point[1])), Math.max(...points.map((point) => point[1]))];

function spark(points) {
  const svg = make("svg", { viewBox: "0 -1 200 22", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (points.length > 1) svg.append(make("path", { class: "loss", d: pathOf(points, 200, 20, ...ends(points)), "vector-effect": "non-scaling-stroke" }));
  return svg;
}

function drawFacts() {
  if (!facts) return;
  const counts = oldest ? facts.visible : {};
  if (!oldest) for (const job of jobs.values()) counts[job.state] = (counts[job.state] ?? 0) + 1;
  find("groups-head").textContent = `Groups on ${unit()}s`;
  const told = ORDER.filter((state) => counts[state]).map((state) => `${counts[state]} ${state}`);
  find("facts").textContent = [
    facts.user, `${facts.busy} of ${facts.gpus} ${unit()}${facts.gpus > 1 ? "s" : ""} busy`,
    `${Math.round(100 * facts.utilisation)} % held in ten minutes`, facts.policy && `policy ${facts.policy}`,
    `${facts.gpu_hours.toFixed(2)} ${unit()}-hours used`, ...told,
  ].filter(Boolean).join(" · ");
}

// Groups by GPU and time; jobs of others have no name and one colour.

function drawTimeline() {
  const svg = find("timeline"), width = svg.clientWidth || 600, left = 34, gpus = facts?.gpus ?? 1;
  const lane = Math.max(4, Math.min(18, 240 / gpus)), height = gpus * lane;
  const seconds = Number(find("window").value), now = Date.now() / 1000, begin = now - seconds;
  const x = (time) => left + Math.max(0, (time - begin) / seconds) * (width - left);
  svg.setAttribute("height", height + 18);
  const parts = [];
  for (let tick = 0; tick <= 4; tick += 1) {
    const time = begin + (tick * seconds) / 4;
    parts.push(make("line", { class: "axis", x1: x(time), x2: x(time), y1: 0, y2: height }));
    const anchor = tick === 4 ? "end" : tick ? "middle" : "start";
    parts.push(make("text", { x: x(time), y: height + 13, "text-anchor": anchor }, clock(time)));
  }
  for (let gpu = 0; gpu < gpus; gpu += Math.ceil(12 / lane)) parts.push(make("text", { x: 0, y: gpu * lane + 10 }, `${gpu}`));
  let busy = new Set();
  for (const span of groups) {
    const end = span.ended ?? now;
    if (span.ended === null) span.gpus.forEach((gpu) => busy.add(gpu));
    if (end < begin) continue;
    const names = [...span.jobs, ...(span.others ? [`${span.others} of others`] : [])].join(", ");
    for (const gpu of span.gpus) {
      const box = make("rect", {
        class: span.jobs.length ? `g${span.epoch % 6}` : "other", x: x(span.launched), y: gpu * lane + 1,
        width: Math.max(1, x(end) - x(span.launched) - 1), height: lane - 2, "data-epoch": span.epoch,
      });
      box.append(make("title", {}, `group ${span.epoch} on ${unit()} ${gpu}: ${names}\n${clock(span.launched)} to ${span.ended ? clock(span.ended) : "now"} ${span.how}`));
      parts.push(box);
    }
  }
  svg.replaceChildren(...parts);
  svg.setAttribute("aria-label", `Groups on ${unit()}s: ${busy.size} of ${gpus} ${unit()}s are busy`);
}

// One job.

async function pick(name) {
  picked = name;
  location.hash = encodeURIComponent(name);
  for (const [other, row] of rows) row.setAttribute("aria-selected", other === name);
  find("told").textContent = "";
  find("why").replaceChildren();
  find("hyperparameters").replaceChildren();
  showJob();
  await Promise.all([why(), hyperparameters()]);
}

async function hyperparameters() {
  const name = picked;
  const told = await read(`jobs/${encodeURIComponent(name)}/hyperparameters`).catch(() => ({}));
  if (name === picked) find("hyperparameters").replaceChildren(...terms(Object.entries(told)));
}

const terms = (pairs) => pairs.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]);

async function why() {
  const name = picked;
  try {
    const told = await read(`jobs/${encodeURIComponent(name)}/explain?narrow=true`);
    if (name === picked) find("why").replaceChildren(...told.text.split("\n").map(indented));
  } catch (error) {
    find("why").textContent = error.message;
  }
}

// A line that wraps goes on below its own beginning, as far in as it was.
function indented(text) {
  const line = make("p", {}, text.trimStart());
  line.style.paddingLeft = `${(text.length - text.trimStart().length) / 2}em`;
  return line;
}

function showJob() {
  const job = jobs.get(picked);
  find("job").hidden = !job;
  if (!job) return;
  find("job-name").textContent = job.name;
  const open = ORDER.indexOf(job.state) <= 5 && job.state !== "cancelling";
  const stopped = ["paused", "pausing"].includes(job.state);
  const may = { pause: open && !stopped, resume: stopped, cancel: open, remove: ORDER.indexOf(job.state) > 5 };
  for (const button of document.querySelectorAll("[data-verb]")) button.hidden = !may[button.dataset.verb];
  const told = [
    ["state", job.state], ["reason", job.reason], ["step", `${job.step} of ${job.steps || "?"}`], ["loss", number(job.loss, 4)],
    ["eval loss", number(job.eval_loss, 4)], ["group", job.group === null ? "" : `${job.group} on ${unit()} ${job.gpus.join(", ")}`],
    ["priority", job.priority || ""], ["base", job.base], ["submitted", when(job.submitted)],
    ["started", when(job.started)], ["ended", when(job.ended)],
  ];
  find("job-facts").replaceChildren(...terms(told.filter(([, value]) => value)));
  drawCurve(curves.get(job.name) ?? []);
}

function drawCurve(points) {
  const svg = find("curve"), width = svg.clientWidth || 400, left = 52, inner = width - left - 6, height = 150;
  svg.classList.toggle("empty", points.length < 2);
  if (points.length < 2) return svg.replaceChildren(make("text", { x: 0, y: 14 }, "no steps yet"));
  const losses = points.map((point) => point[1]);
  const { low, high, ticks } = axisOf(losses), plot = make("g", { transform: `translate(${left} 6)` });
  const parts = ticks.flatMap(({ value, text }) => {
    const y = 6 + height - ((value - low) / (high - low)) * height;
    return [make("line", { class: "axis", x1: left, x2: left + inner, y1: y, y2: y }),
      make("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, text)];
  });
  plot.append(make("path", { class: "loss", d: pathOf(points, inner, height, low, high) }));
  parts.push(plot, make("text", { x: left, y: 174 }, `step ${points[0][0]}`),
    make("text", { x: left + inner, y: 174, "text-anchor": "end" }, `${points.at(-1)[0]}`));
  svg.replaceChildren(...parts);
  svg.setAttribute("aria-label", `Loss by step: from ${losses[0].toPrecision(4)} to ${losses.at(-1).toPrecision(4)}`);
}

function tell(list) {
  const box = find("events");
  for (const event of list) {
    const line = make("li");
    line.append(make("time", {}, clock(event.time)), ` ${event.jobs.join(", ")} `, make("span", { class: event.kind }, event.text));
    box.prepend(line);
  }
  while (box.children.length > EVENTS) box.lastChild.remove();
}

function drawAll() {
  drawHead();
  for (const row of rows.values()) delete row.dataset.stamp;
  arrange();
  drawTimeline();
  showJob();
}

// What people do.

find("titles").addEventListener("click", (event) => {
  const id = event.target.dataset.sort;
  if (!id) return;
  sort = nextSort(sort, id);
  body.closest(".scroll").scrollTop = 0;
  drawHead();
  arrange();
});
body.addEventListener("click", (event) => {
  const name = event.target.closest("tr")?.dataset.job;
  if (name) pick(name);
});
body.addEventListener("keydown", (event) => {
  const at = shown.findIndex((job) => job.name === event.target.dataset.job);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1 }[event.key];
  if (event.key === "Enter") pick(event.target.dataset.job);
  if (to === undefined || !shown[to]) return;
  event.preventDefault();
  const box = body.closest(".scroll"), top = to * ROW;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 3 * ROW) box.scrollTop = Math.max(0, top - box.clientHeight / 2);
  drawRows();
  rows.get(shown[to].name)?.focus({ preventScroll: true });
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input") ? event.key === "Escape" : false) event.target.blur();
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey) return;
  if (event.key === "/") { event.preventDefault(); find("filter").focus(); }
  if (event.key === "?") find("keys").showModal();
});
for (const button of document.querySelectorAll("[data-verb]")) button.addEventListener("click", async () => {
  try {
    const path = `api/v1/jobs/${encodeURIComponent(picked)}`;
    if (button.dataset.verb === "remove") {
      if (!confirm(`Remove ${picked}, its adapter and its metrics?`)) return;
      await ask(path, { method: "DELETE" });
      news.removed([picked]);
    } else {
      const answer = await ask(`${path}/${button.dataset.verb}`, { method: "POST" });
      news.jobs([await answer.json()]);
    }
    find("told").textContent = "";
  } catch (error) {
    find("told").textContent = error.message;
  }
});
find("filter").addEventListener("input", arrange);
find("window").addEventListener("change", drawTimeline);
find("older").addEventListener("click", loadOlder);
body.closest(".scroll").addEventListener("scroll", (event) => {
  const box = event.target;
  drawRows();
  if (oldest && box.scrollTop + box.clientHeight > box.scrollHeight - 20 * ROW) loadOlder();
}, { passive: true });
addEventListener("resize", drawAll);
setInterval(async () => {
  if (document.hidden || !document.body.classList.contains("ready")) return;
  facts = await read("overview").catch(() => facts);
  drawFacts();
  drawTimeline();
  if (picked) why();
}, 5000);
drawHead();
picked = location.hash ? decodeURIComponent(location.hash.slice(1)) : null;
listen();

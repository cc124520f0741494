// Columns of the table of jobs: what each shows, and by what it sorts.

export const ORDER = ["running", "pausing", "cancelling", "queued", "received", "paused", "failed", "refused", "cancelled", "done"];
const fixed = (digits) => (value) => value.toFixed(digits);

// A column without `key` does not sort; `text` writes the key. `number`: aligned at the right.
export const COLUMNS = [
  { id: "job", title: "job", key: (job) => job.name, text: String },
  { id: "state", title: "state", key: (job) => ORDER.indexOf(job.state), text: (at) => ORDER[at] },
  { id: "rank", title: "rank", number: true, key: (job) => job.rank, text: String },
  { id: "rate", title: "rate", hint: "learning rate", number: true, key: (job) => job.learning_rate, text: rateText },
  { id: "step", title: "step", number: true, key: (job) => job.step, text: String },
  { id: "curve", title: "curve", hint: "loss by step" },
  { id: "loss", title: "loss", hint: "loss of the last step", number: true, key: (job) => job.loss, text: fixed(4) },
  { id: "eval", title: "eval loss", hint: "loss of the last evaluation", number: true, key: (job) => job.eval_loss, text: fixed(4) },
  { id: "pace", title: "tokens/s", number: true, key: (job) => (job.state === "running" ? job.tokens_per_second : null), text: fixed(0) },
  { id: "units", title: "GPU", number: true, key: (job) => job.gpus[0] ?? null, text: String },
];

// A learning rate as people write it: 0.001, 3e-5.
export function rateText(rate) {
  return rate === 0 || rate >= 0.001 ? String(rate) : rate.toExponential().replace(/e-0?/, "e-");
}

// By state: what runs first, then what waits in its order, then what ended last.
export function byState(a, b) {
  const rank = ORDER.indexOf(a.state);
  return rank - ORDER.indexOf(b.state) || b.priority - a.priority ||
    (rank > 5 ? (b.ended ?? 0) - (a.ended ?? 0) : a.submitted - b.submitted) || (a.name < b.name ? -1 : 1);
}

// By a column; jobs without a value stand last in both directions, equal ones by state.
export function byColumn(id, descending) {
  const key = COLUMNS.find((column) => column.id === id).key, sign = descending ? -1 : 1;
  return (a, b) => {
    const one = key(a) ?? null, other = key(b) ?? null;
    if (one === null || other === null) return (one === null) - (other === null) || byState(a, b);
    const order = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
    return sign * order || byState(a, b);
  };
}

// The next order after a press on a column: up, down, by state. null: by state.
export function nextSort(sort, id) {
  if (sort?.id !== id) return { id, descending: false };
  return sort.descending ? null : { id, descending: true };
}

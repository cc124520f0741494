// Axes of curves: a domain with round ends that fits the values, and its ticks.

// The least of 1, 2, 5 times a power of ten that is not below a span.
export function roundStep(span) {
  if (!(span > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(span));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= span * 0.999);
}

// Linear axis over values: { low, high, ticks: [{ value, text }] }, at most `count` + 2 ticks.
export function axisOf(values, count = 5) {
  const there = values.filter(Number.isFinite);
  if (!there.length) return { low: 0, high: 1, ticks: [] };
  const least = Math.min(...there), most = Math.max(...there);
  const step = roundStep((most - least || Math.abs(most) / 10 || 1) / count);
  let first = Math.floor(least / step + 1e-9), last = Math.ceil(most / step - 1e-9);
  if (first === last) [first, last] = [first - 1, last + 1];
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const text = (value) => (Math.abs(value) < 1e6 && digits <= 6 ? value.toFixed(digits) : value.toExponential(2));
  const ticks = [];
  for (let index = first; index <= last; index += 1) ticks.push({ value: index * step, text: text(index * step) });
  return { low: first * step, high: last * step, ticks };
}

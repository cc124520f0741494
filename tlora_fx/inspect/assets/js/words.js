/** Numbers and names as people read them. */
const Words = (() => {
  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  /** A number with a decimal prefix: "33.8 M", "8.20 kB". */
  function scaled(value, unit = "") {
    for (const [size, prefix] of PREFIXES) {
      if (value >= size * 0.9995) {
        const rest = value / size;
        return `${rest < 9.995 ? rest.toFixed(2) : rest.toFixed(1)} ${prefix}${unit}`;
      }
    }
    return `${Number.isInteger(value) ? value : value.toFixed(1)} ${unit}`.trimEnd();
  }

  function plural(number, noun) {
    return number === 1 ? `1 ${noun}` : `${number} ${noun}s`;
  }

  function percent(part, whole) {
    const share = whole ? (100 * part) / whole : 0;
    if (share > 0 && share < 0.1) return "< 0.1 %";
    return `${share < 10 ? share.toFixed(1) : share.toFixed(0)} %`;
  }

  function seconds(value) {
    if (value < 0.001) return "< 1 ms";
    return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`;
  }

  /** "aten.linear.default" is "linear", "_operator.getitem" is "getitem". */
  function operator(target) {
    const parts = target.split(".");
    const overloaded = parts.length > 2 && /^(torch\.ops\.)?(aten|prims|tlora_fx|higher_order)\./.test(target);
    return parts[parts.length - (overloaded ? 2 : 1)];
  }

  /** A text of at most this many characters, its middle left out: paths differ at the end. */
  function cut(text, width) {
    if (text.length <= width) return text;
    const tail = Math.ceil((width - 1) * 0.6);
    return `${text.slice(0, width - 1 - tail)}…${text.slice(text.length - tail)}`;
  }

  const join = (path, name) => (path && name ? `${path}.${name}` : path || name);

  return { scaled, plural, percent, seconds, operator, cut, join };
})();

/** Search: which rows of the tree hold all the words that were typed. */
const Find = (() => {
  const texts = new WeakMap();

  function words(query) {
    return query.toLowerCase().split(/\s+/).filter(Boolean);
  }

  function textOf(row) {
    if (!texts.has(row)) {
      const parts = [row.left, row.right].filter(Boolean).flatMap(itemText);
      texts.set(row, parts.join(" ").toLowerCase());
    }
    return texts.get(row);
  }

  function itemText({ kind, node, label, path, block }) {
    if (kind === "layers") return [label, path, block.name];
    if (kind !== "node") return [label, path];
    const { key, target, shape, dtype, role, jobs, made_by, source, note, code } = node;
    return [label, path, key, target, shape, dtype, role, ...jobs, made_by, source, note, code];
  }

  /**
   * What a search leaves of the tree.
   *
   * returns   {hits: rows that match, shown: those and the rows above them}
   */
  function search(rows, query) {
    const wanted = words(query);
    const hits = [];
    const shown = new Set();
    for (const row of Rows.walk(rows)) {
      if (!wanted.every((word) => textOf(row).includes(word))) continue;
      hits.push(row);
      for (let up = row; up && !shown.has(up); up = up.parent) shown.add(up);
    }
    return { hits, shown };
  }

  return { search, words };
})();

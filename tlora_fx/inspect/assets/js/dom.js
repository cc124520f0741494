/** Elements of the page. Text is only ever set as text, so no name in a job file becomes markup. */
const Dom = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  /**
   * Make an element: el("button", {class: "x", onclick: f}, "text", child).
   * An attribute that is undefined, null or false is left out; `vars` sets CSS variables.
   */
  function el(tag, attributes, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }

  function svg(tag, attributes, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "vars") setVars(element, value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }

  function setVars(element, values) {
    for (const [name, value] of Object.entries(values)) element.style.setProperty(name, value);
  }

  const byId = (id) => document.getElementById(id);

  /** A text with what was searched for marked. */
  function marked(text, words) {
    const found = words
      .map((word) => [text.toLowerCase().indexOf(word), word.length])
      .filter(([start]) => start >= 0)
      .sort((a, b) => a[0] - b[0]);
    const pieces = [];
    let done = 0;
    for (const [start, length] of found) {
      if (start < done) continue;
      pieces.push(text.slice(done, start), el("mark", {}, text.slice(start, start + length)));
      done = start + length;
    }
    return [...pieces, text.slice(done)].filter((piece) => piece !== "");
  }

  /** Say something to screen readers, and to everyone else in the status line. */
  function announce(text) {
    byId("status").textContent = text;
  }

  /**
   * One stop of the tab key for many elements; arrow keys move among them.
   *
   * next: for a key and the element in focus, the element to go to, or undefined
   */
  function roving(box, next) {
    box.addEventListener("keydown", (event) => {
      const from = event.target.closest("[tabindex]");
      const to = from && box.contains(from) ? next(event.key, from) : undefined;
      if (!to) return;
      from.setAttribute("tabindex", -1);
      to.setAttribute("tabindex", 0);
      to.focus();
      event.preventDefault();
    });
  }

  /** The arrow keys of a plain list. */
  function alongList(box, back, forth) {
    roving(box, (key, from) => {
      const all = [...box.querySelectorAll("[tabindex]")];
      const place = all.indexOf(from);
      return all[{ [back]: place - 1, [forth]: place + 1, Home: 0, End: all.length - 1 }[key]];
    });
  }

  return { el, svg, byId, marked, announce, setVars, roving, alongList };
})();

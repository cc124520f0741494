/** The page's data: stages, their graphs and nodes. `html_data.py` packs it. */
const Data = (() => {
  const TEXTS = [
    "id", "key", "kind", "target", "code", "dtype", "module", "role", "site", "source", "made_by",
    "note", "shape",
  ];
  const LISTS = ["inputs", "jobs", "made_from", "ranks"];
  const NUMBERS = ["flop_per_token", "flop_per_length", "flop_per_row", "bytes", "launches"];

  /** One graph; its nodes are made when they are first asked for. */
  class Graph {
    constructor(packed, tables) {
      this.name = packed.name;
      this.owner = packed.owner;
      this.layers = packed.layers;
      this.label = packed.label;
      this.packed = packed;
      this.tables = tables;
      this.made = null;
    }

    get nodes() {
      if (!this.made) this.make();
      return this.made;
    }

    make() {
      let row = 0;
      this.made = this.packed.rows.map((step) => nodeAt((row += step), this.tables, this));
      this.byId = new Map(this.made.map((node) => [node.id, node]));
      this.readers = new Map(this.made.map((node) => [node.id, []]));
      for (const node of this.made) {
        for (const id of node.inputs) this.readers.get(id)?.push(node);
      }
    }

    inputsOf(node) {
      return node.inputs.map((id) => this.byId.get(id)).filter(Boolean);
    }

    usersOf(node) {
      return this.readers.get(node.id) || [];
    }
  }

  function nodeAt(row, tables, graph) {
    const { nodes, texts, lists } = tables;
    const node = { row, graph };
    for (const name of TEXTS) node[name] = texts[nodes[name][row]];
    for (const name of LISTS) node[name] = lists[nodes[name][row]].map((place) => texts[place]);
    for (const name of NUMBERS) node[name] = nodes[name][row];
    // What a row brings besides ids and positions, and what is computed of that alone.
    node.minor = node.kind === "tensor" || node.role === "table" ||
      (node.kind === "input" && tables.tables.includes(node.target));
    return node;
  }

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return JSON.parse(await new Response(inflated).text());
  }

  /** Everything that the page shows. */
  async function load(text) {
    const packed = await inflate(text);
    const graphs = packed.graphs.map((graph) => new Graph(graph, packed));
    const stages = packed.stages.map((stage, index) => ({
      ...stage,
      index,
      graphs: stage.graphs.map((place) => graphs[place]),
    }));
    return {
      base: packed.base,
      version: packed.version,
      jobs: new Map(packed.jobs.map((job) => [job.name, job])),
      stages,
      ancestor: (key) => ancestor(packed, key),
      lastStageOf: lastStages(stages),
    };
  }

  /** From a key to the last stage that has its node; made when it is first asked. */
  function lastStages(stages) {
    let found = null;
    return (key) => {
      if (!found) {
        found = new Map();
        for (const stage of stages) {
          for (const graph of stage.graphs) for (const node of graph.nodes) found.set(node.key, stage);
        }
      }
      return found.get(key);
    };
  }

  /** A node that is gone, undefined where the key names none. */
  function ancestor({ history, texts, lists }, key) {
    if (!Object.hasOwn(history, key)) return undefined;
    const [target, by, from] = history[key];
    return { key, target: texts[target], made_by: texts[by], made_from: lists[from].map((t) => texts[t]) };
  }

  return { load };
})();

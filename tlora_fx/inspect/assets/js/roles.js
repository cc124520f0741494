/** What a module does, in a word: told by the operators in it, so that it holds for any model. */
const Roles = (() => {
  const PRODUCTS = new Set([
    "linear", "addmm", "mm", "multi_lora_linear", "multi_lora_linears", "multi_lora_add",
  ]);
  const ACTIVATIONS = ["silu", "gelu", "relu", "sigmoid", "tanh"];
  const ATTENTION = ["packed_attention", "scaled_dot_product_attention"];
  const kept = new WeakMap();

  /** "RMSNorm", "attention", "MLP", ...; the operator that costs most where none of them fits. */
  function of(item) {
    if (!kept.has(item)) kept.set(item, told(item));
    return kept.get(item);
  }

  function told(item) {
    if (item.kind === "layers" && /\d$/.test(item.path)) return "decoder layer";
    if (holdsLayers(item)) return "";
    const calls = item.children.flatMap(Items.nodesOf).filter((node) => node.kind === "call");
    const names = calls.map(operatorOf);
    const has = (...any) => any.some((name) => names.includes(name));
    const products = new Set(calls.filter((node) => PRODUCTS.has(operatorOf(node))).map(placeOf)).size;
    const attends = has(...ATTENTION);
    if (products > 1) return severalOf(item, attends, has);
    if (attends) return "attention";
    if (products) return productOf(calls, names);
    if (has("embedding")) return "embedding";
    if (has("rms_norm") || (has("mean") && has("rsqrt") && !has("sub"))) return "RMSNorm";
    if (has("layer_norm", "native_layer_norm") || (has("mean", "var_mean") && has("rsqrt"))) return "LayerNorm";
    if (has("cos") && has("sin")) return "rotary embedding";
    const node = Items.mainCall(item);
    return node ? operatorOf(node) : "";
  }

  function severalOf(item, attends, has) {
    const modules = item.children.filter((child) => child.kind === "module");
    if (attends) return modules.some((child) => of(child) === "attention") ? "decoder layer" : "attention";
    return has(...ACTIVATIONS) ? "MLP" : "linears";
  }

  /** A product alone, whether or not its site shares an operator with others, and its adapters. */
  function productOf(calls, names) {
    const lowered = names.some((name) => name.startsWith("multi_lora"));
    return lowered || calls.some((node) => node.role === "adapter") ? "linear + adapters" : "linear";
  }

  /** What a node computes: of a part of what an operator makes for several sites, that operator. */
  function operatorOf(node) {
    if (node.kind !== "call") return node.kind;
    const operator = Words.operator(node.target);
    const source = operator === "getitem" ? node.graph.inputsOf(node)[0] : undefined;
    return source?.kind === "call" ? Words.operator(source.target) : operator;
  }

  /** A module that a product belongs to; branches of jobs belong to that of their site. */
  const placeOf = (node) => node.site || node.module || node.id;

  const holdsLayers = (item) =>
    item.kind !== "node" && item.children.some((child) => child.kind === "layers" || holdsLayers(child));

  return { of, operatorOf };
})();

"""Small made-up stages for tests of the HTML page: two jobs, four layers, three passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tlora_fx.inspect.schema import Ancestor, GraphEntry, NodeEntry, PassStage, Program

JOBS = ("math-r16", "chat-r4")
LAYERS = 4
PLAIN = NodeEntry(
    id="", key="", kind="call", target="", inputs=[], code="", shape=[1, "T", 64],
    dtype="bfloat16", flop_per_token=0.0, flop_per_length=0.0, flop_per_row=0.0, bytes=0,
    launches=0, module="", role="", jobs=[], site="", source="", made_by="trace", made_from=[],
    note="",
)  # fmt: skip


def node(name: str, inputs: Sequence[str] = (), **fields: Any) -> NodeEntry:
    """A node; its key is its name unless one is given."""
    given = {"id": name, "key": name, "inputs": list(inputs)} | fields
    return replace(PLAIN, **given)


def call(name: str, operator: str, inputs: Sequence[str], flop: float | None, **fields: Any) -> Any:
    """A node that computes."""
    code = f"{name} = {operator}({', '.join(inputs)})"
    target = f"aten.{operator}.default"
    fields = {"code": code, "launches": 1, "flop_per_token": flop} | fields
    return node(name, inputs, target=target, **fields)


def linear(prefix: str, module: str, value: str, **fields: Any) -> list[NodeEntry]:
    """A weight and the product with it."""
    weight = node(f"{prefix}_weight", kind="tensor", target=f"{module}.weight", shape=[64, 64],
                  bytes=8192, module=module, **fields)  # fmt: skip
    out = call(f"{prefix}_linear", "linear", [value, weight.id], 8192.0, module=module, **fields)
    return [weight, out]


def layer(prefix: str, value: str, module: str = "", **fields: Any) -> list[NodeEntry]:
    """A projection, an operator whose FLOPs nobody knows, and the residual."""
    at = f"{module}." if module else ""
    q = linear(f"{prefix}q", f"{at}attn.q_proj", value, **fields)
    odd = call(f"{prefix}odd", "strange", [q[-1].id], None, module=f"{at}attn", **fields)
    add = call(f"{prefix}add", "add", [odd.id, value], 64.0, module=module, **fields)
    return [*q, odd, add]


def traced(owner: str, mark: str) -> list[GraphEntry]:
    """The root of one owner before layers are folded; two layers are traced."""
    nodes = [node("input_ids", kind="input", target="input_ids", key=f"{mark}/input_ids")]
    embed = call("embed", "embedding", ["input_ids"], 0.0, module="model.embed")
    nodes.append(embed)
    for number in range(2):
        nodes += layer(f"l{number}_", nodes[-1].id, f"model.layers.{number}")
    nodes.append(node("output", [nodes[-1].id], kind="output", target="output"))
    return [GraphEntry("root", owner, [], [replace(n, key=f"{mark}/{n.id}") for n in nodes])]


def fused(jobs: Sequence[str], lowered: bool, layers: int = LAYERS) -> list[GraphEntry]:
    """The group's root and the block of its layers, with branches or one lowered operator."""
    shared: dict[str, Any] = {"role": "shared", "jobs": list(jobs)}
    embed = call("embed", "embedding", ["input_ids"], 0.0, module="model.embed", **shared)
    root = [node("input_ids", kind="input", target="input_ids"), embed]
    paths = [f"model.layers.{number}" for number in range(layers)]
    for number, path in enumerate(paths):
        root.append(node(f"layer{number}", [root[-1].id], kind="layer", target=path, module=path))
    root.append(node("output", [root[-1].id], kind="output", target="output"))
    block = [node("x", kind="input", target="x"), *layer("l0_", "x", **shared)]
    if lowered:
        block = [_lowered(entry, jobs) for entry in block]
    else:
        block[-2:-2] = [_branch(job, number) for number, job in enumerate(jobs)]
    block.append(node("block_output", [block[-1].id], kind="output", target="output"))
    entries = [
        GraphEntry("root", "group", [], root),
        GraphEntry("Layers_0", "group", paths, block),
    ]
    return [replace(g, nodes=[_known(entry) for entry in g.nodes]) for g in entries]


def stages(jobs: Sequence[str] = JOBS, layers: int = LAYERS) -> list[PassStage]:
    """What was traced, fused, lowered, and a pass that changes nothing."""
    owners = traced("base", "base") + [
        entry for job in jobs for entry in traced(f"job {job}", f"job {job}")
    ]
    gone = {
        f"group/branch_{number}": Ancestor("aten.mul.Tensor", "fuse-backbone", ["base/l0_q_linear"])
        for number in range(len(jobs))
    }
    last = fused(jobs, lowered=True, layers=layers)
    return [
        _stage(0, "trace", owners, jobs, {}),
        _stage(1, "fuse-backbone", fused(jobs, lowered=False, layers=layers), jobs, {}),
        _stage(2, "lower-adapters{compute=float32}", last, jobs, gone),
        replace(_stage(3, "idle", last, jobs, gone), changed=False),
    ]


def _stage(
    place: int, text: str, graphs: list[GraphEntry], jobs: Sequence[str], gone: dict[str, Ancestor]
) -> PassStage:
    state = text.partition("{")[0]
    program = Program(1, "0.1.0", "made-up", state, "packed", list(jobs), graphs, gone)
    return PassStage(place, text, changed=True, seconds=0.25 * place, program=program)


def _known(entry: NodeEntry) -> NodeEntry:
    """The key that a node of the group had in the base, or its own."""
    if entry.key != entry.id:
        return entry
    return replace(entry, key=f"base/{entry.id}" if entry.id.startswith("l0_") else entry.id)


def _branch(job: str, number: int) -> NodeEntry:
    return call(
        f"branch_{number}", "mul", ["l0_q_linear"], 128.0, key=f"group/branch_{number}",
        module="attn.q_proj", site="attn.q_proj", role="adapter", jobs=[job],
        made_by="fuse-backbone", made_from=["base/l0_q_linear"],
    )  # fmt: skip


def _lowered(entry: NodeEntry, jobs: Sequence[str]) -> NodeEntry:
    if entry.id != "l0_q_linear":
        return entry
    return replace(
        entry, target="tlora_fx.multi_lora_linear.default", key="group/multi", role="adapter",
        code="l0_q_linear = multi_lora_linear(x, l0_q_weight)", site="attn.q_proj",
        made_by="lower-adapters", flop_per_token=8448.0, source="modeling.py:12",
        made_from=[f"group/branch_{number}" for number in range(len(jobs))],
    )  # fmt: skip

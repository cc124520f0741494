"""A small program written by hand: two equal layers, two jobs, before and after a pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tlora_fx.inspect.schema import Ancestor, GraphEntry, NodeEntry, Program

JOBS = ["math", "chat"]
LAYERS = ["model.layers.0", "model.layers.1"]
SITE = "mlp.up_proj"
EMPTY = NodeEntry(
    id="", key="", kind="call", target="", inputs=[], code="", shape=[1, "T", 8], dtype="f32",
    flop_per_token=0.0, flop_per_length=0.0, flop_per_row=0.0, bytes=0, launches=0, module="",
    role="shared", jobs=JOBS, site="", source="", made_by="trace", made_from=[], note="",
)  # fmt: skip


def node(name: str, key: str, **fields: Any) -> NodeEntry:
    """A node; what is not given is as in EMPTY."""
    return replace(EMPTY, id=name, key=key, **fields)


def tensor(name: str, key: str, shape: list[int | str], **fields: Any) -> NodeEntry:
    """A tensor of the base, or of a job."""
    size = 4
    for length in shape:
        size *= int(length)
    given = {"kind": "tensor", "target": name, "shape": shape, "bytes": size, **fields}
    return node(name, key, **given)


def call(name: str, key: str, target: str, inputs: list[str], **fields: Any) -> NodeEntry:
    """A call of an operator that computes."""
    shown = target.removesuffix(".default")
    shape = ", ".join(map(str, fields.get("shape", EMPTY.shape)))
    code = f"{name} = {shown}({', '.join(inputs)})  # [{shape}] f32"
    return node(name, key, target=target, inputs=inputs, code=code, launches=1, **fields)


def of_job(name: str, **fields: Any) -> dict[str, Any]:
    """What a branch of one job has."""
    return {"role": "adapter", "jobs": [name], "site": SITE, "module": SITE, **fields}


def branch(place: int, name: str, after: str, rank: int) -> list[NodeEntry]:
    """One job's plain LoRA branch, as fuse-backbone writes it."""
    own = of_job(name, made_by="fuse-backbone")
    low = {**own, "shape": [1, f"T{place}", rank]}
    mine = {**own, "shape": [1, f"T{place}", 12]}
    key = f"job {name}/up_proj"
    return [
        tensor(f"j{place}.a", f"{key}.a", [rank, 8], **own),
        tensor(f"j{place}.b", f"{key}.b", [12, rank], **own),
        call(f"lora_A_{place}", f"{key}.lora_A:linear", "aten.linear.default",
             ["norm", f"j{place}.a"], flop_per_token=8.0 * rank, **low),
        call(f"lora_B_{place}", f"{key}.lora_B:linear", "aten.linear.default",
             [f"lora_A_{place}", f"j{place}.b"], flop_per_token=12.0 * rank, **mine),
        call(f"write_{place}", f"{key}:write", "tlora_fx.segment_write.default",
             [after, f"lora_B_{place}"], **{**own, "shape": [1, "T", 12]}),
    ]  # fmt: skip


def head() -> list[NodeEntry]:
    """What a layer begins with."""
    return [
        node("hidden", "base/hidden", kind="input", target="hidden"),
        tensor("norm.weight", "base/norm.weight", [8]),
        call("norm", "base/layers.0.norm:rms_norm", "aten.rms_norm.default",
             ["hidden", "norm.weight"], module="norm", flop_per_token=32.0,
             source="modeling.py:12 return self.weight * hidden"),
        tensor("mlp.up_proj.weight", "base/up_proj.weight", [12, 8]),
    ]  # fmt: skip


def tail(of: str) -> list[NodeEntry]:
    """What a layer ends with."""
    return [
        call("down", "base/layers.0.mlp.down:linear", "aten.linear.default", [of],
             module="mlp.down_proj", flop_per_token=192.0),
        node("output", "base/layers.0:output", kind="output", target="output", inputs=["down"],
             code="return down", dtype="", shape=[]),
    ]  # fmt: skip


def root() -> GraphEntry:
    """The root: it embeds, and calls both layers."""
    return GraphEntry("root", "group", [], [
        node("input_ids", "base/input_ids", kind="input", target="input_ids", shape=[1, "T"],
             dtype="i64"),
        tensor("embed.weight", "base/embed.weight", [50, 8]),
        call("embed", "base/embed:embedding", "aten.embedding.default",
             ["embed.weight", "input_ids"], module="model.embed"),
        node("hidden", "base/layer 0", kind="layer", target=LAYERS[0], inputs=["embed"],
             code="hidden = self.model.layers[0](embed)", module=LAYERS[0]),
        node("hidden_2", "base/layer 1", kind="layer", target=LAYERS[1], inputs=["hidden"],
             code="hidden_2 = self.model.layers[1](hidden)", module=LAYERS[1]),
        node("output", "base/output", kind="output", target="output", inputs=["hidden_2"],
             code="return hidden_2", dtype="", shape=[]),
    ])  # fmt: skip


def fused() -> Program:
    """After fuse-backbone: a branch for each job."""
    linear = call("up_proj", "base/up_proj:linear", "aten.linear.default",
                  ["norm", "mlp.up_proj.weight"], module=SITE, flop_per_token=192.0,
                  shape=[1, "T", 12])  # fmt: skip
    branches = branch(0, "math", "up_proj", 4) + branch(1, "chat", "write_0", 2)
    nodes = [*head(), linear, *branches, *tail("write_1")]
    return _program("fuse-backbone", nodes, {})


def lowered() -> Program:
    """After lower-adapters: one operator in their place."""
    gone = [entry for entry in fused().graphs[1].nodes if entry.made_by == "fuse-backbone"]
    history = {entry.key: Ancestor(entry.target, entry.made_by, []) for entry in gone}
    history["base/up_proj:linear"] = Ancestor("aten.linear.default", "trace", [])
    both = {"role": "adapter", "site": SITE, "module": SITE, "made_by": "lower-adapters"}
    one = call(
        "up_proj",
        "group/up_proj:multi_lora_linear",
        "tlora_fx.multi_lora_linear.default",
        ["norm", "mlp.up_proj.weight", "mlp.up_proj.lora.a", "mlp.up_proj.lora.b"],
        flop_per_token=252.0,
        shape=[1, "T", 12],
        made_from=list(history),
        **both,
    )
    bank = [
        tensor(f"mlp.up_proj.lora.{name}", f"group/up_proj.{name}", [6, width],
               made_from=[f"job {job}/up_proj.{name}" for job in JOBS], **both)
        for name, width in (("a", 8), ("b", 12))
    ]  # fmt: skip
    return _program("lower-adapters", [*head(), *bank, one, *tail("up_proj")], history)


def _program(state: str, nodes: list[NodeEntry], history: dict[str, Ancestor]) -> Program:
    layers = GraphEntry("layers_0_1", "group", LAYERS, nodes)
    return Program(1, "0.1.0", "small", state, "packed", JOBS, [root(), layers], history)

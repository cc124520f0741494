"""Add NEFTune's noise to what the embedding of tokens gives, each job its own.

Reads   the embedding that reads input_ids, and its jobs' own branches.
Writes  an embedding_noise behind it.
Keeps   the numbers of jobs without noise, and of all jobs where a model is evaluated.

source  Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, algorithm 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tlora_fx.errors import BaseRefused
from tlora_fx.ir.graph import GroupGraph, is_call, placeholders
from tlora_fx.pipeline import GroupPass, Numerics, register
from tlora_fx.rewriting import Rewriter

NOISE = torch.ops.tlora_fx.embedding_noise.default


@register
@dataclass(frozen=True, slots=True)
class AddNoise(GroupPass):
    """Add noise to embeddings while jobs train.

    alphas   size of each job's noise, as `neftune_noise_alpha`; 0: none
    """

    name: ClassVar[str] = "add-noise"
    requires: ClassVar[frozenset[str]] = frozenset({"key-dropouts"})
    preserves_numerics: ClassVar[Numerics] = "no"

    alphas: tuple[float, ...] = ()

    def run(self, group: GroupGraph) -> None:
        embedded, tables = _embedded(group.root), placeholders(group.root)
        readers = [node for node in group.root.nodes if embedded in node.all_input_nodes]
        make = Rewriter(group.root).at(readers[0])
        shared = make.tagged(
            role="shared", jobs=tuple(group.job_names), path=embedded.meta["path"], site=""
        )
        names = ("segments", "keys", "token_index", "cu_seqlens")
        noised = shared(NOISE, embedded, list(self.alphas), *(tables[name] for name in names))
        if "axis" in embedded.meta:
            noised.meta["axis"] = embedded.meta["axis"]
        embedded.replace_all_uses_with(noised, delete_user_cb=lambda user: user is not noised)


def _embedded(root: fx.Graph) -> fx.Node:
    """The output of the module that embeds the tokens, jobs' own parts included.

    raises   BaseRefused where there is not one
    """
    ids = next(node for node in root.nodes if node.name == "input_ids")
    paths = {
        str(node.meta["path"])
        for node in root.nodes
        if is_call(node, torch.ops.aten.embedding.default)
        and node.meta["role"] == "shared"
        and _reads(node.args[1], ids)
    }
    if len(paths) != 1:
        raise BaseRefused(
            "nobody knows which embedding of this base gets the noise",
            found=", ".join(sorted(paths)) or "no embedding of tokens",
            help="leave out neftune_noise_alpha",
        )
    [path] = paths
    inside = [
        node
        for node in root.nodes
        if node.op == "call_function" and f"{node.meta.get('path')}.".startswith(f"{path}.")
    ]
    output: fx.Node = inside[-1]
    return output


def _reads(node: object, ids: fx.Node) -> bool:
    """Whether a node is the tokens, or another view of them."""
    while isinstance(node, fx.Node) and node is not ids and node.op == "call_function":
        node = node.args[0]
    return node is ids

"""The frozen base sharded over replicas: what is gathered when, and what stays whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.processes import run_processes
from tests.parallel.training import sharded, write_base
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.model.supermodel import SuperModel

EMBEDDING = "model.embed_tokens"


def run_sharded(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Two rounds under fsdp, and what was gathered when."""
    model, runner = sharded(folder, 2, options)
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    found = Watched(model)
    model.compile(backend=counted)
    rows = [
        pack([JobTokens([tuple(range(n))], [tuple(range(n))]) for n in (size, size + 2)])
        for size in (3, 5, 4, 6)
    ]
    for _ in range(2):
        runner.run(rows, torch.ones(2, dtype=torch.float64))
    held = {path: _local(model.net.get_submodule(path)) for path in model.layer_order()}
    return {
        "forward": found.forward, "backward": found.backward, "after": found.gathered(),
        "local": held, "graphs": len(graphs),
        "trained": sum(p.numel() for p in model.job_parameters("a").values()),
    }  # fmt: skip


class Watched:
    """Notes which modules are gathered while each layer runs."""

    def __init__(self, model: SuperModel) -> None:
        self.model = model
        self.paths = [*model.layer_order(), "loss", EMBEDDING]
        self.forward: list[tuple[str, list[str]]] = []
        self.backward: list[tuple[str, list[str]]] = []
        for path in model.layer_order():
            module = model.net.get_submodule(path)
            module.register_forward_hook(self._noting(path), prepend=True)

    def gathered(self) -> list[str]:
        return [path for path in self.paths if self._whole(path)]

    def _whole(self, path: str) -> bool:
        module = self.model.net.get_submodule(path)
        frozen = [p for p in module.parameters() if not p.requires_grad and p.dim() > 1]
        return not any(hasattr(p, "full_tensor") for p in frozen)

    def _noting(self, path: str) -> Any:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.forward.append((path, self.gathered()))
            if args[0].requires_grad:
                args[0].register_hook(lambda _: self.backward.append((path, self.gathered())))

        return note


def _local(module: nn.Module) -> tuple[int, int]:
    """Numbers of a module's frozen matrices: held here, and in all."""
    frozen: list[Any] = [p for p in module.parameters() if not p.requires_grad and p.dim() > 1]
    return sum(p.to_local().numel() for p in frozen), sum(p.numel() for p in frozen)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    write_base(folder)
    return run_processes(2, run_both, folder)[0]


def run_both(folder: Path) -> dict[str, dict[str, Any]]:
    """Weights let go of after the forward, and kept."""
    kept = run_sharded(folder, {"keep_gathered": True, "recompute": True})
    return {"resharded": run_sharded(folder, {}), "kept": kept}


def test_one_layer_is_gathered_at_a_time(told: dict[str, Any]) -> None:
    """In the forward the layer that runs, and no embedding."""
    assert len(told["resharded"]["forward"]) == 2 * 2 * 4
    assert all(gathered == [path] for path, gathered in told["resharded"]["forward"])


def test_the_backward_gathers_again_and_lets_go(told: dict[str, Any]) -> None:
    """Layers above the lowest adapter are gathered one by one; at the end none is."""
    backward = told["resharded"]["backward"]

    assert {path for path, _ in backward} == {"model.layers.2", "model.layers.3"}
    assert all(path in gathered and "loss" not in gathered for path, gathered in backward)
    assert all(len(gathered) <= 2 for _, gathered in backward)
    assert told["resharded"]["after"] == []


def test_weights_can_be_kept_for_the_backward(told: dict[str, Any]) -> None:
    """Then they are let go of after it."""
    last = [gathered for path, gathered in told["kept"]["forward"] if path == "model.layers.3"]

    assert all(len(gathered) == 4 for gathered in last)
    assert told["kept"]["after"] == []


def test_each_process_holds_its_share(told: dict[str, Any]) -> None:
    """Half of every layer's matrices; adapters whole."""
    assert all(2 * local == whole for local, whole in told["resharded"]["local"].values())
    assert told["resharded"]["trained"] == 3 * (2 * 32 + 2 * 32 + 2 * 32 + 2 * 16)


def test_layers_are_compiled_once_when_sharded(told: dict[str, Any]) -> None:
    """One graph without gradient for the first layer, one for the others, one for the loss."""
    assert told["resharded"]["graphs"] <= 4

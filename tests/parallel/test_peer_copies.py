"""Weights gathered by copies out of other processes' memory."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.processes import run_processes
from tests.parallel.training import sharded, write_base
from tlora_fx.host.environment import PEER_COPIES
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.parallel import peer_copies
from tlora_fx.parallel.peer_copies import SideStreams, _sharded_leaves

PROCESSES = 3  # which divide neither the widths nor the vocabulary
PLANS: dict[str, dict[str, Any]] = {"resharded": {}, "kept": {"keep_gathered": True}}
#: Slow.
MORE_PLANS: dict[str, dict[str, Any]] = {"computed again": {"recompute": True}}


def share_on_cpus() -> None:
    """Let processes copy out of each other's shared memory, as GPUs of one node do.

    In small pieces, and dealt to three lanes.
    """
    kind: Any = torch.UntypedStorage

    def opened(handle: Any, _: torch.device) -> torch.Tensor:
        storage = kind._new_shared_filename_cpu(*handle)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    seams: Any = peer_copies
    seams._may_reach = lambda device: True
    seams._identity = lambda device: str(os.getpid())
    seams._handle = lambda one: one.untyped_storage()._share_filename_cpu_()
    seams._open = opened
    seams.PIECE = 7
    SideStreams.lanes = lambda self, device: nullcontext([nullcontext()] * 3)  # type: ignore


def run_rounds(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of two rounds, and what gathers have not let go of."""
    model, runner = sharded(folder, PROCESSES, options)
    rows = [
        pack([JobTokens([tuple(range(n))], [tuple(range(n))]) for n in (size, size + 2)])
        for size in (3, 5, 4)
    ]
    losses = [runner.run(rows, torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    return {
        "losses": torch.stack(losses).tolist(),
        "gradients": [leaf.grad.flatten().tolist() for leaf in leaves if leaf.grad is not None],
        "held": sum(
            _held(model.net.get_submodule(path))
            for path in (*model.layer_order(), "loss", "model.embed_tokens")
        ),
    }  # fmt: skip


def _held(module: nn.Module) -> int:
    """Bytes of whole matrices that a module's gathers have not let go of."""
    wholes = [leaf._local_tensor.fsdp_post_all_gather for leaf in _sharded_leaves(module)
              if hasattr(leaf._local_tensor, "fsdp_post_all_gather")]  # fmt: skip
    return sum(whole.__self__._flat.untyped_storage().size() for whole in wholes)


Told = dict[str, Any]


def run_both(folder: Path, plans: dict[str, dict[str, Any]]) -> dict[str, Told]:
    """Every plan by collectives, then by copies; how many modules gathered by copies."""
    os.environ[PEER_COPIES] = "off"
    collectives = {name: run_rounds(folder, options) for name, options in plans.items()}
    os.environ[PEER_COPIES] = "on"
    share_on_cpus()
    made: list[int] = []
    once = peer_copies.PeerGather.__init__

    def counted(self: Any, *given: Any) -> None:
        made.append(1)
        once(self, *given)

    peer_copies.PeerGather.__init__ = counted  # type: ignore[method-assign]
    copies = {name: run_rounds(folder, options) for name, options in plans.items()}
    return {"collectives": collectives, "copies": copies, "gathers": {"made": len(made)}}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Told]]:
    folder = tmp_path_factory.mktemp("copies")
    write_base(folder)
    return run_processes(PROCESSES, run_both, folder, PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_copies_train_what_collectives_train(told: Any, name: str) -> None:
    """Bit for bit, with shards of unequal sizes, in rounds whose weights are gathered anew."""
    require_same(told, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_PLANS)
def test_copies_train_what_collectives_train_by_more_plans(tmp_path: Path, name: str) -> None:
    """Bit for bit too."""
    write_base(tmp_path)
    require_same(run_processes(PROCESSES, run_both, tmp_path, {name: MORE_PLANS[name]}), name)


def require_same(told: Any, name: str) -> None:
    for process in told:
        by_copies, by_collectives = process["copies"][name], process["collectives"][name]

        assert by_copies["losses"] == by_collectives["losses"]
        assert len(by_copies["gradients"]) > 0
        assert by_copies["gradients"] == by_collectives["gradients"]


def test_whole_weights_are_let_go_of(told: Any) -> None:
    """After a round no module holds what it gathered, and every one has gathered by copies."""
    for process in told:
        assert all(found["held"] == 0 for found in process["copies"].values())
        # Four layers, the loss and the embedding.
        assert process["gathers"] == {"made": 6 * len(PLANS)}


def test_exchanged_shards_are_noticed() -> None:
    """Shards that do not bring along their whole are an error, not weights of before."""
    gather = peer_copies.PeerGather([], [[], []], 0, SideStreams())
    group: Any = None

    with pytest.raises(AssertionError):
        gather(torch.zeros(6), torch.zeros(3), group)


def test_the_log_says_why_weights_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Collectives serve then, which take longer."""

    def refused(tensor: torch.Tensor) -> None:
        raise RuntimeError("no room in shared memory")

    monkeypatch.setattr(peer_copies, "_handle", refused)
    with caplog.at_level("WARNING", logger="tlora_fx.parallel"):
        offer = peer_copies._offer([[torch.zeros(2)]], torch.device("cpu"))

    assert offer is None
    assert "cannot be shared: no room in shared memory" in caplog.text


def test_a_module_without_shards_offers_none() -> None:
    """Plain parameters are no shards."""
    assert _sharded_leaves(nn.Linear(2, 2)) == []

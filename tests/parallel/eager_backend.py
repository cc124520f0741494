"""A backend of `torch.compile` for tests: the overlap schedule, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tlora_fx.parallel.nano_batches import schedule_graph


def eager_backend(seen: list[fx.Graph] | None = None) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs the scheduled graphs operator by operator.

    seen   takes every scheduled graph, forward and backward
    """

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        schedule_graph(module.graph)
        module.recompile()
        if seen is not None:
            seen.append(module.graph)
        return make_boxed_func(module.forward)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        # As Inductor does; the default computes matrix products again whose sum is kept.
        partition_fn=min_cut_rematerialization_partition,
    )
    return backend

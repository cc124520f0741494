"""A stage of torch's pipelining whose micro-batches are rows of any number of tokens.

torch takes the size of every buffer from the first micro-batch. Here each buffer is made when it
is needed, as long as the micro-batch's own row, and let go when it was read; where no adapter
stands below a boundary, no gradient travels over it. What is overridden has the same names and
meaning in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tlora_fx.cost.pipeline_simulation import Action, Kind
from tlora_fx.model.batch import PackedBatch
from tlora_fx.planners.stage_clock import StageClock
from tlora_fx.planners.stages import Hidden, Stage, StageGraph

StageCall = Callable[[Tensor | None, PackedBatch], Tensor]


class RowModule(nn.Module):
    """What torch runs of a stage: it finds a micro-batch's row by its number.

    torch cuts every tensor that it is given into equal micro-batches, tables of a row too; a tensor
    of numbers is all that it may cut. Nor is it shown the stage's modules: it would forget the
    gradients of all that it sees below one of FSDP2's.

    call    runs the stage
    first   whether the stage is the first
    """

    def __init__(self, call: StageCall, first: bool) -> None:
        super().__init__()
        assert not isinstance(call, nn.Module)
        self.call, self.first = call, first
        self.rows: Sequence[PackedBatch] = ()

    def forward(self, given: Tensor, *, number: Tensor) -> Tensor:
        """Run one micro-batch.

        given     the hidden value; in the first stage nothing of use
        number    int64 [1] on the CPU
        returns   as of the stage
        """
        hidden = None if self.first else given
        return self.call(hidden, self.rows[int(number[0])]).contiguous()


class RowStage(PipelineStage):
    """A stage for one number of micro-batches.

    call     runs the stage, where something has to be done around it
    clock    while it is set, times are kept there
    """

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        group: dist.ProcessGroup,
        call: StageCall | None = None,
    ) -> None:
        self.graph: StageGraph = stage.graph
        self.rows_module = RowModule(call or stage.__call__, stage.graph.first)
        self.clock: StageClock | None = None
        super().__init__(
            self.rows_module,
            self.graph.index,
            self.graph.count,
            device,
            input_args=(_example(self.graph.takes, device, self.graph.needs_grad),),
            output_args=(_example(self.graph.hands, device, self.graph.learns),),
            group=group,
        )
        self._nothing = torch.empty(0, device=device)

    @property
    def sends_grad(self) -> bool:
        """Whether the stage below waits for a gradient."""
        return self.graph.needs_grad

    @property
    def gets_grad(self) -> bool:
        """Whether the stage above sends a gradient."""
        return self.graph.learns and not self.graph.last

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a hidden value as long as its row."""
        if self.graph.takes is not None:
            self._make_room(self.args_recv_info[fwd_chunk_id], self.graph.takes, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a gradient as long as its row."""
        if not self.gets_grad:
            return []
        assert self.graph.hands is not None
        self._make_room(self.grad_recv_info[bwd_chunk_id], self.graph.hands, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the hidden value's gradient, where the stage below has a backward."""
        grads = self.bwd_cache.pop(bwd_chunk_id, ())
        if not self.sends_grad:
            return []
        self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in grads)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the hidden value of the stage below in this process."""
        (info,) = self.args_recv_info[mb_index]
        info.buffer = prev_stage_outputs.detach()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradient of the stage above in this process."""
        if self.gets_grad:
            (info,) = self.grad_recv_info[mb_index]
            info.buffer = next_stage_bwd_outputs[0]

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run a micro-batch's forward."""
        with self._timed("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run a micro-batch's backward, where the stage has one."""
        if not self.graph.learns:
            self.bwd_cache[bwd_chunk_id] = (None,)
            self.fwd_cache.pop(bwd_chunk_id)
            return
        with self._timed("B", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def clear_runtime_states(self) -> None:
        """Forget the round before."""
        super().clear_runtime_states()
        self.bwd_cache.clear()

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        (info,) = self.args_recv_info[fwd_chunk_id]
        return (self._taken(info).requires_grad_(self.sends_grad and torch.is_grad_enabled()),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        (info,) = self.grad_recv_info[bwd_chunk_id]
        return (self._taken(info),)

    # Shapes are checked by the stage itself, against each micro-batch's own row.

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        pass

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        pass

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        pass

    def _make_room(self, infos: Sequence[Any], value: Hidden, micro_batch: int) -> None:
        (info,) = infos
        shape = value.shape(self.rows_module.rows[micro_batch])
        info.buffer = torch.empty(shape, dtype=value.dtype, device=self.device)

    def _taken(self, info: Any) -> Tensor:
        """What was received; its memory lives on only where it is needed."""
        tensor: Tensor = info.buffer
        info.buffer = self._nothing
        return tensor

    def _timed(self, kind: Kind, micro_batch: int) -> AbstractContextManager[None]:
        if self.clock is None:
            return nullcontext()
        return self.clock.time(Action(self.graph.index, kind, micro_batch))


def _example(value: Hidden | None, device: torch.device, needs_grad: bool) -> Tensor:
    """Stands for what travels: torch asks it for dtype and for whether gradients travel."""
    if value is None:
        return torch.empty(1, device=device, requires_grad=needs_grad)
    # One token: torch makes a buffer of this size for every micro-batch, which is never used.
    sizes = [size if isinstance(size, int) else 1 for size in value.sizes]
    return torch.empty(sizes, dtype=value.dtype, device=device, requires_grad=needs_grad)

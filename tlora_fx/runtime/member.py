"""A job that trains in a Shared Super-Model: its tensors, its optimizer, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tlora_fx.config.job import Job
from tlora_fx.runtime.adapters.files import adapter_tensors, load_adapter
from tlora_fx.runtime.checkpoints.store import JobState
from tlora_fx.runtime.checkpoints.tensor_file import moved
from tlora_fx.runtime.optim.optimizer import JobOptimizer


class Member:
    """One job of a group; nothing in it reads anything of a neighbour.

    index        its slot in the model
    parameters   by name, as `SuperModel.job_parameters` has them
    scalings     of its branches, as `SuperModel.job_scalings` has them
    steps        optimizer steps from which the schedule takes its length
    step         optimizer steps done
    tokens       tokens of these steps
    """

    def __init__(
        self,
        index: int,
        job: Job,
        parameters: Mapping[str, torch.nn.Parameter],
        scalings: Mapping[str, float],
        steps: int,
    ) -> None:
        self.index, self.job, self.steps = index, job, steps
        self.parameters, self._scalings = dict(parameters), scalings
        self.step = self.tokens = 0
        self.left = False
        self.optimizer = self._optimizer()

    def _optimizer(self) -> JobOptimizer:
        # A stage of a pipeline may hold nothing of a job; its schedule counts all the same.
        nothing = {"": torch.nn.Parameter(torch.zeros(()))}
        return JobOptimizer(self.job, self.parameters or nothing, self.steps, self._scalings)

    def rebind(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Train other tensors with the same numbers: the job's rows lie elsewhere now."""
        tensors, values = self.optimizer.state_tensors(), self.optimizer.state_values()
        self.parameters = dict(parameters)
        self.optimizer = self._optimizer()
        self.optimizer.load_state(tensors, values)

    def depart(self) -> None:
        """Free all tensors: the job's rows are another's soon, and its state is kept apart.

        It has no optimizer from then on.
        """
        self.left, self.parameters = True, {}
        del self.optimizer

    def final_adapter(self) -> Mapping[str, Tensor]:
        """The adapter that the job leaves, under the names of PEFT's files."""
        return adapter_tensors(self.parameters)

    def state(self) -> JobState:
        """All that the job needs to go on."""
        return JobState(
            adapter=adapter_tensors(self.parameters),
            optimizer=self.optimizer.state_tensors(),
            optimizer_values=self.optimizer.state_values(),
            step=self.step,
            micro_step=self.step * self.job.gradient_accumulation_steps,
            tokens=self.tokens,
            cursor={"step": self.step},
        )

    def restore(self, state: JobState, source: str) -> None:
        """Go on from a state.

        source   where it was read, for errors
        raises   AdapterFolderError, OptimizerStateError where it is another job's
        """
        parameters = self.parameters.values()
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        load_adapter(self.parameters, moved(state.adapter, device), source)
        self.optimizer.load_state(moved(state.optimizer, device), state.optimizer_values)
        self.step, self.tokens = state.step, state.tokens

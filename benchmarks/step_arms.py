"""The arms of `step.py`: each trains eight jobs for one step, in its own way, on shared weights."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

import tlora_fx
from benchmarks.interleaved import seconds_of
from benchmarks.step_mixes import ALPHA, SEED, Mix, Shape
from benchmarks.step_packed import ATTENTION, RATE, Packed, llama, stack_adapters
from tlora_fx.compiler import resolve_pipeline
from tlora_fx.model import source
from tlora_fx.ops.float8 import BACKWARDS
from tlora_fx.ops.kernels import dispatch, flash_attention_4, launch, packed, support
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.launching.interrupts import Interrupts


class Arm(Protocol):
    """Something that trains the jobs."""

    made: Made

    @property
    def ups(self) -> list[Tensor]:
        """B of all adapters whose gradients are compared."""

    def load(self, mix: Mix) -> None:
        """Take a mix; not timed."""

    def step(self, count: int = 1) -> float:
        """So many steps of every job with no wait between them; the seconds of one."""

    def launched(self) -> AbstractContextManager[object]:
        """Within it nothing runs as a CUDA graph, so that a profiler sees what started a kernel."""

    def gradients(self, *, eager: bool = False) -> list[Tensor]:
        """What one step gathers, run as it is timed, or eagerly; nothing is trained."""


#: Compiled gradients may be so many times as far from eager ones as rounding takes eager ones from
#: float32's (two errors of that size that know nothing of each other are 1.4 apart), or 1e-5.
ROUNDING_BOUND = 2.0
MIN_BOUND = 1e-5
#: Of a job in a step.
MAX_SEQUENCES = 64
MANY = 10**6
#: What B is drawn with while gradients are compared: it starts at zero, where A has none.
STIRRED = 1e-3
#: Of the norm of one tensor's gradient: one that is lost is 1 off, and may be little of all.
LOST = 0.75
#: In float8 a number that a compiler rounds otherwise falls on another code, a sixteenth apart:
#: compiled gradients may be so many times as far from those of the base as it is as eager ones are.
FLOAT8_BOUND = 1.1
#: The same of one tensor, whose noise two runs draw anew.
FLOAT8_TENSOR_BOUND = 1.5


@contextmanager
def stirred(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within it tensors hold random numbers, the same ones each time."""
    before = [tensor.detach().clone() for tensor in tensors]
    torch.manual_seed(SEED)
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_(std=STIRRED)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


class Ours:
    """The Shared Super-Model as `Trainer` runs it: rows packed on the host, one optimizer a job.

    compiled   layer by layer, by `SuperModel.compile`
    float8     how products in float8 find dx, "" for none
    added      passes of its pipeline beside the usual ones, as `--add-pass` takes them
    within     what its steps run in
    lora       what all jobs' adapters have besides, as PEFT names it
    """

    def __init__(
        self,
        base: tlora_fx.BaseSpec,
        made: Made,
        folder: Path,
        *,
        compiled: bool = False,
        float8: str = "",
        added: Sequence[str] = (),
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        **lora: Any,
    ) -> None:
        self.within = within
        self.shape, self.device, self.float8, self.made = made.shape, made.device, float8, made
        ranks = range(len(made.shape.ranks))
        self.jobs = [_job(base, place, made.shape, lora) for place in ranks]
        quantized = f"quantize-base{{to=float8 products=true backward={float8}}}"
        added = [*added, *([f"{quantized}@before:lower-adapters"] if float8 else [])]
        self.model = tlora_fx.compile(self.jobs, pipeline=resolve_pipeline(None, added))
        self.model.materialize(made.weights, made.device)
        if compiled:
            self.model.compile()
        self.folder = folder
        self.trainer: Any = None
        self.batches: dict[int, list[list[Sample]]] = {}

    def load(self, mix: Mix) -> None:
        """Take a mix as samples, each job's in one micro-batch."""
        self.mix, data = mix, dict[str, JobData]()
        lengths = mix.lengths()
        for index, ids in enumerate(mix.ids(self.shape, "cpu")):
            cut = zip(ids.tolist(), lengths[index], strict=True)
            rows = [Sample(tuple(row[:length]), tuple(row[:length])) for row, length in cut]
            self.batches[index] = [rows]
            data[self.jobs[index].name] = JobData(self.jobs[index], rows, DataReport())
        if self.trainer is not None and self.trainer.graphs is not None:
            self.trainer.graphs.clear()
        self.trainer = tlora_fx.Trainer(
            self.model, output=self.folder, device=self.device, data=data
        )
        self.trainer.prepare(data)

    @property
    def ups(self) -> list[Tensor]:
        """B of all jobs."""
        named = [pair for run in self.trainer.runs for pair in run.parameters.items()]
        return [param for name, param in named if ".lora_B." in name]

    def gradients(self, *, eager: bool = False) -> list[Tensor]:
        """Of all jobs' parameters; a row is captured when it comes again, and then replayed."""
        with ExitStack() as stack:
            stack.enter_context(self.within())
            if eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(self.launched())
            for _ in range(1 if eager else 3):
                for run in self.trainer.runs:
                    run.optimizer.zero_grad()
                self.trainer.gradients(self.batches)
        params = [p for run in self.trainer.runs for p in run.parameters.values()]
        found = [p.grad.clone() for p in params if p.grad is not None]
        for run in self.trainer.runs:
            run.optimizer.zero_grad()
        return found

    def exact_gradients(self) -> list[Tensor]:
        """Of all jobs' parameters, by the base as it is."""
        plain = Ours(self.made.base, self.made, self.made.folder / "plain")
        plain.load(self.mix)
        with stirred(plain.ups):
            return plain.gradients(eager=True)

    def launched(self) -> AbstractContextManager[object]:
        """No row is captured or replayed."""
        graphs = self.trainer.graphs
        return nullcontext() if graphs is None else mock.patch.object(graphs, "most", 0)

    def step(self, count: int = 1) -> float:
        """A round of the trainer each."""
        before = self.trainer.rounds
        with self.within(), Interrupts() as interrupts:
            seconds = seconds_of(lambda: self.trainer._round(interrupts), count)
        if self.trainer.rounds != before + count:
            raise RuntimeError(f"{self.trainer.rounds - before} of {count} rounds trained")
        for run in self.trainer.runs:
            if run.status != "running":
                raise RuntimeError(f"{run.job.name}: {run.status} {run.reason}")
        return seconds


def require_gradients(arm: Arm) -> float | None:
    """Compare an arm's gradients with those of the same code run eagerly; nothing is timed yet.

    returns  how far all of them are off, those in float8 from the base as it is; None where the
             arm is eager itself
    raises   RuntimeError where they differ by more than rounding does, or where one is lost
    """
    with stirred(arm.ups):
        found, expected = arm.gradients(), arm.gradients(eager=True)
    if not expected:
        return None
    exact = arm.exact_gradients() if isinstance(arm, Ours) and arm.float8 else None
    apart, bound = apart_of(found, expected), ROUNDING_BOUND * arm.made.rounding()
    if exact is not None:
        apart, bound = apart_of(found, exact), max(bound, FLOAT8_BOUND * apart_of(expected, exact))
    if not apart <= bound:
        raise RuntimeError(f"it trains nothing: gradients {apart:.3g} off, bound {bound:.3g}")
    for one, eager, true in zip(found, expected, exact or expected, strict=True):
        _require_kept(one, eager, true)
    return apart


def _require_kept(found: Tensor, eager: Tensor, true: Tensor) -> None:
    """Refuse a gradient that is lost, or much further from the true one than the eager one is."""
    if not eager.count_nonzero():
        # Of an expert to which no token went.
        return
    bound = max(LOST, FLOAT8_TENSOR_BOUND * apart_of([eager], [true]))
    off = apart_of([found], [true])
    if not off <= bound or found.norm() < eager.norm() / 2:
        raise RuntimeError(f"a tensor trains nothing: {off:.3g} off, bound {bound:.3g}")


def apart_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of what is expected; nan where that is 0."""
    pairs = list(zip(found, expected, strict=True))
    apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
    whole = sum(float(b.double().square().sum()) for _, b in pairs)
    return float((apart / whole) ** 0.5) if whole else math.nan


class Peft:
    """PEFT, one job after the other: what users do who share a GPU but no model.

    Choosing a job's adapter is not timed: alone, a job would not have to.
    """

    def __init__(self, made: Made) -> None:
        import peft

        self.made, self.shape, self.device = made, made.shape, made.device
        base = llama(made.shape, made.weights, made.device, "sdpa")
        names = [f"j{place}" for place in range(len(made.shape.ranks))]
        configs = [
            peft.LoraConfig(
                r=rank,
                lora_alpha=ALPHA,
                lora_dropout=made.shape.dropout,
                target_modules=made.shape.target_modules,
                target_parameters=list(made.shape.parameters) or None,
            )
            for rank in made.shape.ranks
        ]
        self.model: Any = peft.get_peft_model(
            base, configs[0], adapter_name=names[0], autocast_adapter_dtype=False
        )
        for name, config in zip(names[1:], configs[1:], strict=True):
            self.model.add_adapter(name, config)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(made.device, made.shape.torch_dtype)
        self.model.train()
        self.names, self.ids = names, list[Tensor]()
        self.optimizers = [self._optimizer(name) for name in names]

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        own = [p for known, p in self.model.named_parameters() if f".{name}." in known]
        return torch.optim.AdamW(own, lr=RATE, fused=self.device == "cuda")

    def load(self, mix: Mix) -> None:
        """Take a mix, a batch a job."""
        self.ids = mix.ids(self.shape, self.device)

    @property
    def ups(self) -> list[Tensor]:
        """Nothing is compared."""
        return []

    def gradients(self, *, eager: bool = False) -> list[Tensor]:
        """Nothing is compiled here."""
        return []

    def launched(self) -> AbstractContextManager[object]:
        """Nothing is a graph here."""
        return nullcontext()

    def step(self, count: int = 1) -> float:
        """The steps of the first job, then those of the next."""
        seconds = 0.0
        for name, ids, optimizer in zip(self.names, self.ids, self.optimizers, strict=True):
            self.model.set_adapter(name)

            def train(ids: Tensor = ids, optimizer: torch.optim.Optimizer = optimizer) -> None:
                self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            seconds += seconds_of(train, count)
        return seconds


class PackedArm:
    """A transformers Llama on packed rows: frozen, or with stacked adapters.

    graph   compiled, and the whole step a CUDA graph
    """

    def __init__(
        self, made: Made, *, stacked: bool, compiled: bool = False, graph: bool = False
    ) -> None:
        self.made, self.graph, self.device = made, graph, made.device
        model = llama(made.shape, made.weights, made.device, ATTENTION)
        sites = stack_adapters(model, made.shape) if stacked else []
        if compiled or graph:
            for layer in model.model.layers:
                # Anew for each mix: the best that it can do.
                layer.compile(dynamic=False)
        self.packed = Packed(model, sites, made.shape, made.device)

    def load(self, mix: Mix, pool: Any = None) -> None:
        """Take a mix as one row; its graph shares the memory of a pool's."""
        self.packed.load(mix)
        if self.graph and self.device == "cuda":
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.packed.step()
            torch.cuda.current_stream().wait_stream(side)
            self.packed.capture(pool)

    @property
    def ups(self) -> list[Tensor]:
        """B of the stacked adapters."""
        return [site.b for site in self.packed.sites]

    def gradients(self, *, eager: bool = False) -> list[Tensor]:
        """Of the stacked adapters, or of the frozen model's embeddings."""
        if not eager:
            return self.packed.gradients()
        with torch.compiler.set_stance("force_eager"), self.launched():
            return self.packed.gradients()

    def launched(self) -> AbstractContextManager[object]:
        """The step is not replayed."""
        return mock.patch.object(self.packed, "graph", None)

    def step(self, count: int = 1) -> float:
        """Of the whole row."""
        return seconds_of(self.packed.step, count)


class Alone:
    """Each job by itself on packed rows, one after the other, each step a CUDA graph."""

    def __init__(self, made: Made, *, graph: bool = True) -> None:
        self.made, self.device = made, made.device
        self.arms = []
        for rank in made.shape.ranks:
            own = copy(made)
            own.shape = replace(made.shape, ranks=(rank,))
            self.arms.append(PackedArm(own, stacked=True, graph=graph))

    def load(self, mix: Mix) -> None:
        """Take a mix, a row a job."""
        pool = torch.cuda.graph_pool_handle() if self.device == "cuda" else None
        for arm, batch in zip(self.arms, mix.batches, strict=True):
            arm.load(replace(mix, batches=(batch,)), pool)

    @property
    def ups(self) -> list[Tensor]:
        """B of each job."""
        return [tensor for arm in self.arms for tensor in arm.ups]

    def gradients(self, *, eager: bool = False) -> list[Tensor]:
        """Of each job's adapters."""
        return [tensor for arm in self.arms for tensor in arm.gradients(eager=eager)]

    def launched(self) -> AbstractContextManager[object]:
        """No step is replayed."""
        stack = ExitStack()
        for arm in self.arms:
            stack.enter_context(arm.launched())
        return stack

    def step(self, count: int = 1) -> float:
        """A step of the first job, then of the next."""

        def each() -> None:
            for arm in self.arms:
                arm.packed.step()

        return seconds_of(each, count)


class Made:
    """The base's weights, made once and shared by all arms."""

    def __init__(self, shape: Shape, device: str, folder: Path) -> None:
        from tlora_fx.model.backbone import load_backbone
        from tlora_fx.runtime.adapters.files import base_tensors

        self.shape, self.device, self.folder = shape, device, folder
        shape.config().save_pretrained(folder / "base")
        dtype: Any = shape.dtype
        self.base = tlora_fx.BaseSpec(config=folder / "base", dtype=dtype, seed=SEED)
        # Drawn once: each of the arms would draw its own.
        self.weights = dict(base_tensors(load_backbone(self.base), device))
        self._rounding: float | None = None

    def rounding(self) -> float:
        """How far the dtype takes eager gradients from float32's, of a short sequence a job."""
        if self._rounding is None:
            exact = self.base.model_copy(update={"dtype": "float32"})
            wide = {name: tensor.float() for name, tensor in self.weights.items()}
            found = [self._gradients(*of) for of in ((self.base, self.weights), (exact, wide))]
            self._rounding = max(apart_of(*found), MIN_BOUND)
            del wide
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
            print(f"gradients in {self.shape.dtype}: {self._rounding:.2g} from float32's")
        return self._rounding

    def _gradients(self, base: tlora_fx.BaseSpec, weights: Mapping[str, Tensor]) -> list[Tensor]:
        made = copy(self)
        made.base, made.weights = base, dict(weights)
        arm = Ours(base, made, self.folder / "rounding")
        arm.load(Mix("short", (1,) * len(self.shape.ranks), length=64))
        with stirred(arm.ups):
            return arm.gradients(eager=True)


def _job(
    base: tlora_fx.BaseSpec, place: int, shape: Shape, more: Mapping[str, Any]
) -> tlora_fx.Job:
    lora: dict[str, Any] = {
        "r": shape.ranks[place],
        "lora_alpha": ALPHA,
        "lora_dropout": shape.dropout,
        "target_modules": shape.target_modules,
        **more,
    }
    if shape.parameters:
        lora["target_parameters"] = list(shape.parameters)
    fields: dict[str, Any] = {
        "max_steps": MANY,
        "save_steps": MANY,
        "per_device_train_batch_size": MAX_SEQUENCES,
        "learning_rate": RATE,
        "seed": place,
    }
    return tlora_fx.Job(name=f"job-{place}", base=base, lora=lora, data={"path": "-"}, **fields)


def _compiled(made: Made, name: str, **more: Any) -> Ours:
    return Ours(made.base, made, made.folder / name, compiled=True, **more)


def _gate_and_up_apart(made: Made) -> Ours:
    with mock.patch.object(packed, "WIDEST_TAIL_OF_WIDE", 0):
        return _compiled(made, "ours-apart")


def _activation_apart(made: Made) -> Ours:
    with mock.patch.object(source, "ACTIVATIONS", {}):
        return _compiled(made, "ours-ungated")


def _gradients_summed(made: Made) -> Ours:
    def none() -> AbstractContextManager[object]:
        return mock.patch.object(dispatch, "targets_of", return_value=None)

    return _compiled(made, "ours-summed", within=none)


def _gradients_in_chunks(made: Made) -> Ours:
    @contextmanager
    def of_the_rule() -> Iterator[None]:
        # What other arms have started, and written down, is of other forms.
        support.forget()
        with mock.patch.object(launch, "SHORT_ROW", 0):
            yield
        support.forget()

    return _compiled(made, "ours-chunked", within=of_the_rule)


def _without_flash_attention_4(made: Made) -> Ours:
    def absent() -> AbstractContextManager[object]:
        return mock.patch.object(flash_attention_4, "is_installed", return_value=False)

    return _compiled(made, "ours-without-flash4", within=absent)


ARMS: dict[str, Callable[[Made], Arm]] = {
    "alone-graph": Alone,
    "frozen": lambda made: PackedArm(made, stacked=False),
    "frozen-compiled": lambda made: PackedArm(made, stacked=False, compiled=True),
    "frozen-graph": lambda made: PackedArm(made, stacked=False, graph=True),
    "ours": lambda made: Ours(made.base, made, made.folder / "ours"),
    "ours-compiled": partial(_compiled, name="ours-compiled"),
    "ours-apart": _gate_and_up_apart,
    "ours-ungated": _activation_apart,
    "ours-chunked": _gradients_in_chunks,
    "ours-summed": _gradients_summed,
    "ours-without-flash4": _without_flash_attention_4,
    "ours-dora": partial(_compiled, name="ours-dora", use_dora=True),
    "ours-dropout": partial(_compiled, name="ours-dropout", lora_dropout=0.05),
    **{
        f"ours-float8-{backward}": partial(_compiled, name=f"float8-{backward}", float8=backward)
        for backward in BACKWARDS
    },
    "peft": Peft,
    "stacked": lambda made: PackedArm(made, stacked=True),
    "stacked-compiled": lambda made: PackedArm(made, stacked=True, compiled=True),
    "stacked-graph": lambda made: PackedArm(made, stacked=True, graph=True),
}

"""Starts that PEFT computes from what layers read on a job's own samples: EVA and CorDA.

The samples are the first of the job's first epoch, in the order in which it trains on them. They
run through the base alone, so a start depends on its job, whoever trains beside it. All numbers
are those of PEFT's functions; here they are given batches, and an end.

source   Paischer et al. 2024 (EVA); Yang et al. 2024 (CorDA); PEFT's own code computes both
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tlora_fx.config.job import Job
from tlora_fx.cost.plan import Plan
from tlora_fx.errors import NotElementwise, StartNotComputed
from tlora_fx.ir.graph import PEFT_PREFIX, AdapterSite
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.parallel.apply import shards
from tlora_fx.runtime.adapters.starts import computed_start, needs_data
from tlora_fx.runtime.data.sample_order import lines_of, pad
from tlora_fx.runtime.data.samples import NO_TARGET, JobData, Sample, sample_order
from tlora_fx.runtime.distributed import Ranks
from tlora_fx.runtime.keyed_dropout import choose_attention
from tlora_fx.tracing.adapters import resolve_sites

#: Samples that a start is made of, or all that there are; pairs and packed sequences are one.
SAMPLES = 256
#: Sequences that EVA reads at once; more where these have fewer tokens than the rank.
EVA_BATCH = 4
#: Batches after which EVA has to have converged; it reads them over and over.
EVA_MOST_BATCHES = 256
#: What PEFT's code raises of statistics that it cannot decompose.
_FAILS: tuple[type[Exception], ...] = (
    ValueError, TypeError, IndexError, ZeroDivisionError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)  # fmt: skip


def require_data_starts(model: SuperModel, jobs: Iterable[Job], plan: Plan | None = None) -> None:
    """Refuse starts from data on a base that is not stored whole and as it is; needs no weights.

    plan      that runs the model, where it is known
    raises    StartNotComputed, NotElementwise
    """
    stored = sorted(model.reformed_names())
    for job in filter(needs_data, jobs):
        if plan is not None and shards(plan):
            raise _sharded(job)
        if stored:
            raise StartNotComputed(
                f"job '{job.name}' starts from what the layers of its base read, and a pass "
                "stores these in another form",
                job=job.name,
                found=stored[0],
                help="take another start, or leave the pass out",
            )


def data_starts(
    model: SuperModel, data: Mapping[str, JobData], tell: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Tensor]]:
    """Start values of the jobs that start from their data, by name; see `data_start`.

    data    of all jobs; only those that need it take part
    tell    called with a line a start, before it is made
    raises  StartNotComputed, NotElementwise
    """
    starts = {}
    for name, job_data in data.items():
        job = model.jobs[model.members[name]]
        if needs_data(job):
            count = min(SAMPLES, job_data.count)
            tell(f"{name}: starts from what the base reads on {count} of its samples")
            starts[name] = data_start(model, job, job_data)
    return starts


def agreed_starts(
    model: SuperModel,
    ranks: Ranks,
    data: Mapping[str, JobData],
    going_on: Iterable[str],
    tell: Callable[[str], None],
) -> dict[str, dict[str, Tensor]]:
    """The `data_starts` of a run's jobs on all its processes, as the leader computes them.

    going_on   jobs that have a checkpoint, of which nothing is computed; the leader's count
    tell       called by the leader with a line a start, before it is made
    """
    if not any(needs_data(model.jobs[index]) for index in model.members.values()):
        return {}
    known: dict[str, dict[str, Tensor]] = {name: {} for name in going_on}

    def compute() -> dict[str, dict[str, Tensor]]:
        if not ranks.mesh.leader:
            return {}
        new = {name: each for name, each in data.items() if name not in known}
        return known | data_starts(model, new, tell)

    return ranks.from_leader(ranks.together(compute))


def data_start(model: SuperModel, job: Job, data: JobData) -> dict[str, Tensor]:
    """The tensors that a job's data decides, by PEFT's names of them in a model, on the CPU.

    model    has its weights; the job need not be in it yet
    returns  A [r, in] of EVA; A [2 r, in] and B [out, 2 r] of CorDA, constant halves behind
    raises   StartNotComputed, NotElementwise
    """
    found = resolve_sites(job, model.backbone)
    sites = {path: site for path, site in found.items() if site.rank}
    config: Any = job.start_config()
    config.target_modules, config.exclude_modules = set(sites), None
    config.layers_to_transform = config.layers_pattern = None
    samples = first_samples(data)
    with torch.no_grad():
        try:
            base = _PlainBase(_plain(model, job), job)
            if config.init_lora_weights == "eva":
                tensors = _eva(base, config, samples)
            else:
                tensors = _corda(base, config, samples, model, sites)
        except _FAILS as error:
            raise StartNotComputed(
                f"job '{job.name}' cannot start by {config.init_lora_weights} from its data",
                job=job.name,
                found=f"{type(error).__name__}: {error}",
                help="lower 'r', give more data, or take another start",
            ) from error
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def first_samples(data: JobData) -> list[Sample]:
    """The samples that a start is made of."""
    order = sample_order(data.count, data.job, 0)[:SAMPLES].tolist()
    return [sample for index in order for sample in data.unit(index)]


@dataclass(frozen=True, slots=True)
class _PlainBase:
    """The base alone, called as any user calls it."""

    module: nn.Module
    job: Job

    def __call__(self, batch: Mapping[str, Tensor]) -> None:
        """Run a batch as `batch_of` makes it."""
        from transformers import PreTrainedModel

        if isinstance(self.module, PreTrainedModel):
            mask = batch["attention_mask"]
            self.module(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False)
        else:
            self.module(batch["input_ids"])

    def batch_of(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Ids, labels and mask [B, S]; no labels of a classifier, whose tokens have none."""
        [lines] = lines_of([samples])
        ids, labels, attended, _ = pad(lines)
        batch = {"input_ids": ids, "attention_mask": attended}
        return batch if self.job.base.is_classifier else batch | {"labels": labels}


def _sharded(job: Job) -> NotElementwise:
    return NotElementwise(
        f"job '{job.name}' has a start from its data, for which a process needs the whole base",
        job=job.name,
        found="a plan that shards the base",
        help="choose a plan with shard_base: false, or another start",
    )


def _plain(model: SuperModel, job: Job) -> nn.Module:
    """The base's module on the fused model's own tensors, which are not copied."""
    if any(hasattr(tensor, "full_tensor") for tensor in model.net.parameters()):
        raise _sharded(job)
    backbone = model.backbone
    tensors = [*backbone.model.parameters(), *backbone.model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        value = model.base_tensor_or_value(backbone.names[id(tensor)]).detach()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, requires_grad=False) if is_parameter else value
    plain = copy.deepcopy(backbone.model, memo).eval()
    if backbone.spec.is_classifier:
        # Transformers' own class: ours answers for each token by another way of indexing.
        plain.__class__ = type(plain).__mro__[1]
    choose_attention(plain)
    return plain


# EVA: A is the first right singular vectors of what a layer reads, batch after batch.


def _eva(base: _PlainBase, config: Any, samples: Sequence[Sample]) -> dict[str, Tensor]:
    from peft import get_eva_state_dict

    batches = [base.batch_of(each) for each in _eva_batches(base, config, samples)]
    downs = get_eva_state_dict(
        base.module,
        _Batches(batches, base.job),
        config,
        forward_fn=lambda _, batch: base(batch),
        gather_distributed_inputs=False,
        show_progress_bar=False,
    )
    return {f"{PEFT_PREFIX}{path}.lora_A.default.weight": down for path, down in downs.items()}


def _eva_batches(base: _PlainBase, config: Any, samples: Sequence[Sample]) -> list[list[Sample]]:
    """Neighbours together, so many that EVA counts as many of their tokens as it needs.

    PEFT skips batches of fewer tokens than the rank, and would wait for ever where all are so.
    """
    masked = config.eva_config.use_label_mask and not base.job.base.is_classifier
    batch: list[Sample] = []
    counted = 0
    batches: list[list[Sample]] = []
    for sample in samples:
        batch.append(sample)
        counted += sum(not masked or label != NO_TARGET for label in sample.labels)
        if len(batch) >= EVA_BATCH and counted >= config.r:
            batches.append(batch)
            batch, counted = [], 0
    if not batches and counted >= config.r:
        return [batch]
    if not batches:
        tokens = "trained tokens" if masked else "tokens"
        raise StartNotComputed(
            f"job '{base.job.name}' has too little data to start by eva",
            job=base.job.name,
            expected=f"{config.r} {tokens}, as many as the rank",
            found=f"{counted} in {len(samples)} samples",
            help="give more data, lower 'r', or set eva_config.use_label_mask: false",
        )
    batches[-1] += batch
    return batches


class _Batches:
    """Batches over and over, in PEFT's place of a loader; at some time they end."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]], job: Job) -> None:
        self._batches, self._job = batches, job

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        for number in range(EVA_MOST_BATCHES):
            yield self._batches[number % len(self._batches)]
        raise StartNotComputed(
            f"EVA does not converge on the data of job '{self._job.name}'",
            job=self._job.name,
            expected=f"vectors that stay within {EVA_MOST_BATCHES} batches",
            help="lower 'r' or eva_config.tau, or give more data",
        )


# CorDA: singular vectors of W C, with C the covariance of what a layer reads.


def _corda(
    base: _PlainBase,
    config: Any,
    samples: Sequence[Sample],
    model: SuperModel,
    sites: Mapping[str, AdapterSite],
) -> dict[str, Tensor]:
    from peft.tuners.lora.corda import preprocess_corda

    device = next(base.module.parameters()).device
    # PEFT goes by the kind of the device, which is then the current one.
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def run() -> None:
        # PEFT takes one sequence at a time, without padding.
        for sample in samples:
            batch = base.batch_of([sample])
            base({name: tensor.to(device) for name, tensor in batch.items()})

    with current:
        preprocess_corda(base.module, config, run_model=run)
    tensors = {}
    for path, site in sites.items():
        layer: Any = base.module.get_submodule(path)
        skeleton = model.backbone.model.get_submodule(path)
        halves = computed_start(base.job, skeleton, layer.weight.data, site, layer.eigens)
        for half, value in zip("AB", halves, strict=True):
            tensors[f"{PEFT_PREFIX}{path}.lora_{half}.default.weight"] = value
        del layer.eigens
    return tensors

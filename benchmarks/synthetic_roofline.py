"""A roofline by the sheet: an estimator without any profile, for tests and for comparing policies.

The field notes' synthetic roofline of an 8B base on A100s, by which their table of optimality was
made. One term for compute, with a floor of tokens below which a GPU idles; one for what a group
costs whatever it does; all-reduces of tensor and data parallelism, hidden by nano-batches. Nothing
of it was measured, and its predictions say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tlora_fx.cost.estimator import Layout, Prediction
from tlora_fx.cost.hardware import Cluster, Tier
from tlora_fx.cost.load import COLUMN, Array, Demand, require_demands
from tlora_fx.cost.plan import MeshShape

#: Bytes of a trained number with its gradient and the optimizer's states; of one gradient.
TRAINED_BYTES, GRADIENT_BYTES = 16.0, 4.0
#: Seconds of starting a layer's all-reduce: under tp, and of gradients.
COMM_SECONDS, REDUCE_SECONDS = 20e-6, 50e-6


@dataclass
class SyntheticEstimator:
    """An `Estimator` that needs nothing; every base is the same.

    parameters          of the base
    layers, hidden      of the base
    flops               peak operations a second of a GPU, and `reached` of them
    floor_tokens        what a row costs at least, in tokens
    memory_bytes        of a GPU for weights, adapters and activations
    activation_bytes    of a token, over all tensor-parallel processes
    node_bandwidth, network_bandwidth   bytes a second of a ring
    group_seconds       of a step, whatever it does
    fused_seconds       of adapters in shared kernels, and of each job among them
    unfused_seconds     of each job, where adapters run one after the other
    nano_batches        numbers to choose from
    evaluations         how many (group, GPUs) pairs were asked for
    """

    cluster: Cluster = field(default_factory=lambda: Cluster(128, gpu="a100"))
    parameters: float = 8.03e9
    layers: int = 32
    hidden: int = 4096
    flops: float = 312e12
    reached: float = 0.55
    floor_tokens: float = 250.0
    memory_bytes: float = 72e9
    activation_bytes: float = 3e6
    node_bandwidth: float = 200e9
    network_bandwidth: float = 20e9
    group_seconds: float = 0.011
    fused_seconds: tuple[float, float] = (0.002, 0.0001)
    unfused_seconds: float = 0.0067
    nano_batches: Sequence[int] = (1, 2, 4, 8)
    nano_seconds: float = 0.002
    tp: Sequence[int] = (1, 2, 4, 8)
    fused: bool = True
    evaluations: int = 0

    def __post_init__(self) -> None:
        self._solo: dict[tuple[Demand, int], float] = {}

    def seconds(self, base: str, demands: Array, gpus: Array, tiers: list[Tier]) -> Array:
        """Seconds of one step of each of n groups; inf where none fits.

        demands   [n, 15]; `samples`, `tokens`, `jobs`, `parameters` and what evaluations and
                  answers take count
        gpus      [n], all of which are used
        tiers     [n]
        raises    DemandWrong
        """
        self.evaluations += len(demands)
        count = np.asarray(gpus, dtype=np.float64)
        require_demands(demands, count)
        far = np.array([tier in {"rack", "cluster"} for tier in tiers])
        each = [self._total(self._terms(demands, count, far, tp)) for tp in self.tp]
        return np.asarray(np.min(each, axis=0))

    def busy(self, base: str, demands: Array, gpus: Array, seconds: Array) -> Array:
        """The part of the reachable peak that each of n groups uses, 0 to 1."""
        needed = 4 * self.parameters * demands[:, COLUMN["tokens"]]
        with np.errstate(divide="ignore", invalid="ignore"):
            found = needed / (seconds * gpus * self.flops * self.reached)
        return np.where(np.isfinite(seconds), np.clip(found, 0.0, 1.0), 0.0)

    def explain(self, base: str, demand: Demand, gpus: int, tier: Tier) -> Prediction:
        """Prediction of one group's step, term by term."""
        row, count = demand.row()[None], np.array([float(gpus)])
        require_demands(row, count)
        far = np.array([tier in {"rack", "cluster"}])
        every = {tp: self._terms(row, count, far, tp) for tp in self.tp}
        tp = min(every, key=lambda size: float(self._total(every[size])[0]))
        terms, memory_terms = every[tp], self._memory_terms(row, count, tp)
        memory = {name: float(value[0]) for name, value in memory_terms.items()}
        seconds = float(self._total(terms)[0])
        if not np.isfinite(seconds):
            need, has = sum(memory.values()) / 1e9, self.memory_bytes / 1e9
            why = f"needs {need:.1f} GB of {has:.1f} on {gpus} GPUs"
            return Prediction(seconds, None, sum(memory.values()), {}, memory, why_not=why)
        dp = int(min(gpus // tp, max(demand.samples, 1)))
        busy = self.busy(base, row, count, np.array([seconds]))
        return Prediction(
            seconds=seconds,
            layout=Layout(MeshShape(dp=dp, tp=tp)),
            memory_bytes=sum(memory.values()),
            terms={name: float(value[0]) for name, value in terms.items()},
            memory=memory,
            busy=float(busy[0]),
            estimated=True,
        )

    def solo(self, base: str, demand: Demand, gpus: int) -> float:
        """Seconds of one step of a job alone on the GPUs it asked for; cached, not counted."""
        key = (demand, gpus)
        if key not in self._solo:
            tier = self.cluster.min_tier(gpus)
            asked = self.evaluations
            found = self.seconds(base, demand.row()[None], np.array([gpus]), [tier])
            self.evaluations = asked
            self._solo[key] = float(found[0])
        return self._solo[key]

    def _row_tokens(self, demands: Array, gpus: Array, tp: int) -> tuple[Array, Array]:
        """Replicas, and the tokens of the busiest one."""
        samples = np.maximum(demands[:, COLUMN["samples"]], 1.0)
        dp = np.minimum(np.maximum(gpus // tp, 1.0), samples)
        return dp, np.ceil(samples / dp) * demands[:, COLUMN["tokens"]] / samples

    def _memory_terms(self, demands: Array, gpus: Array, tp: int) -> dict[str, Array]:
        """Bytes of a GPU [n]."""
        _, tokens = self._row_tokens(demands, gpus, tp)
        return {
            "base": np.full(len(tokens), 2 * self.parameters / tp),
            "adapters": demands[:, COLUMN["parameters"]] * TRAINED_BYTES / tp,
            "activations": self.activation_bytes * tokens / tp,
        }

    def _terms(self, demands: Array, gpus: Array, far: Array, tp: int) -> dict[str, Array]:
        """Seconds [n] under one size of tp; infinite where it does not fit."""
        dp, tokens = self._row_tokens(demands, gpus, tp)
        jobs, trained = demands[:, COLUMN["jobs"]], demands[:, COLUMN["parameters"]]
        used = 4 * self.parameters * (tokens + self.floor_tokens)
        compute = used / (tp * self.flops * self.reached)
        whole, each = self.fused_seconds if self.fused else (0.0, self.unfused_seconds)
        hidden_bytes = tokens * self.hidden * 2 * 2 * (tp - 1) / tp
        comm = self.layers * 4 * (COMM_SECONDS + hidden_bytes / self.node_bandwidth) * (tp > 1)
        bandwidth = np.where(far, self.network_bandwidth, self.node_bandwidth)
        gradients = trained * GRADIENT_BYTES * 2 * (dp - 1) / dp / tp
        reduce = (dp > 1) * (REDUCE_SECONDS * self.layers + gradients / bandwidth)
        hidden = self._overlap(compute, comm + reduce)
        rows, evaluated, decoding = (
            demands[:, COLUMN[name]]
            for name in ("evaluation_rows", "evaluation_tokens", "decoding_steps")
        )
        # A forward is half of a row without gradients of weights.
        forward = 2 * self.parameters / (tp * self.flops * self.reached)
        alone = decoding * self.floor_tokens * (tp == 1)
        fits = sum(self._memory_terms(demands, gpus, tp).values()) <= self.memory_bytes
        possible = fits & (gpus >= tp)
        return {
            "group": np.where(possible, self.group_seconds, np.inf),
            "adapters": whole + each * jobs,
            "base": compute,
            "tensor-parallel": comm + np.zeros_like(compute),
            "reduce": reduce,
            "overlap": hidden,
            "evaluation": forward * (evaluated + rows * self.floor_tokens) / dp,
            "sampling": forward * alone,
        }

    def _overlap(self, compute: Array, comm: Array) -> Array:
        """What the best number of nano-batches saves, never positive."""
        more, less = np.maximum(compute, comm), np.minimum(compute, comm)
        each = [more + less / n + self.nano_seconds * (n - 1) for n in self.nano_batches]
        return np.where(comm > 0, np.minimum(np.min(each, axis=0) - more - less, 0.0), 0.0)

    @staticmethod
    def _total(terms: dict[str, Array]) -> Array:
        return np.asarray(sum(terms.values()))

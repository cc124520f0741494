"""Where a job's adapter starts, and how PEFT names it in its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tlora_fx.config.job import Job
from tlora_fx.errors import AdapterFolderError, nearest
from tlora_fx.ir.graph import AdapterSite
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops import site_id
from tlora_fx.part import Shard
from tlora_fx.runtime.adapter_files import read_adapter
from tlora_fx.runtime.weights import canonical_names, draw
from tlora_fx.tracing.export import PEFT_PREFIX


def start_adapters(model: SuperModel) -> None:
    """Give every job its first adapter: the folder it continues, or a draw.

    A draw is a function of the job's seed and the site, whatever else the job targets. Copies of
    the base's own tensors start as the base has them; DoRA's magnitudes as the norms of the
    weights that they scale. Where a process holds a piece of a tensor, it is that piece of what
    one process would have.

    raises    AdapterFolderError when a folder does not fit the job's sites
    """
    for job in model.jobs:
        parameters, shards = model.job_parameters(job.name), model.shards(job.name)
        if job.adapter is not None:
            tensors, whole = read_adapter(job.adapter).tensors, model.part.held is None
            load_adapter(parameters, tensors, str(job.adapter), shards, whole=whole)
            continue
        starter = _Starter(model, job)
        # Magnitudes read A and B, so they come last.
        for name in sorted(parameters, key=lambda name: "magnitude" in name):
            value = starter.value(name, parameters, shards[name])
            with torch.no_grad():
                parameters[name].copy_(value)


def saved_name(name: str) -> str:
    """PEFT's name of a trained tensor in a model, as its adapter files have it."""
    name = name.replace(".modules_to_save.default.", ".")
    name = name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
    return name.replace(".default", "")


def adapter_tensors(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """A job's adapter under the names of PEFT's adapter files: copies, contiguous."""
    return {
        saved_name(name): parameter.detach().clone(memory_format=torch.contiguous_format)
        for name, parameter in parameters.items()
    }


def load_adapter(
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    source: str,
    shards: Mapping[str, Shard | None] | None = None,
    *,
    whole: bool = True,
) -> None:
    """Copy an adapter file's tensors into a job's parameters.

    shards    by the parameters' names, which piece of the file's tensor each is
    whole     whether the parameters are all that the job trains, and none is in another process
    raises    AdapterFolderError for tensors that are missing, unknown or of another shape
    """
    shards = shards or {}
    wanted = {
        saved_name(name): (parameter, shards.get(name)) for name, parameter in parameters.items()
    }
    for name in [*wanted, *(tensors if whole else ())]:
        mine = _whole_shape(*wanted[name]) if name in wanted else None
        theirs = tuple(tensors[name].shape) if name in tensors else None
        if mine is None or mine != theirs:
            raise AdapterFolderError(
                "an adapter does not fit the job's sites",
                folder=source,
                tensor=name,
                expected=mine,
                found=theirs,
                nearest=nearest(name, wanted if mine is None else tensors),
                help="continue an adapter only on the base that it was trained on",
            )
    with torch.no_grad():
        for name, (parameter, shard) in wanted.items():
            parameter.copy_(tensors[name] if shard is None else shard.of(tensors[name]))


def _whole_shape(parameter: Tensor, shard: Shard | None) -> tuple[int, ...]:
    """The shape of the tensor that a parameter is, or is a piece of."""
    shape = tuple(parameter.shape)
    return shape if shard is None else shard.full_shape(shape)


class _Starter:
    """Computes the first value of each of a job's tensors."""

    def __init__(self, model: SuperModel, job: Job) -> None:
        self.model, self.job = model, job
        index = model.group.job_names.index(job.name)
        self.sites = model.group.jobs[index].sites
        self.canonical = canonical_names(model.backbone)
        self.init = job.lora_config().init_lora_weights

    def value(
        self, name: str, parameters: Mapping[str, nn.Parameter], shard: Shard | None
    ) -> Tensor:
        """What the tensor of this PEFT name starts as, or a piece of it."""
        parameter: Tensor = parameters[name]
        if shard is not None:
            parameter = parameter.new_empty(_whole_shape(parameter, shard))
        whole = self._whole(name, parameter, parameters)
        return whole if shard is None else shard.of(whole)

    def _whole(
        self, name: str, parameter: Tensor, parameters: Mapping[str, nn.Parameter]
    ) -> Tensor:
        path = name.removeprefix(PEFT_PREFIX)
        if "lora_magnitude_vector" in name:
            return self._magnitude(name, path, parameters)
        rules: dict[str, Callable[[Tensor, str], Tensor]] = {
            ".lora_A.": self._down,
            ".lora_B.": self._up,
            ".lora_embedding_A.": self._embedding_a,
            ".lora_embedding_B.": self._embedding_b,
        }
        for part, rule in rules.items():
            if part in name:
                return rule(parameter, path)
        own = path.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".")
        return self.model.base_tensor_or_value(self.canonical[own])

    def _down(self, like: Tensor, path: str) -> Tensor:
        if self.init == "gaussian":
            return self._normal(like, path, 1 / like.shape[0])
        return self._uniform(like, path, like.shape[1])

    def _up(self, like: Tensor, path: str) -> Tensor:
        if self.init is not False:
            return torch.zeros_like(like)
        site = self.sites[path.partition(".lora_B.")[0]]
        return self._uniform(like, path, site.rank)

    def _embedding_a(self, like: Tensor, path: str) -> Tensor:
        return self._normal(like, path, 1.0) if self.init is False else torch.zeros_like(like)

    def _embedding_b(self, like: Tensor, path: str) -> Tensor:
        return self._normal(like, path, 1.0)

    def _uniform(self, like: Tensor, path: str, fan_in: int) -> Tensor:
        """Kaiming uniform with a = sqrt(5), as PEFT starts A: bound 1 / sqrt(fan_in)."""
        return draw(like, 1 / math.sqrt(3 * fan_in), self.job.seed, path, like.device)

    def _normal(self, like: Tensor, path: str, deviation: float) -> Tensor:
        generator = torch.Generator().manual_seed((self.job.seed << 31) + site_id(path))
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64) * deviation
        return drawn.to(like.device, like.dtype)

    def _magnitude(self, name: str, path: str, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        module_path = path.partition(".lora_magnitude_vector")[0]
        site: AdapterSite = self.sites[module_path]
        weight = self.model.base_tensor_or_value(self.canonical[f"{module_path}.weight"])
        stem = f"{PEFT_PREFIX}{module_path}."
        if f"{stem}lora_embedding_A.default" in parameters:
            a = parameters[f"{stem}lora_embedding_A.default"]
            b = parameters[f"{stem}lora_embedding_B.default"]
        else:
            a = parameters[f"{stem}lora_A.default.weight"]
            b = parameters[f"{stem}lora_B.default.weight"]
        oriented = weight.to(a.dtype)
        if self._stored_in_out(module_path):
            oriented = oriented.t()
        norms: Tensor = torch.linalg.norm(oriented + site.scaling * (b.to(a.dtype) @ a), dim=1)
        return norms

    def _stored_in_out(self, path: str) -> bool:
        """Whether a module stores its weight [in, out], as Conv1D and embeddings do."""
        from transformers.pytorch_utils import Conv1D

        module = self.model.backbone.model.get_submodule(path)
        return isinstance(module, (nn.Embedding, Conv1D))

"""Where a job's adapter starts, and how PEFT names it in its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tlora_fx.errors import AdapterFolderError, nearest
from tlora_fx.graph import AdapterSite
from tlora_fx.job import Job
from tlora_fx.ops import site_id
from tlora_fx.runtime.adapter_files import read_adapter
from tlora_fx.runtime.weights import canonical_names, draw
from tlora_fx.supermodel import SuperModel
from tlora_fx.tracing.export import PEFT_PREFIX


def start_adapters(model: SuperModel) -> None:
    """Give every job its first adapter: the folder it continues, or a draw.

    A draw is a function of the job's seed and the site, whatever else the job targets. Copies of
    the base's own tensors start as the base has them; DoRA's magnitudes as the norms of the
    weights that they scale.

    raises    AdapterFolderError when a folder does not fit the job's sites
    """
    for job in model.jobs:
        parameters = model.job_parameters(job.name)
        if job.adapter is not None:
            load_adapter(parameters, read_adapter(job.adapter).tensors, str(job.adapter))
            continue
        starter = _Starter(model, job)
        # Magnitudes read A and B, so they come last.
        for name in sorted(parameters, key=lambda name: "magnitude" in name):
            with torch.no_grad():
                parameters[name].copy_(starter.value(name, parameters))


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
    parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Copy an adapter file's tensors into a job's parameters.

    raises    AdapterFolderError for tensors that are missing, unknown or of another shape
    """
    wanted = {saved_name(name): parameter for name, parameter in parameters.items()}
    for name in [*wanted, *tensors]:
        mine, theirs = wanted.get(name), tensors.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            raise AdapterFolderError(
                "an adapter does not fit the job's sites",
                folder=source,
                tensor=name,
                expected=None if mine is None else tuple(mine.shape),
                found=None if theirs is None else tuple(theirs.shape),
                nearest=nearest(name, wanted if mine is None else tensors),
                help="continue an adapter only on the base that it was trained on",
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


class _Starter:
    """Computes the first value of each of a job's tensors."""

    def __init__(self, model: SuperModel, job: Job) -> None:
        self.model, self.job = model, job
        index = model.group.job_names.index(job.name)
        self.sites = model.group.jobs[index].sites
        self.canonical = canonical_names(model.backbone)
        self.init = job.lora_config().init_lora_weights

    def value(self, name: str, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """What the tensor of this PEFT name starts as."""
        parameter = parameters[name]
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

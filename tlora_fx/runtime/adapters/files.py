"""PEFT adapter folders: read, written, and the values that a job's adapter starts from."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from tlora_fx.config.adapter_folder import CONFIG, WEIGHTS, read_adapter_config
from tlora_fx.config.base_files import require_weight_files
from tlora_fx.config.base_spec import HEADS, BaseSpec
from tlora_fx.config.job import Job
from tlora_fx.errors import AdapterFolderError, BaseNotLoadable, SuperModelMisuse, first_of, nearest
from tlora_fx.host.durable import sync_folder, write_synced
from tlora_fx.ir.graph import PEFT_PREFIX, AdapterSite
from tlora_fx.ir.storage import Shard
from tlora_fx.model.backbone import Backbone, load_config, model_factory
from tlora_fx.model.late_tensors import LateTensor, LoadedTensors, MergesLater
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.ops import site_id, uniform_at, uniform_rows
from tlora_fx.runtime.adapters.starts import computed_start, needs_data, start_of_kind
from tlora_fx.runtime.checkpoints.tensor_file import tensor_bytes
from tlora_fx.tracing.adapters import config_with_targets, trained_tokens

if TYPE_CHECKING:
    from peft import PeftConfig


# PEFT adapter folders: written so that `PeftModel.from_pretrained` loads them, read safely.


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Contents of a PEFT adapter folder.

    fields    its LoraConfig fields, validated as a job's `lora` is
    tensors   under the names of its safetensors file
    """

    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def write_adapter(
    folder: Path | str,
    tensors: Mapping[str, Tensor],
    config: PeftConfig,
    base_name: str | None = None,
) -> None:
    """Write or replace a PEFT adapter folder; other files in it stay.

    tensors     by the names of PEFT's `get_peft_model_state_dict`; views are copied
    config      written by PEFT's own code, with inference mode on, as PEFT does
    base_name   hub id or folder of the base, kept when None
    raises      AdapterFolderError when the disk refuses; an adapter written before stays whole
    """
    target = Path(folder)
    fresh: Path | None = None
    try:
        target.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".adapter.tmp-", dir=target))
        write_synced(fresh / CONFIG, config_bytes(config, base_name))
        write_synced(fresh / WEIGHTS, tensor_bytes(tensors))
        # The weights come last: a folder that has them is complete.
        for name in (CONFIG, WEIGHTS):
            (fresh / name).replace(target / name)
        sync_folder(target)
    except OSError as error:
        raise AdapterFolderError(
            "an adapter could not be written",
            folder=target,
            reason=error,
            help="free space or mend the permissions, then go on with --resume",
        ) from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def read_adapter(folder: Path | str, task: str = "CAUSAL_LM") -> AdapterFolder:
    """Read a PEFT adapter folder, from safetensors only.

    task     what its base does, in PEFT's words

    raises   AdapterFolderError when a file is missing or damaged, the weights are only a pickle,
             or the adapter is none that tlora-fx trains
    """
    source = Path(folder)
    fields = read_adapter_config(source, task)
    try:
        tensors = safetensors.torch.load_file(source / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterFolderError(
            f"{WEIGHTS} cannot be read",
            folder=source,
            found=error,
            help="save the adapter again with PEFT's save_pretrained",
        ) from error
    return AdapterFolder(fields, tensors)


def config_bytes(config: PeftConfig, base_name: str | None) -> bytes:
    """The content of an adapter folder's config; see `write_adapter`."""
    saved = _saved_config(config, base_name)
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        fields = json.loads((Path(folder) / CONFIG).read_text("utf-8"))
    # Of several patterns PEFT takes the first that fits, and its own code sorts them by name.
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(saved, name, None):
            fields[name] = dict(getattr(saved, name))
    return json.dumps(fields, indent=2).encode()


def _saved_config(config: PeftConfig, base_name: str | None) -> PeftConfig:
    saved = copy.deepcopy(config)
    saved.inference_mode = True
    if base_name is not None:
        saved.base_model_name_or_path = base_name
    # Sets come out in an order that changes from run to run.
    for name in ("target_modules", "exclude_modules", "target_parameters"):
        if isinstance(getattr(saved, name, None), set):
            setattr(saved, name, sorted(getattr(saved, name)))
    return saved


# The base's weights: loaded by transformers, drawn at random, or taken from a given module.

PIECE = 1 << 22
#: What adapters on one expert have in their names, before experts became one parameter.
SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
FACTOR = re.compile(r"\.lora_(embedding_)?[AB]\.")


def base_tensors(backbone: Backbone, device: torch.device | str = "cpu") -> Mapping[str, Tensor]:
    """All tensors of a base by canonical name; random ones are drawn when they are asked for.

    device    where random weights are drawn; what is loaded stays on the CPU
    raises    BaseNotLoadable when the checkpoint cannot be read
    """
    spec = backbone.spec
    if spec.module is not None:
        return dict(backbone.values)
    if spec.model is not None:
        return _loaded(backbone)
    return _Drawn(backbone, device)


def _loaded(backbone: Backbone) -> LoadedTensors:
    spec = backbone.spec
    # What has been changed since the run's start is seen here.
    require_weight_files(spec)
    config = {"config": load_config(spec)} if spec.is_classifier else {}
    later = MergesLater()
    try:
        try:
            with later:
                model, info = _from_checkpoint(spec, backbone.config, config)
        except Exception:  # what a library does with a tensor that has no memory is not known
            if not later.was_used:
                raise
            later = MergesLater()
            model, info = _from_checkpoint(spec, backbone.config, config)
    except Exception as error:  # whatever a library raises of a file that it did not expect
        raise BaseNotLoadable(
            "the base's weights cannot be loaded",
            base=spec.model,
            found=error,
            help="give a folder or hub id with *.safetensors; pickled weights are not read",
        ) from error
    absent = {*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])}
    fresh = {name for name in absent if spec.is_classifier and _is_of_head(name)}
    if missing := sorted(absent - fresh):
        raise BaseNotLoadable(
            "the base's checkpoint lacks tensors, or has them in other shapes",
            base=spec.model,
            found=first_of(missing, 5),
            help="give the checkpoint that belongs to the config; nothing is drawn in its place",
        )
    canonical = canonical_names(backbone)
    state = model.state_dict()
    loaded: dict[str, Tensor | LateTensor] = dict(backbone.values)
    for name, tensor in state.items():
        if name in canonical:
            loaded[canonical[name]] = later.late(tensor) or tensor
    drawn = _Drawn(backbone, "cpu")
    return LoadedTensors(loaded | {name: drawn[name] for name in sorted(fresh)})


def _from_checkpoint(spec: BaseSpec, given: Any, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model of transformers with a checkpoint's weights, and what it says of them."""
    with without_bars(str(spec.model)):
        model, info = model_factory(spec, given).from_pretrained(
            str(spec.model),
            **config,
            output_loading_info=True,
            dtype=getattr(torch, spec.dtype),
            use_safetensors=True,
            trust_remote_code=spec.trust_remote_code,
        )
    return model, info


@contextmanager
def without_bars(source: str) -> Iterator[None]:
    """Inside, transformers draws no bars of a model that lies here; downloads have theirs."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    if not (Path(source).is_dir() and logging.is_progress_bar_enabled()):
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _is_of_head(name: str) -> bool:
    """Whether a tensor belongs to a classifier's head, which a checkpoint need not have."""
    return any(part.endswith(HEADS) for part in name.split(".")[:-1])


def plain_base(backbone: Backbone) -> nn.Module:
    """The base as plain transformers builds it, with the weights that the fused model has."""
    spec = backbone.spec
    if spec.module is not None:
        module: nn.Module = copy.deepcopy(spec.module)
        return module
    factory = model_factory(spec, backbone.config)
    dtype = getattr(torch, spec.dtype)
    if spec.model is not None and not spec.is_classifier:
        require_weight_files(spec)
        with without_bars(spec.model):
            loaded: nn.Module = factory.from_pretrained(
                spec.model, dtype=dtype, use_safetensors=True,
                trust_remote_code=spec.trust_remote_code,
            )  # fmt: skip
        return _with_any_product(loaded)
    model: nn.Module = factory.from_config(
        load_config(spec), dtype=dtype, trust_remote_code=spec.trust_remote_code
    )
    canonical = canonical_names(backbone)
    drawn = base_tensors(backbone)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn[canonical[name]])
    return _with_any_product(model)


def own_copy(base: nn.Module) -> nn.Module:
    """The module tree anew over the same frozen matrices, so that a large base is held once.

    Vectors are copied: PEFT trains and loads biases of the base's own.
    """
    memo: dict[int, Any] = {
        id(param): nn.Parameter(param.detach(), requires_grad=False)
        for param in base.parameters()
        if param.dim() > 1
    }
    memo |= {id(buffer): buffer for buffer in base.buffers()}
    return copy.deepcopy(base, memo)


def _with_any_product(model: Any) -> nn.Module:
    """The model; in float64, where torch multiplies no groups of experts, by a loop over them."""
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")
    plain: nn.Module = model
    return plain


def canonical_names(backbone: Backbone) -> Mapping[str, str]:
    """Every name of a base's parameters and buffers, ties included, to the canonical one."""
    model = backbone.model
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: backbone.names[id(tensor)] for name, tensor in named}


class _Drawn(Mapping[str, Tensor]):
    """Random matrices, a function of seed, name and index only, so any sharding draws the same.

    Uniform with the standard deviation of the config's initializer_range; vectors start as the
    model's own code starts them. A matrix is drawn when it is asked for, each time anew.
    """

    def __init__(self, backbone: Backbone, device: torch.device | str) -> None:
        self._parameters = dict(backbone.model.named_parameters())
        self._values, self._device = backbone.values, device
        self._seed = backbone.spec.seed
        self._deviation = getattr(backbone.config, "initializer_range", None) or 0.02

    def __getitem__(self, name: str) -> Tensor:
        if name in self._values:
            return self._values[name]
        like = self._parameters[name]
        return draw(like, self._deviation, self._seed, name, self._device)

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._parameters), **dict.fromkeys(self._values)})

    def __len__(self) -> int:
        return len({*self._parameters, *self._values})


def draw(
    like: Tensor, deviation: float, seed: int, name: str, device: torch.device | str = "cpu"
) -> Tensor:
    """Uniform random numbers of mean 0, equal on every device.

    like         shape and dtype of the result
    deviation    standard deviation
    seed, name   key, in [0, 2**32), and what tells tensors of one key apart
    """
    flat = torch.empty(like.numel(), dtype=like.dtype, device=device)
    width = 2 * math.sqrt(3) * deviation
    for start in range(0, like.numel(), PIECE):
        index = torch.arange(start, min(start + PIECE, like.numel()), device=device)
        flat[start : start + PIECE] = (uniform_at(index, (seed, site_id(name))) - 0.5) * width
    return flat.view(like.shape)


#: By a job's name, what its data decides of its start, by the names of its parameters.
DataStarts = Mapping[str, Mapping[str, Tensor]]


def start_adapters(model: SuperModel, starts: DataStarts | None = None) -> None:
    """Give every job its first adapter: the folder it continues, or a draw.

    A draw is a function of the job's seed and the site, whatever else the job targets. Copies of
    the base's own tensors start as the base has them; DoRA's magnitudes as the norms of the
    weights that they scale. Where a process holds a piece of a tensor, it is that piece of what
    one process would have.

    starts    of the jobs that start from their data, as `data_starts` computes them; an empty
              mapping where a job's start does not matter, which is then PEFT's default
    raises    AdapterFolderError when a folder does not fit the job's sites; SuperModelMisuse for
              a job that starts from its data, and is not in `starts`
    """
    for index in model.members.values():
        job = model.jobs[index]
        start_adapter(model, job, (starts or {}).get(job.name))


def start_adapter(model: SuperModel, job: Job, start: Mapping[str, Tensor] | None = None) -> None:
    """Give one job its first adapter, as `start_adapters`."""
    if start is None and needs_data(job):
        raise SuperModelMisuse(
            f"job '{job.name}' starts from its data, and none is at hand",
            job=job.name,
            help="use tlora_fx.Trainer, or hand over what data_starts computes",
        )
    parameters, shards = model.job_parameters(job.name), model.shards(job.name)
    if job.adapter is not None:
        tensors, whole = continued_adapter(model, job), model.part.held is None
        load_adapter(parameters, tensors, str(job.adapter), shards, whole=whole)
        if job.has_adapter_reference:
            model.keep_reference(job.name)
        return
    starter = _Starter(model, job)
    if not job.is_lora:
        starter.start_as_kind(parameters)
        return
    rest = set(parameters) - _start_together(starter, parameters, shards)
    for name, tensor in (start or {}).items():
        with torch.no_grad():
            parameters[name].copy_(tensor)
        rest.discard(name)
    if starter.is_computed:
        rest -= starter.start_by_peft(parameters)
    # Magnitudes read A and B, so they come last. The order of the parameters is that of all
    # processes, which gather weights of a sharded base in it; that of a set is not.
    left = [name for name in parameters if name in rest]
    for name in sorted(left, key=lambda name: "magnitude" in name):
        value = starter.value(name, parameters, shards[name])
        with torch.no_grad():
            parameters[name].copy_(value)


@torch.no_grad()
def _start_together(
    starter: _Starter,
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, Shard | None],
) -> set[str]:
    """Start the A and B of linears that start as PEFT's do by default, many at once.

    Each by itself takes a GPU's host a hundred launches. Values are bitwise those of `_Starter`.

    returns   the names that were started
    """
    if starter.init is not True or starter.is_computed:
        return set()
    ups = [name for name in parameters if ".lora_B." in name]
    if ups:
        torch._foreach_zero_([parameters[name] for name in ups])
    downs: dict[tuple[int, ...], list[str]] = {}
    for name, parameter in parameters.items():
        if ".lora_A." in name and shards[name] is None:
            downs.setdefault(tuple(parameter.shape), []).append(name)
    for shape, names in downs.items():
        most = max(1, PIECE // math.prod(shape))
        for start in range(0, len(names), most):
            some = names[start : start + most]
            sites = [site_id(starter.key(name)) for name in some]
            device = parameters[some[0]].device
            rows = uniform_rows(math.prod(shape), starter.job.seed, sites, device)
            # The deviation of `draw`, in its order of operations.
            values = (rows - 0.5) * (2 * math.sqrt(3) * _kaiming(shape[1]))
            torch._foreach_copy_(
                [parameters[name] for name in some], list(values.view(-1, *shape).unbind())
            )
    return {*ups, *(name for names in downs.values() for name in names)}


def _kaiming(fan_in: int) -> float:
    """The deviation with which PEFT starts A: bound 1 / sqrt(fan_in), from a = sqrt(5)."""
    return 1 / math.sqrt(3 * fan_in)


def continued_adapter(model: SuperModel, job: Job) -> dict[str, Tensor]:
    """The tensors of the folder that a job continues.

    Beside an adapter on an embedding or a head, PEFT writes the base's own matrix. It is left out.

    model     has its weights
    raises    AdapterFolderError when the folder's matrix is not the base's
    """
    assert job.adapter is not None
    tensors = read_adapter(job.adapter, job.base.task).tensors
    trained = {saved_name(name) for name in model.job_parameters(job.name)}
    if any(SINGLE_EXPERT.search(name) for name in tensors):
        tensors = _fused_experts(model, job, tensors)
    canonical = canonical_names(model.backbone)
    for name in [name for name in tensors if name not in trained]:
        base_name = canonical.get(name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."))
        if base_name is None:
            continue
        frozen = tensors.pop(name)
        if model.has_base_tensor(base_name) and not _equal(model, base_name, frozen):
            raise AdapterFolderError(
                "an adapter folder holds another embedding or head than the base",
                folder=job.adapter,
                tensor=name,
                expected=f"the base's {base_name}",
                found=f"other values, shape {tuple(frozen.shape)}",
                help="continue it on the base that it was trained on; where that had more tokens, "
                "save the base with them",
            )
    return tensors


def _fused_experts(model: SuperModel, job: Job, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapter on single experts, from transformers 4, as PEFT loads them now."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
    )

    base, config = model.backbone.model, job.lora_config()
    fused: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(
        base, config, tensors
    )
    return fused


def _equal(model: SuperModel, name: str, saved: Tensor) -> bool:
    """Whether a saved tensor is the base's, in the narrower of their dtypes."""
    mine = model.base_tensor_or_value(name)
    shard = model.base_shard(name)
    if tuple(saved.shape) != _whole_shape(mine, shard):
        return False
    theirs = (saved if shard is None else shard.of(saved)).to(mine.device)
    kind = min(mine.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(mine.to(kind), theirs.to(kind))


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
    sources = [
        tensors[name] if shard is None else shard.of(tensors[name])
        for name, (_, shard) in wanted.items()
    ]
    if sources:
        with torch.no_grad():
            torch._foreach_copy_([parameter for parameter, _ in wanted.values()], sources)


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
        self.experts = {
            site.wrapper: path for path, site in self.sites.items() if site.kind == "experts"
        }
        self.init = job.lora_fields.get("init_lora_weights", True) if job.is_lora else True

    @cached_property
    def canonical(self) -> Mapping[str, str]:
        """Names of the base's tensors, as `canonical_names`; most starts need none."""
        return canonical_names(self.model.backbone)

    def key(self, name: str) -> str:
        """Key of a tensor's random draw: the site's path, though PEFT nests wrappers of experts."""
        module, half, tail = name.removeprefix(PEFT_PREFIX).partition(".lora_")
        return self.experts.get(module, module) + half + tail

    @property
    def is_computed(self) -> bool:
        """Whether PEFT computes A and B together."""
        computed = self.init == "orthogonal" or self.job.changes_base
        return computed and not needs_data(self.job)

    @torch.no_grad()
    def start_by_peft(self, parameters: Mapping[str, nn.Parameter]) -> set[str]:
        """Start all A and B as PEFT computes them; returns their names."""
        started = set()
        for down in [name for name in parameters if ".lora_A." in name]:
            up = down.replace(".lora_A.", ".lora_B.")
            path = down.removeprefix(PEFT_PREFIX).partition(".lora_A.")[0]
            weight = self.model.base_tensor_or_value(self.canonical[f"{path}.weight"])
            layer = self.model.backbone.model.get_submodule(path)
            values = computed_start(self.job, layer, weight, self.sites[path])
            for name, value in zip((down, up), values, strict=True):
                parameters[name].copy_(value)
                started.add(name)
        return started

    @torch.no_grad()
    def start_as_kind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start a job of a kind beside LoRA as PEFT does, and its copies as the base has them."""
        config = config_with_targets(self.job, self.model.backbone)
        for path, site in self.sites.items():
            if not site.rank:
                continue
            layer = self.model.backbone.model.get_submodule(path)
            for name, value in start_of_kind(self.job, config, layer, path).items():
                if name in parameters:
                    parameters[name].copy_(value)
        for name in parameters:
            if ".modules_to_save." in name:
                parameters[name].copy_(self._whole(name, parameters[name], parameters))

    def value(
        self, name: str, parameters: Mapping[str, nn.Parameter], shard: Shard | None
    ) -> Tensor:
        """Start value of the tensor of this PEFT name, or a piece of it."""
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
            return self._magnitude(path, parameters)
        if FACTOR.search(name):
            return self._factor(name, parameter)
        if ".token_adapter." in path:
            module = path.partition(".token_adapter.")[0]
            ids = trained_tokens(self.job, self.job.start_config(), self.model.backbone)[module]
            return self.model.base_tensor_or_value(self.canonical[f"{module}.weight"])[ids]
        name = path.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".")
        return self.model.base_tensor_or_value(self.canonical[name])

    def _factor(self, name: str, like: Tensor) -> Tensor:
        """An A or a B as PEFT draws it."""
        key, both_random = self.key(name), self.init is False
        if ".lora_A." in name and self.init == "gaussian":
            return self._normal(like, key, 1 / like.shape[0])
        if ".lora_A." in name or (".lora_B." in name and both_random):
            site = self.sites.get(name.removeprefix(PEFT_PREFIX).partition(".lora_")[0])
            # A bias of B is drawn as that of any linear: as far as its weight.
            fan_in = site.rank if site is not None and like.dim() == 1 else like.shape[1]
            return draw(like, _kaiming(fan_in), self.job.seed, key, like.device)
        if ".lora_embedding_B." in name or (".lora_embedding_A." in name and both_random):
            return self._normal(like, key, 1.0)
        return torch.zeros_like(like)

    def _normal(self, like: Tensor, path: str, deviation: float) -> Tensor:
        generator = torch.Generator().manual_seed((self.job.seed << 31) + site_id(path))
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64) * deviation
        return drawn.to(like.device, like.dtype)

    def _magnitude(self, path: str, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        from transformers.pytorch_utils import Conv1D

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
        if isinstance(self.model.backbone.model.get_submodule(module_path), (nn.Embedding, Conv1D)):
            # They store their weight [in, out].
            oriented = oriented.t()
        norms: Tensor = torch.linalg.norm(oriented + site.scaling * (b.to(a.dtype) @ a), dim=1)
        return norms

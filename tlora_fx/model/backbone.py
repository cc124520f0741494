"""The frozen base: its architecture without its weights.

Compiling needs no weights. A `Backbone` holds the base's own, unmodified module with every
parameter on the meta device, and beside it the few values that no checkpoint holds: buffers that
model code computes (rotary frequencies, embedding scales) and the starts of one-dimensional
parameters.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora_fx.config.base_files import refuse_remote_code, require_base_config
from tlora_fx.config.base_task import pools_first, require_task
from tlora_fx.config.hub import is_hub_id, why_offline
from tlora_fx.config.job import BaseSpec
from tlora_fx.config.objects import name_of
from tlora_fx.errors import BaseNotLoadable, BaseRefused
from tlora_fx.host.phases import phase


@dataclass
class Backbone:
    """A frozen base on the meta device.

    spec      where it comes from
    model     the unmodified module; parameters and buffers on meta
    values    real tensors by canonical name, as far as they are known without a checkpoint
    names     id of each parameter and buffer to its canonical name (the first of tied names)

    counts_positions    whether it counts its positions by the ids; None: not found out yet
    """

    spec: BaseSpec
    model: nn.Module
    values: dict[str, Tensor]
    names: dict[int, str] = field(default_factory=dict)
    counts_positions: bool | None = None

    @property
    def config(self) -> Any:
        """The transformers config, None for a plain module."""
        return getattr(self.model, "config", None)

    @property
    def is_encoder(self) -> bool:
        """Whether it classifies by the first token, which sees all later ones."""
        return self.spec.is_classifier and pools_first(self.config.to_dict())

    @property
    def title(self) -> str:
        """Name of this base for people."""
        spec = self.spec
        source = spec.model or (str(spec.config) if spec.config else name_of(spec.module))
        return source or type(self.model).__name__

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the base's floating-point parameters."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def fingerprint(self) -> str:
        """A hash of architecture, dtype and source of weights."""
        shapes = {n: [str(p.dtype), *p.shape] for n, p in self.model.named_parameters()}
        config = self.config.to_dict() if self.config is not None else {}
        source: list[object] = [self.spec.model, str(self.spec.config), self.spec.seed]
        if self.spec.module is not None:
            source.extend(float(value.double().sum()) for value in self.values.values())
        if self.spec.model is not None and Path(self.spec.model).is_dir():
            files = sorted(Path(self.spec.model).glob("*.safetensors"))
            source.extend((file.name, file.stat().st_size) for file in files if file.is_file())
        text = json.dumps([source, shapes, config], default=str, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def copy_model(self, instead: Mapping[str, nn.Module] | None = None) -> nn.Module:
        """A copy of the module tree that shares every parameter and buffer with the base.

        instead   modules to put in place of copies, by path
        """
        tensors = [*self.model.parameters(), *self.model.buffers()]
        known: dict[int, Any] = {id(t): t for t in tensors}
        for path, module in (instead or {}).items():
            known[id(self.model.get_submodule(path))] = module
        return copy.deepcopy(self.model, known)


def text_config(model: nn.Module) -> Any:
    """A model's config, of one that also sees that of its language model; None without any."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def named_logits(out: Any) -> Any:
    """Logits of a forward's result, by attribute or key; else the whole result."""
    return out.get("logits", out) if type(out) is dict else getattr(out, "logits", out)


def has_sdpa(model: nn.Module) -> bool:
    """Whether a model of transformers, and every model within it, has PyTorch's attention."""
    has = [part._supports_sdpa for part in model.modules() if hasattr(part, "_supports_sdpa")]
    return bool(has) and all(has)


def longest_sequence(model: nn.Module) -> int | None:
    """Number of positions of a sequence, None where there is no limit.

    RoBERTa and its kin begin to count behind the id of padding.
    """
    config = text_config(model)
    # MPT's config calls it otherwise, and cuts its biases of positions from a table of that size.
    names = ("max_position_embeddings", "max_seq_len")
    most: int | None = next(filter(None, (getattr(config, name, None) for name in names)), None)
    if most is None:
        return None
    tables = (m for path, m in model.named_modules() if path.endswith("position_embeddings"))
    unused = (getattr(table, "padding_idx", None) for table in tables)
    return most - max((index + 1 for index in unused if index is not None), default=0)


def load_backbone(spec: BaseSpec, *, dropout: bool = True) -> Backbone:
    """Build a base from its config alone, or take the module that the user gave.

    dropout   False: the base's own dropout rates are 0
    raises    BaseNotLoadable when transformers cannot build it; BaseRefused where a module is not
              made for the base's task
    """
    if spec.module is not None:
        model = copy_given(spec.module)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_dict"):
            require_task(config.to_dict() | {"architectures": [type(model).__name__]}, spec)
        if spec.is_classifier:
            classify_each_token(model, spec)
    else:
        model = build_skeleton(spec, dropout=dropout)
    model.train()
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    values = _move_to_meta(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names.setdefault(id(tensor), name)
    return Backbone(spec, model, values, names)


def copy_given(module: nn.Module) -> nn.Module:
    """A copy of a given module over its own tensors; a model of transformers as it is traced.

    Attention and experts become eager, and activations are not checkpointed.

    raises    BaseRefused where accelerate moves its weights
    """
    if any(hasattr(part, "_hf_hook") for part in module.modules()):
        raise BaseRefused(
            "accelerate moves the weights of this model while it runs",
            base=type(module).__name__,
            help="load it without device_map, or give its folder or hub id",
        )
    tensors = [*module.parameters(), *module.buffers()]
    copied: Any = copy.deepcopy(module, {id(t): t for t in tensors})
    if not hasattr(copied, "set_attn_implementation"):
        return copied  # type: ignore[no-any-return]
    copied.set_attn_implementation("eager")
    copied.set_experts_implementation("eager")
    copied.config.use_cache = False
    for part in copied.modules():
        if hasattr(part, "gradient_checkpointing"):
            part.gradient_checkpointing = False
        # What transformers and TRL hang behind embeddings for checkpointed activations.
        for key, hook in list(part._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                del part._forward_hooks[key]
    return copied  # type: ignore[no-any-return]


def load_config(spec: BaseSpec, *, dropout: bool = True) -> Any:
    """The transformers config of a base, with what training needs switched; a module's as it is.

    dropout   False: every dropout rate in it is 0

    raises    BaseNotLoadable; BaseRefused where it is not made for its task; RemoteCodeRefused
              where it needs code of its own that the job file does not trust
    """
    if spec.module is not None:
        return copy.deepcopy(spec.module.config)
    with phase("imports"):
        from transformers import AutoConfig

    source = spec.model or str(spec.config)
    require_base_config(spec)
    offline = why_offline() if is_hub_id(spec.model) else ""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=spec.trust_remote_code)
    except Exception as error:  # whatever a library raises of a file that it did not expect
        refuse_remote_code(spec, error)
        raise BaseNotLoadable(
            "the base's config cannot be read",
            base=source,
            found=f"not cached, and the hub is not reached ({offline})" if offline else error,
            help="name a folder that holds the model, or mend the connection"
            if offline
            else "give a hub id, or a folder with config.json; remote code needs "
            "base.trust_remote_code: true",
        ) from error
    require_task(config.to_dict(), spec)
    if spec.is_classifier:
        names = spec.label_names
        config.id2label = dict(enumerate(names))
        config.label2id = {name: index for index, name in enumerate(names)}
        config.problem_type = spec.objective
    config.use_cache = False
    for name, value in list(vars(config).items()) if not dropout else ():
        if isinstance(value, float) and ("drop" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)
    return config


def build_skeleton(spec: BaseSpec, *, dropout: bool = True) -> nn.Module:
    """The base's module with matrices on meta; vectors and buffers as its own code starts them.

    A classifier returns the logits of every token, as if it was the one that its class reads.
    """
    config = load_config(spec, dropout=dropout)
    factory = model_factory(spec, config)
    _refuse_other_inputs(config, spec, factory)
    try:
        with matrices_on_meta(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            model = factory.from_config(
                config,
                dtype=getattr(torch, spec.dtype),
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=spec.trust_remote_code,
            )
            if spec.model is not None:
                _restart_buffers(model)
                _keep_float32(model, getattr(torch, spec.dtype))
    except Exception as error:  # whatever a library raises of a config that it did not expect
        found, near = _why_not_built(config, factory, error)
        task = "classifier of sequences" if spec.is_classifier else "causal language model"
        raise BaseNotLoadable(
            f"transformers cannot build this base as a {task}",
            base=spec.model or spec.config,
            found=found,
            nearest=near,
            help="check config.json, or hand the nn.Module over from Python",
        ) from error
    assert isinstance(model, nn.Module)
    if spec.is_classifier:
        classify_each_token(model, spec)
    return model


def classify_each_token(model: Any, spec: BaseSpec) -> None:
    """Make a classifier return the logits of every token, not only of the one that its class reads.

    model   with a config of its own, which is changed
    """
    config = model.config
    config.problem_type = spec.objective
    model.__class__ = _of_each_token(type(model), first=pools_first(config.to_dict()))
    if config.get_text_config().pad_token_id is None:
        # Without one, transformers refuses batches; nothing that is kept reads it.
        config.get_text_config().pad_token_id = -1


def _restart_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds anew, as transformers does when it loads one.

    It builds a model while the base's dtype is torch's default, and computes them afterwards: the
    angles of GPT-J and CodeGen, which are rounded to bfloat16 before, are not then.
    """
    held = model.state_dict(keep_vars=True).values()
    for tensor in held:
        tensor._is_hf_initialized = True
    for module in model.modules():
        if module._non_persistent_buffers_set:
            module._is_hf_initialized = False
    with torch.no_grad():
        model.initialize_weights()
    for tensor in held:
        vars(tensor).pop("_is_hf_initialized", None)  # tied ones come twice


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Hold in float32 what transformers holds so, whatever dtype it loads a checkpoint in.

    Such as the biases of routers, by which tokens choose their experts.
    """
    patterns = [re.escape(name).replace(r"\*", ".*") for name in model._get_dtype_plan(dtype)]
    if not patterns:
        return
    kept: dict[int, tuple[Any, Any]] = {}  # ties stay; the old tensors keep their ids
    for path, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is None or not re.search("|".join(patterns), f"{path}.{name}"):
                    continue
                if id(old) not in kept:
                    new = old.detach().float() if old.is_floating_point() else old
                    is_parameter = store is module._parameters
                    kept[id(old)] = old, nn.Parameter(new) if is_parameter else new
                store[name] = kept[id(old)][1]


def model_factory(spec: BaseSpec, config: Any) -> Any:
    """The class by which transformers builds a model of the base's task.

    A model of images and text has often no causal class: its own trains on text alone.

    config    the base's
    """
    with phase("imports"):
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForSequenceClassification,
        )

    if spec.is_classifier:
        return AutoModelForSequenceClassification
    remote = AutoModelForCausalLM.__name__ in (getattr(config, "auto_map", None) or {})
    if remote or type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def _of_each_token(kind: Any, *, first: bool) -> Any:
    """A class of classifiers that returns the logits of each token, [B, S, labels].

    first    whether labels stand at the first token, not at the last
    """

    @wraps(kind.forward)
    def forward(self: nn.Module, input_ids: Tensor, **inputs: Any) -> Any:
        with _EachToken(input_ids, first=first):
            return kind.forward(self, input_ids=input_ids, **inputs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _EachToken(TorchFunctionMode):
    """Lets a model keep every token where it picks one of each sequence.

    That is the first token's hidden state, `x[:, 0]`, or the logits of the last token that is no
    padding, `logits[range(B), last]`. What comes behind it works on tokens one by one.

    raises    BaseRefused where it picks the other of the two than the one that labels stand at
    """

    def __init__(self, ids: Tensor, *, first: bool) -> None:
        super().__init__()
        self._row, self._first = tuple(ids.shape), first

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and self._picks(*args):
            if isinstance(args[1][0], slice) != self._first:
                read, labelled = ("last", "first") if self._first else ("first", "last")
                raise BaseRefused(
                    f"this base classifies a sequence by its {read} token",
                    expected=f"the {labelled} one, where labels of its model_type stand",
                    help="report the model_type, and train it with PEFT and transformers' Trainer",
                )
            return args[0]
        return func(*args, **(kwargs or {}))

    def _picks(self, value: Tensor, index: Any) -> bool:
        if not isinstance(index, tuple) or value.dim() != 3 or not value.is_floating_point():
            return False
        first, second, *rest = index
        if any(part != slice(None) for part in rest) or tuple(value.shape[:2]) != self._row:
            return False
        if isinstance(first, slice):
            return first == slice(None) and type(second) is int and second == 0
        return isinstance(first, Tensor) and first.dim() == 1


def _refuse_other_inputs(config: Any, spec: BaseSpec, factory: Any) -> None:
    """Refuse a model of images or sound whose text part has no class of its own in transformers."""
    senses = [name for name in ("vision", "audio") if getattr(config, f"{name}_config", None)]
    remote = factory.__name__ in (getattr(config, "auto_map", None) or {})
    if senses and not remote and type(config) not in factory._model_mapping:
        raise BaseRefused(
            "tlora-fx trains language models, and this base reads more than text",
            base=spec.model or spec.config,
            found=f"model_type '{config.model_type}' with {' and '.join(senses)}",
            help="name a base of text alone, such as the one that this base was made of",
        )


def _why_not_built(config: Any, factory: Any, error: Exception) -> tuple[str, str | None]:
    """What is wrong with a config, and the nearest types of its task's models where its type is."""
    if type(config) in factory._model_mapping:
        return f"{type(error).__name__}: {error}", None
    known = [kind.model_type for kind in factory._model_mapping]
    near = difflib.get_close_matches(config.model_type, known, n=3)
    return f"model_type '{config.model_type}'", ", ".join(near) or None


_BUILDING = threading.RLock()
# A process that was forked has not the thread that builds.
os.register_at_fork(after_in_child=_BUILDING._at_fork_reinit)  # type: ignore[attr-defined]


@contextmanager
def matrices_on_meta() -> Iterator[None]:
    """Register every parameter of two or more dimensions on meta, within this context.

    Vectors and buffers stay real: they are small, and no checkpoint may hold them. Other threads go
    on as if nothing were; one that comes here too waits.
    """
    builder = threading.get_ident()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        ours = threading.get_ident() == builder
        if ours and param is not None and param.dim() > 1 and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            # transformers then draws no numbers for it: they go nowhere, and take a millisecond.
            param._is_hf_initialized = True  # type: ignore[attr-defined]
        original(module, name, param)

    with _BUILDING:
        original = nn.Module.register_parameter
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def _move_to_meta(model: nn.Module) -> dict[str, Tensor]:
    """Replace each tensor by one on meta, ties kept; return the real ones by canonical name."""
    values: dict[str, Tensor] = {}
    moved: dict[int, Tensor] = {}
    keep: list[Tensor] = []  # ids stay unique while the originals live
    for path, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                keep.append(tensor)
                if id(tensor) not in moved:
                    twin: Tensor = tensor.detach().to("meta")
                    if isinstance(tensor, nn.Parameter):
                        twin = nn.Parameter(twin, requires_grad=False)
                    moved[id(tensor)] = twin
                    if not tensor.is_meta:
                        values[f"{path}.{name}" if path else name] = tensor.detach()
                store[name] = moved[id(tensor)]
    return values

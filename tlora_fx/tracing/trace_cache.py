"""Cache of traces on disk: an equal base with equal adapters is not traced again.

Files under $TLORA_FX_CACHE/traces hold traced graphs as the text of graph files, the losses that
were compared, the sites of adapters, and the adapters whose layers PEFT made as planned. A file's
name is the hash of all that decides it. A file that cannot be read, or holds something else, is
ignored and written anew.
TLORA_FX_TRACE_CACHE is the largest size of the folder in MiB; 0 switches the cache off.

A graph depends on the base's config, modules and code, on the job's adapters, on the code that
traces, and on the versions of all libraries. Code that is no library's may change without a
version, and may have been put in place of a library's. What it traces has no key, and is not kept.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import logging
import operator
import platform
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import OTHER_KINDS, kind_of
from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file import graph_text, graphs_of_text, to_document
from tlora_fx.host.environment import TRACE_CACHE
from tlora_fx.host.kept_objects import KeptObjects
from tlora_fx.host.sources import PACKAGE, own_source, source_of
from tlora_fx.host.version import __version__
from tlora_fx.ir.graph import AdapterSite, Form, JobGraph
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing import attention, export, own_loss
from tlora_fx.tracing.adapters import graph_structure, resolve_sites
from tlora_fx.tracing.own_loss import LossRow

logger = logging.getLogger(__name__)

KEPT = KeptObjects("traces", "what was traced", format=1, variable=TRACE_CACHE)
LIBRARIES = ("torch", "transformers", "peft")
#: Rooms whose code tracing may run: its own, and all that it may import.
ROOMS = (
    "tracing", "graph_file", "model", "pipeline", "ir", "ops", "codegen", "config", "errors",
    "host",
)  # fmt: skip
# Fields of plain LoRA that a graph has only as paths of sites: its numbers are placeholders.
IN_SITES = frozenset({
    "alpha_pattern", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "r", "rank_pattern", "target_modules", "use_rslora",
})  # fmt: skip
_ROOTS = frozenset({*LIBRARIES, "tlora_fx", *sys.stdlib_module_names})
_IN_PLACE = _ROOTS | {"huggingface_hub"}
_TRACING = "tlora_fx.tracing."
_CODE = operator.attrgetter("__code__")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_MODULE_STATE = frozenset(vars(nn.Module()))
_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks",
)  # fmt: skip


def base_graph(backbone: Backbone, form: Form, fold: bool = True) -> JobGraph:
    """`export.trace_base`, or what it traced before; raises as it does."""

    def trace() -> JobGraph:
        return export.trace_base(backbone, form, fold)

    if not _is_on():
        return trace()
    return _graph(base_key(backbone, "graph", form, fold), trace)


def job_graph(
    job: Job,
    backbone: Backbone,
    sites: dict[str, AdapterSite],
    form: Form,
    fold: bool = True,
    exact: bool = False,
) -> JobGraph:
    """`export.trace_job`, or what it traced of a job with equal adapters; raises as it does."""
    traced = []

    def trace() -> JobGraph:
        traced.append(True)
        return export.trace_job(job, backbone, sites, form, fold, exact)

    if not _is_on():
        return trace()
    key = job_key(job, backbone, sites, form, fold, exact)
    graph = _graph(key, trace)
    if key is not None:
        _wrap_once(job, backbone, sites, fold=fold, traced=bool(traced))
    return replace(graph, name=job.name, sites=sites)


def require_common_loss(
    backbone: Backbone, rows: Sequence[LossRow] = (), jobs: Sequence[str] = ()
) -> str | None:
    """`own_loss.require_common_loss`, or what it returned before for the same rows.

    raises    OwnLossDiffers as it does
    """
    content = hashlib.sha256(repr([*rows]).encode()).hexdigest()
    key = base_key(backbone, "loss", content) if _is_on() else None
    known = KEPT.read(key) if key is not None else None
    if known is not None and isinstance(known.get("note", 0), (str, type(None))):
        note: str | None = known["note"]
        return note
    note = own_loss.require_common_loss(backbone, rows, jobs)
    if key is not None:
        KEPT.write(key, {"note": note})
    return note


def resolved_sites(jobs: Sequence[Job], backbone: Backbone) -> list[dict[str, AdapterSite]]:
    """`adapters.resolve_sites` of each job, or what it found before; raises as it does.

    Where all are known, PEFT is not imported, which takes a second and more.
    """
    keys = sites_keys(jobs, backbone) if _is_on() else [None] * len(jobs)
    resolved = []
    for job, key in zip(jobs, keys, strict=True):
        sites = _sites_of(KEPT.read(key)) if key is not None else None
        if sites is None:
            sites = resolve_sites(job, backbone)
            if key is not None:
                KEPT.write(key, {"sites": [astuple(site) for site in sites.values()]})
        resolved.append(sites)
    return resolved


def _sites_of(known: dict[str, Any] | None) -> dict[str, AdapterSite] | None:
    """Sites as they were kept; None where something else was."""
    try:
        sites = [AdapterSite(*fields) for fields in (known or {})["sites"]]
    except (KeyError, TypeError):
        return None
    return {site.path: site for site in sites}


def _is_on() -> bool:
    """Whether traced graphs are kept and looked for."""
    return KEPT.max_bytes > 0


def traces_folder() -> Path:
    """Where traced graphs lie, beside generated kernels."""
    return KEPT.folder


def _wrap_once(
    job: Job, backbone: Backbone, sites: dict[str, AdapterSite], *, fold: bool, traced: bool
) -> None:
    """Compare what PEFT makes of a job's fields with what is planned, as tracing does.

    traced    tracing has just done it
    raises    AdapterMismatch
    """
    key = wrapped_key(job, backbone, sites, fold)
    if key is None or (not traced and KEPT.read(key) is not None):
        return
    if not traced:
        export.wrap_pruned(job, backbone, sites, fold)
    KEPT.write(key, {"wrapped": True})


def _graph(key: str | None, trace: Callable[[], JobGraph]) -> JobGraph:
    """The graph of the folder, else a traced one, which is put there."""
    if key is None:
        return trace()
    known = KEPT.read(key)
    graph = _graph_of(known["text"]) if known is not None and "text" in known else None
    if graph is not None:
        return graph
    graph = trace()
    text = _text_of(graph)
    if text is not None:
        KEPT.write(key, {"text": text})
    return graph


def _text_of(graph: JobGraph) -> str | None:
    """A graph without its job, as text; None where a text would not give back the same."""
    try:
        document = to_document(replace(graph, name="", sites={}))
        again = _graph_of(document.text)
        if document.left_out or again is None or graph_text(again) != document.text:
            return None
    except (GraphNotStorable, GraphFileNotReadable) as error:
        logger.info("a traced graph is not kept: %s", error)
        return None
    return document.text


def _graph_of(text: object) -> JobGraph | None:
    attention.register()
    try:
        graph = graphs_of_text(str(text))
    except GraphFileNotReadable as error:
        logger.info("a traced graph cannot be read: %s", error)
        return None
    return graph if isinstance(graph, JobGraph) else None


_LOOKED: ContextVar[dict[object, tuple[object, ...]] | None] = ContextVar("looked", default=None)


class _NoLibraryCode(Exception):
    """Code takes part that is no library's."""


def base_key(backbone: Backbone, *how: object) -> str | None:
    """The key of what is traced of a base alone.

    how    what else decides it
    """
    return _hashed(backbone, lambda: ("base", how))


def job_key(
    job: Job,
    backbone: Backbone,
    sites: Mapping[str, AdapterSite],
    form: Form,
    fold: bool,
    exact: bool,
) -> str | None:
    """The key of a job's graph, the same for jobs that differ in what no graph has."""

    def described() -> object:
        fields = _fields(job)
        places = [(site.path, site.kind, site.depth) for site in sites.values()]
        numbers = [(site.rank, site.scaling) for site in sites.values()]
        if not exact and all(site.kind == "lora" for site in sites.values()):
            fields = {name: value for name, value in fields.items() if name not in IN_SITES}
            numbers = []
        rates = [site.dropout for site in sites.values()] if exact else ()
        structure = graph_structure(job, backbone, dict(sites), exact)
        return ("job", form, fold, exact, _literal(fields), structure, places, numbers, rates)

    return _hashed(backbone, described)


def sites_keys(jobs: Sequence[Job], backbone: Backbone) -> list[str | None]:
    """The keys of jobs' sites."""

    def described(job: Job) -> Callable[[], object]:
        return lambda: ("sites", _literal(_fields(job)), job.base.task, job.optim)

    return _all_hashed(backbone, [described(job) for job in jobs])


def wrapped_key(
    job: Job, backbone: Backbone, sites: Mapping[str, AdapterSite], fold: bool
) -> str | None:
    """The key of the comparison of PEFT's own layers with a job's sites."""
    return _hashed(
        backbone,
        lambda: (
            "wrapped",
            fold,
            _literal(_fields(job)),
            job.adapter_dtype,
            repr([*sites.values()]),
        ),
    )


def _fields(job: Job) -> dict[str, Any]:
    if kind_of(job.lora_fields) not in ("LORA", *OTHER_KINDS):
        raise _NoLibraryCode("the adapter's kind is of another package")
    return dict(job.lora_fields)


def _hashed(backbone: Backbone, more: Callable[[], object]) -> str | None:
    [key] = _all_hashed(backbone, [more])
    return key


def _all_hashed(backbone: Backbone, more: Sequence[Callable[[], object]]) -> list[str | None]:
    """The keys of things of one base, each with what else decides it; None without a key."""
    if backbone.config is None or backbone.spec.module is not None:
        return [None] * len(more)
    keys: list[str | None] = []
    try:
        common = _common(backbone)
    except _NoLibraryCode as error:
        logger.info("nothing is kept of what is traced: %s", error)
        return [None] * len(more)
    for described in more:
        try:
            parts = (*common, described())
        except _NoLibraryCode as error:
            logger.info("nothing is kept of what is traced: %s", error)
            keys.append(None)
        else:
            keys.append(hashlib.sha256(repr(parts).encode()).hexdigest())
    return keys


@contextmanager
def looking_once() -> Iterator[None]:
    """Within, what all keys of a base share is found once, and again after an import."""
    before = _LOOKED.set({})
    try:
        yield
    finally:
        _LOOKED.reset(before)


def _common(backbone: Backbone) -> tuple[object, ...]:
    """What all keys of a base share; raises where code takes part that is no library's."""
    looked = _LOOKED.get()
    if looked is None:
        return (_environment(), _base(backbone))
    key = (len(sys.modules), id(backbone))
    if key not in looked:
        looked[key] = (_environment(), _base(backbone))
    return looked[key]


def _environment() -> object:
    """Versions, our own source, and what a process has set; raises where code was replaced."""
    if any(getattr(module_hooks, name) for name in _HOOKS):
        raise _NoLibraryCode("modules have global hooks")
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    if modes or autocast:
        raise _NoLibraryCode("autocast is on" if autocast else "a mode is on")
    if not _are_installed():
        raise _NoLibraryCode(f"libraries are not installed packages: {_homes()}")
    for name, module in list(sys.modules.items()):
        if _takes_part(name):
            _require_own(module, classes=not name.startswith("transformers"))
    return (
        _versions(),
        own_source(*ROOMS),
        [*_own_settings()],
        str(torch.get_default_dtype()),
        torch.is_inference_mode_enabled(),
    )


@functools.cache
def _takes_part(module: str) -> bool:
    """Whether a module's functions may be called by what is traced, or trace it themselves."""
    root, _, rest = module.partition(".")
    ours = root == "tlora_fx" and rest.partition(".")[0] in ROOMS
    return ours or root in ("transformers", "peft") or module == "torch.nn.functional"


@functools.cache
def _versions() -> object:
    """Of Python, ours, and of every installed package: which of them are there decides branches."""
    # What a package brings inside of itself, and adds to the path when it is imported, as ray does,
    # is no package of the environment.
    on_path = _on_path()
    homes = {folder for folder in on_path if folder.name in ("site-packages", "dist-packages")}
    own = [folder for folder in on_path if homes.isdisjoint(folder.parents)]
    packages = {path.name for folder in own for path in folder.glob("*.*-info")}
    named = [torch.__version__, *(version(library) for library in LIBRARIES)]
    return (sys.version, platform.machine(), __version__, named, sorted(packages))


def _on_path() -> set[Path]:
    """The folders that packages are imported from."""
    return {Path(folder) for folder in sys.path if folder and Path(folder).is_dir()}


def _own_settings() -> Iterator[str]:
    """What stands at the top of the modules that trace; a process may have changed it."""
    tracing = [each for each in list(sys.modules.items()) if each[0].startswith(_TRACING)]
    for name, module in sorted(tracing):
        for key, value in vars(module).items():
            if not key.startswith("__"):
                named = getattr(value, "__qualname__", type(value).__qualname__)
                yield f"{name}.{key}={value if isinstance(value, _PLAIN) else named!r}"


def _base(backbone: Backbone) -> object:
    """What decides a base's graph: its config, and of every module class, code and tensors."""
    model, config = backbone.model, backbone.config
    fields = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    kinds = sorted({type(module) for module in model.modules()}, key=_name)
    parameters = model.named_parameters(remove_duplicate=False)
    return (
        _literal(fields),
        str(getattr(config, "_attn_implementation", None)),
        (backbone.spec.seed, backbone.spec.is_classifier, backbone.is_encoder),
        [_class(kind) for kind in kinds],
        [(path, _module(module)) for path, module in model.named_modules(remove_duplicate=False)],
        [(n, tuple(p.shape), str(p.dtype)) for n, p in parameters],
        [(n, tensor_digest(backbone.values.get(n, b))) for n, b in model.named_buffers()],
    )


def _module(module: nn.Module) -> object:
    """A module's class and plain attributes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(vars(module).get(name) for name in hooks):
        raise _NoLibraryCode(f"a {_name(type(module))} has hooks")
    attributes = [
        (name, _literal(value))
        for name, value in sorted(vars(module).items())
        if name not in _MODULE_STATE and name != "name_or_path"
    ]
    return (_name(type(module)), module.training, attributes)


def _literal(value: Any) -> str:
    """A value as text that is the same in every process."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Mapping):
        pairs = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} [{', '.join(map(_literal, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set [{', '.join(sorted(map(_literal, value)))}]"
    if isinstance(value, Tensor):
        return repr(tensor_digest(value))
    if isinstance(value, functools.partial):
        return f"partial {_literal((value.func, value.args, value.keywords))}"
    if callable(value) and not isinstance(value, nn.Module):
        return _code(value)
    return f"object {_name(type(value))}"


def tensor_digest(tensor: Tensor) -> object:
    """A tensor's shape and dtype, and a hash of its bytes if it is not on meta."""
    if tensor.is_meta:
        return (tuple(tensor.shape), str(tensor.dtype))
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return (
        tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(content.tobytes()).hexdigest(),
    )  # fmt: skip


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class(kind: type[Any]) -> object:
    """A module's class: the classes that it inherits from, their code, and what that may call."""
    parts = []
    for own in kind.__mro__:
        _require_library(own, *_members(own))
        top: Iterable[tuple[str, Any]] = ()
        if own.__module__.startswith("transformers.models."):
            top = vars(sys.modules[own.__module__]).items()
        calls = [
            (name, _code(value))
            for name, value in top
            if isinstance(value, (type, types.FunctionType))
        ]
        forward = vars(own).get("forward")
        body = "" if forward is None else _code(forward)
        parts.append((_name(own), body, source_of(own.__module__), calls))
    return parts


def _code(value: Any) -> str:
    """A function or class by its name and, of a function, its code; raises for no library's."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    _require_library(value)
    code = getattr(value, "__code__", None)
    body = "" if code is None else hashlib.sha256(code.co_code).hexdigest()
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', None)}.{name} {body}"


def _require_own(module: types.ModuleType, *, classes: bool) -> None:
    """Raise where another package has put its function in place of one of a library's.

    Libraries import functions of many packages, and classes have generated ones; replaced is what
    the module's own file defines. Functions must be of installed packages, with `classes` those of
    the module's classes too.
    """
    known = _KNOWN_OWN.get((module.__name__, classes))
    if known is not None and known.is_unchanged(module):
        return
    contents = _Contents.of(module)
    for holder, names, values in contents.holders:
        for name, value in zip(names, values, strict=True):
            for function in _functions(value):
                # transformers decorates its configurations by huggingface_hub.
                if _root(function) not in _IN_PLACE and name in _defined(module.__name__):
                    raise _NoLibraryCode(f"{module.__name__}.{name} is {_full_name(function)}")
                if classes or holder is module:
                    _require_installed([function])
    _KNOWN_OWN[module.__name__, classes] = contents


class _Contents(NamedTuple):
    """What a module and its classes held.

    holders     the module and each class, with the names and the values that it held
    functions   all functions among the values
    codes       the code of each function
    """

    holders: list[tuple[object, tuple[str, ...], tuple[object, ...]]]
    functions: list[types.FunctionType]
    codes: list[types.CodeType]

    @classmethod
    def of(cls, module: types.ModuleType) -> _Contents:
        """The present content."""
        values = list(vars(module).values())
        own = [e for e in values if isinstance(e, type) and e.__module__ == module.__name__]
        held = [(h, tuple(vars(h)), tuple(vars(h).values())) for h in (module, *own)]
        functions = [
            each for _, _, held_values in held for v in held_values for each in _functions(v)
        ]
        return cls(held, functions, [*map(_CODE, functions)])

    def is_unchanged(self, module: types.ModuleType) -> bool:
        """Whether the module, which may have been imported anew, still holds the same objects."""
        return (
            self.holders[0][0] is module
            and all(
                names == tuple(vars(holder))
                and all(map(operator.is_, values, vars(holder).values()))
                for holder, names, values in self.holders
            )
            and all(map(operator.is_, map(_CODE, self.functions), self.codes))
        )


#: Modules in which nobody had put anything, by name and whether their classes were looked at too,
#: and what they held then.
_KNOWN_OWN: dict[tuple[str, bool], _Contents] = {}


@functools.cache
def _defined(module: str) -> frozenset[str]:
    """Names of the functions and methods that a module's file defines."""
    try:
        text = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return frozenset()
    return frozenset(re.findall(r"^ *(?:async )?def (\w+)", text, re.MULTILINE))


def _members(kind: type[Any]) -> Iterator[types.FunctionType]:
    """The functions of a class itself."""
    return itertools.chain.from_iterable(map(_functions, list(vars(kind).values())))


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions behind an attribute of a module or a class."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    for part in (value.fget, value.fset) if isinstance(value, property) else (value,):
        if isinstance(part, types.FunctionType):
            yield part


def _require_installed(functions: Iterable[types.FunctionType]) -> None:
    """Raise for functions of no installed package, which are not Python's or ours either."""
    for function in functions:
        # Generated text has no file; that of a notebook or of `python -c` is the main module's.
        file = function.__code__.co_filename
        if not _is_installed(file) or function.__module__ == "__main__":
            raise _NoLibraryCode(f"{_full_name(function)} is of {file}")


def _require_library(*values: Any) -> None:
    """Raise for functions and classes of other packages than the libraries, Python and ours."""
    for value in values:
        if _root(value) not in _ROOTS:
            raise _NoLibraryCode(f"{_full_name(value)} is no library's")
        if isinstance(value, types.FunctionType):
            _require_installed([value])


def _full_name(value: Any) -> str:
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', None)}.{name}"


def _root(value: Any) -> str:
    """The package that a function or class is of; "" of builtins that name none."""
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    return str(module).partition(".")[0]


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether code is of an installed library, Python's own, or ours; "<string>" was generated."""
    return file.startswith(("<", *_folders()))


@functools.cache
def _folders() -> tuple[str, ...]:
    ours = [Path(__file__).parents[1], PACKAGE]
    ours += [part.resolve() for part in PACKAGE.iterdir() if part.is_symlink()]
    # Installers leave a folder of facts beside each package, whose name `_versions` holds.
    installed = (folder for folder in _on_path() if any(folder.glob("*.dist-info")))
    libraries = [*map(Path, _homes().values()), *installed]
    stdlib = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")]
    folders = [*ours, *libraries, *stdlib, *(path.resolve() for path in stdlib)]
    return tuple(f"{folder}/" for folder in folders)


@functools.cache
def _homes() -> dict[str, str]:
    """The folders that the libraries were installed into."""
    specs = {name: find_spec(name) for name in LIBRARIES}
    return {
        name: str(Path(spec.origin).parents[1]) if spec is not None and spec.origin else ""
        for name, spec in specs.items()
    }


def _are_installed() -> bool:
    """Whether all libraries have the source that their version says; a checkout may have any."""
    return all(Path(home).name in ("site-packages", "dist-packages") for home in _homes().values())

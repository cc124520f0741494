"""The graph of one job's model, or of the base alone: torch.export over one row, without weights.

The graph reads its tensors through `TensorRef`s, knows for each node the module path and the source
line, and holds no submodules: regions that only switched gradients or autocast are inlined, with
`detach` where gradients were off.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import kind_of
from tlora_fx.errors import (
    BaseNotTraceable,
    BaseRefused,
    GraphInvalid,
    JobError,
    StateChanged,
    TloraError,
)
from tlora_fx.host.memory import total_bytes
from tlora_fx.ir.graph import (
    INPUTS,
    PEFT_PREFIX,
    TABLES,
    AdapterSite,
    Form,
    JobGraph,
    LayerPlan,
    TensorRef,
    is_call,
)
from tlora_fx.ir.shapes import fake_like, fake_mode_of, give_value
from tlora_fx.model.backbone import Backbone
from tlora_fx.model.batch import PADDING
from tlora_fx.tracing.adapters import check_wrapped, layer_signature, make_traceable
from tlora_fx.tracing.attention import packed_implementation, register, row_of
from tlora_fx.tracing.convolutions import convolve_by_sequence
from tlora_fx.tracing.experts import use_expert_products
from tlora_fx.tracing.guards import SizeGuards
from tlora_fx.tracing.layer_calls import LayerCalls
from tlora_fx.tracing.layers import plan_layers, pruned_copy
from tlora_fx.tracing.masks import unpacked_lines
from tlora_fx.tracing.positions import CountsBySequence, counts_positions
from tlora_fx.tracing.refusals import DETAIL, model_line, not_traceable, require_no_reads, words_of
from tlora_fx.tracing.state import meta_copy
from tlora_fx.tracing.watch import Watch

if TYPE_CHECKING:
    from peft import LoraConfig

# What tracing notes of a value is no part of the computation.
ASSERTION = torch.ops.aten._assert_tensor_metadata.default
# A graph that serves every dropout rate is traced with one, so that it has the dropouts.
SOME_RATE = 0.5
MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)

# Sizes of the row that is traced: all different, so that no two dimensions are taken for one.
TOKENS, LINES, WIDTH, SEQUENCES, JOBS = 29, 7, 11, 5, 3


def trace_base(backbone: Backbone, form: Form, fold: bool = True) -> JobGraph:
    """Trace the base without adapters.

    fold      trace two layers of each structure instead of all
    raises    BaseNotTraceable, AttentionNotPackable
    """
    return _trace(backbone, plan_layers(backbone, fold=fold), form, "the base", None)


def _counts_positions(backbone: Backbone, plan: LayerPlan) -> bool:
    """Whether the base counts its positions by the ids; found out once.

    raises    AttentionNotPackable
    """
    if backbone.counts_positions is None:
        model = pruned_copy(backbone, plan)[0]
        backbone.counts_positions = counts_positions(model, _integers(backbone))
    return backbone.counts_positions


def _integers(backbone: Backbone) -> dict[Tensor, Tensor]:
    """The base's buffers of integers, which its own code makes, and their values."""
    known = ((buffer, backbone.names[id(buffer)]) for buffer in backbone.model.buffers())
    return {
        buffer: backbone.values[name]
        for buffer, name in known
        if not buffer.is_floating_point() and name in backbone.values
    }


def trace_job(
    job: Job,
    backbone: Backbone,
    sites: dict[str, AdapterSite],
    form: Form,
    fold: bool = True,
    exact: bool = False,
) -> JobGraph:
    """Trace one job's model: the base wrapped by PEFT.

    sites     the job's adapters on all layers (resolve_sites)
    exact     the graph serves this job's ranks, scalings and rates only; False: any, and the
              numbers in the graph are placeholders
    """
    config = job.lora_config()

    def signature(layer: str) -> Hashable:
        return layer_signature(sites, layer, str(getattr(config, "bias", "none")), exact)

    if not exact and not getattr(config, "target_parameters", None):
        config.lora_dropout = SOME_RATE
    plan = plan_layers(backbone, signature, fold)
    graph = _trace(backbone, plan, form, f"job '{job.name}'", job, sites, config)
    graph.sites = sites
    return graph


def wrap_pruned(
    job: Job, backbone: Backbone, sites: dict[str, AdapterSite], fold: bool = True
) -> None:
    """Let PEFT wrap the layers that would be traced of a job, and compare them with its sites.

    raises    AdapterMismatch
    """
    config = job.lora_config()
    bias = str(getattr(config, "bias", "none"))
    plan = plan_layers(backbone, lambda layer: layer_signature(sites, layer, bias, False), fold)
    check_wrapped(_wrap(pruned_copy(backbone, plan)[0], job, config, backbone), sites, job)


def _trace(
    backbone: Backbone,
    plan: LayerPlan,
    form: Form,
    subject: str,
    job: Job | None,
    sites: dict[str, AdapterSite] | None = None,
    config: LoraConfig | None = None,
) -> JobGraph:
    model, index_read, calls = pruned_copy(backbone, plan)
    counts = form == "packed" and accepts_positions(model) and _counts_positions(backbone, plan)
    masked = backbone.is_encoder and _accepts(model, "attention_mask")
    if form == "packed":
        _use_packed_attention(model, subject)
    if job is not None:
        model = _wrap(model, job, config or job.lora_config(), backbone)
        check_wrapped(model, sites or {}, job)
    use_expert_products(model)
    row = TracedRow(
        model,
        form,
        keywords=backbone.config is not None,
        calls=calls,
        counts=counts,
        masked=masked,
    )
    index_read.clear()
    try:
        module = export_row(row, subject)
    except BaseNotTraceable as error:
        if type(error) is not BaseNotTraceable or not calls.stood_in:
            raise
        # The model may use its layers in another way than stand-ins can follow.
        module, reason = None, "the model's loop needs each of them"
        finer: LayerPlan | None = _apart(plan)
    else:
        finer, reason = _finer_plan(plan, index_read, calls)
    if finer is not None or module is None:
        graph = _trace(backbone, finer or _apart(plan), form, subject, job, sites, config)
        graph.notes.extend([("trace", f"layers are not folded: {reason}")] if reason else [])
        return graph
    root, constants = _imported(module, row, backbone.names, subject)
    name = job.name if job is not None else ""
    return JobGraph(name, root, form, plan, constants=constants, repeated=row.repeated())


def _imported(
    module: fx.GraphModule, row: TracedRow, base_names: dict[int, str], subject: str
) -> tuple[fx.Graph, dict[str, Tensor]]:
    """What `import_graph` makes of an exported graph; what it cannot read or run is a refusal."""
    try:
        graph, constants = import_graph(module, row, base_names)
        if row.form == "packed":
            convolve_by_sequence(graph)
        require_no_reads(graph, subject)
        mode = fake_mode_of(graph)
        for node in graph.nodes:
            if node.op == "call_function" and not is_call(node, ASSERTION):
                give_value(node, mode)
        return graph, constants
    except GraphInvalid as error:
        raise BaseNotTraceable(
            f"the traced graph of {subject} does not run by itself",
            node=error.facts.get("node"),
            source=error.facts.get("source"),
            found=error.facts.get("found"),
            help="the base's code makes this value in a way that tracing does not keep",
        ) from error
    except TloraError:
        raise
    except Exception as error:
        raise BaseNotTraceable(
            f"the traced graph of {subject} holds what tlora-fx cannot read",
            source=model_line(error),
            expected="operators on tensors, in one graph",
            found="the error below, where the graph is read",
            help="report the base with this text",
            **{DETAIL: words_of(error)},
        ) from error


def _apart(plan: LayerPlan) -> LayerPlan:
    """The plan in which each layer stands for itself."""
    return LayerPlan(plan.layers, {layer: layer for layer in plan.layers})


def _finer_plan(
    plan: LayerPlan, index_read: list[int], calls: LayerCalls
) -> tuple[LayerPlan | None, str]:
    """The plan to trace again with, where layers that looked equal are not, and why."""
    if plan.representative == _apart(plan).representative:
        return None, ""
    if index_read:
        return _apart(plan), "their forward reads their index"
    if set(plan.traced()) == set(plan.layers):
        return None, ""
    called = calls.structures()
    if called is None:
        return _apart(plan), "the model does not call them one after another"
    return (None, "") if called == plan.representative else (LayerPlan(plan.layers, called), "")


def _use_packed_attention(model: nn.Module, subject: str) -> None:
    register()
    if not accepts_positions(model):
        raise BaseNotTraceable(
            f"the model of {subject} takes no position_ids, so its rows cannot be packed",
            found=f"{type(model).__name__}.forward",
            help="set base.attention: batch",
        )
    for module in model.modules():
        # A stand-in would hand out the config of the base itself.
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = packed_implementation(str(config._attn_implementation))


def _require_memory(model: nn.Module, job: Job, config: LoraConfig) -> None:
    """Refuse ranks of which one linear's adapter alone needs more memory than there is.

    PEFT makes adapters where they are, on the CPU, before anything could say how large they are.

    raises    JobError
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    sides = [linear.in_features + linear.out_features for linear in linears]
    rank = max([getattr(config, "r", 1), *(getattr(config, "rank_pattern", None) or {}).values()])
    machine_bytes = total_bytes()
    needed = 4 * rank * min(sides, default=0)
    if needed > machine_bytes:
        raise JobError(
            "an adapter of this rank does not fit into memory",
            job=job.name,
            found=f"r {rank}: {needed / 2**30:,.0f} GiB for one linear at least",
            expected=f"less than {machine_bytes / 2**30:,.0f} GiB for all",
            help=f"the base's linears have at most {max(sides)} rows and columns: give a rank "
            "far below",
        )


def _wrap(model: nn.Module, job: Job, config: LoraConfig, backbone: Backbone) -> nn.Module:
    """PEFT's own wrapping; what the job trains of the base itself becomes the job's own tensor."""
    from peft import get_peft_model

    _require_memory(model, job, config)
    if not hasattr(model, "prepare_inputs_for_generation"):
        config.task_type = None  # PEFT's class for language models wants to generate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wrapped = get_peft_model(
                model,
                config,
                autocast_adapter_dtype=job.adapter_dtype == "float32",
            )
        except (ValueError, TypeError) as error:
            raise JobError(
                f"PEFT refuses the fields of {kind_of(job.lora_fields)} on this base",
                job=job.name,
                base=backbone.title,
                found=error,
                help="name other linear modules in lora.target_modules",
            ) from error
    wrapped.train()
    make_traceable(wrapped)
    for module in wrapped.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in backbone.names:
                continue
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                own = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(own)
    return wrapped


class TracedRow(nn.Module):
    """A model called with the inputs that every graph of ours takes.

    keywords   whether it takes them by transformers' names, or the ids alone
    counts     whether it is given no positions, and counts them by the ids
    masked     whether it is given a mask of padding in batch form: its tokens see later ones
    """

    def __init__(
        self,
        model: nn.Module,
        form: Form,
        *,
        keywords: bool = True,
        calls: LayerCalls | None = None,
        counts: bool = False,
        masked: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.form = form
        self.counts, self.masked = counts, masked
        self.keywords = keywords
        self.calls = calls
        self.attention: list[str] = []
        self.runs: Counter[int] = Counter()
        stop = TracedRow.forward.__code__
        self.guards, self.watch = SizeGuards(form, stop), Watch(model, stop)

    def forward(self, input_ids: Tensor, position_ids: Tensor, *tables: Tensor) -> Tensor:
        """Logits [1, T, V], or [B, S, V] in batch form."""
        self.watch.clear()
        if self.calls is not None:
            self.calls.clear()
        row = row_of(dict(zip(TABLES, tables, strict=True)))
        inputs = (input_ids, position_ids, *tables)
        row_shaped = (input_ids, position_ids, tables[TABLES.index("token_index")])
        with ExitStack() as stack:
            self.attention = stack.enter_context(row)
            stack.enter_context(RealConstants())
            stack.enter_context(self._counted())
            stack.enter_context(self.guards.running(row_shaped))
            stack.enter_context(self.watch.running(inputs))
            if self.form == "packed":
                given = {} if self.counts else {"position_ids": position_ids}
                with unpacked_lines(padded=False), CountsBySequence(input_ids):
                    out = self.model(input_ids=input_ids, **given, use_cache=False)
            elif self.keywords:
                given = {}
                if self.masked:
                    given["attention_mask"] = (row_shaped[-1] > PADDING).long()
                with unpacked_lines(padded=True, hidden=self.masked):
                    out = self.model(input_ids=input_ids, **given, use_cache=False)
            else:
                out = self.model(input_ids)
        return _logits_of(out)

    def repeated(self) -> frozenset[str]:
        """Paths of the model's modules that the last forward ran more than once."""
        modules = self.model.named_modules()
        return frozenset(path for path, module in modules if self.runs[id(module)] > 1)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.runs.clear()
        hook = register_module_forward_pre_hook(lambda module, _: self.runs.update([id(module)]))
        try:
            yield
        finally:
            hook.remove()


def _logits_of(out: Any) -> Tensor:
    """The logits among what a model returns: alone, first, or an attribute of that name.

    raises    BaseRefused
    """
    logits = getattr(out, "logits", out)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if isinstance(logits, Tensor) and logits.dim() == 3:
        return logits
    raise BaseRefused(
        "the base's forward returns no logits of a language model",
        expected="a tensor [batch, tokens, vocabulary], alone, first, or the attribute logits",
        found=f"a tensor of {logits.dim()} dimensions"
        if isinstance(logits, Tensor)
        else type(logits).__name__,
        help="hand over an nn.Module whose forward returns them",
    )


class RealConstants(TorchFunctionMode):
    """Makes tensors from Python data on the CPU, then moves them.

    `torch.tensor([2], device=x.device)` and `x[..., [2]]` make a tensor where x lies; on the meta
    device it has no values, and the graph would hold an empty constant.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in MAKERS and named.get("device") is not None:
            device = named.pop("device")
            return func(*args, **named).to(device)
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device, **named)
        if func is Tensor.__getitem__:
            args = (args[0], _index(args[1]))
        return func(*args, **named)


def _index(index: Any) -> Any:
    """An index whose lists are tensors."""
    if isinstance(index, tuple):
        return tuple(_index(item) for item in index)
    return torch.tensor(index) if isinstance(index, list) else index


def accepts_positions(model: nn.Module) -> bool:
    """Whether a model's forward takes position_ids, without which rows cannot be packed."""
    return _accepts(model, "position_ids")


def _accepts(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def export_row(row: TracedRow, subject: str) -> fx.GraphModule:
    """Trace a model over one row of dynamic size, on meta.

    subject   whose model it is, for errors
    raises    BaseNotTraceable with the operator and the line of model code
    """
    shape = (1, TOKENS) if row.form == "packed" else (LINES, WIDTH)
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    small = {"dtype": torch.int32, "device": "meta"}
    inputs = (
        ids,
        torch.zeros_like(ids),
        torch.zeros(SEQUENCES + 1, **small),  # type: ignore[call-overload]
        torch.zeros((), **small),  # type: ignore[call-overload]
        torch.zeros(JOBS + 1, **small),  # type: ignore[call-overload]
        torch.zeros(shape, **small),  # type: ignore[call-overload]
        torch.zeros((JOBS, 2), dtype=torch.int64, device="meta"),
    )
    dynamic = torch.export.Dim.DYNAMIC
    token = {1: dynamic} if row.form == "packed" else {0: dynamic, 1: dynamic}
    tables: Any = ({0: dynamic}, {}, {0: dynamic}, token, {0: dynamic})

    def export() -> torch.export.ExportedProgram:
        with torch.enable_grad():
            return torch.export.export(
                row, inputs, dynamic_shapes=(token, token, tables), strict=False
            )

    try:
        program = export()
    except TloraError:
        raise
    except Exception as error:
        if row.guards.complete:
            row.guards.require_for_all(subject)
        raise not_traceable(error, row.model, row.form, subject) from error
    row.guards.require_for_all(subject)
    row.watch.require_kept()
    if row.watch.open:
        _require_same_again(row.watch, program, export)
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def _require_same_again(
    watch: Watch,
    first: torch.export.ExportedProgram,
    export: Callable[[], torch.export.ExportedProgram],
) -> None:
    """Trace a second forward, from the state that the first one left behind.

    raises    StateChanged where it differs, or changes the state once more
    """
    left, doubtful = dict(watch.left), ", ".join(watch.open)
    for slot in left.values():
        slot.put(meta_copy(slot.value))
    again: list[str] = []
    cause: Exception | None = None
    try:
        same = program_text(first) == program_text(export())
        again = [k for k, slot in watch.open.items() if not isinstance(slot.value, Tensor)]
    except Exception as error:  # noqa: BLE001  (model code raises what it likes)
        same, cause = False, error
    if again or not same:
        raise StateChanged(
            "the model's forward changes what its next forward does",
            attribute=", ".join(again) or doubtful,
            expected="each forward computes the same of the same row",
            help="compute the value in each forward, or in the constructor",
        ) from cause


def program_text(program: torch.export.ExportedProgram) -> list[str]:
    """A program as lines that are equal for programs that compute the same."""
    order = {node: f"%{index}" for index, node in enumerate(program.graph.nodes)}
    lines = [
        f"{node.op} {'' if node.op == 'placeholder' else node.target} "
        f"{fx.map_arg((node.args, node.kwargs), lambda n: order[n])}"
        for node in program.graph.nodes
    ]
    constants = program.constants.items()
    lines.extend(f"{name} {value}" for name, value in constants if isinstance(value, Tensor))
    return lines


def import_graph(
    module: fx.GraphModule, row: TracedRow, base_names: dict[int, str]
) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Copy an exported graph into one of ours.

    base_names   id of each tensor of the base to its canonical name
    returns      the graph, and the constants that export lifted out of model code
    """
    reader = _Importer(module, row, base_names)
    result = reader.inline(module, None)
    reader.graph.output(result[0] if isinstance(result, (tuple, list)) else result)
    return reader.graph, reader.constants


class _Importer:
    """State of one import: the new graph, and what it has read so far."""

    def __init__(self, module: fx.GraphModule, row: TracedRow, base_names: dict[int, str]) -> None:
        self.module, self.row, self.base_names = module, row, base_names
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.attributes: dict[str, fx.Node] = {}

    def inline(self, module: fx.GraphModule, inputs: list[Any] | None) -> Any:
        """Copy a module's nodes; returns what its output node returns."""
        copies: dict[fx.Node, Any] = {}
        given = iter(inputs or ())
        names = iter(INPUTS)

        def value_of(node: fx.Node) -> Any:
            return copies[node]

        for node in module.graph.nodes:
            args: Any = fx.map_arg(node.args, value_of) if node.op != "get_attr" else ()
            if node.op == "placeholder":
                copies[node] = (
                    self._placeholder(node, next(names)) if inputs is None else next(given)
                )
            elif node.op == "get_attr":
                attribute = getattr(module, node.target, None)
                if isinstance(attribute, fx.GraphModule):
                    copies[node] = attribute
                else:
                    copies[node] = self._attribute(module, node)
            elif node.op == "output":
                return args[0]
            elif node.op == "call_function":
                copies[node] = self._call(node, args, fx.map_arg(node.kwargs, value_of))
        raise AssertionError("a graph without output")

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        name = getattr(node.target, "__name__", "")
        if name == "wrap_with_set_grad_enabled":
            enabled, submodule, *inputs = args
            result = self.inline(submodule, inputs)
            return result if enabled else [self._detached(item) for item in result]
        if name == "wrap_with_autocast":
            submodule, inputs = next(
                (arg, args[index + 1 :])
                for index, arg in enumerate(args)
                if isinstance(arg, fx.GraphModule)
            )
            return self.inline(submodule, list(inputs))
        if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        target: Any = node.target
        return self._add(self.graph.call_function(target, args, kwargs), node)

    def _detached(self, value: Any) -> Any:
        held = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(held, Tensor) or not held.is_floating_point():
            return value
        detached = self.graph.call_function(torch.ops.aten.detach.default, (value,))
        detached.meta = dict(value.meta)
        return detached

    def _placeholder(self, node: fx.Node, name: str) -> fx.Node:
        copied = self.graph.placeholder(name)
        copied.meta.update(val=node.meta["val"], path="", source="")
        return copied

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> fx.Node:
        target = str(node.target)
        ref = self._reference(module, target, node)
        key = f"{ref.owner}:{ref.name}"
        if key not in self.attributes:
            copied = self.graph.create_node("get_attr", ref.name.removeprefix(PEFT_PREFIX))
            copied.meta.update(val=node.meta.get("val"), path="", source="", tensor=ref)
            if ref.owner == "constant":
                mode = fake_mode_of(self.module.graph)
                copied.meta["val"] = fake_like(mode, ref.shape, ref.dtype)
            elif copied.meta["val"] is None:
                copied.meta["val"] = _get(module, target)
            self.attributes[key] = copied
        return self.attributes[key]

    def _reference(self, module: fx.GraphModule, target: str, node: fx.Node) -> TensorRef:
        try:
            tensor = _get(self.row, target)
            name = target.removeprefix("model.")
        except AttributeError:
            tensor = _get(module, target)
            if tensor.is_meta:
                raise _without_value(node) from None
            name = self._constant(tensor.detach())
            return TensorRef("constant", name, tuple(tensor.shape), tensor.dtype)
        canonical = self.base_names.get(id(tensor))
        if canonical is None and not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            name = self._constant(tensor.detach())
            return TensorRef("constant", name, tuple(tensor.shape), tensor.dtype)
        owner = "base" if canonical else "job"
        return TensorRef(owner, canonical or name, tuple(tensor.shape), tensor.dtype)  # type: ignore[arg-type]

    def _constant(self, value: Tensor) -> str:
        """The name of a lifted constant, the same for equal ones."""
        for name, known in self.constants.items():
            if known.dtype == value.dtype and torch.equal(known, value):
                return name
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def _add(self, copied: fx.Node, node: fx.Node) -> fx.Node:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]) if stack else ""
        path = path.removeprefix("L['self'].").removeprefix("model")
        copied.meta.update(
            val=node.meta.get("val"),
            path=path.removeprefix(".").removeprefix(PEFT_PREFIX.rstrip(".")).removeprefix("."),
            source=_source_line(node.meta.get("stack_trace")),
        )
        return copied


def _without_value(node: fx.Node) -> BaseNotTraceable:
    user = next(iter(node.users), node)
    return BaseNotTraceable(
        "the model makes a tensor of numbers whose values are not known without weights",
        operator=user.target,
        source=_source_line(user.meta.get("stack_trace")) or None,
        help="make it in the module's constructor, as a buffer",
    )


def _get(module: nn.Module, target: str) -> Tensor:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    assert isinstance(value, Tensor)
    return value


def _source_line(stack_trace: str | None) -> str:
    """The innermost model line of a node's stack trace: "file.py:12  code"."""
    lines = (stack_trace or "").strip().splitlines()
    if len(lines) < 2:
        return ""
    where, code = lines[-2].strip(), lines[-1].strip()
    if not where.startswith("File "):
        return ""
    file, _, rest = where.removeprefix('File "').partition('", line ')
    return f"{Path(file).name}:{rest.split(',')[0]}  {code}"

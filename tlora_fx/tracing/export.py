"""The graph of one job's model, or of the base alone: torch.export over one row, without weights.

The graph reads its tensors through `TensorRef`s, knows for each node the module path and the source
line, and holds no submodules: regions that only switched gradients or autocast are inlined, with
`detach` where gradients were off.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from tlora_fx.config.job import Job
from tlora_fx.config.other_kinds import kind_of
from tlora_fx.errors import BaseNotTraceable, GraphInvalid, JobError, TloraError, errors_as
from tlora_fx.host.memory import total_bytes
from tlora_fx.ir.graph import (
    INPUTS,
    ON_PARAMETERS,
    PEFT_PREFIX,
    AdapterSite,
    Form,
    JobGraph,
    LayerPlan,
    TensorRef,
    arguments_of,
    is_call,
    placeholders,
)
from tlora_fx.ir.shapes import fake_like, fake_mode_of, give_value, remember_run
from tlora_fx.model.backbone import Backbone
from tlora_fx.tracing.adapters import (
    check_wrapped,
    layer_signature,
    make_traceable,
    wrap_with_peft,
)
from tlora_fx.tracing.attention import packed_implementation, register
from tlora_fx.tracing.experts import use_expert_products
from tlora_fx.tracing.layer_calls import LayerCalls
from tlora_fx.tracing.layers import plan_layers, pruned_copy
from tlora_fx.tracing.positions import counts_positions
from tlora_fx.tracing.refusals import DETAIL, model_line, require_no_reads, words_of
from tlora_fx.tracing.row_export import TracedRow, accepts, export_row

if TYPE_CHECKING:
    from peft import LoraConfig

# What tracing notes of a value is no part of the computation.
ASSERTION = torch.ops.aten._assert_tensor_metadata.default
# Numbers in a graph that serves every rank, scaling and dropout rate. A rate other than 0 keeps the
# dropouts in the graph.
SOME_RANK = 8
SOME_SCALING = 2.5
SOME_RATE = 0.5


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
              numbers in the graph are placeholders: of plain LoRA all, else the rates
    raises    BaseNotTraceable, AttentionNotPackable, AdapterMismatch
    """
    config = job.lora_config()
    written = sites

    def signature(layer: str) -> Hashable:
        return layer_signature(sites, layer, str(getattr(config, "bias", "none")), exact)

    if not exact and not any(site.kind in ON_PARAMETERS for site in sites.values()):
        config.lora_dropout = SOME_RATE
    if not exact and all(site.kind == "lora" for site in sites.values()):
        wrap_pruned(job, backbone, sites, fold)  # with the job's own numbers
        config.r, config.lora_alpha = SOME_RANK, SOME_RANK * SOME_SCALING
        config.rank_pattern, config.alpha_pattern, config.use_rslora = {}, {}, False
        written = {
            path: replace(site, rank=SOME_RANK, scaling=SOME_SCALING)
            for path, site in sites.items()
        }
    plan = plan_layers(backbone, signature, fold)
    graph = _trace(backbone, plan, form, f"job '{job.name}'", job, written, config)
    graph.sites = sites
    return graph


def wrap_pruned(
    job: Job, backbone: Backbone, sites: dict[str, AdapterSite], fold: bool = True
) -> None:
    """Have PEFT wrap the layers that would be traced of a job, and compare them with its sites.

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
    placed = accepts(model, "position_ids")
    counts = form == "packed" and placed and _counts_positions(backbone, plan)
    masked = backbone.is_encoder and accepts(model, "attention_mask")
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
    if not accepts(model, "position_ids"):
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
    _require_memory(model, job, config)
    what = f"PEFT refuses the fields of {kind_of(job.lora_fields)} on this base"
    with errors_as(
        JobError, what, ValueError, TypeError, job=job.name, base=backbone.title,
        help="name other linear modules in lora.target_modules",
    ):  # fmt: skip
        wrapped = wrap_with_peft(model, config, job.adapter_dtype)
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
        self.mode = fake_mode_of(module.graph)
        # Whether operators ran under torch's autocast, which graphs of ours run without.
        self.under_autocast = False
        # A module that stands at several places is known by the first: PEFT adapts it there. One
        # without parameters, such as an activation, belongs to whichever layer calls it.
        tensors = chain(row.named_parameters(), row.named_buffers())
        self.names = {id(tensor): name for name, tensor in tensors}
        first = {id(part): name for name, part in row.named_modules() if _has_parameters(part)}
        self.paths = {
            name: first.get(id(part), name)
            for name, part in row.named_modules(remove_duplicate=False)
        }

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
            before, self.under_autocast = self.under_autocast, True
            result = self.inline(submodule, list(inputs))
            self.under_autocast = before
            return result
        if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        target: Any = node.target
        copied = self._add(self.graph.call_function(target, args, kwargs), node)
        if not self.under_autocast and all("val" in n.meta for n in node.all_input_nodes):
            ran: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            remember_run(copied, self.mode, *ran)
        return copied

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
                copied.meta["val"] = fake_like(self.mode, ref.shape, ref.dtype)
            elif copied.meta["val"] is None:
                copied.meta["val"] = _get(module, target)
            self.attributes[key] = copied
        return self.attributes[key]

    def _reference(self, module: fx.GraphModule, target: str, node: fx.Node) -> TensorRef:
        try:
            tensor = _get(self.row, target)
            name = self.names.get(id(tensor), target).removeprefix("model.")
        except AttributeError:
            tensor = _get(module, target)
            if tensor.is_meta:
                raise _without_value(node) from None
            return self._constant(tensor.detach())
        canonical = self.base_names.get(id(tensor)) or self._copied_buffer(tensor, target)
        if canonical is None and not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            return self._constant(tensor.detach())
        owner = "base" if canonical else "job"
        return TensorRef(owner, canonical or name, tuple(tensor.shape), tensor.dtype)  # type: ignore[arg-type]

    def _copied_buffer(self, tensor: Tensor, target: str) -> str | None:
        """The base's name of a buffer in a trained copy of a module, which is not trained."""
        original = target.replace(".modules_to_save.default.", ".original_module.")
        if isinstance(tensor, nn.Parameter) or original == target:
            return None
        return self.base_names.get(id(_get(self.row, original)))

    def _constant(self, value: Tensor) -> TensorRef:
        """A lifted constant, the same for equal ones."""
        alike = (name for name, known in self.constants.items()
                 if known.dtype == value.dtype and torch.equal(known, value))  # fmt: skip
        name = next(alike, f"constant_{len(self.constants)}")
        self.constants.setdefault(name, value)
        return TensorRef("constant", name, tuple(value.shape), value.dtype)

    def _add(self, copied: fx.Node, node: fx.Node) -> fx.Node:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]) if stack else ""
        path = path.removeprefix("L['self'].")
        path = self.paths.get(path, path).removeprefix("model")
        copied.meta.update(
            val=node.meta.get("val"),
            path=path.removeprefix(".").removeprefix(PEFT_PREFIX.rstrip(".")).removeprefix("."),
            source=_source_line(node.meta.get("stack_trace")),
        )
        return copied


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _without_value(node: fx.Node) -> BaseNotTraceable:
    user = next(iter(node.users), node)
    return BaseNotTraceable(
        "the model makes a tensor of numbers whose values are not known without weights",
        operator=user.target,
        source=_source_line(user.meta.get("stack_trace")) or None,
        help="make it in the module's constructor, as a buffer",
    )


def _get(module: nn.Module, target: str) -> Tensor:
    value: Any = operator.attrgetter(target)(module)
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


aten = torch.ops.aten


def convolve_by_sequence(graph: fx.Graph) -> None:
    """Restart causal convolutions over the tokens of a packed row at each sequence.

    A model puts as many zeros in front of its row as the kernel reaches back, by itself or through
    the convolution, and takes as many results as the row has tokens. What is another convolution
    stays, and the check of tokens refuses it.

    graph    a traced packed row
    """
    inputs = placeholders(graph)
    row = str(inputs["input_ids"].meta["val"].shape[1])
    for node in list(graph.nodes):
        if is_call(node, aten.conv1d.default):
            _replace(graph, node, row, inputs["cu_seqlens"])


def _replace(graph: fx.Graph, node: fx.Node, row: str, cu_seqlens: fx.Node) -> None:
    given = arguments_of(node)
    padded, weight, bias, stride, (padding,), (dilation,), groups = given.values()
    x, zeros = _unpadded(padded)
    kernel = weight.meta["val"].shape[-1]
    known = all(isinstance(number, int) for number in (padding, zeros, dilation, kernel))
    causal = known and padding + zeros == dilation * (kernel - 1)
    if stride != [1] or not causal or _length(x) != row:
        return
    for result in list(_first(node, row)):
        arguments = (x, weight, bias, cu_seqlens, dilation, groups)
        with graph.inserting_before(result):
            made = graph.call_function(torch.ops.tlora_fx.sequence_conv1d.default, arguments)
        made.meta = {**node.meta, "val": result.meta["val"]}
        result.replace_all_uses_with(made)
        graph.erase_node(result)


def _unpadded(x: fx.Node) -> tuple[fx.Node, Any]:
    """What has zeros put around its last dimension, and how many in front; else x itself."""
    if is_call(x, aten.pad.default, aten.constant_pad_nd.default):
        arguments: Any = x.args
        source, sizes, *kind = arguments
        adds = all(isinstance(size, int) and size >= 0 for size in sizes)
        if len(sizes) == 2 and adds and all(word in ("constant", None, 0) for word in kind):
            return source, sizes[0]
    return x, 0


def _first(node: fx.Node, row: str) -> Iterator[fx.Node]:
    """What has the first results only, one a token: slices, or all that there are."""
    if _length(node) == row:
        yield node
        return
    for user in node.users:
        if is_call(user, aten.slice.Tensor) and _length(user) == row:
            _, dim, start, _, step = arguments_of(user).values()
            if dim in (-1, user.meta["val"].dim() - 1) and not start and step == 1:
                yield user


def _length(value: fx.Node) -> str:
    return str(value.meta["val"].shape[-1])

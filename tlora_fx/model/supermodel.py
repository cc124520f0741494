"""The Shared Super-Model: a fused graph as an nn.Module that owns its tensors.

It is built on the meta device. `materialize` gives it the base's weights and allocates the
adapters; from then on it trains. Its code is the text of `ssm.py`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any, NoReturn, Self, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tlora_fx.config.job import Job
from tlora_fx.errors import NotAdmitted, SuperModelMisuse, nearest
from tlora_fx.ir.graph import (
    HEAD,
    LOSS,
    PEFT_PREFIX,
    AdapterSite,
    Block,
    GroupGraph,
    placeholders,
)
from tlora_fx.ir.joint import carried_inputs
from tlora_fx.ir.storage import LocalShard, Shard, stored_value
from tlora_fx.model.adapter_bank import AdapterBank
from tlora_fx.model.backbone import Backbone
from tlora_fx.model.batch import PackedBatch
from tlora_fx.model.compiled import (
    compile_method,
    export_net,
    repeatable,
    row_sizes,
)
from tlora_fx.model.elastic import Admission, Membership, Resolve
from tlora_fx.model.loss import ChunkedLoss, Draw, Finish
from tlora_fx.model.module_builder import Reformed, TensorLocation, build_module, run_source
from tlora_fx.model.preference import with_base, with_preferences
from tlora_fx.model.source import FINISH, class_name, group_source
from tlora_fx.ops import norms_kept, segment_sum, without_dropout
from tlora_fx.ops.kernels.packed import extended_weights

# Rows of adapters for which weights of an open model are extended, where banks may grow to so many.
_RESERVED_ROWS = 64
# Methods that `compile` gives to instances, before those of their classes.
_COMPILED_METHODS = ("forward", "_run", FINISH, "chunk", "finished_chunk")


class SuperModel(nn.Module):
    """Many LoRA jobs on one frozen base, as one model.

    group      the fused graph and the graphs that it was made of
    backbone   the frozen base
    jobs       in the order of every table; of an open model, whose jobs come and go, a job a slot
    resolve    finds the adapters of a job that comes, None where none may
    source     the code that runs, as the text of `ssm.py`; by default what the graphs say
    net        the modules that run; base tensors keep the base's own names inside it
    """

    def __init__(
        self,
        group: GroupGraph,
        backbone: Backbone,
        jobs: Sequence[Job],
        resolve: Resolve | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.backbone = backbone
        self.jobs = list(jobs)
        self.source = group_source(group, backbone.title) if source is None else source
        self.ready = False
        self.part = LocalShard()
        self._unused: dict[str, Tensor] = {}
        self._extends_weights = self._grad_enabled = False
        self._filled: frozenset[str] | None = None
        #: How an open model runs, with the rows that were captured: it serves whoever comes, until
        #: its tensors or its code are others.
        self.applied: Any = None
        self._compiled_with: Mapping[str, Any] | None = None
        self._plain_methods: list[tuple[nn.Module, str, Any]] = []
        self._parameters_of: dict[str, dict[str, nn.Parameter]] = {}
        self._references: dict[str, dict[str, Tensor]] = {}
        self._inputs = tuple(placeholders(group.root))
        self._layout = build_module(group, self.source)
        self.net = self._layout.net
        if HEAD in group.blocks:
            self._loss().objective = backbone.spec.objective
        self.resolve = resolve
        self._membership: Membership | None = None
        if group.open is not None and resolve is not None:
            self._membership = Membership(group, self.jobs, self.banks, self.net, resolve)
        for block in group.blocks.values():
            if block.is_staged:
                self._compile_layers(block, {"fullgraph": True, "backend": "aot_eager"})

    def extra_repr(self) -> str:
        """Jobs and rows, as `print(model)` shows them."""
        jobs = ", ".join(job.name for job in self.jobs)
        return f"jobs: {jobs}; {self.group.form} rows"

    def __deepcopy__(self, memo: dict[int, Any]) -> SuperModel:
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.forget_views()  # copies of views would be no views of the copied banks
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            if own.grad is not None and other is not own:  # torch does not copy it
                other.grad = own.grad.detach().clone()
        return copied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero all gradients in place: those of jobs are views of them, so none is let go."""
        super().zero_grad(set_to_none=False)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy values into the model, as torch does; raises SuperModelMisuse for assign=True."""
        if assign:
            raise SuperModelMisuse(
                "a Shared Super-Model keeps its tensors: jobs' parameters are views of them",
                found="load_state_dict(assign=True)",
                help="leave assign out: values are copied then",
            )
        self._require_weights()
        return super().load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse another dtype or device, as of `half()` and `to("cuda")`.

        raises    SuperModelMisuse
        """
        self._require_weights()
        weights = {(tensor.dtype, tensor.device) for tensor in self.parameters()}
        tables = {(tensor.dtype, tensor.device) for tensor in self.buffers()}
        for dtype, device in weights:
            after = _changed(fn, dtype, device)
            if after is not None:
                alike = (after.dtype, after.device) == (dtype, device)
                found = "tensors of other memory" if alike else f"{after.dtype} on {after.device}"
                raise SuperModelMisuse(
                    "a Shared Super-Model stays in the dtypes and on the device that it has",
                    expected=f"{dtype} on {device}",
                    found=found,
                    help="give the base its dtype, and GroupStep or Trainer the device",
                )
        # Tables of jobs stay on the CPU where the weights are on a GPU.
        if any(_changed(fn, *before) is not None for before in tables):
            return self
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise SuperModelMisuse(
            "a Shared Super-Model cannot be pickled: its classes are made of its own code",
            help="pickle its state_dict(), or write it with `tlora-fx compile` and take "
            "tlora_fx.load(folder, weights); export() gives a program that torch.export.save keeps",
        )

    @property
    def is_open(self) -> bool:
        """Whether jobs may join and leave."""
        return self._membership is not None

    @property
    def members(self) -> dict[str, int]:
        """The jobs that are in the model now, and their indices in every table."""
        if self._membership is not None:
            return self._membership.members
        return {name: index for index, name in enumerate(self.group.job_names)}

    def admit(self, job: Job, *, may_grow: bool = True) -> Admission:
        """Admit a job to an open model, between two rounds; its adapter is zeros.

        Nothing is traced or compiled, but where `may_grow` and all slots or rows are taken: banks
        double then, once. Views of jobs that moved are to be asked for again.

        raises    NotAdmitted, JobsDiffer, UnknownTarget; nothing is changed then
        """
        admission = self._opened().admit(job, may_grow=may_grow)
        for name in (job.name, *admission.moved):
            self._parameters_of.pop(name, None)
        if admission.grown:
            self.forget_views()
            self.applied = None
        self._layout.own.setdefault(job.name, {})
        self._set_site_gradients()
        return admission

    def require_fits(self, job: Job) -> None:
        """Refuse a job that an open model can never take, however many slots are free.

        raises    NotAdmitted, JobsDiffer, UnknownTarget
        """
        self._opened().fitting(job)

    def bytes_needed(self, job: Job, *, may_grow: bool = True, crowded: bool = False) -> int:
        """Memory that a job would take in an open model, its activations not counted.

        crowded   others come before it, and may take the free slots
        """
        return self._opened().bytes_needed(job, may_grow=may_grow, crowded=crowded)

    def release(self, name: str) -> None:
        """Release a job of an open model, between two rounds; its rows are zeros then.

        raises    NotAdmitted where it is not in the model
        """
        self._opened().release(name)
        self._references.pop(name, None)
        self._parameters_of.pop(name, None)
        self._layout.own.pop(name, None)
        self._set_site_gradients()

    def _opened(self) -> Membership:
        if self._membership is None:
            raise NotAdmitted(
                "the jobs of this model stay as they are",
                help="compile it for jobs that come and go: compile(jobs, open=OpenSlots())",
            )
        return self._membership

    def keep_all_gradients(self) -> None:
        """Compute gradients of sites without rows too: somebody holds them for all jobs to come."""
        self._grad_enabled = True
        self._set_site_gradients()

    def _set_site_gradients(self) -> None:
        """Enable gradients of the sites that have rows, so that no backward looks at others.

        Compiled code is made for all sites, whoever comes.
        """
        self._filled = None
        for bank in self.banks.values() if self.is_open else ():
            a, b = bank.a, bank.b
            made = self._grad_enabled or self._extends_weights or a.device.type != "cpu"
            wanted = made or (bank.table is not None and any(bank.table.ranks))
            if a.requires_grad != wanted:
                a.requires_grad_(wanted)
                b.requires_grad_(wanted)

    @property
    def adapted_sites(self) -> frozenset[str]:
        """The sites that a job adapts, by path; kernels of others are not launched."""
        if self._filled is None:
            self._filled = frozenset(
                path
                for path, bank in self.banks.items()
                if bank.table is None or any(bank.table.ranks)
            )
        return self._filled

    @property
    def banks(self) -> Mapping[str, AdapterBank]:
        """The adapter storage of every lowered site, by the site's path in the base."""
        return self._layout.banks

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled_with is not None

    @property
    def compiled_with(self) -> Mapping[str, Any] | None:
        """Arguments of the last `compile`, another mapping each time; None where there was none.

        Code that replaces the model's layers is compiled the same way.
        """
        return self._compiled_with

    def forward(self, row: PackedBatch) -> Tensor:
        """Each job's sum of token losses over one row; without lower-loss, the logits.

        row       on the model's device; a job that has pairs in it gives their loss instead
        returns   [J], float32 or the base's dtype where that is wider
        raises    SuperModelMisuse before `materialize`
        """
        self._require_weights()
        if row.is_plain:
            return self._run(*self._tensors(row))
        row = self.with_reference(row)
        if row.pairs:
            return self.sums_of(row, self.token_losses(row))
        with self._terms_of(row):
            return self._run(*self._tensors(row))

    def with_reference(self, row: PackedBatch) -> PackedBatch:
        """The row whose pairs know the losses of what they are compared with, by a forward.

        row   on the model's device
        """
        if row.compared is None:
            return row
        losses = self.score(row.compared, [own.job for own in row.pairs])
        pairs = with_base(row.pairs, losses, row.compared.target_segments)
        return replace(row, pairs=pairs, compared=None)

    def token_losses(self, row: PackedBatch) -> Tensor:
        """The loss of each target row, [N], for `sums_of`: some jobs have losses of sequences."""
        with self._loss().by_row(), self._terms_of(row):
            return self._run(*self._tensors(row))

    def sums_of(self, row: PackedBatch, losses: Tensor) -> Tensor:
        """Each job's loss, [J], by the losses of the row's target rows, [N]."""
        segments = row.target_segments
        sums = cast(Tensor, segment_sum(losses, segments))
        return with_preferences(sums, losses, segments, row.pairs)

    def _terms_of(self, row: PackedBatch) -> AbstractContextManager[None]:
        return nullcontext() if row.terms is None else self._loss().by_terms(row.terms)

    def _tensors(self, row: PackedBatch) -> Iterator[Tensor]:
        return (getattr(row, name) for name in self._inputs)

    def keep_reference(self, job: str) -> None:
        """Compare a job's pairs with its adapter as it is now, and not with the base.

        Its tensors are kept beside the model until the job leaves, or calls this again.
        """
        parameters = self.job_parameters(job)
        self._references[job] = {key: each.detach().clone() for key, each in parameters.items()}

    def score(self, row: PackedBatch, compared: Sequence[int] = ()) -> Tensor:
        """The token losses of a row, [N], without dropout and gradients.

        row        on the model's device
        compared   jobs that are scored by what they compare with: the base, or their reference
        """
        changed = [pair for job in compared for pair in self._reference_of(self.jobs[job].name)]
        own = [parameter.detach() for parameter, _ in changed]
        with torch.no_grad(), without_dropout(), self._loss().scoring() as losses:
            kept = [torch.empty_like(each) for each in own]
            _copy_all(kept, own)
            try:
                _copy_all(own, [torch.zeros_like(p) if v is None else v for p, v in changed])
                self._run(*self._tensors(row))
            finally:
                _copy_all(own, kept)
        return losses[0]

    def draw(self, row: PackedBatch, draw: Draw) -> tuple[Tensor, Tensor]:
        """A token at each target row, and its log-probability, without dropout and gradients.

        row       on the model's device
        draw      takes tokens of logits
        returns   int64 [N], and [N] float32 or wider, whatever `draw` does to the logits
        """
        self._require_weights()
        with torch.no_grad(), without_dropout(), self._loss().drawing(draw) as (tokens, losses):
            self._run(*self._tensors(row))
        return tokens[0], -losses[0]

    def _reference_of(self, job: str) -> list[tuple[nn.Parameter, Tensor | None]]:
        """What of a job is other in what it compares with, and its values there; None: zeros."""
        parameters, reference = self.job_parameters(job), self._references.get(job)
        if reference is not None:
            return [(parameters[key], value) for key, value in reference.items()]
        return [
            (parameter, None)
            for key, parameter in parameters.items()
            if ".lora_B." in key or ".lora_embedding_B" in key
        ]

    def weighted(self, row: PackedBatch, weights: Tensor) -> Tensor:
        """`forward`'s sums, each multiplied by its job's weight, of a model with lower-loss.

        weights   [J] on the model's device
        returns   [J], float64 where the weights are
        """
        with self.weighing(weights):
            return cast(Tensor, self(row)) * weights

    @contextmanager
    def weighing(self, weights: Tensor) -> Iterator[None]:
        """Tell the loss what its sums are going to be multiplied with, [J]."""
        loss = self._loss()
        loss.weights = weights
        try:
            yield
        finally:
            loss.weights = None

    def _run(self, *inputs: Tensor) -> Tensor:
        """The loss sums by the tensors of a row."""
        return cast(Tensor, self.net(*inputs))

    def compile(
        self, *, fullgraph: bool = True, dynamic: bool | None = None, **options: Any
    ) -> None:
        """Compile layer by layer, in place: each structure of layers once, whatever their number.

        Torch gets `compiled_source`.

        The loss's chunks are compiled too, and begin with a last norm that is frozen; embeddings
        run as they are. A model that was compiled without layers is compiled as a whole. Rows of
        any size run the same code. `torch.compile(model)` compiles everything as one graph instead.

        On CUDA the frozen weights of sites with adapters move into buffers with 64 or 128 rows and
        columns more, where adapters can stand (see ops/kernels/packed.py); a weight that two
        modules share stays where it is, as all do where a site's adapters need more. Those that
        read one input, such as those of q, k and v, or of gate and up, move into one buffer with 64
        to 256 more, so that their products are one. Values, names and shapes stay; the buffers of a
        weight [4096, 4096] are 3 % larger, or 6 %.

        fullgraph, dynamic, options   as of `torch.compile`; `dynamic=False` compiles anew for each
                                      number of tokens. Unless they say otherwise, Inductor chooses
                                      no kernel by timing it: code of two processes gives equal bits
        """
        options = {"fullgraph": fullgraph, "dynamic": dynamic, **repeatable(options)}
        if not self.is_compiled:
            self._plain_methods = self._own_methods()
        self._compiled_with = options
        self.extend_weights()
        layers = [block for block in self.group.blocks.values() if block.name != HEAD]
        if not layers and any(job.has_own_loss for job in self.jobs):
            return  # such a loss is no part of the graph: the model runs as it is
        if not layers:
            compile_method([self], "_run", list(row_sizes(self.group.root).values()), options)
            return
        # Compiled layers are of other classes where their source differs.
        text = self.compiled_source
        classes = {} if text == self.source else run_source(text)
        for block in layers:
            form = classes[class_name(block)].forward if classes else None
            self._compile_layers(block, options, form)
        loss = self._loss()
        root: Any = classes.get("Root")
        for name in ("forward", FINISH):  # Of a compilation before.
            self.net.__dict__.pop(name, None)
        if hasattr(root, FINISH):
            for name in ("forward", FINISH):
                self.net.__dict__[name] = MethodType(getattr(root, name), self.net)
            compile_method([loss], "finished_chunk", [(), *loss.chunk_sizes()], options)
        compile_method([loss], "chunk", loss.chunk_sizes(), options)

    def uncompile(self) -> None:
        """Run the code of before the first `compile` again; weights keep their form in memory."""
        if self.is_compiled:
            self._give_methods(self._plain_methods)
            self._compiled_with = None

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside, a compiled model runs the code of before `compile`, with the same bits."""
        compiled, options = self._own_methods(), self._compiled_with
        self.uncompile()
        try:
            yield
        finally:
            self._give_methods(compiled)
            self._compiled_with = options

    def _own_methods(self) -> list[tuple[nn.Module, str, Any]]:
        """The methods that instances have of their own, None where their class's is theirs."""
        return [
            (module, name, module.__dict__.get(name))
            for module in self.modules()
            for name in _COMPILED_METHODS
        ]

    @staticmethod
    def _give_methods(methods: Sequence[tuple[nn.Module, str, Any]]) -> None:
        for module, name, method in methods:
            module.__dict__.pop(name, None)
            if method is not None:
                module.__dict__[name] = method

    def _compile_layers(
        self, block: Block, options: dict[str, Any], form: Callable[..., Any] | None = None
    ) -> None:
        modules = [self.net.get_submodule(path) for path in block.instances]
        sizes = list(row_sizes(block.graph).values())
        carried = carried_inputs(self.group, block)
        compile_method(modules, "forward", sizes, options, form, carried)

    def extend_weights(self) -> None:
        """Give weights and adapters the form in memory that `compile` gives them.

        A later `compile` then changes code alone. It may be called before weights are loaded.
        """
        self._extends_weights, self.applied = True, None
        self._set_site_gradients()
        self._extend_weights()

    @property
    def compiled_source(self) -> str:
        """The code that `compile` hands to torch: `source`, in the form that it compiles best.

        Gated activations stand in the linears that read them, and a frozen last norm in a method
        that the loss's chunks begin with. Where somebody gave the code that runs, it is that.
        """
        if not self.is_of_graphs:
            return self.source
        return group_source(self.group, self.backbone.title, compiled=True)

    @property
    def is_of_graphs(self) -> bool:
        """Whether the code that runs is what the graphs say, and nobody's own."""
        return self.source == group_source(self.group, self.backbone.title)

    @property
    def finish(self) -> Finish | None:
        """Start of each chunk of the loss in a compiled model, commonly the last norm."""
        return self.net.__dict__.get(FINISH)

    @contextmanager
    def evaluating(self) -> Iterator[list[Tensor]]:
        """Inside, forwards drop nothing, keep nothing for a backward, and note what they predict.

        No adapter may change inside: norms of DoRA are computed once.

        yields    for each forward so far int64 [N]: the most likely token at each target row
        raises    SuperModelMisuse for a model that was compiled without lower-loss
        """
        loss, predicted = self._loss(), list[Tensor]()
        loss.predicted = predicted
        try:
            with torch.no_grad(), without_dropout(), norms_kept():
                yield predicted
        finally:
            loss.predicted = None

    def export(self, *, max_targets: int = 16384) -> ExportedProgram:
        """The model as a `torch.export` program, to be saved by `saved.save_program`.

        The program is flat: layers are inlined, and blocks, roles and provenance are gone. It takes
        the tensors of a row by name, of any number of tokens, sequences and targets of these jobs,
        and returns each job's loss sum [J], with gradients. To load it takes torch and the modules
        that register its operators, which `load_program` imports. It stays on the model's device.

        max_targets   the loss runs in chunks whose size is right for so many targets in a row;
                      rows with more are as right, in larger chunks
        raises        SuperModelMisuse before `materialize`
        """
        self._require_weights()
        if own := [job.name for job in self.jobs if job.has_own_loss or job.neftune_noise_alpha]:
            raise SuperModelMisuse(
                "losses beside cross entropy, and noise, cannot be exported",
                jobs=", ".join(own),
                help="export a model of jobs with method sft, label_smoothing_factor: 0 and "
                "neftune_noise_alpha: 0",
            )
        return export_net(self.net, self.group, self._loss(), max_targets)

    def materialize(
        self,
        base: Mapping[str, Tensor],
        device: torch.device | str,
        part: LocalShard | None = None,
        loaded: Callable[[str], None] | None = None,
    ) -> None:
        """Take the base's weights and allocate adapters, all zero.

        base     tensors by canonical name, whole; moved to the device where they are not there
        part     what this process holds; the rest stays on the meta device
        loaded   called with a layer's path when its tensors are there, before the next one's are
        raises   SuperModelMisuse when one is missing or has another shape
        """
        self.part, self.applied, device = part or LocalShard(), None, torch.device(device)
        held = self._layout.held_by_layer(self.layer_order(), self.part)
        places = Counter(
            name for entries in held.values() for name, _ in entries if isinstance(name, str)
        )
        tied: dict[object, Tensor] = {}
        for layer, entries in held.items():
            for name, location in entries:
                if isinstance(name, Reformed):
                    location.fill(self._reformed(name, base, device))
                    continue
                key = (name, location.cut)
                tensor = tied[key] if key in tied else self._taken(name, location, base, device)
                if places[name] > 1:
                    tied[key] = tensor
                location.fill(tensor)
            if layer and loaded is not None:
                loaded(layer)
        self._allocate_trained(device)
        for name, value in self.group.constants.items():
            moved = value.to(device)
            for module in self.net.modules():
                if name in module._buffers:
                    module._buffers[name] = moved
        reformed = {name for entry in self._layout.reformed for name in entry.names}
        used = reformed - self._layout.copied_names()
        unused = [name for name in base if name not in self._layout.base and name not in used]
        self._unused = {name: base[name].to(device) for name in unused}
        self.ready = True
        self._set_site_gradients()
        self.forget_views()
        self._extend_weights()

    def base_names(self) -> list[str]:
        """Names of the base's tensors in the order in which `materialize` first asks for them."""
        held = self._layout.held_by_layer(self.layer_order(), self.part).values()
        names = (name for entries in held for name, _ in entries if isinstance(name, str))
        return list(dict.fromkeys(names))

    def layer_order(self) -> list[str]:
        """The paths of the layers, in the order in which they run."""
        layers = {path for block in self.group.blocks.values() for path in block.instances}
        calls = (str(node.target) for node in self.group.root.nodes if node.op == "call_module")
        return list(dict.fromkeys(path for path in calls if path in layers and path != LOSS))

    def job_parameters(self, job: str) -> dict[str, nn.Parameter]:
        """Parameters that a job trains in this process, by PEFT's names.

        Where a bank holds it, value and gradient are views of the bank; where processes hold
        pieces, these are this process's (see `shards`).

        raises    SuperModelMisuse before `materialize`, and for a job that the model does not have
        """
        self._require_weights()
        if job not in self._parameters_of:
            if job not in self.group.job_names:
                raise SuperModelMisuse(
                    "the model has no such job",
                    expected=", ".join(self.group.job_names),
                    found=job,
                    nearest=nearest(job, self.group.job_names),
                )
            index = self.group.job_names.index(job)
            parameters: dict[str, Any] = {
                name: location.tensor for name, location in self._held_own(job)
            }
            for path, bank in self._layout.held_banks(self.part).items():
                if bank.serves(index):
                    names = _names(path, self.group.jobs[index].sites)
                    parameters.update(zip(names, bank.job_parameters(index), strict=True))
            self._parameters_of[job] = dict(sorted(parameters.items()))
        return self._parameters_of[job]

    def job_scalings(self, job: str) -> dict[str, float]:
        """Scaling of each of a job's LoRA branches, by PEFT's name of its A."""
        sites = self.group.jobs[self.group.job_names.index(job)].sites
        return {_names(path, sites)[0]: site.scaling for path, site in sites.items()}

    def shards(self, job: str) -> dict[str, Shard | None]:
        """Shard of the whole that each of a job's parameters is; None where it is the whole."""
        shards: dict[str, Shard | None] = {name: None for name, _ in self._held_own(job)}
        index = self.group.job_names.index(job)
        for path, bank in self._layout.held_banks(self.part).items():
            if bank.serves(index):
                a, b = (self.part.shard(cut) for cut in bank.shards)
                # B is the bank's b transposed.
                turned = None if b is None else replace(b, dimension=1 - b.dimension)
                names = _names(path, self.group.jobs[index].sites)
                shards.update(zip(names, (a, turned), strict=True))
        return dict(sorted(shards.items()))

    def partial_sums(self) -> list[nn.Parameter]:
        """The halves of banks whose gradients are to be summed over all pieces.

        Where one of a and b is cut into pieces, each process finds a part of the other's gradient.
        """
        return [
            bank.b if bank.shards[0] is not None else bank.a
            for bank in self._layout.held_banks(self.part).values()
            if (bank.shards[0] is None) != (bank.shards[1] is None)
        ]

    def forget_views(self) -> None:
        """Make `job_parameters` build its views again, after banks have moved."""
        self._parameters_of.clear()

    def jobs_with_tied_tokens(self) -> list[str]:
        """The jobs that train tokens of an embedding and of the head that shares its weight."""
        return list(dict.fromkeys(job for job, _, _ in self._layout.again))

    def base_tensor_or_value(self, name: str) -> Tensor:
        """A tensor of the base by canonical name; one that only jobs' copies use, as it started.

        raises    SuperModelMisuse before `materialize`, or for a tensor that nobody has
        """
        if name in self._layout.base:
            tensor: Any = self._layout.base[name][0].tensor
            return cast(Tensor, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
        if name not in self._unused:
            raise SuperModelMisuse("the base has no such tensor", tensor=name, help="load it first")
        return self._unused[name]

    def has_base_tensor(self, name: str) -> bool:
        """Whether a tensor of the base is in this process, and as it is: not quantised."""
        locations = self._layout.base.get(name)
        return self.part.holds(locations[0].path) if locations else name in self._unused

    def base_shapes(self) -> dict[str, Tensor]:
        """Tensors of the base that the model takes, by canonical name, whole; on the meta device.

        To be called before `materialize`, of a model whose tensors are not cut into pieces.
        """
        shapes = {name: places[0].tensor for name, places in self._layout.base.items()}
        for entry in self._layout.reformed:
            for name, ref in zip(entry.names, entry.ref.originals, strict=True):
                shapes[name] = torch.empty(ref.shape, dtype=ref.dtype, device="meta")
        return shapes

    def reformed_names(self) -> set[str]:
        """Canonical names of the base's tensors that are stored in another form alone."""
        names = {name for entry in self._layout.reformed for name in entry.names}
        return names - set(self._layout.base)

    def stored_parts(self, name: str) -> list[Tensor]:
        """Tensors stored in place of one of the base, by canonical name; [] where it stays."""
        entries = self._layout.reformed
        return [entry.location.tensor for entry in entries if entry.names == (name,)]

    def base_shard(self, name: str) -> Shard | None:
        """Shard of a tensor of the base that this process holds, None for the whole."""
        locations = self._layout.base.get(name)
        return self.part.shard(locations[0].cut) if locations else None

    def _loss(self) -> ChunkedLoss:
        if HEAD not in self.group.blocks:
            raise SuperModelMisuse(
                "the model returns logits, not losses",
                expected="a pipeline with lower-loss",
                help="add lower-loss to the pipeline; it runs last",
            )
        return cast(ChunkedLoss, self.net.get_submodule(LOSS))

    def _taken(
        self, name: str, location: TensorLocation, base: Mapping[str, Tensor], device: torch.device
    ) -> Tensor:
        """A tensor of the base, or this process's piece of it, on the device."""
        tensor = base.get(name, self.backbone.values.get(name))
        shard, shape = self.part.shard(location.cut), tuple(location.tensor.shape)
        expected = shape if shard is None else shard.full_shape(shape)
        if tensor is None or tuple(tensor.shape) != expected:
            raise _wrong(name, expected, tensor)
        if shard is None:
            return tensor.detach().to(device, location.tensor.dtype)
        # A view would keep the whole tensor in memory.
        piece = shard.of(tensor.detach())
        return piece.to(
            device, location.tensor.dtype, copy=True, memory_format=torch.contiguous_format
        )

    def _reformed(
        self, entry: Reformed, base: Mapping[str, Tensor], device: torch.device
    ) -> Tensor:
        """Frozen tensors in the form that a pass asked for."""
        tensors = []
        for name, original in zip(entry.names, entry.ref.originals, strict=True):
            tensor = base.get(name, self.backbone.values.get(name))
            if tensor is None or tensor.shape != original.shape:
                raise _wrong(name, original.shape, tensor)
            tensors.append(tensor.detach().to(device))
        return stored_value(entry.ref, *tensors)

    def _allocate_trained(self, device: torch.device) -> None:
        """Zeroed memory for what this process trains, and for its gradients."""
        for job in self._layout.own:
            for _, location in self._held_own(job):
                leaf = nn.Parameter(torch.zeros_like(location.tensor, device=device))
                leaf.grad = torch.zeros_like(leaf)
                location.module._parameters[location.slot] = leaf
        for _, first, location in self._layout.again:
            location.module._parameters[location.slot] = cast(nn.Parameter, first.tensor)
        for bank in self._layout.held_banks(self.part).values():
            bank.materialize(device)
            if bank.shards[0] is not None:
                bank.offset_columns(self.part.tp_rank)

    def _held_own(self, job: str) -> list[tuple[str, TensorLocation]]:
        own = self._layout.own[job].items()
        sites = next((graph.sites for graph in self.group.jobs if graph.name == job), {})
        return [
            (_name_of_peft(name, sites), location)
            for name, location in own
            if self.part.holds(location.path)
        ]

    def _extend_weights(self) -> None:
        """Extend the weights of a compiled model's sites, so that adapters fit behind them."""
        if not (self.ready and self._extends_weights):
            return
        every = [location for places in self._layout.base.values() for location in places]
        slots = [location.tensor for location in every if self.part.holds(location.path)]
        owners = Counter(slot.data_ptr() for slot in slots)
        for served in self._layout.weights:
            movable = [
                weight
                for weight in served
                if self.part.holds(weight.location.path)
                and owners[weight.location.tensor.data_ptr()] == 1
            ]
            groups = [movable] if len(movable) == len(served) else [[one] for one in movable]
            for group in groups:
                tensors = [weight.location.tensor for weight in group]
                rows = [self._rows_to_reserve(weight.bank) for weight in group]
                for tensor, extended in zip(tensors, extended_weights(tensors, rows), strict=True):
                    tensor.data = extended

    def _rows_to_reserve(self, bank: AdapterBank) -> int:
        """Rows that a bank may come to have: those of an open model double once."""
        rows = len(bank.a)
        return max(rows, min(2 * rows, _RESERVED_ROWS)) if self.is_open else rows

    def _require_weights(self) -> None:
        if not self.ready:
            raise SuperModelMisuse(
                "the model has no weights yet",
                help="use tlora_fx.Trainer, or call materialize() first",
            )


def _names(path: str, sites: Mapping[str, AdapterSite]) -> tuple[str, str]:
    """PEFT's names of the A and B of a job's site."""
    site = f"{PEFT_PREFIX}{path}.lora_"
    return (
        _name_of_peft(f"{site}A.default.weight", sites),
        _name_of_peft(f"{site}B.default.weight", sites),
    )


def _name_of_peft(name: str, sites: Mapping[str, AdapterSite]) -> str:
    """PEFT's name of a job's tensor, which it keeps elsewhere where it adapts a parameter."""
    path, part, tail = name.removeprefix(PEFT_PREFIX).partition(".lora_")
    site = sites.get(path)
    return name if site is None else f"{PEFT_PREFIX}{site.wrapper}{part}{tail}"


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors by few launches, whatever their number."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _wrong(name: str, expected: object, found: Tensor | None) -> SuperModelMisuse:
    return SuperModelMisuse(
        "a tensor of the base is missing or of another shape",
        tensor=name,
        expected=expected,
        found=None if found is None else tuple(found.shape),
        help="check that the checkpoint belongs to the base's config",
    )


def _changed(
    fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """What a function makes of a tensor of a dtype and device; None where it leaves it as it is."""
    probe = torch.empty(0, dtype=dtype, device=device)
    made = fn(probe)
    return None if made is probe else made

"""Tracing, fusing, lowering; folders of compiled models, graph files, replays and bisections."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class CompileError(TloraError, code="T0200"):
    """The jobs could not be compiled: tracing, fusing or lowering failed.

    This is the root of all errors of the compiler. Most failures raise a more specific one.
    """


class BaseNotLoadable(CompileError, code="T0201"):
    """The base model cannot be built.

    Give a hub id, a folder, or from Python an nn.Module.
    """


class BaseFileDamaged(BaseNotLoadable, code="T0257"):
    """A file of the base is missing, cut or damaged.

    The message names the file, what it should hold, and what was found. Copy or download the base
    again. Files are checked by their headers and sizes; a changed weight is not noticed.
    """


class BaseFileRefused(BaseNotLoadable, code="T0258"):
    """A file of the base is one that tlora-fx does not read, whatever it holds.

    This concerns pickled weights, an index that names files outside the base's folder, and a folder
    with an adapter, which would bring a base of its own.
    """


class BaseRefused(CompileError, code="T0202"):
    """The base is of a kind that tlora-fx cannot train correctly.

    Examples are a base that reads images or sound, or a model that is not made for the base's
    `task`. The message says why, and what to use instead.
    """


class OwnLossDiffers(BaseRefused, code="T0259"):
    """The base's own forward computes another loss than the one that jobs train by.

    Jobs train by the mean cross entropy of each next token. The error names the row on which the
    two were compared, both values, and what the difference is, as far as that can be told: a term,
    a weight, another mean, or labels that are not shifted. Set `loss: cross_entropy` in the job to
    train without what the base's own loss adds.
    """


class JobsDiffer(CompileError, code="T0203"):
    """Jobs that should share one model differ in base, dtype or tokenizer.

    Load all jobs with the same base and dtype, or put them into different groups.
    """


class NotAdmitted(CompileError, code="T0252"):
    """A job cannot join a running Shared Super-Model.

    The model is full, or the job's structure differs. `tlora_fx.compile(jobs, open=OpenSlots(...))`
    sets which jobs can join later. The job trains in a group of its own.
    """


class BaseNotTraceable(CompileError, code="T0204"):
    """torch.export cannot trace the model.

    Many models that cannot be traced for packed rows can be traced with `base.attention: batch`.
    """


class BranchOnSize(BaseNotTraceable, code="T0245"):
    """The model's code takes another branch depending on the size of the row.

    A traced graph contains only one of the branches, but rows have many sizes. The message names
    the line.
    """


class GradientLost(CompileError, code="T0246"):
    """The model has an autograd function with a backward of its own, which a graph does not keep.

    Training the graph would use other gradients than the model's. Write the function with detach(),
    or as an operator of torch.library.
    """


class StateChanged(CompileError, code="T0247"):
    """A forward of the model leaves state behind that changes its next forward.

    Examples are a buffer that is replaced, and a random draw. A graph does not keep such a change.
    Compute the value in each forward, or in the constructor.
    """


class TracedOtherwise(CompileError, code="T0248"):
    """The model's code takes another branch while it is traced than when it runs.

    The graph would compute something else than the model.
    """


class AttentionNotPackable(CompileError, code="T0205"):
    """The base's attention cannot run on packed rows.

    A packed row holds several samples, one after another, without padding. Set
    `base.attention: batch`.
    """


class PaddingSeen(CompileError, code="T0240"):
    """In a batch of padded samples, tokens of this base would see the padding.

    Its attention mask is not causal, so that padding changes the results. Train this base alone.
    """


class NotTokenParallel(CompileError, code="T0206"):
    """An operator of the base mixes the tokens of a row.

    In a shared row, one job would see the tokens of another. Set `base.attention: batch`. If the
    operator works on each token by itself, register a rule:
    `tlora_fx.passes.token_parallel.rules.rule(operator)`.
    """


class UnknownTarget(CompileError, code="T0207"):
    """target_modules, target_parameters or modules_to_save name what the base does not have."""


class AdapterMismatch(CompileError, code="T0208"):
    """PEFT places an adapter at another module than tlora-fx planned.

    This is a defect of tlora-fx, or a newer version of PEFT. Please report it.
    """


class NotFoldable(CompileError, code="T0209"):
    """Layers that look equal are not equal, so that they cannot share one block of code.

    The compiler handles this itself: it compiles each layer for itself.
    """


class LayersNotChained(NotFoldable, code="T0215"):
    """The layers do not form a chain in which each reads only the one before it.

    The compiler handles this itself: it compiles the model without layers.
    """


class FusionError(CompileError, code="T0210"):
    """A job's graph does not align with the graph of its base, so that the two cannot be merged."""


class PipelineError(CompileError, code="T0211"):
    """A pipeline names an unknown pass or option, or its passes are in a wrong order.

    `tlora-fx passes` lists all passes with their options.
    """


class GraphInvalid(CompileError, code="T0212"):
    """A pass left an invalid graph.

    This is a defect of that pass.
    """


class PassFailed(GraphInvalid, code="T0216"):
    """A pass raised an error.

    If a replay folder was written, the message names it. `tlora-fx replay DIR` runs the pass again
    from there.
    """


class PassMisreports(GraphInvalid, code="T0217"):
    """A pass returned a wrong answer to whether it changed the graph.

    Return the truth from run(), or nothing.
    """


class TagsBroken(GraphInvalid, code="T0218"):
    """A pass left a node with a role or a set of jobs that cannot be right.

    `tlora_fx/ir/verifier.py` has the rules. An operator of your own that serves several jobs must
    be registered: `tlora_fx.ops.register_operator`.
    """


class NumericsBroken(GraphInvalid, code="T0219"):
    """A pass changed losses or gradients more than its `preserves_numerics` allows.

    Mend the pass, or declare what it changes.
    """


class NotIsolated(GraphInvalid, code="T0249"):
    """A pass lets one job read what belongs to another.

    It put an operator that mixes tokens of the row where jobs share the graph, or let a job read
    or write more than its own segment. Mend the pass. Where the operator works on each token by
    itself, register a rule: `tlora_fx.passes.token_parallel.rules.rule(operator)`. Where it takes
    tables of the row or adapters of all jobs, register it: `tlora_fx.ops.register_operator`.
    """


class OperatorNotRegistrable(CompileError, code="T0253"):
    """A package's registration of an operator does not fit the operator's schema.

    Name arguments as `torch.library` was told, and the row's tables as `tlora_fx.ops.JobOperator`
    lists them. Operators of the namespaces `aten`, `prims` and `tlora_fx` are refused: they have
    rules already. Operators of other packages are taken, those of torch among them.
    """


class FactLapsed(GraphInvalid, code="T0250"):
    """A pass needs a fact about the graph that no longer holds.

    An earlier pass established the fact, and a later pass did not preserve it. Establish it again
    in between. If the later pass does not touch it, name it in that pass's `preserves`.
    """


class PatternWrong(GraphInvalid, code="T0233"):
    """A pattern describes an argument that its operator does not have."""


class RewriteMismatch(GraphInvalid, code="T0234"):
    """A rewrite replaces a value by one of another shape or dtype."""


class RewritesEndless(GraphInvalid, code="T0251"):
    """A set of rewrite rules never ends: one rule undoes what another one does."""


class NotOutlinable(GraphInvalid, code="T0235"):
    """A piece of a graph cannot become a block of its own.

    A block returns exactly one value. Leave out of the piece what other nodes read.
    """


class UnknownNode(CompileError, code="T0236"):
    """`tlora-fx explain` was asked for a module or node that the base does not have."""


class FusedDiffers(CompileError, code="T0239"):
    """The fused graph does not compute what the base computes alone.

    The code of the base depends on something that tracing does not keep, such as a length, state of
    its own, or a mask.
    """


class SuperModelMisuse(CompileError, code="T0214"):
    """A Shared Super-Model was used in a way that it does not support.

    Examples are a model without weights, and a graph that was rewritten after the model was built.
    The message says what to do.
    """


class PluginBroken(CompileError, code="T0226"):
    """A plug-in of another package cannot be imported, is not what it promises, or fails.

    `tlora-fx passes` gives the reason.
    """


class BackendUnsupported(CompileError, code="T0220"):
    """The torch.compile backend met a LoRA branch that it cannot lower, and `strict` was given.

    Without `strict`, Inductor compiles such branches as they are.
    """


class BackendOptionError(CompileError, code="T0221"):
    """torch.compile got a mode or option that neither the tlora-fx backend nor Inductor knows."""


class StoredFormWrong(GraphInvalid, code="T0238"):
    """A pass wants to store a frozen tensor in a form, such as 4 bits, that cannot be made.

    The form must be a function at the top of a module. Only frozen tensors of the base can have
    one, and the result must have the shape and dtype that the graph says.
    """


class StoppedAfter(CompileError, code="T0237"):
    """Compiling stopped after a pass, because TLORA_FX_LOG has a `stop-after`.

    Leave it out to build the model.
    """


class DumpNotReadable(TloraError, code="T0601"):
    """A folder holds no compiled model, or one that another version wrote.

    Write it anew with `tlora-fx compile jobs.yaml -o FOLDER`.
    """


class DumpNotWritable(TloraError, code="T0602"):
    """The folder for a compiled model cannot be written."""


class NodeNotFound(TloraError, code="T0603"):
    """No node of the compiled model has this name.

    Name a module's path, a node as `--code` shows it, or a provenance key.
    """


class StateNotFound(TloraError, code="T0604"):
    """There is no such pass, or the graphs after it were not written.

    Compile with `--states`, or inspect the job file instead.
    """


class InspectMisuse(TloraError, code="T0605"):
    """Options of `tlora-fx inspect` exclude each other, or one is missing."""


class GraphNotStorable(CompileError, code="T0227"):
    """A graph holds a Python function or object, which a graph file cannot store."""


class GraphFileNotReadable(CompileError, code="T0228"):
    """A folder holds no graph file, or the file is damaged or of another version.

    If the graphs use operators of other packages, import these first.
    """


class ReplayNotReadable(CompileError, code="T0229"):
    """A folder is no replay folder, or its files are damaged."""


class ReplayNotTrusted(CompileError, code="T0244"):
    """A replay folder names Python modules that are not part of tlora-fx.

    Importing them runs their code. If you trust the folder, pass `--yes`.
    """


class BisectFails(CompileError, code="T0230"):
    """The check of a bisection cannot be run, or judges the same graphs differently each time.

    If the check has random parts, seed them.
    """


class ReduceFails(CompileError, code="T0260"):
    """The check of a reduction cannot be run, or does not fail on the file as it is.

    The check exits with 0 if the failure is still there. Negate a command that succeeds on good
    graphs: `sh -c '! command "$0"'`.
    """


class FolderNotLoadable(CompileError, code="T0256"):
    """A folder holds no compiled model, or its ssm.py cannot be imported.

    If a module that it calls is missing, install it, or name its file in `extensions`.
    """

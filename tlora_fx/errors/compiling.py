"""Tracing, fusing and lowering failed."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class CompileError(TloraError):
    """Tracing, fusing or lowering failed."""

    code = "T0200"


class BaseNotLoadable(CompileError):
    """The base cannot be built from what the job file names.

    Give a hub id, a local folder with config.json, or hand an nn.Module over from Python.
    """

    code = "T0201"


class BaseRefused(CompileError):
    """The base does something that a fused model cannot do as each job alone would.

    The message names it. Such a base cannot be trained here.
    """

    code = "T0202"


class JobsDiffer(CompileError):
    """Jobs of one group have different bases, dtypes or tokenizers.

    Load all with one base and dtype, or put them into different groups.
    """

    code = "T0203"


class BaseNotTraceable(CompileError):
    """torch.export cannot trace the model.

    The message names the operator and the line of model code. Batch form (base.attention: batch)
    traces many models that packed form does not.
    """

    code = "T0204"


class AttentionNotPackable(CompileError):
    """A base's attention uses a mask, bias or cache that packed rows cannot honour.

    Set base.attention: batch to run the base on padded rows.
    """

    code = "T0205"


class NotTokenParallel(CompileError):
    """An operator mixes the tokens of a row, so jobs that share it would see each other.

    Set base.attention: batch, or register a rule where the operator is known to be safe:
    `tlora_fx.passes.token_parallel.rules.rule(operator)`.
    """

    code = "T0206"


class UnknownTarget(CompileError):
    """target_modules or modules_to_save name something that the base does not have."""

    code = "T0207"


class AdapterMismatch(CompileError):
    """PEFT placed an adapter where tlora-fx had planned another.

    This is a defect of tlora-fx or an incompatible PEFT; please report it.
    """

    code = "T0208"


class NotFoldable(CompileError):
    """Layers that look equal are not, or do not run one after another.

    Raised and handled inside the compiler: such a model is compiled layer by layer.
    """

    code = "T0209"


class LayersNotChained(NotFoldable):
    """Layers hand on more than one value, or not each to the next.

    Raised and handled inside the compiler: such a model is compiled without layers.
    """

    code = "T0215"


class FusionError(CompileError):
    """A job's graph does not line up with its base's graph."""

    code = "T0210"


class PipelineError(CompileError):
    """A pass pipeline names an unknown pass or option, or passes stand in a wrong order."""

    code = "T0211"


class GraphInvalid(CompileError):
    """A pass left a graph that does not hold together.

    The message names the pass and the node. This is a defect of that pass.
    """

    code = "T0212"


class PassFailed(GraphInvalid):
    """A pass raised an error that is none of ours.

    The message names the pass and the node that it was at. This is a defect of that pass; the
    replay folder that the message names reproduces it alone: `tlora-fx replay DIR`.
    """

    code = "T0216"


class PassMisreports(GraphInvalid):
    """A pass said that it changed the graph and did not, or said that it did not and did.

    Return what is true from the pass's `run`, or return nothing.
    """

    code = "T0217"


class TagsBroken(GraphInvalid):
    """A pass left a node whose role or jobs cannot be: see the rules in `tlora_fx/ir/verifier.py`.

    New nodes take role and jobs from the nodes that they are made of; the helpers of
    `tlora_fx.rewriting` do so.
    """

    code = "T0218"


class NumericsBroken(GraphInvalid):
    """Losses or gradients after a pass are not those before it, as far as the pass promises.

    The message names the node where values first part. Mend the pass, or declare
    `preserves_numerics = "no"` where other numbers are what it is for.
    """

    code = "T0219"


class PatternWrong(GraphInvalid):
    """A pattern describes an argument that its operator does not have.

    Name arguments as the operator's schema does; the message lists them.
    """

    code = "T0233"


class RewriteMismatch(GraphInvalid):
    """What a rewrite puts in place of a value has another shape or dtype.

    Whoever reads the value expects the old ones. Mend the rewrite.
    """

    code = "T0234"


class NotOutlinable(GraphInvalid):
    """A piece of a graph cannot become a block of its own.

    A block takes what it reads as arguments and hands one value on; the sizes that it needs must be
    those of its inputs.
    """

    code = "T0235"


class UnknownNode(CompileError):
    """`tlora-fx explain` was asked for a module or node that the base does not have."""

    code = "T0236"


class BatchFormUnsafe(CompileError):
    """In batch form, earlier logits of the model change with later tokens or with padding.

    Such a model looks ahead or sees padding; jobs cannot share its rows.
    """

    code = "T0213"


class SuperModelMisuse(CompileError):
    """A Shared Super-Model was used before it has weights, or rewritten after it was wrapped."""

    code = "T0214"


class PluginBroken(CompileError):
    """A pass or planner of another package cannot be imported, or is none.

    `tlora-fx passes` lists it with the reason. Mend or uninstall that package.
    """

    code = "T0226"


class BackendUnsupported(CompileError):
    """With `strict`, the backend met a LoRA branch that it cannot lower.

    The message says which and why. Without `strict` Inductor compiles such branches as they are.
    `torch.compile` hands this error on inside its own BackendCompilerFailed.
    """

    code = "T0220"


class BackendOptionError(CompileError):
    """torch.compile was given a mode or option that neither the backend nor Inductor knows.

    The backend's own options are `strict` and `compute`; all others are Inductor's.
    """

    code = "T0221"


class StoredFormWrong(GraphInvalid):
    """A pass stores a frozen tensor in a form that cannot be made.

    The form is a function at the top of a module, which gives the same shape and dtype each time.
    """

    code = "T0238"


class StoppedAfter(CompileError):
    """Compiling stopped after a pass, because `stop-after` in TLORA_FX_LOG asks for it.

    `tlora_fx.run_passes` returns the graphs instead; without stop-after a model is built.
    """

    code = "T0237"


# Folders that `tlora-fx compile` writes, and looking into them.


class DumpNotReadable(TloraError):
    """A folder holds no compiled model, or one that another version wrote.

    Write it with `tlora-fx compile jobs.yaml -o FOLDER`.
    """

    code = "T0601"


class DumpNotWritable(TloraError):
    """The folder for a compiled model cannot be written.

    Choose another folder with `-o`, or make room on the disk.
    """

    code = "T0602"


class NodeNotFound(TloraError):
    """`tlora-fx inspect --node` was given a name that no node has.

    Name a module by its path in the base (`model.layers.17.mlp.up_proj`, or its last parts), a node
    as the code names it (`--code` shows it), or a provenance key.
    """

    code = "T0603"


class StateNotFound(TloraError):
    """A view asks for what a pass left, and there is no such pass, or it was not written down.

    Compile with `--states` to keep what every pass leaves, or inspect the job file itself.
    """

    code = "T0604"


class InspectMisuse(TloraError):
    """Options of `tlora-fx inspect` that do not go together, or one that lacks what it needs.

    Ask for one view at a time.
    """

    code = "T0605"


# Graph files, replay folders and bisections.


class GraphNotStorable(CompileError):
    """A graph holds something that a graph file cannot keep: a Python function, or an object.

    Call operators of torch.ops, and hold numbers, text, tuples and nodes in arguments and tags.
    """

    code = "T0227"


class GraphFileNotReadable(CompileError):
    """A folder holds no graphs, or the file is damaged, or another version wrote it.

    Operators that another package registers are known once that package is imported.
    """

    code = "T0228"


class ReplayNotReadable(CompileError):
    """A folder is no replay folder, or its files are damaged.

    tlora-fx writes one when a pass fails; the error's last lines name it.
    """

    code = "T0229"


class BisectFails(CompileError):
    """A bisection cannot go on: its check cannot be run, or gives another verdict when run again.

    The command exits with 0 where the graphs are good, 1 to 124 where they are bad, 125 where it
    cannot tell; 126 and above stop the bisection.
    """

    code = "T0230"


# Stages of a pipeline, and what runs them.


class NoStage(TloraError):
    """A model cannot be cut into stages, or not where a plan cuts it.

    Between two stages one hidden value travels. A base whose layers hand more than that to later
    layers has cuts only where a single value crosses; a base without folded layers has none. The
    error names the values that cross, and where a cut is possible.
    """

    code = "T0840"


class TokensMismatch(TloraError):
    """A stage was given hidden values of other tokens than its micro-batch has.

    All processes must hold the same table of micro-batches in every round.
    """

    code = "T0841"


class ScheduleRefused(TloraError):
    """A pipeline schedule does not run with this number of micro-batches or stages.

    1F1B and GPipe take one stage a process; 1F1B needs at least as many micro-batches as stages;
    an interleaved schedule needs a multiple of the processes.
    """

    code = "T0842"


class PipelineBroken(TloraError):
    """A stage computed something else than its graph says.

    Whether a value needs a gradient, and its shape, are known from the graph before a stage runs.
    This is a mistake of tlora-fx, or of a pass.
    """

    code = "T0843"


# The loop, the simulated clock and the replay of traces.


class SubmittedTwice(TloraError):
    """A job was submitted under a name that the loop knows already.

    Names are what jobs are told apart by; give each its own.
    """

    code = "T0970"


class DecisionWrong(TloraError):
    """A policy decided what cannot be run.

    Each job may be in one group at most, groups may not share a GPU, GPUs must be there, and all
    jobs of a group need one base. This is a mistake of the policy.
    """

    code = "T0971"


class ReplayStalled(TloraError):
    """Jobs wait in a replay, nothing runs, and the policy starts none of them.

    This is a mistake of the policy: every job that is let in can run alone on the cluster.
    """

    code = "T0972"


class ReplayOptionWrong(TloraError):
    """An option of a replay cannot have this value, such as a horizon of no seconds."""

    code = "T0973"


class ClockBackwards(TloraError):
    """A simulated clock was asked to go back.

    This is a mistake of whoever turns it.
    """

    code = "T0974"

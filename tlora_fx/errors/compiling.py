"""Tracing, fusing, lowering; folders of compiled models, graph files, replays and bisections."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class CompileError(TloraError, code="T0200"):
    """Tracing, fusing or lowering failed."""


class BaseNotLoadable(CompileError, code="T0201"):
    """The base cannot be built; give a hub id, a folder, or an nn.Module from Python."""


class BaseRefused(CompileError, code="T0202"):
    """A fused model cannot do what this base does."""


class JobsDiffer(CompileError, code="T0203"):
    """Jobs of one group differ in base, dtype or tokenizer."""


class NotAdmitted(CompileError, code="T0252"):
    """A job cannot join a running Shared Super-Model: it is full, or of another structure.

    `tlora_fx.compile(jobs, open=OpenSlots(...))` says what finds room. The job trains in a group
    of its own.
    """


class BaseNotTraceable(CompileError, code="T0204"):
    """torch.export cannot trace the model.

    `base.attention: batch` traces many models that packed form does not.
    """


class BranchOnSize(BaseNotTraceable, code="T0245"):
    """The model's code branches on a size of the row."""


class GradientLost(CompileError, code="T0246"):
    """The model changes gradients in a way that a graph does not keep."""


class StateChanged(CompileError, code="T0247"):
    """The model's forward changes what its next forward does."""


class TracedOtherwise(CompileError, code="T0248"):
    """The model's code takes another branch while it is traced."""


class AttentionNotPackable(CompileError, code="T0205"):
    """The base's attention cannot run on packed rows.

    Set `base.attention: batch`.
    """


class PaddingSeen(CompileError, code="T0240"):
    """On padded rows a token would see the padding behind its line."""


class NotTokenParallel(CompileError, code="T0206"):
    """An operator mixes the tokens of a row.

    Set `base.attention: batch`, or register a rule:
    `tlora_fx.passes.token_parallel.rules.rule(operator)`.
    """


class UnknownTarget(CompileError, code="T0207"):
    """target_modules or modules_to_save name something that the base does not have."""


class AdapterMismatch(CompileError, code="T0208"):
    """PEFT placed an adapter elsewhere than planned: a defect, or an incompatible PEFT."""


class NotFoldable(CompileError, code="T0209"):
    """Layers that look equal are not; the compiler then compiles layer by layer."""


class LayersNotChained(NotFoldable, code="T0215"):
    """Layers do not form a chain; the compiler then uses no layers."""


class FusionError(CompileError, code="T0210"):
    """A job's graph does not align with its base's graph."""


class PipelineError(CompileError, code="T0211"):
    """A pipeline names an unknown pass or option, or has passes in a wrong order."""


class GraphInvalid(CompileError, code="T0212"):
    """A pass left an invalid graph: a defect of that pass."""


class PassFailed(GraphInvalid, code="T0216"):
    """A pass raised an error; `tlora-fx replay DIR` reproduces it."""


class PassMisreports(GraphInvalid, code="T0217"):
    """A pass returned a wrong answer to whether it changed the graph."""


class TagsBroken(GraphInvalid, code="T0218"):
    """A pass left a node with impossible role or jobs (`tlora_fx/ir/verifier.py`)."""


class NumericsBroken(GraphInvalid, code="T0219"):
    """A pass changed losses or gradients more than its `preserves_numerics` declares."""


class NotIsolated(GraphInvalid, code="T0249"):
    """A pass lets one job read what belongs to another.

    It put an operator that mixes tokens of the row where jobs share the graph, or let a job read
    or write more than its own segment. Mend the pass. Where the operator works on each token by
    itself, register a rule: `tlora_fx.passes.token_parallel.rules.rule(operator)`.
    """


class FactLapsed(GraphInvalid, code="T0250"):
    """A pass needs a fact that held once, and that a pass in between did not preserve.

    Provide the fact again in between, or let the pass that keeps it say so in `preserves`.
    """


class PatternWrong(GraphInvalid, code="T0233"):
    """A pattern describes an argument that its operator does not have."""


class RewriteMismatch(GraphInvalid, code="T0234"):
    """A rewrite replaces a value by one of another shape or dtype."""


class RewritesEndless(GraphInvalid, code="T0251"):
    """A set of rewrite rules comes to no end: a rule undoes what another one does."""


class NotOutlinable(GraphInvalid, code="T0235"):
    """A piece of a graph cannot become a block, which returns one value."""


class UnknownNode(CompileError, code="T0236"):
    """`tlora-fx explain` was asked for a module or node that the base does not have."""


class FusedDiffers(CompileError, code="T0239"):
    """The fused graph does not compute what the base computes alone.

    The base's code depends on what tracing does not keep: a length, state of its own, a mask.
    """


class SuperModelMisuse(CompileError, code="T0214"):
    """A Shared Super-Model has no weights yet, or was rewritten after it was wrapped."""


class PluginBroken(CompileError, code="T0226"):
    """A plugin cannot be imported, or is none; `tlora-fx passes` gives the reason."""


class BackendUnsupported(CompileError, code="T0220"):
    """With `strict`, the backend met a LoRA branch that it cannot lower."""


class BackendOptionError(CompileError, code="T0221"):
    """torch.compile got a mode or option that neither the backend nor Inductor knows."""


class StoredFormWrong(GraphInvalid, code="T0238"):
    """A stored form cannot be made: it must be a module's function."""


class StoppedAfter(CompileError, code="T0237"):
    """Compiling stopped after a pass, as TLORA_FX_LOG asks."""


class DumpNotReadable(TloraError, code="T0601"):
    """A folder holds no compiled model, or another version's.

    Write it with `tlora-fx compile jobs.yaml -o FOLDER`.
    """


class DumpNotWritable(TloraError, code="T0602"):
    """The folder for a compiled model cannot be written."""


class NodeNotFound(TloraError, code="T0603"):
    """No node has this name.

    Name a module's path, a node as `--code` shows it, or a provenance key.
    """


class StateNotFound(TloraError, code="T0604"):
    """There is no such pass, or its result was not written.

    Compile with `--states`, or inspect the job file.
    """


class InspectMisuse(TloraError, code="T0605"):
    """Options of `tlora-fx inspect` do not go together, or one is missing."""


class GraphNotStorable(CompileError, code="T0227"):
    """A graph holds a Python function or object, which a graph file cannot store."""


class GraphFileNotReadable(CompileError, code="T0228"):
    """A folder holds no graphs, is damaged, or is another version's.

    Import the packages whose operators it uses.
    """


class ReplayNotReadable(CompileError, code="T0229"):
    """A folder is no replay folder, or its files are damaged."""


class ReplayNotTrusted(CompileError, code="T0244"):
    """A replay folder names modules of others, and importing them would run their code."""


class BisectFails(CompileError, code="T0230"):
    """A bisection's check cannot be run, or changes its verdict."""


class FolderNotLoadable(CompileError, code="T0256"):
    """A folder holds no compiled model, or its ssm.py does not run.

    Or a module that it calls is missing: install it, or name its file in `extensions`.
    """

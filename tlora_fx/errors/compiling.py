"""Tracing, fusing and lowering failed."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class CompileError(TloraError):
    """Tracing, fusing or lowering failed."""

    code = "T0200"


class BaseNotLoadable(CompileError):
    """The base cannot be built; give a hub id, a folder, or an nn.Module from Python."""

    code = "T0201"


class BaseRefused(CompileError):
    """A fused model cannot do what this base does."""

    code = "T0202"


class JobsDiffer(CompileError):
    """Jobs of one group differ in base, dtype or tokenizer."""

    code = "T0203"


class BaseNotTraceable(CompileError):
    """torch.export cannot trace the model.

    `base.attention: batch` traces many models that packed form does not.
    """

    code = "T0204"


class AttentionNotPackable(CompileError):
    """The base's attention cannot run on packed rows.

    Set `base.attention: batch`.
    """

    code = "T0205"


class NotTokenParallel(CompileError):
    """An operator mixes the tokens of a row.

    Set `base.attention: batch`, or register a rule:
    `tlora_fx.passes.token_parallel.rules.rule(operator)`.
    """

    code = "T0206"


class UnknownTarget(CompileError):
    """target_modules or modules_to_save name something that the base does not have."""

    code = "T0207"


class AdapterMismatch(CompileError):
    """PEFT placed an adapter elsewhere than planned: a defect, or an incompatible PEFT."""

    code = "T0208"


class NotFoldable(CompileError):
    """Layers that look equal are not; the compiler then compiles layer by layer."""

    code = "T0209"


class LayersNotChained(NotFoldable):
    """Layers do not form a chain; the compiler then uses no layers."""

    code = "T0215"


class FusionError(CompileError):
    """A job's graph does not align with its base's graph."""

    code = "T0210"


class PipelineError(CompileError):
    """A pipeline names an unknown pass or option, or has passes in a wrong order."""

    code = "T0211"


class GraphInvalid(CompileError):
    """A pass left an invalid graph: a defect of that pass."""

    code = "T0212"


class PassFailed(GraphInvalid):
    """A pass raised an error; `tlora-fx replay DIR` reproduces it."""

    code = "T0216"


class PassMisreports(GraphInvalid):
    """A pass returned a wrong answer to whether it changed the graph."""

    code = "T0217"


class TagsBroken(GraphInvalid):
    """A pass left a node with impossible role or jobs (`tlora_fx/ir/verifier.py`)."""

    code = "T0218"


class NumericsBroken(GraphInvalid):
    """A pass changed losses or gradients more than its `preserves_numerics` declares."""

    code = "T0219"


class PatternWrong(GraphInvalid):
    """A pattern describes an argument that its operator does not have."""

    code = "T0233"


class RewriteMismatch(GraphInvalid):
    """A rewrite replaces a value by one of another shape or dtype."""

    code = "T0234"


class NotOutlinable(GraphInvalid):
    """A piece of a graph cannot become a block, which returns one value."""

    code = "T0235"


class UnknownNode(CompileError):
    """`tlora-fx explain` was asked for a module or node that the base does not have."""

    code = "T0236"


class FusedDiffers(CompileError):
    """The fused graph does not compute what the base computes alone.

    The base's code depends on what tracing does not keep: a length, state of its own, a mask.
    """

    code = "T0239"


class SuperModelMisuse(CompileError):
    """A Shared Super-Model has no weights yet, or was rewritten after it was wrapped."""

    code = "T0214"


class PluginBroken(CompileError):
    """A plugin cannot be imported, or is none; `tlora-fx passes` gives the reason."""

    code = "T0226"


class BackendUnsupported(CompileError):
    """With `strict`, the backend met a LoRA branch that it cannot lower."""

    code = "T0220"


class BackendOptionError(CompileError):
    """torch.compile got a mode or option that neither the backend nor Inductor knows."""

    code = "T0221"


class StoredFormWrong(GraphInvalid):
    """A stored form cannot be made: it must be a module's function."""

    code = "T0238"


class StoppedAfter(CompileError):
    """Compiling stopped after a pass, as TLORA_FX_LOG asks."""

    code = "T0237"


# Folders that `tlora-fx compile` writes, and looking into them.


class DumpNotReadable(TloraError):
    """A folder holds no compiled model, or another version's.

    Write it with `tlora-fx compile jobs.yaml -o FOLDER`.
    """

    code = "T0601"


class DumpNotWritable(TloraError):
    """The folder for a compiled model cannot be written."""

    code = "T0602"


class NodeNotFound(TloraError):
    """No node has this name.

    Name a module's path, a node as `--code` shows it, or a provenance key.
    """

    code = "T0603"


class StateNotFound(TloraError):
    """There is no such pass, or its result was not written.

    Compile with `--states`, or inspect the job file.
    """

    code = "T0604"


class InspectMisuse(TloraError):
    """Options of `tlora-fx inspect` do not go together, or one is missing."""

    code = "T0605"


# Graph files, replay folders and bisections.


class GraphNotStorable(CompileError):
    """A graph holds a Python function or object, which a graph file cannot store."""

    code = "T0227"


class GraphFileNotReadable(CompileError):
    """A folder holds no graphs, is damaged, or is another version's.

    Import the packages whose operators it uses.
    """

    code = "T0228"


class ReplayNotReadable(CompileError):
    """A folder is no replay folder, or its files are damaged."""

    code = "T0229"


class BisectFails(CompileError):
    """A bisection's check cannot be run, or changes its verdict."""

    code = "T0230"

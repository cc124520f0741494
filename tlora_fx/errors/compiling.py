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
    `tlora_fx.passes.token_rules.rule(operator)`.
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


class BatchFormUnsafe(CompileError):
    """In batch form, earlier logits of the model change with later tokens or with padding.

    Such a model looks ahead or sees padding; jobs cannot share its rows.
    """

    code = "T0213"


class SuperModelMisuse(CompileError):
    """A Shared Super-Model was used before it has weights, or rewritten after it was wrapped."""

    code = "T0214"

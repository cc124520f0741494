"""The mistakes that tlora-fx knows, each a class with a code.

An error says what went wrong, where, what was expected, what was found, and what to do. The
docstring of each class is its entry on the page `docs/errors.md`, which
`python -m tlora_fx.errors` prints.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class TloraError(Exception):
    """The root of all errors that tlora-fx raises on purpose."""

    code: ClassVar[str] = "T0000"

    def __init__(self, what: str, *, help: str = "", **facts: object) -> None:
        """Make an error.

        what    one line: the mistake
        help    one line: what to do
        facts   what is printed between, in order, such as file=, job=, expected=, found=
        """
        self.what = what
        self.help = help
        self.facts = {name: str(value) for name, value in facts.items() if value is not None}
        super().__init__(self.render())

    def render(self) -> str:
        """The whole error as text of several lines."""
        rows = dict(self.facts)
        if self.help:
            rows["help"] = self.help
        width = max((len(name) for name in rows), default=0)
        lines = [f"error[{self.code}] {self.what}"]
        for name, value in rows.items():
            first, *rest = value.splitlines() or [""]
            lines.append(f"  {name:<{width}}  {first}")
            lines.extend(f"  {'':<{width}}  {line}" for line in rest)
        return "\n".join(lines)


class JobError(TloraError):
    """A job has fields that are unknown, wrong, or exclude each other.

    The message lists every mistake, with the nearest right name or the range that is allowed.
    """

    code = "T0101"


class JobFileError(JobError):
    """A job file has mistakes in its base, its defaults, or its jobs.

    Each mistake is listed with its line and its job; mend them all and start again.
    """

    code = "T0102"


class JobFileSyntaxError(JobFileError):
    """A job file is no YAML that tlora-fx reads.

    Only plain values are read: no tags that build objects, no key twice, no alias inside itself.
    """

    code = "T0103"


class JobFileMissingError(JobFileError):
    """A job file does not exist or cannot be opened.

    Check the path; a job file is a text file in UTF-8.
    """

    code = "T0104"


class DataError(TloraError):
    """The data of a job cannot be used; the classes below say how."""

    code = "T0300"


class DataFileError(DataError):
    """A data file does not exist, cannot be read, or has a type that is not read.

    Give a .jsonl, .json or .parquet file, or the id of a data set on the hub.
    """

    code = "T0301"


class MissingPackageError(DataError):
    """Reading this data needs a package that is not installed.

    Install it, or convert the data to JSONL.
    """

    code = "T0302"


class MalformedRowError(DataError):
    """A row of a data file cannot be read as a sample.

    Mend the row, or set `skip_bad_rows: true` in the job's data: such rows are then counted.
    """

    code = "T0303"


class MissingColumnError(DataError):
    """The data has no columns that make a prompt and completion, messages, or a text.

    Map the file's names in the job's data, such as
    `columns: {prompt: question, completion: answer}`.
    """

    code = "T0304"


class AmbiguousFormatError(DataError):
    """The columns of the data fit more than one format.

    Set `format` in the job's data to prompt-completion, messages or text.
    """

    code = "T0308"


class EmptyDataError(DataError):
    """The data of a job has no rows, or no row that can be used.

    Check the path, and the report of skipped rows.
    """

    code = "T0305"


class NoTargetsError(DataError):
    """No sample of a job has a token to train on.

    The completions are empty, or `max_length` cuts them off: raise it, or set `loss_on: all`.
    """

    code = "T0306"


class ChatTemplateError(DataError):
    """A tokenizer's chat template is missing, or does not show which tokens the assistant wrote.

    Name a tokenizer whose template marks them with `{% generation %}`, or set `loss_on: all`.
    """

    code = "T0307"


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


class OptimizerError(TloraError):
    """A job's optimizer or schedule does not exist or does not take the job's arguments.

    Choose an optimizer of torch.optim and a schedule of transformers' `get_scheduler`, and give
    them only arguments that they have.
    """

    code = "T0401"


class OptimizerStateError(TloraError):
    """A saved optimizer state does not belong to the parameters that the job trains now.

    Resume with the job file that the checkpoint was made with, or train into a new folder.
    """

    code = "T0402"


class CheckpointError(TloraError):
    """A checkpoint could not be written or read; earlier checkpoints stay as they are.

    Free space on the disk, or mend the folder's permissions, then go on with `--resume`.
    """

    code = "T0403"


class MetricsError(TloraError):
    """A job's metrics file could not be written or read.

    Free space on the disk, or mend the file's permissions, then go on with `--resume`.
    """

    code = "T0404"


class AdapterFolderError(TloraError):
    """A PEFT adapter folder is incomplete, damaged, no LoRA, a pickle, or could not be written.

    It needs adapter_config.json and adapter_model.safetensors, as PEFT's `save_pretrained`
    writes them; adapter_model.bin is a pickle, which can run code, and is never loaded.
    """

    code = "T0405"


class RunFolderError(TloraError):
    """The output folder is in use, by an earlier run or another process.

    Go on with `--resume`, or choose another folder with `-o`.
    """

    code = "T0407"


class ResumeMismatch(TloraError):
    """A run cannot go on: its checkpoint, or its model, belongs to other jobs or another base."""

    code = "T0408"


class TokenizerNotLoadable(TloraError):
    """The base's tokenizer cannot be loaded.

    Set `base.tokenizer` to a hub id or a folder that holds one.
    """

    code = "T0409"


class DataDoesNotFit(TloraError):
    """A job's samples have tokens or lengths that the base cannot take."""

    code = "T0410"


class VerifyError(TloraError):
    """A job trained fused differs from the same job trained alone by more than the bound."""

    code = "T0411"


class OracleError(TloraError):
    """A job cannot be trained alone for comparison.

    The message says what plain transformers and PEFT would do otherwise than the fused model;
    `tlora-fx verify` then says nothing about this job.
    """

    code = "T0406"


class SegmentError(TloraError):
    """Job segments do not cover the tokens of a tensor; build them with `PackedBatch`."""

    code = "T0501"


class AdapterTableError(TloraError):
    """Adapter tables do not fit each other or the layer; give one rank, scale and rate a job."""

    code = "T0502"


class MaskKeyError(TloraError):
    """A dropout rate, key or token index is out of range; rates lie in [0, 1), keys in 32 bits."""

    code = "T0503"


class AttentionShapeError(TloraError):
    """Packed attention got tensors or bounds that do not fit; give q, k, v as [T, heads, dim]."""

    code = "T0504"


class FrozenGradientError(TloraError):
    """An operator has no gradient for this input; freeze it, or leave the layer unfused."""

    code = "T0505"


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


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that a user who wrote `name` most likely meant, or None."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


if __name__ == "__main__":
    from tlora_fx.error_page import page

    print(page(), end="")

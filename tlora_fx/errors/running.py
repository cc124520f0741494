"""Training, checkpoints, adapters on disk and verifying."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


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


class DeviceUnknown(TloraError):
    """There is no device of the name that was given.

    Training and profiles run on the CPU or on CUDA devices of this machine.
    """

    code = "T0412"


class OracleError(TloraError):
    """A job cannot be trained alone for comparison.

    The message says what plain transformers and PEFT would do otherwise than the fused model;
    `tlora-fx verify` then says nothing about this job.
    """

    code = "T0406"

"""One LoRA fine-tuning job as its user writes it.

Names are those of PEFT and of transformers' TrainingArguments. All specs are frozen; a mistake
raises `JobError` with everything that is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
)

from tlora_fx.config.adapter_folder import read_adapter_config
from tlora_fx.config.base_spec import SEED_LIMIT, BaseSpec, LocalPath
from tlora_fx.config.data_spec import (
    PAIRED,
    DataSpec,
    first_of_several,
    like,
    require_data_of_method,
    require_evaluable,
)
from tlora_fx.config.fields import (
    EvalSplit,
    LoraSpec,
    MaxSteps,
    MetricFunction,
    Optimizer,
    Schedule,
    ScheduleSpec,
    TrackerName,
    Trackers,
    WarmupSteps,
    changes_base,
    check_optimizer_arguments,
    check_schedule_arguments,
)
from tlora_fx.config.functions import UserFunction
from tlora_fx.config.halving import HalvingSpec
from tlora_fx.config.losses import Loss, Method, require_learnt_from_rows, require_loss_options
from tlora_fx.config.objects import job_fields, require_callbacks
from tlora_fx.config.other_kinds import (
    adapter_mapping,
    adapter_spec,
    beside_base,
    check_updates,
    kind_of,
    peft_config,
)
from tlora_fx.config.other_names import JOB_KEYS
from tlora_fx.config.trl_arguments import require_dropout_off, trl_fields
from tlora_fx.config.validation import Spec, check, refuse
from tlora_fx.errors import AdapterFolderError, JobError, did_you_mean

__all__ = [
    "BETA",
    "EVAL_METRICS",
    "LABEL_METRICS",
    "TRAIN_LOSS",
    "BaseSpec",
    "DataSpec",
    "Job",
    "Method",
    "ScheduleSpec",
    "TrackerName",
]

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FUNCTION = re.compile(r"[^:]+:[A-Za-z_]\w*")
#: Fields of LoRA by which more than its two matrices is trained.
_BEYOND_MATRICES = ("use_dora", "bias", "lora_bias", "modules_to_save", "trainable_token_indices")
#: Beta where a job names none, as in TRL.
BETA = 0.1
#: Methods that compare with the base, or with the adapter that a job continues.
COMPARING = ("dpo", "kto")
#: What an evaluation always measures; a job's own function may add more.
EVAL_METRICS = ("loss", "mean_token_accuracy", "exact_match")
#: And of a classifier.
LABEL_METRICS = ("loss", "accuracy")
TRAIN_LOSS = "train_loss"


def _epochs_by_default(data: dict[str, Any]) -> float | None:
    return 1.0 if data.get("max_steps") is None else None


def _evaluates_by_default(data: dict[str, Any]) -> str:
    """What there is to evaluate is evaluated: at `eval_steps`, or else after each epoch."""
    if not _can_evaluate(data):
        return "no"
    return "epoch" if data.get("eval_steps") is None else "steps"


def _can_evaluate(data: Mapping[str, Any]) -> bool:
    return _has_eval_data(data) or data.get("metric_for_best_model") == TRAIN_LOSS


def _adapter_fields(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The adapter's fields of a job that is being validated: its own, or its folder's."""
    folder: Path | None = data.get("adapter")
    if folder is None:
        return data.get("lora") or {}
    base = data.get("base")
    return read_adapter_config(folder, "CAUSAL_LM" if base is None else base.task)


def _has_eval_data(data: Mapping[str, Any]) -> bool:
    return data.get("eval_data") is not None or data.get("eval_split") is not None


class Job(Spec):
    """One LoRA fine-tuning job: adapter, data, batch, optimizer, schedule, evaluation.

    name                         name of the job, and of the folder of its adapter
    base                         the frozen base model
    adapter_dtype                dtype in which adapters are stored
    adapter_compute              dtype in which adapters multiply: that of the base, or float32
    lora                         the PEFT config fields that were given; None if `adapter` is given
    adapter                      instead of `lora`: a PEFT adapter folder to continue
    data                         the samples to train on: one data set, or a list of them
    mixing                       when a mixture of data sets with weights ends, as in
                                 interleave_datasets of datasets: as soon as one is used up, or
                                 when all are, where the others begin again
    method                       sft: learn from samples; dpo, orpo: learn from pairs of a chosen
                                 and a rejected completion; kto: learn from completions that are
                                 desirable or not; reward: learn from pairs to give the chosen one
                                 the greater number; as TRL's trainers do
    loss                         loss of method sft; None: the cross entropy of the next token, on a
                                 base whose own loss is the same; cross_entropy: that loss also on a
                                 base that computes another one by itself; importance_sampling, ppo,
                                 cispo, gspo, dro: losses of rows that were sampled
    loss_options                 numbers that a loss with a name takes
    label_smoothing_factor       part of a target's weight that is spread over all tokens, in
                                 training with method sft
    neftune_noise_alpha          size of the noise that NEFTune adds to embeddings in training with
                                 method sft; None or 0: no noise
    beta                         beta of the dpo, orpo or kto loss; None: 0.1
    desirable_weight             weight of the desirable completions in the kto loss
    undesirable_weight           weight of the others
    center_rewards_coefficient   weight of the square of a pair's sum in the reward loss, which
                                 keeps numbers around zero; None: 0
    reference                    what dpo and kto compare with where the job continues an adapter:
                                 the adapter as it is loaded, or the base alone
    completion_only_loss         train only the tokens of completions; None: if the data has any
    assistant_only_loss          train only the assistant's turns; None: if the data has any
    packing                      put several samples into one sequence of `max_length` tokens;
                                 batch sizes then count sequences
    per_device_train_batch_size  samples in a micro-batch
    gradient_accumulation_steps  micro-batches in an optimizer step
    max_length                   longest sample, in tokens; longer ones are truncated
    max_steps                    number of optimizer steps; None or -1: as `num_train_epochs` says
    num_train_epochs             number of passes over the data; None if `max_steps` is given
    seed                         seed of data order, adapter initialisation and dropout masks
    shuffle                      shuffle the samples anew for each epoch
    optim                        name of the optimizer
    optim_args                   further arguments of the optimizer's class
    learning_rate                learning rate, which the schedule scales
    loraplus_lr_ratio            LoRA+: factor by which B and vectors learn faster than A
    loraplus_lr_embedding        LoRA+: learning rate of adapters on embeddings; None: 1e-6
    adam_beta1, adam_beta2       betas of optimizers of Adam's kind
    adam_epsilon                 epsilon of optimizers of Adam's kind
    weight_decay                 weight decay of the optimizer
    lr_scheduler_type            name of the learning rate schedule, as in transformers
    lr_scheduler_kwargs          further arguments of the learning rate schedule
    warmup_steps                 number of optimizer steps over which the learning rate rises; a
                                 number below 1 is the part of all optimizer steps
    warmup_ratio                 instead of `warmup_steps`: their part of all optimizer steps
    max_grad_norm                bound to which the norm of this job's gradient is clipped; None or
                                 0: no clipping
    save_steps                   optimizer steps between checkpoints
    eval_data                    samples to evaluate on, one data set; fields that are not given,
                                 but for `path` and `split`, are those of `data`, of several data
                                 sets those of the first
    eval_split                   instead of `eval_data`: name of a split of the same data set, or
                                 the part of the samples to hold out, a number below 1
    eval_steps                   optimizer steps between evaluations
    compute_metrics              function for metrics of your own, MODULE:FUNCTION or
                                 FILE.py:FUNCTION, from transformers' EvalPrediction to numbers by
                                 name
    metric_for_best_model        metric that decides which step is best, such as loss or
                                 mean_token_accuracy, or train_loss, which needs no evaluation data
    eval_strategy                when to evaluate: no, steps or epoch; after the last step too.
                                 Default: steps if `eval_steps` is given, else epoch if there is
                                 something to evaluate
    per_device_eval_batch_size   samples that an evaluation keeps together in one row
    greater_is_better            whether a greater `metric_for_best_model` is better; None: yes,
                                 unless its name ends in loss
    load_best_model_at_end       leave the adapter of the best step, not of the last one
    early_stopping_patience      stop after this many evaluations in a row that are not better than
                                 the best by more than `early_stopping_threshold`
    early_stopping_threshold     how much better an evaluation must be to count as better
    halving                      end the job early if, at rungs of steps, its evaluation loss is not
                                 among the best of its group (`tlora-fx train` alone)
    sample_prompts               texts that the job answers while it trains, as the `prompt` of its
                                 data, or as the user's first turn
    sample_steps                 optimizer steps between two times at which the job answers
                                 `sample_prompts`; None: with each evaluation. It also answers
                                 after its last step
    sample_max_new_tokens        longest answer to one of `sample_prompts`, in tokens
    report_to                    trackers that get the job's metrics: tensorboard, wandb, trackio,
                                 mlflow; or all, or none
    callbacks                    callbacks that hear of this job alone, from Python only
    schedule                     what the job asks of a scheduler: GPUs, and how long it may take
    """

    inner: ClassVar[Mapping[str, type[Spec]]] = {"lora": LoraSpec}
    other_names: ClassVar[Mapping[str, str]] = JOB_KEYS

    def __init__(self, name: str | None = None, /, **arguments: Any) -> None:
        """Make a job in Python, of the fields above, some of which may be objects.

        base        also a path or hub id, an nn.Module, or a model of transformers
        tokenizer   of the base: a tokenizer of transformers, a folder or a hub id
        lora        also a config of PEFT, or a rank
        data        also a path, a list of rows, or a Dataset or IterableDataset of `datasets`
        eval_data   likewise, but no IterableDataset
        optim       also a class or a function, which is called as `optim(parameters,
                    lr=learning_rate, **optim_args)`. A class of torch.optim that has a name in job
                    files is that one
        loss        also a function of the log-probabilities of a micro-batch's sequences and of
                    what their rows say, see docs/in-python.md
        lr_scheduler      `lr_scheduler_type`; also a class or a function, which is called as
                    `lr_scheduler(optimizer, **lr_scheduler_kwargs)`. Parameters of its own that are
                    called num_training_steps and num_warmup_steps are filled in
        compute_metrics   also a function
        raises      JobError, with the names of the arguments
        """
        super().__init__(**job_fields(name, arguments))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    name: StrictStr
    base: BaseSpec
    adapter_dtype: Literal["float32", "bfloat16"] = "float32"
    adapter_compute: Literal["base", "float32"] = "base"
    lora: dict[str, Any] | None = None
    adapter: LocalPath | None = Field(default=None, validate_default=True)
    data: DataSpec
    mixing: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    method: Method = Field(default="sft", validate_default=True)
    loss: Loss = None
    loss_options: dict[str, StrictFloat] = Field(default={})
    label_smoothing_factor: StrictFloat = Field(default=0.0, ge=0, lt=1)
    neftune_noise_alpha: StrictFloat | None = Field(default=None, ge=0, allow_inf_nan=False)
    beta: StrictFloat | None = Field(default=None, gt=0)
    desirable_weight: StrictFloat = Field(default=1.0, ge=0)
    undesirable_weight: StrictFloat = Field(default=1.0, ge=0)
    center_rewards_coefficient: StrictFloat | None = Field(default=None, ge=0, allow_inf_nan=False)
    reference: Literal["adapter", "base"] = "adapter"
    completion_only_loss: StrictBool | None = None
    assistant_only_loss: StrictBool | None = None
    packing: StrictBool = False
    per_device_train_batch_size: StrictInt = Field(default=8, ge=1)
    gradient_accumulation_steps: StrictInt = Field(default=1, ge=1)
    max_length: StrictInt = Field(default=1024, ge=2)
    max_steps: MaxSteps = Field(default=None, ge=1, validate_default=True)
    num_train_epochs: StrictFloat | None = Field(default_factory=_epochs_by_default, gt=0)
    seed: StrictInt = Field(default=0, ge=0, lt=SEED_LIMIT)
    shuffle: StrictBool = True
    optim: Optimizer = Field(default="adamw", validate_default=True)
    optim_args: dict[str, Any] = Field(default={})
    learning_rate: StrictFloat = Field(default=2e-4, ge=0)
    loraplus_lr_ratio: StrictFloat | None = Field(default=None, gt=0)
    loraplus_lr_embedding: StrictFloat | None = Field(default=None, gt=0)
    adam_beta1: StrictFloat = Field(default=0.9, ge=0, lt=1)
    adam_beta2: StrictFloat = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: StrictFloat = Field(default=1e-8, ge=0)
    weight_decay: StrictFloat = Field(default=0.0, ge=0)
    lr_scheduler_type: Schedule = "linear"
    lr_scheduler_kwargs: dict[str, Any] = Field(default={}, validate_default=True)
    warmup_steps: WarmupSteps = 0
    warmup_ratio: StrictFloat = Field(default=0.0, ge=0, le=1)
    max_grad_norm: StrictFloat | None = Field(default=1.0, ge=0)
    save_steps: StrictInt = Field(default=100, ge=1)
    eval_data: DataSpec | None = None
    eval_split: EvalSplit = None
    eval_steps: StrictInt | None = Field(default=None, ge=1)
    compute_metrics: MetricFunction = None
    metric_for_best_model: StrictStr | None = None
    eval_strategy: Literal["no", "steps", "epoch"] = Field(
        default_factory=_evaluates_by_default, validate_default=True
    )
    per_device_eval_batch_size: StrictInt = Field(default=8, ge=1)
    greater_is_better: StrictBool | None = None
    load_best_model_at_end: StrictBool = False
    early_stopping_patience: StrictInt | None = Field(default=None, ge=1)
    early_stopping_threshold: StrictFloat = Field(default=0.0, ge=0)
    halving: HalvingSpec | None = None
    sample_prompts: list[Annotated[StrictStr, Field(min_length=1)]] = Field(default=[])
    sample_steps: StrictInt | None = Field(default=None, ge=1)
    sample_max_new_tokens: StrictInt = Field(default=64, ge=1)
    report_to: Trackers = Field(default=[])
    callbacks: tuple[Any, ...] = Field(default=(), exclude=True, repr=False)
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec)

    @classmethod
    def from_trl(cls, args: Any, name: str | None = None, **arguments: Any) -> Job:
        """Make a job from the arguments of a trainer of TRL, or of transformers' Trainer.

        args        an SFTConfig, DPOConfig, ORPOConfig, KTOConfig, RewardConfig or
                    TrainingArguments; it says the method
        name        by default its run_name, or the name of the folder of its output_dir
        arguments   those of `Job(...)` that a trainer takes beside its args, such as base, data and
                    lora; what they say counts before args
        raises      JobError, which names every field of args that changes numbers and has no equal
        warns       of fields that are set and have no equal
        """
        name, fields = trl_fields(args, name, arguments)
        job = cls(name, **fields)
        require_dropout_off(args, job)
        return job

    @check("name")
    def _names_a_folder(cls, name: str, info: ValidationInfo) -> None:
        if _JOB_NAME.fullmatch(name) and ".." not in name:
            return
        raise refuse(
            "wrong value of 'name'",
            expected="1 to 100 of A-Z a-z 0-9 . _ - from a letter or digit on, without '..'",
            help="the name becomes a folder",
        )

    @field_validator("lora", mode="before")
    @classmethod
    def _honoured_fields(cls, value: object, info: ValidationInfo) -> object:
        base, asked = info.data.get("base"), isinstance(value, Mapping) and value.get("task_type")
        if asked in ("CAUSAL_LM", "SEQ_CLS") and base is not None and asked != base.task:
            what = f"task_type '{asked}' is not the base's task, {base.task}"
            raise refuse(what, help=f"leave it out, and write task: {asked} under 'base'")
        return None if value is None else adapter_mapping(value)

    @check("adapter")
    def _instead_of_lora(cls, folder: Path | None, info: ValidationInfo) -> None:
        if folder is None and info.data.get("lora", {}) is None:
            raise refuse("the job has no 'lora'", help="give 'lora' or an 'adapter' to continue")
        if folder is None:
            return
        if info.data.get("lora") is not None:
            raise refuse("'lora' and 'adapter' exclude each other", help="keep one of them")
        try:
            _adapter_fields(info.data | {"adapter": folder})
        except AdapterFolderError as error:
            found = error.facts.get("found", "").replace("\n", "; ")
            what = f"'{folder}': {error.what}" + (f" ({found})" if found else "")
            raise refuse(what, help=error.help) from None

    @field_validator("method", "loss", mode="before")
    @classmethod
    def _learns_from_rows(cls, value: Any, info: ValidationInfo) -> Any:
        return require_learnt_from_rows(str(info.field_name), value)

    @check("method")
    def _learns_from_pairs(cls, method: str, info: ValidationInfo) -> None:
        data, lora = info.data.get("data"), _adapter_fields(info.data)
        for format in ["auto"] if data is None else [part.format for part in data.parts]:
            require_data_of_method(info.data.get("base"), method, format)
        bare = next((name for name in _BEYOND_MATRICES if lora.get(name, "none") != "none"), "")
        compares = f"method '{method}' compares with the base"
        if method in COMPARING and bare and lora[bare]:
            what = f"{compares}, which '{bare}' changes beside A and B"
            raise refuse(what, help=f"leave '{bare}' out")
        if method in COMPARING and kind_of(lora) != "LORA":
            what = f"{compares}, which is not at hand under {kind_of(lora)}"
            raise refuse(what, help="train LoRA, or take method: orpo")

    @check("reference")
    def _is_of_dpo(cls, reference: str, info: ValidationInfo) -> None:
        if reference == "base" and info.data.get("method", "dpo") not in COMPARING:
            what = "'reference' needs method dpo or kto"
            raise refuse(what, help="leave it out, or set the method")

    @check("loss_options")
    def _are_of_the_loss(cls, options: dict[str, float], info: ValidationInfo) -> None:
        if "loss" in info.data:
            require_loss_options(info.data["loss"], options)

    @check("label_smoothing_factor")
    def _smooths_cross_entropy(cls, factor: float, info: ValidationInfo) -> None:
        if factor and info.data.get("loss") not in (None, "cross_entropy"):
            what = "'label_smoothing_factor' is of cross entropy"
            raise refuse(what, help="leave it out, or leave 'loss' out")

    @check(
        "loss", "label_smoothing_factor", "neftune_noise_alpha", "beta", "completion_only_loss",
        "assistant_only_loss", "packing",
    )  # fmt: skip
    def _belongs_to_the_method(cls, value: Any, info: ValidationInfo) -> None:
        name, method, data = str(info.field_name), info.data.get("method"), info.data.get("data")
        if value in (None, False) or method is None:
            return
        base = info.data.get("base")
        if base is not None and base.is_classifier:
            raise refuse(f"'{name}' is of language models", help="leave it out of a classifier")
        if name == "beta" and method == "sft":
            what = "'beta' needs method dpo, orpo or kto"
            raise refuse(what, help="leave it out, or set method: dpo")
        if name != "beta" and method != "sft":
            raise refuse(f"'{name}' needs method sft", help="leave it out")
        parts = () if data is None else data.parts
        if name.endswith("_loss") and any(part.loss_on != "auto" for part in parts):
            raise refuse(f"'{name}' and 'loss_on' exclude each other", help="keep one")

    @check("desirable_weight", "undesirable_weight")
    def _is_of_kto(cls, weight: float, info: ValidationInfo) -> None:
        if weight != 1 and info.data.get("method", "kto") != "kto":
            what = f"'{info.field_name}' needs method kto"
            raise refuse(what, help="leave it out, or set method: kto")

    @check("center_rewards_coefficient")
    def _is_of_rewards(cls, weight: float | None, info: ValidationInfo) -> None:
        if weight and info.data.get("method", "reward") != "reward":
            what = "'center_rewards_coefficient' needs method reward"
            raise refuse(what, help="leave it out, or set method: reward")

    @check("per_device_train_batch_size")
    def _has_others_to_compare(cls, size: int, info: ValidationInfo) -> None:
        if size == 1 and info.data.get("method") == "kto":
            what = "method 'kto' compares the completions of a batch, and a batch has one sample"
            raise refuse(what, help="give a greater per_device_train_batch_size")

    @check("max_steps")
    def _ends_a_stream(cls, steps: int | None, info: ValidationInfo) -> None:
        data = info.data.get("data")
        if steps is None and data is not None and data.streaming:
            stream = "'streaming'" if data.rows is None else "an IterableDataset"
            what = f"{stream} needs 'max_steps': nobody knows how long a stream is"
            raise refuse(what, help="give max_steps")

    @field_validator("num_train_epochs")
    @classmethod
    def _instead_of_steps(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        if info.data.get("max_steps") is not None and epochs is not None:
            raise refuse("'max_steps' and 'num_train_epochs' exclude each other", help="keep one")
        if epochs is None and info.data.get("max_steps", 0) is None:
            return 1.0
        return epochs

    @check("optim")
    def _updates_all(cls, name: Any, info: ValidationInfo) -> None:
        mistake = check_updates(name, _adapter_fields(info.data))
        if mistake:
            raise mistake

    @check("loraplus_lr_ratio")
    def _has_a_and_b(cls, ratio: float | None, info: ValidationInfo) -> None:
        kind = kind_of(_adapter_fields(info.data))
        if ratio is not None and kind != "LORA":
            raise refuse(f"'loraplus_lr_ratio' is of LoRA's B, and {kind} has none")
        if ratio is not None and info.data.get("optim") == "lorafa":
            what = "'loraplus_lr_ratio' and optim 'lorafa' exclude each other"
            raise refuse(what, help="keep one")

    @check("loraplus_lr_embedding")
    def _has_a_ratio(cls, rate: float | None, info: ValidationInfo) -> None:
        if rate is not None and info.data.get("loraplus_lr_ratio", 1) is None:
            raise refuse("'loraplus_lr_embedding' needs 'loraplus_lr_ratio'")

    @check("optim_args")
    def _optimizer_takes(cls, given: dict[str, Any], info: ValidationInfo) -> None:
        optim = info.data.get("optim")
        if isinstance(optim, UserFunction):
            if "lr" in given:
                raise refuse("'lr' does not belong into 'optim_args'", help="use learning_rate")
            return
        mistake = optim is not None and check_optimizer_arguments(optim, given)
        if mistake:
            raise mistake

    @check("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
    def _is_of_a_named_optimizer(cls, value: float, info: ValidationInfo) -> None:
        name = str(info.field_name)
        default = cls.model_fields[name].default
        if isinstance(info.data.get("optim"), UserFunction) and value != default:
            what = f"'{name}' is of optimizers that are named, and 'optim' is a class or a function"
            raise refuse(what, help="give its arguments in 'optim_args'")

    @check("lr_scheduler_kwargs")
    def _schedule_takes(cls, given: dict[str, Any], info: ValidationInfo) -> None:
        name = info.data.get("lr_scheduler_type")
        if name is None or isinstance(name, UserFunction):
            return
        mistake = check_schedule_arguments(name, given)
        if mistake:
            raise mistake

    @check("warmup_ratio")
    def _instead_of_warmup_steps(cls, ratio: float, info: ValidationInfo) -> None:
        if ratio and info.data.get("warmup_steps"):
            raise refuse("'warmup_steps' and 'warmup_ratio' exclude each other", help="keep one")

    @field_validator("data", mode="before")
    @classmethod
    def _first_of_several(cls, value: Any) -> Any:
        return first_of_several(value) if isinstance(value, list | tuple) else value

    @classmethod
    def written_at(cls, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
        """The keys by which a user wrote what this spec keeps at `loc`."""
        if loc[:2] != ("data", "more") or len(loc) < 3:
            return loc
        index = loc[2]
        assert isinstance(index, int)
        return ("data", index + 1, *loc[3:])

    @check("mixing")
    def _mixes_by_weights(cls, mixing: str, info: ValidationInfo) -> None:
        data = info.data.get("data")
        if mixing == "all_exhausted" and data is not None and data.weight is None:
            help = "give each data set of a list a weight, or leave it out"
            raise refuse(f"mixing '{mixing}' needs data sets with weights", help=help)

    @field_validator("eval_data", mode="before")
    @classmethod
    def _as_the_data(cls, value: Any, info: ValidationInfo) -> Any:
        data = info.data.get("data")
        return like(data, value) if isinstance(value, Mapping) and data is not None else value

    @check("eval_data")
    def _is_one_set(cls, data: DataSpec | None, info: ValidationInfo) -> None:
        if data is not None:
            require_evaluable(data)

    @check("eval_split")
    def _instead_of_data(cls, split: str | float | None, info: ValidationInfo) -> None:
        if split is not None and info.data.get("eval_data") is not None:
            raise refuse("'eval_data' and 'eval_split' exclude each other", help="keep one")
        data = info.data.get("data")
        if isinstance(split, str) and data is not None and data.more:
            what = f"eval_split '{split}' names a split of one data set, and 'data' has several"
            raise refuse(what, help="name it under eval_data, or hold out a part: eval_split: 0.1")

    @check("compute_metrics")
    def _names_a_function(cls, name: MetricFunction, info: ValidationInfo) -> None:
        if name is None:
            return
        if not isinstance(name, UserFunction) and not _FUNCTION.fullmatch(name):
            expected = "MODULE:FUNCTION or FILE.py:FUNCTION"
            raise refuse("wrong value of 'compute_metrics'", expected=expected)
        cls._require_evaluated("compute_metrics", info.data)

    @check("metric_for_best_model")
    def _is_measured(cls, name: str | None, info: ValidationInfo) -> None:
        if name is None or name == TRAIN_LOSS:
            return
        cls._require_evaluated("metric_for_best_model", info.data, "or compare train_loss")
        base = info.data.get("base")
        classifies = base is not None and base.is_classifier
        known = (*(LABEL_METRICS if classifies else EVAL_METRICS), TRAIN_LOSS)
        if info.data.get("compute_metrics") is None and name.removeprefix("eval_") not in known:
            help = did_you_mean(name, known, "or name a function by 'compute_metrics'")
            what = "wrong value of 'metric_for_best_model'"
            raise refuse(what, expected=f"one of {', '.join(known)}", help=help)

    @check("halving")
    def _compares_evaluations(cls, halving: HalvingSpec | None, info: ValidationInfo) -> None:
        if halving is None:
            return
        cls._require_evaluated("halving", info.data)
        if info.data.get("eval_strategy") == "no":
            raise refuse("'halving' compares evaluations, and 'eval_strategy' is no")
        if halving.group is None:
            raise refuse("'halving' has no 'group'", help="name the jobs that are compared")

    @check("eval_strategy")
    def _can_be_followed(cls, strategy: str, info: ValidationInfo) -> None:
        fields = {"eval_data", "eval_split", "eval_steps", "metric_for_best_model"}
        if strategy == "no" or not fields <= set(info.data):
            return
        steps = info.data["eval_steps"]
        if strategy == "steps" and steps is None:
            raise refuse("eval_strategy 'steps' needs 'eval_steps'")
        if strategy == "epoch" and steps is not None:
            what = "'eval_steps' and eval_strategy 'epoch' exclude each other"
            raise refuse(what, help="keep one")
        if not _can_evaluate(info.data):
            help = "give one of them, or metric_for_best_model: train_loss"
            what = f"eval_strategy '{strategy}' needs 'eval_data' or 'eval_split'"
            raise refuse(what, help=help)

    @check("load_best_model_at_end", "early_stopping_patience")
    def _has_a_metric(cls, value: bool | int | None, info: ValidationInfo) -> None:
        data = info.data
        if not value or not {"eval_strategy", "metric_for_best_model"} <= set(data):
            return
        if data["eval_strategy"] == "no":
            help = "give 'eval_data' or 'eval_split', or metric_for_best_model: train_loss"
            raise refuse(f"'{info.field_name}' needs evaluations to compare", help=help)

    @check("early_stopping_threshold")
    def _has_patience(cls, threshold: float, info: ValidationInfo) -> None:
        if threshold and info.data.get("early_stopping_patience", 1) is None:
            raise refuse("'early_stopping_threshold' needs 'early_stopping_patience'")

    @check("sample_prompts")
    def _speaks(cls, prompts: list[str], info: ValidationInfo) -> None:
        base = info.data.get("base")
        if prompts and base is not None and base.is_classifier:
            raise refuse("a classifier answers no 'sample_prompts'", help="leave them out")

    @check("callbacks")
    def _hear_of_a_run(cls, callbacks: tuple[Any, ...], info: ValidationInfo) -> None:
        require_callbacks(callbacks)

    @staticmethod
    def _require_evaluated(field: str, data: Mapping[str, Any], help: str = "") -> None:
        if {"eval_data", "eval_split"} <= set(data) and not _has_eval_data(data):
            raise refuse(f"'{field}' needs 'eval_data' or 'eval_split'", help=help)

    @property
    def lora_fields(self) -> Mapping[str, Any]:
        """The fields of this job's PEFT config, read from the adapter folder where it has one.

        raises  AdapterFolderError
        """
        return _adapter_fields({"adapter": self.adapter, "base": self.base, "lora": self.lora})

    @property
    def changes_base(self) -> bool:
        """Whether PEFT alone would train this job beside a part of the base's weights.

        Here the base stays; the job's adapters have twice their rank, and half of each is constant.
        """
        return self.lora is not None and changes_base(self.lora.get("init_lora_weights"))

    @property
    def is_lora(self) -> bool:
        """Whether the job trains LoRA, not another kind of PEFT's."""
        return kind_of(self.lora_fields) == "LORA"

    @property
    def dropout_field(self) -> str | None:
        """The name of the field that is the adapter's dropout rate; None where none drops."""
        return adapter_spec(self.lora_fields).dropout_field

    def lora_config(self) -> Any:
        """A new PEFT config of what this job trains beside the base as it is. Imports PEFT.

        raises  JobError when PEFT refuses the fields, AdapterFolderError
        """
        config = self.start_config()
        return beside_base(config, changed=self.changes_base) if self.is_lora else config

    def start_config(self) -> Any:
        """A new PEFT config of this job as its user wrote it. Imports PEFT.

        raises  JobError when PEFT refuses the fields, AdapterFolderError
        """
        fields = self.lora_fields
        try:
            return peft_config(fields, self.base.task)
        except (ValueError, TypeError) as error:
            what = f"PEFT refuses the fields of {kind_of(fields)}"
            raise JobError(what, job=self.name, found=error) from error

    @property
    def label_shift(self) -> int:
        """Distance from a prediction to its label: 1 for next tokens, 0 for a classifier."""
        return 0 if self.base.is_classifier else 1

    @property
    def has_adapter_reference(self) -> bool:
        """Whether the job compares with the adapter that it continues, and not with the base."""
        compares = self.method in COMPARING and self.reference == "adapter"
        return compares and self.adapter is not None

    @property
    def assumes_common_loss(self) -> bool:
        """Whether it trains the cross entropy of the next token without saying so."""
        return self.method == "sft" and self.loss is None and not self.base.is_classifier

    @property
    def named_loss(self) -> str | UserFunction | None:
        """Its loss, where that reads more of a row than tokens: one with a name, or a function."""
        return None if self.loss == "cross_entropy" else self.loss

    @property
    def is_preference(self) -> bool:
        """Whether the job learns from what is preferred: pairs, or judged completions."""
        return self.method != "sft"

    @property
    def trains_matrices_alone(self) -> bool:
        """Whether it trains LoRA's two matrices and nothing beside them."""
        lora = self.lora_fields
        return self.is_lora and all(
            lora.get(key, "none") in ("none", None, False, []) for key in _BEYOND_MATRICES
        )

    @property
    def has_own_loss(self) -> bool:
        """Whether its loss is another one than the sum of its targets' cross entropy."""
        reads_more = self.is_preference or self.named_loss is not None
        return reads_more or self.label_smoothing_factor > 0

    @property
    def needs_whole_batches(self) -> bool:
        """Whether its numbers depend on which sequences are in a micro-batch."""
        reads_more = self.is_preference or self.named_loss is not None
        return reads_more or bool(self.neftune_noise_alpha)

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of what a batch counts as one sample."""
        return 2 if self.method in PAIRED else 1

    @property
    def best_metric(self) -> str:
        """The name that the metric for the best step has among those of an evaluation."""
        name = self.metric_for_best_model or "loss"
        return name if name == TRAIN_LOSS else f"eval_{name.removeprefix('eval_')}"

    @property
    def best_is_greatest(self) -> bool:
        """Whether a greater value of that metric is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not self.best_metric.endswith("loss")

    def warmup(self, steps: int) -> int:
        """Number of warmup steps among `steps` optimizer steps, rounded up as transformers does."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil((self.warmup_steps or self.warmup_ratio) * steps)

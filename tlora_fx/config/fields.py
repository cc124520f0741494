"""Fields of PEFT's LoraConfig, optimizers and schedules that a job may name.

The tables are static, so that a job file with a mistake is refused without importing PEFT or torch;
tests hold them against the installed PEFT, torch and transformers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    get_args,
)

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tlora_fx.config.functions import OR_FUNCTION, UserFunction
from tlora_fx.config.other_names import LORA_KEYS, hint
from tlora_fx.config.validation import Mistake, Spec, check, refuse
from tlora_fx.errors import did_you_mean, nearest


class Refused(NamedTuple):
    """A field that is refused unless it has its default value."""

    default: object
    reason: str


_CHANGES_BASE = "it changes the base weights, which all jobs share"
_NOT_YET = "not supported yet"

REFUSED: Mapping[str, Refused] = {
    "megatron_config": Refused(None, "Megatron layers are not traced"),
    "megatron_core": Refused("megatron.core", "Megatron layers are not traced"),
    "loftq_config": Refused({}, "LoftQ rounds the base to another one, which all jobs share"),
    "lora_ga_config": Refused(None, "LoRA-GA needs gradients before training, " + _NOT_YET),
    "velora_config": Refused(None, f"VeLoRA compresses saved activations, {_NOT_YET}"),
    "alora_invocation_tokens": Refused(None, "aLoRA acts on a part of a sequence, " + _NOT_YET),
    "use_qalora": Refused(False, "QALoRA needs a quantised base, " + _NOT_YET),
    "qalora_group_size": Refused(16, "QALoRA needs a quantised base, " + _NOT_YET),
    "monteclora_config": Refused(None, "MonteCLoRA samples its own weights, " + _NOT_YET),
    "layer_replication": Refused(None, "it changes the layers of the base, which all jobs share"),
    "runtime_config": Refused(None, "tlora-fx places weights itself"),
    "use_bdlora": Refused(None, f"block-diagonal adapters are {_NOT_YET}"),
    "arrow_config": Refused(None, "Arrow routes between finished adapters and trains none"),
    "kasa_config": Refused(None, f"KaSA: {_CHANGES_BASE}"),
    "ensure_weight_tying": Refused(False, f"tied copies of trained modules are {_NOT_YET}"),
}

#: Fields that say what a configuration belongs to. An adapter folder always has them.
IDENTITY: Mapping[str, str] = {
    "task_type": "leave it out, or write CAUSAL_LM or SEQ_CLS, as task under 'base' says",
    "peft_type": "tlora-fx trains LORA, ADALORA, IA3, LOHA, LOKR, OFT, VERA, and kinds of packages",
    "auto_mapping": "PEFT writes it itself",
    "peft_version": "PEFT writes it itself",
    "base_model_name_or_path": "the base is named under 'base:'",
    "revision": "the base is named under 'base:'",
    "inference_mode": "a job trains its adapter",
}

#: What else PEFT trains, by `peft_type`.
_OTHER_TYPES: Mapping[str, str] = {
    "BOFT": "BOFT multiplies butterflies of rotations",
}

IDENTITY_VALUES: Mapping[str, tuple[str, ...]] = {
    "task_type": ("CAUSAL_LM", "SEQ_CLS"),
    "peft_type": ("LORA",),
}

#: Starts that are made of what layers read on the job's own samples.
DATA_STARTS = frozenset({"eva", "corda"})
INITS = ("true", "false", "gaussian", "pissa", "pissa_niter_4", "olora", "orthogonal",
         "eva", "corda")  # fmt: skip
#: Starts that take a part of the base's weight away: PEFT trains beside what is left.
_TAKES_AWAY = re.compile(r"pissa|pissa_niter_[1-9]\d{0,2}|olora|corda")
_INIT_REASONS: Mapping[str, str] = {
    "loftq": REFUSED["loftq_config"].reason,
    "lora_ga": REFUSED["lora_ga_config"].reason,
    "mica": f"MiCA freezes one half of the adapter, {_NOT_YET}",
}


#: What to do in place of a start that is refused.
_INSTEAD: Mapping[str, str] = {
    "loftq": "start from pissa, or quantise the base by a pass: docs/quantised-base.md",
    "lora_ga": "start from pissa or olora, which need no gradients",
}


def _init(value: object) -> bool | str:
    if isinstance(value, bool):
        return value
    value = str(value)
    if value in ("gaussian", "orthogonal", "eva") or changes_base(value):
        return value
    reason = next((why for name, why in _INIT_REASONS.items() if value.startswith(name)), "")
    near = "" if reason else nearest(value, INITS)
    what = f"init_lora_weights '{value}' is refused" + (f": {reason}" if reason else "")
    instead = next((said for name, said in _INSTEAD.items() if value.startswith(name)), "")
    help = f"did you mean '{near}'?" if near else instead or "start from true, PEFT's default"
    expected = "true, false, gaussian, pissa, pissa_niter_N, olora, orthogonal, eva or corda"
    raise refuse(what, help=help, expected=expected)


def changes_base(init: object) -> bool:
    """Whether PEFT, to start an adapter so, takes a part of the base's weight away."""
    return isinstance(init, str) and _TAKES_AWAY.fullmatch(init) is not None


def names(value: object, info: ValidationInfo) -> object:
    """Accept text or a list of distinct texts that are not empty."""
    if isinstance(value, set | frozenset):
        value = sorted(value)
    items = [value] if isinstance(value, str) else value
    if value is None:
        return None
    if not isinstance(items, list | tuple) or not all(isinstance(x, str) and x for x in items):
        raise refuse(f"wrong value of '{info.field_name}'", expected="text or a list of texts")
    if not items:
        raise refuse(f"'{info.field_name}' is empty", help="name at least one, or leave it out")
    return value if isinstance(value, str) else list(items)


def name_list(value: object, info: ValidationInfo) -> object:
    """Accept a list of texts."""
    if isinstance(value, str):
        raise refuse(f"wrong value of '{info.field_name}'", expected="a list of texts")
    return names(value, info)


def layer_numbers(value: object) -> object:
    """Accept a layer's number, or a list of them."""
    items = value if isinstance(value, list | tuple) else [value]
    if value is None:
        return None
    if not items or not all(type(item) is int and item >= 0 for item in items):
        what = "wrong value of 'layers_to_transform'"
        raise refuse(what, expected="a layer number from 0, or a list of them")
    return value if isinstance(value, int) else list(items)


def _tokens(value: object) -> object:
    """Accept token ids, or token ids by the name of an embedding."""
    if value is None:
        return None
    lists: list[Any] = list(value.values()) if isinstance(value, Mapping) else [value]
    for ids in lists:
        whole = isinstance(ids, list | tuple) and all(type(i) is int and i >= 0 for i in ids)
        if not (whole and ids and len(set(ids)) == len(ids)):
            expected = "distinct token ids from 0, in a list or in lists by an embedding's name"
            raise refuse("wrong value of 'trainable_token_indices'", expected=expected)
    return value


def targets(value: object, info: ValidationInfo) -> object:
    """Accept what `names` accepts, or an empty list: no module, but parameters."""
    return [] if isinstance(value, list | tuple | set) and not value else names(value, info)


Names: TypeAlias = Annotated[Any, AfterValidator(names)]
Rank: TypeAlias = Annotated[StrictInt, Field(ge=1)]
Alpha: TypeAlias = Annotated[StrictFloat, Field(gt=0)]


class DataStartSpec(Spec):
    """Settings of a start that is computed from the job's data."""

    @model_validator(mode="before")
    @classmethod
    def _as_mapping(cls, data: Any) -> Any:
        """Accept PEFT's class for it, and fields that are None, as PEFT writes them."""
        if dataclasses.is_dataclass(data) and not isinstance(data, type):
            data = dataclasses.asdict(data)
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None}


class EvaSpec(DataStartSpec):
    """The fields of PEFT's EvaConfig, with its defaults."""

    rho: StrictFloat = Field(default=2.0, validate_default=True)
    tau: StrictFloat = Field(default=0.99, ge=0, le=1)
    use_label_mask: StrictBool = True
    label_mask_value: Literal[-100] = -100
    whiten: StrictBool = False
    adjust_scaling_factors: StrictBool = True

    @check("rho")
    def _ranks_stay(cls, rho: float, info: ValidationInfo) -> None:
        if rho != 1:
            what = f"EVA with rho {rho:g} moves ranks between modules, by what it reads of the data"
            help = "set eva_config: {rho: 1.0}; PEFT's default is 2.0"
            raise refuse(what, help=help)


class CordaSpec(DataStartSpec):
    """The fields of PEFT's CordaConfig that a job may use, with its defaults."""

    corda_method: Literal["ipm", "kpm"] = "ipm"
    verbose: StrictBool = False
    use_float16_for_covariance: StrictBool = False
    prune_temporary_fields: StrictBool = True

    @classmethod
    def unknown_key(cls, key: str, value: object) -> Mistake:
        """Message for PEFT's files, or for a key that PEFT does not know."""
        if key in ("cache_file", "covariance_file"):
            what = f"'{key}' is refused: a job's start is made of its own data, each time"
            return Mistake((key,), what, help="leave it out")
        return super().unknown_key(key, value)


#: Fields of linear modules, whose input is theirs alone; a parameter's is not.
NO_PARAMETERS = ("lora_dropout", "use_dora", "lora_bias", "fan_in_fan_out")


def parameters_exclude(fields: Mapping[str, Any]) -> str:
    """The LoRA field, "" for none, that PEFT refuses beside adapters on parameters."""
    excluded = next((name for name in NO_PARAMETERS if fields.get(name)), None)
    if excluded is not None:
        return f"'{excluded}'"
    start = fields.get("init_lora_weights", True)
    return "" if isinstance(start, bool) else f"init_lora_weights '{start}'"


class LoraSpec(Spec):
    """The LoraConfig fields that a job may use, with PEFT's names and defaults."""

    other_names: ClassVar[Mapping[str, str]] = LORA_KEYS
    dropout_field: ClassVar[str | None] = "lora_dropout"
    inner: ClassVar[Mapping[str, type[Spec]]] = {"eva_config": EvaSpec, "corda_config": CordaSpec}

    r: Rank = 8
    lora_alpha: Alpha = 8
    lora_dropout: StrictFloat = Field(default=0.0, ge=0, lt=1)
    target_modules: Annotated[Any, AfterValidator(targets)] = None
    exclude_modules: Names = None
    rank_pattern: dict[str, Rank] = Field(default={})
    alpha_pattern: dict[str, Alpha] = Field(default={})
    target_parameters: Annotated[Any, AfterValidator(name_list)] = None
    use_rslora: StrictBool = False
    use_dora: StrictBool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: StrictBool = False
    modules_to_save: Annotated[Any, AfterValidator(name_list)] = None
    trainable_token_indices: Annotated[Any, AfterValidator(_tokens)] = None
    layers_to_transform: Annotated[Any, AfterValidator(layer_numbers)] = None
    layers_pattern: Names = None
    fan_in_fan_out: StrictBool = False
    init_lora_weights: Annotated[Any, AfterValidator(_init)] = True
    eva_config: EvaSpec | None = None
    corda_config: CordaSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if not is_default(str(key), value)}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(self.target_modules, str) and getattr(self, name) is not None:
                what = f"'{name}' needs 'target_modules' as a list"
                raise refuse(what, help="list the target modules by name")
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise refuse("'layers_pattern' needs 'layers_to_transform'")
        if self.lora_bias and self.use_dora:
            raise refuse("'lora_bias' and 'use_dora' exclude each other")
        if self.lora_bias and not isinstance(self.init_lora_weights, bool):
            raise refuse("'lora_bias' needs init_lora_weights true or false")
        if self.target_modules == [] and not self.target_parameters:
            raise refuse("'target_modules' is empty", help="name at least one, or leave it out")
        self._require_start_fits()
        self._require_parameters_fit()
        return self

    def _require_parameters_fit(self) -> None:
        """Refuse what PEFT refuses of adapters on parameters, whose input is not theirs alone."""
        if not self.target_parameters:
            return
        excluded = parameters_exclude(
            self.model_dump(include={*NO_PARAMETERS, "init_lora_weights"})
        )
        if excluded:
            what = f"'target_parameters' and {excluded} exclude each other"
            raise refuse(what, help=f"leave {excluded} out")

    def _require_start_fits(self) -> None:
        init = self.init_lora_weights
        if init == "orthogonal" and any(r % 2 for r in (self.r, *self.rank_pattern.values())):
            raise refuse("init_lora_weights 'orthogonal' needs even ranks", help="give an even 'r'")
        self._require_data_start_fits()
        if not changes_base(init):
            return
        # The base keeps what such a start takes away, so the job's branch takes it away instead,
        # and would drop that too.
        for name in ("lora_dropout", "use_dora"):
            if getattr(self, name):
                what = f"init_lora_weights '{init}' and '{name}' exclude each other here"
                raise refuse(what, help=f"leave '{name}' out")

    def _require_data_start_fits(self) -> None:
        init = self.init_lora_weights
        for name, config in (("eva", self.eva_config), ("corda", self.corda_config)):
            if config is not None and init != name:
                what = f"'{name}_config' needs init_lora_weights: {name}"
                raise refuse(what, help=f"set it, or leave '{name}_config' out")
        if init == "eva" and self.eva_config is None:
            what = "init_lora_weights 'eva' needs eva_config: {rho: 1.0}"
            raise refuse(what, help="PEFT's default, rho 2.0, moves ranks between modules")
        if init == "eva" and self.rank_pattern:
            # PEFT gives modules that read the same inputs the largest of their ranks.
            what = "init_lora_weights 'eva' and 'rank_pattern' exclude each other"
            raise refuse(what, help="give all modules one 'r'")

    @classmethod
    def unknown_key(cls, key: str, value: object) -> Mistake:
        """Message for a LoRA field that is refused, or for a key that PEFT does not know."""
        if key == "peft_type" and (reason := _OTHER_TYPES.get(str(value).upper())):
            what = f"peft_type '{value}' is refused: {reason}, {_NOT_YET}"
            return Mistake((key,), what, help=IDENTITY[key])
        if key in IDENTITY:
            return Mistake((key,), f"'{key}' is refused", help=IDENTITY[key])
        if key in REFUSED:
            return Mistake((key,), f"'{key}' is refused: {REFUSED[key].reason}")
        other = hint(key, cls.other_names)
        if not other and key in peft_defaults():
            what = f"'{key}' is refused: this version of tlora-fx does not know the field"
            return Mistake((key,), what)
        help = did_you_mean(
            key, [*cls.model_fields, *REFUSED], f"known keys: {', '.join(cls.model_fields)}"
        )
        return Mistake((key,), f"unknown key '{key}' in 'lora'", help=other or help)


def is_default(key: str, value: object) -> bool:
    """Whether a field that no job may set has the value that means nothing."""
    if key in LoraSpec.model_fields:
        return False
    if key in IDENTITY:
        return value in (None, False) or value in IDENTITY_VALUES.get(key, ())
    if key in REFUSED:
        return value in (None, REFUSED[key].default)
    if hint(key, LORA_KEYS):
        return False  # to ask PEFT takes seconds
    return key in peft_defaults() and value == peft_defaults()[key]


def peft_defaults() -> Mapping[str, object]:
    """The fields of the installed LoraConfig and their defaults. Imports PEFT."""
    import peft

    return {field.name: default_of(field) for field in dataclasses.fields(peft.LoraConfig)}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass's field, `dataclasses.MISSING` where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


OptimizerName = Literal[
    "adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adafactor",
    "lion", "muon", "adamw_8bit", "lorafa",
]  # fmt: skip

#: Names that transformers has for the same arithmetic.
OPTIMIZER_ALIASES: Mapping[str, str] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "lion_32bit": "lion",
    "adamw_bnb_8bit": "adamw_8bit",
    # Paging moves the state to the CPU where memory is short, and changes no number.
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_lion_32bit": "lion",
}

ScheduleName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]

#: The class, and the arguments that 'optim_args' may hold.
OPTIMIZERS: Mapping[str, tuple[str, frozenset[str]]] = {
    "adamw": ("AdamW", frozenset({"amsgrad", "maximize"})),
    "adam": ("Adam", frozenset({"amsgrad", "maximize", "decoupled_weight_decay"})),
    "sgd": ("SGD", frozenset({"momentum", "dampening", "nesterov", "maximize"})),
    "rmsprop": ("RMSprop", frozenset({"alpha", "eps", "momentum", "centered", "maximize"})),
    "adagrad": ("Adagrad", frozenset({"lr_decay", "initial_accumulator_value", "eps", "maximize"})),
    "nadam": ("NAdam", frozenset({"momentum_decay", "decoupled_weight_decay", "maximize"})),
    "radam": ("RAdam", frozenset({"decoupled_weight_decay", "maximize"})),
    "adamax": ("Adamax", frozenset({"maximize"})),
    "adafactor": ("Adafactor", frozenset({"beta2_decay", "eps", "d", "maximize"})),
    "lion": ("Lion", frozenset({"decoupled_weight_decay"})),
    "muon": (
        "Muon",
        frozenset({"momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}),
    ),
    "adamw_8bit": ("AdamW8bit", frozenset({"min_8bit_size"})),
    "lorafa": ("LoraFAOptimizer", frozenset({"correct_bias"})),
}

#: Where a class is that torch.optim does not have.
OPTIMIZER_MODULES: Mapping[str, str] = {
    "lion": "lion_pytorch.foreach",
    "adamw_8bit": "bitsandbytes.optim",
    "lorafa": "peft.optimizers.lorafa",
}

#: Optimizers that take the job's betas and epsilon.
ADAM_LIKE = frozenset({"adamw", "adam", "nadam", "radam", "adamax", "adamw_8bit", "lorafa"})
#: Optimizers that take its betas alone.
WITH_BETAS = frozenset({"lion"})

_JOB_FIELDS: Mapping[str, str] = {
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}

_MIN_LR = frozenset({"num_cycles", "min_lr", "min_lr_rate"})
SCHEDULE_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "linear": frozenset(),
    "cosine": frozenset({"num_cycles"}),
    "cosine_with_restarts": frozenset({"num_cycles"}),
    "polynomial": frozenset({"lr_end", "power"}),
    "constant": frozenset(),
    "constant_with_warmup": frozenset(),
    "inverse_sqrt": frozenset({"timescale"}),
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": _MIN_LR | {"warmup_lr_rate"},
    "warmup_stable_decay": frozenset(
        {
            "num_decay_steps",
            "num_stable_steps",
            "warmup_type",
            "decay_type",
            "min_lr_ratio",
            "num_cycles",
        }
    ),
}
NEEDED_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "warmup_stable_decay": frozenset({"num_decay_steps"})
}


def check_optimizer_arguments(name: str, given: Mapping[str, Any]) -> PydanticCustomError | None:
    """The mistake in 'optim_args' for the optimizer `name`, or None."""
    _, allowed = OPTIMIZERS[name]
    for key in given:
        if key in allowed:
            continue
        field = _JOB_FIELDS.get(key)
        help = f"use {field}" if field else ""
        return _unknown(key, f"the optimizer '{name}'", allowed, help)
    return None


def check_schedule_arguments(name: str, given: Mapping[str, Any]) -> PydanticCustomError | None:
    """The mistake in 'lr_scheduler_kwargs' for the schedule `name`, or None."""
    allowed = SCHEDULE_ARGUMENTS[name]
    for key in given:
        if key not in allowed:
            return _unknown(key, f"the schedule '{name}'", allowed, "")
    for key in NEEDED_ARGUMENTS.get(name, frozenset()) - set(given):
        return refuse(f"the schedule '{name}' needs '{key}' in 'lr_scheduler_kwargs'")
    return None


def _unknown(key: str, owner: str, allowed: frozenset[str], help: str) -> PydanticCustomError:
    if not help:
        known = ", ".join(sorted(allowed)) or "none"
        help = did_you_mean(key, allowed, f"known arguments: {known}")
    return refuse(f"unknown argument '{key}' of {owner}", help=help)


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


def _split(value: object) -> object:
    """Accept the name of a split, or the part of the samples that is held out."""
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, float) and 0 < value < 1:
        return value
    expected = "a number n with 0 < n < 1, or the name of a split"
    raise refuse("wrong value of 'eval_split'", expected=expected)


def _warmup(value: object) -> object:
    """Accept a number of steps, or the part of all steps, as `warmup_steps` of transformers."""
    if type(value) is int and value >= 0:
        return value
    if type(value) is float and 0 < value < 1:
        return value
    expected = "a whole number of steps from 0, or the part of all steps, a number n with 0 < n < 1"
    raise refuse("wrong value of 'warmup_steps'", expected=expected)


def _by_epochs(value: object) -> object:
    """None for -1, by which transformers says that `num_train_epochs` counts."""
    return None if type(value) is int and value == -1 else value


def _trackers(value: object) -> object:
    """One tracker's name for a list of it; and all, or none, as transformers has them."""
    if value in ("none", ["none"]):
        return []
    if value in ("all", ["all"]):
        return list(get_args(TrackerName))
    return [value] if isinstance(value, str) else value


def _alias(value: object) -> object:
    return OPTIMIZER_ALIASES.get(value, value) if isinstance(value, str) else value


# Types of fields of a job; optimizers, schedules and metrics may be functions of the user's own.
if TYPE_CHECKING:
    EvalSplit = Any
    MaxSteps = int | None
    Trackers = list[TrackerName]
    WarmupSteps = int | float
    Optimizer = OptimizerName | UserFunction
    Schedule = ScheduleName | UserFunction
    MetricFunction = str | UserFunction | None
else:
    EvalSplit = Annotated[Any, AfterValidator(_split)]
    MaxSteps = Annotated[StrictInt | None, BeforeValidator(_by_epochs)]
    Trackers = Annotated[list[TrackerName], BeforeValidator(_trackers)]
    WarmupSteps = Annotated[int | float, BeforeValidator(_warmup)]
    Optimizer = Annotated[OptimizerName, BeforeValidator(_alias), *OR_FUNCTION]
    Schedule = Annotated[ScheduleName, *OR_FUNCTION]
    MetricFunction = Annotated[StrictStr | None, *OR_FUNCTION]


class ScheduleSpec(Spec):
    """Requests of a job to a scheduler (`tlora-fx run`, `serve`); `tlora-fx train` ignores them.

    gpus                 number of GPUs that the job would get if it trained alone
    max_slowdown         how many times slower than alone the job may become in a group
    deadline             seconds after its submission by which the job should be done; None: no
                         deadline
    max_slowdown_opt_in  how many times slower than alone the job may become if other jobs gain by
                         it; the job gets credit for that. None: `max_slowdown` always holds. Older
                         job files call this field `lends`
    """

    gpus: StrictInt = Field(default=1, ge=1)
    max_slowdown: StrictFloat = Field(default=1.5, ge=1)
    deadline: StrictFloat | None = Field(default=None, gt=0)
    max_slowdown_opt_in: StrictFloat | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_slowdown_opt_in", "lends")
    )

    @check("max_slowdown_opt_in")
    def _more_than_it_must(cls, most: float | None, info: ValidationInfo) -> None:
        bound = info.data.get("max_slowdown")
        if most is not None and bound is not None and most < bound:
            help = f"give {bound:g} or more, or a smaller 'max_slowdown'"
            what = "'max_slowdown_opt_in' is below 'max_slowdown', which holds anyway"
            raise refuse(what, help=help)

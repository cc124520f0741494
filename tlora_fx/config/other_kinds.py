"""Kinds of adapters that PEFT has beside LoRA, and which fields of their configs a job may name.

A job names its kind by `peft_type`. Names and defaults are those of PEFT's config classes. A job's
branch of such a kind runs as PEFT's own module computes it.

Other packages name kinds of their own in the entry-point group `tlora_fx.adapters`, by a subclass
of `OtherKind`. It is imported when a job asks for it.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tlora_fx.config.base_spec import HEADS
from tlora_fx.config.fields import (
    DATA_STARTS,
    IDENTITY,
    IDENTITY_VALUES,
    REFUSED,
    Alpha,
    DataStartSpec,
    LoraSpec,
    Names,
    Rank,
    Refused,
    changes_base,
    default_of,
    layer_numbers,
    name_list,
    names,
)
from tlora_fx.config.plugins import Plugin, load_plugin, plugin_names, plugins_of
from tlora_fx.config.validation import Spec, refuse
from tlora_fx.errors import nearest

if TYPE_CHECKING:
    import peft

_DROPS = "it drops parts of a module by a draw that no job's seed decides, not supported yet"
_BIAS = "a trained bias belongs to LoRA jobs here"
ADAPTERS = "tlora_fx.adapters"


class OtherKind(Spec):
    """Fields that all kinds share.

    tuner           the module that makes PEFT know the kind; imported with PEFT, never before
    refused         fields that have to keep their default, and why
    dropout_field   the one that is the rate of the adapter's dropout
    vectors         whether it trains vectors
    frozen          parts of the names of tensors that a job's files have, and no step updates
    """

    tuner: ClassVar[str] = "peft"
    refused: ClassVar[Mapping[str, Refused]] = {}
    dropout_field: ClassVar[str | None] = None
    vectors: ClassVar[bool] = False
    frozen: ClassVar[tuple[str, ...]] = ()

    peft_type: Annotated[str, BeforeValidator(lambda value: str(value).upper())]
    target_modules: Names = None
    modules_to_save: Annotated[Any, AfterValidator(name_list)] = None

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        kind = kind_of(data)
        return {
            key: value
            for key, value in data.items()
            if key in cls.model_fields or cls._drops(kind, key, value)
        }

    @classmethod
    def _drops(cls, kind: str, key: str, value: object) -> bool:
        """Refuse a key that is no field; False where its value means nothing."""
        if key in IDENTITY:
            if value in (None, False) or (key == "task_type" and value in IDENTITY_VALUES[key]):
                return False
            raise refuse(f"'{key}' is refused", help=IDENTITY[key])
        if key in cls.refused:
            if value in (None, cls.refused[key].default):
                return False
            raise refuse(f"'{key}' is refused: {cls.refused[key].reason}", help="leave it out")
        near = nearest(key, [*cls.model_fields, *cls.refused])
        if not near and (key, value) in peft_fields(kind).items():
            return False
        help = f"did you mean '{near}'?" if near else f"known keys: {', '.join(cls.model_fields)}"
        title = cls.__name__.removesuffix("Spec")
        raise refuse(f"unknown key '{key}' in 'lora' of the kind {title}", help=help)


class _Layered(OtherKind):
    """Kinds that can be confined to some layers."""

    layers_to_transform: Annotated[Any, AfterValidator(layer_numbers)] = None
    layers_pattern: Names = None

    @model_validator(mode="after")
    def _pattern_has_layers(self) -> Self:
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise refuse("'layers_pattern' needs 'layers_to_transform'")
        return self


def _names_or_none(value: object, info: ValidationInfo) -> object:
    return [] if value == [] else names(value, info)


class IA3Spec(OtherKind):
    """IA³: factors of the results of modules, or of what feed-forward modules read."""

    vectors: ClassVar[bool] = True

    exclude_modules: Names = None
    feedforward_modules: Annotated[Any, AfterValidator(_names_or_none)] = None
    fan_in_fan_out: StrictBool = False
    init_ia3_weights: StrictBool = True


class _Lycoris(_Layered):
    refused: ClassVar[Mapping[str, Refused]] = {
        "rank_dropout": Refused(0.0, _DROPS),
        "module_dropout": Refused(0.0, _DROPS),
        "rank_dropout_scale": Refused(False, _DROPS),
        "use_effective_conv2d": Refused(False, "adapters on convolutions are not supported yet"),
    }

    exclude_modules: Names = None
    r: Rank = 8
    alpha: Alpha = 8
    rank_pattern: dict[str, Rank] = Field(default={})
    alpha_pattern: dict[str, Alpha] = Field(default={})


class LoHaSpec(_Lycoris):
    """LoHa: the elementwise product of two low-rank products."""

    init_weights: StrictBool = True


class LoKrSpec(_Lycoris):
    """LoKr: a Kronecker product."""

    decompose_both: StrictBool = False
    decompose_factor: StrictInt = -1
    init_weights: StrictBool | Literal["lycoris"] = True


class OFTSpec(_Layered):
    """OFT: blocks of what a module reads are rotated."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "module_dropout": Refused(0.0, _DROPS),
        "coft": Refused(False, "constrained OFT changes its own weights in the forward"),
        "eps": Refused(6e-5, "it belongs to 'coft', which is refused"),
        "bias": Refused("none", _BIAS),
    }

    exclude_modules: Names = None
    r: StrictInt = Field(default=0, ge=0)
    oft_block_size: StrictInt = Field(default=32, ge=0)
    fan_in_fan_out: StrictBool = False
    block_share: StrictBool = False
    use_cayley_neumann: StrictBool = True
    num_cayley_neumann_terms: StrictInt = Field(default=5, ge=1)
    init_weights: StrictBool = True

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.r == 0) == (self.oft_block_size == 0):
            raise refuse("OFT needs one of 'r' and 'oft_block_size'", help="set the other one to 0")
        return self


class VeRASpec(_Layered):
    """VeRA: two vectors a module around matrices that are drawn once for all modules."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "bias": Refused("none", _BIAS),
        "save_projection": Refused(
            False,
            "PEFT draws the projections again from 'projection_prng_key', so no file has them",
        ),
    }
    dropout_field: ClassVar[str | None] = "vera_dropout"
    vectors: ClassVar[bool] = True

    r: Rank = 256
    projection_prng_key: StrictInt = Field(default=0, ge=0)
    vera_dropout: StrictFloat = Field(default=0.0, ge=0, lt=1)
    d_initial: StrictFloat = 0.1
    fan_in_fan_out: StrictBool = False
    init_weights: StrictBool = True


class AdaLoRASpec(_Layered):
    """AdaLoRA: B (E * A), whose ranks move between modules while the job trains."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **REFUSED,
        "r": Refused(8, "AdaLoRA begins with 'init_r' and ends with 'target_r'"),
        "rank_pattern": Refused(None, "its ranks were allocated already"),
        "alpha_pattern": Refused({}, "AdaLoRA has one 'lora_alpha'"),
        "use_rslora": Refused(False, "AdaLoRA scales by its 'init_r'"),
        "use_dora": Refused(False, "PEFT has no magnitudes for AdaLoRA"),
        "lora_bias": Refused(False, _BIAS),
        "bias": Refused("none", _BIAS),
        **dict.fromkeys(("eva_config", "corda_config"), Refused(None, "AdaLoRA has one start")),
        "init_lora_weights": Refused(True, "AdaLoRA has one start"),
        "trainable_token_indices": Refused(None, "single tokens belong to LoRA jobs here"),
        "target_parameters": Refused(None, "experts' parameters belong to LoRA jobs here"),
    }
    dropout_field: ClassVar[str | None] = "lora_dropout"

    exclude_modules: Names = None
    init_r: Rank = 12
    target_r: Rank = 8
    tinit: StrictInt = Field(default=0, ge=0)
    tfinal: StrictInt = Field(default=0, ge=0)
    deltaT: StrictInt = Field(default=1, ge=1)  # noqa: N815  (PEFT's name)
    beta1: StrictFloat = Field(default=0.85, gt=0, lt=1)
    beta2: StrictFloat = Field(default=0.85, gt=0, lt=1)
    orth_reg_weight: StrictFloat = Field(default=0.5, ge=0)
    total_step: StrictInt | None = Field(default=None, ge=1)
    lora_alpha: Alpha = 8
    lora_dropout: StrictFloat = Field(default=0.0, ge=0, lt=1)
    fan_in_fan_out: StrictBool = False

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.total_step is None:
            what = "AdaLoRA needs 'total_step', by which its budget shrinks"
            raise refuse(what, help="give the job's optimizer steps")
        if self.target_r >= self.init_r:
            raise refuse("AdaLoRA needs a 'target_r' below 'init_r'")
        if self.tinit >= self.total_step - self.tfinal:
            what = "AdaLoRA has no step between 'tinit' and 'tfinal' to move ranks in"
            raise refuse(what, help="lessen them, or give more steps as total_step")
        return self


OTHER_KINDS: Mapping[str, type[OtherKind]] = {
    "ADALORA": AdaLoRASpec,
    "IA3": IA3Spec,
    "LOHA": LoHaSpec,
    "LOKR": LoKrSpec,
    "OFT": OFTSpec,
    "VERA": VeRASpec,
}


def other_kind(kind: str) -> type[OtherKind] | None:
    """The spec of a kind beside LoRA, ours or another package's; None where there is none.

    kind      a `peft_type` in capitals
    raises    PluginBroken where a package names it and its spec cannot be imported, or is none
    """
    if kind in OTHER_KINDS or kind == "LORA":
        return OTHER_KINDS.get(kind)
    offered = [entry for entry in entry_points(group=ADAPTERS) if entry.name.upper() == kind]
    if not offered:
        return None
    plugin = _load(offered[0])
    if plugin.found is not None:
        return plugin.found
    raise plugin.error(f"the kind of adapter '{kind}'")


def other_kind_names() -> list[str]:
    """The kinds beside LoRA, without importing anything."""
    return sorted({*OTHER_KINDS, *map(str.upper, plugin_names(ADAPTERS))})


def plugin_kinds() -> list[Plugin]:
    """The kinds of other packages, broken ones too, by name."""
    return plugins_of(ADAPTERS, _load)


def _load(entry: EntryPoint) -> Plugin:
    """Import the spec that an entry point names; never raises."""
    plugin, broken = load_plugin(entry), ""
    if entry.name.upper() in ("LORA", *OTHER_KINDS):
        broken = "the name is one of PEFT's kinds that tlora-fx trains"
    elif plugin.found is not None and not issubclass(plugin.found, OtherKind):
        broken = f"{plugin.target} is no OtherKind"
    return replace(plugin, found=None, broken=broken) if broken else plugin


def kind_of(fields: Mapping[str, Any]) -> str:
    """The `peft_type` of a job's adapter by its fields, in capitals."""
    return str(fields.get("peft_type") or "LORA").upper()


def is_frozen(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a job of a kind beside LoRA has a tensor, and no step updates it.

    fields    of its adapter
    name      PEFT's of the tensor
    """
    kind = other_kind(kind_of(fields))
    return kind is not None and any(part in name for part in kind.frozen)


def check_updates(optim: str, fields: Mapping[str, Any]) -> PydanticCustomError | None:
    """The refusal of an optimizer that cannot update all that an adapter of these fields trains."""
    kind, another = kind_of(fields), "take another optimizer"
    vectors = ("use_dora", "bias", "lora_bias")
    field = next((key for key in vectors if fields.get(key) not in (None, False, "none")), "")
    if optim == "muon" and field:
        what = f"optim 'muon' updates matrices, and '{field}' trains vectors beside them"
        return refuse(what, help=f"leave '{field}' out, or {another}")
    other = other_kind(kind)
    if optim == "muon" and other is not None and other.vectors:
        what = f"optim 'muon' updates matrices, and {kind} trains vectors"
        return refuse(what, help=another)
    if optim != "lorafa":
        return None
    if kind != "LORA":
        return refuse(f"optim 'lorafa' freezes LoRA's A, and {kind} has none", help=another)
    if field in ("use_dora", "lora_bias"):
        what = f"optim 'lorafa' pairs each A with its B, and '{field}' trains more beside them"
        return refuse(what, help=f"leave '{field}' out, or {another}")
    if changes_base(fields.get("init_lora_weights")):
        what = "optim 'lorafa' excludes a start that takes a part of the base away"
        return refuse(what, help=f"leave init_lora_weights out, or {another}")
    return None


def adapter_spec(value: object) -> type[OtherKind] | type[LoraSpec]:
    """The spec that validates a job's `lora`; raises PluginBroken."""
    kind = kind_of(value) if isinstance(value, Mapping) else "LORA"
    return other_kind(kind) or LoraSpec


def adapter_mapping(value: object) -> dict[str, Any]:
    """Validate the `lora` mapping of a job, of any kind: honoured fields that were given."""
    spec: Any = adapter_spec(value).model_validate(value)
    fields = {name: getattr(spec, name) for name in sorted(spec.model_fields_set)}
    for name, field in fields.items():
        if isinstance(field, DataStartSpec):
            fields[name] = field.model_dump(exclude_unset=True)
    for name in fields.keys() & {"alpha", "lora_alpha"}:
        fields[name] = _whole_number(fields[name])
    if "alpha_pattern" in fields:
        fields["alpha_pattern"] = {k: _whole_number(x) for k, x in spec.alpha_pattern.items()}
    return fields


def _whole_number(number: float) -> int | float:
    """A whole float as an int."""
    # PEFT writes what it is given into adapter_config.json, where alpha is a whole number.
    return int(number) if number == int(number) else number


def peft_config(fields: Mapping[str, Any], task: str = "CAUSAL_LM") -> peft.PeftConfig:
    """A new config of PEFT's class of the kind, for a task in its words. Imports PEFT.

    raises  ValueError or TypeError where PEFT refuses the fields
    """
    import peft

    given = {key: value for key, value in fields.items() if key != "peft_type"}
    if task == "SEQ_CLS":  # as PEFT's own classes for classifiers do
        trained = dict.fromkeys([*(given.get("modules_to_save") or ()), *HEADS])
        given["modules_to_save"] = [*trained]
    if kind_of(fields) == "VERA":
        given["save_projection"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of VeRA's projections, which are drawn again
        config: peft.PeftConfig = _config_class(kind_of(fields))(
            task_type=peft.TaskType(task), **given
        )
    return config


def beside_base(config: Any, *, changed: bool) -> Any:
    """A config of LoRA, changed to what a job trains beside the base as it is.

    changed    PEFT alone would take the adapter's start away from the base; here the adapter has
               twice its rank, and half of it is constant
    """
    if config.init_lora_weights in DATA_STARTS:
        config.init_lora_weights, config.eva_config, config.corda_config = True, None, None
    if changed:
        # As PEFT saves such an adapter with path_initial_model_for_weight_conversion.
        wider = math.sqrt(2) if config.use_rslora else 2
        config.init_lora_weights = True
        config.r, config.lora_alpha = 2 * config.r, wider * config.lora_alpha
        config.rank_pattern = {key: 2 * r for key, r in (config.rank_pattern or {}).items()}
        alphas = (config.alpha_pattern or {}).items()
        config.alpha_pattern = {key: wider * alpha for key, alpha in alphas}
    return config


def register_tuner(kind: str) -> None:
    """Make PEFT know a kind, so that it loads folders of it. Imports PEFT.

    raises    PluginBroken where the kind's package does not
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    tuner = getattr(other_kind(kind), "tuner", "peft")
    broken = f"it does not register {kind} with PEFT"
    try:
        import_module(tuner)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a stranger's module raises)
        broken = f"{type(error).__name__}: {error}"
    if not {kind} <= PEFT_TYPE_TO_CONFIG_MAPPING.keys() & PEFT_TYPE_TO_TUNER_MAPPING.keys():
        raise Plugin(kind, "", tuner, None, broken).error(f"the kind of adapter '{kind}'")


def _config_class(kind: str) -> Any:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    register_tuner(kind)
    classes: Mapping[Any, Any] = PEFT_TYPE_TO_CONFIG_MAPPING
    return classes[kind]


def peft_fields(kind: str) -> dict[str, Any]:
    """The fields of PEFT's config of a kind, with their defaults. Imports PEFT."""
    return {field.name: default_of(field) for field in dataclasses.fields(_config_class(kind))}

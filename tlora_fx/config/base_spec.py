"""The frozen base model of a job, as its user writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationInfo,
    model_validator,
)

from tlora_fx.config.objects import classifier_fields, dtype_name, is_module, name_of
from tlora_fx.config.other_names import BASE_KEYS
from tlora_fx.config.paths import is_file, is_folder, is_there
from tlora_fx.config.validation import Spec, check, refuse

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]
Objective = Literal[
    "tokens", "single_label_classification", "multi_label_classification", "regression"
]

SEED_LIMIT = 2**32
#: Modules that PEFT trains a copy of where a job classifies, by the ends of their names.
HEADS = ("classifier", "score")
#: A sample's labels are the bits of one number.
MAX_LABELS = 31
#: PEFT's tasks that no job has.
OTHER_TASKS = ("TOKEN_CLS", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION")


def _text_of_path(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _path_of_text(value: object) -> object:
    return Path(value) if isinstance(value, str) and value else value


def is_written_as_path(value: str) -> bool:
    """Whether text that may be a hub id or a path can only be a path."""
    return value.startswith((".", "/", "~"))


PathOrId = Annotated[StrictStr, BeforeValidator(_text_of_path), Field(min_length=1)]
LocalPath = Annotated[Path, BeforeValidator(_path_of_text)]


#: Classes of transformers by which models are loaded, for a language model or a classifier.
_LOADED_BY = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")


def _count(labels: int | list[str]) -> int:
    return len(labels) if isinstance(labels, list) else labels


class BaseSpec(Spec):
    """The frozen base model that the jobs of a file share.

    model              hub id, or local folder with a config and weights
    config             instead of `model`: a config.json, or a folder with one; weights are random
    seed               seed of the random weights of a base that is given by `config`
    tokenizer          hub id or folder of the tokenizer; None: that of the model or config
    dtype              dtype of the base's weights and activations
    quantize           form in which matrices of the layers are stored: nf4, int8 or float8; None:
                       as they are
    attention          packed: samples of all jobs stand in one row without padding; batch: padded
                       rows, for models that mix the tokens of a row; auto: packed where the base
                       allows it
    trust_remote_code  run Python code that comes with the base; the command line has to allow it
    task               CAUSAL_LM: a language model; SEQ_CLS: a model that gives each sequence a
                       class, or a number
    labels             names of the classes of a SEQ_CLS model, or their number
    problem_type       what a SEQ_CLS model learns: one class, several classes, or a number
                       (regression); None: regression if there is one label, else one class
    module             instead of `model`: an nn.Module or a model of transformers, with its
                       weights, from Python only. It has the dtype that it has
    tokenizer_object   instead of `tokenizer`: a tokenizer of transformers, from Python only. One
                       that is given as `tokenizer` comes here
    """

    other_names: ClassVar[Mapping[str, str]] = BASE_KEYS

    model: PathOrId | None = None
    config: LocalPath | None = None
    seed: StrictInt = Field(default=0, ge=0, lt=SEED_LIMIT)
    tokenizer: PathOrId | None = None
    dtype: DtypeName = "bfloat16"
    quantize: Literal["nf4", "int8", "float8"] | None = None
    attention: Literal["auto", "packed", "batch"] = "auto"
    trust_remote_code: StrictBool = False
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = "CAUSAL_LM"
    labels: StrictInt | list[StrictStr] | None = Field(default=None, validate_default=True)
    problem_type: (
        Literal["single_label_classification", "multi_label_classification", "regression"] | None
    ) = None
    module: Any = Field(default=None, exclude=True, repr=False, validate_default=True)
    tokenizer_object: Any = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _takes_objects(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        tokenizer, module = data.get("tokenizer"), data.get("module")
        if callable(tokenizer) and hasattr(tokenizer, "save_pretrained"):
            left = {key: value for key, value in data.items() if key != "tokenizer"}
            data = {**left, "tokenizer_object": tokenizer}
        if is_module(module) and "dtype" not in data and (dtype := dtype_name(module)) is not None:
            data = {**data, "dtype": dtype}
        return {**classifier_fields(module), **data} if is_module(module) else data

    @check("model", "tokenizer")
    def _folder_exists(cls, value: str | None, info: ValidationInfo) -> None:
        if value is None or not is_written_as_path(value) or is_folder(value):
            return
        if is_there(value):
            raise refuse(f"'{value}' is no folder", help="give the folder that the file lies in")
        raise refuse(f"'{value}' does not exist", help="give a folder, or a hub id without './'")

    @check("task", mode="before")
    def _is_trained_here(cls, task: object, info: ValidationInfo) -> None:
        if task in OTHER_TASKS:
            raise refuse(
                f"tlora-fx trains no {task}: language models, and classifiers of whole sequences",
                help="train this one with PEFT and transformers' Trainer",
            )

    @check("quantize")
    def _has_the_form(cls, form: str | None, info: ValidationInfo) -> None:
        if form is not None and info.data.get("dtype") == "float64":
            raise refuse(f"a base in float64 has no matrices in {form}", help="dtype: bfloat16")

    @check("config")
    def _config_exists(cls, path: Path | None, info: ValidationInfo) -> None:
        if path is None or is_file(path) or is_file(path / "config.json"):
            return
        what = f"no config.json in '{path}'" if is_folder(path) else f"'{path}' does not exist"
        raise refuse(what, help="name a config.json or a folder that holds one")

    @check("labels")
    def _are_of_a_classifier(cls, labels: int | list[str] | None, info: ValidationInfo) -> None:
        task = info.data.get("task")
        if task == "CAUSAL_LM" and labels is not None:
            raise refuse("'labels' are of a classifier", help="set task: SEQ_CLS beside them")
        if task == "SEQ_CLS" and labels is None:
            raise refuse("task SEQ_CLS needs 'labels'", help="give their names, or their number")
        if labels is not None and _count(labels) < 1:
            raise refuse("wrong value of 'labels'", expected="one label at least")
        if isinstance(labels, list) and len(set(labels)) < len(labels):
            raise refuse("'labels' names one label twice", help="give each label once")

    @check("problem_type")
    def _fits_the_labels(cls, kind: str | None, info: ValidationInfo) -> None:
        labels = info.data.get("labels")
        count = len(labels) if isinstance(labels, list) else labels
        if kind is None:
            return
        if count is None:
            raise refuse("'problem_type' is of a classifier", help="set task: SEQ_CLS and labels")
        if kind == "regression" and count > 1:
            raise refuse("a regression gives one number", help="set labels: 1")
        if kind == "single_label_classification" and count == 1:
            raise refuse("a classifier needs two labels at least", help="name them all")
        if kind == "multi_label_classification" and count > MAX_LABELS:
            what = f"a sample has a mark for each of {count} labels"
            raise refuse(what, expected=f"at most {MAX_LABELS} labels")

    @check("module")
    def _one_source(cls, module: Any, info: ValidationInfo) -> None:
        if module is not None and not is_module(module):
            raise refuse("'module' is no torch.nn.Module", help="give 'model' or 'config'")
        if hasattr(module, "peft_config") and hasattr(module, "get_base_model"):
            what = "the base is a PeftModel, which has an adapter already"
            help = "give the model without it, and the adapter's folder by 'adapter'"
            raise refuse(what, help=help)
        if not {"model", "config"} <= set(info.data):
            return
        sources = {"model": info.data["model"], "config": info.data["config"], "module": module}
        named = [f"'{name}'" for name, source in sources.items() if source is not None]
        if not named:
            raise refuse("the base has no source", help="give 'model' or 'config'")
        if len(named) > 1:
            raise refuse(f"{' and '.join(named)} exclude each other in 'base'", help="keep one")
        if module is not None:
            cls._is_of_the_task(module, info.data)

    @staticmethod
    def _is_of_the_task(module: Any, data: Mapping[str, Any]) -> None:
        """Refuse a module of another task, or with other labels, than the base is said to have."""
        own, kind = classifier_fields(module), type(module).__name__
        if data.get("task") != own.get("task", "CAUSAL_LM"):
            what = f"the model is {'a' if own else 'no'} classifier of sequences: {kind}"
            raise refuse(what, help=f"leave 'task' out, or load the model by {_LOADED_BY[not own]}")
        labels = data.get("labels")
        if own and labels is not None and _count(labels) != _count(own["labels"]):
            what = f"the model has {_count(own['labels'])} labels, and 'labels' {_count(labels)}"
            raise refuse(what, help="leave 'labels' out, or load the model with num_labels")

    def as_written(self) -> BaseSpec:
        """The spec without objects of Python: a model stands by the name that it was loaded by."""
        bare = {"module": None, "tokenizer_object": None}
        return self.model_copy(update=bare | {"model": self.model or name_of(self.module)})

    @property
    def is_classifier(self) -> bool:
        """Whether sequences have labels, in place of tokens that follow."""
        return self.task == "SEQ_CLS"

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels of a classifier, by number; without names, transformers' own."""
        if isinstance(self.labels, list):
            return tuple(self.labels)
        return tuple(f"LABEL_{index}" for index in range(self.labels or 0))

    @property
    def objective(self) -> Objective:
        """Objective of the loss: next tokens, or a classifier's labels as in transformers."""
        if not self.is_classifier:
            return "tokens"
        one = len(self.label_names) == 1
        return self.problem_type or ("regression" if one else "single_label_classification")

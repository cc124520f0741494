"""The data of a job, as its user writes them: their source, format and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, StrictBool, StrictFloat, StrictStr, ValidationInfo, model_validator

from tlora_fx.config.base_spec import BaseSpec, PathOrId
from tlora_fx.config.losses import FIELDS
from tlora_fx.config.objects import is_of_datasets, is_stream
from tlora_fx.config.other_names import DATA_KEYS
from tlora_fx.config.validation import Spec, check, refuse
from tlora_fx.errors import did_you_mean

FormatName = Literal[
    "auto", "prompt-completion", "messages", "text", "alpaca", "sharegpt", "preference",
    "unpaired-preference", "label", "tokens",
]  # fmt: skip
ColumnName = Literal[
    "prompt", "completion", "messages", "text", "instruction", "input", "output", "conversations",
    "chosen", "rejected", "tools", "label", "system", "history", "loss_mask", "input_ids",
    "labels", "attention_mask", "completion_mask", "assistant_masks", "margin", "weights",
    "logprobs", "advantages",
]  # fmt: skip
COLUMNS_OF: Mapping[str, frozenset[str]] = {
    "prompt-completion": frozenset({"prompt", "completion"}),
    "messages": frozenset({"messages"}),
    "text": frozenset({"text"}),
    "alpaca": frozenset({"instruction", "output"}),
    "sharegpt": frozenset({"conversations"}),
    "preference": frozenset({"chosen", "rejected"}),
    "unpaired-preference": frozenset({"prompt", "completion", "label"}),
    "label": frozenset({"text", "label"}),
    "tokens": frozenset({"input_ids"}),
}
#: Methods that learn from pairs of a chosen and a rejected completion.
PAIRED = ("dpo", "orpo", "reward")
#: Columns that a row of a format may have or lack.
OPTIONAL_COLUMNS: Mapping[str, frozenset[str]] = {
    "prompt-completion": frozenset({"tools", "system", "history"}),
    "messages": frozenset({"tools", "system", "history", "loss_mask"}),
    "text": frozenset(),
    "alpaca": frozenset({"input", "system", "history"}),
    "sharegpt": frozenset({"tools", "system", "history", "loss_mask"}),
    "preference": frozenset({"prompt", "tools", "system", "history", "margin"}),
    "unpaired-preference": frozenset({"tools", "system", "history"}),
    "label": frozenset(),
    "tokens": frozenset(
        {"labels", "attention_mask", "completion_mask", "assistant_masks", "loss_mask"}
    ),
}


def columns_of(format: str) -> frozenset[str]:
    """All columns that rows of a format may have."""
    return COLUMNS_OF.get(format, frozenset()) | OPTIONAL_COLUMNS.get(format, frozenset())


class DataSpec(Spec):
    """Source of a job's samples, and the choice of their tokens that are trained.

    path           a .jsonl, .json, .csv, .tsv, .parquet or .txt file, text also with .gz or .zst; a
                   pattern of such files, such as data/*.jsonl; a folder that save_to_disk of
                   datasets wrote; or the hub id of a data set
    name           name of the configuration of a data set of the hub
    split          name of the split of a data set of the hub, or of such a folder
    streaming      read only as many rows of a data set of the hub as the job's steps need
    columns        column names of the format, each mapped to the file's name of that column; and
                   names of the file's columns mapped to null, which are not read
    format         which columns a row has; auto: recognised by the names of the columns
    loss_on        which tokens are trained: those of completions, or all; auto: those of
                   completions if the data has any, else all
    skip_bad_rows  skip and count invalid rows, instead of refusing the data
    append_eos     end conversations by the end-of-sequence token where the chat template does not
    weight         of several data sets, how often this one is drawn from, see `Job.mixing`; that of
                   a single data set changes nothing
    more           the other data sets, where the job has several
    rows           instead of `path`, from Python only: a list of rows, each a dict; or a Dataset or
                   an IterableDataset of `datasets`. Of an IterableDataset as many rows are read as
                   the job's steps need
    """

    other_names: ClassVar[Mapping[str, str]] = DATA_KEYS

    path: PathOrId
    name: StrictStr | None = Field(default=None, min_length=1)
    split: StrictStr = Field(default="train", min_length=1)
    streaming: StrictBool = False
    columns: dict[str, StrictStr | None] = Field(default={})
    format: FormatName = Field(default="auto", validate_default=True)
    loss_on: Literal["auto", "completion", "all"] = "auto"
    skip_bad_rows: StrictBool = False
    append_eos: StrictBool = False
    weight: StrictFloat | None = Field(default=None, gt=0, allow_inf_nan=False)
    more: tuple[DataSpec, ...] = ()
    rows: Any = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _takes_rows(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("rows") is None:
            return data
        rows = data["rows"]
        if "path" in data and data["path"] != _title(rows):
            raise refuse("'path' and 'rows' exclude each other", help="keep one")
        return {**data, "path": _title(rows)} | ({"streaming": True} if is_stream(rows) else {})

    @check("rows")
    def _can_be_read(cls, rows: Any, info: ValidationInfo) -> None:
        if isinstance(rows, Mapping) and is_of_datasets(rows):
            splits = ", ".join(map(str, rows))
            raise refuse(
                f"the data is a {type(rows).__name__} of several splits: {splits}",
                help="give one of them, such as dataset['train']",
            )
        if rows is None or isinstance(rows, list | tuple) or is_of_datasets(rows):
            return
        help = "make one of it by datasets.Dataset.from_pandas, from_list or from_generator"
        expected = "a path, a list of rows (dicts), or a Dataset or IterableDataset of datasets"
        raise refuse("the data cannot be read", expected=expected, help=help)

    @check("more")
    def _fit_together(cls, more: tuple[DataSpec, ...], info: ValidationInfo) -> None:
        if "weight" in info.data:
            _fit_weights([info.data["weight"], *(each.weight for each in more)])
        if any(each.more for each in more):
            raise refuse("a data set of several has data sets of its own", help="list all at once")
        if more and any((info.data.get("streaming"), *(each.streaming for each in more))):
            raise refuse("several data sets cannot be streamed", help="leave streaming out")

    @property
    def parts(self) -> tuple[DataSpec, ...]:
        """Each data set as one of its own."""
        return (self.model_copy(update={"more": ()}), *self.more) if self.more else (self,)

    @check("columns")
    def _columns_known(cls, columns: dict[str, str | None], info: ValidationInfo) -> None:
        known = get_args(ColumnName)
        for name, theirs in columns.items():
            if theirs is not None and name not in known:
                help = did_you_mean(name, known, f"columns are {', '.join(known)}")
                raise refuse(f"no format has a column '{name}'", help=help)

    @property
    def mapped_columns(self) -> dict[str, str]:
        """Our names of columns, each with the data's name of that column."""
        return {name: theirs for name, theirs in self.columns.items() if theirs is not None}

    @property
    def ignored_columns(self) -> frozenset[str]:
        """Columns of the data that are not read though their names say otherwise."""
        return frozenset(name for name, theirs in self.columns.items() if theirs is None)

    @check("format")
    def _columns_fit(cls, format: str, info: ValidationInfo) -> None:
        columns = info.data.get("columns", {}).items()
        # A job's loss may read these of any format.
        given = {name for name, to in columns if to is not None and name not in FIELDS}
        wanted = columns_of(format)
        if format == "auto" and not any(given <= columns_of(name) for name in COLUMNS_OF):
            raise refuse(f"'columns' maps {' and '.join(sorted(given))}", help="name one format")
        if format != "auto" and given - wanted:
            help = f"map only {', '.join(sorted(wanted))}, or name another format"
            raise refuse(f"the format '{format}' has no column '{min(given - wanted)}'", help=help)

    @check("loss_on")
    def _has_completion(cls, loss_on: str, info: ValidationInfo) -> None:
        if loss_on == "completion" and info.data.get("format") == "text":
            raise refuse("the format 'text' has no completion to train on", help="loss_on: all")


def _title(rows: object) -> str:
    """Name of rows that have no path, for messages."""
    return f"<{type(rows).__name__}>"


def _fit_weights(weights: Sequence[float | None]) -> None:
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise refuse("some data sets have a weight and others none", help="weigh all, or none")
    if not math.isfinite(sum(given)):
        raise refuse("the weights of the data sets have no finite sum", help="give smaller ones")


def first_of_several(sets: Sequence[Any]) -> dict[str, Any]:
    """The fields of the first of several data sets, which holds the others as `more`.

    raises    PydanticCustomError
    """
    if not sets or not all(isinstance(each, (Mapping, DataSpec)) for each in sets):
        expected = "data sets, each with a path: [{path: a.jsonl}, {path: b.jsonl}]"
        raise refuse("wrong value of 'data'", expected=expected)
    first = sets[0]
    if isinstance(first, DataSpec):
        first = {name: getattr(first, name) for name in first.model_fields_set}
    if first.get("more"):
        raise refuse("a data set of several has data sets of its own", help="list all at once")
    return {**first, **({"more": sets[1:]} if len(sets) > 1 else {})}


def like(data: DataSpec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a data set to evaluate; those that are not given are those of `data`."""
    own = {"path", "split", "weight", "more"} | ({"streaming"} if data.rows is not None else set())
    return data.model_dump(exclude_unset=True, exclude=own) | dict(fields)


def require_evaluable(data: DataSpec) -> None:
    """Refuse data of which not every sample can be evaluated; raises PydanticCustomError."""
    if data.more:
        raise refuse(
            "'eval_data' is one data set",
            help="put their files into one, or into a folder that a pattern names",
        )
    if is_stream(data.rows):
        what = "an IterableDataset has no end, and every sample of 'eval_data' is evaluated"
        raise refuse(what, help="give its first rows as list(dataset.take(200))")


def require_data_of_method(base: BaseSpec | None, method: str, format: str) -> None:
    """Refuse a format of data that the method does not learn from."""
    _require_data_of_task(base, method, format)
    if method == "sft" and format == "preference":
        raise refuse("the format 'preference' needs pairs to be compared", help="method: dpo")
    if method != "kto" and format == "unpaired-preference":
        raise refuse("the format 'unpaired-preference' is of another method", help="method: kto")
    if method == "kto" and format not in ("auto", "unpaired-preference"):
        what = f"method 'kto' learns from judged completions, not from the format '{format}'"
        raise refuse(what, help="give prompt, completion and label, format: unpaired-preference")
    if method in PAIRED and format not in ("auto", "preference"):
        what = f"method '{method}' learns from pairs, not from the format '{format}'"
        raise refuse(what, help="give chosen and rejected, format: preference")


def _require_data_of_task(base: BaseSpec | None, method: str, format: str) -> None:
    """Refuse a method, or a format of data, of another task than the base's."""
    classifies = base is not None and base.is_classifier
    if classifies and method not in ("sft", "reward"):
        raise refuse(f"method '{method}' compares texts, and the base classifies them")
    if method == "reward":
        if base is not None and base.objective != "regression":
            what = "method 'reward' trains a head that gives each text one number"
            raise refuse(what, help="set task: SEQ_CLS and labels: 1 under 'base'")
        return
    if classifies and format not in ("auto", "label"):
        what = f"a classifier learns from labels, not from the format '{format}'"
        raise refuse(what, help="give the columns text and label, format: label")
    if not classifies and format == "label":
        what = "the format 'label' needs a base that classifies"
        raise refuse(what, help="set task: SEQ_CLS and labels under 'base'")

"""Results of `tlora_fx.train`: a row for each job, and its adapter on demand."""

from __future__ import annotations

import copy
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tlora_fx.config.adapter_folder import CONFIG
from tlora_fx.config.job import Job
from tlora_fx.errors import AdapterFolderError
from tlora_fx.runtime.adapters.quantised import trained_base
from tlora_fx.runtime.reports.results_table import (
    as_csv,
    as_text,
    cells,
    result_row,
    results_table,
    spec_of,
)
from tlora_fx.runtime.reports.run_view import JobView

if TYPE_CHECKING:
    from peft import PeftModel


#: What a result and its row of the table call alike.
_AS_IN_ROW = ("status", "reason", "steps", "best", "best_step", "tokens", "seconds")


@dataclass(frozen=True)
class JobResult:
    """Result of one job.

    job          as it was handed over
    status       done, failed, or running where the run was stopped
    reason       why it has failed, or ended before its last step; "" for none
    steps        optimizer steps done
    losses       of each step, in order: the mean over its target tokens; NaN where not finite
    evaluations  metrics of each evaluation by name, with its `step`
    metric       that decides which step is best, such as eval_loss
    best         its best value, at `best_step`; None where the job was not evaluated
    tokens       that were trained on
    seconds      wall time of the job's rounds, which it shared with the others
    adapter      folder of its PEFT adapter
    """

    job: Job
    status: str
    reason: str
    steps: int
    losses: Sequence[float] = field(repr=False)
    evaluations: Sequence[Mapping[str, Any]] = field(repr=False)
    metric: str
    best: float | None
    best_step: int | None
    tokens: int
    seconds: float
    adapter: Path

    @classmethod
    def of_folder(cls, job: Job, folder: Path) -> JobResult:
        """The result of a job that a trainer has run.

        folder   of the job
        """
        view = JobView(folder)
        view.refresh()
        row = result_row(view)
        return cls(
            job=job,
            losses=[_number(step["loss"]) for step in view.steps],
            evaluations=view.evaluations,
            metric=row["metric"] or "",
            adapter=folder,
            **{name: row[name] for name in _AS_IN_ROW},
        )

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.name

    @property
    def loss(self) -> float:
        """Loss of the last step; NaN where there is none."""
        return self.losses[-1] if self.losses else math.nan

    def row(self) -> dict[str, Any]:
        """The job's row of the table, by column, without hyperparameters."""
        has_adapter = (self.adapter / CONFIG).is_file()
        return {
            "job": self.name,
            "loss": self.loss if self.losses else None,
            "metric": self.metric or None,
            "adapter": str(self.adapter) if has_adapter else None,
            **{name: getattr(self, name) for name in _AS_IN_ROW},
        }

    def peft_model(self) -> PeftModel:
        """The base with this job's adapter, as PEFT has it, in eval mode. Imports PEFT.

        A base that is a path or a hub id is loaded anew. A model that was handed over shares its
        weights with the result, and stays as it is.

        raises   AdapterFolderError where the job left no adapter; BaseNotLoadable
        """
        from peft import PeftModel

        if not (self.adapter / CONFIG).is_file():
            raise AdapterFolderError(
                "the job left no adapter", folder=self.adapter, found=self.reason or self.status
            )
        module = self.job.base.module
        base = trained_base([self.job], None if module is None else _own_view(module))
        model: PeftModel = PeftModel.from_pretrained(base, str(self.adapter))
        return model.eval()


class Results(Mapping[str, JobResult]):
    """Results of a run by job name, in the order of the jobs; printed, a table.

    folder     of the run
    warnings   what went wrong and did not stop the run
    """

    def __init__(
        self, results: Sequence[JobResult], folder: Path, warnings: Sequence[str] = ()
    ) -> None:
        self._results = {result.name: result for result in results}
        self.folder, self.warnings = folder, tuple(warnings)

    def __getitem__(self, name: str) -> JobResult:
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def rows(self) -> list[dict[str, Any]]:
        """The table: a dict for each job, by column, with the fields in which jobs differ."""
        results = self._results.values()
        specs = {result.name: spec_of(result.adapter) for result in results}
        known = {name: spec for name, spec in specs.items() if spec is not None}
        return results_table([result.row() for result in results], known)

    def to_pandas(self) -> Any:
        """The table as a DataFrame, a row for each job. Imports pandas."""
        import pandas

        return pandas.DataFrame(self.rows())

    def to_csv(self, path: Path | str) -> None:
        """Write the table as a CSV file."""
        Path(path).write_text(as_csv(self.rows()), "utf-8")

    def __repr__(self) -> str:
        return as_text(self.rows())

    def _repr_html_(self) -> str:
        titles, *lines = cells(self.rows())
        head = "".join(f"<th>{html.escape(name)}</th>" for name in titles)
        body = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in body)}</table>"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _own_view(module: nn.Module) -> nn.Module:
    """A copy of a module with parameters of its own over the same memory."""
    views: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()
    }
    return copy.deepcopy(module, views)

"""`tlora-fx verify`: each job trained fused against the same job trained alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from tlora_fx.cli.arguments.options import (
    Device,
    JobFilePath,
    PipelineOptions,
    option,
    takes_options,
)
from tlora_fx.cli.terminal import Console, Working, print_whole
from tlora_fx.errors import VerifyError

if TYPE_CHECKING:
    from tlora_fx.runtime.verification.verify import Bounds, JobDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(PipelineOptions):
    """Options of the command line."""

    jobs: JobFilePath
    steps: int = option(20, "Optimizer steps to train each job for.", min=1)
    device: Device = None


@takes_options
def run(options: VerifyOptions) -> None:
    """Check that jobs trained together match the same jobs trained alone.

    Trains all jobs fused, and each job alone with plain transformers, PEFT and torch.optim. Prints
    the largest differences of each job, and exits with 1 if one is beyond its bound.

    Compares twice: with dropout 0 against plain PEFT, and with dropout against PEFT that draws the
    job's keyed masks. After the last step, the longest and shortest samples of each job are
    compared too. If the base model gives different results in batches of other shapes, the bound of
    the job is wider, at most ten times. If a pass declares that it changes the numbers, such as
    quantize-base, differences are printed and none is an error.
    """
    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.runtime.launching.early_checks import require_data_and_base

    options.require_passes()
    console = Console(stderr=True)
    job_file = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code)
    require_data_and_base(job_file.jobs)
    with Working(console, "compiling, training fused and alone") as working:
        from tlora_fx.runtime.verification.verify import bounds_of, declared, verify

        passes, device = options.passes(), options.device
        bounds = bounds_of(job_file.base.dtype, device)
        differences: list[JobDifference] = []
        for difference in verify(job_file, options.steps, device=device, pipeline=passes):
            differences.append(difference)
            working.now(f"compared {difference.job}: {difference.against}")
    out = Console()
    meant = declared(passes)
    print_whole(out, _table(differences, None if meant else bounds))
    if meant:
        apart = max(row.loss for row in differences)
        out.print(
            f"losses part by {apart:.1e} at most from those on the base as it is: "
            f"{', '.join(meant)} declares other numbers"
        )
        return
    beyond = [row for row in differences if not row.within(bounds)]
    if beyond:
        raise VerifyError(
            "jobs trained fused differ from the same jobs trained alone",
            jobs=", ".join(f"{row.job} ({row.against})" for row in beyond),
            help="please report this with the job file",
        )
    out.print(f"{len({row.job for row in differences})} jobs train fused as they train alone")


def _table(differences: list[JobDifference], bounds: Bounds | None) -> Table:
    """A line for each difference.

    bounds   None where a pass declares that there are none
    """
    table = Table(box=None, pad_edge=False, title_justify="left")
    for title in ("job", "against", "steps", "loss", "gradient", "adapter", ""):
        left = title in ("job", "against", "")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in differences:
        numbers = (f"{value:.1e}" for value in (row.loss, row.gradient, row.adapter))
        if bounds is None:
            table.add_row(row.job, row.against, str(row.steps), *numbers, "declared")
            continue
        verdict = "ok" if row.within(bounds) else "BEYOND"
        table.add_row(row.job, row.against, str(row.steps), *numbers, verdict)
        widest = bounds.over(row.noise)
        if widest != bounds:
            table.add_row("", "bound by the base's own noise", "", *_limits(widest), style="dim")
        if row.kinks:
            words = "steps at a kink of the base, such as a ReLU's: compared a rounding beside it"
            table.add_row("", words, str(row.kinks), style="dim")
    if bounds is not None:
        what = "largest relative difference"
        table.add_row("bound", what, "", *_limits(bounds), "", style="dim")
    return table


def _limits(bounds: Bounds) -> Iterator[str]:
    return (f"{value:.0e}" for value in (bounds.loss, bounds.gradient, bounds.adapter))

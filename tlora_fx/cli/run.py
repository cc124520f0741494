"""`tlora-fx run`: train the jobs of a folder on this machine, grouped anew at each horizon."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tlora_fx.cli import durations

if TYPE_CHECKING:
    from tlora_fx.cli.run_table import Page
    from tlora_fx.scheduler.ledger_rows import JobRecord
    from tlora_fx.scheduler.service import Running

TURN_SECONDS = 0.05
SHOW_SECONDS = 0.5


def run(
    jobs: Annotated[Path, typer.Argument(help="Folder of job files (YAML), or one file.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder for what comes out; else runs/DATE-TIME."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Who trains together: tlora, megatron:backfill=true, ...")
    ] = "tlora",
    horizon: Annotated[str, typer.Option(help="Between decisions, such as 60s or 5m.")] = "60s",
    slots: Annotated[
        int | None, typer.Option(min=1, help="GPUs to use, or parts of the CPU; by default all.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="Measured profile of a base; may be repeated.")
    ] = None,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End as soon as every job has ended.")
    ] = False,
    forever: Annotated[
        bool, typer.Option("--forever", help="Wait for more jobs until Ctrl-C.")
    ] = False,
    save_every: Annotated[str, typer.Option(help="Between checkpoints of a group.")] = "60s",
    max_row_tokens: Annotated[int, typer.Option(min=2, help="Tokens of one forward.")] = 16384,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the layers; groups take longer to start.")
    ] = False,
) -> None:
    """Train the jobs of a folder, grouped anew at each horizon.

    Job files may be added at any time. Killed, or stopped by Ctrl-C, it goes on when it is started
    again with the same -o. It ends when every job has ended and no file came for one horizon.
    """
    from tlora_fx.cli.run_table import Page
    from tlora_fx.scheduler.local.executor import LocalOptions
    from tlora_fx.scheduler.policies import policy_of
    from tlora_fx.scheduler.running_estimates import Estimates, machine
    from tlora_fx.scheduler.service import RunOptions, opened

    seconds, saving = _seconds(horizon, save_every)
    chosen = policy_of(policy)
    cluster, kind = machine(device, slots)
    estimates = Estimates(cluster, tuple(profile or ()))
    options = RunOptions(
        horizon=seconds,
        linger=None if forever else 0.0 if until_empty else seconds,
        layout_of=estimates.layout_of,
        local=LocalOptions(kind, saving, max_row_tokens, compiled),
    )
    output = output or _by_date()
    page = Page(Console(stderr=True))
    page.say(f"{output}: {cluster.gpus} × {cluster.gpu}, policy {chosen.name}")
    _warn(page, estimates.threads())
    with opened(
        jobs, output, cluster, chosen, estimates.estimator, estimates, page, options
    ) as running:
        stopped = _until_over(running, page)
        records = running.ledger.jobs()
    _end(records, output, stopped=stopped)


def _seconds(horizon: str, save_every: str) -> tuple[float, float]:
    return durations.seconds(horizon, "--horizon"), durations.seconds(save_every, "--save-every")


def _warn(page: Page, texts: Iterable[str]) -> None:
    for text in texts:
        page.say(f"warning: {text}", "yellow")


def _by_date() -> Path:
    """A new run's folder where none is named."""
    return Path("runs") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def _until_over(running: Running, page: Page) -> bool:
    """Turn a run until it is over; whether it was stopped."""
    asked = _Asked(running)
    shown = float("-inf")
    with asked, page:
        while running.turn():
            if time.monotonic() - shown >= SHOW_SECONDS:
                page.show(running.loop, running.ledger)
                shown = time.monotonic()
            time.sleep(TURN_SECONDS)
    return running.stopping


class _Asked:
    """Ctrl-C or SIGTERM drains all groups; the second one leaves them to end by themselves."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def __enter__(self) -> None:
        self.before = {
            number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.running.stopping:
            raise KeyboardInterrupt
        self.running.stop()


def _end(records: list[JobRecord], output: Path, *, stopped: bool) -> None:
    """Say what came out; the exit code is that of `train`."""
    from tlora_fx.cli.run_table import summary

    Console(soft_wrap=True).print(summary(records, output))
    if stopped:
        raise KeyboardInterrupt(f"every group is safe; go on with -o {output}")
    if any(record.status in ("failed", "refused") for record in records):
        sys.exit(1)

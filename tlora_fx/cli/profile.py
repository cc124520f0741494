"""`tlora-fx profile`: measure a model's layers on the device at hand."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tlora_fx.cli.arguments.options import TrustRemoteCode, option, takes_options
from tlora_fx.cli.terminal import Console, Working, bare_table, print_whole
from tlora_fx.cost.profile import LayerPoint, Profile, require_free

TOKENS, ROUNDS = "512,1280,2560,4800,8192,16384", 5
QUICK_TOKENS, QUICK_ROUNDS = "512,4096", 2
#: Columns of a layer's times.
TIMES = ("forward ms", "backward ms", "as graphs ms", "first ms", "frozen ms", "saved MiB", "noise")
#: Beyond this part of themselves, times say more of the machine than of the layers.
MUCH_NOISE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of the command line."""

    jobs: Annotated[
        Path,
        typer.Argument(
            help="Job file (YAML) with the base model; the adapters of its jobs are measured too."
        ),
    ]
    output: Path | None = option(
        None, "File for the profile; in your cache folder if not given.", "-o", "--output"
    )
    device: str | None = option(
        None,
        "Device to measure: cpu, cuda, cuda:1, ...; if not given, a GPU for each process, or the "
        "CPU if there is no GPU.",
    )
    tokens: str | None = option(
        None,
        f"Row sizes to measure, in tokens; if not given, {TOKENS}, or {QUICK_TOKENS} with --quick.",
    )
    lengths: str = option("160,1024", "Sequence lengths to measure, in tokens.")
    tp: str = option("1", "Tensor-parallel sizes to measure, such as 1,2,4.")
    rounds: int | None = option(
        None,
        "Number of rounds in which the measured pieces take turns; if not given, "
        f"{ROUNDS}, or {QUICK_ROUNDS} with --quick.",
        min=1,
    )
    quick: bool = option(False, "Measure only two row sizes, in two rounds.")
    eager: bool = option(False, "Measure the layers without torch.compile.")
    add: bool = option(
        False,
        "Keep what the profile file holds, and add the newly measured layers and collectives.",
    )
    trust_remote_code: TrustRemoteCode = False


@takes_options
def run(options: ProfileOptions) -> None:
    """Measure forward time, backward time and memory of each kind of layer, and write a profile.

    Weights are random and only a few layers are built, so one GPU is enough for any model of which
    one layer fits. Under torchrun, collectives between the processes are measured too. `tlora-fx
    plan` and `train --plan auto` find the profile.
    """
    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.runtime.launching import early_checks as early

    tokens, rounds = (QUICK_TOKENS, QUICK_ROUNDS) if options.quick else (TOKENS, ROUNDS)
    row_sizes = _numbers(tokens if options.tokens is None else options.tokens, "--tokens")
    lengths, tp = _numbers(options.lengths, "--lengths"), _numbers(options.tp, "--tp")
    job_file = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code)
    early.require_device(options.device)
    early.require_trainable(job_file.jobs)
    early.require_hub(job_file.jobs)
    if options.output is not None:
        require_free(options.output)

    from tlora_fx.runtime.launching.launch import Launch
    from tlora_fx.runtime.profiling.profiler import ProfileRequest, profile_file

    request = ProfileRequest(
        device=Launch.found().device(options.device),
        tokens=row_sizes,
        lengths=lengths,
        tp=tp,
        rounds=options.rounds or rounds,
        compiled=not options.eager,
        command=shlex.join(["tlora-fx", *sys.argv[1:]]),
    )
    # One process speaks for all of a torchrun.
    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    with Working(console, "measuring") as working:
        request = replace(request, say=working.now)
        profile, path = profile_file(job_file.jobs, request, options.output, add=options.add)
    if profile is None:
        return
    out = Console(highlight=False, soft_wrap=True)
    for part in page(profile):
        if isinstance(part, Table):
            print_whole(out, part)
        else:
            out.print(part)
    for line in noisy(profile):
        out.print(line, markup=False)
    out.print(f"written   {path}", markup=False)


def page(profile: Profile) -> list[Table | str]:
    """Measurements of a profile, a table for each part."""
    titles = ("tp", "tokens", "length", "adapters", *TIMES)
    rows = [
        (
            layer.structure if point is layer.points[0] else "",
            str(layer.tp),
            str(point.tokens),
            f"{point.squares / point.tokens:.0f}",
            str(point.job_sites) if point.sites else "bare",
            *_times(point),
        )
        for layer in profile.layers
        for point in layer.points
    ]
    layers = _filled_columns(("layer", *titles), rows)
    ends = bare_table("part", "size", "ms", right=("ms",))
    for root in profile.root:
        both = root.forward_ms + root.backward_ms
        ends.add_row("embedding and last norm", f"{root.tokens} tokens", f"{both:.3f}")
    for loss in profile.loss:
        both = loss.forward_ms + loss.backward_ms
        ends.add_row("head and loss", f"{loss.targets} targets", f"{both:.3f}")
    for step in profile.optimizer:
        size = f"{step.tensors} tensors, {step.parameters:,} parameters"
        ends.add_row("optimizer of a job", size, f"{step.ms:.3f}")
    for sent in profile.collectives:
        size = f"{sent.payload_bytes / 2**20:.1f} MiB over {sent.processes}"
        ends.add_row(f"{sent.operation}, {sent.tier}", size, f"{sent.ms:.3f}")
    shape = profile.shape
    head = (
        f"{profile.name}: hidden {shape.hidden}, {shape.layers} layers, {profile.hardware.gpu}, "
        f"{'compiled' if profile.compiled else 'eager'}"
    )
    return [head, "", layers, "", ends, ""]


def _times(point: LayerPoint) -> Iterator[str]:
    """Texts of `TIMES` of a layer."""
    captured = point.captured
    yield f"{point.forward_ms:.3f}"
    yield f"{point.backward_ms:.3f}"
    yield "" if captured is None else f"{captured.forward_ms:.3f} + {captured.backward_ms:.3f}"
    yield "" if point.first_ms is None else f"{point.first_ms:.3f}"
    yield "" if point.frozen_ms is None else f"{point.frozen_ms:.3f}"
    yield f"{point.saved_bytes / 2**20:.1f}"
    yield f"{point.noise:.1%}"


def _filled_columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the columns in which nothing stands; texts of the first stand to the left."""
    kept = [index for index in range(len(titles)) if any(row[index] for row in rows)]
    table = bare_table(*(titles[index] for index in kept), right=titles[1:])
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def noisy(profile: Profile) -> list[str]:
    """A note where times of layers spread so much that plans should not rest on them."""
    if profile.noise <= MUCH_NOISE:
        return []
    points = [one for layer in profile.layers for one in layer.points]
    count = sum(one.noise > MUCH_NOISE for one in points)
    note = (
        f"note: noise is above {MUCH_NOISE:.0%} in {count} of {len(points)} rows, "
        f"{profile.noise:.0%} at most: measure again on an idle machine, or with more --rounds"
    )
    return [note]


def _numbers(text: str, option: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{option} are numbers, such as 512,4096; not {text!r}")
    return tuple(sorted({int(word) for word in words}))

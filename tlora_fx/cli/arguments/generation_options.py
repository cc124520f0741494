"""Options of `generate` and `chat`, and the trained jobs that both load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora_fx.cli.terminal import Console, Working

if TYPE_CHECKING:
    from tlora_fx.runtime.generation import AdapterGenerator

Most = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling; has no effect at temperature 0.")]


def loaded(
    folder: Path, jobs: Sequence[str] | None, device: str | None, *, trusted: bool
) -> AdapterGenerator:
    """The jobs of a run that shall speak, all where none is named; what has none is refused.

    raises    RunFolderError, RemoteCodeRefused, and what loading the base raises
    """
    from tlora_fx.config.job_file import require_trusted
    from tlora_fx.runtime.launching.early_checks import require_device
    from tlora_fx.runtime.merge import adapter_of, adapters_of, job_of
    from tlora_fx.runtime.run_folder import JOB

    folders = {name: adapter_of(folder, name) for name in jobs} if jobs else adapters_of(folder)
    for at in folders.values():
        require_trusted(job_of(at).base, at / JOB, trusted=trusted)
    require_device(device)

    from tlora_fx.runtime.distributed import device_named
    from tlora_fx.runtime.generation import AdapterGenerator
    from tlora_fx.runtime.launching.cpu_threads import settle_threads

    place = device_named(device)
    with Working(Console(stderr=True, highlight=False), f"loading the base of {folder}"):
        generator = AdapterGenerator.of_folders(folders, place)
    settle_threads(generator.base, place)
    return generator


def set_seed(seed: int) -> None:
    """Seed all random generators that sampling draws from."""
    import torch

    torch.manual_seed(seed)

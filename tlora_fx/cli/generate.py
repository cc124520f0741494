"""`tlora-fx generate`: let trained jobs go on from a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora_fx.cli.options import TrustRemoteCode
from tlora_fx.cli.terminal import Console, Working, echo

if TYPE_CHECKING:
    from tlora_fx.runtime.generation import AdapterGenerator

Folder = Annotated[
    Path,
    typer.Argument(
        help="Output folder of a run (its -o), or the folder of one adapter, such as a checkpoint."
    ),
]
Most = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling; has no effect at temperature 0.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device to run on: cpu, cuda, cuda:1, ...; if not given, the first GPU, or the CPU "
        "if there is no GPU."
    ),
]


def run(
    folder: Folder,
    prompt: Annotated[list[str], typer.Option(help="Text to continue or to answer; repeatable.")],
    job: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a job that answers; repeatable. All jobs of the run if not given."
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Format prompts with the chat template, or not. If not given, as in the job's "
            "data."
        ),
    ] = None,
    max_new_tokens: Most = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: Device = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each answer, one per line.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Generate an answer of each job to each prompt, all in one batch.

    Prints one line for each answer: job, prompt, answer. The base model is loaded as for training,
    and PEFT applies the adapters.
    """
    from tlora_fx.runtime.generation import SamplingOptions

    generator = loaded(folder, job, device, trusted=trust_remote_code)
    asked = [(name, text) for text in prompt for name in generator.adapters]
    questions = [generator.ask(name, text, chat=chat) for name, text in asked]
    set_seed(seed)
    said = generator.answers(questions, SamplingOptions(max_new_tokens, temperature))
    for (name, text), answer in zip(asked, said, strict=True):
        if as_json:
            record = {"job": name, "prompt": text, "completion": answer}
            typer.echo(json.dumps(record, ensure_ascii=False))
        else:
            echo(f"{name}: {text}{answer}")


def loaded(
    folder: Path, jobs: Sequence[str] | None, device: str | None, *, trusted: bool
) -> AdapterGenerator:
    """The jobs of a run that shall speak, all where none is named; what has none is refused.

    raises    RunFolderError, RemoteCodeRefused, and what loading the base raises
    """
    from tlora_fx.config.job_file import require_trusted
    from tlora_fx.runtime.merge import adapter_of, adapters_of, job_of
    from tlora_fx.runtime.run_folder import JOB

    folders = {name: adapter_of(folder, name) for name in jobs} if jobs else adapters_of(folder)
    for at in folders.values():
        require_trusted(job_of(at).base, at / JOB, trusted=trusted)

    from tlora_fx.runtime.cpu_threads import settle_threads
    from tlora_fx.runtime.distributed import device_named
    from tlora_fx.runtime.generation import AdapterGenerator

    place = device_named(device)
    with Working(Console(stderr=True, highlight=False), f"loading the base of {folder}"):
        generator = AdapterGenerator.of_folders(folders, place)
    settle_threads(generator.base, place)
    return generator


def set_seed(seed: int) -> None:
    """Seed all random generators that sampling draws from."""
    import torch

    torch.manual_seed(seed)

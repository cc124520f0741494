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
    from tlora_fx.runtime.generation import Speakers

Folder = Annotated[
    Path, typer.Argument(help="A run's -o folder, or one adapter's, such as a checkpoint's.")
]
Most = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Of an answer at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="0: the most likely token each time.")]
Seed = Annotated[int, typer.Option(min=0, help="Of what is drawn above temperature 0.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]


def run(
    folder: Folder,
    prompt: Annotated[list[str], typer.Option(help="What to go on from; may be repeated.")],
    job: Annotated[
        list[str] | None, typer.Option(help="Who answers; may be repeated. By default all.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(help="Ask by the chat template. By default as the job's data were."),
    ] = None,
    max_new_tokens: Most = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line for each answer.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Let jobs go on from prompts, all in one batch: a line of each job, prompt and answer.

    The base is loaded as for training, and PEFT puts the adapters on it.
    """
    from tlora_fx.runtime.generation import Drawing

    speakers = loaded(folder, job, device, trusted=trust_remote_code)
    asked = [(name, text) for text in prompt for name in speakers.adapters]
    questions = [speakers.ask(name, text, chat=chat) for name, text in asked]
    sow(seed)
    said = speakers.answers(questions, Drawing(max_new_tokens, temperature))
    for (name, text), answer in zip(asked, said, strict=True):
        if as_json:
            record = {"job": name, "prompt": text, "completion": answer}
            typer.echo(json.dumps(record, ensure_ascii=False))
        else:
            echo(f"{name}: {text}{answer}")


def loaded(
    folder: Path, jobs: Sequence[str] | None, device: str | None, *, trusted: bool
) -> Speakers:
    """The jobs of a run that shall speak, all where none is named; what has none is refused.

    raises    RunFolderError, RemoteCodeRefused, and what loading the base raises
    """
    from tlora_fx.config.job_file import require_trusted
    from tlora_fx.runtime.merge import adapter_of, adapters_of, job_of
    from tlora_fx.runtime.run_folder import JOB

    folders = {name: adapter_of(folder, name) for name in jobs} if jobs else adapters_of(folder)
    for at in folders.values():
        require_trusted(job_of(at).base, at / JOB, trusted=trusted)

    from tlora_fx.runtime.distributed import device_named
    from tlora_fx.runtime.generation import Speakers

    place = device_named(device)
    with Working(Console(stderr=True, highlight=False), f"loading the base of {folder}"):
        return Speakers.of_folders(folders, place)


def sow(seed: int) -> None:
    """Let what is drawn follow from a seed."""
    import torch

    torch.manual_seed(seed)

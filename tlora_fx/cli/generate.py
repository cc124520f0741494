"""`tlora-fx generate`: let trained jobs go on from a prompt."""

from __future__ import annotations

import json

import typer

from tlora_fx.cli.arguments.generation_options import (
    Most,
    Seed,
    Temperature,
    loaded,
    set_seed,
)
from tlora_fx.cli.arguments.options import (
    Device,
    RunOrAdapter,
    TrustRemoteCode,
    option,
    takes_options,
)
from tlora_fx.cli.terminal import echo


@takes_options
def run(
    folder: RunOrAdapter,
    prompt: list[str] = option(..., "Text to continue or to answer; repeatable."),
    job: list[str] | None = option(
        None, "Name of a job that answers; repeatable. All jobs of the run if not given."
    ),
    chat: bool | None = option(
        None, "Format prompts with the chat template, or not. If not given, as in the job's data."
    ),
    max_new_tokens: Most = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: Device = None,
    as_json: bool = option(False, "Print a JSON object for each answer, one per line.", "--json"),
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Generate an answer of each job to each prompt, all in one batch.

    Prints one line for each answer: job, prompt, answer. The base model is loaded as for training,
    and PEFT applies the adapters.
    """
    generator = loaded(folder, job, device, trusted=trust_remote_code)
    from tlora_fx.runtime.generation import SamplingOptions

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

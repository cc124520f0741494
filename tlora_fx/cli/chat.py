"""`tlora-fx chat`: talk with a trained job."""

from __future__ import annotations

import sys

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

NEW, END = "/new", "/exit"


@takes_options
def run(
    folder: RunOrAdapter,
    job: str | None = option(
        None, "Name of the job to chat with; required if the run has several."
    ),
    system: str | None = option(None, "System message, before the first turn."),
    max_new_tokens: Most = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Chat with a trained adapter, in the format of the tokenizer's chat template.

    The model sees the whole conversation. Type /new to start another conversation, and /exit or
    Ctrl-D to end.
    """
    from tlora_fx.runtime.merge import adapter_of

    adapter = adapter_of(folder, job)
    generator = loaded(adapter, None, device, trusted=trust_remote_code)

    from transformers import TextStreamer

    from tlora_fx.runtime.generation import Prompt, SamplingOptions

    [name] = generator.adapters
    begun = [] if system is None else [{"role": "system", "content": system}]
    # A tokenizer without a chat template is said before anybody has typed.
    generator.encode([*begun, {"role": "user", "content": ""}])
    streamer = TextStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = SamplingOptions(max_new_tokens, temperature, streamer)
    set_seed(seed)
    turns = list(begun)
    while (said := _heard()) not in (None, END):
        if said == NEW:
            turns = list(begun)
        elif said:
            turns.append({"role": "user", "content": said})
            typer.echo(f"{name}: ", nl=False)
            [answer] = generator.answers([Prompt(name, generator.encode(turns))], sampling)
            turns.append({"role": "assistant", "content": answer})


def _heard() -> str | None:
    """The next line of the user, or None where there is no more."""
    if sys.stdin.isatty():
        typer.echo("you: ", nl=False)
    line = sys.stdin.readline()
    return line.strip() if line else None

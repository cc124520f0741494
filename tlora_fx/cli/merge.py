"""`tlora-fx merge`: a job's adapter and its base as one model."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from tlora_fx.cli.arguments.options import RunOrAdapter, TrustRemoteCode, option, takes_options
from tlora_fx.cli.terminal import Console, Working


@takes_options
def run(
    folder: RunOrAdapter,
    output: Path = option(..., "New folder for the merged model.", "-o", "--output"),
    job: str | None = option(
        None, "Name of the job whose adapter is merged; required if the run has several."
    ),
    trust_remote_code: TrustRemoteCode = False,
    push_to_hub: str | None = option(
        None,
        "Also upload the model to the Hugging Face Hub as USER/NAME; a new repository is private.",
    ),
    shard_size: str = option("5GB", "Largest size of one file of weights, such as 500MB or 5GB."),
) -> None:
    """Merge a job's adapter into its base model, and write the full model as transformers reads it.

    Load it without PEFT or tlora-fx: AutoModelForCausalLM.from_pretrained(DIR).
    """
    from tlora_fx.config.job_file import require_trusted
    from tlora_fx.runtime.merge import adapter_of, job_of, merge
    from tlora_fx.runtime.run_folder import JOB, require_new

    if not re.fullmatch(r"\d+[KMGT]i?B", shard_size):
        raise typer.BadParameter("write a size such as 500MB or 5GB", param_hint="--shard-size")
    adapter = adapter_of(folder, job)
    require_new(output)
    require_trusted(job_of(adapter).base, adapter / JOB, trusted=trust_remote_code)
    console = Console(stderr=True, highlight=False)
    with Working(console, f"merging {adapter} into its base"):
        merge(adapter, output, shard_size)
    told = Console(soft_wrap=True, highlight=False)
    told.print(str(output), markup=False)
    if push_to_hub is not None:
        from tlora_fx.runtime.adapters.hub import push

        with Working(console, f"pushing {output}"):
            url = push(output, push_to_hub)
        told.print(url, markup=False)

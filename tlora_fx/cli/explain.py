"""`tlora-fx explain`: why a module is lowered, shared and folded, or why not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.options import AddPass, Load, PipelineText, TrustRemoteCode
from tlora_fx.cli.terminal import echo


def run(
    jobs: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    node: Annotated[
        str,
        typer.Option(
            help="Module to explain, such as layers.3.mlp.down_proj, or a node of ssm.py."
        ),
    ],
    job: Annotated[str | None, typer.Option(help="Explain this job only.")] = None,
    pipeline: PipelineText = None,
    add_pass: AddPass = None,
    load: Load = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Explain how a module was compiled: whether jobs share it, which adapt it, and why.

    If an adapter could not be fused, names the pattern that came nearest and where it failed.
    Compiles the jobs from the config of the base; needs no weights.
    """
    from tlora_fx.cli.options import pipeline_of, require_pipeline

    require_pipeline(pipeline, add_pass, load)

    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.tools.explain import render, why_not

    given = load_job_file(jobs, trust_remote_code=trust_remote_code)
    echo(render(why_not(given, node, job, pipeline_of(pipeline, add_pass, load))), nl=False)

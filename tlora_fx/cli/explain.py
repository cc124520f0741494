"""`tlora-fx explain`: why a module is lowered, shared and folded, or why not."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_fx.cli.arguments.options import JobFilePath, PipelineOptions, option, takes_options
from tlora_fx.cli.terminal import echo


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(PipelineOptions):
    """Options of the command line."""

    jobs: JobFilePath
    node: str = option(
        ..., "Module to explain, such as layers.3.mlp.down_proj, or a node of ssm.py."
    )
    job: str | None = option(None, "Explain this job only.")


@takes_options
def run(options: ExplainOptions) -> None:
    """Explain how a module was compiled: whether jobs share it, which adapt it, and why.

    If an adapter could not be fused, names the pattern that came nearest and where it failed.
    Compiles the jobs from the config of the base; needs no weights.
    """
    options.require_passes()

    from tlora_fx.config.job_file import load_job_file
    from tlora_fx.tools.explain import render, why_not

    given = load_job_file(options.jobs, trust_remote_code=options.trust_remote_code)
    echo(render(why_not(given, options.node, options.job, options.passes())), nl=False)

"""The options of `tlora-fx simulate`; what each chooses is told in `Choices` and `Scenario`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Option = typer.Option

Trace = Annotated[str, Option(help="File, or 'synthetic'.")]
Format = Annotated[str | None, Option(help="acme, pollux, kalos, own; by its columns.")]
BadRows = Annotated[str, Option(help="drop: leave wrong rows out and count them; refuse.")]
Jobs = Annotated[
    int | None,
    Option(min=1, help="The first so many jobs; 1,000 if synthetic, else all."),
]
Month = Annotated[int | None, Option("--month", "--months", min=1, help="One month.")]
Intensity = Annotated[float, Option(help="Synthetic arrivals, times the trace's rate.")]
Burstiness = Annotated[float, Option(help="Variation of synthetic arrivals; 1: Poisson.")]
Marginals = Annotated[Path | None, Option(help="Fit the synthetic trace to this file.")]

Scale = Annotated[float, Option(help="Arrivals so many times sooner.")]
Rebase = Annotated[bool, Option(help="The first job comes at second 0.")]
States = Annotated[str, Option(help="Such as COMPLETED; all.")]
Types = Annotated[str, Option(help="Such as SFT,Eval; all.")]
CpuJobs = Annotated[str, Option(help="Jobs without GPUs: drop, one-gpu.")]
TooLarge = Annotated[str, Option(help="Jobs larger than the cluster: drop, clip.")]
Steps = Annotated[int | None, Option(min=1, help="Of every job; else duration / T_solo.")]
Bases = Annotated[str, Option(help="Drawn uniformly.")]
Ranks = Annotated[str, Option(help="Drawn uniformly.")]
Batches = Annotated[str, Option(help="Sequences of a step.")]
BatchRule = Annotated[str, Option(help="independent, or gpus: by the job's GPUs.")]
MeanTokens = Annotated[float, Option(help="Of a sample.")]
Spread = Annotated[float, Option(help="Of the logarithm of a sample's tokens.")]
MostTokens = Annotated[int, Option(min=2, help="Of a sample.")]
Lengths = Annotated[str, Option(help="typical: alike for jobs of a batch; drawn.")]
MaxSlowdown = Annotated[float, Option(help="Of every job, in a group.")]

Gpus = Annotated[int, Option(min=1, help="How many there are.")]
Gpu = Annotated[str, Option(help="Their kind.")]
GpusPerNode = Annotated[int, Option(min=1, help="In one node.")]
NodesPerRack = Annotated[int, Option(min=1, help="In one rack.")]
AllowEstimated = Annotated[bool, Option("--allow-estimated", help="Take scaled profiles.")]

Policies = Annotated[str, Option(help="all, or names, such as tlora,megatron:backfill=true.")]
Seeds = Annotated[int, Option(min=1, help="How many.")]
Seed = Annotated[int, Option(min=0, help="The first one.")]
Runnable = Annotated[int, Option(min=1, help="Jobs that a policy sees.")]
Horizon = Annotated[str, Option(help="Between decisions, such as 60s or 5m.")]
SwitchSeconds = Annotated[float, Option(help="What forming a group costs it.")]
Sweeps = Annotated[str, Option(help="all, none, or some of scale, cluster, months, nano.")]
SweepSeeds = Annotated[int, Option(min=1, help="Of each point of a sweep.")]
ClusterSizes = Annotated[str, Option(help="Of the sweep over them.")]
Processes = Annotated[int | None, Option(min=1, help="At once; else one a core.")]

Output = Annotated[Path | None, Option("-o", "--output", help="Folder of the report.")]
SaveTrace = Annotated[
    Path | None,
    Option(help="Write the first seed's jobs: JSON lines, or .csv."),
]

"""How a trace becomes jobs: what it does not say, chosen and stated.

source   field notes, "Replaying AcmeTrace"; tLoRA, section 4.1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tlora_fx.errors import ReplayChoiceWrong
from tlora_fx.scheduler.request import MAX_SLOWDOWN


@dataclass(frozen=True, slots=True)
class Choices:
    """How a trace becomes jobs; the defaults are the field notes'.

    jobs            the first so many of the trace; None: all
    scale           arrivals so many times sooner
    rebase          the first job is submitted at second 0
    states          last states that are replayed; empty: all
    types           types that are replayed; empty: all
    cpu_jobs        drop jobs that ask for no GPU, or give them one
    too_large       drop jobs that are larger than the cluster, or give them all of it
    steps           of every job; None: max(1, round(duration / T_solo))
    bases           drawn uniformly
    ranks           drawn uniformly
    batches         sequences of a step, drawn uniformly or by the job's GPUs
    batch_rule      independent, or gpus: the largest batch that is not above the job's GPUs
    mean_tokens     of a sample
    spread          of the logarithm of a sample's tokens
    most_tokens     of a sample
    lengths         typical: a step's samples are quantiles of the distribution, alike for all jobs
                    of one batch; drawn: each job's own
    max_slowdown    of every job, in groups of two or more
    seed            of the draws
    """

    jobs: int | None = None
    scale: float = 1.0
    rebase: bool = True
    states: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    cpu_jobs: Literal["drop", "one-gpu"] = "drop"
    too_large: Literal["drop", "clip"] = "drop"
    steps: int | None = None
    bases: tuple[str, ...] = ("llama-3-8b", "qwen3-8b")
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    batch_rule: Literal["independent", "gpus"] = "independent"
    mean_tokens: float = 130.0
    spread: float = 0.387
    most_tokens: int = 422
    lengths: Literal["typical", "drawn"] = "typical"
    max_slowdown: float = MAX_SLOWDOWN
    seed: int = 0

    def told(self) -> list[tuple[str, str, str]]:
        """Option, value and meaning of each choice."""
        steps = str(self.steps) if self.steps else "max(1, round(duration / T_solo))"
        by_gpus = "the largest of these not above the job's GPUs"
        batch = by_gpus if self.batch_rule == "gpus" else "drawn, whatever the GPUs"
        return [
            ("jobs", "all" if self.jobs is None else f"{self.jobs:,}", "the first of the trace"),
            ("scale", f"{self.scale:g}", "arrivals so many times sooner"),
            ("rebase", _yes(self.rebase), "the first job is submitted at second 0"),
            ("states", ", ".join(self.states) or "all", "last states that are replayed"),
            ("types", ", ".join(self.types) or "all", "types that are replayed"),
            ("cpu-jobs", self.cpu_jobs, "jobs with gpu_num = 0"),
            ("too-large", self.too_large, "jobs with more GPUs than the cluster"),
            ("steps", steps, "so that each job alone lasts as long as in the trace"),
            ("bases", ", ".join(self.bases), "drawn uniformly"),
            ("ranks", _list(self.ranks), "drawn uniformly"),
            ("batches", _list(self.batches), f"sequences a step; {batch}"),
            ("batch-rule", self.batch_rule, "the paper is unclear: independent or gpus"),
            ("mean-tokens", f"{self.mean_tokens:g}", "of a sample; GSM8K's is about 130"),
            ("spread", f"{self.spread:g}", "of the logarithm of a sample's tokens"),
            ("most-tokens", f"{self.most_tokens}", "of a sample; GSM8K's longest has 422"),
            ("lengths", self.lengths, "typical: quantiles, alike for all jobs of one batch"),
            ("max-slowdown", f"{self.max_slowdown:g}", "in every group of two or more"),
        ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def demand_choices(choices: Choices) -> None:
    """Refuse choices that make no sense.

    raises    ReplayChoiceWrong
    """
    wrong = [
        ("scale", choices.scale > 0, "a number above 0"),
        ("jobs", choices.jobs is None or choices.jobs > 0, "a whole number above 0"),
        ("steps", choices.steps is None or choices.steps > 0, "a whole number above 0"),
        ("bases", bool(choices.bases), "one base or more"),
        ("ranks", bool(choices.ranks) and min(choices.ranks) > 0, "ranks above 0"),
        ("batches", bool(choices.batches) and min(choices.batches) > 0, "batches above 0"),
        ("mean-tokens", choices.mean_tokens >= 2, "2 tokens or more"),
        ("most-tokens", choices.most_tokens >= choices.mean_tokens, "no less than the mean"),
        ("spread", choices.spread >= 0, "0 or more"),
        ("max-slowdown", choices.max_slowdown >= 1, "1 or more"),
        ("cpu-jobs", choices.cpu_jobs in {"drop", "one-gpu"}, "drop or one-gpu"),
        ("too-large", choices.too_large in {"drop", "clip"}, "drop or clip"),
        ("batch-rule", choices.batch_rule in {"independent", "gpus"}, "independent or gpus"),
        ("lengths", choices.lengths in {"typical", "drawn"}, "typical or drawn"),
    ]
    for name, fine, expected in wrong:
        if not fine:
            found = getattr(choices, name.replace("-", "_"))
            raise ReplayChoiceWrong(f"--{name} makes no sense", expected=expected, found=found)

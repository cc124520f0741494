"""Completions and log-probabilities that clients ask of versions, all of a moment in one batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tlora_fx.errors import CommandRefused, NotFinite
from tlora_fx.model.batch import IGNORED
from tlora_fx.runtime.data.samples import Sample
from tlora_fx.runtime.sampling.sampler import Completion, require_prompt
from tlora_fx.training import requests
from tlora_fx.training.messages import sample_output
from tlora_fx.training.records import PROTOBUF, Answer, Command, Outcome
from tlora_fx.training.tenants import Tenants

#: Of a completion whose request names no number, on a base without a limit.
DEFAULT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to sample, read and checked.

    key   of the resident version
    """

    command: Command
    request: requests.Sample
    key: str
    prompt: tuple[int, ...]


@dataclass(eq=False)
class Together:
    """Requests that one call of the sampler draws, for they ask for the same options."""

    options: dict[str, Any]
    asked: list[Asked] = field(default_factory=list)

    def takes(self, options: dict[str, Any], asked: Asked) -> bool:
        """Whether a request fits in; equal prompts of one seed would draw different tokens here."""
        if options != self.options:
            return False
        return options["seed"] is None or all(
            (each.key, each.prompt) != (asked.key, asked.prompt) for each in self.asked
        )


def read_sample(command: Command, key: str, tenants: Tenants) -> Asked:
    """Check a request against the base; raises CommandRefused, GenerationError."""
    engine = tenants.engine
    if engine.sampler is None:
        raise CommandRefused("the base cannot be sampled from", reason=engine.refusal)
    request = requests.read_json(requests.Sample, command.body)
    job, vocabulary = tenants.member(key).job, engine.step.model.group.vocabulary
    prompt = require_prompt(job, request.prompt.tokens, vocabulary)
    if engine.positions is not None and len(prompt) >= engine.positions:
        raise CommandRefused(
            "the prompt is too long",
            expected=f"fewer than {engine.positions} tokens", found=len(prompt),
        )  # fmt: skip
    if (request.prompt_logprobs_last_n or 0) >= len(prompt) > 1:
        raise CommandRefused(
            "prompt_logprobs_last_n is too large", expected=f"{len(prompt) - 1} at most"
        )
    return Asked(command, request, key, prompt)


def draw(
    asked: Sequence[Asked], tenants: Tenants, fail: Callable[[Command, Exception], Outcome]
) -> list[Outcome]:
    """Answer requests; those with equal options grow in one batch.

    fail   makes the outcome of a request that failed
    """
    groups: list[Together] = []
    for each in asked:
        options = _options(each, tenants)
        for group in groups:
            if group.takes(options, each):
                group.asked.append(each)
                break
        else:
            groups.append(Together(options, [each]))
    outcomes = []
    while groups:
        group = groups.pop(0)
        try:
            outcomes += _drawn(group, tenants, fail)
        except (OSError, sqlite3.Error):
            raise
        except Exception as error:  # noqa: BLE001  (it is the answer)
            if len(group.asked) == 1:
                outcomes.append(fail(group.asked[0].command, error))
            else:
                groups += [Together(group.options, [each]) for each in group.asked]
    return outcomes


def _options(asked: Asked, tenants: Tenants) -> dict[str, Any]:
    params, positions = asked.request.sampling_params, tenants.engine.positions
    limit = DEFAULT_TOKENS if positions is None else positions
    stop = params.stop
    return {
        "n": asked.request.num_samples, "max_new_tokens": params.max_tokens or limit,
        "temperature": params.temperature, "top_p": params.top_p, "top_k": max(params.top_k, 0),
        "stop": stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        "seed": params.seed,
    }  # fmt: skip


def _drawn(
    group: Together, tenants: Tenants, fail: Callable[[Command, Exception], Outcome]
) -> list[Outcome]:
    sampler, prompts = tenants.engine.sampler, dict[str, list[tuple[int, ...]]]()
    assert sampler is not None
    for each in group.asked:
        prompts.setdefault(tenants.resident[each.key].name, []).append(each.prompt)
    # Without a seed, the place in the log is one.
    seed = group.options["seed"]
    options = group.options | {"seed": group.asked[0].command.number if seed is None else seed}
    found = sampler.sample(prompts, **options)
    left = {name: iter(completions) for name, completions in found.items()}
    outcomes = []
    for each in group.asked:
        completions = next(left[tenants.resident[each.key].name])
        if any(one.finish_reason == "not_finite" for one in completions):
            wrong = NotFinite("the adapter's numbers for the next token are not finite")
            outcomes.append(fail(each.command, wrong))
        else:
            outcomes.append(_outcome(each, completions, tenants))
    return outcomes


def _outcome(asked: Asked, completions: Sequence[Completion], tenants: Tenants) -> Outcome:
    scored = None
    if asked.request.prompt_logprobs:
        scored = _prompt_logprobs(asked, tenants)
    drawn = [(one.tokens, one.logprobs, str(one.finish_reason)) for one in completions]
    tokens = len(asked.prompt) + sum(len(one.tokens) for one in completions)
    return Outcome(asked.command, Answer(PROTOBUF, sample_output(drawn, scored)), tokens)


def _prompt_logprobs(asked: Asked, tenants: Tenants) -> np.ndarray:
    """Of each token of the prompt, NaN where nothing stands before it or nobody asked."""
    ids, logprobs = asked.prompt, np.full(len(asked.prompt), np.nan)
    if len(ids) > 1:
        name, sample = tenants.resident[asked.key].name, Sample(ids, (IGNORED, *ids[1:]))
        [found] = tenants.engine.step.score({name: [[sample]]})[name]
        logprobs[1:] = found.double().cpu().numpy()
    if asked.request.prompt_logprobs_last_n is not None:
        logprobs[: -asked.request.prompt_logprobs_last_n] = np.nan
    return logprobs

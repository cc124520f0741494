"""Group relative policy optimization (GRPO): two jobs learn sums by rewards, on one small base.

Each step asks both jobs for 16 answers to each of 16 sums, all in one batch, by their adapters as
they are. An answer's advantage is its reward, relative to the other answers to the same sum. Both
jobs learn from their own answers in one forward and backward.

The base has random weights: all that the jobs know in the end, they have learned from rewards.

Source: Shao et al., DeepSeekMath (2024), section 4.1, without the term of the reference model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tlora_fx
from tlora_fx import BaseSpec, Batch, Completion, GroupStep, Job, Sampler

#: A token a letter; the last one ends an answer.
LETTERS = "0123456789+=."
SUMS = [(a, b) for a in range(10) for b in range(10) if a + b < 10]
#: Rank and learning rate of each job.
JOBS = {"small": (4, 1e-2), "large": (16, 4e-3)}
ASKED, ANSWERS = 16, 16


def make_base(folder: Path, dtype: str = "float32") -> BaseSpec:
    """A Llama of two layers that is drawn from a seed."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        eos_token_id=LETTERS.index("."),
        initializer_range=0.2,
    )
    config.save_pretrained(folder)
    return BaseSpec(config=folder, dtype=dtype, seed=1)


def make_jobs(base: BaseSpec, steps: int) -> list[Job]:
    """The two jobs; a loop of one's own brings the data."""
    return [
        Job(
            name=name,
            base=base,
            lora={"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"},
            data=[{"text": "unused"}],
            max_steps=steps,
            learning_rate=rate,
            lr_scheduler_type="linear",
        )
        for name, (rank, rate) in JOBS.items()
    ]


def encode(question: tuple[int, int]) -> list[int]:
    """Token ids of `3+4=`."""
    return [LETTERS.index(letter) for letter in f"{question[0]}+{question[1]}="]


def reward(question: tuple[int, int], answer: Completion) -> float:
    """1 for the sum and the end behind it, half of that for the sum alone."""
    written = "".join(LETTERS[token] for token in answer.tokens)
    total = str(sum(question))
    return 0.5 * written.startswith(total) + 0.5 * (written == f"{total}.")


def relative(rewards: Sequence[float]) -> list[float]:
    """The advantage of each answer of a group."""
    mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
    return [(each - mean) / (spread + 1e-4) for each in rewards]


def learn(
    step: GroupStep, sampler: Sampler, questions: Sequence[tuple[int, int]], seed: int
) -> dict[str, float]:
    """One step of every job; the mean reward of each, before the step."""
    names = [member.job.name for member in step.members.values()]
    prompts = [encode(question) for question in questions]
    drawn = sampler.sample(
        dict.fromkeys(names, prompts), n=ANSWERS, max_new_tokens=2, temperature=1.0, seed=seed
    )
    rewards, batches = {}, {}
    for name, groups in drawn.items():
        samples, every = [], []
        for question, group in zip(questions, groups, strict=True):
            own = [reward(question, answer) for answer in group]
            every += own
            pairs = zip(group, relative(own), strict=True)
            samples += [answer.to_sample(advantage) for answer, advantage in pairs]
        rewards[name] = statistics.mean(every)
        batches[name] = Batch([samples], loss="ppo")
    step.accumulate(batches)
    step.apply({name: {} for name in names})
    return rewards


def train(
    jobs: Sequence[Job], steps: int, seed: int = 0
) -> tuple[GroupStep, list[dict[str, float]]]:
    """All steps of these jobs together; the rewards of each step."""
    step = GroupStep(tlora_fx.compile(jobs), device="cpu")
    step.prepare()
    sampler = Sampler(step, max_sequences=2 * ASKED * ANSWERS)
    draw = random.Random(seed)
    rewards = []
    for number in range(steps):
        questions = draw.sample(SUMS, ASKED)
        rewards.append(learn(step, sampler, questions, seed=number))
        if number % 10 == 0 or number == steps - 1:
            shown = "   ".join(f"{name} {mean:.2f}" for name, mean in rewards[-1].items())
            print(f"step {number:3}   mean reward   {shown}", flush=True)
    return step, rewards


def main() -> None:
    """Train both jobs, and ask each for its most likely answer to every sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        step, _ = train(make_jobs(make_base(Path(folder)), steps), steps)
        asked = {name: [encode(question) for question in SUMS] for name in JOBS}
        drawn = Sampler(step).sample(asked, max_new_tokens=2, temperature=0)
    for name, groups in drawn.items():
        right = sum(reward(*pair) == 1 for pair in zip(SUMS, (g[0] for g in groups), strict=True))
        print(f"{name}: {right} of {len(SUMS)} sums are right")


if __name__ == "__main__":
    main()

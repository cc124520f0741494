"""Recipes of tinker-cookbook, unmodified and offline, on the small base of `serve --tinker`.

    python -m venv .cookbook && .cookbook/bin/pip install 'tinker-cookbook[math-rl]'
    python -m benchmarks.tinker_recipes .cookbook/bin/python

Each recipe is a process of the other environment, which knows nothing of tlora-fx. Results are its
exit code, its seconds, and the first and last value of its metric.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, console, described, write

#: Of a recipe at most.
SECONDS = 1800
CHAT, SWEEP = "tinker_cookbook.recipes.chat_sl.train", "tinker_cookbook.recipes.chat_sl.sweep"
MATH = "tinker_cookbook.recipes.math_rl.train"
#: `train_dpo.main` has no command of its own for pairs in a file.
DPO = """
import sys
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

address, base, log, pairs = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=base, renderer_name="role_colon", max_length=256, batch_size=8
)
train_dpo.main(
    train_dpo.Config(
        log_path=log, model_name=base, recipe_name="dpo", base_url=address,
        renderer_name="role_colon",
        learning_rate=1e-3, lora_rank=8, evaluator_builders=[],
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=common, comparison_builder=ComparisonBuilderFromJsonl(train_path=pairs)
        ),
    )
)
"""
Figures = dict[str, Any]


class Recipes:
    """The other environment's Python, and the service that its recipes use.

    folder   for what they write
    """

    def __init__(self, python: Path, address: str, base: Path, folder: Path) -> None:
        self.python, self.address, self.base, self.folder = python, address, base, folder
        data = "import tinker_cookbook as t; print(t.__path__[0] + '/example_data')"
        self.data = Path(self._output("-c", data))
        self.common = [f"base_url={address}", "behavior_if_log_dir_exists=resume"]
        self.common += [f"model_name={base}", "renderer_name=role_colon"]

    def versions(self) -> dict[str, str]:
        """Of the packages that matter."""
        code = (
            "from importlib.metadata import version as v; print(v('tinker'), v('tinker-cookbook'))"
        )
        return dict(
            zip(("tinker", "tinker-cookbook"), self._output("-c", code).split(), strict=True)
        )

    def chat(self) -> Figures:
        """Supervised training on conversations."""
        return self.run("chat", *self._chat("chat"), metric="train_mean_nll")

    def resumed(self) -> Figures:
        """The same, killed once it has a checkpoint, and resumed."""
        log = self.folder / "resumed" / "checkpoints.jsonl"
        process = self._start("resumed", *self._chat("resumed"))
        while not (log.is_file() and log.read_text()) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        killed = process.wait()
        figures = self.run("resumed", *self._chat("resumed"), metric="train_mean_nll")
        return {"killed": killed, **figures}

    def _chat(self, name: str) -> list[str]:
        more = ("batch_size=8", "max_length=256", "lora_rank=8", "save_every=2", "max_steps=8")
        data = f"dataset={self.data / 'conversations.jsonl'}"
        path = f"log_path={self.folder / name}"
        return ["-m", CHAT, *self.common, *more, data, path, "learning_rate=1e-3"]

    def math(self) -> Figures:
        """Reinforcement learning on sums, with the loss that the service has."""
        more = ["env=arithmetic", "loss_fn=importance_sampling", "group_size=4", "max_steps=4"]
        more += ["groups_per_batch=8", "max_tokens=4", "lora_rank=8", "eval_every=0"]
        path = f"log_path={self.folder / 'math'}"
        return self.run(
            "math", "-m", MATH, *self.common, *more, path, metric="env/all/reward/total"
        )

    def sweep(self) -> Figures:
        """Four clients at a time, of two rates and two ranks."""
        base = [f"base.{each}" for each in (*self.common, "batch_size=8", "max_length=256")]
        base += [f"base.dataset={self.data / 'conversations.jsonl'}"]
        axes = ("learning_rates=[1e-3,3e-3]", "lora_ranks=[8,32]", "max_parallel=4")
        more = ("training_budget_examples=32", f"sweep_dir={self.folder / 'sweep'}")
        return self.run("sweep", "-m", SWEEP, "recipe=sft", *base, *axes, *more) | {
            "runs": len(list((self.folder / "sweep").glob("*/metrics.jsonl")))
        }

    def dpo(self) -> Figures:
        """Preferences, whose loss is a function of the client's."""
        pairs = self.folder / "pairs.jsonl"
        words = [chr(97 + at % 26) * (3 + at % 5) for at in range(32)]
        pairs.write_text("".join(json.dumps(_pair(each)) + "\n" for each in words))
        given = (self.address, str(self.base), str(self.folder / "dpo"), str(pairs))
        return self.run("dpo", "-c", DPO, *given, metric="dpo_loss")

    def run(self, name: str, *words: str, metric: str = "") -> Figures:
        """Run one to its end."""
        start = time.perf_counter()
        code = self._start(name, *words).wait(SECONDS)
        figures: Figures = {"exit": code, "s": round(time.perf_counter() - start, 1)}
        file = self.folder / name / "metrics.jsonl"
        if metric and file.is_file():
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            values = [row[metric] for row in rows if metric in row]
            figures |= {"steps": len(values), metric: [values[0], values[-1]] if values else []}
        return figures

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        env = {name: os.environ[name] for name in ("PATH", "HOME")}
        env |= {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-local"}
        env |= {"OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.txt").open("ab") as log:
            return subprocess.Popen(
                [self.python, *words], env=env, stdout=log, stderr=log, cwd=self.folder
            )

    def _output(self, *words: str) -> str:
        done = subprocess.run([self.python, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()


def _pair(word: str) -> Figures:
    answers = {
        name: [{"role": "assistant", "content": text}]
        for name, text in (("completion_A", word.upper()), ("completion_B", word))
    }
    prompt = [{"role": "user", "content": f"Write {word} in capitals."}]
    return {"comparison": {"prompt_conversation": prompt, **answers}, "label": "A"}


@contextmanager
def _serving(run: Path) -> Iterator[str]:
    """Inside, the Tinker API is served at the yielded address."""
    command = [sys.executable, "-m", "tlora_fx", "serve", "--tinker", "-o", str(run)]
    command += ["--device", "cpu", "--port", "0"]
    with run.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        if not (found := re.search(r"http://\S+", process.stdout.readline().decode())):
            raise SystemExit(run.with_suffix(".log").read_text())
        yield found[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def main(words: Sequence[str] | None = None) -> None:
    """Run all, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path, help="Python of an environment with tinker-cookbook")
    parser.add_argument("--only", nargs="+", default=["chat", "resumed", "sweep", "math", "dpo"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args(words)
    found = described("tinker_recipes", "cpu")
    with tempfile.TemporaryDirectory(prefix="recipes-") as name:
        folder = Path(name)
        with _serving(folder / "run") as address:
            base = folder / "run" / "service" / "tinker" / "base"
            recipes = Recipes(given.python.absolute(), address, base, folder)
            found["client"] = recipes.versions()
            for each in given.only:
                found[each] = getattr(recipes, each)()
                console().print(each, found[each], highlight=False)
                if found[each]["exit"]:
                    console().print((folder / f"{each}.txt").read_text()[-4000:])
                write(given.out / f"tinker-recipes-{found['date']}.json", found)


if __name__ == "__main__":
    main()

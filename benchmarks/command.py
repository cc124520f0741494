"""Whole commands as a user starts them, on rows of real lengths, from the command line to adapters.

    python -m benchmarks.command --file gsm8k/train.jsonl
    python -m benchmarks.command --file gsm8k/train.jsonl --gpus 2 --plans auto,replicated,tensor
    python -m benchmarks.command --file gsm8k/train.jsonl --gpus 2 --plans replicated,fsdp \
        --batches 4 4 7 7 15 15 29 29                              # 16,000 tokens a round
    python -m benchmarks.command --file gsm8k/train.jsonl --base qwen3-moe --adapt-experts

Llama-3-8B's shape with random weights in bfloat16, or Qwen3-30B-A3B's, eight jobs of ranks 2 to 16
and batches 1 to 8. Adapters are on all linears, or of the mixture on attention, and with
--adapt-experts on experts too.
Each arm is one `tlora-fx train` in a process of its own:

cold       `--compile`, no cache of ours, of Triton or of Inductor; Python's bytecode is there
warm       the same again
plain      warm, without `--compile`
long       warm, for --long steps: rounds from the 20th on are compared with the frozen model
launched   warm, with `--no-cuda-graphs`: its memory is what that of `long` is compared with
beside     no cache, `--compile --no-wait-for-compile`, for twice as many steps
one        with --gpus: warm, on one GPU
PLAN       with --gpus: warm, `--gpus N --plan PLAN --compile`

With --gpus, commands of a few steps that are not counted fill the caches first, side by side.

`frozen` is the base without adapters: forward and backward of packed rows as one CUDA graph, its
layers compiled. It has as many sequences as a round, all of one length, at two lengths; a line
through both gives the seconds for the tokens of a round. `trl` trains one of the jobs with TRL and
PEFT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.data import byte_level_tokenizer
from benchmarks.results_file import RESULTS, described, write
from benchmarks.step_mixes import EXPERTS, RANKS, Mix, Mixture, Shape

BATCHES = (1, 1, 2, 2, 4, 4, 8, 8)
MAX_LENGTH = 512
#: From this round on, rounds are steady.
STEADY = 20
#: Lengths of the sequences that the frozen model runs, as many as a round has.
LENGTHS = (128, 160)
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}


def main() -> None:
    """Measure and write the result."""
    given = _arguments()
    if given.part:
        print(json.dumps(frozen(given) if given.part == "frozen" else trl(given)))
        return
    found: dict[str, Any] = described("command", given.device) | {"arms": {}}
    kind = "" if given.base == "llama" else f"-{given.base}" + "-experts" * given.adapt_experts
    out = given.out / f"command{kind}-{given.gpus}-{found['date']}.json"
    make_base(given)
    warm = ["--compile"] if given.device == "cuda" else []
    if given.gpus > 1:
        plans = {
            plan: ["--gpus", str(given.gpus), "--plan", plan, *warm]
            for plan in given.plans.split(",")
        }
        if not given.filled:
            fill(given, {"one": warm} | plans)
        if given.fill_alone:
            return
        arms = {"one": (warm, given.steps)}
        arms |= {plan: (options, given.long) for plan, options in plans.items()}
    else:
        arms = {"cold": (warm, given.steps), "warm": (warm, given.steps)}
        arms |= {"plain": ([], given.steps), "long": (warm, given.long)}
        arms["launched"] = ([*warm, "--no-cuda-graphs"], given.steps)
        arms["beside"] = ([*warm, "--no-wait-for-compile"], 2 * given.steps)
    wanted = given.arms.split(",") if given.arms else [*arms]
    for name, (options, steps) in arms.items():
        if name not in wanted:
            continue
        found["arms"][name] = command(given, name, options, steps)
        print(name, json.dumps(found["arms"][name]), flush=True)
        write(out, found)
    for part in () if given.gpus > 1 else ("frozen", "trl"):
        if part in given.beside.split(","):
            found[part] = in_process(given, part)
            print(part, json.dumps(found[part]), flush=True)
    if "frozen" in found and "long" in found["arms"]:
        found["long over frozen"] = over_frozen(found["arms"]["long"], found["frozen"])
        print("rounds over the frozen graph", found["long over frozen"])
    write(out, found)


def make_base(given: argparse.Namespace) -> None:
    """A base with random weights and a tokenizer that knows the file, unless they are there."""
    base = given.work / "base"
    if (base / "tokenizer.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM

    lines = [json.loads(line) for line in given.file.open()]
    texts = (f"{line['question']}\n{line['answer']}" for line in lines)
    tokenizer = byte_level_tokenizer(texts, min(16000, given.shape.vocabulary), SPECIAL)
    torch.manual_seed(0)
    with torch.device(given.device):
        config = given.shape.config(bos_token_id=0, eos_token_id=1, pad_token_id=2)
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(config, dtype=given.shape.torch_dtype)
    model.save_pretrained(base, max_shard_size="4GB")
    del model
    if given.device == "cuda":
        torch.cuda.empty_cache()
    tokenizer.save_pretrained(base)


def shape_of(given: argparse.Namespace) -> Shape:
    """The base's shape, and what the jobs adapt."""
    small: dict[str, Any] = {
        "layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "vocabulary": 2048,
        "intermediate": 128, "dtype": "float32",
    }  # fmt: skip
    if given.base == "llama":
        return Shape(**small) if given.small else Shape()
    adapted = EXPERTS if given.adapt_experts else ()
    if given.small:
        return Mixture(**small, head_width=16, experts=8, chosen=2, parameters=adapted)
    return Mixture(layers=48, parameters=adapted)


def fill(given: argparse.Namespace, commands: dict[str, list[str]]) -> None:
    """Fill the caches: a few steps of each of these commands, side by side.

    What `auto` runs is what another plan has compiled.
    """
    caches = given.work / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=_environment(caches))
    wanted = {name: each for name, each in commands.items() if name != "auto"}
    with ThreadPoolExecutor(len(wanted)) as pool:
        done = pool.map(lambda name: command(given, f"fill {name}", wanted[name], 3), wanted)
        for name, result in zip(wanted, done, strict=True):
            print("fill", name, result["status"], result["seconds"], flush=True)


def write_jobs(given: argparse.Namespace, name: str, steps: int) -> Path:
    """The job file of an arm."""
    data = {"path": str(given.file), "columns": {"prompt": "question", "completion": "answer"}}
    experts = given.shape.parameters
    jobs = [
        {
            "name": f"job-{place}",
            "lora": {
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": given.shape.target_modules,
                **({"target_parameters": [*experts]} if experts else {}),
            },
            "data": data,
            "per_device_train_batch_size": batch,
            "max_steps": steps,
            "seed": place,
            "max_length": MAX_LENGTH,
        }
        for place, (rank, batch) in enumerate(zip(RANKS, given.batches, strict=True))
    ]
    base = {"model": str(given.work / "base"), "dtype": given.shape.dtype}
    path: Path = given.work / f"jobs {name}.yaml"
    # JSON is YAML.
    path.write_text(json.dumps({"base": base, "defaults": {"save_steps": 1000}, "jobs": jobs}))
    return path


def command(given: argparse.Namespace, name: str, options: list[str], steps: int) -> dict[str, Any]:
    """One `tlora-fx train`: seconds of its phases, of its rounds, and to its end."""
    caches = given.work / "caches"
    if name in ("cold", "beside"):
        shutil.rmtree(caches, ignore_errors=True)
        subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=_environment(caches))
    output = given.work / "runs" / name
    shutil.rmtree(output, ignore_errors=True)
    words = [str(write_jobs(given, name, steps)), "-o", str(output), *options]
    if given.device != "cuda":
        words += ["--device", given.device]
    lines: list[tuple[float, str]] = []
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "tlora_fx", "train", *words], env=_environment(caches),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

    def read() -> None:
        assert process.stdout is not None
        lines.extend((time.perf_counter() - began, line.rstrip()) for line in process.stdout)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    memory = _memory_watch(given.device)
    try:
        status: int | str = process.wait(given.limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        status = f"stopped after {given.limit} s"
    ended = time.perf_counter() - began
    reader.join(5)
    memory.terminate()
    used = [int(word) for word in memory.communicate()[0].split() if word.isdecimal()]
    if status != 0:
        print("\n".join(line for _, line in lines[-30:]), flush=True)
    start = output / "start.json"
    phases = json.loads(start.read_text()) if start.exists() else {}
    rounds = rounds_of(output)
    return {
        "options": options,
        "steps": steps,
        "status": status,
        "seconds to the first line": round(lines[0][0], 1) if lines else None,
        "seconds to the first step": phases.get("seconds"),
        "phases": phases.get("phases", {}),
        "seconds": round(ended, 1),
        "most MiB on a GPU": max(used, default=None),
        "rounds": rounds,
        "said": [line for _, line in lines if line.startswith(("plan:", "rows", "warning:"))],
        "plans": {path.stem: plan_of(path) for path in sorted(output.glob("*plan.json"))},
    }


def _memory_watch(device: str) -> subprocess.Popen[str]:
    """A process that prints how much memory of the GPUs is used, in MiB, four times a second."""
    words = [
        "nvidia-smi",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        "-lms",
        "250",
    ]
    watch = words if device == "cuda" else ["true"]
    return subprocess.Popen(watch, stdout=subprocess.PIPE, text=True)


def plan_of(path: Path) -> dict[str, Any]:
    """What a run's plan is, and what it was expected to take."""
    plan = json.loads(path.read_text())
    kept = ("mesh", "micro_batches", "schedule", "shard_base", "recompute", "estimate")
    return {name: plan[name] for name in kept if name in plan}


#: Writes Python's bytecode, which an installation has.
IMPORTS = (
    "import torch._inductor.compile_fx, tlora_fx.runtime.trainer, peft;"
    "import tlora_fx.runtime.launching.launch;"
    "from transformers import LlamaForCausalLM"
)


def _environment(caches: Path) -> dict[str, str]:
    """All caches in one folder."""
    own = {
        "TLORA_FX_CACHE": "tlora-fx", "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "PYTHONPYCACHEPREFIX": "../bytecode",
    }  # fmt: skip
    return dict(os.environ) | {name: str(caches / folder) for name, folder in own.items()}


def rounds_of(output: Path) -> dict[str, Any]:
    """Seconds and tokens of the rounds of a run, by the metrics of its jobs."""
    tokens: dict[int, int] = defaultdict(int)
    seconds: dict[int, float] = {}
    replayed: dict[int, tuple[int, int]] = {}
    for path in output.glob("*/metrics.jsonl"):
        before = 0
        for record in map(json.loads, path.open()):
            if "loss" in record:
                step = record["step"]
                tokens[step] += record["tokens"] - before
                seconds[step], before = record["seconds"], record["tokens"]
                replayed[step] = record.get("rows_replayed", 0), record.get("rows", 0)
    order = sorted(seconds)
    # A round is looked at when the next one was launched, and the last one has none.
    steady = [seconds[step] for step in order[STEADY:-1]]
    return {
        "tokens": [tokens[step] for step in order],
        "seconds": [round(seconds[step], 4) for step in order],
        "rows replayed": ["{}/{}".format(*replayed[step]) for step in order],
        "mean of steady ones": round(statistics.mean(steady), 4) if steady else None,
        "median of steady ones": round(statistics.median(steady), 4) if steady else None,
        "most of steady ones": round(max(steady), 4) if steady else None,
    }


def over_frozen(arm: dict[str, Any], alone: dict[str, Any]) -> float:
    """Seconds of all steady rounds over what the frozen model's graph takes for their tokens."""
    (few, fast), (many, slow) = ((each["tokens"], each["seconds"]) for each in alone["rows"])
    slope = (slow - fast) / (many - few)
    pairs = zip(arm["rounds"]["tokens"], arm["rounds"]["seconds"], strict=True)
    steady = list(pairs)[STEADY:-1]
    expected = sum(fast + slope * (tokens - few) for tokens, _ in steady)
    return round(float(sum(seconds for _, seconds in steady) / expected), 3)


def frozen(given: argparse.Namespace) -> dict[str, Any]:
    """The base without adapters, as one CUDA graph."""
    from benchmarks.step_arms import Made, PackedArm

    rows = []
    sequences = sum(given.batches)
    with tempfile.TemporaryDirectory() as folder:
        made = Made(replace(given.shape, ranks=(8,)), given.device, Path(folder))
        arm = PackedArm(made, stacked=False, graph=True)
        for length in LENGTHS:
            arm.load(Mix("frozen", (sequences,), length=length))
            arm.step(3)
            seconds = statistics.median(arm.step(3) for _ in range(5))
            rows.append({"tokens": sequences * length, "seconds": round(seconds, 4)})
    return {"rows": rows}


def trl(given: argparse.Namespace) -> dict[str, Any]:
    """One job of rank 16 and batch 8 by TRL and PEFT: seconds of a step."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    lines = [json.loads(line) for line in given.file.open()][:400]
    data = [{"prompt": x["question"], "completion": x["answer"]} for x in lines]
    tokenizer = AutoTokenizer.from_pretrained(given.work / "base")
    model = AutoModelForCausalLM.from_pretrained(
        given.work / "base", dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda"
    )
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

    options = SFTConfig(
        output_dir=str(given.work / "trl"), per_device_train_batch_size=8, max_steps=12,
        logging_steps=100, report_to="none", bf16=True, gradient_checkpointing=False,
        save_strategy="no", max_length=MAX_LENGTH, disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    SFTTrainer(
        model=model, args=options, train_dataset=Dataset.from_list(data),
        processing_class=tokenizer, peft_config=lora, callbacks=[Clock()],
    ).train()  # fmt: skip
    steps = [late - early for early, late in pairwise(times[2:])]
    return {"batch": 8, "median seconds of a step": round(statistics.median(steps), 3)}


def in_process(given: argparse.Namespace, part: str) -> dict[str, Any]:
    """A part in a process of its own, whose memory is gone afterwards."""
    words = ["--part", part, "--file", str(given.file), "--work", str(given.work)]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.command", *words, *given.sizes],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        return {"failed": run.returncode}
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--gpus", type=int, default=1, help="processes of one command")
    parser.add_argument("--plans", default="auto", help="plans to run with --gpus")
    parser.add_argument("--fill-alone", action="store_true", help="with --gpus: fill the caches")
    parser.add_argument("--filled", action="store_true", help="with --gpus: the caches are filled")
    parser.add_argument(
        "--arms",
        help="which of the arms above; all of this number of GPUs by default",
    )
    parser.add_argument(
        "--batches", type=int, nargs=len(BATCHES), default=BATCHES,
        help="sequences a step of each of the eight jobs",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each job")
    parser.add_argument("--long", type=int, default=170, help="the same of `long`, and of plans")
    parser.add_argument("--beside", default="frozen", help="frozen, trl")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one command")
    parser.add_argument("--work", type=Path, default=Path("build/command"), help="folder for files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--base", default="llama", choices=("llama", "qwen3-moe"))
    parser.add_argument("--adapt-experts", action="store_true", help="of a mixture, too")
    parser.add_argument("--small", action="store_true", help="a base of two small layers")
    parser.add_argument("--part", choices=("frozen", "trl"), help="run one part alone (internal)")
    given = parser.parse_args()
    given.file, given.work = given.file.absolute(), given.work.absolute()
    given.work.mkdir(parents=True, exist_ok=True)
    given.sizes = ["--device", given.device, "--base", given.base] + ["--small"] * given.small
    given.sizes += ["--batches", *map(str, given.batches)]
    given.shape = shape_of(given)
    return given


if __name__ == "__main__":
    main()

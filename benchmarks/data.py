"""Reading jobs' data: eight jobs on one file, and many rows, beside `datasets.map`.

    python -m benchmarks.data --file gsm8k/train.jsonl --turns 3
    python -m benchmarks.data --file gsm8k/train.jsonl --rows 1000000 --turns 1

Arms take turns, each in a process of its own whose imports are not counted:

cold      eight jobs load their data; no table is kept yet
warm      the same again: tables are mapped
map       `datasets.map` with the same tokenizer, prompts and whole texts, a process a core
batch     one call of the tokenizer over prompts and whole texts

Arms must have equal tokens: the hash of the ids of the first 10,000 whole texts is compared. With
`--rows` the file's texts are drawn from at random, and there is no `batch`, which needs all tokens
as Python's integers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_file import RESULTS, described, write

JOBS = 8
#: Rows whose tokens are compared.
COMPARED = 10_000
ARMS = ("cold", "warm", "map", "batch")


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--rows", type=int, default=0, help="rows to draw; 0: the file's own")
    parser.add_argument("--turns", type=int, default=3, help="turns of each arm")
    parser.add_argument("--work", type=Path, default=Path("build/data"), help="folder for files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--arm", choices=ARMS, help="run one arm alone (internal)")
    given = parser.parse_args()
    work = given.work.absolute()
    if given.arm:
        print(json.dumps(run_arm(given.arm, work)))
        return
    work.mkdir(parents=True, exist_ok=True)
    rows = write_rows(given.file, work / "rows.jsonl", given.rows)
    lines = [json.loads(line) for line in given.file.read_text().splitlines()]
    texts = (line["question"] + line["answer"] for line in lines)
    tokenizer = byte_level_tokenizer(texts, 16_000, {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.save_pretrained(work / "tokenizer")
    seconds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for _ in range(given.turns):
        for arm in ARMS[: 3 if given.rows else 4]:
            if arm == "cold":
                shutil.rmtree(work / "cache", ignore_errors=True)
            found = in_process(arm, work)
            print(arm, found, flush=True)
            seconds[arm].append(found)
    hashes = {found["hash"] for each in seconds.values() for found in each}
    assert len(hashes) == 1, "arms have other tokens"
    medians = {
        arm: statistics.median(f["seconds"] for f in each) for arm, each in seconds.items() if each
    }
    head = described("data", "cpu")
    found = {**head, "rows": rows, "jobs": JOBS, "median seconds": medians, "turns": seconds}
    write(given.out / f"data-{rows}-{head['date']}.json", found)
    print(json.dumps(medians, indent=1))


def in_process(arm: str, work: Path) -> dict[str, Any]:
    """The result of an arm in a new process."""
    environment = {**os.environ, "TLORA_FX_CACHE": str(work / "cache")}
    words = ["-m", "benchmarks.data", "--file", "-", "--work", str(work), "--arm", arm]
    run = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-3000:])
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def run_arm(arm: str, work: Path) -> dict[str, Any]:
    """Seconds of an arm, and the hash of all ids of whole texts."""
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "tokenizer")
    if arm in ("cold", "warm"):
        return run_ours(work, tokenizer)
    read = datasets.load_dataset(
        "json", data_files=str(work / "rows.jsonl"), split="train", cache_dir=str(work / "read")
    )

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        whole = [a + b for a, b in zip(rows["prompt"], rows["completion"], strict=True)]
        prompts = tokenizer(rows["prompt"])["input_ids"]
        return {"prompts": prompts, "input_ids": tokenizer(whole)["input_ids"]}

    digest = hashlib.sha256()
    start = time.perf_counter()
    if arm == "batch":
        lines = encode({name: list(read[name]) for name in ("prompt", "completion")})["input_ids"]
        seconds = time.perf_counter() - start
    else:
        mapped = read.map(
            encode, batched=True, num_proc=len(os.sched_getaffinity(0)),
            remove_columns=read.column_names, load_from_cache_file=False,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        lines = (row["input_ids"] for row in mapped.select_columns(["input_ids"]))
    for line in islice(lines, COMPARED):
        digest.update(np.array([*line, tokenizer.eos_token_id], np.int32).tobytes())
    return {"seconds": seconds, "hash": digest.hexdigest()}


def run_ours(work: Path, tokenizer: Any) -> dict[str, Any]:
    """Eight jobs from their files to their first batches."""
    from tlora_fx.config.job import Job
    from tlora_fx.runtime.data.samples import load_job_data

    before = anonymous_bytes()
    start = time.perf_counter()
    jobs = [
        Job(
            name=f"j{index}", base={"model": "m"}, lora={"r": 2}, seed=index, max_length=512,
            data={"path": str(work / "rows.jsonl")}, per_device_train_batch_size=4,
        )
        for index in range(JOBS)
    ]  # fmt: skip
    data = [load_job_data(job, tokenizer) for job in jobs]
    digests = {each.digest for each in data}
    first = [each.step(0) for each in data]
    seconds = time.perf_counter() - start
    assert len(digests) == 1
    assert all(first)
    grown = anonymous_bytes() - before
    table, digest = data[0].samples.table, hashlib.sha256()  # type: ignore[attr-defined]
    for index in range(min(len(table), COMPARED)):
        digest.update(table.ids(index).tobytes())
    return {"seconds": seconds, "anonymous bytes": grown, "hash": digest.hexdigest()}


def anonymous_bytes() -> int:
    """Private memory of this process that no file holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def write_rows(source: Path, path: Path, count: int) -> int:
    """A file of prompts and completions; returns how many rows it has."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    pairs = [(row["question"], row["answer"]) for row in rows]
    if count:
        draw = random.Random(0)  # noqa: S311  (example data comes from a seed)
        pairs = [
            (f"{index} {draw.choice(pairs)[0]}", " ".join(draw.choice(pairs)[1] for _ in "ab"))
            for index in range(count)
        ]
    with path.open("w") as file:
        for prompt, completion in pairs:
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    return len(pairs)


def byte_level_tokenizer(texts: Iterable[str], size: int, special: dict[str, str]) -> Any:
    """A byte-level BPE that is trained on texts.

    special   tokens by what transformers calls them, such as eos_token
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special.values()], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=model, **special)


if __name__ == "__main__":
    main()

"""Two hundred mistakes that users make, and what each is told; printed with times as a table.

    python -m tests.cli.mistakes > mistakes.md

Each is a command in a fresh folder with a job file, data and a base; what is wrong is one line of
it. Expected words are of what is told: where, or what to do.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
import yaml

ROOT = Path(__file__).parents[2]
JOBS: dict[str, Any] = {
    "base": {"config": "base", "dtype": "float32"},
    "jobs": [
        {"name": "a", "lora": {"r": 4}, "data": {"path": "rows.jsonl"}, "max_steps": 2},
    ],
}
TRAIN = ("train", "jobs.yaml", "-o", "out", "--device", "cpu")
ROW = '{"prompt": "one", "completion": "two"}\n'


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    told      of what the command says
    command   its words
    files     to be written instead of the right ones; None: to be removed
    loads     whether torch and the base are needed to find it
    """

    name: str
    told: str
    command: tuple[str, ...] = TRAIN
    files: dict[str, bytes | None] = field(default_factory=dict)
    loads: bool = False


def mistakes() -> Iterator[Mistake]:
    """All of them."""
    yield from _of_jobs()
    yield from _of_yaml()
    yield from _of_data()
    yield from _of_commands()
    yield from _of_bases()


def _changed(path: tuple[str | int, ...], value: Any) -> bytes:
    """The job file with another value at a place."""
    jobs = copy.deepcopy(JOBS)
    at: Any = jobs
    for key in path[:-1]:
        at = at.setdefault(key, {}) if isinstance(at, dict) else at[key]
    at[path[-1]] = value
    return yaml.safe_dump(jobs, sort_keys=False).encode()


JOB: tuple[str | int, ...] = ("jobs", 0)
FIELDS: list[tuple[tuple[str | int, ...], Any, str]] = [
    ((*JOB, "name"), "a b", "the name becomes a folder"),
    ((*JOB, "name"), "", "the name becomes a folder"),
    ((*JOB, "name"), 7, "wrong value of 'name'"),
    ((*JOB, "name"), "checkpoints", "a job cannot be called"),
    ((*JOB, "name"), "../a", "the name becomes a folder"),
    ((*JOB, "name"), "x" * 200, "1 to 100 of"),
    ((*JOB, "lerning_rate"), 1e-3, "did you mean 'learning_rate'?"),
    ((*JOB, "learning_rate"), "high", "a number n with 0"),
    ((*JOB, "learning_rate"), -1.0, "a number n with 0"),
    ((*JOB, "learning_rate"), float("nan"), "a number n with 0"),
    ((*JOB, "lr"), 1e-3, "it is called 'learning_rate' here"),
    ((*JOB, "batch_size"), 4, "it is called 'per_device_train_batch_size' here"),
    ((*JOB, "per_device_train_batch_size"), 0, "a whole number n with 1"),
    ((*JOB, "per_device_train_batch_size"), 2.5, "a whole number"),
    ((*JOB, "per_device_train_batch_size"), "4", "a whole number"),
    ((*JOB, "gradient_accumulation_steps"), 0, "a whole number n with 1"),
    ((*JOB, "gradient_accumulation_step"), 2, "did you mean 'gradient_accumulation_steps'?"),
    ((*JOB, "max_length"), 1, "a whole number n with 2"),
    ((*JOB, "max_seq_length"), 128, "it is called 'max_length' here"),
    ((*JOB, "sequence_len"), 128, "it is called 'max_length' here"),
    ((*JOB, "max_steps"), -3, "a whole number n with 1"),
    ((*JOB, "num_train_epochs"), 3, "exclude each other"),
    ((*JOB, "num_epochs"), 3, "it is called 'num_train_epochs' here"),
    ((*JOB, "seed"), -1, "a whole number n with 0"),
    ((*JOB, "seed"), 2**40, "a whole number n with 0"),
    ((*JOB, "shuffle"), "maybe", "true or false"),
    ((*JOB, "optim"), "adamww", "did you mean 'adamw'?"),
    ((*JOB, "optim"), "sophia", "one of adamw"),
    ((*JOB, "optimizer"), "adamw", "it is called 'optim' here"),
    ((*JOB, "optim_args"), {"lr": 1.0}, "use learning_rate"),
    ((*JOB, "optim_args"), {"foo": 1}, "known arguments"),
    ((*JOB, "adam_beta1"), 1.0, "a number n with 0"),
    ((*JOB, "adam_beta2"), -0.1, "a number n with 0"),
    ((*JOB, "weight_decay"), -1, "a number n with 0"),
    ((*JOB, "lr_scheduler_type"), "cosin", "did you mean 'cosine'?"),
    ((*JOB, "lr_scheduler_kwargs"), {"power": 2}, "unknown argument 'power'"),
    ((*JOB, "warmup_steps"), -1, "a whole number of steps from 0"),
    ((*JOB, "warmup_ratio"), 1.5, "a number n with 0"),
    ((*JOB, "max_grad_norm"), -1, "a number n with 0"),
    ((*JOB, "save_steps"), 0, "a whole number n with 1"),
    ((*JOB, "eval_strategy"), "steps", "needs 'eval_steps'"),
    ((*JOB, "eval_split"), 2.0, "0 < n < 1"),
    ((*JOB, "eval_split"), "test", "a file has no split 'test'"),
    ((*JOB, "eval_dataset"), {"path": "rows.jsonl"}, "it is called 'eval_data' here"),
    ((*JOB, "val_set_size"), 0.1, "it is called 'eval_split' here"),
    ((*JOB, "eval_data"), {"path": "none.jsonl"}, "the data file does not exist"),
    ((*JOB, "metric_for_best_model"), "loss", "needs 'eval_data' or 'eval_split'"),
    ((*JOB, "load_best_model_at_end"), True, "needs evaluations to compare"),
    ((*JOB, "early_stopping_patience"), 2, "needs evaluations to compare"),
    ((*JOB, "early_stopping_threshold"), 0.5, "needs 'early_stopping_patience'"),
    ((*JOB, "compute_metrics"), "accuracy", "MODULE:FUNCTION"),
    ((*JOB, "gradient_checkpointing"), True, "--max-row-tokens"),
    ((*JOB, "bf16"), True, "dtype: bfloat16 under 'base'"),
    ((*JOB, "fp16"), True, "dtype: float16 under 'base'"),
    ((*JOB, "output_dir"), "out", "train -o FOLDER"),
    ((*JOB, "logging_steps"), 1, "metrics.jsonl has every step"),
    ((*JOB, "deepspeed"), "zero2.json", "--plan fsdp"),
    ((*JOB, "load_in_4bit"), True, "write quantize: nf4 under 'base'"),
    ((*JOB, "resume_from_checkpoint"), True, "train --resume"),
    ((*JOB, "group_by_length"), True, "rows are packed"),
    ((*JOB, "train_on_inputs"), False, "completion_only_loss"),
    ((*JOB, "sample_packing"), True, "it is called 'packing' here"),
    ((*JOB, "beta"), 0.1, "'beta' needs method dpo, orpo or kto"),
    ((*JOB, "method"), "ppo", "one of sft, dpo, orpo"),
    ((*JOB, "method"), "dpo", "no column 'chosen'"),
    ((*JOB, "loss_type"), "sigmoid", "method says which loss"),
    ((*JOB, "packing"), "yes", "true or false"),
    ((*JOB, "assistant_only_loss"), True, "write completion_only_loss: true"),
    ((*JOB, "lora"), None, "give 'lora' or an 'adapter' to continue"),
    ((*JOB, "lora"), "r: 4", "a mapping"),
    ((*JOB, "lora", "r"), 0, "a whole number n with 1"),
    ((*JOB, "lora", "r"), "8", "a whole number"),
    ((*JOB, "lora", "rank"), 8, "it is called 'r' here"),
    ((*JOB, "lora", "alpha"), 8, "it is called 'lora_alpha' here"),
    ((*JOB, "lora", "dropout"), 0.1, "it is called 'lora_dropout' here"),
    ((*JOB, "lora", "lora_dropout"), 1.0, "a number n with 0"),
    ((*JOB, "lora", "lora_alpha"), 0, "a number n with 0"),
    ((*JOB, "lora", "target_module"), ["q_proj"], "did you mean 'target_modules'?"),
    ((*JOB, "lora", "target_modules"), [], "'target_modules' is empty"),
    ((*JOB, "lora", "target_modules"), 3, "text or a list of texts"),
    ((*JOB, "lora", "use_dora"), "true", "true or false"),
    ((*JOB, "lora", "bias"), "some", "one of none, all, lora_only"),
    ((*JOB, "lora", "init_lora_weights"), "loftq", "LoftQ rounds the base"),
    ((*JOB, "lora", "init_lora_weights"), "gausian", "did you mean 'gaussian'?"),
    ((*JOB, "lora", "loftq_config"), {"bits": 4}, "rounds the base to another"),
    ((*JOB, "lora", "task_type"), "SEQ_CLS", "CAUSAL_LM"),
    ((*JOB, "lora", "layers_pattern"), "layers", "needs 'layers_to_transform'"),
    ((*JOB, "lora", "layers_to_transform"), -1, "a layer number from 0"),
    ((*JOB, "adapter"), "none", "exclude each other"),
    ((*JOB, "data"), None, "wrong value of 'data'"),
    ((*JOB, "data"), "rows.jsonl", "a mapping"),
    ((*JOB, "data", "path"), "", "path"),
    ((*JOB, "data", "paht"), "x", "did you mean 'path'?"),
    ((*JOB, "data", "file"), "x", "it is called 'path' here"),
    ((*JOB, "data", "type"), "alpaca", "it is called 'format' here"),
    ((*JOB, "data", "format"), "alpacca", "did you mean 'alpaca'?"),
    ((*JOB, "data", "format"), "messages", "the columns are those of format: prompt-completion"),
    ((*JOB, "data", "format"), "preference", "method: dpo"),
    ((*JOB, "data", "columns"), {"prompt": "q"}, "no column 'q'"),
    ((*JOB, "data", "columns"), {"question": "q"}, "no format has a column"),
    ((*JOB, "data", "columns"), {"prompt": "a", "messages": "b"}, "name one format"),
    ((*JOB, "data", "loss_on"), "answers", "one of auto, completion, all"),
    ((*JOB, "data", "streaming"), "on", "true or false"),
    ((*JOB, "data", "skip_bad_rows"), 1, "true or false"),
    ((*JOB, "schedule"), {"gpus": 0}, "a whole number n with 1"),
    ((*JOB, "schedule"), {"max_slowdown": 0.5}, "a number n with 1"),
    ((*JOB, "schedule"), {"priority": 1}, "known keys"),
    ((*JOB, "base"), {"model": "m"}, "write it once, beside 'jobs'"),
    (("base",), None, "'base' is missing"),
    (("base", "config"), "nowhere", "does not exist"),
    (("base", "config"), "out-of", "does not exist"),
    (("base", "dtype"), "bf16", "did you mean 'bfloat16'?"),
    (("base", "dtype"), "int8", "one of float32"),
    (("base", "model_name_or_path"), "m", "it is called 'model' here"),
    (("base", "torch_dtype"), "float32", "it is called 'dtype' here"),
    (("base", "model"), "./nowhere", "does not exist"),
    (("base", "model"), "someone/base", "exclude each other"),
    (("base", "attention"), "flash", "one of auto, packed, batch"),
    (("base", "seed"), -1, "a whole number n with 0"),
    (("base", "trust_remote_code"), True, "--trust-remote-code"),
    (("adapter_dtype",), "float16", "one of float32, bfloat16"),
    (("adapter_compute",), "bf16", "one of base, float32"),
    (("defaults",), [], "'defaults' is no mapping"),
    (("default",), {}, "did you mean 'defaults'?"),
    (("learning_rate",), 1e-3, "it belongs into a job"),
    (("micro_batch_size",), 2, "it is called 'per_device_train_batch_size' here"),
    (("lora_r",), 2, "it is called 'r' here"),
    (("base_model",), "m", "it is called 'model' here"),
    (("jobs",), [], "'jobs' is no list"),
    (("jobs",), {"a": {}}, "'jobs' is no list"),
    (("jobs",), ["a"], "job 1 is no mapping"),
    (("jobs",), [JOBS["jobs"][0]] * 2, "the name 'a' is taken"),
    (
        ("jobs",),
        [JOBS["jobs"][0], {**JOBS["jobs"][0], "name": "A"}],
        "upper and lower case",
    ),
]  # fmt: skip


def _of_jobs() -> Iterator[Mistake]:
    for path, value, told in FIELDS:
        keys = ".".join(str(key) for key in path if key not in JOB)
        shown = json.dumps(value, default=str)[:40]
        yield Mistake(f"{keys}: {shown}", told, files={"jobs.yaml": _changed(path, value)})


TEXTS: list[tuple[str, bytes | None, str]] = [
    ("an empty job file", b"", "the job file is empty"),
    ("a job file that is not there", None, "cannot be read"),
    ("a list as a job file", b"- a\n", "the job file is no mapping"),
    ("a tab for indentation", b"base:\n\tmodel: m\n", "jobs.yaml:2"),
    ("an open bracket", b"base: {model: m\n", "is no YAML"),
    ("a key twice", b"base: {model: m}\nbase: {model: n}\n", "stands twice, first in line 1"),
    ("a tag that builds objects", b"base: !!python/object:os.system {}\n", "tag"),
    ("an alias inside what it names", b"base: &a [*a]\n", "an alias stands inside"),
    ("a job file in UTF-16", "base: {}".encode("utf-16"), "UTF-8"),
    ("a job file in Latin-1", "base: {model: größe}".encode("latin-1"), "not UTF-8"),
    ("half a character in a path", b'base: {config: "\\ud800"}\njobs: [{name: a}]\n', "ud800"),
    ("two documents", b"base: {}\n---\njobs: []\n", "jobs.yaml"),
    ("a job file of zero bytes", b"\x00" * 64, "jobs.yaml"),
    ("a very large job file", b"#" * (1 << 21), "the job file is too large"),
    ("a JSON lines file as a job file", ROW.encode() * 2, "jobs.yaml"),
]


def _of_yaml() -> Iterator[Mistake]:
    for name, content, told in TEXTS:
        yield Mistake(name, told, files={"jobs.yaml": content})


ROWS: list[tuple[str, str, bytes | None, str]] = [
    ("no data file", "rows.jsonl", None, "the data file does not exist"),
    ("an empty data file", "rows.jsonl", b"", "the data has no rows"),
    ("a row that is no JSON", "rows.jsonl", b"{'prompt': 1}\n", "column 2"),
    ("a row cut off", "rows.jsonl", ROW.encode() + b'{"prompt": \n', "rows.jsonl:2"),
    ("a row that is a list", "rows.jsonl", b"[1]\n", "the row is no object but list"),
    ("other column names", "rows.jsonl", b'{"question": "a", "answer": "b"}\n', "prompt: question"),
    ("no known column", "rows.jsonl", b'{"x": "a"}\n', "map the data's names under columns"),
    ("pairs without a method", "rows.jsonl", b'{"chosen": "a", "rejected": "b"}\n', "method: dpo"),
    ("a number for a prompt", "rows.jsonl", b'{"prompt": 1, "completion": "b"}\n', "holds int"),
    ("no completion", "rows.jsonl", b'{"prompt": "a", "completion": null}\n', "no value"),
    ("empty completions", "rows.jsonl", b'{"prompt": "a", "completion": ""}\n', "give completions"),
    ("two formats at once", "rows.jsonl", b'{"text": "a", "messages": []}\n', "set format"),
    ("rows in UTF-16", "rows.jsonl", ROW.encode("utf-16"), "iconv -f utf-16"),
    ("rows in Latin-1", "rows.jsonl", '{"text": "größe"}\n'.encode("latin-1"), "cp1252"),
    ("half a character", "rows.jsonl", b'{"text": "a\\ud800"}\n', "half a character"),
    ("no messages", "rows.jsonl", b'{"messages": []}\n', "at least one message"),
    ("messages as text", "rows.jsonl", b'{"messages": "hi"}\n', "no list"),
    (
        "a message without a role", "rows.jsonl",
        b'{"messages": [{"content": "a"}]}\n', "message 1 is no object with a role",
    ),
    (
        "a misspelt role", "rows.jsonl",
        b'{"messages": [{"role": "usr", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        "did you mean 'user'?",
    ),
    (
        "an image in a message", "rows.jsonl",
        b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', "image",
    ),
]  # fmt: skip
OTHER_FILES: list[tuple[str, str, bytes, str]] = [
    ("a spreadsheet", "rows.xlsx", b"PK", "files of type '.xlsx' are not read"),
    ("a short CSV row", "rows.csv", b"prompt,completion\na\n", "rows.csv:2"),
    ("a column twice", "rows.csv", b"text,text\na,b\n", "names the column 'text' twice"),
    ("an open quote", "rows.csv", b'text\n"a\n', "double a quote"),
    ("a CSV file in Latin-1", "rows.csv", "text\ngröße\n".encode("latin-1"), "iconv -f cp1252"),
    ("a CSV file with semicolons", "rows.csv", b"prompt;completion\na;b\n", "by semicolons"),
    ("a TSV file with commas", "rows.tsv", b"prompt,completion\na,b\n", "commas: name it .csv"),
    ("a CSV file without names", "rows.csv", b"", "the data has no rows"),
    ("one JSON object", "rows.json", b'{"text": "a"}', "[{...}, {...}]"),
    ("lines in .json", "rows.json", ROW.encode() * 2, "name it .jsonl"),
    ("no Parquet", "rows.parquet", b"no", "no Parquet"),
    ("a binary file", "rows.txt", b"\x00" * 99, "zero bytes"),
]


def _of_data() -> Iterator[Mistake]:
    for name, file, content, told in ROWS:
        loads = told in ("give completions", "did you mean 'user'?")
        yield Mistake(name, told, files={file: content}, loads=loads)
    for name, file, content, told in OTHER_FILES:
        files: dict[str, bytes | None] = {
            "jobs.yaml": _changed((*JOB, "data", "path"), file), file: content,
        }  # fmt: skip
        early = file.endswith((".xlsx", ".csv", ".tsv", ".txt"))
        yield Mistake(name, told, files=files, loads=not early)
    folder = _changed((*JOB, "data", "path"), "./base")
    yield Mistake("a folder as data", "the data is a folder", files={"jobs.yaml": folder})


COMMANDS: list[tuple[str, str]] = [
    ("trian jobs.yaml", "Did you mean 'train'?"),
    ("finetune jobs.yaml", "Did you mean 'train'?"),
    ("convert jobs.yaml", "Did you mean 'import'?"),
    ("import jobs.yaml", "it is a job file already"),
    ("import jobs.yaml --from trl", "dataset_name: the data is not named"),
    ("import rows.jsonl -o jobs.yaml", "would be overwritten"),
    ("train", "Missing argument"),
    ("train jobs.yaml", "Missing option"),
    ("train jobs.yaml -o base", "base"),
    ("train jobs.yaml -o out --resume", "out"),
    ("train jobs.yaml -o out --plan fdsp", "fsdp"),
    ("train jobs.yaml -o out --plan none.json", "there is no such plan"),
    ("train jobs.yaml -o out --plan jobs.yaml", "this file is no plan"),
    ("train jobs.yaml -o out --mesh pd=2", "pd"),
    ("train jobs.yaml -o out --mesh dp", "dp"),
    ("train jobs.yaml -o out --controller aimed", "did you mean 'aimd'?"),
    ("train jobs.yaml -o out --max-row-tokens 1", "max-row-tokens"),
    ("train jobs.yaml -o out --nano-batches 0", "nano-batches"),
    ("train jobs.yaml -o out --lr 1", "No such option"),
    ("train jobs.yaml -o out --device cude", "no device 'cude'"),
    ("train jobs.yaml -o out --gpus four", "--gpus is no number of GPUs"),
    ("train jobs.yaml -o out --load none.py", "no file of that name"),
    ("train jobs.yaml -o out --callback none.py:Tell", "no file none.py"),
    ("train jobs.yaml -o out --callback Tell", "no FILE.py:CLASS"),
    ("train jobs.yaml -o jobs.yaml/out", "jobs.yaml is a file"),
    ("generate base --prompt one", "there is no adapter in this folder"),
    ("serve -o jobs.yaml", "a file of that name"),
    ("serve -o base", "the output folder holds something already"),
    ("serve -o out --horizon soon", "such as 60s or 5m"),
    ("train base -o out", "no regular file"),
    ("verify none.yaml", "No such file"),
    ("data none.yaml", "No such file"),
    ("data jobs.yaml --rows -1", "rows"),
    ("data jobs.yaml --job none", "the job file has no job 'none'"),
    ("verify jobs.yaml --steps 0", "steps"),
    ("plan jobs.yaml", "Missing option"),
    ("plan jobs.yaml --gpus 0", "gpus"),
    ("plan jobs.yaml --gpus 12 --nodes 5", "--nodes may be"),
    ("plan jobs.yaml --gpus 2 --gpu h9000", "h200"),
    ("plan jobs.yaml --gpus 2 --gpu none.json", "none.json"),
    ("plan jobs.yaml --gpus 2 --gpu h200 -o jobs.yaml", "would be overwritten"),
    ("plan jobs.yaml --gpus 2 --export deepspeed", "metis or sailor"),
    ("run none -o out", "there is no folder of job files"),
    ("run jobs.yaml -o out --policy tlroa", "tlora"),
    ("run jobs.yaml -o out --policy megatron:backfil=true", "did you mean 'backfill'?"),
    ("run jobs.yaml -o out --horizon soon", "such as 60s or 5m"),
    ("run jobs.yaml -o out --profile none.json", "none.json"),
    ("simulate --trace none.csv --gpus 4 -o report", "leave --trace out"),
    ("merge none --job a -o merged", "none"),
    ("inspect none", "none"),
    ("opt none.tfx", "none.tfx"),
    ("compile none.yaml -o out", "No such file"),
]


def _of_commands() -> Iterator[Mistake]:
    for words, told in COMMANDS:
        yield Mistake(words, told, command=tuple(words.split()))


BASES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("base",), {"model": "someone/nothing"}, "the hub is not reached"),
    (("base",), {"config": "data-only"}, "does not exist"),
    ((*JOB, "lora", "target_modules"), ["query"], "query"),
    ((*JOB, "lora", "r"), 10**13, "does not fit into memory"),
    ((*JOB, "lora", "modules_to_save"), ["nothing"], "nothing"),
    ((*JOB, "lora", "layers_to_transform"), 99, "layers_to_transform: 99"),
]


def _of_bases() -> Iterator[Mistake]:
    for path, value, told in BASES:
        shown = json.dumps(value)
        files: dict[str, bytes | None] = {"jobs.yaml": _changed(path, value)}
        yield Mistake(f"{path[-1]}: {shown}", told, files=files, loads=path[0] == "jobs")


# Making them.


@contextlib.contextmanager
def folder_of(mistake: Mistake) -> Iterator[Path]:
    """A folder with all that a run needs, but for the mistake."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "examples" / "quickstart" / "base", folder / "base")
        files: dict[str, bytes | None] = {
            "jobs.yaml": yaml.safe_dump(JOBS).encode(), "rows.jsonl": ROW.encode() * 8,
        }  # fmt: skip
        for path, content in {**files, **mistake.files}.items():
            if content is not None:
                (folder / path).write_bytes(content)
        yield folder


def told_in_a_process(mistake: Mistake) -> tuple[int, str, float]:
    """Exit code, all that is said, and seconds of a processor, as a user has them."""
    with folder_of(mistake) as folder:
        started = _spent()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9"}
        environment.pop("HF_HUB_OFFLINE", None)
        ended = subprocess.run(
            [sys.executable, "-m", "tlora_fx", *mistake.command],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return ended.returncode, ended.stdout + ended.stderr, _spent() - started


def _spent() -> float:
    """Seconds of a processor, which do not depend on what else a machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def told_here(mistake: Mistake) -> tuple[int, str]:
    """Exit code and all that is said, in this process."""
    from tlora_fx.cli import main

    said = io.StringIO()
    out, err = contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)
    with folder_of(mistake) as folder, contextlib.chdir(folder), out, err:
        try:
            main(list(mistake.command))
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


def wrong(mistake: Mistake, code: int, said: str) -> str:
    """What is wrong with what a user is told; nothing where it is right."""
    flat = " ".join(said.replace("│", " ").split())
    if code not in (1, 2):
        return f"it exits with {code}"
    if "Traceback" in said:
        return "a traceback"
    return "" if mistake.told in flat else f"not told: {mistake.told}"


def main() -> None:
    """Print the table; exits with 1 where one is not told as it should be."""
    failed = 0
    typer.echo("| mistake | told | CPU seconds | |\n|---|---|---|---|")
    for mistake in mistakes():
        code, said, seconds = told_in_a_process(mistake)
        reason = wrong(mistake, code, said)
        slow = "slow" if seconds > 1 and not mistake.loads else ""
        failed += bool(reason)
        typer.echo(f"| {mistake.name} | {mistake.told} | {seconds:.2f} | {reason or slow} |")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

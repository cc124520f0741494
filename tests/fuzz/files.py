"""Every kind of file that is read: a good one, and what reads it.

A case is written into a folder of its own, then read there. Files whose content is checksummed
are also damaged beneath their checksums.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fuzz.mutations import altered, damaged
from tests.pipeline.graphs import small_graph
from tests.scheduler.toy import measured
from tlora_fx.config.base_files import require_base_files
from tlora_fx.config.job import BaseSpec, DataSpec, Job
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.hardware import Cluster
from tlora_fx.cost.load import Demand
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.graph_file import load_graphs, save_graphs
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.adapters.files import base_tensors, read_adapter
from tlora_fx.runtime.checkpoints.digests import base_digests
from tlora_fx.runtime.checkpoints.store import CheckpointStore, JobState
from tlora_fx.runtime.data.samples import load_job_data
from tlora_fx.runtime.data.tokenizer import load_tokenizer
from tlora_fx.runtime.run_folder import read_metrics
from tlora_fx.scheduler.executor import Committed, Finished
from tlora_fx.scheduler.history import History, rows_of_run
from tlora_fx.scheduler.policies import find_policy
from tlora_fx.scheduler.snapshot_file import Snapshot, load_history, load_snapshot, save_snapshot
from tlora_fx.scheduler.state import ActiveJob, Decision, Group, JobRequest, SchedulerState
from tlora_fx.scheduler.store import Ledger
from tlora_fx.simulator.traces import read_trace, write_own

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
#: Writes a case into an empty folder.
Write = Callable[[Path], None]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    good     writes a whole one
    cases    draws a case
    read     reads the folder of either
    """

    good: Write
    cases: st.SearchStrategy[Write]
    read: Callable[[Path], object]


def bytes_of(name: str, content: bytes) -> st.SearchStrategy[Write]:
    """Cases in which the bytes of one file are damaged."""
    return damaged(content).map(lambda changed: lambda folder: put(folder / name, changed))


def json_of(name: str, document: Any) -> st.SearchStrategy[Write]:
    """Cases in which values of a JSON document are others."""

    def write(changed: Any) -> Write:
        return lambda folder: put(folder / name, json.dumps(changed).encode())

    return altered(document).map(write)


def writes(name: str, content: bytes) -> Write:
    """Writes one file."""
    return lambda folder: put(folder / name, content)


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def beside(cases: st.SearchStrategy[Write], good: Write) -> st.SearchStrategy[Write]:
    """The same cases, in a folder that holds the other files whole."""

    def both(case: Write) -> Write:
        def write(folder: Path) -> None:
            good(folder)
            case(folder)

        return write

    return cases.map(both)


def jobs() -> Kind:
    """The quickstart's job file; its base and data are there."""
    content = (QUICKSTART / "jobs.yaml").read_bytes()

    def whole(folder: Path) -> None:
        for name in ("base", "data"):
            (folder / name).symlink_to(QUICKSTART / name)

    def write(changed: Any) -> Write:
        return lambda folder: put(
            folder / "jobs.yaml", yaml.safe_dump(changed).encode("utf-8", "surrogatepass")
        )

    documents = altered(yaml.safe_load(content)).map(write)
    cases = bytes_of("jobs.yaml", content) | documents

    def good(folder: Path) -> None:
        whole(folder)
        put(folder / "jobs.yaml", content)

    return Kind(good, beside(cases, whole), lambda folder: load_job_file(folder / "jobs.yaml"))


@cache
def tokenizer() -> Any:
    return load_tokenizer(BaseSpec(config=QUICKSTART / "base"))


def job_of(path: Path) -> Job:
    return Job(
        name="a",
        base=BaseSpec(config=QUICKSTART / "base"),
        lora={"r": 2},
        data=DataSpec(path=str(path)),
        max_length=64,
    )


def data() -> Kind:
    """Rows of prompts and messages, in JSON lines and as one list."""
    lines = [
        (QUICKSTART / "data" / name).read_bytes().splitlines()[:6]
        for name in ("records.jsonl", "small-talk.jsonl")
    ]
    rows = [[json.loads(line) for line in some] for some in lines]

    def as_lines(changed: Any) -> Write:
        listed = changed if isinstance(changed, list) else [changed]
        content = "\n".join(json.dumps(row) for row in listed)
        return lambda folder: put(folder / "data.jsonl", content.encode())

    cases = st.one_of(
        *(bytes_of("data.jsonl", b"\n".join(some)) for some in lines),
        *(altered(some).map(as_lines) for some in rows),
        *(json_of("data.json", some) for some in rows),
        bytes_of("data.json", json.dumps(rows[0]).encode()),
    )

    def read(folder: Path) -> object:
        [path] = folder.iterdir()
        return load_job_data(job_of(path), tokenizer())

    return Kind(writes("data.jsonl", b"\n".join(lines[0])), cases, read)


def columns() -> Kind:
    """Rows of several formats with optional columns, some of which are gone, moved or of others."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]
    beside = {"system": "s", "history": [["c", "d"]]}
    rows: list[list[dict[str, Any]]] = [
        [{"instruction": "a", "input": "b", "output": "c", **beside}, {"instruction": "a"}],
        [{"messages": chat, "tools": [], "loss_mask": [0, 1], **beside}, {"messages": chat}],
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
        [{"prompt": "a", "completion": "b", **beside}, {"prompt": chat, "completion": chat[1:]}],
        [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 0]}],
    ]

    def as_lines(changed: Any) -> Write:
        listed = changed if isinstance(changed, list) else [changed]
        return writes("data.jsonl", "\n".join(json.dumps(row) for row in listed).encode())

    cases = st.one_of(*(altered(some * 2).map(as_lines) for some in rows))
    good = as_lines(rows[4])
    return Kind(
        good, cases, lambda folder: load_job_data(job_of(folder / "data.jsonl"), tokenizer())
    )


def tables() -> Kind:
    """The same rows as tables and lines of text, plain and compressed."""
    import pyarrow as arrow

    plain = b'prompt,completion\n"a\nb",c\n"d ""e""",f\n'
    texts = {"data.csv": plain, "data.tsv": plain.replace(b",", b"\t"), "data.txt": b"a b\nc\n"}
    squeezed = {
        "data.csv.gz": gzip.compress(plain),
        "data.jsonl.gz": gzip.compress(b'{"text": "a"}\n{"text": "b"}'),
        "data.csv.zst": arrow.Codec("zstd").compress(plain, asbytes=True),
    }

    def read(folder: Path) -> object:
        [path] = folder.iterdir()
        return load_job_data(job_of(path), tokenizer())

    cases = [bytes_of(name, content) for name, content in {**texts, **squeezed}.items()]
    packed = damaged(plain).map(gzip.compress).map(lambda content: writes("data.csv.gz", content))
    return Kind(writes("data.csv", plain), st.one_of(*cases, packed), read)


def saved(scratch: Path) -> Kind:
    """A folder that `save_to_disk` wrote, of splits."""
    import datasets

    table = datasets.Dataset.from_list([{"text": "a b", "n": {"a": 1}}, {"text": "c", "n": {}}])
    datasets.DatasetDict({"train": table}).save_to_disk(str(scratch / "saved"))
    files = {
        str(each.relative_to(scratch / "saved")): each.read_bytes()
        for each in (scratch / "saved").rglob("*")
        if each.is_file()
    }

    def whole(folder: Path) -> None:
        for name, content in files.items():
            put(folder / name, content)

    documents = [
        json_of(name, json.loads(content))
        for name, content in files.items()
        if name.endswith(".json")
    ]
    cases = st.one_of(*(bytes_of(name, content) for name, content in files.items()), *documents)
    return Kind(
        whole, beside(cases, whole), lambda folder: load_job_data(job_of(folder), tokenizer())
    )


def parquet() -> Kind:
    """The same rows in columns."""
    import pyarrow as arrow
    import pyarrow.parquet

    lines = (QUICKSTART / "data" / "records.jsonl").read_text().splitlines()[:6]
    sink = arrow.BufferOutputStream()
    table = arrow.Table.from_pylist([json.loads(line) for line in lines])
    pyarrow.parquet.write_table(table, sink)
    content = sink.getvalue().to_pybytes()
    return Kind(
        writes("data.parquet", content),
        bytes_of("data.parquet", content),
        lambda folder: load_job_data(job_of(folder / "data.parquet"), tokenizer()),
    )


TRACES = {
    "acme": (
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,"
        "queue,gpu_time\n"
        "a,u1,1,8,64,Eval,COMPLETED,2023-03-31 23:59:00+08:00,2023-03-31 23:59:10+08:00,"
        "2023-04-01 00:00:10+08:00,60,10,480\n"
        "b,u1,0,0,4,Other,COMPLETED,2023-04-01 00:00:00+08:00,,,5,0,0\n"
    ),
    "pollux": "name,time,application,num_replicas,batch_size\ncifar10-0,12,cifar10,2,128\n"
    "bert-1,70,bert,1,12\n",
}


def requests() -> list[JobRequest]:
    demand = Demand(1, 2, 400.0, 8e4, 400.0, 7, 1e5, 3e7, 1e8, 448, 1e7)
    return [JobRequest(name, "base", demand, 1, 10, submitted=5.0) for name in "ab"]


def trace(scratch: Path) -> Kind:
    """Traces of several formats, our own among them."""
    own = []
    for name in ("own.jsonl", "own.csv"):
        write_own(scratch / name, requests(), {}, "synthetic, seed 0")
        own.append(bytes_of(name, (scratch / name).read_bytes()))
    lines = (scratch / "own.jsonl").read_text().splitlines()

    def as_lines(changed: Any) -> Write:
        listed = changed if isinstance(changed, list) else [changed]
        return lambda folder: put(
            folder / "own.jsonl", "\n".join(json.dumps(row) for row in listed).encode()
        )

    known = [bytes_of(f"{name}.csv", text.encode()) for name, text in TRACES.items()]
    rows = altered([json.loads(line) for line in lines]).map(as_lines)

    def read(folder: Path) -> object:
        [path] = folder.iterdir()
        return read_trace(path)

    good = writes("own.jsonl", (scratch / "own.jsonl").read_bytes())
    return Kind(good, st.one_of(*known, *own, rows), read)


def profile() -> Kind:
    """A measured profile of a small model."""
    content = (ROOT / "tests" / "scheduler" / "quickstart-cpu.json").read_bytes()
    cases = bytes_of("p.json", content) | json_of("p.json", json.loads(content))
    return Kind(writes("p.json", content), cases, lambda folder: Profile.load(folder / "p.json"))


def plan() -> Kind:
    """A plan for two processes."""
    made = Plan.model_validate({"planner": "replicated", "mesh": {"dp": 2}, "nano_batches": 2})
    content = made.model_dump_json().encode()
    cases = bytes_of("plan.json", content) | json_of("plan.json", json.loads(content))
    good = writes("plan.json", content)
    return Kind(good, cases, lambda folder: Plan.load(folder / "plan.json"))


def graph(scratch: Path) -> Kind:
    """A job's graph: its bytes, and words of its text in other places."""
    save_graphs(small_graph(with_ids=True), scratch / "graph.tfx")
    content = (scratch / "graph.tfx").read_bytes()
    words = re.split(r"(\W)", content.decode())
    places = st.tuples(*[st.integers(0, len(words) - 1)] * 2)

    def moved(pair: tuple[int, int]) -> Write:
        put_there = [*words]
        put_there[pair[0]] = words[pair[1]]
        return writes("graph.tfx", "".join(put_there).encode())

    cases = st.one_of(bytes_of("graph.tfx", content), places.map(moved))
    return Kind(writes("graph.tfx", content), cases, load_graphs)


def ledger(scratch: Path) -> Kind:
    """A run's ledger: its bytes, and values in its tables."""
    path = scratch / "ledger.sqlite"
    made = Ledger(path)
    for each in requests():
        made.submit(each, {"name": each.name})
    made.decide(5.0, Decision((Group(("a", "b"), 1, (0,)),), ()))
    made.launch(Group(("a", "b"), 1, (0,)), 1, None, 5.0)
    made.record(Committed(9.0, 1, {"a": 2.0, "b": 3.0}, "/gone"))
    made.record(Finished(9.5, 1, "b", 10))
    made.note_file("/jobs/a.yaml", "00", "taken")
    made.close()
    content = path.read_bytes()
    columns = [
        (table, row[1])
        for table in ("facts", "jobs", "epochs", "decisions", "files")
        for row in sqlite3.connect(path).execute(f"PRAGMA table_info({table})")
    ]

    @st.composite
    def values(draw: st.DrawFn) -> Write:
        table, column = draw(st.sampled_from(columns))
        plain = st.sampled_from(
            [None, "", "x", -1, 0, 10**18, 1e308, b"\xff", "[]", "{}", "[1,", "NaN"]
        )
        text = altered(json.loads(_text_of(path, table, column))).map(json.dumps)
        value = draw(plain | text)

        def write(folder: Path) -> None:
            put(folder / "ledger.sqlite", content)
            with closing(sqlite3.connect(folder / "ledger.sqlite")) as base:
                try:
                    base.execute(f"UPDATE {table} SET {column} = ?", (value,))
                    base.commit()
                except (sqlite3.Error, UnicodeEncodeError):
                    pass

        return write

    def read(folder: Path) -> object:
        past = rows_of_run(folder), History.of_run(folder)
        there = Ledger(folder / "ledger.sqlite")
        try:
            return past, there.jobs(), there.epochs(), there.decisions()
        finally:
            there.close()

    cases = bytes_of("ledger.sqlite", content) | values()
    return Kind(writes("ledger.sqlite", content), cases, read)


def _text_of(path: Path, table: str, column: str) -> str:
    """What a column of a table holds, as JSON."""
    with closing(sqlite3.connect(path)) as base:
        [value] = base.execute(f"SELECT {column} FROM {table}").fetchone()
    try:
        json.loads(value)
    except (TypeError, ValueError):
        return json.dumps(value)
    return str(value)


def state(scratch: Path) -> Kind:
    """A snapshot of the scheduler, with its history."""
    cluster = Cluster(4, 4, 1, "h200")
    estimator = measured(cluster, "llama-3-8b")
    demand = requests()[0].demand
    solo = estimator.solo("llama-3-8b", demand, 1)
    active = {
        name: ActiveJob(JobRequest(name, "llama-3-8b", demand, 1, 100), solo, steps_done=1.0)
        for name in "ab"
    }
    group = Group(("a", "b"), 2, (0, 1), 0.5, 3.0)
    there = SchedulerState(60.0, cluster, estimator, active, (group,), 30.0, 5.0)
    path = scratch / "state.json"
    save_snapshot(path, Snapshot(there, find_policy("tlora")))
    content = path.read_bytes()

    def read(folder: Path) -> object:
        return load_snapshot(folder / "state.json"), load_history(folder / "state.json")

    cases = bytes_of("state.json", content) | json_of("state.json", json.loads(content))
    return Kind(writes("state.json", content), cases, read)


def checkpoint(scratch: Path) -> Kind:
    """A checkpoint: its files, its list of files, and its counters beneath their checksum."""
    store = CheckpointStore(scratch / "run")
    tensors = {"a.weight": torch.zeros(2, 3)}
    path = store.save(
        3, {"a": JobState(tensors, {"exp_avg/a.weight": torch.zeros(2, 3)})}, {"rounds": 3}
    )
    files = {
        str(each.relative_to(scratch / "run")): each.read_bytes()
        for each in (scratch / "run").rglob("*")
        if each.is_file()
    }
    inner = f"checkpoints/{path.name}"

    def whole(folder: Path) -> None:
        for name, content in files.items():
            put(folder / name, content)

    def resummed(name: str, content: bytes) -> Write:
        def write(folder: Path) -> None:
            put(folder / inner / name, content)
            manifest = json.loads(files[f"{inner}/manifest.json"])
            manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
            put(folder / inner / "manifest.json", json.dumps(manifest).encode())

        return write

    counters = json.loads(files[f"{inner}/state.json"])
    tensors_name = "jobs/a/adapter_model.safetensors"
    cases = st.one_of(
        *(bytes_of(name, content) for name, content in files.items()),
        json_of(f"{inner}/manifest.json", json.loads(files[f"{inner}/manifest.json"])),
        altered(counters).map(lambda changed: resummed("state.json", json.dumps(changed).encode())),
        damaged(files[f"{inner}/{tensors_name}"]).map(
            lambda changed: resummed(tensors_name, changed)
        ),
    )

    def read(folder: Path) -> object:
        store = CheckpointStore(folder)
        return store.counters(), store.run(), store.load()

    return Kind(whole, beside(cases, whole), read)


def adapter(scratch: Path) -> Kind:
    """A PEFT folder."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    tensors = safetensors.torch.save({"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 8)})

    def whole(folder: Path) -> None:
        put(folder / "adapter_config.json", json.dumps(config).encode())
        put(folder / "adapter_model.safetensors", tensors)

    cases = st.one_of(
        bytes_of("adapter_config.json", json.dumps(config).encode()),
        json_of("adapter_config.json", config),
        bytes_of("adapter_model.safetensors", tensors),
    )
    return Kind(whole, beside(cases, whole), read_adapter)


def weights(scratch: Path) -> Kind:
    """A base's weights, of which only digests are made here, and their index."""
    tensors = safetensors.torch.save({"a": torch.zeros(4, 8), "b": torch.ones(3)})
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}

    def whole(folder: Path) -> None:
        put(folder / "model-1.safetensors", tensors)
        put(folder / "model.safetensors.index.json", json.dumps(index).encode())

    cases = st.one_of(
        bytes_of("model-1.safetensors", tensors),
        json_of("model.safetensors.index.json", index),
        bytes_of("model.safetensors.index.json", json.dumps(index).encode()),
    )
    return Kind(
        whole,
        beside(cases, whole),
        lambda folder: base_digests(BaseSpec(model=str(folder))),
    )


def cut_of(name: str, content: bytes) -> st.SearchStrategy[Write]:
    """Cases in which a file ends early."""
    lengths = st.integers(0, len(content) - 1)
    return lengths.map(lambda length: writes(name, content[:length]))


def flipped_of(name: str, content: bytes, first: int = 600) -> st.SearchStrategy[Write]:
    """Cases in which one bit of a file's first bytes is another."""

    def write(bit: int) -> Write:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        return writes(name, bytes(changed))

    return st.integers(0, 8 * min(len(content), first) - 1).map(write)


def header_of(name: str, content: bytes) -> st.SearchStrategy[Write]:
    """Cases in which a safetensors file has another header, whose length it gives rightly."""
    end = 8 + int.from_bytes(content[:8], "little")

    def write(changed: Any) -> Write:
        header = json.dumps(changed).encode()
        return writes(name, len(header).to_bytes(8, "little") + header + content[end:])

    return altered(json.loads(content[8:end])).map(write)


def base(scratch: Path) -> Kind:
    """A base's folder: config, tokenizer, and weights in several files with an index."""
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "base"))
    made.save_pretrained(scratch, max_shard_size="600KB")
    shutil.copytree(QUICKSTART / "base", scratch, dirs_exist_ok=True)
    files = {path.name: path.read_bytes() for path in sorted(scratch.iterdir())}
    map_name = "model.safetensors.index.json"
    index = json.loads(files[map_name])
    places = ["../other.safetensors", "/etc/passwd", "none.safetensors", "config.json", "", ".", 7]

    def whole(folder: Path) -> None:
        for name, content in files.items():
            put(folder / name, content)

    def renamed(name: object) -> Write:
        named = dict.fromkeys(index["weight_map"], name)
        return writes(map_name, json.dumps({**index, "weight_map": named}).encode())

    each = st.sampled_from(sorted(files.items()))
    shards = [item for item in sorted(files.items()) if item[0].endswith(".safetensors")]
    documents = [(n, json.loads(c)) for n, c in sorted(files.items()) if n.endswith(".json")]
    cases = st.one_of(
        each.map(lambda item: lambda folder: (folder / item[0]).unlink()),
        *(each.flatmap(lambda item, of=of: of(*item)) for of in (cut_of, flipped_of, bytes_of)),
        st.sampled_from(shards).flatmap(lambda item: header_of(*item)),
        st.sampled_from(documents).flatmap(lambda item: json_of(*item)),
        st.sampled_from(places).map(renamed),
    )
    return Kind(whole, beside(cases, whole), read_base)


def read_base(folder: Path) -> object:
    """All that a run reads of a base, file by file, then what it asks of them at its start."""
    spec = BaseSpec(model=str(folder))
    built = load_backbone(spec)
    content = base_tensors(built), load_tokenizer(spec), base_digests(spec)
    require_base_files(spec)
    return content


def metrics() -> Kind:
    """A job's metrics."""
    row = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 5}
    content = b"".join(json.dumps(row | {"step": step}).encode() + b"\n" for step in range(1, 4))
    cases = bytes_of("metrics.jsonl", content)
    good = writes("metrics.jsonl", content)
    return Kind(good, cases, lambda folder: read_metrics(folder / "metrics.jsonl"))


NAMES = (
    "adapter", "base", "checkpoint", "columns", "data", "graph", "job", "ledger", "metrics",
    "parquet", "plan", "profile", "saved", "state", "tables", "trace", "weights",
)  # fmt: skip


def kind_of(name: str, scratch: Path) -> Kind:
    """A kind by its name; `scratch` is an empty folder for its good files."""
    plain = {
        "job": jobs, "data": data, "parquet": parquet, "profile": profile, "plan": plan,
        "metrics": metrics, "columns": columns, "tables": tables,
    }  # fmt: skip
    if name in plain:
        return plain[name]()
    made: dict[str, Callable[[Path], Kind]] = {
        "trace": trace, "saved": saved, "graph": graph, "ledger": ledger, "state": state,
        "checkpoint": checkpoint, "adapter": adapter, "weights": weights,
        "base": base,
    }  # fmt: skip
    return made[name](scratch)


def emptied(folder: Path) -> Iterator[Path]:
    """An empty folder for each case."""
    number = 0
    while True:
        shutil.rmtree(folder / str(number - 1), ignore_errors=True)
        (folder / str(number)).mkdir()
        yield folder / str(number)
        number += 1

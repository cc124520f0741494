"""What is told before torch is imported is what is told after it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.cost.plan import MeshShape
from tlora_fx.errors import (
    DataFileError,
    DumpNotWritable,
    JobsDiffer,
    MalformedRowError,
    MeshDoesNotFit,
    NoPlanFits,
    ReportNotWritable,
    RunFolderError,
)
from tlora_fx.host.paths import why_unwritable
from tlora_fx.inspect import dump
from tlora_fx.passes.fuse_backbone import FuseBackbone
from tlora_fx.planners.protocol import _own_planners
from tlora_fx.runtime import controllers, run_folder
from tlora_fx.runtime.launching import early_checks
from tlora_fx.runtime.run_folder import RunFolder, require_begun, require_free, require_new
from tlora_fx.simulator.report import require_folder

ROOT = Path(__file__).parents[2]
JOBS = """
base: {config: base, tokenizer: base}
defaults: {lora: {}, max_steps: 1}
jobs:
  - {name: %s, data: {path: data.jsonl%s}}
"""
#: Name and data of the job, further words, and what is told.
MISTAKES = {
    "a name that the run needs": ("checkpoints", "", [], "a job cannot be called"),
    "names of one folder": (
        "a, data: {path: data.jsonl}}\n  - {name: A",
        "",
        [],
        "upper and lower",
    ),
    "a file that is not there": ("a", "x", [], "files of type '.jsonlx' are not read"),
    "a missing data file": ("a", "/../no.jsonl", [], "the data file does not exist"),
    "a job file that is not there": ("", "", ["other.yaml"], "cannot be read"),
    "broken YAML": ("{", "", [], "is no YAML"),
    "a misspelt key": ("a, lerning_rate: 1", "", [], "did you mean 'learning_rate'?"),
    "a misspelt plan": ("a", "", ["--plan", "fdsp"], "nearest  fsdp"),
    "a missing plan": ("a", "", ["--plan", "no.json"], "there is no such plan"),
    "a file that is no plan": ("a", "", ["--plan", "jobs.yaml"], "this file is no plan"),
    "a misspelt controller": ("a", "", ["--controller", "aimed"], "did you mean 'aimd'?"),
    "a mesh of an unknown axis": ("a", "", ["--mesh", "pd=2"], "pd"),
    "a mesh of other processes": ("a", "", ["--mesh", "dp=2"], "needs 2 processes"),
    "a plan for several processes": (
        "a",
        "",
        ["--plan", "single", "--gpus", "2", "--device", "cpu"],
        "the plan 'single' needs 1 process",
    ),
    "GPUs that are not there": ("a", "", ["--gpus", "99"], "this machine has no GPU"),
    "a switch of plans without a checkpoint": ("a", "", ["--replan"], "switched at a checkpoint"),
}
#: What else may stand in a job file in place of its base's config.json, and what is told.
BASES = {
    "an encoder-decoder": ({"is_encoder_decoder": True, "model_type": "t5"}, "encoder-decoder"),
    "a classifier": ({"architectures": ["BertForSequenceClassification"]}, "classifier"),
}
PROGRAM = """
import contextlib, io, json, os, sys
from pathlib import Path
from tlora_fx.cli import main
told = {}
for name, (text, words) in json.loads(sys.argv[1]).items():
    Path("jobs.yaml").write_text(text)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(["train", *words, "-o", "out"])
        except SystemExit as end:
            told[name] = [end.code, said.getvalue(), Path("out").exists()]
print(json.dumps([told, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each mistake comes to in an interpreter that has imported nothing yet."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text("{}")
    (folder / "data.jsonl").write_text('{"text": "a"}\n')
    (folder / "data.jsonlx").write_text("")
    cases = {}
    for name, (config, _) in BASES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        text = (JOBS % ("a", "")).replace("config: base", f"config: {name}")
        cases[name] = (text, ["jobs.yaml"])
    for name, (job, data, words, _) in MISTAKES.items():
        file = [] if words[:1] == ["other.yaml"] else ["jobs.yaml"]
        cases[name] = (JOBS % (job, data), [*file, *words])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", [*MISTAKES, *BASES])
def test_a_mistake_is_told_in_our_words(told, name):
    """Exit code 1, and nothing is left behind."""
    code, said, left = told[0][name]

    assert (code, left) == (1, False), said
    assert said.startswith("error[T")
    assert {**MISTAKES, **BASES}[name][-1] in said


def test_none_of_them_has_imported_torch(told):
    """All were told by one interpreter."""
    assert told[1] is False


def test_the_names_are_those_of_the_modules():
    """Which cannot be imported without torch."""
    assert set(early_checks.PLANNERS) == set(_own_planners())
    assert list(early_checks.CONTROLLERS) == list(controllers.CONTROLLERS)
    assert FuseBackbone().max_jobs == early_checks.MAX_JOBS


def test_a_job_that_starts_says_so_in_a_folder_that_is_still_new(tmp_path):
    """Until a step is done the same command may be given again."""
    folder = RunFolder(tmp_path / "run")
    folder.announce(["a"])
    said = json.loads((tmp_path / "run/a/status.json").read_text())
    require_new(folder.path)

    assert said.items() >= {"status": "starting", "step": 0}.items()


def test_a_job_is_restated_where_something_was_said_of_it(tmp_path):
    """The rest stays; neither a folder that is gone comes back, nor is damage written over."""
    folder = RunFolder(tmp_path / "run")
    folder.write_status("a", {"status": "running", "step": 3, "steps": 9})
    folder.write_status("b", {"status": "running", "step": 3})
    (tmp_path / "run/b/status.json").write_text("{")
    for name in ("a", "b", "gone"):
        folder.restate(name, "stopped")

    said = json.loads((tmp_path / "run/a/status.json").read_text())
    assert said.items() >= {"status": "stopped", "step": 3, "steps": 9}.items()
    assert (tmp_path / "run/b/status.json").read_text() == "{"
    assert not (tmp_path / "run/gone").exists()


def test_a_run_that_is_refused_leaves_nothing_but_what_has_begun(tmp_path):
    """Of two jobs one has done steps."""
    folder = RunFolder(tmp_path / "run")
    folder.announce(["a", "b"])
    folder.write_status("b", {"status": "done", "step": 3})
    folder.withdraw(["a", "b"])
    other = RunFolder(tmp_path / "other")
    other.announce(["a"])
    other.withdraw(["a"])

    assert [path.name for path in folder.path.iterdir()] == ["b"]
    assert not other.path.exists()


def test_a_folder_with_more_than_a_status_is_in_use(tmp_path):
    """Whatever the status says."""
    RunFolder(tmp_path).announce(["a"])
    (tmp_path / "a" / "metrics.jsonl").write_text("")

    with pytest.raises(RunFolderError, match="holds something already"):
        require_new(tmp_path)


def test_a_folder_that_is_announced_belongs_to_its_user_alone(tmp_path):
    """As one that a trainer makes."""
    RunFolder(tmp_path / "run").announce(["a"])

    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_without_a_step_is_told_from_an_empty_one(tmp_path, begun):
    """A run that was interrupted while it compiled leaves what its jobs were."""
    if begun:
        (tmp_path / "run" / "job").mkdir(parents=True)
        (tmp_path / "run" / "job" / "status.json").write_text("{}")
    else:
        (tmp_path / "run").mkdir()

    with pytest.raises(RunFolderError, match="there is no run") as caught:
        require_begun(tmp_path / "run")
    assert ("a run that came to no step" if begun else "an empty folder") in str(caught.value)


def test_a_folder_that_another_process_uses_is_told_at_once(tmp_path):
    """While it is held, and no longer; one that is not there is free, and stays so."""
    folder = tmp_path / "run"
    require_free(folder)
    assert not folder.exists()
    with RunFolder(folder).held(resume=False), pytest.raises(RunFolderError, match="another"):
        require_free(folder)
    require_free(folder)


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path, monkeypatch, begun):
    """Also where it would be made; whoever runs the tests may write everywhere."""
    monkeypatch.setattr(run_folder.os, "access", lambda path, mode: path != tmp_path)
    (tmp_path / "run.json").touch() if begun else None
    require, folder = (require_begun, tmp_path) if begun else (require_new, tmp_path / "a" / "b")

    with pytest.raises(RunFolderError, match="cannot be written"):
        require(folder)


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder that may not be entered; whoever runs the tests may enter every folder."""
    folder = tmp_path / "closed"
    folder.mkdir()
    access, stat_of = os.access, os.stat

    def refuse(path, *given, **more):
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat_of(path, *given, **more)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
    return folder


@pytest.mark.parametrize("require", [require_new, require_begun])
def test_a_folder_below_one_that_may_not_be_entered_cannot_be_written(closed, require):
    """Whether it is there is not known."""
    with pytest.raises(RunFolderError, match="cannot be written"):
        require(closed / "a" / "b")


def dump_to(folder):
    """What `compile -o` does with its folder."""
    run_folder.require_no_run(folder)
    dump._write(folder, {"report.txt": ""})


@pytest.mark.parametrize(
    ("look", "told"),
    [(dump_to, DumpNotWritable), (require_folder, ReportNotWritable)],
    ids=["compile", "simulate"],
)
def test_files_are_not_written_below_a_folder_that_may_not_be_entered(
    closed, monkeypatch, look, told
):
    """Whether files would be overwritten is not known; the folder cannot be made either way."""

    def refuse(path, *given, **more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(told, match="cannot be written"):
        look(closed / "a" / "b")


def test_a_cache_below_a_folder_that_may_not_be_entered_cannot_be_written(closed):
    """The reason names the folder that is in the way."""
    assert why_unwritable(closed / "a" / "cache").startswith(f"{closed} may not be written to")


def test_a_folder_that_no_file_system_makes_is_not_said_to_be_in_use(tmp_path, monkeypatch):
    """Such as one below /proc, where nothing can be made and nothing says why."""

    def refuse(path, *given, **more):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(RunFolderError, match="cannot be written"),
        RunFolder(tmp_path / "run").held(resume=True),
    ):
        pass


def test_who_looks_whether_a_folder_is_free_keeps_nobody_out(tmp_path, monkeypatch):
    """It holds the lock for moments, and whoever wants the folder tries again."""
    (tmp_path / ".lock").touch()
    looking = (tmp_path / ".lock").open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: looking.close())

    with RunFolder(tmp_path).held(resume=False):
        assert looking.closed


ROWS = {
    '{"prompt": "a \\ud800", "completion": "b"}': r"half a character, \ud800 at 3",
    '{"prompt": 1, "completion": "b"}': "the column 'prompt' holds int, no text",
    '{"prompt": "a", "completion": null}': "no value in the column 'completion'",
    '{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}': "text that is no JSON",
    '{"messages": [{"role": "user", "content": "\\udfff"}]}': r"half a character, \udfff at 1",
    '{"messages": [{"content": "a"}]}': "message 1 is no object with a role",
    '{"instruction": "a", "input": [], "output": 3}': "the column 'output' holds int",
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("skips", [False, True])
def test_a_row_that_no_tokenizer_can_read_is_told_by_its_line(tmp_path, row, skips):
    """Also where it is not the first one, unless such rows are skipped."""
    keys = ", ".join(f'"{key}": "a"' for key in json.loads(row))
    good = "{" + keys.replace('"messages": "a"', '"messages": [{"role": "user", "content": "a"}]')
    (tmp_path / "rows.jsonl").write_text(f"{good}}}\n{row}\n")
    data = {"path": str(tmp_path / "rows.jsonl"), "skip_bad_rows": skips}
    jobs = [Job(name="a", base=BaseSpec(model="m"), lora={}, data=data)]
    if skips:
        early_checks.require_data(jobs)
        return

    with pytest.raises(MalformedRowError) as caught:
        early_checks.require_data(jobs)
    assert f"{tmp_path}/rows.jsonl:2" in str(caught.value)
    assert ROWS[row] in str(caught.value)


@pytest.mark.parametrize("streams", [False, True])
def test_rows_that_no_step_reads_are_not_judged(tmp_path, streams):
    """Of a stream, as training leaves them unread; of other data every row is read."""
    good, bad = '{"prompt": "a", "completion": "b"}\n', '{"prompt": 1, "completion": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(good * 6 + bad)
    data = {"path": str(tmp_path / "rows.jsonl"), "streaming": streams}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    job = Job(name="a", base=BaseSpec(model="m"), lora={}, data=data, max_steps=3, **sizes)
    if streams:
        early_checks.require_data([job])
        job = job.model_copy(update={"max_steps": 4})

    with pytest.raises(MalformedRowError, match=r"rows\.jsonl:7"):
        early_checks.require_data([job])


def test_all_absent_data_files_are_told_at_once(tmp_path):
    """Each once, with its jobs; a file that is there is none of them."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    names = {"a": "trian.jsonl", "b": "train.jsonl", "c": "none.xml", "d": "trian.jsonl"}
    jobs = [
        Job(name=name, base=BaseSpec(model="m"), lora={}, data={"path": str(tmp_path / path)})
        for name, path in names.items()
    ]

    with pytest.raises(DataFileError, match="2 data files cannot be used") as caught:
        early_checks.require_data(jobs)
    [first, second] = caught.value.facts["mistakes"].splitlines()
    assert first.startswith(f"jobs a, d: the data file does not exist: {tmp_path}/trian.jsonl; ")
    assert first.endswith("did you mean 'train.jsonl'?")
    assert second.startswith(f"job c: the data file does not exist: {tmp_path}/none.xml")


def test_one_absent_data_file_is_told_as_it_is(tmp_path):
    """Also where several jobs name it."""
    data = {"path": str(tmp_path / "none.jsonl")}
    jobs = [Job(name=name, base=BaseSpec(model="m"), lora={}, data=data) for name in "ab"]

    with pytest.raises(DataFileError, match="the data file does not exist") as caught:
        early_checks.require_data(jobs)
    assert caught.value.facts == {"path": data["path"], "job": "a"}


def test_messages_as_text_behind_a_system_are_read_as_training_reads_them(tmp_path):
    """A prompt of messages says that its completions are messages, too."""
    [chosen, rejected] = [json.dumps([{"role": "assistant", "content": own}]) for own in "bc"]
    prompt = [{"role": "user", "content": "a"}]
    row = {"system": "s", "prompt": prompt, "chosen": chosen, "rejected": rejected}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
    data = {"path": str(tmp_path / "rows.jsonl")}

    early_checks.require_data(
        [Job(name="a", base=BaseSpec(model="m"), lora={}, data=data, method="dpo")]
    )


@pytest.mark.parametrize("count", [64, 65])
def test_more_jobs_than_one_model_holds_are_told_at_once(count):
    """With what trains so many."""
    jobs = [None] * count
    if count == 64:
        early_checks.require_one_model(jobs)
        return
    with pytest.raises(JobsDiffer, match="tlora-fx run"):
        early_checks.require_one_model(jobs)


def base_with(folder: Path, **config: object) -> list[Job]:
    """A job on a base of which there is a config.json alone, or a file of weights too."""
    folder.mkdir(exist_ok=True)
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
             "hidden_size": 64, "intermediate_size": 96, **config}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    base = BaseSpec(model=str(folder))
    return [Job(name="one", base=base, lora={}, data={"path": "unused.jsonl"})]


@pytest.mark.parametrize(
    ("config", "mesh", "told"),
    [
        ({}, MeshShape(pp=4), None),
        ({}, MeshShape(pp=5), "pp=5 stages need a layer each, and the model has 4"),
        ({}, MeshShape(tp=2), None),
        ({}, MeshShape(tp=4), "2 key-value heads do not divide by tp=4"),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 3}}, MeshShape(pp=2),
         "the model has 1"),
        ({"num_attention_heads": None}, MeshShape(tp=3), None),
        ({}, None, None),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide_the_base_is_refused(
    tmp_path: Path, config: dict[str, object], mesh: MeshShape | None, told: str | None
) -> None:
    """By config.json, with the meshes that do; what it does not say is checked later."""
    jobs = base_with(tmp_path, **config)
    if told is None:
        early_checks.require_cuts(jobs, mesh)
        return
    with pytest.raises(MeshDoesNotFit, match=told):
        early_checks.require_cuts(jobs, mesh)


@pytest.mark.parametrize(
    ("plan", "processes", "on_cpu", "fits"),
    [
        (None, 1, False, False),
        (None, 4, False, True),
        ("replicated", 4, False, False),
        ("fsdp", 2, False, True),
        ("fsdp", 4, True, True),
        ("replicated", 4, True, False),
    ],
)
def test_a_base_that_is_larger_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch, plan: str | None, processes: int, on_cpu: bool, fits: bool
) -> None:
    """Each GPU has a memory of its own, all processes on a CPU have one."""
    jobs = base_with(tmp_path)
    weights = {"a": torch.zeros(100, 10), "b": torch.zeros(24, dtype=torch.float64)}
    save_file(weights, tmp_path / "model.safetensors")
    # In bfloat16, in which the base is loaded.
    assert early_checks.base_bytes(jobs[0].base) == 2 * 1024
    monkeypatch.setattr(early_checks, "largest_gpu_bytes", lambda: 1024)
    monkeypatch.setattr(early_checks, "total_bytes", lambda: 4096)
    if fits:
        early_checks.require_base_fits(jobs, plan, processes, on_cpu=on_cpu)
        return
    with pytest.raises(NoPlanFits, match="weights of the base do not fit"):
        early_checks.require_base_fits(jobs, plan, processes, on_cpu=on_cpu)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\x10" + b"\x00" * 7 + b"[1, 2, 3]       "])
def test_a_file_of_weights_that_cannot_be_read_is_left_to_its_reader(
    tmp_path: Path, content: bytes
) -> None:
    """Nothing is known of its size."""
    jobs = base_with(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)

    assert early_checks.base_bytes(jobs[0].base) is None

"""Job files: defaults, paths, and mistakes with their lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tlora_fx.config.job_file import JobFile, load_job_file
from tlora_fx.errors import JobFileError, JobFileMissingError, RemoteCodeRefused

RIGHT = """\
base:
  model: org/model
  dtype: float32
adapter_compute: float32
defaults:
  learning_rate: 2e-4
  lora: {r: 8, target_modules: [q_proj]}
  data: {path: train.jsonl, columns: {prompt: question, completion: answer}}
jobs:
  - name: first
  - name: second
    lora: {r: 16}
    data: {path: org/data, split: test}
    learning_rate: 1e-3
"""


def load(folder: Path, text: str) -> JobFile:
    """Load a job file of this text."""
    path = folder / "jobs.yaml"
    path.write_text(text)
    return load_job_file(path)


def mistakes(folder: Path, text: str) -> str:
    """What is said of a job file, without the folder's name."""
    with pytest.raises(JobFileError) as caught:
        load(folder, text)
    return str(caught.value).replace(str(folder), "")


def test_defaults_lie_under_each_job(tmp_path: Path) -> None:
    """Nested mappings are merged, and a job's own value wins."""
    first, second = load(tmp_path, RIGHT).jobs

    assert first.lora == {"r": 8, "target_modules": ["q_proj"]}
    assert second.lora == {"r": 16, "target_modules": ["q_proj"]}
    assert (first.learning_rate, second.learning_rate) == (2e-4, 1e-3)
    assert second.data.columns == {"prompt": "question", "completion": "answer"}


def test_all_jobs_share_what_stands_beside_them(tmp_path: Path) -> None:
    """The base and the precision of adapters are those of the file."""
    loaded = load(tmp_path, RIGHT)

    assert all(job.base == loaded.base for job in loaded.jobs)
    assert {job.adapter_compute for job in loaded.jobs} == {"float32"}


def test_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are found from anywhere; what is no path stays a hub id."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "jobs.yaml").write_text(RIGHT.replace("model: org/model", "config: base"))
    monkeypatch.chdir(tmp_path.parent)
    loaded = load_job_file(Path(tmp_path.name) / "jobs.yaml")
    monkeypatch.chdir("/")

    assert loaded.base.config is not None
    assert loaded.base.config.samefile(tmp_path / "base")
    assert Path(loaded.jobs[0].data.path) == tmp_path / "train.jsonl"
    assert loaded.jobs[1].data.path == "org/data"


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path) -> None:
    """A model that lies beside the job file is that model."""
    (tmp_path / "org" / "model").mkdir(parents=True)

    assert load(tmp_path, RIGHT).base.model == str(tmp_path / "org" / "model")


def test_a_choice_of_a_job_replaces_that_of_the_defaults(tmp_path: Path) -> None:
    """Steps instead of the defaults' epochs, an adapter instead of the defaults' lora."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3}')
    (tmp_path / "old" / "adapter_model.safetensors").touch()
    text = RIGHT.replace("defaults:", "defaults:\n  num_train_epochs: 2.0")
    first, second = load(tmp_path, f"{text}    max_steps: 5\n").jobs

    assert (first.num_train_epochs, first.max_steps) == (2.0, None)
    assert (second.num_train_epochs, second.max_steps) == (None, 5)
    third = load(tmp_path, f"{RIGHT}  - {{name: third, adapter: old}}\n").jobs[2]
    assert third.lora_config().r == 3


def test_max_steps_of_minus_one_chooses_nothing(tmp_path: Path) -> None:
    """It stands beside epochs, and takes those of the defaults away as little as null does."""
    text = RIGHT.replace("defaults:", "defaults:\n  max_steps: -1\n  num_train_epochs: 2.0")
    first, second = load(tmp_path, f"{text}    max_steps: 5\n").jobs

    assert (first.num_train_epochs, first.max_steps) == (2.0, None)
    assert (second.num_train_epochs, second.max_steps) == (None, 5)
    text = RIGHT.replace("defaults:", "defaults:\n  num_train_epochs: 2.0")
    [_, second] = load(tmp_path, f"{text}    max_steps: -1\n").jobs
    assert second.num_train_epochs == 2.0


def test_one_mistake_names_file_line_and_job(tmp_path: Path) -> None:
    """A single mistake reads as one error."""
    text = RIGHT.replace("    learning_rate: 1e-3", "    lerning_rate: 1e-3")

    assert mistakes(tmp_path, text) == (
        "error[T0102] unknown key 'lerning_rate'\n"
        "  file  /jobs.yaml:14\n"
        "  job   second\n"
        "  help  did you mean 'learning_rate'?"
    )


def test_a_wrong_value_names_its_range(tmp_path: Path) -> None:
    """The range stands beside what was found."""
    text = mistakes(tmp_path, RIGHT.replace("1e-3", "-1"))

    assert "jobs.yaml:14" in text
    assert re.search(r"expected +a number n with 0 <= n\n +found +-1", text)


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    """Mistakes in the base, the defaults and two jobs stand in the order of their lines."""
    text = mistakes(
        tmp_path,
        "base: {modle: m}\n"
        "adapter_dtyp: float32\n"
        "defaults:\n"
        "  seed: -1\n"
        "jobs:\n"
        "  - name: first\n"
        "    data: {path: x.jsonl, fromat: text}\n"
        "    lora: {r: 2, use_qalora: true}\n"
        "  - name: ../second\n"
        "    lora: {r: 2}\n",
    )

    found = re.findall(r"line (\d+)(?:, job (.+?))?: (.+?)(?:, expected|;|$)", text, re.MULTILINE)
    assert found == [
        ("1", "", "the base has no source"),
        ("1", "", "unknown key 'modle'"),
        ("2", "", "unknown key 'adapter_dtyp' beside 'jobs'"),
        ("4", "first, ../second", "wrong value of 'seed'"),
        ("7", "first", "unknown key 'fromat'"),
        ("8", "first", "'use_qalora' is refused: QALoRA needs a quantised base, not supported yet"),
        ("9", "../second", "wrong value of 'name'"),
        ("9", "../second", "'data' is missing"),
    ]


def test_two_jobs_of_one_name_are_told(tmp_path: Path) -> None:
    """The second names the line of the first."""
    text = mistakes(tmp_path, RIGHT.replace("second", "first"))

    assert "the name 'first' is taken by the job in line 10" in text
    assert "give each job a name of its own" in text
    assert "jobs.yaml:11" in text


def test_two_jobs_of_one_name_are_told_in_python(tmp_path: Path) -> None:
    """A job file made in Python is checked too."""
    loaded = load(tmp_path, RIGHT)

    with pytest.raises(JobFileError, match="2 jobs are named 'first'"):
        JobFile(loaded.base, (loaded.jobs[0], loaded.jobs[0]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "the job file is no mapping"),
        ("base: {model: m}", "'jobs' is no list with at least one job"),
        ("base: {model: m}\njobs: []", "'jobs' is no list with at least one job"),
        ("base: {model: m}\njobs: {a: {lora: {}}}", "begin each job with '- name: NAME'"),
        ("base: {model: m}\njobs: [3]", "job 1 is no mapping"),
        ("base: {model: m}\n---\njobs: [3]", "the job file holds more than one document"),
        (RIGHT + "    eval_data: a.jsonl\n", "(key: value), such as {path: eval.jsonl}"),
        ("base: {model: m}\njobs: [{name: a, lora: {}}]", "such as data: {path: train.jsonl}"),
        ("base: {model: m}\ndefaults: 3\njobs: [3]", "'defaults' is no mapping"),
        ("base: m\njobs: [3]", "a mapping"),
        (RIGHT.replace("base:", "bas:"), "'base' is missing"),
        (f"seed: 3\n{RIGHT}", "it belongs into a job, or into 'defaults'"),
        (f"{RIGHT}    base: {{model: m}}\n", "'base' cannot differ by job"),
        (RIGHT.replace("name: first", "name: no"), "no"),
    ],
)
def test_files_of_a_wrong_shape_are_told(tmp_path: Path, text: str, said: str) -> None:
    """Each part that is missing or of a wrong kind has its words."""
    if said == "no":
        assert load(tmp_path, text).jobs[0].name == "no"
    else:
        assert said in mistakes(tmp_path, text)


def test_code_that_comes_with_a_base_needs_more_than_the_file(tmp_path: Path) -> None:
    """Whoever reads the file must trust it too."""
    path = tmp_path / "jobs.yaml"
    path.write_text(RIGHT.replace("dtype: float32", "dtype: float32\n  trust_remote_code: true", 1))
    with pytest.raises(RemoteCodeRefused, match="--trust-remote-code"):
        load_job_file(path)

    assert load_job_file(path, trust_remote_code=True).base.trust_remote_code


def test_a_misspelt_job_file_names_the_one_beside_it(tmp_path: Path) -> None:
    """Where there is none, the help says what a job file holds."""
    with pytest.raises(JobFileMissingError) as empty:
        load_job_file(tmp_path / "job.yaml")
    (tmp_path / "jobs.yaml").write_text(RIGHT)
    with pytest.raises(JobFileMissingError) as near:
        load_job_file(tmp_path / "job.yaml")

    assert "base and jobs" in empty.value.help
    assert near.value.help == "did you mean 'jobs.yaml'?"


@pytest.mark.parametrize("written", ["null", "true"])
def test_values_are_told_as_a_job_file_writes_them(tmp_path: Path, written: str) -> None:
    """Python's None and True stand in no job file."""
    text = mistakes(tmp_path, re.sub(r"r: \d+", f"r: {written}", RIGHT, count=1))

    assert f"found {written}" in text or f"found     {written}" in text

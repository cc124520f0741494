"""`tlora-fx plan` and `tlora-fx profile`."""

from __future__ import annotations

import pytest

from tests.models import save_config
from tlora_fx.cli import main
from tlora_fx.planners.known_profiles import FOLDER_VARIABLE
from tlora_fx.planners.plan import MeshShape, Plan
from tlora_fx.planners.profile import Profile

JOBS = """
base: {config: llama, dtype: float32}
jobs:
  - {name: one, lora: {r: 4, target_modules: all-linear}, data: {path: x.jsonl}, max_length: 64}
  - {name: two, lora: {r: 2, target_modules: [q_proj]}, data: {path: x.jsonl}, max_length: 32}
"""
ESTIMATED = ["--gpus", 2, "--gpu", "roofline:h100", "--allow-estimated"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A job file beside its base's config."""
    folder = tmp_path_factory.mktemp("jobs")
    save_config(folder, "llama", num_hidden_layers=4)
    (folder / "jobs.yaml").write_text(JOBS)
    (folder / "x.jsonl").write_text('{"text": "a"}\n')
    return folder / "jobs.yaml"


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch, tmp_path):
    """A folder of profiles for each test."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "profiles"))
    monkeypatch.setenv("COLUMNS", "120")


def told(capsys, *words, status=0):
    """What a command prints; on stderr where it fails."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    printed = capsys.readouterr()
    assert (end.value.code or 0) == status, printed.err
    return printed.err if status else printed.out


def test_plans_are_listed_best_first(jobs, tmp_path, capsys, golden):
    """Of a data sheet, so that the numbers are the same everywhere."""
    text = told(
        capsys, "plan", jobs, "--gpus", 8, "--nodes", 2, "--gpu", "roofline:h100",
        "--allow-estimated", "-o", tmp_path / "plan.json",
    )  # fmt: skip

    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("written")]
    golden("planners/plan.txt", "\n".join(lines) + "\n")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.mesh.size == 8
    assert plan.estimate is not None
    assert plan.estimate.estimated


def test_only_plans_that_cut_rows_are_listed_where_that_is_asked_for(jobs, tmp_path, capsys):
    """The best of them is written; one GPU has none."""
    path = tmp_path / "plan.json"
    text = told(capsys, "plan", jobs, *ESTIMATED, "--sequence-parallel", "-o", path)

    assert Plan.load(path).sequence_parallel
    assert "rows are not cut along their tokens: (pp=1,dp=2,tp=1)" in text
    alone = ["--gpus", 1, *ESTIMATED[2:], "--sequence-parallel"]
    assert "error[T0810]" in told(capsys, "plan", jobs, *alone, status=1)


def test_an_estimate_must_be_asked_for(jobs, capsys):
    """The error says how."""
    text = told(capsys, "plan", jobs, "--gpus", 2, "--gpu", "roofline:h100", status=1)

    assert "error[T0852]" in text
    assert "--allow-estimated" in text


def test_a_profile_is_measured_and_planned_with(jobs, tmp_path, capsys):
    """On this machine, without naming a file."""
    words = ["profile", jobs, "--device", "cpu", "--eager", "--rounds", 1]
    text = told(capsys, *words, "--tokens", "16", "--lengths", "8,16")
    (path,) = (tmp_path / "profiles").iterdir()

    assert "embedding and last norm" in text
    assert "bare" in text
    assert Profile.load(path).command.startswith("tlora-fx")
    planned = told(capsys, "plan", jobs, "--gpus", 1, "-o", tmp_path / "plan.json")
    assert "(measured)" in planned
    assert Plan.load(tmp_path / "plan.json").mesh == MeshShape()


def test_the_profile_can_be_written_for_others(jobs, tmp_path, capsys):
    """In each format."""
    for format in ("galvatron", "metis", "sailor"):
        text = told(
            capsys, "plan", jobs, "--gpus", 2, "--gpu", "roofline:a100", "--allow-estimated",
            "--export", format, "--folder", tmp_path / format,
        )  # fmt: skip
        assert str(tmp_path / format) in text
        assert list((tmp_path / format).rglob("*.json"))


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (["--gpus", 2, "--gpu", "h1000", "--allow-estimated"], "nearest  h100", 1),
        (["--gpus", 0], "--gpus", 2),
        (
            ["--gpus", 2, "--gpu", "roofline:h100", "--allow-estimated", "--export", "x"],
            "sailor",
            2,
        ),
    ],
)
def test_wrong_words_are_refused(jobs, capsys, words, message, status):
    """With what would be right."""
    assert message in told(capsys, "plan", jobs, *words, status=status)

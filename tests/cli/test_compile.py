"""`tlora-fx compile`."""

from __future__ import annotations

import json

import pytest

from tests.models import save_config
from tlora_fx.cli import main
from tlora_fx.inspect.schema import Listing

JOBS = """
base: {config: llama, dtype: float32}
jobs:
  - {name: one, lora: {r: 4, target_modules: [q_proj, v_proj]}, data: {path: x.jsonl}}
  - {name: two, lora: {r: 2, target_modules: [q_proj], use_dora: true, lora_dropout: 0.1},
     data: {path: x.jsonl}}
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A job file beside its base's config."""
    folder = tmp_path_factory.mktemp("jobs")
    save_config(folder, "llama", num_hidden_layers=2)
    (folder / "jobs.yaml").write_text(JOBS)
    (folder / "x.jsonl").write_text('{"text": "a"}\n')
    return folder / "jobs.yaml"


def run(*arguments: object) -> int | str | None:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in arguments])
    return end.value.code


def test_compile_writes_the_dump_and_sums_it_up(jobs, tmp_path, capsys):
    """Six files and the kernels; what is shared, the seconds, and where all of it lies."""
    assert run("compile", jobs, "-o", tmp_path / "build") == 0

    out = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "build").iterdir()} == {
        "ssm.py", "ssm.txt", "ssm.json", "program.json", "model.json", "graph.tfx", "report.txt",
        "kernels",
    }  # fmt: skip
    assert "2 jobs" in out
    assert "4 of 6 in shared operators; 2 branches as they are: see report.txt" in out
    assert "2 layers in 1 structure" in out
    assert str(tmp_path / "build") in out
    assert "\x1b" not in out


def test_compile_takes_a_pipeline(jobs, tmp_path, capsys):
    """In the text form of pipelines, with options; what passes did is printed and written."""
    text = (
        "drop-export-noise,tag-roles,fold-layers,check-token-parallel,"
        "fuse-backbone{max-jobs=2},lower-adapters,key-dropouts,lower-loss"
    )
    words = ("--pipeline", text, "--pass-statistics")
    assert run("compile", jobs, "-o", tmp_path, *words) == 0

    assert Listing.load(tmp_path).blocks[-1].name == "Head"
    rows = json.loads((tmp_path / "passes/statistics.json").read_text())["passes"]
    assert [row["name"] for row in rows] == [name.partition("{")[0] for name in text.split(",")]
    assert rows[5]["rules"]
    assert "  lower-adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--pipeline", "fuse-backbon"], "T0211"),
        (["--pipeline", "drop-export-noise{x=1}"], "T0211"),
        (["--disable-pass", "fuse-backbone"], "T0211"),
    ],
)
def test_a_wrong_pipeline_exits_with_1(jobs, tmp_path, capsys, arguments, code):
    """The error names the pass or the option, and nothing is written."""
    assert run("compile", jobs, "-o", tmp_path / "build", *arguments) == 1

    assert f"error[{code}]" in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


def test_the_folder_of_a_run_is_no_folder_for_a_model(jobs, tmp_path, capsys):
    """Nothing is written into it."""
    (tmp_path / "run.json").write_text("{}")

    assert run("compile", jobs, "-o", tmp_path) == 1
    assert "error[T0407]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_missing_job_file_exits_with_1(tmp_path, capsys):
    """On stderr, as every error."""
    assert run("compile", tmp_path / "none.yaml", "-o", tmp_path) == 1

    captured = capsys.readouterr()
    assert "error[T0104]" in captured.err
    assert captured.out == ""


def test_compile_without_an_output_is_wrong_usage(jobs, capsys):
    """Exit code 2 and the option's name."""
    assert run("compile", jobs) == 2

    assert "--output" in capsys.readouterr().err

"""`tlora-fx plan` and `tlora-fx profile`."""

from __future__ import annotations

import re

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tests.models import save_config
from tests.parallel.graph_times import with_graphs
from tlora_fx.cli import main
from tlora_fx.cli.plan import per_node_of
from tlora_fx.cli.profile import noisy
from tlora_fx.compiler import compile
from tlora_fx.config.job_file import load_job_file
from tlora_fx.cost.facts import facts_of
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.load import round_of_jobs
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.planners.auto import search

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
    monkeypatch.setenv("TLORA_FX_PROFILES", str(tmp_path / "profiles"))
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

    lines = [line.rstrip() for line in text.partition("written")[0].splitlines()]
    golden("planners/plan.txt", "\n".join(lines) + "\n")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.mesh.size == 8
    assert plan.estimate is not None
    assert plan.estimate.estimated


def test_a_written_plan_is_told_with_the_command_that_trains_by_it(jobs, tmp_path, capsys):
    """It starts as many processes as the plan has, and names a folder for what comes out."""
    path = tmp_path / "plan.json"
    rest = f"train {jobs} -o runs/jobs --plan {path} --compile"
    told_of = {
        gpus: told(capsys, "plan", jobs, "--gpus", gpus, *ESTIMATED[2:], "-o", path, *more)
        for gpus, *more in ((1,), (2,), (4, "--nodes", 2, "--max-row-tokens", 4096))
    }

    last = {gpus: text.splitlines()[-1].strip() for gpus, text in told_of.items()}
    assert last[1] == f"tlora-fx {rest}"
    assert last[2] == f"tlora-fx {rest} --gpus 2"
    assert last[4].startswith("torchrun --nproc-per-node 2 --nnodes 2 --rdzv-backend c10d ")
    assert last[4].endswith(f" -m tlora_fx {rest} --max-row-tokens 4096")


@given(st.integers(1, 96), st.none() | st.integers(1, 12))
def test_every_node_has_as_many_gpus(gpus, nodes):
    """Or the numbers are refused with those that would do."""
    try:
        per_node = per_node_of(gpus, nodes)
    except typer.BadParameter as refused:
        wanted = nodes or 8
        assert gpus % wanted != 0
        fitting = [int(word) for word in re.findall(r"\d+", str(refused).partition("may be")[2])]
        assert fitting == [n for n in range(1, gpus + 1) if gpus / n == gpus // n]
    else:
        assert gpus % per_node == 0
        assert per_node * nodes == gpus if nodes else per_node == min(gpus, 8)


def test_replicas_without_sequences_are_told(jobs, capsys):
    """16 sequences a round: on 32 GPUs some have none, on two none of that is said."""
    many = told(capsys, "plan", jobs, "--gpus", 32, *ESTIMATED[2:], "--show", 1)
    few = told(capsys, "plan", jobs, *ESTIMATED)

    row = next(line.split() for line in many.splitlines() if line.endswith(" plain"))
    pp, dp, tp = map(int, row[:3])
    many = " ".join(many.split())
    assert f"16 sequences for the {dp} replicas" in many
    assert f"{(dp - 16) * pp * tp} of 32 GPUs have nothing to do" in many
    assert "nothing to do" not in few


def test_tables_are_whole_in_narrow_consoles(jobs, capsys, monkeypatch):
    """40 columns lose nothing of 120."""
    wide = told(capsys, "plan", jobs, *ESTIMATED)
    monkeypatch.setenv("COLUMNS", "40")

    assert told(capsys, "plan", jobs, *ESTIMATED) == wide


@pytest.mark.parametrize("command", ["plan", "train"])
def test_an_option_that_was_taken_out_is_refused_with_the_reason(jobs, capsys, command):
    """By its name."""
    text = told(capsys, command, jobs, "--sequence-parallel", status=2)

    assert "no option '--sequence-parallel'" in text
    assert "slower than whole rows at every size" in text


def test_an_estimate_must_be_asked_for(jobs, capsys):
    """The error says how."""
    text = told(capsys, "plan", jobs, "--gpus", 2, "--gpu", "roofline:h100", status=1)

    assert "error[T0852]" in text
    assert "--allow-estimated" in text


def test_a_profile_is_measured_and_planned_with(jobs, tmp_path, capsys):
    """On this machine, without naming a file; `--quick` leaves what is said as it is."""
    words = ["profile", jobs, "--device", "cpu", "--eager", "--quick", "--rounds", 1]
    text = told(capsys, *words, "--tokens", "16", "--lengths", "8,16")
    (path,) = (tmp_path / "profiles").iterdir()

    assert {point.tokens for point in Profile.load(path).root} == {16}
    assert "embedding and last norm" in text
    assert "bare" in text
    assert Profile.load(path).command.startswith("tlora-fx")
    planned = told(capsys, "plan", jobs, "--gpus", 1, "-o", tmp_path / "plan.json")
    assert "(measured)" in planned
    assert Plan.load(tmp_path / "plan.json").mesh == MeshShape()


def test_plans_by_a_measured_profile_say_what_else_they_rest_on(jobs, tmp_path, capsys):
    """Links of a data sheet are named; layers that were not measured make it an estimate."""
    words = [
        "profile",
        jobs,
        "--device",
        "cpu",
        "--eager",
        "--rounds",
        1,
        "-o",
        tmp_path / "p.json",
    ]
    told(capsys, *words, "--tokens", "16", "--lengths", "8,16")
    parsed, profile = load_job_file(jobs), Profile.load(tmp_path / "p.json")
    model = compile(parsed)
    found = search(model, profile, round_of_jobs(parsed.jobs), 2).running
    by_tp = {one.plan.mesh.tp: one.plan.estimate for one in found}

    assert not by_tp[1].estimated
    assert by_tp[1].profile == f"{profile.name}; links by data sheet"
    assert by_tp[2].estimated
    alone = search(model, profile, round_of_jobs(parsed.jobs), 1).best().estimate
    assert (alone.estimated, alone.profile) == (False, profile.name)


def test_noise_is_told(jobs):
    """Above a fifth, with how many rows have it; a quiet profile gets no note."""
    profile = roofline_profile(GPUS["h100"], facts_of(compile(load_job_file(jobs))))
    first, *others = profile.layers[0].points
    loud = first.model_copy(update={"noise": 0.4})
    layer = profile.layers[0].model_copy(update={"points": [loud, *others]})
    noisy_one = profile.model_copy(update={"layers": [layer]})

    assert noisy(profile) == []
    (note,) = noisy(noisy_one)
    assert f"above 20% in 1 of {len(others) + 1} rows, 40% at most" in note
    assert "idle machine" in note


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_wrong_profile_is_refused_before_anything_is_compiled(
    jobs, tmp_path, capsys, monkeypatch, content
):
    """A file that is not there is not called a wrong one."""
    path = tmp_path / "nope.json"
    if content is not None:
        path.write_text(content)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("compiled before the profile was read")

    monkeypatch.setattr("tlora_fx.compiler.compile", never)
    text = told(capsys, "plan", jobs, "--gpus", 2, "--gpu", path, status=1)

    assert "error[T0851]" in text
    assert ("there is no such profile" in text) == (content is None)


def test_a_machine_without_gpus_is_told_to_name_one(jobs, capsys, monkeypatch):
    """Estimates of a CPU are not made either."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in ([], ["--allow-estimated"]):
        text = told(capsys, "plan", jobs, "--gpus", 8, *words, status=1)

        assert "there is no GPU on this machine" in text
        assert "--gpu: a100, l40s, h100, h200, b200" in text


def test_a_model_without_graphs_is_told_where_the_profile_knows_of_them(jobs, tmp_path, capsys):
    """A base in float32 has no kernels: its operators read tables on the host."""
    facts = facts_of(compile(load_job_file(jobs)))
    plain = roofline_profile(GPUS["h100"], facts)
    text = {}
    for name, profile in (("plain", plain), ("graphs", with_graphs(plain))):
        profile.save(tmp_path / f"{name}.json")
        text[name] = told(
            capsys, "plan", jobs, "--gpus", 1, "--gpu", tmp_path / f"{name}.json",
            "--allow-estimated",
        )  # fmt: skip

    assert f"graphs    none, because of {', '.join(facts.launched)}" in text["graphs"]
    assert "packed_attention" in text["graphs"]
    assert "graphs    " not in text["plain"]
    rows = (next(line for line in one.splitlines() if " plain" in line) for one in text.values())
    plain_ms, ms = (float(row.split()[4]) for row in rows)
    assert ms > plain_ms


def test_the_profile_can_be_written_for_others(jobs, tmp_path, capsys):
    """In each format."""
    for format in ("metis", "sailor"):
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
        (["--gpus", 10, "--nodes", 3], "--nodes may be 1, 2, 5, 10", 2),
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

"""`tlora-fx prepare` fills the caches, and `train` then makes nothing anew and imports little."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import fresh
from tlora_fx.cli import main

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
#: Folders of the cache that a start reads.
KEPT = ("traces", "probes", "data")
LISTEN = """
import sys, tlora_fx

class Listen(tlora_fx.TrainerCallback):
    def started(self, runs):
        print(*sys.modules)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One step of a job of the quickstart on one layer, and variables that name an empty cache."""
    folder = tmp_path_factory.mktemp("prepare")
    shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True)
    content = yaml.safe_load((folder / "jobs.yaml").read_text())
    content["jobs"] = [job | {"max_steps": 1} for job in content["jobs"][-1:]]
    (folder / "jobs.yaml").write_text(yaml.safe_dump(content))
    config = folder / "base/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    return folder, {**os.environ, "TLORA_FX_CACHE": str(folder / "cache")}


def entries(folder):
    return {
        kind: sorted(
            str(path.relative_to(folder / "cache" / kind))
            for path in (folder / "cache" / kind).rglob("*")
        )
        for kind in KEPT
    }


@pytest.fixture(scope="module")
def trained(place):
    """What `prepare` said, each entry after it, and all modules before the first step of `train`.

    That one has an interpreter of its own.
    """
    folder, environment = place
    words = ["jobs.yaml", "--device", "cpu"]
    prepared = fresh.run("-m", "tlora_fx", "prepare", *words, cwd=folder, env=environment)
    assert prepared.returncode == 0, prepared.stderr
    between = entries(folder)
    (folder / "listen.py").write_text(LISTEN)
    words += ["-o", "run", "--callback", "listen.py:Listen"]
    told = subprocess.run(
        [sys.executable, "-m", "tlora_fx", "train", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return prepared, between, told.stdout.splitlines()[0].split()


def test_a_prepared_start_makes_nothing_anew(place, trained):
    """It traces, checks and tokenizes nothing: what it would make, it would keep."""
    prepared, between, _ = trained
    folder, _ = place

    assert (folder / "run" / "start.json").exists()
    assert min(map(len, between.values())) > 0
    assert entries(folder) == between
    assert "left for train" not in prepared.stderr


def test_it_says_where_the_caches_lie_and_leaves_no_run(place, trained):
    """A line for each, with the number of its new entries."""
    prepared, between, _ = trained
    folder, _ = place

    lines = {line.rpartition("  ")[0].split("  ")[0]: line for line in prepared.stdout.splitlines()}
    assert lines["traced graphs"].split()[2:4] == [str(len(between["traces"]))] * 2
    for what in ("traced graphs", "results of checks", "tokens of data"):
        assert str(folder / "cache") in lines[what]
    assert "prepared in" in prepared.stderr
    assert {path.name for path in folder.iterdir() if path.name != "__pycache__"} == {
        *(path.name for path in QUICKSTART.iterdir()), "cache", "run", "listen.py",
    }  # fmt: skip


def test_without_a_gpu_it_does_what_needs_none_and_names_the_rest(place, trained):
    """As when an image is built; a cache that is off is named too."""
    folder, environment = place
    environment = {**environment, "CUDA_VISIBLE_DEVICES": "", "TLORA_FX_DATA_CACHE": "0"}
    told = fresh.run(
        "-m", "tlora_fx", "prepare", folder / "jobs.yaml", "--compile", env=environment
    )

    assert told.returncode == 0, told.stderr
    assert "left for train: the check of the base's weights, and kernels" in told.stderr
    assert "left for train: compiled layers" in told.stderr
    assert "first step" not in told.stderr
    assert "(TLORA_FX_DATA_CACHE=0: nothing is kept)" in told.stdout


def test_a_mistake_is_told_before_anything_is_traced(place, tmp_path):
    """By the checks of `train`."""
    folder, environment = place
    wrong = tmp_path / "jobs.yaml"
    wrong.write_text((folder / "jobs.yaml").read_text().replace("max_steps", "max_step", 1))

    told = fresh.run("-m", "tlora_fx", "prepare", wrong, env=environment)

    assert told.returncode == 1
    assert "max_steps" in told.stderr
    assert "tracing" not in told.stderr


def test_a_prepared_start_imports_no_library_that_it_does_not_use(trained):
    """Until its first step: PEFT, with which adapters are written, comes after it."""
    _, _, modules = trained
    unused = {
        "bitsandbytes", "datasets", "matplotlib", "pandas", "peft", "tensorboard", "torchvision",
        "torch._inductor.compile_fx", "trackio", "transformers.trainer_utils", "trl", "wandb",
        "tlora_fx.inspect.html", "tlora_fx.scheduler", "tlora_fx.server", "tlora_fx.simulator",
        "tlora_fx.tools.bisect",
    }  # fmt: skip

    assert {"torch", "transformers", "tlora_fx.runtime.trainer"} <= set(modules)
    assert unused & set(modules) == set()


def test_a_cache_that_cannot_be_filled_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, capsys
):
    """Filling it is all that the command is for; a file stands where the folder should be."""
    (tmp_path / "cache").touch()
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "cache" / "mine"))
    with pytest.raises(SystemExit) as end:
        main(["prepare", str(tmp_path / "jobs.yaml")])

    said = capsys.readouterr().err
    assert end.value.code == 1
    assert "error[T0001] the cache cannot be written" in said
    assert "TLORA_FX_CACHE" in said

"""The example of an operator with its own kernels: copied away, installed, tested, and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests import fresh

EXAMPLES = Path(__file__).parents[2] / "examples"
ADDED = ["--add-pass", "own-lora@after:lower-adapters"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package in an empty folder."""
    folder = tmp_path_factory.mktemp("outside") / "own_kernel"
    ignored = shutil.ignore_patterns("__pycache__", "build", "dist")
    shutil.copytree(EXAMPLES / "own_kernel", folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def environment(package, tmp_path_factory):
    """The variables of a process that finds the installed package."""
    site = tmp_path_factory.mktemp("site")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(package),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(environment, folder, *words):
    """Run a module of Python; all that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_its_tests(environment, package, *words):
    """Run the package's own tests."""
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(package)]
    return run(environment, package, "pytest", *options, str(package / "tests"), *words)


@pytest.mark.slow
def test_its_own_tests_pass(environment, package):
    """Isolation, invariance, its reference, kernels under the interpreter, training, backend."""
    assert "17 passed" in run_its_tests(environment, package)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_its_kernels_pass_all_checks_on_a_gpu(environment, package):
    """In bfloat16, compiled."""
    assert "5 passed" in run_its_tests(environment, package, "-k", "on_a_gpu")


COMMANDS = {
    "passes": ["passes"],
    "list": ["kernels", "list"],
    "package": ["kernels", "package", "own-branch", "inner=48", "outer=32", "dtype=float32"],
    "compile": ["compile", "jobs.yaml", *ADDED, "-o", "build", "--verify", "numerics", "--time"],
}
COLLECT = ["--collect-only", "-q", "-p", "no:cacheprovider", "examples/own_kernel/tests"]
SEVERAL = """
import contextlib, io, json, os, sys

sys.path.insert(0, os.environ["PYTHONPATH"].partition(os.pathsep)[0])
import pytest
from tlora_fx.cli import main

told = {}

def tell(name, command, words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = command(words)
        except SystemExit as end:
            code = end.code
    assert not code, said.getvalue()
    told[name] = said.getvalue()

commands, tree, collect = map(json.loads, sys.argv[1:])
for name, words in commands.items():
    tell(name, main, words)
os.chdir(tree)
tell("collected", pytest.main, collect)
print(json.dumps(told))
"""


def write_jobs(folder, count):
    """The first of the quickstart's jobs without dropout, of a few steps, on one layer."""
    for name in ("base", "data"):
        shutil.copytree(EXAMPLES / "quickstart" / name, folder / name)
    config = folder / "base/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    told = yaml.safe_load((EXAMPLES / "quickstart" / "jobs.yaml").read_text(encoding="utf-8"))
    told["jobs"] = told["jobs"][:count]
    for job in told["jobs"]:
        job["lora"]["lora_dropout"] = 0.0
        job["max_steps"] = 3
    (folder / "jobs.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def told(environment, tmp_path_factory):
    """What commands print, one after another in one process that finds the installed package."""
    folder = write_jobs(tmp_path_factory.mktemp("one"), 1)
    given = map(json.dumps, (COMMANDS, str(EXAMPLES.parent), COLLECT))
    done = fresh.run("-c", SEVERAL, *given, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_its_pass_operator_and_kernels_are_listed(told):
    """With the package that brings them."""
    assert "operators from other packages" in told["passes"]
    assert "own_kernel.fused_lora" in told["passes"]
    assert "own-branch" in told["list"]
    assert "(tlora-fx-own-kernel 0.1.0)" in told["list"]


def test_the_source_of_its_kernel_is_printed(told):
    """For the fields that are given, with the command that prints it again."""
    text = told["package"]

    assert "INNER = tl.constexpr(48)" in text
    assert "# again      tlora-fx kernels package own-branch inner=48 outer=32" in text


def test_its_own_tests_are_found_within_this_tree(told):
    """By the words of examples/README.md, with the modules beside them."""
    assert "tests collected" in told["collected"]


@pytest.mark.slow
def test_jobs_are_verified_and_trained_with_it(environment, tmp_path):
    """Against plain PEFT, within the bound of any group."""
    jobs = write_jobs(tmp_path, 3)
    words = ["jobs.yaml", *ADDED, "--device", "cpu"]
    told = run(environment, jobs, "tlora_fx", "verify", *words, "--steps", "3")
    run(environment, jobs, "tlora_fx", "train", *words, "-o", "run")

    assert "3 jobs train fused as they train alone" in told
    assert len(list((jobs / "run").glob("*/adapter_model.safetensors"))) == 3


def test_the_report_says_that_it_serves_sites(told):
    """All of them, because no job drops; of one job, which takes fewer traces than three."""
    assert "7 sites that own_kernel serves" in told["compile"]

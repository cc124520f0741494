"""`tlora-fx passes`, and the options of commands that run passes."""

from __future__ import annotations

import re
import sys

import pytest

from tests.pipeline.conftest import strangers  # noqa: F401  (a fixture)
from tlora_fx.cli import main
from tlora_fx.compiler import DEFAULT_PIPELINE
from tlora_fx.pipeline import REGISTRY


def told(capsys, *words):
    """What a command prints that ends well."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    """What a command says when it ends with an error, and its exit status."""
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return capsys.readouterr().err, stop.value.code


def test_all_passes_are_listed(capsys, golden):
    """In the order of the default pipeline, with options, defaults and docs."""
    golden("cli/passes.txt", told(capsys, "passes"))


def test_one_pass_is_shown(capsys, golden):
    """What it reads, writes and keeps, what it requires, its options."""
    golden("cli/passes-show.txt", told(capsys, "passes", "show", "fuse-backbone"))


def test_passes_of_other_packages_are_listed(capsys, strangers):  # noqa: F811
    """With their package; a broken one with its reason."""
    text = told(capsys, "passes")

    assert "Count nodes.  (strangers 1.2)" in text
    assert "at-least=1  how many there must be" in text
    assert "BROKEN (strangers 1.2)" in text
    assert "No module named 'strangers_lost_module'" in text
    assert "planners from other packages" in text
    assert "strangers_passes:NoPass is no Planner" in text
    assert "policies from other packages" in text
    assert "strangers_passes:NoPass is no dataclass" in text


def test_the_default_pipeline_can_be_printed(capsys):
    """As text that --pipeline takes."""
    assert told(capsys, "passes", "--pipeline").strip() == DEFAULT_PIPELINE


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (["show", "fuse-bakbone"], "nearest  fuse-backbone", 1),
        (["show"], "tlora-fx passes show NAME", 2),
        (["lst"], "tlora-fx passes show NAME", 2),
    ],
)
def test_a_wrong_word_is_told(capsys, words, message, status):
    """Unknown passes get the nearest name, unknown words the usage."""
    assert refused(capsys, "passes", *words)[1] == status
    assert message in refused(capsys, "passes", *words)[0]


JOBS = "examples/quickstart/jobs.yaml"


OWN = """
from dataclasses import dataclass
from typing import ClassVar
from tlora_fx.pipeline import GroupPass, count, register


@register
@dataclass(frozen=True, slots=True)
class OwnPass(GroupPass):
    \"\"\"Count graphs.\"\"\"

    name: ClassVar[str] = "own-pass"
    statistics: ClassVar[dict[str, str]] = {"seen": "graphs seen"}

    def run(self, group):
        count("seen", len(list(group.graphs())))
        return FACT
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A file with a pass of somebody's own, and a way to add it: `own("False")`."""

    def write(fact: str) -> list[str]:
        (tmp_path / "own_pass_of_test.py").write_text(OWN.replace("FACT", fact))
        return ["--load", str(tmp_path / "own_pass_of_test.py"), "--add-pass", ADDED]

    monkeypatch.setattr(sys, "path", list(sys.path))
    yield write
    sys.modules.pop("own_pass_of_test", None)
    REGISTRY.pop("own-pass", None)


ADDED = "own-pass@after:fuse-backbone"


def test_a_pass_of_a_file_is_added_timed_and_counted(own, capsys, tmp_path):
    """`--load` imports it; the tree of times says what it declares to count."""
    with pytest.raises(SystemExit):
        main(["compile", JOBS, "-o", str(tmp_path / "build"), "--time", *own("False")])
    lines = capsys.readouterr().err.splitlines()

    (line,) = [line for line in lines if line.strip().startswith("own-pass")]
    assert "graphs seen" in line
    tree = [line for line in lines if re.match(r" *[a-z(].*\d\.\d{3}", line)]
    names = [line.split("  ")[0] if line[0] != " " else line.strip() for line in tree]
    assert tree[0].startswith("compile")
    assert any(name.startswith("trace the base") for name in names)
    whole, parts = seconds_of(tree[0]), [seconds_of(t) for t in tree if depth_of(t) == 1]
    assert abs(whole - sum(parts)) <= 0.002 * len(parts)


def seconds_of(line: str) -> float:
    """The first number of a line of times, which stands at a fixed place."""
    return float(line[44:53])


def depth_of(line: str) -> int:
    """How deep a line of the tree stands."""
    return (len(line) - len(line.lstrip())) // 2


def test_an_error_in_a_file_names_its_line(own, capsys, tmp_path):
    """The author's own."""
    text, status = refused(capsys, "compile", JOBS, "-o", str(tmp_path / "build"), *own("1 // 0"))

    assert status == 1
    assert "error[T0216] pass 'own-pass' raised ZeroDivisionError" in text
    assert re.search(r"at +own_pass_of_test.py:17  return 1 // 0", text)


@pytest.mark.parametrize(
    "words",
    [
        ("compile", JOBS, "-o", "OUT"),
        ("train", JOBS, "-o", "OUT"),
        ("verify", JOBS),
        ("run", JOBS, "-o", "OUT", "--device", "cpu"),
        ("explain", JOBS, "--node", "q_proj"),
        ("inspect", JOBS),
        ("bisect", JOBS, "--check", "true"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_compiles_takes_passes(capsys, tmp_path, words):
    """One that is not there is told with the nearest name, before anything is compiled."""
    given = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    text, status = refused(capsys, *given, "--add-pass", "lower-los@after:fuse-backbone")

    assert status == 1
    assert "nearest  lower-loss" in text


@pytest.mark.slow
def test_a_pass_of_a_file_is_verified_against_peft_and_trained(own, capsys, tmp_path):
    """Without a package around it."""
    words = own("False")
    told(capsys, "verify", JOBS, "--steps", "1", "--device", "cpu", *words)
    out = tmp_path / "trained"
    told(capsys, "train", JOBS, "-o", out, "--device", "cpu", *words)

    assert list(out.glob("*/adapter_model.safetensors"))


def test_a_file_that_cannot_be_loaded_is_told(capsys, tmp_path):
    """With the line that failed."""
    (tmp_path / "broken_of_test.py").write_text("x = 1\nimport not_there\n")
    words = ["--load", str(tmp_path / "broken_of_test.py")]
    text, status = refused(capsys, "explain", JOBS, "--node", "q_proj", *words)

    assert status == 1
    assert "error[T0226]" in text
    assert "broken_of_test.py:2" in text


def test_compile_watches_its_passes(capsys, tmp_path):
    """Times, prints and dumps go to stderr and a folder; nothing is built where it stops early."""
    states = tmp_path / "states"
    with pytest.raises(SystemExit):
        main(
        [
            "compile", JOBS, "-o", str(tmp_path / "build"), "--time", "--print-after", "tag-roles",
            "--dump-changed", str(states), "--stop-after", "fold-layers",
        ]
    )  # fmt: skip
    captured = capsys.readouterr()

    assert captured.out == "stopped after fold-layers: no model is built\n"
    assert "fold-layers" in captured.err
    assert "# after 2 tag-roles on base" in captured.err
    assert not (tmp_path / "build").exists()
    assert "03-fold-layers.base.py" in {path.name for path in states.iterdir()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--add-pass", "tag-roles"], "@after:"),
        (["--add-pass", "tag-rols@after:fold-layers"], "nearest  tag-roles"),
        (["--stop-after", "fold-layer"], "nearest  fold-layers"),
        (["--print-after", "fold-layer"], "nearest  fold-layers"),
        (["--pipeline", "tag-roles{x=1}"], "has no option 'x'"),
    ],
)
def test_wrong_options_are_told_before_anything_is_written(capsys, tmp_path, words, message):
    """With the nearest right word."""
    text, status = refused(capsys, "compile", JOBS, "-o", str(tmp_path / "build"), *words)

    assert status == 1
    assert message in text
    assert not (tmp_path / "build").exists()

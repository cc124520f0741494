"""`tlora-fx data`: what jobs train on, token by token, and what was left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tlora_fx.cli import main
from tlora_fx.cli.data import SHOWN_AT_EACH_END

ROOT = Path(__file__).parents[2]
BASE = {"config": str(ROOT / "examples" / "quickstart" / "base"), "dtype": "float32"}
CHAT = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]
PROMPTS = [{"prompt": "3 + 4 =", "completion": " 7"}, {"prompt": "1 + 1 =", "completion": " 2"}]


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Run the command on jobs; returns its exit code, what it says and what it complains of."""
    monkeypatch.chdir(tmp_path)

    def run(jobs, *words, base=BASE, data=None):
        for name, rows in (data or {}).items():
            lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
            Path(name).write_text("".join(f"{line}\n" for line in lines))
        ours = [{"lora": {"r": 2}, "max_length": 512, "max_steps": 3} | job for job in jobs]
        Path("jobs.yaml").write_text(yaml.safe_dump({"base": base, "jobs": ours}))
        with pytest.raises(SystemExit) as end:
            main(["data", "jobs.yaml", *words])
        told = capsys.readouterr()
        return end.value.code, told.out, told.err

    return run


def job(name="a", path="a.jsonl", **fields):
    return {"name": name, "data": {"path": path}} | fields


def test_trained_tokens_stand_in_brackets(shown):
    """The completion and its end; the prompt's tokens are parted, special ones are visible."""
    code, out, _ = shown([job()], data={"a.jsonl": PROMPTS})

    assert code == 0
    assert "sample 1: 9 tokens, 3 trained" in out
    assert "    <s>·3· +· ·4· =[ ][7][</s>]\n" in out
    assert "read as prompt-completion (prompt, completion); trained on completions" in out


def test_a_terminal_gets_colours_too(shown, monkeypatch):
    """Trained tokens are green, special ones magenta."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = shown([job()], data={"a.jsonl": PROMPTS})

    assert "\x1b[1;32m[7]\x1b[0m" in out
    assert "\x1b[35m<s>\x1b[0m" in out


def test_a_chat_shows_its_tags_and_the_turns_that_are_trained(shown):
    """As the template renders it."""
    _, out, _ = shown([job()], data={"a.jsonl": [{"messages": CHAT}]})

    assert re.search(r"<s>·<\|user\|>·.*·<\|assistant\|>(\[[^\]]+\])+\[</s>\]\n", out)
    assert "trained on the assistant's turns; assistant_only_loss: false" in out


def test_line_breaks_are_shown(shown):
    """By a sign, and by a line of the output."""
    _, out, _ = shown([job()], data={"a.jsonl": [{"text": "a\nb"}]})

    assert "    <s>[a][↵]\n    [b][</s>]\n" in out


def test_a_part_of_a_character_is_shown_as_the_vocabulary_writes_it(shown):
    """Not as a sign for what cannot be read."""
    _, out, _ = shown([job()], data={"a.jsonl": [{"text": "\U0001f642"}]})

    assert "\ufffd" not in out
    assert "sample 1: 6 tokens, 5 trained" in out
    assert "    <s>[ð]" in out


def test_packed_samples_are_shown_before_they_are_packed(shown):
    """Steps count sequences."""
    jobs = [job(packing=True, max_length=20, per_device_train_batch_size=1)]
    _, out, _ = shown(jobs, data={"a.jsonl": PROMPTS})

    assert "steps: 1 per epoch, 3 in all (3 epochs), at most 1 packed sequence in a step" in out
    assert "packed into 1 sequence of max_length, 90% full" in out
    assert out.count("9 tokens, 3 trained") == 2


def test_streamed_data_is_read_as_far_as_the_steps_need(shown):
    """How many steps an epoch has is not known."""
    rows = [{"text": str(number)} for number in range(100)]
    spec = {"path": "a.jsonl", "streaming": True}
    sizes = {"per_device_train_batch_size": 2, "shuffle": False}
    code, out, err = shown([job(data=spec, **sizes)], data={"a.jsonl": rows})

    assert code == 0, err
    assert "6 samples" in out
    assert "steps: 3 in all, at most 2 samples in a step; the data is streamed" in out


def test_text_of_data_moves_no_cursor(shown):
    """Controls are spelled out."""
    _, out, _ = shown([job()], data={"a.jsonl": [{"text": "a\u202eb\u001b[2J"}]})

    assert "\x1b" not in out
    assert "\u202e" not in out


def test_a_long_sample_is_cut_in_the_middle(shown):
    """How many tokens are left out is told."""
    _, out, _ = shown([job(max_length=301)], data={"a.jsonl": [{"text": "7" * 400}]})
    [line] = [line for line in out.splitlines() if "left out" in line]

    left = 301 - 2 * SHOWN_AT_EACH_END
    assert line == f"    … {left} tokens left out, {left} of them trained …"
    assert out.count("[7]") == 2 * SHOWN_AT_EACH_END - 1


def test_rows_chooses_how_many_samples_are_shown(shown):
    """None is a number too."""
    rows = [{"text": f"{number}"} for number in range(9)]

    assert shown([job()], data={"a.jsonl": rows})[1].count("  sample ") == 3
    assert shown([job()], "--rows", "7")[1].count("  sample ") == 7
    code, out, _ = shown([job()], "--rows", "0")
    assert (code, out.count("  sample "), out.count("[")) == (0, 0, 0)
    assert "3 to 3 tokens" in out


def test_a_histogram_tells_the_lengths(shown):
    """Each length is in one bar, the longest bar is full."""
    rows = [{"text": "7" * number} for number in (*range(1, 41), *[20] * 30)]
    _, out, _ = shown([job()], data={"a.jsonl": rows})
    bars = re.findall(r"^ +(\d+)(?:–(\d+))? +[█▉▊▋▌▍▎▏]* +(\d+)$", out, flags=re.MULTILINE)

    assert "3 to 42 tokens, median 22" in out
    assert (bars[0][0], bars[-1][1]) == ("3", "42")
    assert sum(int(count) for *_, count in bars) == len(rows)
    assert out.count("█" * 40) == 1


def test_what_was_cut_masked_and_dropped_is_told_with_its_reason(shown):
    """One sample is cut within its completion, one before it; two rows are bad."""
    rows = [
        *PROMPTS,
        {"prompt": "3 + 4 = 7 3 + 4 = 7", "completion": " 7"},
        {"prompt": "3", "completion": " 1 2 3 4 5 6 7 8 9"},
        "{no JSON",
        {"prompt": "3"},
    ]
    spec = {"path": "a.jsonl", "skip_bad_rows": True}
    _, out, _ = shown([job(data=spec, max_length=9)], data={"a.jsonl": rows})

    assert "2 of 6 bad rows skipped" in out
    assert re.search(r"bad row .*a\.jsonl:5: ", out)
    assert "dropped: 1 sample, max_length 9 cuts before the first token to train (good row 3)" in (
        out
    )
    assert "masked: 14 of 27 tokens are not trained: they stand before a completion" in out
    assert "cut: 12 tokens of 1 sequence, which are beyond max_length 9" in out


def test_a_sample_without_anything_to_train_is_dropped_for_that(shown):
    """No length would help."""
    chats = [{"messages": CHAT}, {"messages": [*CHAT[:1], CHAT[1] | {"weight": 0}]}]
    code, out, _ = shown([job()], data={"a.jsonl": chats})

    assert code == 0
    assert "dropped: 1 sample, no token is to be trained (row 2)" in out


def test_steps_are_counted(shown):
    """Per epoch and in all."""
    rows = [{"text": str(number)} for number in range(10)]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    jobs = [job(**sizes), job("b", **sizes, num_train_epochs=2, max_steps=None)]
    _, out, _ = shown(jobs, data={"a.jsonl": rows})

    assert "steps: 3 per epoch, 3 in all (1 epochs), at most 4 samples in a step (2 × 2)" in out
    assert "steps: 3 per epoch, 6 in all (2 epochs), at most 4 samples in a step (2 × 2)" in out


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_a_preference_shows_both_completions(shown, method):
    """ORPO trains the whole chosen sequence as well."""
    pair = {"prompt": "3 + 4 =", "chosen": " 7", "rejected": " 8"}
    _, out, _ = shown([job(method=method)], data={"a.jsonl": [pair]})

    trained, masked = (11, 7) if method == "orpo" else (6, 12)
    assert f"1 sample, 18 tokens, {trained} trained" in out
    assert f"masked: {masked} of 18 tokens are not trained" in out
    assert "sample 1, chosen: 9 tokens" in out
    assert "sample 1, rejected: 9 tokens, 3 trained" in out
    assert "<s>·3· +· ·4· =[ ][8][</s>]" in out
    assert ("[3][ +][ ][4][ =][ ][7][</s>]" in out) == (method == "orpo")


@pytest.mark.parametrize(
    ("base", "label", "told"),
    [
        ({"labels": ["bad", "good"]}, "good", "label 'good'"),
        ({"labels": 1}, 0.5, "label 0.5"),
        (
            {"labels": ["x", "y", "z"], "problem_type": "multi_label_classification"},
            ["x", "z"],
            "label 'x', 'z'",
        ),
    ],
    ids=["one", "number", "several"],
)
def test_a_classifier_shows_the_label_and_where_it_is_read(shown, base, label, told):
    """By its name."""
    spec = BASE | {"task": "SEQ_CLS"} | base
    code, out, err = shown([job()], base=spec, data={"a.jsonl": [{"text": "7", "label": label}]})

    assert code == 0, err
    assert f"tokens, {told}, read at the token in brackets" in out
    [sample] = [line for line in out.splitlines() if "<s>" in line]
    assert sample.count("[") == 1


def test_the_evaluation_set_is_shown_too(shown):
    """From a file of its own, or held out."""
    jobs = [job(eval_data={"path": "e.jsonl"}), job("b", eval_split=0.5)]
    _, out, _ = shown(jobs, data={"a.jsonl": PROMPTS, "e.jsonl": PROMPTS[1:]})
    own, held = out[out.index("evaluation of a") :], out[out.index("evaluation of b") :]

    assert "<s>·1· +· ·1· =[ ][2][</s>]" in own
    assert "evaluation: 1 sample, 9 tokens, 3 counted" in out
    assert "evaluation: 1 sample held out" in out
    assert "sample 1: 9 tokens, 3 trained" in held
    assert "tokens are not counted" in held


def test_jobs_after_a_wrong_one_are_still_shown(shown):
    """The error as every command tells it, and exit status 1."""
    jobs = [job("none", "none.jsonl"), job("bad", "bad.jsonl"), job("good")]
    code, out, err = shown(jobs, data={"a.jsonl": PROMPTS, "bad.jsonl": ["{no JSON"]})

    assert code == 1
    assert err.count("error[T03") == 2
    assert "none.jsonl" in err
    assert "bad.jsonl:1" in err
    assert out.index("bad") < out.index("good") < out.index("sample 1: 9 tokens")


def test_job_chooses_jobs_and_may_be_repeated(shown):
    """The others are not read."""
    jobs = [job("a"), job("b", "none.jsonl"), job("c")]
    code, out, _ = shown(jobs, "--job", "c", "--job", "a", data={"a.jsonl": PROMPTS})

    assert code == 0
    assert re.findall(r"^(\w)$", out, flags=re.MULTILINE) == ["a", "c"]


def test_an_unknown_job_is_told_with_the_nearest(shown):
    """Before anything is read."""
    code, out, err = shown([job("maths")], "--job", "math", data={"a.jsonl": PROMPTS})

    assert (code, out) == (1, "")
    assert "error[T0106] the job file has no job 'math'" in err
    assert "nearest  maths" in err


def test_no_base_is_built_and_a_wrong_file_is_told_without_torch(tmp_path):
    """In an interpreter of its own; the base has no more than a tokenizer."""
    (tmp_path / "jobs.yaml").write_text(
        "base: {model: nowhere/none, tokenizer: none}\n"
        "jobs: [{name: a, lora: {r: 2}, max_steps: 1, data: {path: none.jsonl}}]\n"
    )
    code = (
        "import sys\nfrom tlora_fx.cli import main\n"
        "try:\n    main(['data', 'jobs.yaml'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert told.stdout.endswith("1 False\n"), told.stderr
    assert "error[T0301]" in told.stderr


def test_the_page_shows_what_the_command_prints(monkeypatch, capsys):
    """To the letter."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    command, printed = re.findall(r"```\n(.*?)```", page, flags=re.DOTALL)[:2]
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main(command.split()[1:])

    assert end.value.code == 0
    assert capsys.readouterr().out == printed

"""The examples that ship: their files are what the script makes, and their job files load."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tlora_fx import load_job_file

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder into which the script wrote everything anew."""
    folder = tmp_path_factory.mktemp("quickstart")
    runpy.run_path(str(QUICKSTART / "make_assets.py"))["main"](folder)
    return folder


def files_below(folder):
    """Paths below base/ and data/, with what they hold."""
    found = [path for room in ("base", "data") for path in (folder / room).iterdir()]
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in found}


def test_the_quickstart_ships_what_its_script_makes(made):
    """Making the assets again gives the committed bytes, and no other file."""
    assert files_below(QUICKSTART) == files_below(made)


def test_the_quickstart_tokenizer_fits_its_model(made):
    """Every token has an embedding, and the special tokens are those that the config names."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(made / "base")
    tokenizer = AutoTokenizer.from_pretrained(made / "base")

    assert len(tokenizer) <= config.vocab_size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(tokenizer, name) == getattr(config, name)


def test_the_quickstart_chat_template_marks_what_the_assistant_says(made):
    """The generation marks cover the assistant's words and the end of its turn, nothing else."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    messages = [
        {"role": "user", "content": "Hello! I live in Oslo."},
        {"role": "assistant", "content": "Oslo is a fine place to live."},
        {"role": "user", "content": "I like the colour red."},
    ]
    encoded: Any = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)

    assert tokenizer.decode([token for token, own in pairs if own]) == (
        "Oslo is a fine place to live.</s>"
    )


def test_the_quickstart_jobs_differ_in_what_a_job_may_choose():
    """Rank, alpha, dropout, batch, length, targets, learning rate and steps are three each."""
    jobs = load_job_file(QUICKSTART / "jobs.yaml").jobs

    chosen = [
        (
            job.lora_config().r,
            job.lora_config().lora_alpha,
            job.lora_config().lora_dropout,
            job.per_device_train_batch_size,
            job.max_length,
            str(job.lora_config().target_modules),
            job.learning_rate,
            job.max_steps,
        )
        for job in jobs
    ]
    assert [len(set(column)) for column in zip(*chosen, strict=True)] == [3] * 8


def test_the_gsm8k_jobs_cover_ranks_and_batch_sizes():
    """Eight jobs: each rank twice, each batch size twice."""
    path = EXAMPLES / "gsm8k" / "jobs.yaml"
    if not (path.parent / "../../../shared/data/gsm8k/train.jsonl").exists():
        pytest.skip("GSM8K is not beside the repository")
    jobs = load_job_file(path).jobs

    assert sorted(job.lora_config().r for job in jobs) == [2, 2, 4, 4, 8, 8, 16, 16]
    assert sorted(job.per_device_train_batch_size for job in jobs) == [1, 1, 2, 2, 4, 4, 8, 8]


@pytest.fixture
def sweep():
    """The sweep's names."""
    return runpy.run_path(str(EXAMPLES / "sweep" / "sweep.py"))


def test_the_sweep_has_a_job_for_each_choice_and_all_stop_early(sweep, tmp_path):
    """On its own data and on GSM8K's columns; to the end none stops."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "How many?", "answer": "2"}\n')
    jobs, whole = sweep["sweep_jobs"](data), sweep["sweep_jobs"](stop_early=False)

    assert len({job.name for job in jobs}) == len(jobs) == 24
    assert all(job.early_stopping_patience == 2 for job in jobs)
    assert all(job.data.columns["prompt"] == "question" for job in jobs)
    assert [job.early_stopping_patience for job in whole] == [None] * 24


@pytest.mark.slow
def test_jobs_of_the_sweep_take_the_rows_of_those_who_end(sweep, tmp_path, capsys):
    """Ten of them, of four steps: two wait until others have ended."""
    jobs = [job.model_copy(update={"max_steps": 4}) for job in sweep["sweep_jobs"]()[:10]]
    runs = sweep["train"](jobs, tmp_path / "run", device="cpu", callback=sweep["Lines"]())
    lines = capsys.readouterr().out.splitlines()

    assert [(run.status, run.step) for run in runs] == [("done", 4)] * 10
    first_end = next(at for at, line in enumerate(lines) if " done at step 4" in line)
    joins = [at for at, line in enumerate(lines) if line.endswith(" joins")]
    assert sum(at > first_end for at in joins) == 2

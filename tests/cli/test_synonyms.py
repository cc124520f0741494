"""An unknown command gets the one that its user wants, or none."""

from __future__ import annotations

import pytest

from tlora_fx.cli import COMMANDS, main
from tlora_fx.cli.arguments.synonyms import SYNONYMS, in_job_file, suggested


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("finetune", "train"), ("fine_tune", "train"), ("Train", "train"), ("trian", "train"),
        ("fientune", "train"), ("infer", "generate"), ("export", "merge"), ("status", "watch"),
        ("convert", "import"), ("srve", "serve"), ("zebra", None), ("help", "--help"),
        ("delete", None), ("download", None), ("x", None),
    ],
)  # fmt: skip
def test_an_unknown_command_gets_the_one_that_is_wanted(asked, wanted):
    """A synonym, a misspelling, or nothing."""
    assert suggested(asked, COMMANDS) == wanted


def test_a_synonym_names_a_command_and_is_none():
    """Each leads to what there is."""
    assert set(SYNONYMS.values()) <= {*COMMANDS, "--help", "--version"}
    assert not set(SYNONYMS) & set(COMMANDS)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--learning_rate", "write learning_rate into the job file, in a job or under 'defaults'"),
        ("--num-train-epochs", "write num_train_epochs into the job file, in a job"),
        ("--lr", "write learning_rate into the job file"),
        ("--lora_r", "write r into the job file, under 'lora' in a job"),
        ("--lora_alpha", "write lora_alpha into the job file, under 'lora'"),
        ("--base", "write base into the job file, beside 'jobs'"),
        ("--name", "write name into the job file, in a job"),
        ("--model_name_or_path", "write model into the job file, under 'base'"),
        ("--output_dir", "give it on the command line: train -o FOLDER"),
        ("--bf16", "write dtype: bfloat16 under 'base'"),
        ("--zebra", ""),
    ],
)
def test_an_option_of_other_trainers_is_led_to_the_job_file(option, told):
    """In its own words there; what nobody has is nothing."""
    assert in_job_file(option).startswith(told)
    assert bool(in_job_file(option)) == bool(told)


def test_a_wrong_option_that_a_job_file_takes_is_told_so(capsys):
    """Below what is wrong with the command; the options that it has are no such."""
    with pytest.raises(SystemExit, match="2"):
        main(
            ["train", "jobs.yaml", "-o", "run", "--lr=1e-3", "--device", "cpu", "--max-steps", "3"]
        )

    assert capsys.readouterr().err.splitlines()[-2:] == [
        "--lr: write learning_rate into the job file, in a job or under 'defaults'",
        "--max-steps: write max_steps into the job file, in a job or under 'defaults'",
    ]

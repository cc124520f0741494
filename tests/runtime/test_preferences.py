"""Jobs that learn from pairs: equal to themselves alone, and to TRL's trainers."""

from __future__ import annotations

import json
import math
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.runtime.groups import evaluations_of, losses_of, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.job import DataSpec, Job
from tlora_fx.cost.plan import MeshShape, Plan
from tlora_fx.errors import JobError, PlanNotRunnable, SuperModelMisuse
from tlora_fx.parallel.apply import require_whole_pairs
from tlora_fx.runtime.adapters.files import adapter_tensors, plain_base
from tlora_fx.runtime.data.samples import JobData, load_job_data
from tlora_fx.runtime.trainer import Trainer, TrainerCallback
from tlora_fx.runtime.verification.verify import bounds_of, verify

BETA = 0.3
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a letter."""
    letters = ["<pad>", "</s>", *string.ascii_lowercase]
    core = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(letters)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")


def word(draw: random.Random, longest: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, longest)))


def pairs() -> list[dict[str, str]]:
    draw = random.Random(0)
    return [
        {"prompt": word(draw, 8), "chosen": word(draw, 9), "rejected": word(draw, 9) + "q"}
        for _ in range(24)
    ]


def written(path: Path, rows: list[dict[str, str]]) -> dict[str, str]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"path": str(path)}


def group(folder: Path, method: str, steps: int, **fields: Any) -> list[Job]:
    """A job that learns from pairs beside one that does not."""
    base, draw = tiny_base(folder / "base"), random.Random(1)
    settled = {"shuffle": False, "gradient_accumulation_steps": 2, "max_steps": steps, **fields}
    texts = [{"text": word(draw, 12) + "ab"} for _ in range(24)]
    sources = {
        "pairs": (written(folder / "pairs.jsonl", pairs()), {"method": method, "beta": BETA}),
        "texts": (written(folder / "texts.jsonl", texts), {"seed": 3}),
    }
    return [
        make_job(base, name, lora=LORA, **settled, **own).model_copy(
            update={"data": DataSpec(**data)}
        )
        for name, (data, own) in sources.items()
    ]


def data_of(jobs: list[Job], tokenizer: Any) -> dict[str, JobData]:
    return {job.name: load_job_data(job, tokenizer) for job in jobs}


def test_a_job_of_pairs_trains_as_it_would_alone(tmp_path: Path, tokenizer: Any) -> None:
    """Beside a job of texts, with dropout and without, against plain PEFT and its own formula."""
    jobs = group(tmp_path, "dpo", steps=2)
    dropping = [job.model_copy(update={"lora": {**LORA, "lora_dropout": 0.2}}) for job in jobs]
    rows = list(verify(dropping, 2, device="cpu", data=data_of(dropping, tokenizer)))

    assert len(rows) == 4
    assert all(row.within(bounds_of("float64", "cpu")) for row in rows)
    assert max(row.gradient for row in rows if row.job == "pairs") < 1e-12


def test_the_first_loss_of_dpo_is_that_of_no_preference(tmp_path: Path, tokenizer: Any) -> None:
    """An adapter starts without a margin; evaluations compare too; a neighbour is as alone."""
    jobs = group(tmp_path, "dpo", steps=2, eval_split=0.25, eval_steps=1)
    data = data_of(jobs, tokenizer)
    Trainer(compile(jobs), output=tmp_path / "run", data=data).run()
    Trainer(compile(jobs[1:]), output=tmp_path / "alone", data=data).run()

    losses = losses_of(tmp_path / "run", jobs)
    assert losses["pairs"][0] == pytest.approx(math.log(2), abs=1e-12)
    evaluated = [row["eval_loss"] for row in evaluations_of(tmp_path / "run", jobs)["pairs"]]
    assert len(evaluated) == 2
    assert all(0 < abs(loss - math.log(2)) < 0.1 for loss in evaluated)
    alone = losses_of(tmp_path / "alone", jobs[1:])["texts"]
    assert losses["texts"] == pytest.approx(alone, abs=1e-12)


def test_pairs_are_refused_where_rows_do_not_run_whole(tmp_path: Path, tokenizer: Any) -> None:
    """By plans, by exported programs, and by adapters that have no base beside them."""
    jobs = group(tmp_path, "dpo", steps=1)
    model = compile(jobs)

    with pytest.raises(PlanNotRunnable, match="losses beside cross entropy"):
        require_whole_pairs(jobs, Plan(planner="single"), cuts=True)
    sharded = Plan(planner="fsdp", mesh=MeshShape(dp=2), shard_base=True)
    with pytest.raises(PlanNotRunnable, match="dp=2"):
        require_whole_pairs(jobs, sharded, cuts=False)
    trainer = Trainer(model, output=tmp_path / "run", data=data_of(jobs, tokenizer))
    trainer.prepare(data_of(jobs, tokenizer))
    with pytest.raises(SuperModelMisuse, match="cannot be exported"):
        model.export()
    with pytest.raises(JobError, match="'use_dora' changes beside A and B"):
        make_job(jobs[0].base, "dora", lora={"use_dora": True}, method="dpo")


class Start(TrainerCallback):
    """Keeps what every adapter starts from."""

    def started(self, runs: Any) -> None:
        self.adapters = {
            run.job.name: {k: v.clone() for k, v in adapter_tensors(run.parameters).items()}
            for run in runs
        }


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_a_job_of_pairs_trains_as_by_trl(tmp_path: Path, tokenizer: Any, method: str) -> None:
    """Four steps in float64 beside another job, against TRL's own trainer on texts of its own."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    jobs, start = group(tmp_path, method, steps=4), Start()
    model = compile(jobs)
    trainer = Trainer(model, output=tmp_path / "run", data=data_of(jobs, tokenizer), callback=start)
    mine = adapter_tensors(trainer.run()[0].parameters)
    wrapped = get_peft_model(plain_base(model.backbone), jobs[0].lora_config())
    set_peft_model_state_dict(wrapped, start.adapters["pairs"])
    losses = trained_by_trl(wrapped, jobs[0], tokenizer, tmp_path)
    theirs = get_peft_model_state_dict(wrapped)

    assert losses_of(tmp_path / "run", jobs)["pairs"] == pytest.approx(losses, abs=1e-6)
    assert max(float((theirs[name] - mine[name]).abs().max()) for name in mine) < 1e-5
    moved = (theirs[name] - start.adapters["pairs"][name] for name in mine)
    assert max(float(change.abs().max()) for change in moved) > 1e-2


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder of jobs that have trained three steps, in its folder `run`."""
    folder = tmp_path_factory.mktemp("before")
    jobs = group(folder, "dpo", steps=3)
    Trainer(compile(jobs), output=folder / "run", data=data_of(jobs, tokenizer)).run()
    return folder


def continuing(before: Path, steps: int, **fields: Any) -> list[Job]:
    """The same jobs, of which that of pairs continues an adapter that is no zero."""
    jobs = group(before, "dpo", steps=3)
    first = {"lora": None, "adapter": before / "run" / "pairs", "max_steps": steps, **fields}
    given = {key: getattr(jobs[0], key) for key in jobs[0].model_fields_set}
    return [Job(**{**given, **first}), jobs[1].model_copy(update={"max_steps": steps})]


def test_a_continued_adapter_is_its_own_reference(
    tmp_path: Path, before: Path, tokenizer: Any
) -> None:
    """Four steps as by TRL, which keeps a copy of a loaded adapter to compare with."""
    from peft import PeftModel

    jobs = continuing(before, 4)
    model = compile(jobs)
    Trainer(model, output=tmp_path / "run", data=data_of(jobs, tokenizer)).run()
    base = plain_base(model.backbone)
    wrapped = PeftModel.from_pretrained(base, str(jobs[0].adapter), is_trainable=True)
    losses = trained_by_trl(wrapped, jobs[0], tokenizer, tmp_path)

    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses_of(tmp_path / "run", jobs)["pairs"] == pytest.approx(losses, abs=2e-6)


def test_a_continued_adapter_may_be_compared_with_the_base(
    tmp_path: Path, before: Path, tokenizer: Any
) -> None:
    """It begins with the margin that it has; only dpo compares."""
    jobs = continuing(before, 1, reference="base")
    Trainer(compile(jobs), output=tmp_path / "run", data=data_of(jobs, tokenizer)).run()

    assert abs(losses_of(tmp_path / "run", jobs)["pairs"][0] - math.log(2)) > 1e-4
    with pytest.raises(JobError, match="'reference' needs method dpo"):
        make_job(jobs[0].base, "sft", lora=LORA, reference="base")


class StopAtTwo(TrainerCallback):
    """The user's Ctrl-C after two steps."""

    def stepped(self, report: Any) -> None:
        if report.step == 2:
            raise KeyboardInterrupt


def test_a_resumed_job_keeps_its_reference(tmp_path: Path, before: Path, tokenizer: Any) -> None:
    """The adapter that the folder holds, not the one that the checkpoint holds."""
    jobs = continuing(before, 4, save_steps=2, num_train_epochs=None)
    data = data_of(jobs, tokenizer)
    Trainer(compile(jobs), output=tmp_path / "whole", data=data).run()
    with pytest.raises(KeyboardInterrupt):
        Trainer(compile(jobs), output=tmp_path / "cut", data=data, callback=StopAtTwo()).run()
    Trainer(compile(jobs), output=tmp_path / "cut", data=data, resume=True).run()

    whole, cut = (losses_of(tmp_path / name, jobs)["pairs"] for name in ("whole", "cut"))
    assert cut == pytest.approx(whole, abs=1e-12)


def test_a_continued_job_of_pairs_is_verified(before: Path, tokenizer: Any) -> None:
    """Beside a job of texts, with dropout, against plain PEFT with a copy of the adapter."""
    jobs = continuing(before, 2)
    rows = list(verify(jobs, 2, device="cpu", data=data_of(jobs, tokenizer)))

    assert all(row.within(bounds_of("float64", "cpu")) for row in rows)
    assert max(row.gradient for row in rows if row.job == "pairs") < 1e-12


def trained_by_trl(model: Any, job: Job, tokenizer: Any, folder: Path) -> list[float]:
    """The losses of the job by TRL's trainer, in the order of the data."""
    from datasets import Dataset

    if job.method == "dpo":
        from trl import DPOConfig as Config
        from trl import DPOTrainer as Alone
    else:
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Alone

    class InOrder(Alone):
        def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    alone = InOrder(
        model=model,
        args=Config(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=job.per_device_train_batch_size,
            gradient_accumulation_steps=job.gradient_accumulation_steps,
            max_steps=job.max_steps,
            learning_rate=job.learning_rate,
            beta=BETA,
            logging_steps=1,
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            optim="adamw_torch",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(pairs()),
        processing_class=tokenizer,
    )
    alone.train()
    return [row["loss"] for row in alone.state.log_history if "loss" in row]

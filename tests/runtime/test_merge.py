"""What a job leaves can be used: by PEFT with its tokenizer and card, and merged into its base."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.runtime.conftest import UNMARKED
from tests.runtime.groups import READING, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import GenerationError, RunFolderError
from tlora_fx.runtime.generation import AdapterGenerator
from tlora_fx.runtime.merge import adapter_of, merge
from tlora_fx.runtime.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_tokenizer):
    """Two jobs trained on a file, with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("merge")
    base = tiny_base(folder / "base", **READING)
    make_tokenizer(UNMARKED).save_pretrained(folder / "base")
    texts = ({"text": "1+1=2"}, {"text": "a b c"}, {"text": "2+2=?"}, {"text": "x=2"})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    data = {"path": str(folder / "data.jsonl")}
    jobs = [
        make_job(base, name, eval_split=0.25, save_steps=1, max_steps=3, lora=lora)
        .model_copy(update={"data": make_job(base, name).data.model_copy(update=data)})
        for name, lora in {"a": {"r": 4}, "dora": {"r": 2, "use_dora": True}}.items()
    ]  # fmt: skip
    Trainer(compile(jobs), output=folder / "run", device="cpu").run()
    return folder / "run"


def folders(run):
    """A job's adapter folder, and that of its newest checkpoint."""
    newest = (run / "checkpoints" / "latest").read_text().split()[0]
    return [run / "a", run / "checkpoints" / newest / "jobs" / "a"]


@pytest.mark.parametrize("place", [0, 1])
def test_tokenizer_and_chat_template_come_with_the_adapter(run, place):
    """AutoTokenizer takes the job's folder, and the checkpoint's."""
    tokenizer = AutoTokenizer.from_pretrained(folders(run)[place])

    assert (
        tokenizer("a=2").input_ids
        == AutoTokenizer.from_pretrained(run.parent / "base")("a=2").input_ids
    )
    assert tokenizer.chat_template == UNMARKED


@pytest.mark.parametrize("place", [0, 1])
def test_the_card_says_how_the_adapter_came_to_be(run, place):
    """Base, data, hyperparameters, losses and versions, and metadata that the Hub reads."""
    card = (folders(run)[place] / "README.md").read_text()
    _, metadata, text = card.split("---\n", 2)

    assert yaml.safe_load(metadata)["library_name"] == "peft"
    for told in (
        "data.jsonl",
        "| learning_rate | 0.01 |",
        "last training loss",
        "eval_loss",
        "| steps | 3 of 3 |",
        f"| torch | {torch.__version__} |",
        "| samples | 3 |",
    ):
        assert told in text
    assert str(run.parent / "data.jsonl") not in text
    # Of a base that no checkpoint has nobody is told to load one.
    assert "drew its weights" in text
    assert "from_pretrained" not in text


def test_merging_says_nothing_of_its_own(run, tmp_path, capfd, recwarn):
    """Neither a bar of transformers nor a warning of what it calls itself."""
    merge(adapter_of(run, "a"), tmp_path / "merged")
    printed = capfd.readouterr()

    assert (printed.out, printed.err) == ("", "")
    assert not [each for each in recwarn if "is_gradient_checkpointing" in str(each.message)]


@pytest.mark.parametrize("job", ["a", "dora"])
def test_a_merged_model_computes_what_peft_computes(run, tmp_path, job):
    """transformers loads it alone, with its tokenizer, in shards of safetensors."""
    from peft import PeftModel

    from tlora_fx.model.backbone import load_backbone
    from tlora_fx.runtime.adapters.files import plain_base
    from tlora_fx.runtime.merge import job_of

    output = merge(adapter_of(run, job), tmp_path / "merged", "20KB")
    merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float64)
    base = plain_base(load_backbone(job_of(run / job).base))
    ids = torch.tensor([[5, 9, 3, 7]])
    plain = base(ids).logits.detach()
    adapted = PeftModel.from_pretrained(base, run / job).eval()(ids).logits

    assert torch.allclose(merged.eval()(ids).logits, adapted, atol=1e-12)
    assert not torch.allclose(adapted, plain, atol=1e-6)
    assert AutoTokenizer.from_pretrained(output).chat_template == UNMARKED
    assert len(list(output.glob("*.safetensors"))) > 1


@pytest.fixture(scope="module")
def classified(tmp_path_factory, make_tokenizer):
    """The folder of a job that was trained on a base that classifies."""
    folder = tmp_path_factory.mktemp("classified")
    plain = tiny_base(folder / "base", **READING, pad_token_id=0)
    make_tokenizer(UNMARKED).save_pretrained(folder / "base")
    base = BaseSpec(config=plain.config, dtype="float64", seed=7, task="SEQ_CLS", labels=3)
    rows = [{"text": text, "label": at} for at, text in enumerate(("1+1=2", "a b c", "x=2"))]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = make_job(base, "a", max_steps=3)
    data = job.data.model_copy(update={"path": str(folder / "data.jsonl")})
    job = job.model_copy(update={"data": data})
    Trainer(compile([job]), output=folder / "run", device="cpu").run()
    return folder / "run" / "a"


def test_a_merged_classifier_computes_what_peft_computes(classified, tmp_path):
    """It has the head that the job trained."""
    from peft import PeftModel

    from tlora_fx.model.backbone import load_backbone
    from tlora_fx.runtime.adapters.files import plain_base
    from tlora_fx.runtime.merge import job_of

    output = merge(classified, tmp_path / "merged")
    load = AutoModelForSequenceClassification.from_pretrained
    merged = load(output, dtype=torch.float64).eval()
    base = plain_base(load_backbone(job_of(classified).base))
    adapted = PeftModel.from_pretrained(base, classified).eval()
    ids = torch.tensor([[5, 9, 3, 7]])

    assert merged(ids).logits.shape == (1, 3)
    assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-12)


def test_a_classifier_is_not_asked(classified):
    """It has no next token to say."""
    with pytest.raises(GenerationError, match="classifies"):
        AdapterGenerator.of_folders({"a": classified}, "cpu")


#: Adapters by which a tied head and its embedding part, or not.
TIED = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "plain": {"target_modules": ["q_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    "bias": {"target_modules": ["q_proj"], "lora_bias": True},
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Jobs trained on a base whose head shares the embedding's matrix."""
    folder = tmp_path_factory.mktemp("tied")
    base = tiny_base(folder / "base", tie_word_embeddings=True, num_hidden_layers=1)
    jobs = [make_job(base, name, lora=lora, max_steps=2) for name, lora in TIED.items()]
    Trainer(compile(jobs), output=folder / "run", device="cpu", data=make_data(jobs)).run()
    return folder / "run"


@pytest.mark.parametrize("job", sorted(set(TIED) - {"bias"}))
def test_what_is_merged_into_a_tied_head_is_not_in_the_embedding(tied, tmp_path, job):
    """Nor the other way round; where they part, the config says so."""
    from peft import PeftModel

    from tlora_fx.model.backbone import load_backbone
    from tlora_fx.runtime.adapters.files import plain_base
    from tlora_fx.runtime.merge import job_of

    output = merge(adapter_of(tied, job), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float64)
    base = plain_base(load_backbone(job_of(tied / job).base))
    ids = torch.tensor([[5, 9, 3, 7]])
    plain = base(ids).logits.detach()
    adapted = PeftModel.from_pretrained(base, tied / job).eval()(ids).logits

    assert torch.allclose(merged.eval()(ids).logits, adapted, atol=1e-12)
    assert not torch.allclose(adapted, plain, atol=1e-6)
    assert merged.config.tie_word_embeddings == (job in ("plain", "tokens"))


def test_what_peft_cannot_merge_is_refused(tied, tmp_path):
    """A bias of B, where the base's linear has none."""
    with pytest.raises(RunFolderError, match="PEFT cannot merge this adapter"):
        merge(adapter_of(tied, "bias"), tmp_path / "merged")


def test_a_checkpoint_is_an_adapter_folder_too(run, tmp_path):
    """It is merged without a job's name, and equals the job's last step."""
    first, second = folders(run)
    one, two = (merge(adapter_of(at, None), tmp_path / at.parent.name) for at in (first, second))

    mine, theirs = (AutoModelForCausalLM.from_pretrained(at).state_dict() for at in (one, two))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("job", "told"), [("aa", "did you mean 'a'?"), (None, "name a job by --job")]
)
def test_an_adapter_that_is_not_there_is_told_with_those_that_are(run, job, told):
    """Misspelt, or one of several."""
    with pytest.raises(RunFolderError) as caught:
        adapter_of(run, job)

    assert told in str(caught.value)
    assert "a, dora" in str(caught.value)


def test_a_folder_in_use_is_not_overwritten(run, tmp_path):
    """Nor is anything loaded for it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")

    with pytest.raises(RunFolderError, match="holds something already"):
        merge(run / "a", tmp_path / "out")

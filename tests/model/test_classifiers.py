"""Jobs that classify sequences, against transformers' own classes and losses under PEFT alone."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.models import (
    FAMILIES,
    FEW,
    MIXTURES,
    VOCABULARY,
    Outcome,
    assert_same,
    error_of,
    job,
    ready,
    run_fused,
    save_config,
    tokens,
)
from tlora_fx.compiler import compile
from tlora_fx.config import base_task
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseRefused, JobError
from tlora_fx.ir.graph import HEAD
from tlora_fx.model.batch import JobTokens, pad
from tlora_fx.model.loss import predicted, row_losses
from tlora_fx.runtime.adapters.files import base_tensors, canonical_names

MANY = "multi_label_classification"
#: Labels of the base, and those of five sequences as transformers takes them.
PROBLEMS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "one of three": ({"labels": ["bad", "fair", "good"]}, [2, 0, 1, 1, 2]),
    "a number": ({"labels": 1}, [0.25, -3.0, 1e3, 0.0, -100.0]),
    "several": (
        {"labels": 4, "problem_type": MANY},
        [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]],
    ),
}
LENGTHS = {"a": [9, 4], "b": [6, 7, 3]}


def classifier(folder: Path, family: str, **fields: Any) -> BaseSpec:
    """A small base that classifies; `config` changes its config."""
    config = save_config(folder, family, **fields.pop("config", {}))
    return BaseSpec(config=config, dtype="float64", task="SEQ_CLS", **fields)


def two_jobs(base: BaseSpec, targets: Any):
    """Jobs of two ranks."""
    return [
        job("a", base, r=4, target_modules=list(targets)),
        job("b", base, r=2, target_modules=list(targets[:1])),
    ]


def code(label: Any) -> int:
    """A label as the integer that a sample has."""
    if isinstance(label, list):
        return sum(mark << index for index, mark in enumerate(label))
    if isinstance(label, float):
        return struct.unpack("<i", struct.pack("<f", label))[0]
    return label


def marked(lengths: list[int], labels: list[Any], seed: int, first: bool = False) -> JobTokens:
    """Random sequences, each with a label at the token that is read for it."""
    part, shift = tokens(lengths, seed=seed), 0
    drawn = [[1 + token % (VOCABULARY - 2) for token in ids] for ids in part.sequences]
    marks = [[-100] * len(ids) for ids in drawn]
    for line, label in zip(marks, labels, strict=True):
        line[0 if first else -1] = code(label)
    return JobTokens(drawn, marks, seed=seed, shift=shift)


def by_peft(model: Any, name: str, part: JobTokens, labels: list[Any], size: int) -> Outcome:
    """A job's loss sum and gradients by transformers' class, its own loss, and PEFT.

    size    lines of a batch, padded on the right
    """
    from peft import LoraConfig, TaskType, get_peft_model

    own, spec = next(own for own in model.jobs if own.name == name), model.backbone.spec
    config = AutoConfig.from_pretrained(spec.config, num_labels=len(spec.label_names))
    config.problem_type, config.pad_token_id = spec.objective, VOCABULARY - 1
    base = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    values, canonical = base_tensors(model.backbone), canonical_names(model.backbone)
    with torch.no_grad():
        for key, parameter in base.named_parameters(remove_duplicate=False):
            parameter.copy_(values[canonical[key]])
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, **own.lora_fields)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        wrapped: Any = get_peft_model(base, lora)
    trained = {key: p for key, p in wrapped.named_parameters() if p.requires_grad}
    mine = model.job_parameters(name)
    assert trained.keys() == mine.keys()
    with torch.no_grad():
        for key, parameter in mine.items():
            trained[key].copy_(parameter)
    kind, total = torch.int64 if spec.objective.startswith("single") else torch.float64, 0.0
    for start in range(0, len(labels), size):
        lines = [torch.tensor(ids) for ids in part.sequences[start : start + size]]
        ids = pad_sequence(lines, batch_first=True, padding_value=VOCABULARY - 1)
        out = wrapped.train()(
            input_ids=ids,
            attention_mask=(ids != VOCABULARY - 1).long(),
            labels=torch.tensor(labels[start : start + size], dtype=kind),
        )
        loss = out.loss * len(ids)
        loss.backward()
        total += loss.detach()
    return Outcome(total, {key: p.grad for key, p in trained.items()})


def assert_classifies(
    model: Any,
    labels: list[Any],
    bound: float,
    *,
    size: int = 3,
    first: bool = False,
    alone_bound: float = 1e-12,
) -> None:
    """Both jobs get together what PEFT gives each alone, and the same in a row of their own."""
    own = {"a": labels[:2], "b": labels[2:]}
    parts = [marked(LENGTHS[name], own[name], seed, first) for seed, name in enumerate("ab")]
    together = run_fused(model, parts)
    for index, name in enumerate("ab"):
        expected = by_peft(model, name, parts[index], own[name], size)
        assert_same(together[name], expected, bound, name)
        nothing = JobTokens((), ())
        alone = run_fused(
            model, [part if at == index else nothing for at, part in enumerate(parts)]
        )
        assert_same(alone[name], together[name], alone_bound, f"{name} alone")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_label_costs_what_transformers_says(problem):
    """The mean over five rows, and what is predicted is a label again."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    fields, labels = PROBLEMS[problem]
    base = BaseSpec(model="m", task="SEQ_CLS", **fields)
    count = len(base.label_names)
    logits = torch.randn(5, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    config = SimpleNamespace(problem_type=base.objective, num_labels=count)
    kind = torch.int64 if base.objective.startswith("single") else torch.float64
    wanted = torch.tensor(labels, dtype=kind)
    codes = torch.tensor([code(label) for label in labels])

    theirs = ForSequenceClassificationLoss(wanted, logits, config)
    assert torch.allclose(row_losses(logits, codes, base.objective).mean(), theirs)
    if base.objective.startswith("single"):
        exact = torch.eye(count)[wanted]
    else:
        exact = wanted[:, None] if base.objective == "regression" else 2 * wanted - 1
    assert predicted(exact, base.objective).tolist() == codes.tolist()


@pytest.mark.parametrize(
    "problem",
    [
        "one of three",
        pytest.param("a number", marks=pytest.mark.slow),
        pytest.param("several", marks=pytest.mark.slow),
    ],
)
def test_labels_are_learnt_as_transformers_and_peft_learn_them(tmp_path, problem):
    """Each problem type on Llama: losses and gradients of adapters and of each job's own head."""
    fields, labels = PROBLEMS[problem]
    model = ready(two_jobs(classifier(tmp_path, "llama", **fields), ["q_proj", "up_proj"]))

    assert model.group.form == "packed"
    assert any("score.modules_to_save" in name for name in model.job_parameters("b"))
    assert_classifies(model, labels, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*sorted({*FAMILIES, "mixtral"} - {"llama", "olmo2", "lfm2"})])
def test_a_decoder_classifies_as_transformers_has_it(tmp_path, family):
    """The families of which transformers has a class for it."""
    fields, labels = PROBLEMS["one of three"]
    targets = (MIXTURES.get(family) or FAMILIES[family]).targets
    base = classifier(tmp_path, family, **fields)
    if family == "mixtral":
        targets = ["q_proj"]
    jobs = [job(name, base, r=r, target_modules=list(targets)) for name, r in (("a", 4), ("b", 2))]

    # A padded line that a window leaves empty is NaN in transformers' own eager attention. By the
    # longest line of a batch, on the other hand, longrope chooses its frequencies.
    size = 3 if family == "phi3-longrope" else 1
    # Bloom's softmax is in float32, whatever the model's dtype, and adds by the line's length.
    alone_bound = 1e-6 if family == "bloom" else 1e-12
    assert_classifies(ready(jobs), labels, 1e-5, size=size, alone_bound=alone_bound)


#: Encoders that count their positions by the ids, from behind the id of padding.
COUNTING = ["roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm"]
COUNTING += ["data2vec-text"]
#: Encoders, which read the first token: config and targets.
_DIM = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
ENCODERS: dict[str, tuple[dict[str, Any], Any]] = {
    "bert": ({}, ["query", "value"]),
    # One layer, which runs twice.
    "albert": ({"embedding_size": 16}, "all-linear"),
    "electra": ({"embedding_size": 32}, "all-linear"),
    # PEFT takes its pre_classifier for a head, which is no target then.
    "distilbert": (_DIM, ["q_lin", "v_lin"]),
    **{name: ({"max_position_embeddings": 128}, "all-linear") for name in COUNTING},
    "modernbert": ({"global_attn_every_n_layers": 2, "local_attention": 8}, "all-linear"),
}
#: Encoders whose own attention knows no packed rows.
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
PADDED: dict[str, tuple[dict[str, Any], Any]] = {
    "mpnet": ({}, "all-linear"),
    "deberta-v2": ({**_RELATIVE, "share_att_key": True}, ["value_proj", "dense"]),
}


def encoder(folder: Path, name: str, rate: float = 0.0, **fields: Any) -> BaseSpec:
    """A small encoder that classifies, with this rate of all its dropouts."""
    few = {key: value for key, value in FEW.items() if not key.endswith("token_id")}
    own = {**ENCODERS, **PADDED}[name][0]
    sizes = {**few, "num_hidden_layers": 2, **own, "pad_token_id": VOCABULARY - 1}
    config = AutoConfig.for_model(name, **sizes)
    for key, value in list(vars(config).items()):
        if "drop" in key and (value is None or isinstance(value, float)):
            setattr(config, key, rate)
    config.save_pretrained(folder)
    return BaseSpec(config=folder, dtype="float64", task="SEQ_CLS", **fields)


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(n, marks=pytest.mark.slow) for n in list(ENCODERS)[1:])]
)
def test_an_encoder_classifies_packed_as_transformers_has_it(tmp_path, name):
    """Every token sees its own sequence, and the label stands at the first one."""
    fields, labels = PROBLEMS["one of three"]
    base, targets = encoder(tmp_path, name, **fields), ENCODERS[name][1]
    model = ready([job(own, base, r=4, target_modules=targets) for own in "ab"])

    assert model.group.form == "packed"
    assert_classifies(model, labels, 1e-6, size=1, first=True)


def test_dropouts_inside_a_trained_head_drop_what_they_drop_alone(tmp_path):
    """Each job has its copy of the whole head, and the tables that its part of the row needs."""
    fields, labels = PROBLEMS["one of three"]
    base = encoder(tmp_path, "roberta", 0.2, **fields)
    model = ready([job(own, base, r=2, target_modules=["query"]) for own in "ab"])
    parts = [marked(LENGTHS["a"], labels[:2], 0, True), marked(LENGTHS["b"], labels[2:], 1, True)]
    together, nothing = run_fused(model, parts), JobTokens((), ())

    assert HEAD in model.group.blocks
    for index, name in enumerate("ab"):
        alone = run_fused(model, [p if at == index else nothing for at, p in enumerate(parts)])
        assert_same(alone[name], together[name], 1e-12, name)


@pytest.mark.parametrize("name", ["mpnet", pytest.param("deberta-v2", marks=pytest.mark.slow)])
def test_an_encoder_with_its_own_attention_classifies_padded_lines(tmp_path, name):
    """Padding is hidden, whatever stands there and however much: a token sees its own line."""
    fields, labels = PROBLEMS["one of three"]
    base, targets = encoder(tmp_path, name, **fields), PADDED[name][1]
    model = ready([job(own, base, r=r, target_modules=targets) for own, r in (("a", 4), ("b", 2))])

    assert model.group.form == "batch"
    assert_classifies(model, labels, 1e-6, first=True)
    parts = [marked(LENGTHS["a"], labels[:2], 0, True), marked(LENGTHS["b"], labels[2:], 1, True)]
    first, second = (model(pad(parts, padding=token)).detach() for token in (0, 7))
    assert torch.equal(first, second)


@pytest.mark.slow
def test_an_encoder_is_padded_where_it_is_asked_for(tmp_path):
    """BERT, whose mask transformers makes, in batch form."""
    fields, labels = PROBLEMS["one of three"]
    base = encoder(tmp_path, "bert", attention="batch", **fields)
    model = ready(two_jobs(base, ["query", "value"]))

    assert model.group.form == "batch"
    assert_classifies(model, labels, 1e-6, first=True)


def test_an_encoder_that_nobody_knows_as_one_is_refused(tmp_path, monkeypatch):
    """Its class reads the first token, and labels would stand at the last."""
    monkeypatch.setattr(base_task, "ENCODERS", frozenset())
    base = encoder(tmp_path, "bert", **PROBLEMS["one of three"][0])

    with pytest.raises(BaseRefused, match="by its first token"):
        compile([job("one", base, target_modules=["query"])])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"labels": None}, "needs 'labels'"),
        ({"labels": ["a", "a"]}, "one label twice"),
        ({"labels": 0}, "one label at least"),
        ({"labels": 2, "problem_type": "regression"}, "one number"),
        ({"labels": 32, "problem_type": MANY}, "at most 31"),
        ({"task": "CAUSAL_LM", "labels": 2}, "task='SEQ_CLS'"),
    ],
)
def test_a_base_whose_labels_make_no_problem_is_refused(fields, words):
    """With what to write instead."""
    given = {"model": "some/base", "task": "SEQ_CLS", **fields}

    assert words in error_of(lambda: BaseSpec(**given), JobError)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "dpo"}, "the base classifies"),
        ({"packing": True}, "language models"),
        ({"sample_prompts": ["Hello"]}, "answers no"),
        ({"data": {"path": "x.jsonl", "format": "messages"}}, "learns from labels"),
        ({"lora": {"r": 2, "task_type": "CAUSAL_LM"}}, "is not the base's task"),
    ],
)
def test_what_only_language_models_do_is_refused_of_a_classifier(fields, words):
    """Before anything is read."""
    from tlora_fx.config.job import Job

    base = BaseSpec(model="some/base", task="SEQ_CLS", labels=2)
    given = {"name": "a", "base": base, "lora": {"r": 2}, "data": {"path": "x.jsonl"}, **fields}

    assert words in error_of(lambda: Job(**given), JobError)

"""Losses of a loop of one's own equal plain PEFT with torch: by token, by sequence, mixed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

from tests.runtime.groups import draw_samples, make_job, scored, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.errors import NotFinite, StepMisuse
from tlora_fx.model.loss import ChunkedLoss
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.group_step import Batch, GroupStep

TARGETS = ["q_proj", "down_proj"]
RL = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


def job_of(base, name, rank=4, **fields):
    """A job whose step of rate 1 subtracts its gradient."""
    lora = {"r": rank, "target_modules": TARGETS}
    settled = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    return make_job(base, name, lora=lora, max_grad_norm=None, **settled | fields)


def own_loss(logprobs, given):
    """It mixes the tokens of a sequence, and the sequences of a micro-batch."""
    means = torch.stack([own.mean() for own in logprobs])
    spread = torch.stack(
        [(own * of["weights"]).var(correction=0) for own, of in zip(logprobs, given, strict=True)]
    )
    return torch.logsumexp(-means, 0) + spread.sum(), {"mean": means.mean(), "count": len(means)}


def alone_loss(name, options, logprobs, of):
    """The sum of one sequence's token losses, written down apart from the product."""
    weights = of.get("weights", torch.ones_like(logprobs))
    if name == "cross_entropy":
        return -(weights * logprobs).sum()
    old, gain = of["logprobs"], of["advantages"]
    low = options.get("clip_low_threshold", 0.8)
    high = options.get("clip_high_threshold", 1.2)
    total = logprobs.new_zeros(())
    if name == "gspo":
        level = torch.exp((logprobs.detach() - old).sum() / len(old))
    for at in range(len(logprobs)):
        new, ratio = logprobs[at], torch.exp(logprobs[at] - old[at])
        if name == "importance_sampling":
            each = ratio * gain[at]
        elif name == "ppo":
            each = min(ratio * gain[at], ratio.clamp(low, high) * gain[at])
        elif name == "cispo":
            each = float(ratio.clamp(low, high)) * gain[at] * new
        elif name == "dro":
            each = gain[at] * new - options.get("beta", 0.05) / 2 * (new - old[at]) ** 2
        else:
            own = level * torch.exp(new - new.detach())
            each = min(own * gain[at], own.clamp(low, high) * gain[at])
        total = total - weights[at] * each
    return total


def by_peft(backbone, job, start, batches):
    """Loss, log-probabilities of each sample, and adapter after one step by its gradient."""
    torch.manual_seed(0)
    config = LoraConfig(r=job.lora["r"], target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(plain_base(backbone), config)
    set_peft_model_state_dict(model, {name: each.clone() for name, each in start.items()})
    model.train()
    total, kept, targets = 0.0, [], 0
    for batch in batches:
        for micro in batch.micro_batches:
            sequences, said = [], []
            for sample in micro:
                ids = torch.tensor([sample.input_ids])
                logits = model(input_ids=ids).logits[0].double().log_softmax(-1)
                places = [at for at, label in enumerate(sample.labels) if at and label != -100]
                sequences.append(torch.stack([logits[at - 1, sample.labels[at]] for at in places]))
                names = ("weights", "logprobs", "advantages")
                values = {name: getattr(sample, name) for name in names}
                said.append(
                    {
                        name: torch.tensor([of[at] for at in places], dtype=torch.float64)
                        for name, of in values.items()
                        if of is not None
                    }
                )
                targets += len(places)
            kept += [own.detach() for own in sequences]
            if callable(batch.loss):
                ones = [
                    {"weights": torch.ones_like(own)} | of
                    for own, of in zip(sequences, said, strict=True)
                ]
                part = batch.loss(sequences, ones)[0]
            else:
                pairs = zip(sequences, said, strict=True)
                part = sum(
                    alone_loss(batch.loss or "cross_entropy", batch.loss_options, *pair)
                    for pair in pairs
                )
            total = total + part
    divisor = 1.0 if batches[0].reduction == "sum" else targets
    (total / divisor).backward()
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    after = {
        name.replace(".default", ""): each.detach() - each.grad
        for name, each in model.named_parameters()
        if name in names
    }
    return float(total.detach() / divisor), kept, after


def assert_equal_to_peft(jobs, batches, within=1e-9):
    """Two steps of all jobs together, each compared with the job alone by PEFT."""
    group = GroupStep(compile(jobs), device="cpu")
    for _ in range(2):
        group.prepare() if group.runner is None else None
        starts = {job.name: group.member(job.name).final_adapter() for job in jobs}
        outputs = group.accumulate(batches)
        group.apply({job.name: {} for job in jobs})
        for job in jobs:
            loss, logprobs, after = by_peft(
                group.model.backbone, job, starts[job.name], [batches[job.name]]
            )
            found = outputs[job.name]
            assert found.error is None
            assert found.loss == pytest.approx(loss, rel=within, abs=within)
            if found.logprobs is not None:
                for mine, theirs in zip(found.logprobs, logprobs, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=0, atol=within)
            adapter = group.member(job.name).final_adapter()
            assert adapter.keys() == after.keys()
            for name, each in after.items():
                torch.testing.assert_close(adapter[name], each.to(adapter[name]), rtol=0, atol=1e-7)
    return outputs


def batch_of(name, draw, key, reduction="mean"):
    samples = [sample for sample in draw_samples(key, 9, 5) if len(sample.input_ids) > 2]
    samples = scored(samples, draw)
    cut = draw.randint(1, len(samples))
    micro = [each for each in (samples[:cut], samples[cut:]) if each]
    options = {}
    if name in ("ppo", "cispo", "gspo") and draw.random() < 0.5:
        options = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}
    loss = own_loss if name == "own" else name
    return Batch(micro, loss=loss, loss_options=options, reduction=reduction)


@pytest.mark.parametrize("name", ["cross_entropy", *RL, "own"])
def test_each_loss_equals_plain_peft(base, name):
    """Alone in its row: loss, log-probabilities and adapter, in float64."""
    job = job_of(base, "one")

    outputs = assert_equal_to_peft([job], {"one": batch_of(name, random.Random(3), name)})

    if name == "own":
        assert [metrics.keys() for metrics in outputs["one"].metrics] == [{"mean", "count"}] * 2


def test_padded_rows_have_the_same_losses(tmp_path):
    """In batch form, a line for each sequence; its attention's softmax is transformers' float32."""
    base = tiny_base(tmp_path, num_hidden_layers=1)
    padded = base.model_copy(update={"attention": "batch"})
    jobs = [job_of(padded, "one"), job_of(padded, "two", rank=2)]
    draw = random.Random(8)

    assert_equal_to_peft(
        jobs,
        {"one": batch_of("ppo", draw, "a"), "two": batch_of("gspo", draw, "b")},
        within=1e-7,
    )


def mixes(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


NAMES = st.sampled_from(["cross_entropy", *RL, "own", None])


def check_a_mix(base, names, seed, reduction):
    draw = random.Random(seed)
    jobs = [job_of(base, f"job{at}", rank=draw.choice([2, 4, 7])) for at in range(len(names))]
    batches = {
        job.name: Batch([draw_samples(f"{seed} {job.name}", 9, 4)])
        if name is None
        else batch_of(name, draw, f"{seed} {job.name}", reduction)
        for job, name in zip(jobs, names, strict=True)
    }
    assert_equal_to_peft(jobs, batches)


@mixes(2)
@given(
    st.lists(NAMES, min_size=3, max_size=3), st.integers(0, 10**6), st.sampled_from(["mean", "sum"])
)
def test_a_mix_of_losses_equals_plain_peft(base, names, seed, reduction):
    """Three jobs of random losses and ranks in one row."""
    check_a_mix(base, names, seed, reduction)


@pytest.mark.slow
@mixes(150)
@given(
    st.lists(NAMES, min_size=3, max_size=3), st.integers(0, 10**6), st.sampled_from(["mean", "sum"])
)
def test_many_mixes_of_losses_equal_plain_peft(base, names, seed, reduction):
    """As above, of many."""
    check_a_mix(base, names, seed, reduction)


def test_losses_in_several_chunks_are_those_in_one(base, monkeypatch):
    """The head works in pieces of two rows; log-probabilities keep their order."""
    job, other = job_of(base, "one"), job_of(base, "two", rank=2)
    draw = random.Random(5)
    batches = {"one": batch_of("ppo", draw, "x"), "two": batch_of("gspo", draw, "y")}
    made = ChunkedLoss.__init__

    def small(self, *args, **how):
        made(self, *args, **how)
        self.chunk_rows = 2

    monkeypatch.setattr(ChunkedLoss, "__init__", small)

    assert_equal_to_peft([job, other], batches)
    assert_equal_to_peft([job], {"one": batches["one"]})


def test_a_job_beside_other_losses_is_to_the_bit_what_it_is_beside_none(base):
    """By token, so that the head's gradient is taken ahead in both."""
    draw = random.Random(1)
    one = batch_of("ppo", draw, "p")
    found = []
    for names in (["cross_entropy", "cross_entropy"], ["importance_sampling", "dro"]):
        jobs = [job_of(base, name) for name in ("one", "two", "three")]
        group = GroupStep(compile(jobs), device="cpu")
        others = {"two": batch_of(names[0], draw, "q"), "three": batch_of(names[1], draw, "r")}
        out = group.accumulate({"one": one, **others})["one"]
        group.apply({"one": {}})
        found.append((out.loss, group.member("one").final_adapter()))

    assert found[0][0] == found[1][0]
    assert all(torch.equal(each, found[1][1][name]) for name, each in found[0][1].items())


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_what_samples_say_may_be_lists_or_tensors(base, kind):
    """A rollout's numbers come as either."""
    batch = batch_of("ppo", random.Random(7), "k")
    other = [
        [replace(s, logprobs=kind(s.logprobs), advantages=kind(s.advantages)) for s in micro]
        for micro in batch.micro_batches
    ]
    losses = [
        GroupStep(compile([job_of(base, "one")]), device="cpu")
        .accumulate({"one": each})["one"]
        .loss
        for each in (batch, replace(batch, micro_batches=other))
    ]

    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_gradients_of_sums_add_over_calls(base):
    """Two calls with half a batch each are one call with all of it."""
    batch = batch_of("cispo", random.Random(2), "z", reduction="sum")
    samples = [sample for micro in batch.micro_batches for sample in micro]
    adapters = []
    for parts in ([samples], [samples[:2], samples[2:]]):
        group = GroupStep(compile([job_of(base, "one")]), device="cpu")
        for part in parts:
            group.accumulate({"one": replace(batch, micro_batches=[part])})
        group.apply({"one": {}})
        adapters.append(group.member("one").final_adapter())

    for name, each in adapters[0].items():
        torch.testing.assert_close(each, adapters[1][name], rtol=0, atol=1e-12)


def test_scores_are_the_log_probabilities_that_training_sees(base):
    """Of the adapter as it is, and of the base alone; gradients stay as they are."""
    jobs = [job_of(base, "one"), job_of(base, "two", rank=2)]
    group = GroupStep(compile(jobs), device="cpu")
    batch = batch_of("cross_entropy", random.Random(4), "s")
    untrained = group.score({"one": batch.micro_batches})["one"]
    first = group.accumulate({"one": batch, "two": batch})["one"]
    group.apply({"one": {}, "two": {}})
    second = group.accumulate({"one": batch})["one"]

    scored = group.score({"two": batch.micro_batches, "one": batch.micro_batches})
    base_alone = group.score({"one": batch.micro_batches}, by_base=True)["one"]

    for mine, theirs in zip(scored["one"], second.logprobs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for mine, theirs, before in zip(base_alone, first.logprobs, untrained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(before, theirs, rtol=0, atol=1e-12)
    assert group.apply({"one": {}})["one"].step == 2


def test_an_own_loss_that_fails_leaves_its_neighbours(base):
    """Its exception stands in its output; a loss that is not finite likewise."""
    jobs = [job_of(base, "one"), job_of(base, "two"), job_of(base, "three")]
    group = GroupStep(compile(jobs), device="cpu")
    good = batch_of("ppo", random.Random(6), "g")

    def fails(logprobs, given):
        raise ZeroDivisionError("mine")

    def detached(logprobs, given):
        return logprobs[0].sum().detach()

    wild = replace(
        good,
        loss="importance_sampling",
        loss_options={},
        micro_batches=[
            [replace(s, logprobs=(-1e4,) * len(s.labels)) for s in good.micro_batches[0]]
        ],
    )
    out = group.accumulate(
        {"one": replace(good, loss=fails, loss_options={}), "two": good, "three": wild}
    )

    assert isinstance(out["one"].error, ZeroDivisionError)
    assert isinstance(out["three"].error, NotFinite)
    assert out["two"].error is None
    alone = GroupStep(compile([jobs[1]]), device="cpu")
    assert alone.accumulate({"two": good})["two"].loss == pytest.approx(out["two"].loss, rel=1e-12)
    assert group.apply({"two": {}})["two"].updated
    wrong = group.accumulate({"one": replace(good, loss=detached, loss_options={})})["one"]
    assert "does not depend on the log-probabilities" in str(wrong.error)


def bad(sample, **changes):
    return Batch([[replace(sample, **changes)]], loss="ppo")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (lambda s: [[s]], "samples say what the batch's loss does not read"),
        (lambda s: Batch([[s]], loss="pop"), "there is no such loss"),
        (lambda s: Batch([[s]], loss=3), "a loss is a name, or a function"),
        (lambda s: Batch([[s]], loss="ppo", loss_options={"clip": 1}), "takes no such option"),
        (lambda s: Batch([[s]], loss=own_loss, loss_options={"a": 1}), "takes no such option"),
        (
            lambda s: Batch([[Sample(s.input_ids, s.labels)]], loss_options={"beta": 1}),
            "options are of a loss with a name",
        ),
        (lambda s: Batch([[s]], loss="ppo", reduction="max"), "there is no such reduction"),
        (lambda s: bad(s, logprobs=None), "logprobs of sample 0 do not fit"),
        (lambda s: bad(s, advantages=(1.0,)), "advantages of sample 0 do not fit"),
        (lambda s: bad(s, advantages=(math.nan,) * 3), "advantages of sample 0 do not fit"),
        (lambda s: bad(s, weights=(1.0, math.inf, 1.0)), "weights of sample 0 do not fit"),
        (lambda s: bad(s, logprobs=(0.0, -1.0, 0.5)), "found     0.5 at 2"),
    ],
)
def test_a_batch_that_does_not_fit_its_loss_is_refused(base, batch, said):
    """Before anything runs, by what is wrong with it."""
    sample = Sample((1, 2, 3), (-100, 2, 3), logprobs=(0.0, -1.0, -1.0), advantages=(0.0, 1.0, 1.0))
    group = GroupStep(compile([job_of(base, "one")]), device="cpu")

    with pytest.raises(StepMisuse) as raised:
        group.accumulate({"one": batch(sample)})

    assert said in str(raised.value)
    # What stands beside no target is not read, and rounding is none's mistake.
    sample = replace(sample, logprobs=(9.0, 1e-6, -1.0))
    assert not group.accumulate({"one": Batch([[sample]], loss="ppo")})["one"].error


def test_a_trainer_takes_no_samples_that_its_loss_does_not_read(base):
    """Weights would change nothing there."""
    sample = Sample((1, 2, 3), (-100, 2, 3), weights=(1.0, 1.0, 0.5))

    with pytest.raises(StepMisuse, match="samples say what the job's loss does not read"):
        JobData(job_of(base, "one"), [sample], DataReport())


def test_a_job_that_compares_pairs_has_its_loss(base):
    """dpo and a loss with a name do not go together."""
    group = GroupStep(compile([job_of(base, "one", method="dpo")]), device="cpu")
    sample = Sample((1, 2, 3), (-100, 2, 3))

    with pytest.raises(StepMisuse, match="the job has a loss already"):
        group.accumulate({"one": Batch([[sample, sample]], loss="cross_entropy")})

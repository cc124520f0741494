"""Jobs sample in one batch what each samples alone, with the trainer's log-probabilities."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel, set_peft_model_state_dict

from tests.models import hand_written, plain
from tests.runtime.groups import VOCABULARY, make_job, tiny_base
from tlora_fx import Batch, GroupStep, OpenSlots, Sampler
from tlora_fx.compiler import compile, resolve_pipeline
from tlora_fx.errors import GenerationError, StepMisuse
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.runtime.sampling.engine import Engine
from tlora_fx.tracing.adapters import written_config

KINDS = {
    "plain": {"r": 4},
    "scaled": {"r": 8, "use_rslora": True, "target_modules": "all-linear", "lora_alpha": 16},
    "dora": {"r": 2, "use_dora": True},
    "head": {"r": 3, "modules_to_save": ["lm_head"], "lora_dropout": 0.5},
}
WITHIN = {"float64": 1e-10, "float32": 1e-5}
EXACT = {"max_new_tokens": 7, "stop": ()}


def group_of(base, names=KINDS, pipeline=None):
    """A group whose adapters are drawn by their names."""
    jobs = [make_job(base, name, lora=KINDS[name]) for name in names]
    group = GroupStep(compile(jobs, pipeline=pipeline), device="cpu")
    group.prepare()
    for name in names:
        draw_adapter(group, name, name)
    return group


def draw_adapter(group, name, key):
    seed = torch.Generator().manual_seed(random.Random(key).getrandbits(32))
    with torch.no_grad():
        for parameter in group.member(name).parameters.values():
            noise = torch.randn(parameter.shape, generator=seed, dtype=torch.float64)
            parameter.add_(noise.to(parameter) * 0.2)


def by_peft(group, name):
    """The base of transformers under the job's adapter as it is now, by PEFT alone."""
    job = group.member(name).job
    base = plain_base(group.model.backbone)
    model = PeftModel(base, written_config(job, group.model.backbone))
    set_peft_model_state_dict(model, dict(group.member(name).final_adapter()))
    return model.eval()


def drawn_prompts(key, counts=(1, 3, 17, 33)):
    draw = random.Random(key)
    return [[draw.randrange(VOCABULARY) for _ in range(count)] for count in counts]


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    return group_of(tiny_base(tmp_path_factory.mktemp("base"), initializer_range=0.2))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return group_of(tiny_base(tmp_path_factory.mktemp("base"), "float32", initializer_range=0.2))


@pytest.fixture(params=["double", pytest.param("single", marks=pytest.mark.slow)])
def group(request):
    return request.getfixturevalue(request.param)


def test_greedy_tokens_are_those_of_peft(group):
    """Four kinds of adapters in one batch, by two places for eight prompts of each."""
    prompts = {name: drawn_prompts(name) for name in KINDS}

    drawn = Sampler(group, max_sequences=5).sample(prompts, temperature=0, **EXACT)

    assert len({each[0].tokens for of in drawn.values() for each in of}) > len(KINDS)
    for name, of in drawn.items():
        model = by_peft(group, name)
        for prompt, [completion] in zip(prompts[name], of, strict=True):
            ids = torch.tensor([prompt])
            written = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=7,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert completion.tokens == tuple(written[0, len(prompt) :].tolist())
            assert completion.finish_reason == "length"


def test_log_probabilities_are_those_of_the_trainer(group):
    """As `accumulate` and `score` compute them of the whole sequence, whatever the filters."""
    prompts = {name: drawn_prompts(name) for name in KINDS}
    sampler = Sampler(group)
    drawn = sampler.sample(prompts, n=2, temperature=0.7, top_p=0.9, top_k=20, seed=3, **EXACT)
    given = {
        name: [completion.to_sample(1.0) for of in each for completion in of]
        for name, each in drawn.items()
    }

    batches = {name: Batch([samples], loss="ppo") for name, samples in given.items()}
    trained = group.accumulate({name: each for name, each in batches.items() if name != "head"})
    scored = group.score({name: [samples] for name, samples in given.items()})
    group.drop(member.index for member in group.members.values())

    within = WITHIN[str(group.model.backbone.spec.dtype)]
    for name, samples in given.items():
        found = {"score": scored[name]}
        if name in trained:  # the others' dropout is at work while they train
            found["accumulate"] = trained[name].logprobs
        for trainers in found.values():
            for sample, theirs in zip(samples, trainers, strict=True):
                mine = torch.tensor(sample.logprobs[-len(theirs) :], dtype=theirs.dtype)
                torch.testing.assert_close(mine, theirs, rtol=0, atol=within)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_completion_depends_on_nothing_but_itself(double, data):
    """Neither on others, nor on the order, nor on places, pages and rows; only the seed counts."""
    names = data.draw(st.permutations(list(KINDS)))[: data.draw(st.integers(1, 4))]
    prompts = {
        name: data.draw(st.permutations(drawn_prompts(name)))[: data.draw(st.integers(1, 4))]
        for name in names
    }
    options = {"n": data.draw(st.integers(1, 3)), "temperature": 1.3, "top_p": 0.95, "seed": 5}
    cache = data.draw(st.sampled_from([None, 48, 100]))
    group = GroupStep.__new__(GroupStep)
    group.__dict__ |= double.__dict__ | {"row_tokens": data.draw(st.sampled_from([1, 20, 16384]))}
    sampler = Sampler(group, max_sequences=data.draw(st.integers(1, 6)), cache_tokens=cache)

    drawn = sampler.sample(prompts, **options, **EXACT)

    for name in names:
        for prompt, of in zip(prompts[name], drawn[name], strict=True):
            [alone] = Sampler(double).sample({name: [prompt]}, **options, **EXACT)[name]
            for mine, own in zip(of, alone, strict=True):
                assert (mine.prompt, mine.tokens) == (tuple(prompt), own.tokens)
                assert mine.logprobs == pytest.approx(own.logprobs, abs=1e-10)


def test_seeds_samples_and_equal_prompts_draw_other_tokens(double):
    """Five completions of one prompt by one adapter, and all are others; a seed repeats them."""
    sampler = Sampler(double)
    options = {"n": 2, "temperature": 2.0, **EXACT}

    def drawn(seed):
        of = sampler.sample({"plain": [[1, 2]] * 2}, seed=seed, **options)["plain"]
        return [completion.tokens for each in of for completion in each]

    assert len({*drawn(1), *drawn(2)}) == 8
    assert drawn(1) == drawn(1)
    torch.manual_seed(0)
    first = drawn(None)
    assert drawn(None) != first
    torch.manual_seed(0)
    assert drawn(None) == first


def test_fewer_tokens_are_the_beginning_of_more(double):
    """The limit does not change what comes before it."""
    options = {"seed": 1, "stop": ()}
    sampler = Sampler(double)

    short = sampler.sample({"plain": [[1, 2]]}, max_new_tokens=3, **options)["plain"][0][0]
    long = sampler.sample({"plain": [[1, 2]]}, max_new_tokens=9, **options)["plain"][0][0]

    assert long.tokens[:3] == short.tokens


def test_a_mode_of_the_caller_changes_no_token(double):
    """Another default device is put aside; autocast, which would change numbers, is refused."""
    sampler, options = Sampler(double), {"seed": 1, "max_new_tokens": 3, "stop": ()}
    expected = sampler.sample({"plain": [[1, 2]]}, **options)

    with torch.device("meta"):
        assert sampler.sample({"plain": [[1, 2]]}, **options) == expected
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(StepMisuse, match="autocast"):
        sampler.sample({"plain": [[1, 2]]}, **options)


def test_the_adapters_of_the_moment_are_sampled(double):
    """After an optimizer step, and for the jobs that did one alone."""
    sampler = Sampler(double)
    prompts = {name: drawn_prompts(name) for name in ("plain", "scaled")}
    before = sampler.sample(prompts, temperature=0, **EXACT)
    kept = {key: each.detach().clone() for key, each in double.member("plain").parameters.items()}
    samples = [each[0].to_sample(-1.0) for each in before["plain"]]
    gradients = Batch([samples], loss="importance_sampling")

    double.accumulate({"plain": gradients})
    double.apply({"plain": {"lr": 0.3}})
    after = sampler.sample(prompts, temperature=0, **EXACT)
    with torch.no_grad():
        for key, each in double.member("plain").parameters.items():
            each.copy_(kept[key])

    assert after["scaled"] == before["scaled"]
    assert after["plain"] != before["plain"]
    [[greedy], *_] = after["plain"]
    assert greedy.logprobs != before["plain"][0][0].logprobs


def test_sampling_leaves_gathered_gradients_alone(double):
    """Between two calls of `accumulate`."""
    samples = [
        each[0].to_sample(1.0)
        for each in Sampler(double).sample({"plain": drawn_prompts("plain")}, seed=1, **EXACT)[
            "plain"
        ]
    ]
    double.accumulate({"plain": Batch([samples], loss="ppo")})
    parameters = double.member("plain").parameters
    before = {key: each.grad.clone() for key, each in parameters.items()}

    Sampler(double).sample({"plain": [[1]], "dora": [[2]]}, **EXACT)

    assert all(torch.equal(each.grad, before[key]) for key, each in parameters.items())
    assert any(each.any() for each in before.values())
    double.drop([double.member("plain").index])


def test_a_stop_token_is_the_end_of_a_completion(double):
    """Of the greedy tokens, each that comes for the first time ends it there."""
    sampler = Sampler(double)
    [[whole]] = sampler.sample({"dora": [[7, 8]]}, temperature=0, **EXACT)["dora"]

    for at, token in enumerate(whole.tokens):
        [[stopped]] = sampler.sample(
            {"dora": [[7, 8]]}, temperature=0, max_new_tokens=7, stop=[token]
        )["dora"]
        end = whole.tokens.index(token) + 1
        assert stopped.tokens == whole.tokens[:end]
        assert stopped.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-10)
        assert stopped.finish_reason == "stop"
        assert end <= at + 1


class Letters:
    """A tokenizer of letters."""

    def decode(self, ids, **_):
        return "".join(chr(65 + token) for token in ids)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(double):
    """A string of two letters, each a token."""
    sampler = Sampler(double, tokenizer=Letters())
    [[whole]] = sampler.sample({"dora": [[7, 8]]}, temperature=0, **EXACT)["dora"]
    text = Letters().decode(whole.tokens)

    [[stopped]] = sampler.sample(
        {"dora": [[7, 8]]}, temperature=0, max_new_tokens=7, stop=["nowhere", text[2:4]]
    )["dora"]

    assert stopped.tokens == whole.tokens[: text.index(text[2:4]) + 2]
    assert stopped.finish_reason == "stop"


def test_the_end_tokens_of_the_base_end_a_completion_by_default(tmp_path):
    """Those of its generation config, or of its config."""
    base = tiny_base(tmp_path, eos_token_id=list(range(40)))
    sampler = Sampler(group_of(base, ["plain"]))

    drawn = sampler.sample({"plain": [[1]]}, max_new_tokens=30, n=8, seed=1)["plain"][0]

    for completion in drawn:
        assert [token < 40 for token in completion.tokens] == [
            *[False] * (len(completion.tokens) - 1),
            completion.finish_reason == "stop",
        ]


def test_a_completion_ends_where_the_base_has_no_more_positions(double):
    """The base has 64; a prompt of 60 tokens leaves four."""
    [[drawn]] = Sampler(double).sample({"plain": [[1] * 60]}, **EXACT)["plain"]

    assert (len(drawn.tokens), drawn.finish_reason) == (4, "length")


def test_numbers_that_are_not_finite_end_one_job_alone(tmp_path):
    """Its pages are then another's, who reads nothing of them."""
    group = group_of(tiny_base(tmp_path, initializer_range=0.2), ["plain", "scaled"])
    sampler = Sampler(group, max_sequences=2)
    prompts = {"plain": drawn_prompts("plain"), "scaled": drawn_prompts("scaled")}
    before = sampler.sample(prompts, seed=1, **EXACT)
    with torch.no_grad():
        for parameter in group.member("plain").parameters.values():
            parameter.fill_(torch.nan)

    after = sampler.sample(prompts, seed=1, **EXACT)

    assert after["scaled"] == before["scaled"]
    assert {(each.tokens, each.finish_reason) for [each] in after["plain"]} == {((), "not_finite")}


# The library's product in 4 bits rounds otherwise for another number of tokens, and several threads
# round otherwise than one.
@pytest.mark.parametrize(("form", "within"), [("int8", 2e-5), ("nf4", 5e-5)])
def test_a_quantised_base_is_sampled(tmp_path, form, within):
    """Log-probabilities are those of the trainer, on the stored base."""
    base = tiny_base(
        tmp_path, "float32", hidden_size=64, intermediate_size=64, initializer_range=0.2
    )
    pipeline = resolve_pipeline(
        None, [f"quantize-base{{to={form} at-least=256}}@before:lower-adapters"]
    )
    group = group_of(base, ["plain", "scaled"], pipeline)
    prompts = {name: drawn_prompts(name) for name in ("plain", "scaled")}

    drawn = Sampler(group).sample(prompts, seed=1, **EXACT)

    for name, of in drawn.items():
        samples = [each.to_sample(1.0) for [each] in of]
        scored = group.score({name: [samples]})[name]
        for [completion], theirs in zip(of, scored, strict=True):
            mine = torch.tensor(completion.logprobs)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=within)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
BASES = {
    # Every other layer sees four tokens, and scores are bent.
    "Gemma2Config": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    # Heads have sinks.
    "GptOssConfig": {"sliding_window": 4, **EXPERTS},
    "Qwen3MoeConfig": {"moe_intermediate_size": 24, **EXPERTS},
    # Positions have embeddings.
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
}


@pytest.mark.parametrize("name", BASES)
def test_other_bases_sample_what_they_train(tmp_path, name):
    """Log-probabilities are those of the trainer."""
    import transformers

    sizes = {"vocab_size": VOCABULARY} if name == "GPT2Config" else SIZES
    getattr(transformers, name)(**sizes, **BASES[name]).save_pretrained(tmp_path)
    base = tiny_base(Path(tmp_path, "other")).model_copy(update={"config": tmp_path})
    targets = ["c_attn"] if name == "GPT2Config" else ["q_proj", "o_proj"]
    jobs = [make_job(base, job, lora={"r": 4, "target_modules": targets}) for job in "ab"]
    group = GroupStep(compile(jobs), device="cpu")
    group.prepare()
    draw_adapter(group, "b", "b")

    drawn = Sampler(group).sample({"b": drawn_prompts("x")}, n=2, seed=1, **EXACT)["b"]

    samples = [completion.to_sample(1.0) for of in drawn for completion in of]
    for sample, theirs in zip(samples, group.score({"b": [samples]})["b"], strict=True):
        mine = torch.tensor(sample.logprobs[-len(theirs) :], dtype=theirs.dtype)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_jobs_that_come_are_sampled_and_those_that_left_are_not(tmp_path):
    """A job that is admitted draws what it draws alone."""
    base = tiny_base(tmp_path, initializer_range=0.2)
    jobs = [make_job(base, name, lora={"r": 4}) for name in ("plain", "late")]
    group = GroupStep(compile(jobs[:1], open=OpenSlots(rows=16, jobs=3, rank=8)), device="cpu")
    group.prepare()
    sampler = Sampler(group)
    prompts = drawn_prompts("late")

    group.admit(jobs[1])
    draw_adapter(group, "late", "late")
    drawn = sampler.sample({"late": prompts, "plain": prompts}, seed=1, **EXACT)
    group.release("plain")
    alone = sampler.sample({"late": prompts}, seed=1, **EXACT)

    assert alone["late"] == drawn["late"] != drawn["plain"]
    with pytest.raises(StepMisuse, match="no such job"):
        sampler.sample({"plain": prompts}, **EXACT)


def test_long_frequencies_bound_the_positions(tmp_path):
    """Phi 3 has 64 positions, of which 32 keep the short frequencies of those before them."""
    import transformers

    config = transformers.Phi3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, max_position_embeddings=64, original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 4,
            "short_factor": [1.0] * 4, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    base = tiny_base(Path(tmp_path, "other")).model_copy(update={"config": tmp_path})
    job = make_job(base, "a", lora={"target_modules": ["qkv_proj"]})
    group = GroupStep(compile([job]), device="cpu")

    [[drawn]] = Sampler(group).sample({"a": [[1] * 28]}, max_new_tokens=9, stop=())["a"]

    assert (len(drawn.tokens), drawn.finish_reason) == (4, "length")
    [theirs] = group.score({"a": [[drawn.to_sample(1.0)]]})["a"]
    mine = torch.tensor(drawn.logprobs, dtype=theirs.dtype)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_a_base_that_mixes_neighbouring_tokens_is_refused(tmp_path):
    """LFM2: a convolution reads the tokens before, of which no keys are kept."""
    import transformers

    config = transformers.Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["conv"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    base = tiny_base(Path(tmp_path, "other")).model_copy(update={"config": tmp_path})
    job = make_job(base, "a", lora={"target_modules": ["in_proj"]})

    with pytest.raises(GenerationError, match="sequence_conv1d"):
        Sampler(GroupStep(compile([job]), device="cpu"))


@pytest.mark.parametrize(
    ("prompts", "options", "told"),
    [
        ({"plain": [[]]}, {}, "a token at least"),
        ({"plain": ["text"]}, {}, "a list of token ids"),
        ({"plain": [[VOCABULARY]]}, {}, f"from 0 to {VOCABULARY - 1}"),
        ({"plain": [[-1]]}, {}, "from 0 to"),
        ({"plain": [[1] * 64]}, {}, "fewer than 64 tokens"),
        ({"plain": [[1]]}, {"temperature": -0.1}, "temperature"),
        ({"plain": [[1]]}, {"temperature": float("nan")}, "temperature"),
        ({"plain": [[1]]}, {"top_p": 0.0}, "top_p"),
        ({"plain": [[1]]}, {"top_p": 1.1}, "top_p"),
        ({"plain": [[1]]}, {"top_k": -1}, "top_k"),
        ({"plain": [[1]]}, {"n": 0}, "n cannot"),
        ({"plain": [[1]]}, {"max_new_tokens": 0}, "max_new_tokens"),
        ({"plain": [[1]]}, {"stop": [""]}, "stop"),
        ({"plain": [[1]]}, {"stop": [1.5]}, "stop"),
        ({"plain": [[1] * 60]}, {}, "cache_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_is_refused(double, prompts, options, told):
    """Before anything runs."""
    sampler = Sampler(double, cache_tokens=48)

    with pytest.raises(GenerationError, match=told):
        sampler.sample(prompts, **{**EXACT, **options})


def test_a_job_that_does_not_train_here_is_refused(double):
    """With the names of those that do."""
    with pytest.raises(StepMisuse, match="no such job"):
        Sampler(double).sample({"stranger": [[1]]}, **EXACT)


def test_nothing_is_asked_of_nobody(double):
    """No job, and a job without prompts."""
    assert Sampler(double).sample({}, **EXACT) == {}
    assert Sampler(double).sample({"plain": []}, **EXACT) == {"plain": []}


def test_a_base_in_padded_lines_is_refused():
    """It keeps no keys and values."""
    jobs = hand_written(plain(layers=1), "batch")

    with pytest.raises(GenerationError, match="padded lines"):
        Sampler(GroupStep(compile(jobs), device="cpu"))


def test_a_completion_is_a_sample_of_its_own_tokens(double):
    """Prompt tokens are no targets; each token has its log-probability and the advantage."""
    [[drawn]] = Sampler(double).sample({"plain": [[3, 4]]}, seed=1, **EXACT)["plain"]

    sample = replace(drawn, tokens=drawn.tokens[:2], logprobs=(-1.0, -2.0)).to_sample(0.5)

    assert sample.input_ids == (3, 4, *drawn.tokens[:2])
    assert sample.labels == (-100, -100, *drawn.tokens[:2])
    assert sample.logprobs == (0.0, 0.0, -1.0, -2.0)
    assert sample.advantages == (0.0, 0.0, 0.5, 0.5)


class Rows:
    """Captured rows of a step, which keep memory."""

    def __init__(self):
        self.keys, self.cleared = ["one"], 0

    def clear(self):
        self.keys, self.cleared = [], self.cleared + 1


@pytest.mark.parametrize("failures", [1, 2])
def test_completions_take_the_memory_of_captured_rows(double, monkeypatch, failures):
    """They are drawn again, to the same tokens; without memory even so, the call fails."""
    sampler, prompts, rows = Sampler(double), {"plain": drawn_prompts("memory")}, Rows()
    expected = sampler.sample(prompts, seed=3, **EXACT)
    left, run = [failures], Engine.run

    def runs(self, sequences):
        run(self, sequences)
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "run", runs)
    monkeypatch.setattr(double.runner, "graphs", rows)
    if failures > 1:
        with pytest.raises(torch.OutOfMemoryError):
            sampler.sample(prompts, seed=3, **EXACT)
    else:
        assert sampler.sample(prompts, seed=3, **EXACT) == expected
    assert rows.cleared == 1

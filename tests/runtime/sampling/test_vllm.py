"""A vLLM server samples for jobs; here PEFT answers in the server's words.

The server below speaks as the source of vLLM says (entrypoints/openai, read on 2026-11-29). No real
server has run these tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel

from tests.runtime.groups import make_job, tiny_base
from tests.runtime.sampling.test_sampler import draw_adapter, drawn_prompts
from tlora_fx import Batch, GroupStep, Sampler, VllmSampler
from tlora_fx.compiler import compile
from tlora_fx.errors import GenerationError, SamplingServerError, StepMisuse
from tlora_fx.runtime.adapters.files import plain_base

LORA = {
    "plain": {"r": 4},
    "scaled": {"r": 8, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"r": 2, "use_dora": True},
    "patterned": {"r": 2, "rank_pattern": {"q_proj": 4}},
}
GREEDY = {"max_new_tokens": 5, "temperature": 0, "stop": ()}


class Server:
    """Loads adapter folders by PEFT, and answers with the most likely tokens."""

    def __init__(self, backbone):
        self.backbone, self.loaded, self.said = backbone, {}, []
        self.fails: dict[str, httpx.Response] = {}

    def __call__(self, request):
        body, path = json.loads(request.content), request.url.path
        self.said.append((path, body))
        if path in self.fails:
            return self.fails[path]
        return getattr(self, path.rpartition("/")[2])(body)

    def load_lora_adapter(self, body):
        name = body["lora_name"]
        if name in self.loaded:
            return httpx.Response(400, json={"error": {"message": "has already been loaded"}})
        model = PeftModel.from_pretrained(plain_base(self.backbone), body["lora_path"])
        self.loaded[name] = model.eval()
        return httpx.Response(200, text=f"Success: LoRA adapter '{name}' added successfully.")

    def unload_lora_adapter(self, body):
        del self.loaded[body["lora_name"]]
        return httpx.Response(200, text="Success")

    def completions(self, body):
        if body["model"] not in self.loaded:
            return httpx.Response(404, json={"error": {"message": "The model does not exist."}})
        assert body["temperature"] == 0
        ids, logprobs = list(body["prompt"]), []
        while len(logprobs) < body["max_tokens"]:
            with torch.no_grad():
                logits = self.loaded[body["model"]](input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            logprobs.append(float(logits.double().log_softmax(-1)[ids[-1]]))
            if ids[-1] in body["stop_token_ids"]:
                break
        count = len(logprobs)
        reason = "stop" if ids[-1] in body["stop_token_ids"] else "length"
        choices = [
            {
                "index": index,
                "text": "",
                "token_ids": ids[-count:],
                "finish_reason": reason,
                "stop_reason": None,
                "logprobs": {"token_logprobs": logprobs, "tokens": [""] * count},
            }
            for index in reversed(range(body["n"]))
        ]
        return httpx.Response(200, json={"model": body["model"], "choices": choices})


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    base = tiny_base(tmp_path_factory.mktemp("base"), initializer_range=0.2)
    group = GroupStep(
        compile([make_job(base, name, lora=lora) for name, lora in LORA.items()]), device="cpu"
    )
    group.prepare()
    for name in LORA:
        draw_adapter(group, name, name)
    return group


@pytest.fixture
def server(group):
    return Server(group.model.backbone)


@pytest.fixture
def sampler(group, server, tmp_path):
    client = httpx.Client(transport=httpx.MockTransport(server))
    return VllmSampler(group, folder=tmp_path, client=client)


def test_the_server_answers_as_the_sampler_in_process(group, sampler):
    """By the adapters' folders, whose tokens and log-probabilities are the trainer's."""
    prompts = {name: drawn_prompts(name) for name in ("plain", "scaled")}

    theirs = sampler.sample(prompts, n=2, **GREEDY)
    mine = Sampler(group).sample(prompts, n=2, **GREEDY)

    for name in prompts:
        for own, other in zip(mine[name], theirs[name], strict=True):
            for each, answer in zip(own, other, strict=True):
                assert (answer.prompt, answer.tokens) == (each.prompt, each.tokens)
                assert answer.finish_reason == each.finish_reason == "length"
                assert answer.logprobs == pytest.approx(each.logprobs, abs=1e-6)


def test_a_version_is_loaded_once_and_replaced_when_it_changes(group, server, sampler, tmp_path):
    """Under another name each time, and the one before is unloaded and deleted."""
    prompts = {"plain": [[1, 2]], "scaled": [[3]]}
    first = sampler.sample(prompts, **GREEDY)
    names = set(server.loaded)
    sampler.sample(prompts, **GREEDY)
    assert set(server.loaded) == names
    kept = {key: each.detach().clone() for key, each in group.member("plain").parameters.items()}
    samples = [each.to_sample(-1.0) for each in first["plain"][0]]
    group.accumulate({"plain": Batch([samples], loss="importance_sampling")})
    group.apply({"plain": {"lr": 0.3}})

    second = sampler.sample(prompts, **GREEDY)
    with torch.no_grad():
        for key, each in group.member("plain").parameters.items():
            each.copy_(kept[key])

    assert len(set(server.loaded) & names) == 1
    assert len(server.loaded) == 2
    assert {path.name for path in tmp_path.iterdir()} == set(server.loaded)
    assert second["scaled"] == first["scaled"]
    assert second["plain"] != first["plain"]


def test_closing_unloads_and_deletes_all(group, server):
    """Also the folder, where it is the sampler's own."""
    client = httpx.Client(transport=httpx.MockTransport(server))
    with VllmSampler(group, client=client) as sampler:
        sampler.sample({"plain": [[1]]}, **GREEDY)
        folder = Path(sampler.folder)
        assert len(server.loaded) == len(list(folder.iterdir())) == 1

    assert server.loaded == {}
    assert not folder.exists()


def test_the_server_is_asked_for_what_the_sampler_was(server, sampler):
    """Seeds are of the seed, the prompt and its occurrence; defaults of the server do not count."""
    sampler.sample({"plain": [[1], [1], [2]]}, seed=1, **GREEDY)
    sampler.sample({"plain": [[2]]}, seed=1, max_new_tokens=5, temperature=0, stop=["a", 7, 3])
    sampler.sample({"plain": [[2]]}, seed=2, max_new_tokens=5, temperature=0)

    bodies = [body for path, body in server.said if path == "/v1/completions"]
    of = {(tuple(body["prompt"]), body["seed"]) for body in bodies[:3]}
    assert len(of) == 3
    again, other = bodies[3:]
    assert ((2,), again["seed"]) in of
    assert other["seed"] != again["seed"]
    assert (again["stop"], again["stop_token_ids"], again["ignore_eos"]) == (["a"], [3, 7], True)
    assert (other["stop"], other["stop_token_ids"], other["ignore_eos"]) == ([], [], False)
    assert {body["min_p"] for body in bodies} == {0.0}


def test_a_stop_token_ends_what_the_server_says(sampler):
    """It is the last token."""
    [[whole]] = sampler.sample({"plain": [[1, 2]]}, **GREEDY)["plain"]

    [[ended]] = sampler.sample(
        {"plain": [[1, 2]]}, max_new_tokens=5, temperature=0, stop=[whole.tokens[0]]
    )["plain"]

    assert (ended.tokens, ended.finish_reason) == (whole.tokens[:1], "stop")


@pytest.mark.parametrize("name", ["dora", "patterned"])
def test_adapters_that_vllm_would_not_take_are_refused(server, sampler, name):
    """Before anything is loaded."""
    with pytest.raises(GenerationError, match="vLLM has no such adapters"):
        sampler.sample({name: [[1]]}, **GREEDY)
    assert server.said == []


def test_a_server_that_refuses_is_quoted_and_leaves_nothing(server, sampler, tmp_path):
    """Such as one that was started without the permission to load adapters."""
    server.fails["/v1/load_lora_adapter"] = httpx.Response(404, text="Not Found")

    with pytest.raises(SamplingServerError, match="404: Not Found") as refused:
        sampler.sample({"plain": [[1]]}, **GREEDY)

    assert "refuses load_lora_adapter" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_named(group, tmp_path):
    """With its address."""

    def away(request):
        raise httpx.ConnectError("refused")

    client = httpx.Client(transport=httpx.MockTransport(away))
    sampler = VllmSampler(group, "http://nowhere:1", folder=tmp_path, client=client)

    with pytest.raises(SamplingServerError, match="http://nowhere:1"):
        sampler.sample({"plain": [[1]]}, **GREEDY)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"token_ids": None}, "return_token_ids"), ({"finish_reason": "abort"}, "abort")],
)
def test_answers_that_cannot_be_used_are_refused(server, sampler, change, told):
    """A server too old to give token ids, and a completion that was not finished."""
    answer = server.completions

    def changed(body):
        choice = answer(body).json()["choices"][0]
        return httpx.Response(200, json={"choices": [choice | change]})

    server.completions = changed

    with pytest.raises(SamplingServerError, match=told):
        sampler.sample({"plain": [[1]]}, **GREEDY)


def test_prompts_and_numbers_are_checked_before_the_server_is_asked(server, sampler):
    """As by the sampler in process."""
    for prompts, options, mistake in (
        ({"plain": [[]]}, {}, GenerationError),
        ({"plain": [[1]]}, {"top_p": 2.0}, GenerationError),
        ({"stranger": [[1]]}, {}, StepMisuse),
    ):
        with pytest.raises(mistake):
            sampler.sample(prompts, **{**GREEDY, **options})
    assert server.said == []

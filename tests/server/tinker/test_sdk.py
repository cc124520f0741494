"""The client of the Tinker API, unmodified and in an environment of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel

from tests.server.tinker.serving import needs_sdk, run_client, run_command, serving, trainer
from tests.training.clients import engine
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.server.ledger import User
from tlora_fx.training.waiting import Bound, Waiting

PAGE = Path(__file__).parents[3] / "docs" / "tinker.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
pytestmark = needs_sdk

BEGIN = """
import json, sys
import tinker
from tinker import types

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])

def datum(ids, **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], **inputs},
    )

def made(**how):
    return service.create_lora_training_client(base_model="tlora-fx/small", **how).result()
"""


@pytest.fixture
def address(tmp_path):
    with serving(tmp_path) as (address, socket, _), trainer(tmp_path / "tinker", socket):
        yield address


def test_the_pages_example_trains_saves_samples_and_resumes(address):
    example = EXAMPLES[0]
    assert "http://127.0.0.1:8642" in example
    example = example.replace("http://127.0.0.1:8642", address)
    same = 'print(model.forward([datum], "cross_entropy").result().metrics["loss:sum"])\n'
    example = example.replace("service.close", f"{same}service.close")
    *steps, completion, resumed, trained = run_client(example).splitlines()

    losses = [float(line.split()[0]) for line in steps]
    assert len(losses) == 40
    assert losses[-1] < losses[0] / 10
    assert "blue" in completion
    assert float(resumed) == pytest.approx(float(trained), rel=1e-12)


_LOSSES = """
model = made(rank=8, train_unembed=False)
ids = [5, 6, 7, 8]
told = {"logprobs": [-5.5, -5.4, -5.6], "advantages": [1.0, -0.5, 0.2]}
found = {}
for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"):
    inputs = {} if loss == "cross_entropy" else told
    found[loss] = model.forward_backward([datum(ids, **inputs)] * 2, loss).result().metrics
# One call of many requests, which arrive in any order.
many = model.forward_backward([datum(ids)] * 2100, "cross_entropy").result()
found["many"] = [many.metrics["loss:sum"], len(many.loss_fn_outputs)]
errors = []
for data, loss in (([datum(ids)], "stable_reinforce"), ([datum([5, 999, 7])], "cross_entropy")):
    try:
        model.forward_backward(data, loss).result()
    except tinker.RequestFailedError as error:
        errors.append([str(error), str(error.category)])
found["errors"] = errors
found["step"] = model.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics
print(json.dumps(found))
"""


def test_losses_chunks_and_errors_reach_the_client(address):
    found = json.loads(run_client(BEGIN + _LOSSES, address, "tml-any"))

    (total, count), errors, step = (found.pop(name) for name in ("many", "errors", "step"))
    losses = {name: each["loss:sum"] for name, each in found.items()}
    assert count == 2100
    assert total == pytest.approx(1050 * losses["cross_entropy"], rel=1e-6)
    assert losses["importance_sampling"] != losses["dro"]
    assert [category for _, category in errors] == ["user", "user"]
    assert "importance_sampling" in errors[0][0]
    assert step["grad_norm"] > 0


#: Of torch, which the client has no need of otherwise.
_PLACE = "import sys; sys.path.append(sys.argv[3])\n"
_CUSTOM = """
import torch

def smallest(logprobs, weights):
    return -(weights * torch.sigmoid(logprobs)).sum(), {"custom/most:sum": logprobs.max()}

def plain(data, logprobs):
    return sum(smallest(lp, torch.tensor(d.loss_fn_inputs["weights"].data))[0]
               for d, lp in zip(data, logprobs)), {}

losses = {
    "handle": service.create_custom_loss(smallest, {"logprobs": 1, "weights": 1}).result(),
    "function": plain,
}
data = [datum([5, 6, 7, 8], weights=[1.0, 0.5, 2.0]), datum([9, 10, 11], weights=[1.0, 1.0])]
found = {}
for name, loss in losses.items():
    model = made(rank=8, seed=3)
    answers = []
    for _ in range(3):
        forward = model.forward_backward_custom(data, loss)
        step = model.optim_step(types.AdamParams(learning_rate=1e-2))
        answers.append([forward.result().metrics["loss:sum"], step.result().metrics["grad_norm"]])
    found[name] = answers
print(json.dumps(found))
"""


def test_losses_of_the_clients_own(address):
    """A function is computed in the client, a graph in the service, with the same numbers."""
    torch = pytest.importorskip("torch")
    place = Path(torch.__file__).parents[1]
    found = json.loads(run_client(_PLACE + BEGIN + _CUSTOM, address, "tml-any", str(place)))

    for one, other in zip(found["handle"], found["function"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    losses = [loss for loss, _ in found["handle"]]
    assert losses[0] > losses[1] > losses[2]
    assert all(norm > 0 for _, norm in found["handle"])


_MANAGED = """
rest = tinker.RestClient(base_url=sys.argv[1], api_key=sys.argv[2])
model = made(rank=8)
model.forward_backward([datum([5, 6, 7])], "cross_entropy").result()
path = model.save_state("mine").result().path
rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
rest.publish_checkpoint_from_tinker_path(path).result()
[shown] = rest.list_checkpoints(model.get_info().model_id).result().checkpoints
rest.unpublish_checkpoint_from_tinker_path(path).result()
copied = rest.copy_weights(path, "any").result()
resumed = service.create_training_client_from_state_with_optimizer(copied).result()
step = resumed.optim_step(types.AdamParams(learning_rate=1e-3)).result()  # its gradients are there
session = model.get_info().model_id.split(":")[0]
trace = rest.export_session_trace(session).result()
print(json.dumps([shown.public, shown.expires_at is not None, copied, step.metrics, trace]))
"""


def test_checkpoints_are_kept_published_and_copied(address):
    public, expires, copied, metrics, trace = json.loads(
        run_client(BEGIN + _MANAGED, address, "tml-any")
    )

    assert public
    assert expires
    assert re.fullmatch(r"tinker://s\w+:train:\d+/weights/mine", copied)
    assert metrics["grad_norm"] > 0
    events = httpx.get(trace, headers={"X-API-Key": "tml-any"}, timeout=300).json()["traceEvents"]
    assert {"forward_backward 1", "save_weights 2"} <= {each["name"] for each in events}


_EXPORTED = """
model = made(rank=8, seed=2)
for _ in range(3):
    model.forward_backward([datum([5, 6, 7, 8])], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
saved = model.save_state("mine").result().path
exported = model.save_weights_external("mine").result().path
logprobs = model.forward([datum([5, 6, 7, 8])], "cross_entropy").result()
rest = tinker.RestClient(base_url=sys.argv[1], api_key=sys.argv[2])
model_id = model.get_info().model_id
kinds = [each.checkpoint_type for each in rest.list_checkpoints(model_id).result().checkpoints]
links = rest.get_external_weights_urls(exported).result().urls
try:
    model.save_weights_external("mine", age_encryption_recipients=["age1x"]).result()
except tinker.RequestFailedError as error:
    refused = str(error)
[output] = logprobs.loss_fn_outputs
print(json.dumps([saved, exported, output["logprobs"].tolist(), kinds, links, refused]))
"""


def test_the_command_line_downloads_peft_folders(address, tmp_path):
    """Of weights and of exports; PEFT gives the log-probabilities that the service does."""
    saved, exported, logprobs, kinds, links, refused = json.loads(
        run_client(BEGIN + _EXPORTED, address, "tml-any")
    )
    for path in (saved, exported):
        run_command(address, "tml-any", "checkpoint", "download", path, "--output", tmp_path)
    one, other = (
        tmp_path / path[len("tinker://") :].replace("/", "_") for path in (saved, exported)
    )

    assert kinds == ["training", "external"]
    assert "age_encryption_recipients" in refused
    files = {"adapter_config.json", "adapter_model.safetensors"}
    for folder in (one, other):
        assert {each.name for each in folder.iterdir()} == files == set(links)
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes()
    base = plain_base(engine().step.model.backbone)
    model = PeftModel.from_pretrained(base, str(other)).eval()
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate([6, 7, 8])]
    assert logprobs == pytest.approx(expected, rel=1e-6)
    # The export that the download of weights made is gone.
    shown = httpx.get(
        f"{address}/api/v1/checkpoints", headers={"X-API-Key": "tml-any"}, timeout=300
    )
    assert len(shown.json()["checkpoints"]) == 2


_BACK = """
import warnings

model = service.create_training_client_from_state(path).result()
other = made(rank=8)
with warnings.catch_warnings(action="ignore"):  # deprecated, and still there
    other.load_state(path).result()
losses = [
    each.forward([datum([5, 6, 7, 8])], "cross_entropy").result().metrics["loss:sum"]
    for each in (model, other)
]
sampler = service.create_sampling_client(model_path=path).result()
prompt = types.ModelInput.from_ints([5, 6, 7, 8])
scored = sampler.compute_logprobs(prompt).result()
print(json.dumps([path, losses, scored[1:]]))
"""


def test_a_downloaded_folder_comes_back(address, tmp_path):
    """A client trains on from it, and samples from it; to the bit what was downloaded."""
    saved, _, logprobs, *_ = json.loads(run_client(BEGIN + _EXPORTED, address, "tml-any"))
    folders = [tmp_path / "one", tmp_path / "other"]
    download = ("checkpoint", "download")
    run_command(address, "tml-any", *download, saved, "--output", folders[0])
    [folder] = folders[0].iterdir()
    sending = EXAMPLES[1].replace("http://127.0.0.1:8642", address)
    sending = sending.replace('"blue"', repr(str(folder)), 1)
    path, losses, scored = json.loads(run_client(BEGIN + sending + _BACK, address, "tml-any"))
    run_command(address, "tml-any", *download, path, "--output", folders[1])

    [again] = folders[1].iterdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert losses[0] == losses[1] == pytest.approx(-sum(logprobs), rel=1e-6)
    assert scored == pytest.approx(logprobs, rel=1e-6)


_USERS = """
model = made(rank=8)
saved = model.save_state("mine").result().path
print(saved)
"""
_OTHERS = """
for action in (
    lambda: service.create_training_client_from_state(sys.argv[3]).result(),
    lambda: tinker.RestClient(base_url=sys.argv[1], api_key=sys.argv[2])
        .get_weights_info_by_tinker_path(sys.argv[3]).result(),
):
    try:
        action()
    except (tinker.RequestFailedError, tinker.NotFoundError) as error:
        print(type(error).__name__)
"""


def test_users_have_tokens_and_see_only_their_own(tmp_path):
    with (
        serving(tmp_path, open_to_all=False) as (address, socket, service),
        trainer(tmp_path / "tinker", socket),
    ):
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        path = run_client(BEGIN + _USERS, address, ada).strip()
        found = run_client(BEGIN + _OTHERS, address, bob, path).split()
        with pytest.raises(AssertionError, match="AuthenticationError"):
            run_client(BEGIN + _USERS, address, "tml-wrong")

    assert found == ["RequestFailedError", "NotFoundError"]


_PAUSED = """
import logging, os
from tinker.lib import queue_state_logger

class Ends(logging.Handler):
    def emit(self, record):
        if "is paused" in (text := record.getMessage()):
            print(text, flush=True)
            os._exit(0)

# Of a pause, the client says nothing for a quarter of an hour.
queue_state_logger.PAUSE_GRACE_PERIOD = 0
logging.getLogger("tinker").addHandler(Ends())
made(rank=8)
"""


def test_a_client_says_why_it_is_paused(tmp_path):
    """There is no trainer yet."""
    with serving(tmp_path, seconds=0.2) as (address, *_):
        said = run_client(BEGIN + _PAUSED, address, "tml-any")

    assert "Model creation for tlora-fx/small is paused" in said
    assert "Reason: no trainer runs at the moment" in said


_MANY_BEFORE_AN_ANSWER = """
model = made(rank=4, seed=1)
futures = []
for at in range(30):
    futures.append(model.forward_backward([datum([5, 6, 7 + at, 8])], "cross_entropy"))
    futures.append(model.optim_step(types.AdamParams(learning_rate=1e-3)))
losses = [each.result().metrics["loss:sum"] for each in futures[::2]]
print(json.dumps([losses, futures[-1].result().metrics["step"]]))
"""


def test_the_client_waits_where_too_many_requests_wait(tmp_path):
    """It sends what was refused (429) again; numbers are those of a service without bounds."""
    found = {}
    for name, most in (("bounded", 3), ("unbounded", 10**6)):
        few = Bound(most, 1 << 30)
        with (
            serving(tmp_path / name, waiting=Waiting(few, few, few)) as (address, socket, service),
            trainer(tmp_path / name / "tinker", socket),
        ):
            found[name] = json.loads(run_client(BEGIN + _MANY_BEFORE_AN_ANSWER, address, "tml-any"))
            refused = sum(
                sample.value
                for family in service.requests.collect()
                for sample in family.samples
                if sample.labels.get("code") == "429"
            )
        assert bool(refused) == (name == "bounded")
    losses, steps = found["bounded"]
    assert steps == 30
    assert losses == pytest.approx(found["unbounded"][0], rel=1e-12)

"""Checkpoints by the Tinker API: shown, published, copied, linked to, made of PEFT folders."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import replace
from datetime import datetime

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.server.tinker.serving import KEY, Asked, asked, serving
from tlora_fx.server.ledger import User
from tlora_fx.server.tinker.links import Links
from tlora_fx.training.records import Checkpoint, Outcome, json_answer

__all__ = ["asked"]


def test_a_published_checkpoint_can_be_used_by_all_and_changed_by_its_owner(tmp_path):
    with serving(tmp_path, open_to_all=False, seconds=0.2) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        body = {"session_id": asked.session(ada), "model_seq_id": 0, "base_model": "x"}
        model = asked.post("/create_model", body, ada).json()["model_id"]
        [[command]] = asked.log.runnable().values()
        config = {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False}
        kept = Checkpoint(f"tinker://{model}/weights/a", model, "ada", "weights", "v", 7, 1.0, None,
                          config)  # fmt: skip
        asked.log.finish([Outcome(command, json_answer({}), checkpoint=kept, config=config)])
        place, info = f"/training_runs/{model}/checkpoints/weights/a", {"tinker_path": kept.path}

        assert asked.post("/weights_info", info, bob).status_code == 404
        assert asked.post(f"{place}/publish", {}, bob).status_code == 404
        assert asked.post(f"{place}/publish", {}, ada).status_code == 204
        assert asked.post("/weights_info", info, bob).json()["lora_rank"] == 4
        assert asked.client.delete(place, headers={"X-API-Key": bob}).status_code == 404
        assert asked.get("/checkpoints", bob).json()["checkpoints"] == []
        hidden = asked.client.delete(f"{place}/publish", headers={"X-API-Key": ada})
        assert hidden.status_code == 204
        assert asked.post("/weights_info", info, bob).status_code == 404


def test_a_checkpoint_is_shown_and_deleted(asked):
    model = asked.model(asked.session())["model_id"]
    [[command]] = asked.log.runnable().values()
    path = f"tinker://{model}/weights/a.b"
    config = {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False}
    kept = Checkpoint(path, model, "local", "weights", "models/v", 7, 1.0, None, config, {"k": "v"})
    named = replace(kept, path=f"tinker://{model}/sampler_weights/s", kind="sampler_weights")
    (asked.folder / "tinker/models/v").mkdir(parents=True)
    asked.log.finish(
        [
            Outcome(command, json_answer({}), checkpoint=each, config=config)
            for each in (kept, named)
        ]
    )

    shown = asked.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [each["checkpoint_id"] for each in shown] == ["weights/a.b", "sampler_weights/s"]
    assert [each["checkpoint_type"] for each in shown] == ["training", "sampler"]
    run = asked.get(f"/training_runs/{model}").json()
    assert run["last_checkpoint"]["tinker_path"] == path
    assert run["lora_rank"] == 4
    assert asked.post("/weights_info", {"tinker_path": path}).json()["train_unembed"] is False
    place = f"/training_runs/{model}/checkpoints/weights/a.b"
    asked.client.put(f"{place}/ttl", json={"ttl_seconds": 7200}, headers=KEY)
    assert asked.log.checkpoint(path).expires == pytest.approx(time.time() + 7200, abs=60)
    asked.client.put(f"{place}/ttl", json={"ttl_seconds": None}, headers=KEY)
    assert asked.log.checkpoint(path).expires is None
    (asked.folder / "tinker/models/v/state.json").write_text("{}")
    body = {"source_path": path, "session_id": asked.session(), "model_seq_id": 3}
    copies = [asked.post("/copy_weights", body).json()["tinker_path"] for _ in range(2)]
    assert copies == [f"tinker://{body['session_id']}:train:3/weights/a.b"] * 2
    copied = asked.log.checkpoint(copies[0])
    gone = asked.client.delete(f"/training_runs/{model}/checkpoints/weights/a.b", headers=KEY)
    assert gone.status_code == 204
    assert (asked.folder / "tinker" / copied.folder / "state.json").read_text() == "{}"
    assert asked.post("/copy_weights", body).status_code == 404
    assert not (asked.folder / "tinker/models/v").exists()
    assert asked.post("/weights_info", {"tinker_path": path}).status_code == 404
    assert len(json.dumps(asked.get("/checkpoints").json()["checkpoints"])) > 2


def content(name, folder="v"):
    """What a file of `exported` has."""
    return f"{folder} {name}".encode() * 100_000


def exported(asked, key="tml-any", folder="v"):
    """A checkpoint with two files, which belongs to whom the key does."""
    model = asked.post(
        "/create_model",
        {"session_id": asked.session(key), "model_seq_id": 0, "base_model": "x"}, key,
    ).json()["model_id"]  # fmt: skip
    [[command]] = asked.log.runnable().values()
    checkpoint = Checkpoint(
        f"tinker://{model}/external_weights/a", model, command.user, "external_weights",
        f"models/{folder}", 7, 1.0, None, {},
    )  # fmt: skip
    asked.log.finish([Outcome(command, json_answer({}), checkpoint=checkpoint)])
    place = asked.folder / "tinker/models" / folder
    place.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "state.json"):
        (place / name).write_bytes(content(name, folder))
    return f"/training_runs/{model}/checkpoints/external_weights/a"


def test_nobody_puts_a_copy_into_another_users_session(tmp_path):
    """It would lie there already when the owner makes a copy of that name."""
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        model = exported(asked, bob).split("/")[2]
        body = {"source_path": f"tinker://{model}/external_weights/a",
                "session_id": asked.session(ada)}  # fmt: skip

        assert asked.post("/copy_weights", body, bob).status_code == 410
        assert [each.name for each in (tmp_path / "tinker/models").iterdir()] == ["v"]


def test_another_checkpoint_is_not_copied_to_where_one_of_its_name_is(asked):
    """The answer would be the path of the other one's weights."""
    session, sources = asked.session(), []
    for folder in ("v", "w"):
        place = exported(asked, folder=folder)
        sources.append(place.replace("/training_runs/", "tinker://").replace("/checkpoints", ""))
    bodies = [{"source_path": source, "session_id": session} for source in sources]

    answers = [asked.post("/copy_weights", body) for body in (*bodies, bodies[0])]

    assert [each.status_code for each in answers] == [200, 409, 200]
    copied = asked.log.checkpoint(answers[0].json()["tinker_path"])
    name = "adapter_model.safetensors"
    assert (asked.folder / "tinker" / copied.folder / name).read_bytes() == content(name)


def test_a_copy_that_is_asked_for_again_changes_nothing(asked):
    """A repeat that comes late does not undo what its owner said of the copy since then."""
    place = exported(asked)
    source = place.replace("/training_runs/", "tinker://").replace("/checkpoints", "")
    body = {"source_path": source, "session_id": asked.session(), "ttl_seconds": 600}
    path = asked.post("/copy_weights", body).json()["tinker_path"]
    first = asked.log.checkpoint(path)
    assert first.expires == pytest.approx(time.time() + 600, abs=60)
    assert asked.post("/copy_weights", body).json() == {"tinker_path": path}
    assert asked.log.checkpoint(path) == first
    asked.log.change(first, expires=None, public=True)

    assert asked.post("/copy_weights", body).json() == {"tinker_path": path}
    assert asked.log.checkpoint(path) == replace(first, expires=None, public=True)
    # An expired one is no copy any more.
    asked.log.change(first, expires=1.0, public=True)
    assert asked.post("/copy_weights", body).json() == {"tinker_path": path}
    assert asked.log.checkpoint(path).made > first.made


def test_a_repeat_is_answered_as_before_once_a_quota_is_used_up(asked):
    """What was asked for is there, and a repeat of it costs nothing."""
    (asked.folder / "tinker/layout.json").write_text(json.dumps(BASE))
    place = exported(asked)
    source = place.replace("/training_runs/", "tinker://").replace("/checkpoints", "")
    copy = {"source_path": source, "session_id": asked.session()}
    key = {"X-Idempotency-Key": "k"}
    model = asked.model(asked.session())["model_id"]
    save = {"model_id": model, "seq_id": 1, "path": "b"}

    sums = {name: hashlib.sha256(each).hexdigest() for name, each in peft_files().items()}
    send_folder(asked, "another", peft_files())

    def ask():
        return [
            asked.post("/copy_weights", copy),
            asked.post("/peft_folders/a", sums, headers=key),
            asked.post("/save_weights", save),
        ]

    first = [each.json() for each in ask()]
    asked.service.intake.limits = replace(asked.service.intake.limits, stored_bytes=0)

    assert [each.json() for each in ask()] == first
    assert asked.post("/copy_weights", copy | {"model_seq_id": 1}).status_code == 429
    assert asked.post("/save_weights", save | {"seq_id": 2}).status_code == 429
    assert asked.post("/peft_folders/a", sums).status_code == 429


def test_links_lead_to_the_public_address(tmp_path):
    """Its path too, which a proxy removes; headers of a proxy say nothing then."""
    public = "https://train.example.com/tinker"
    with serving(tmp_path, public_url=public) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        place = exported(asked, "tml-any")
        session = place.split("/")[2].partition(":")[0]
        links = [*asked.get(f"{place}/external_weights_urls").json()["urls"].values()]
        links.append(asked.get(f"/sessions/{session}/trace_export").json()["url"])

        assert {link.startswith(f"{public}/api/v1/") for link in links} == {True}
        for link in links:
            assert asked.get(link.removeprefix(f"{public}/api/v1")).status_code == 200


def test_a_link_fetches_one_file_of_its_owner_without_a_key(tmp_path):
    """Another file, time or signature is refused, also by another service."""
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        place = exported(asked, ada)
        assert asked.get(f"{place}/external_weights_urls", bob).status_code == 404
        assert asked.client.get(f"{place}/external_weights_urls").status_code == 401
        found = asked.get(f"{place}/external_weights_urls", ada).json()
        links = found["urls"]
        assert set(links) == {"adapter_config.json", "adapter_model.safetensors"}
        assert datetime.fromisoformat(found["expires"]).timestamp() > time.time() + 3000
        for name, link in links.items():
            answer = httpx.get(link, timeout=300)
            assert answer.content == content(name)
            assert answer.headers["content-length"] == str(len(answer.content))
        url = httpx.URL(links["adapter_config.json"])
        state = url.path.replace("adapter_config.json", "state.json")
        for wrong in (
            url.copy_with(path=state),
            url.copy_set_param("expires", "9" * 11),
            url.copy_set_param("signature", "0" * 64),
            url.copy_set_param("signature", "\u00e9"),
        ):
            assert httpx.get(wrong, timeout=300).status_code == 401
        # Whoever has the key of this service alone can sign.
        with serving(tmp_path / "other", open_to_all=False) as (other, _, _):
            there = httpx.get(str(url).replace(address, other), timeout=300)
            assert there.status_code == 401

    links = Links.of(tmp_path / "tinker")
    assert (tmp_path / "tinker/links.key").stat().st_mode & 0o777 == 0o600
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        again = url.copy_with(port=httpx.URL(address).port)
        assert httpx.get(again, timeout=300).status_code == 200
        path = place.replace("/training_runs/", "tinker://").replace("/checkpoints", "")
        past = int(time.time()) - 1
        late = again.copy_merge_params(
            {"expires": past, "signature": links.sign(path, "adapter_config.json", past)}
        )
        assert "the link has expired" in httpx.get(late, timeout=300).text
        asked.client.delete(place, headers={"X-API-Key": ada})
        assert httpx.get(again, timeout=300).status_code == 404


#: Of one linear, as a trainer tells it.
BASE = {"layout": {"train_attn": {"q_proj": [3, 5]}, "train_mlp": {}, "train_unembed": {}},
        "max_rank": 8}  # fmt: skip


def peft_files(rank=2, value=0.5):
    """The files of an adapter of that linear, by name."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
    stem = "base_model.model.q_proj.lora_"
    tensors = {f"{stem}A.weight": np.full((rank, 5), value, "f4"),
               f"{stem}B.weight": np.full((3, rank), value, "f4")}  # fmt: skip
    return {"adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": save(tensors)}  # fmt: skip


def send_folder(asked, name, files, key="tml-any", **headers):
    """Upload files, and make a checkpoint of them."""
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    for file, content in files.items():
        put = asked.client.put(f"/files/{sums[file]}", content=content, headers={"X-API-Key": key})
        assert put.status_code in (201, 401)
    return asked.post(f"/peft_folders/{name}", sums, key, headers=headers)


def test_a_key_of_links_that_was_cut_is_made_anew(tmp_path):
    """By an empty one, which a power failure may leave, anybody could sign."""
    whole = Links.of(tmp_path)
    assert Links.of(tmp_path) == whole
    (tmp_path / "links.key").write_bytes(b"")

    again = Links.of(tmp_path)

    assert len(again.key) == 32
    assert Links.of(tmp_path) == again
    assert (tmp_path / "links.key").stat().st_mode & 0o777 == 0o600


def test_a_peft_folder_becomes_a_checkpoint_of_who_sent_it(tmp_path):
    with serving(tmp_path, open_to_all=False) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        ada, bob = (f"tml-{service.store.add_user(User(name))}" for name in ("ada", "bob"))
        early = send_folder(asked, "a", peft_files(), ada)
        assert "the base is not loaded yet" in early.text
        (tmp_path / "tinker/layout.json").write_text(json.dumps(BASE))
        assert send_folder(asked, "a", peft_files(), "tml-no").status_code == 401
        assert send_folder(asked, "a..b", peft_files(), ada).status_code == 422
        path = send_folder(asked, "a.b", peft_files(), ada).json()["tinker_path"]
        key = {"X-Idempotency-Key": "k"}
        answers = [send_folder(asked, "a.b", peft_files(), ada, **key) for _ in range(2)]
        answers.append(send_folder(asked, "a.b", peft_files(value=1.5), ada, **key))
        # What another user has uploaded is not there.
        sums = {name: hashlib.sha256(each).hexdigest() for name, each in peft_files().items()}
        assert "was not uploaded" in asked.post("/peft_folders/a", sums, bob).text

        assert [each.status_code for each in answers] == [201] * 3
        paths = [each.json()["tinker_path"] for each in answers]
        assert paths[0] == paths[1]
        assert len({path, *paths}) == 3
        assert re.fullmatch(r"tinker://s\w{16}:train:0/weights/a.b", path)
        info = {"tinker_path": path}
        assert asked.post("/weights_info", info, bob).status_code == 404
        found = asked.post("/weights_info", info, ada).json()
        assert [found[name] for name in ("lora_rank", "train_attn", "train_mlp")] == [
            2,
            True,
            False,
        ]
        shown = asked.get("/checkpoints", ada).json()["checkpoints"]
        assert {each["tinker_path"] for each in shown} == {path, *paths}
        assert all(each["size_bytes"] > 100 for each in shown)
        folder = tmp_path / "tinker" / asked.log.checkpoint(path).folder
        assert json.loads((folder / "state.json").read_text())["scale"] == 0.5
        for name, content in peft_files().items():
            assert (folder / name).read_bytes() == content


def test_a_peft_folder_that_is_sent_again_changes_nothing(asked, monkeypatch):
    """Nor does it matter that its session is over."""
    (asked.folder / "tinker/layout.json").write_text(json.dumps(BASE))
    key = {"X-Idempotency-Key": "k"}
    path = send_folder(asked, "a", peft_files(), **key).json()["tinker_path"]
    first = asked.log.checkpoint(path)
    asked.log.change(first, expires=9e9, public=True)
    monkeypatch.setattr("tlora_fx.training.log.SESSION_SECONDS", 0.0)

    again = send_folder(asked, "a", peft_files(), **key)

    assert again.json() == {"tinker_path": path}
    assert asked.log.checkpoint(path) == replace(first, expires=9e9, public=True)


def test_what_is_no_peft_folder_leaves_nothing(tmp_path):
    """Nor does one of which a process was killed."""
    with serving(tmp_path) as (address, socket, service):
        asked = Asked(address, socket, service, tmp_path)
        (tmp_path / "tinker/layout.json").write_text(json.dumps(BASE))
        wrong = send_folder(asked, "a", peft_files(rank=9))
        assert wrong.status_code == 422
        assert wrong.json()["code"] == "T0405"
        assert "--tinker-rank" in wrong.json()["help"]
        assert str(tmp_path) not in wrong.text
        assert "not finite" in send_folder(asked, "a", peft_files(value=np.inf)).text
        [config, _] = peft_files()
        one = send_folder(asked, "a", {config: peft_files()[config]})
        assert one.status_code == 422
        assert "adapter_model.safetensors" in one.text
        sums = {"adapter_config.json": "../x", "adapter_model.safetensors": "0" * 64}
        assert asked.post("/peft_folders/a", sums).status_code == 422
        service.intake.limits = replace(service.intake.limits, stored_bytes=0)
        assert asked.post("/peft_folders/a", sums | {config: "0" * 64}).status_code == 429

        assert asked.get("/checkpoints").json()["checkpoints"] == []
        assert asked.get("/sessions").json()["sessions"] == []
        assert not (tmp_path / "tinker/models").exists()
        assert not [*(tmp_path / "tinker").glob(".upload-*")]
    left = tmp_path / "tinker/.upload-x"
    left.mkdir()
    (left / "adapter_config.json").write_bytes(b"x")
    with serving(tmp_path):
        assert not left.exists()

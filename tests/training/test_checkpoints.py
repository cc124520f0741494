"""Checkpoints of clients' models: what goes on from one is what it was saved of."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.training.clients import Client, cycle_of, engine, run_all
from tests.training.test_cycle import CLIPPED, CONFIGS, GOOD, adapter, assert_same, script, send
from tlora_fx.errors import RequestConflict
from tlora_fx.runtime.adapters.files import plain_base
from tlora_fx.training.folders import copy_version
from tlora_fx.training.log import CommandLog
from tlora_fx.training.process import tidy
from tlora_fx.training.records import Checkpoint, Outcome, json_answer


def trained(cycle, key="a", **how):
    client = Client(cycle.log, config=CONFIGS[0], **how)
    for step in script(key):
        send(client, step)
    run_all(cycle)
    return client


def test_a_copy_of_a_checkpoint_has_the_adapted_head(tmp_path):
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    saved = client.send("save_weights", path="x")
    run_all(cycle)
    checkpoint = cycle.log.checkpoint(client.result(saved)["path"])
    session = cycle.log.open_session("ada", {})
    folder = copy_version(tmp_path, checkpoint.folder, f"{session}:train:0", "weights/x")
    path = f"tinker://{session}:train:0/weights/x"
    copy = replace(checkpoint, path=path, model=f"{session}:train:0", folder=folder)
    cycle.log.copy(copy, "ada", session)
    shutil.rmtree(tmp_path / checkpoint.folder)
    resumed = Client(cycle.log, load=path)
    for each in (client, resumed):
        send(each, script("b")[0])
    run_all(cycle)

    assert any("lm_head" in name for name in adapter(cycle, resumed))
    assert_same(adapter(cycle, resumed), adapter(cycle, client), 1e-12)


def test_a_checkpoint_holds_gathered_gradients(tmp_path):
    """Who resumes from it with the optimizer steps by them, and who resumes without has none."""
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    client.forward_backward(GOOD)
    saved = client.send("save_weights", path="half")
    run_all(cycle)
    path = client.result(saved)["path"]
    resumed = Client(cycle.log, load=path)
    bare = Client(cycle.log, load=path, optimizer=False)
    steps = [each.optim_step(**CLIPPED) for each in (client, resumed, bare)]
    run_all(cycle)

    assert client.result(steps[0]) == resumed.result(steps[1])
    assert_same(adapter(cycle, resumed), adapter(cycle, client), 0)
    assert "no gradients" in bare.result(steps[2])["error"]


def test_a_model_outlives_the_checkpoint_that_it_came_from(tmp_path):
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    saved = client.send("save_weights", path="x")
    run_all(cycle)
    path = client.result(saved)["path"]
    resumed = Client(cycle.log, load=path)
    send(resumed, script("b")[0])
    run_all(cycle)
    expected = adapter(cycle, resumed)
    checkpoint = cycle.log.checkpoint(path)
    cycle.log.forget(checkpoint)
    shutil.rmtree(tmp_path / checkpoint.folder)
    cycle = cycle_of(tmp_path)

    assert_same(adapter(cycle, resumed), expected, 1e-12)


def test_a_checkpoint_goes_on_exactly_with_its_optimizer(tmp_path, strictly):
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    saved = client.send("save_weights", path="half")
    run_all(cycle)
    path = client.result(saved)["path"]
    assert path == f"tinker://{client.model}/weights/half"
    resumed = Client(cycle.log, load=path)
    bare = Client(cycle.log, load=path, optimizer=False)
    for each in (client, resumed, bare):
        send(each, script("b")[0])
    run_all(cycle)

    assert resumed.result(resumed.created)["model_id"] == resumed.model
    assert_same(adapter(cycle, resumed), adapter(cycle, client), 0)
    assert any(
        not torch.equal(one, other)
        for one, other in zip(
            adapter(cycle, bare).values(), adapter(cycle, client).values(), strict=True
        )
    )


def test_a_checkpoint_is_a_peft_folder(tmp_path):
    """PEFT loads it, and gives the log-probabilities that the trainer does."""
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    saved = client.send("save_weights", path="x")
    future = client.forward_backward(GOOD, forward_only=True)
    run_all(cycle)
    checkpoint = cycle.log.checkpoint(client.result(saved)["path"], "ada")
    model = PeftModel.from_pretrained(
        plain_base(engine().step.model.backbone), str(tmp_path / checkpoint.folder)
    )
    logits = model.eval()(input_ids=torch.tensor([GOOD[0]["tokens"]])).logits[0].log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate(GOOD[0]["target_tokens"])]

    np.testing.assert_allclose(client.result(future)[1][0], expected, rtol=1e-6)
    assert checkpoint.bytes > 0
    assert load_file(tmp_path / checkpoint.folder / "optimizer.safetensors")


def test_a_checkpoint_keeps_its_name_unless_it_is_overwritten(tmp_path):
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    futures = [
        client.send("save_weights", path="x"),
        client.send("save_weights", path="x"),
        client.send("save_weights", path="x", overwrite=True),
        client.send("save_weights", path="../x"),
    ]
    run_all(cycle)

    results = [client.result(each) for each in futures]
    assert results[0]["path"] == results[2]["path"]
    assert "overwrite=True" in results[1]["error"]
    assert "a name has" in results[3]["error"]
    [checkpoint] = cycle.log.checkpoints("ada")
    assert checkpoint.folder.endswith(f"version-{client.seq - 1}")
    folder = tmp_path / checkpoint.folder
    assert [each.name for each in folder.parent.glob("version-*")] == [folder.name]


def test_a_checkpoint_outlives_a_save_that_was_to_replace_it_and_failed(tmp_path, monkeypatch):
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    saved = client.send("save_weights", path="x")
    run_all(cycle)
    again = client.send("save_weights", path="x", overwrite=True)

    def fail(*args, **how):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(cycle.tenants, "write", fail)
        run_all(cycle)
    resumed = Client(cycle.log, load=client.result(saved)["path"])
    run_all(cycle)

    assert "OSError" in client.result(again)["error"]
    assert "error" not in resumed.result(resumed.created)


def test_a_checkpoint_outlives_an_answer_that_could_not_be_written(tmp_path, monkeypatch):
    """The save that was to replace it runs again, and may fail then."""
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    saved = client.send("save_weights", path="x")
    run_all(cycle)
    again = client.send("save_weights", path="x", overwrite=True)

    def full(*args, **how):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(CommandLog, "finish", full)
        with pytest.raises(sqlite3.OperationalError):
            run_all(cycle)
    cycle.forget()
    with monkeypatch.context() as patch:
        patch.setattr(cycle.tenants, "write", full)
        run_all(cycle)
    resumed = Client(cycle.log, load=client.result(saved)["path"])
    run_all(cycle)

    assert "OperationalError" in client.result(again)["error"]
    assert "error" not in resumed.result(resumed.created)


def test_a_checkpoint_takes_the_place_of_an_expired_one(tmp_path):
    """Of the expired one nothing is left on the disk."""
    cycle = cycle_of(tmp_path)
    client = trained(cycle)
    saved = client.send("save_weights", path="x", ttl_seconds=60)
    run_all(cycle)
    first = cycle.log.checkpoint(client.result(saved)["path"])
    cycle.log.change(first, expires=1.0, public=False)
    client.send("save_weights", path="x")
    run_all(cycle)

    [checkpoint] = cycle.log.checkpoints("ada")
    folder = tmp_path / checkpoint.folder
    assert checkpoint.folder != first.folder
    assert [each.name for each in folder.parent.glob("version-*")] == [folder.name]


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_folder_that_a_killed_process_has_left_is_deleted(tmp_path, how):
    """The log named it no more, and it was not deleted yet."""
    log = CommandLog(tmp_path)
    client = Client(log)
    [[command]] = log.runnable().values()
    path = f"tinker://{client.model}/weights/x"
    old = Checkpoint(path, client.model, "ada", "weights", "models/old", 1, 1.0, None, {})
    new = replace(old, folder="models/new")
    for each in (old, new):
        (tmp_path / each.folder).mkdir(parents=True)
    log.finish([Outcome(command, json_answer({}), checkpoint=old)])
    if how == "replaced":
        log.finish([Outcome(command, json_answer({}), checkpoint=new)])
    else:
        log.forget(old)
    log.close()
    tidy(log := CommandLog(tmp_path))

    assert not (tmp_path / old.folder).exists()
    assert (tmp_path / new.folder).exists()
    # Whatever gets that name later stays.
    (tmp_path / old.folder).mkdir()
    tidy(log)
    assert (tmp_path / old.folder).exists()


def test_a_deleted_copy_that_is_made_again_stays(tmp_path):
    log = CommandLog(tmp_path)
    client = Client(log)
    path = "tinker://m/weights/x"
    copy = Checkpoint(path, "m", "ada", "weights", "models/copy", 1, 1.0, None, {})
    (tmp_path / copy.folder).mkdir(parents=True)
    for _ in range(2):
        log.copy(copy, "ada", client.session)
        log.forget(copy)
    log.copy(copy, "ada", client.session)
    tidy(log)

    assert (tmp_path / copy.folder).exists()
    assert log.checkpoint(path) == copy


def test_a_copy_that_was_deleted_meanwhile_is_not_noted(tmp_path):
    """An expired one had its place, which is swept before the log names the folder again."""
    log = CommandLog(tmp_path)
    client = Client(log)
    copy = Checkpoint("tinker://m/weights/x", "m", "ada", "weights", "models/m", 1, 1.0, 2.0, {})
    (tmp_path / copy.folder).mkdir(parents=True)
    log.copy(copy, "ada", client.session)
    tidy(log)

    with pytest.raises(RequestConflict, match="deleted meanwhile"):
        log.copy(replace(copy, expires=None), "ada", client.session)
    assert log.checkpoints("ada") == []

"""The command log: order by number, repeats, conflicts, and what a kill leaves."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import machine  # noqa: F401  (a fixture)
from tlora_fx.errors import JobUnknown, QueueFull, RequestConflict, RequestGone, RequestRefused
from tlora_fx.training.log import CommandLog
from tlora_fx.training.process import tidy
from tlora_fx.training.records import Checkpoint, Outcome, Ran, Sampler, json_answer
from tlora_fx.training.times import explained
from tlora_fx.training.waiting import Bound, Waiting

USER = "ada"


@pytest.fixture
def log(tmp_path):
    return CommandLog(tmp_path)


def model_of(log, user=USER, place=0):
    session = log.open_session(user, {})
    log.create(user, session, place, "create_model", b"{}")
    return f"{session}:train:{place}"


def run(log, limit=None):
    """Do what may run, each command's answer being its body; what ran, in order."""
    ran = []
    for queue, commands in log.runnable().items():
        for command in commands[:limit]:
            body = log.body_of(command)
            log.finish([Outcome(command, json_answer({"said": body.decode()}))])
            ran.append((queue, command.seq))
    return ran


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 7)), min_size=1, max_size=40
    ),
    reopened=st.lists(st.integers(0, 40), max_size=4),
    limit=st.integers(1, 4),
)
def test_commands_run_once_in_order_and_never_past_a_gap(arrivals, reopened, limit):
    """Whatever the order of arrival, the repeats and the restarts between them."""
    with tempfile.TemporaryDirectory() as folder:
        log = CommandLog(Path(folder))
        names = {key: model_of(log) for key in "ab"}
        arrived = {key: {0} for key in "ab"}
        ran = {key: [] for key in "ab"}
        keys = {name: key for key, name in names.items()}
        futures = {}
        for at, (key, seq) in enumerate(arrivals):
            if at in reopened:
                log.close()
                log = CommandLog(Path(folder))
            body = f"{key}{seq}".encode()
            number = log.append(USER, names[key], seq, "optim_step", body)
            assert futures.setdefault((key, seq), number) == number
            arrived[key].add(seq)
            for queue, done in run(log, limit):
                ran[keys[queue]].append(done)
        while left := run(log):
            for queue, done in left:
                ran[keys[queue]].append(done)

        for key in "ab":
            first_gap = next(seq for seq in range(9) if seq not in arrived[key])
            assert ran[key] == list(range(first_gap))
        for (key, seq), number in futures.items():
            answer = log.answer(USER, number)
            done = seq in ran[key]
            assert (answer is not None) == done
            assert not done or json.loads(answer.body) == {"said": f"{key}{seq}"}
        log.close()


def test_another_body_under_one_number_is_a_conflict(log):
    model = model_of(log)
    log.append(USER, model, 1, "optim_step", b"a")

    with pytest.raises(RequestConflict, match="another request has this number"):
        log.append(USER, model, 1, "optim_step", b"b")
    with pytest.raises(RequestConflict):
        log.append(USER, model, 1, "save_weights", b"a")


def test_an_answer_is_written_once(log):
    model_of(log)
    [[command]] = log.runnable().values()
    for said in (1, 2):
        log.finish([Outcome(command, json_answer({"said": said}))])

    assert json.loads(log.answer(USER, command.number).body) == {"said": 1}


def test_a_number_that_is_not_finite_is_never_written():
    with pytest.raises(ValueError, match="JSON compliant"):
        json_answer({"grad_norm": float("nan")})


def test_nobody_sees_what_is_anothers(log):
    model = model_of(log)
    number = log.append(USER, model, 1, "optim_step", b"")
    sampler = log.add_sampler(USER, model.split(":")[0], 0, None)

    with pytest.raises(JobUnknown):
        log.append("bob", model, 2, "optim_step", b"")
    with pytest.raises(RequestGone):
        log.answer("bob", number)
    with pytest.raises(JobUnknown):
        log.model(model, "bob")
    with pytest.raises(JobUnknown):
        log.append("bob", sampler.id, 0, "sample", b"")
    assert log.models("bob") == []


def test_a_number_below_one_is_refused(log):
    with pytest.raises(RequestRefused, match="order"):
        log.append(USER, model_of(log), 0, "optim_step", b"")


def test_a_session_that_is_over_takes_nothing_new(log):
    model = model_of(log)
    session = model.split(":")[0]
    log.heard(USER, session)
    log.end_session(USER, session)
    log.end_session(USER, session)

    with pytest.raises(RequestGone):
        log.heard(USER, session)
    with pytest.raises(RequestGone):
        log.create(USER, session, 1, "create_model", b"")
    with pytest.raises(RequestGone):
        log.append(USER, model, 1, "optim_step", b"")
    with pytest.raises(RequestGone):
        log.add_sampler(USER, session, 0, None)
    with pytest.raises(JobUnknown):
        log.end_session("bob", session)


def test_samples_need_no_order(log):
    session = log.open_session(USER, {})
    sampler = log.add_sampler(USER, session, 0, None)
    assert log.add_sampler(USER, session, 0, None) == sampler
    for seq in (7, 2):
        log.append(USER, sampler.id, seq, "sample", b"")

    assert run(log) == [(sampler.id, 2), (sampler.id, 7)]


def test_bodies_stay_until_a_snapshot_has_them(log):
    """So that what a kill undoes can run again, in order."""
    model = model_of(log)
    for seq in range(1, 6):
        log.append(USER, model, seq, "optim_step", b"%d" % seq)
    run(log, limit=5)
    log.keep(model, 2)

    assert [each.body for each in log.done_since(model, log.model(model).kept)] == [b"3", b"4"]
    assert log.model(model).kept == 2
    # A repeat of one whose body is gone is still recognised.
    assert log.append(USER, model, 1, "optim_step", b"1") == 2
    with pytest.raises(RequestConflict):
        log.append(USER, model, 1, "optim_step", b"x")


def test_what_a_command_makes_is_there_with_its_answer(log):
    model = model_of(log)
    session = model.split(":")[0]
    [[command]] = log.runnable().values()
    path = f"tinker://{model}/weights/a"
    made = Checkpoint(path, model, USER, "weights", "f", 5, 1.0, None, {"rank": 4}, {"x": "y"})
    sampler = Sampler(f"{session}:sample:0", session, USER, None, "g")
    outcome = Outcome(command, json_answer({}), 9, made, sampler, {"rank": 4})
    log.finish([outcome, outcome])

    assert log.checkpoint(path, USER) == made
    assert log.sampler(sampler.id, USER) == sampler
    assert log.model(model).config == {"rank": 4}
    assert [tuple(row) for row in log.usage()] == [(USER, "create_model", 1, 9, 0.0)]
    log.forget(made)
    with pytest.raises(JobUnknown):
        log.checkpoint(path, USER)


def test_an_expired_checkpoint_is_gone(log):
    model = model_of(log)
    [[command]] = log.runnable().values()
    path = f"tinker://{model}/weights/a"
    made = Checkpoint(path, model, USER, "weights", "f", 5, 1.0, 2.0, {})
    log.finish([Outcome(command, json_answer({}), checkpoint=made)])

    (log.folder / "f").mkdir()
    assert log.checkpoints(USER) == []
    log.forget_expired()
    log.sweep()
    assert not (log.folder / "f").exists()


_WRITER = """
import sys
from pathlib import Path
from tlora_fx.training.log import CommandLog
log = CommandLog(Path(sys.argv[1]))
session = log.open_session("ada", {})
print(log.create("ada", session, 0, "create_model", b"")[1], flush=True)
for seq in range(1, 100000):
    print(log.append("ada", f"{session}:train:0", seq, "optim_step", b"x" * 1000), flush=True)
"""


def test_a_killed_writer_leaves_all_that_it_acknowledged(tmp_path):
    """kill -9 in the middle of appends; what was acknowledged is there, and nothing torn."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    model = process.stdout.readline().strip()
    seen = [int(process.stdout.readline()) for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    seen += [int(line) for line in process.stdout.read().splitlines()]
    process.wait()

    [commands] = CommandLog(tmp_path).runnable().values()
    numbers = [command.number for command in commands]
    assert numbers[1 : len(seen) + 1] == seen
    assert [command.seq for command in commands] == list(range(len(commands)))
    assert {command.queue for command in commands} == {model}


HOURS = 3600.0


@pytest.mark.parametrize("hours", [-24.0, 6.0, 500_000.0])
def test_setting_the_machines_clock_ends_nothing(tmp_path, machine, hours):  # noqa: F811
    """Neither sessions and answers nor checkpoints and versions, in any process of the service."""
    log = CommandLog(tmp_path)
    model = model_of(log)
    session = model.split(":")[0]
    [[command]] = log.runnable().values()
    path = f"tinker://{model}/weights/a"
    kept = Checkpoint(path, model, USER, "weights", "f", 5, log.now(), log.now() + 60, {})
    unnamed = Sampler(f"{session}:sample:0", session, USER, None, "g")
    for folder in ("f", "g"):
        (tmp_path / folder).mkdir()
    log.finish([Outcome(command, json_answer({}), checkpoint=kept, sampler=unnamed)])
    log.keep(model, 0)
    machine.day += hours * HOURS
    other = CommandLog(tmp_path, log.now)

    for each in (log, other):
        tidy(each)
        each.heard(USER, session)
        assert each.answer(USER, command.number) is not None
        assert each.checkpoints(USER) == [kept]
        assert each.sampler(unnamed.id) == unnamed
    assert {each.name for each in tmp_path.iterdir()} >= {"f", "g"}
    machine.pass_by(25 * HOURS)
    tidy(other)
    with pytest.raises(RequestGone):
        log.heard(USER, session)
    with pytest.raises(RequestGone):
        log.answer(USER, command.number)
    assert log.checkpoints(USER) == []
    assert not {each.name for each in tmp_path.iterdir()} & {"f", "g"}


def test_what_a_request_waited_does_not_depend_on_the_clock(tmp_path, machine):  # noqa: F811
    log = CommandLog(tmp_path)
    model_of(log)
    [[command]] = log.runnable().values()
    machine.pass_by(2.0)
    ran = Ran(command.kind, log.now(), {command: 3}, 1.0)
    machine.day += 6 * HOURS
    machine.pass_by(1.0)
    log.finish([Outcome(command, json_answer({}), 3)], ran)
    [row] = log.times(USER)

    assert explained(row)["seconds"] == {
        "order": 0.0, "queue": 2.0, "computed": 1.0, "between": 0.0
    }  # fmt: skip
    assert explained(row)["slowdown"] == 3.0


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_what_waits_behind_a_gap_goes_with_its_session(tmp_path, machine, how):  # noqa: F811
    """Nobody can fill the gap then; what is before it runs, and other sessions' may be filled."""
    log = CommandLog(tmp_path)
    model, other = model_of(log), model_of(log)
    for name in (model, other):
        for seq in (1, 3, 4):
            log.append(USER, name, seq, "optim_step", b"")
    tidy(log)
    assert [c.seq for c in log.runnable()[model]] == [0, 1]
    session = model.split(":")[0]
    if how == "ended":
        log.end_session(USER, session)
    else:
        machine.pass_by(0.6 * HOURS)
        log.heard(USER, other.split(":")[0])
        machine.pass_by(0.6 * HOURS)
    tidy(log)
    waiting = log._rows("SELECT seq FROM commands WHERE queue = ? ORDER BY seq", model)
    log.append(USER, other, 2, "optim_step", b"")

    assert [row["seq"] for row in waiting] == [0, 1]
    ran = run(log)
    assert [seq for name, seq in ran if name == model] == [0, 1]
    assert [seq for name, seq in ran if name == other] == [0, 1, 2, 3, 4]


def test_a_damaged_text_is_an_error_of_the_log(log):
    """Python has no error code for it; it is no answer of the request that meets it."""
    with sqlite3.connect(log.folder / "log.sqlite") as base:
        base.execute("INSERT INTO facts VALUES ('a', CAST(x'ff' AS TEXT))")
    base.close()

    with pytest.raises(sqlite3.OperationalError, match="decode"):
        log.facts()


def test_a_full_disk_is_an_error_of_the_disk(log):
    """Nothing of the command is there, and it is taken once there is room."""
    model = model_of(log)
    [(pages,)] = log._base.execute("PRAGMA page_count").fetchall()
    log._base.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match="full") as caught:
        log.append(USER, model, 1, "optim_step", b"x" * 1_000_000)
    assert caught.value.errno == errno.ENOSPC
    log._base.execute("PRAGMA max_page_count = 1000000")

    assert log.append(USER, model, 1, "optim_step", b"x" * 1_000_000) == 2


LARGE, SMALL = Bound(1000, 10**6), Bound(4, 40)


def bounded(folder, **bounds):
    return CommandLog(
        folder, waiting=Waiting(**{"queue": LARGE, "user": LARGE, "whole": LARGE} | bounds)
    )


@pytest.mark.parametrize(("body", "fit"), [(b"{}", 4), (b"0123456789abc", 3), (b"0" * 41, 0)])
def test_a_model_has_only_so_many_requests_waiting(tmp_path, body, fit):
    """By number and by bytes; the next to run is taken in any case, and a repeat is no new one."""
    log = bounded(tmp_path, queue=SMALL)
    model = model_of(log)
    run(log)
    for seq in range(2, 2 + fit):
        log.append(USER, model, seq, "optim_step", body)
    with pytest.raises(QueueFull):
        log.append(USER, model, 2 + fit, "optim_step", body)
    again = [log.append(USER, model, seq, "optim_step", body) for seq in range(2, 2 + fit)]
    log.append(USER, model, 1, "optim_step", body)
    ran = [seq for _, seq in run(log)]
    log.append(USER, model, 2 + fit, "optim_step", body)

    assert ran == [*range(1, 2 + fit)]
    assert len(again) == fit


@pytest.mark.parametrize("scope", ["user", "whole"])
def test_what_waits_behind_gaps_never_shuts_out_what_fills_them(tmp_path, scope):
    """Gaps of more models than there is place for are filled one by one."""
    log = bounded(tmp_path, **{scope: SMALL})
    models = []
    for place in range(12):
        models.append(model_of(log, place=place))
        run(log)
    behind = [model for model in models if takes(log, model, 2)]
    filled = [model for model in behind if takes(log, model, 1)]
    ran = run(log)
    while left := [model for model in behind if (model, 1) not in ran]:
        taken = [takes(log, model, 1) for model in left]
        assert any(taken)
        ran += run(log)

    assert (len(behind), len(filled)) == (4, 4)
    assert sorted(ran) == sorted((model, seq) for model in behind for seq in (1, 2))


def test_what_fills_a_gap_is_taken_where_nothing_could_run(tmp_path):
    """However much waits."""
    log = bounded(tmp_path, user=SMALL)
    first, second = (model_of(log, place=place) for place in range(2))
    run(log)
    log.append(USER, first, 2, "optim_step", b"0" * 40)
    log.append(USER, first, 1, "optim_step", b"1" * 1000)

    with pytest.raises(QueueFull):
        log.append(USER, second, 1, "optim_step", b"{}")
    assert [seq for _, seq in run(log)] == [1, 2]
    log.append(USER, second, 1, "optim_step", b"{}")


def test_one_user_who_sends_without_waiting_leaves_place_for_others(tmp_path):
    """Bounds of a user are its own."""
    log = bounded(tmp_path, user=SMALL)
    model, other = model_of(log), model_of(log, "bob")
    run(log)
    taken = [takes(log, model, seq) for seq in range(2, 12)]

    assert taken == [True] * 4 + [False] * 6
    assert log.append("bob", other, 2, "optim_step", b"{}")


def takes(log, model, seq):
    """Whether the log takes a request, which is its own user's."""
    try:
        return bool(log.append(USER, model, seq, "optim_step", b"{}"))
    except QueueFull:
        return False

"""`run` and `serve` go on with their own folders, and leave those of the other alone."""

from __future__ import annotations

import shutil

import pytest

from tlora_fx.cli import main
from tlora_fx.cost.load import Demand
from tlora_fx.errors import LedgerError, RunFolderError
from tlora_fx.scheduler.folder_kind import require_folder_of_run, require_folder_of_service
from tlora_fx.scheduler.state import JobRequest
from tlora_fx.scheduler.store import Ledger
from tlora_fx.server.ledger import User
from tlora_fx.server.store import ServiceStore

COMMANDS = ["run {} -o {}", "serve -o {1}", "tokens add alice -o {1}", "tokens ls -o {1}"]


def folder_of(kind, path):
    """A folder in which a run or a service has begun, or what a backup kept of it."""
    if kind == "run":
        path.mkdir()
        Ledger(path / "ledger.sqlite").close()
        (path / "service").mkdir()  # of a job that is called so
        return path
    ServiceStore(path)
    if kind == "ledger of serve":
        shutil.rmtree(path / "service")
    return path


def with_job(folder, name):
    """The ledger of a folder in which this job was queued."""
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.submit(JobRequest(name, "base", Demand(), 1, 10))
    ledger.close()


def contents(folder):
    """What lies in it, besides what SQLite has beside a ledger that is read."""
    there = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return there - {"ledger.sqlite-shm", "ledger.sqlite-wal"}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["run", "serve", "ledger of serve"])
def test_a_folder_of_the_other_command_is_refused_with_the_command_that_goes_on_with_it(
    tmp_path, capsys, command, kind
):
    """And it is left as it was; `tokens` asks for what `serve` asks for."""
    folder, mine = folder_of(kind, tmp_path / "here"), command.split()[0]
    wrong = (mine == "run") is (kind != "run")
    if not wrong:
        require = require_folder_of_run if mine == "run" else require_folder_of_service
        require(folder)
        return
    before = contents(folder)
    with pytest.raises(SystemExit) as ended:
        main(command.format(tmp_path, folder).split())

    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "error[T0407]" in said
    assert f"tlora-fx {'run JOBS' if kind == 'run' else 'serve'} -o {folder}" in " ".join(
        said.split()
    )
    assert contents(folder) == before


def test_a_new_folder_is_nobodys(tmp_path):
    """Also where a service was killed before it kept anything, and begins anew."""
    (tmp_path / "service" / "inbox").mkdir(parents=True)
    require_folder_of_run(tmp_path / "none")
    require_folder_of_service(tmp_path / "none")
    require_folder_of_service(tmp_path)
    with pytest.raises(RunFolderError):
        require_folder_of_run(tmp_path)


@pytest.mark.parametrize("users", [(), ("alice",)])
def test_a_run_goes_on_though_an_older_tokens_made_a_services_tables(tmp_path, users):
    """Its jobs tell: no user has submitted them."""
    with_job(tmp_path, "a")
    store = ServiceStore(tmp_path)
    for name in users:
        store.add_user(User(name))

    require_folder_of_run(tmp_path)
    with pytest.raises(RunFolderError, match="a run's"):
        require_folder_of_service(tmp_path)


@pytest.mark.parametrize("other", [False, True])
def test_a_service_goes_on_though_an_older_run_trained_a_job_in_its_folder(tmp_path, other):
    """Then nobody is kept from jobs of theirs: either command goes on, as before."""
    ServiceStore(tmp_path).submit(User("alice"), "key", "0", ["alice.a"], "", "", 0)
    with_job(tmp_path, "Alice.a")
    if other:
        with_job(tmp_path, "b")

    require_folder_of_service(tmp_path)
    if other:
        require_folder_of_run(tmp_path)
        return
    with pytest.raises(RunFolderError, match="a service's"):
        require_folder_of_run(tmp_path)


@pytest.mark.parametrize("require", [require_folder_of_run, require_folder_of_service])
def test_a_ledger_that_cannot_be_read_is_no_folder_of_the_other_command(tmp_path, require):
    """It is an error of its own."""
    (tmp_path / "ledger.sqlite").write_bytes(b"no ledger " * 500)
    with pytest.raises(LedgerError, match="cannot be read"):
        require(tmp_path)

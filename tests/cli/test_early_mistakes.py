"""What a command tells before it imports torch, which takes seconds: mistakes, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.mistakes import TRAIN, Mistake, folder_of

#: Commands that fail in a folder with a job file and data, and what each is told.
COMMANDS = {
    "profile none.yaml": "the job file cannot be read",
    "profile jobs.yaml -o jobs.yaml": "a file that is no profile would be overwritten",
    "profile jobs.yaml -o base": "a profile cannot be written",
    "profile jobs.yaml --device cuda:99": "this machine has no device",
    "inspect none.yaml": "the job file cannot be read",
    "tokens ls -o none": "there is no service in this folder",
    "tokens revoke alice -o none": "there is no service in this folder",
    "replay none": "no replay folder",
    "opt none.tfx": "there is no graph file",
    "opt jobs.yaml": "does not end in .tfx",
    "reduce none.tfx --check true": "there is no graph file",
    "schedule explain none --job a": "there is no run or snapshot",
    "plan jobs.yaml --gpus 2": "there is no GPU on this machine to plan for",
}
#: Rows of data that `train` is told of as early.
ROWS = {
    b'{"text": "a\\ud800"}\n': "rows.jsonl:1",
    b'{"prompt": "a", "completion": 7}\n': "holds int, no text",
}
CODE = """
import sys
from tlora_fx.cli import main
try:
    main(sys.argv[1:])
finally:
    print("imported" if "torch" in sys.modules else "not imported")
"""
#: The same of many commands, each in a folder of its own and a fork that has what most import.
FORKS = """
import json, os, sys
import tlora_fx.cli.terminal, tlora_fx.config.job_file, tlora_fx.inspect.diff
import tlora_fx.server.ledger

codes = []
for folder, words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    sys.exit(print(json.dumps(codes)))
os.chdir(folder)
for descriptor, name in enumerate(("out", "err"), start=1):
    os.dup2(os.open(f"{folder}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
sys.argv[1:] = words
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Of each command and row: exit code, stdout, stderr, and the files before and after."""
    home = tmp_path_factory.mktemp("early")
    environment = dict(os.environ) | dict.fromkeys(("TLORA_FX_CACHE", "XDG_CACHE_HOME"), str(home))
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TLORA_FX_PROFILES", None)
    cases = {words: Mistake("", "", tuple(words.split())) for words in COMMANDS}
    cases |= {row: Mistake("", "", files={"rows.jsonl": row}) for row in ROWS}
    with ExitStack() as stack:
        folders = {case: stack.enter_context(folder_of(given)) for case, given in cases.items()}
        before = {case: sorted(folder.iterdir()) for case, folder in folders.items()}
        given = [(str(folders[case]), cases[case].command) for case in cases]
        told = subprocess.run(
            [sys.executable, "-c", FORKS + CODE, json.dumps(given)],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        codes = dict(zip(cases, json.loads(told.stdout), strict=True))
        found = {}
        for case, folder in folders.items():
            said = [Path(f"{folder}.{name}") for name in ("out", "err")]
            found[case] = (codes[case], *(each.read_text() for each in said), before[case],
                           sorted(folder.iterdir()))  # fmt: skip
            for each in said:
                each.unlink()
    return found


@pytest.mark.parametrize("row", ROWS)
def test_a_row_that_cannot_be_used_is_told_before_torch_is_imported(row, ended):
    """Of the first rows."""
    code, out, err, *_ = ended[row]

    assert code == 1
    assert ROWS[row] in err
    assert out == "not imported\n"


@pytest.mark.parametrize("words", COMMANDS)
def test_a_mistake_is_told_before_torch_is_imported(words, ended):
    """With an exit code, and nothing is left behind."""
    code, out, err, before, after = ended[words]

    assert code == 1
    assert COMMANDS[words] in err
    assert out == "not imported\n"
    assert after == before


#: SIGTERM comes where the command line itself is imported.
EARLY = """
import os, runpy, signal, sys

class Ends:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Ends())
sys.argv = ["tlora-fx", "train", "--help"]
{start}
"""


@pytest.mark.parametrize(
    "start",
    [
        "from tlora_fx.__main__ import main; main()",
        "runpy.run_module('tlora_fx', run_name='__main__', alter_sys=True)",
    ],
)
def test_sigterm_while_the_command_line_is_imported_is_told(start):
    ended = subprocess.run(
        [sys.executable, "-c", EARLY.format(start=start)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (143, "terminated by SIGTERM\n")


@pytest.mark.parametrize(("handler", "status"), [("SIG_IGN", 0), ("default", -15)])
def test_who_starts_a_command_may_have_settled_sigterm(handler, status):
    """It stays ignored where it was, and torchrun is to see the signal."""
    settle = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if handler == "SIG_IGN" else ""
    environment = dict(os.environ) | ({} if settle else {"RANK": "0"})
    start = f"{settle}\nfrom tlora_fx.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", EARLY.format(start=start)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert ended.returncode == status
    assert "terminated" not in ended.stderr


#: The process that the user started gets SIGTERM where the first one imports torch.
TERMINATED = """
import os, signal, sys
class Imports:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(started, signal.SIGTERM)
started = os.getpid()
sys.meta_path.insert(0, Imports())
from tlora_fx.cli import main
main()
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_during_imports_is_told_in_one_line(processes, tmp_path, monkeypatch):
    """With the exit status that shells have for it."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path))
    words = f"train jobs.yaml -o run --device cpu --gpus {processes}".split()
    with folder_of(Mistake("", "")) as folder:
        ended = subprocess.run(
            [sys.executable, "-c", TERMINATED, *words],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert ended.returncode == 143
    assert ended.stderr.removeprefix("starting\n") == "terminated by SIGTERM\n"
    assert not ended.stdout


#: Two commands look at a new folder at the same moment: the other one has it a moment later.
SECOND = """
import fcntl, os, sys
from pathlib import Path
from tlora_fx.runtime import run_folder

def looked(path):
    path.mkdir()
    lock = (path / run_folder.LOCK).open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    run_folder.RunFolder(path).announce(["a"])
    held.append(lock)

held = []
run_folder.require_new = run_folder.require_begun = lambda *given, **named: None
run_folder.require_free = looked
"""


def test_the_second_of_two_runs_in_one_folder_is_told_before_torch_is_imported(
    tmp_path, monkeypatch
):
    """What the first one says of its jobs stays."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path))
    with folder_of(Mistake("", "")) as folder:
        ended = subprocess.run(
            [sys.executable, "-c", SECOND + CODE, *TRAIN],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        [status] = folder.glob(f"{TRAIN[TRAIN.index('-o') + 1]}/*/status.json")

    assert "another process is running in the output folder" in ended.stderr
    assert ended.stdout == "not imported\n"
    assert status.parent.name == "a"

"""Check what users install: source archive, wheel, fresh environment, import of every module.

The wheel is built from the source archive, as an index would serve it, and installed into a new
environment outside the repository. That environment borrows the libraries of the running one,
which saves downloading torch again, but not the editable install: nested .pth files are not read.

The modules of a room are imported one after another, each room in a process of its own; with
--each, every module is, which takes a minute of processor time more.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("passes", "codegen", "planners")

# Runs in the new environment. The modules of a line are imported in a fork that has the libraries
# already: so one that works only after a module of another line was imported is found, in seconds.
IMPORT_ALL = """
import gc, importlib, importlib.metadata, os, sys, traceback
from pathlib import Path

gc.disable()  # imports leave little garbage
import peft, pydantic.root_model, rich.console, torch, transformers

def check(line):
    for module in line.split():
        file = importlib.import_module(module).__file__
        assert Path(file).is_relative_to(environment), f"{module} comes from {file}"

def check_command():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="tlora-fx")
    assert callable(command.load())

def passes(what, *args):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        what(*args)
    except BaseException:
        print(what.__name__, *args, file=sys.stderr)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

environment, root, *lines = sys.argv[1:]
assert not [path for path in sys.path if Path(path) == Path(root)], "the repository is on sys.path"
gc.freeze()  # so that no fork copies what it only reads
results = [passes(check, line) for line in lines] + [passes(check_command)]
sys.exit(not all(results))
"""


def source_files() -> Iterator[str]:
    """Every file of the source tree that belongs into the wheel, as a path inside the wheel."""
    places = {"tlora_fx": "tlora_fx"} | {room: f"tlora_fx/{room}" for room in ROOMS}
    for folder, place in places.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(place / path.relative_to(ROOT / folder))


def module_of(name: str) -> str:
    """The module that a path inside the wheel holds: a/b/__init__.py is a.b."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def build(target: Path) -> Path:
    """Build the source archive, then the wheel from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the build failed:\n{done.stdout}\n{done.stderr}")
    (wheel,) = target.glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel into a new environment that borrows this one's libraries.

    returns   the new environment's Python
    """
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    site = f"lib/python{sysconfig.get_python_version()}/site-packages"
    # Written after the install, or pip would see the editable install and try to remove it.
    (environment / site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def check_contents(wheel: Path, expected: set[str]) -> None:
    """Stop unless the wheel holds exactly the expected files, and its metadata."""
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wrong = [f"missing  {name}" for name in sorted(expected - found)]
    wrong += [f"foreign  {name}" for name in sorted(found - expected)]
    if wrong:
        sys.exit("the wheel differs from the source tree:\n  " + "\n  ".join(wrong))


def lines_of(modules: list[str], each: bool) -> list[str]:
    """The modules that one process imports after another: those of a room, or one."""
    if each:
        return modules
    rooms: dict[str, list[str]] = {}
    for module in modules:
        rooms.setdefault(".".join(module.split(".")[:2]), []).append(module)
    return [" ".join(room) for room in rooms.values()]


def main() -> None:
    """Build, install, compare, import; stop with a message at the first that fails."""
    expected = set(source_files())
    modules = sorted(module_of(name) for name in expected if name.endswith(".py"))
    with tempfile.TemporaryDirectory(prefix="tlora-fx-wheel-") as folder:
        outside = Path(folder).resolve()
        wheel = build(outside / "dist")
        check_contents(wheel, expected)
        python = install(wheel, outside / "env")
        command = [str(python), "-I", "-c", IMPORT_ALL, str(outside / "env"), str(ROOT)]
        command += lines_of(modules, each="--each" in sys.argv)
        if subprocess.run(command, cwd=outside, check=False).returncode:
            sys.exit("a module of the wheel cannot be imported")
    print(f"wheel check: {wheel.name}, {len(modules)} modules")


if __name__ == "__main__":
    main()

"""What all tests share: no network, one thread, GPU tests skipped without a GPU, accepted texts."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when the libraries are imported, so set before any test module is.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# Processes are forked after imports, and a fork hangs where OpenMP had threads before.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On some CPUs MKL rounds by where its operands lie in memory; strict mode sets this for users.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# Of a trace of two layers torch asks most shapes once: to keep them costs a tenth of all tracing.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
if not Path("/dev/nvidiactl").exists():
    # Inductor's processes compile Triton's kernels; without a GPU they only import torch.
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
from _pytest.pathlib import import_path
from hypothesis import HealthCheck, settings

from tests import forked, kept_between_runs, sampled

# Tests under Triton's interpreter compile no models.
_SHARED = "tests.interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "tests.traced"
pytest_plugins = [_SHARED, "tlora_fx.testing.plugin"]

# Files that take longest, these first, that no worker is left with one alone.
LONG = (
    "test_interpreted.py",
    "parallel/test_trainer_plans.py",
    "pipeline/test_joint.py",
    "parallel/test_recompute_budgets.py",
    "model/test_compiled.py",
    "runtime/test_elastic.py",
    "scheduler/test_service_trainers.py",
    "cli/test_train_processes.py",
    "cli/test_prepare.py",
    "runtime/sampling/test_sampler.py",
    "tracing/test_trace_cache.py",
    "tracing/test_mixtures.py",
    "inspect/test_listing.py",
    "runtime/test_data_starts.py",
    "training/test_cycle.py",
    "model/test_exported.py",
    "scheduler/test_service.py",
    "numerics/test_probe.py",
    "runtime/test_compilation.py",
    "test_docs.py",
    "cli/test_train.py",
    "parallel/test_pipeline.py",
    "numerics/test_instrument.py",
    "scheduler/test_admission.py",
    "passes/tensor_parallel/test_shard.py",
    "server/test_control.py",
    "runtime/test_preferences.py",
    "runtime/test_evaluation.py",
    "server/test_connections.py",
    "tracing/test_never_silently_wrong.py",
    "examples/test_grpo.py",
    "graph_file/test_edited.py",
    "backend/test_lowering.py",
    "examples/test_own_kernel.py",
    "runtime/test_generation.py",
    "runtime/test_group_step.py",
    "runtime/test_rewards.py",
    "runtime/test_trainer.py",
    "scheduler/test_requests.py",
)

# Folders whose files share compiled models: one worker runs all of them, and compiles once.
TOGETHER = ("tests/inspect/", "tests/training/")

# Rooms whose tests train what was compiled, and ask nothing of the passes that did it.
TRAINING = frozenset({
    "api", "benchmarks", "cost", "integrations", "parallel", "planners", "runtime", "scheduler",
    "server", "training",
})  # fmt: skip

# What was traced and probed is kept between test runs; its names say what decides it, its code too
# (tests/traced_once.py). All else that a user's cache holds is of one run.
_RUN = "" if "TLORA_FX_TEST_RUN" in os.environ else tempfile.mkdtemp(prefix="tlora-fx-run-")
_RUNNER = os.getpid()  # workers that are forked from it have the same _RUN
if _RUN:
    os.environ["TLORA_FX_TEST_RUN"] = _RUN
    os.environ["TLORA_FX_CACHE"] = str(Path(_RUN) / "cache")
    os.environ["TLORA_FX_TEST_TRACES"] = str(kept_between_runs.link(Path(_RUN) / "cache"))

# Tests assert no times, and a machine may be busy. What guards main draws the same few examples
# each time; TLORA_FX_RANDOM=1 (`make slow` sets it) draws new ones, and more.
_RANDOM = "TLORA_FX_RANDOM" in os.environ
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not _RANDOM,
    max_examples=100 if _RANDOM else 10,
)
settings.load_profile("patient")


# Tests and cases that a quicker one stands for; by test, of how many cases one is quick.
HERE = Path(__file__).parent
_LINES = [
    line.partition(" one of ")
    for line in (HERE / "slow.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
SLOW = frozenset(name for name, _, _ in _LINES)
ONE_OF = {name: int(number) for name, _, number in _LINES if number}


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; tests marked `gpu` are skipped where torch sees no CUDA device."""
    order = {HERE / name: index for index, name in enumerate(LONG)}
    # Stable: the others keep their order.
    items.sort(key=lambda item: order.get(item.path, len(order)))
    cases: Counter[str] = Counter()
    for item in items:
        path = item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else ""
        name = f"{path}::{item.name}"
        test = name.partition("[")[0]
        quick = test in ONE_OF and cases[test] % ONE_OF[test] == 0
        cases[test] += 1
        is_slow = name in SLOW or (test in SLOW and not quick)
        if is_slow or not sampled.is_tried(name, sampled.THIRD):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Which third of large suites was tried."""
    if sampled.THIRD != sampled.ALL and config.option.markexpr == "not slow":
        terminalreporter.write_line(
            f"of large suites third {sampled.THIRD} was tried: {sampled.VARIABLE}={sampled.THIRD} "
            f"repeats it, {sampled.ALL} tries all"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test draw the same numbers whatever ran before it in its process, or did not.

    Which files a worker runs, and in which order, depends on how fast the others are.
    """
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        # That of the CPU: torch.manual_seed would begin to look for GPUs.
        sys.modules["torch"].default_generator.manual_seed(seed)


def pytest_collection_finish() -> None:
    """Look for garbage less often, and never among what imports made: a million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_to_collect() -> None:
    """What earlier files have left, such as compiled models, is never looked at again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers of a whole run from one process that has imported all tests.

    A fork cannot use a GPU that the process before it has looked at.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not whole or not _RUN or Path("/dev/nvidiactl").exists():
        return
    server = forked.Server(Path(_RUN), lambda: import_tests(config))
    config.add_cleanup(server.close)
    os.environ[forked.VARIABLE] = str(server.client)
    for spec in specs:
        spec.python = str(server.client)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker whole files, and of some folders all files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FoldersTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    return FoldersTogether(config, log)


def import_tests(config: pytest.Config) -> None:
    """Import test files as pytest does; workers meet again, and tell, what goes wrong in one."""
    mode = config.getoption("importmode")
    for file in sorted(HERE.rglob("test_*.py")):
        before = set(sys.modules)
        if "interpreted" in file.parts:
            continue
        try:
            import_path(file, mode=mode, root=config.rootpath, consider_namespace_packages=False)
        except BaseException:  # noqa: BLE001  (importorskip raises what is no Exception)
            name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
            if name not in before:
                sys.modules.pop(name, None)
    importlib.import_module("tests.parallel.warm")


def pytest_unconfigure() -> None:
    """Remove what is of this run alone."""
    if _RUN and os.getpid() == _RUNNER:
        shutil.rmtree(_RUN, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: workers share the cores, and sums do not depend on their number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_trace_log(one_thread: None) -> None:
    """Keep torch's trace log off, which pytest turns on by handlers for all that do not propagate.

    A compilation writes a stack for each of its tensors there.
    """
    if "TORCH_TRACE" not in os.environ:
        log = logging.getLogger("torch.__trace")
        log.handlers.clear()
        log.propagate = True


@pytest.fixture(scope="session", autouse=True)
def no_absent_device_seeded(one_thread: None) -> Iterator[None]:
    """Let `torch.manual_seed` write down no stacks.

    It does for each of three kinds of devices that are not there, which takes milliseconds.
    """
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def no_service_log() -> Iterator[None]:
    """Take back what `serve` makes of its process's loggers: its stderr is gone after the test."""
    yield
    for name in ("tlora_fx.server", "uvicorn.error"):
        log = logging.getLogger(name)
        if not log.propagate:
            log.handlers.clear()
            log.setLevel(logging.NOTSET)
            log.propagate = True


@pytest.fixture(scope="session", autouse=True)
def nothing_synced() -> Iterator[None]:
    """Wait for no disk: processes are killed here, machines lose no power."""
    before, os.fsync = os.fsync, lambda file: None
    yield
    os.fsync = before


@pytest.fixture(scope="module", autouse=True)
def traced_once(request: pytest.FixtureRequest) -> None:
    """Trace equal models once, but where tracing is what is tested; so with passes."""
    if "tlora_fx.compiler" not in sys.modules:
        return  # these tests compile nothing
    from tests import traced_once

    path, home = request.path.resolve(), HERE.resolve()
    room = path.relative_to(home).parts[0] if path.is_relative_to(home) else ""
    if room == "tracing":
        traced_once.uninstall()
    else:
        traced_once.install(fused=room in TRAINING)


@pytest.fixture
def fresh_dynamo():
    """No compiled code is left from the test before, and none for the test after."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """A closed terminal is heard of, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)

"""A traced graph is kept, and read again where nothing that decides it has changed."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft.tuners.lora.layer import Linear
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from tests.models import FAMILIES, base_of, hand_written, job, mixed_jobs, plain
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.graph_file import graph_text
from tlora_fx.host import environment, sources
from tlora_fx.ir.graph import JobGraph
from tlora_fx.model.backbone import Backbone, load_backbone
from tlora_fx.numerics.state import copy_state
from tlora_fx.tracing import export, trace_cache
from tlora_fx.tracing.adapters import resolve_sites
from tlora_fx.tracing.own_loss import LossRow
from tlora_fx.tracing.trace_cache import base_graph, job_graph, require_common_loss, traces_folder

SMALL = {"num_hidden_layers": 1}
ALIKE = (
    "llama", "gemma2", "phi3-longrope", "gpt2", "gpt-neox", "olmo2", "opt", "stablelm", "bloom",
    "falcon", "lfm2",
)  # fmt: skip


@pytest.fixture
def traced(monkeypatch, tmp_path) -> list[str]:
    """An empty cache; a word for each time that something is traced."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(environment.TRACE_CACHE, "64")
    runs: list[str] = []

    class Counted:
        wrap_pruned = staticmethod(export.wrap_pruned)

        @staticmethod
        def trace_base(backbone, *how):
            runs.append("base")
            return once(backbone, repr(how), lambda: export.trace_base(backbone, *how))

        @staticmethod
        def trace_job(job, backbone, *how):
            runs.append(job.name)
            words = repr((job.lora_fields, job.adapter_dtype, how))
            graph = once(backbone, words, lambda: export.trace_job(job, backbone, *how))
            return replace(graph, name=job.name)

    monkeypatch.setattr(trace_cache, "export", Counted)
    return runs


_traced: dict[str, JobGraph] = {}


def once(backbone: Backbone, how: str, trace: Callable[[], JobGraph]) -> JobGraph:
    """A new graph, as tracing gives it; equal ones are traced once for all tests of this file."""
    if backbone.config is None:
        return trace()
    config = backbone.config.to_dict() | {"_name_or_path": ""}
    key = repr((config, how))
    if key not in _traced:
        _traced[key] = trace()
    graph = copy_state(_traced[key])
    assert isinstance(graph, JobGraph)
    return graph


def llama(tmp_path, **changes) -> BaseSpec:
    return base_of(tmp_path, "llama", "float32", **{**SMALL, **changes})


def base_text(spec: BaseSpec) -> str:
    return graph_text(base_graph(load_backbone(spec), "packed"))


@pytest.mark.parametrize("family", sampled(ALIKE, 11))
def test_a_compilation_through_the_cache_gives_the_same_graph(
    tmp_path, traced, monkeypatch, family
):
    """To the letter: nodes, values, tags, origins and notes."""
    targets = FAMILIES[family].targets
    # That folded layers come back is in test_traced_once.py, and here in the slow cases.
    base = base_of(tmp_path, family, "float32", **(SMALL if family == "llama" else {}))
    dora = job("dora", base, r=3, target_modules=[targets[0]], use_dora=True, lora_dropout=0.1)
    jobs = [mixed_jobs(base, targets)[-1], dora]
    texts = []
    for limit in ("0", "64", "64"):
        monkeypatch.setenv(environment.TRACE_CACHE, limit)
        before = len(traced)
        texts.append(graph_text(compile(jobs).group))

    assert texts[0] == texts[1] == texts[2]
    # What is refused packed is asked again; every graph that there was is read.
    assert traced[before:] in ([], ["base"])


def test_a_graph_that_is_read_is_the_one_that_was_traced(tmp_path, traced):
    """With its job's name and sites, of which a second job's are its own."""
    backbone = load_backbone(llama(tmp_path))
    first, second = (job(name, backbone.spec, r=4, target_modules=["q_proj"]) for name in "ab")
    graphs = [
        job_graph(own, backbone, resolve_sites(own, backbone), "packed") for own in (first, second)
    ]

    assert traced == ["a"]
    # The fingerprint of a text covers its jobs' names.
    texts = [re.sub(r"fingerprint\(.*\)", "", graph_text(graph)) for graph in graphs]
    assert texts[1] == texts[0].replace('job("a"', 'job("b"')
    assert graphs[1].sites == resolve_sites(second, backbone)


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-4}, {"num_hidden_layers": 2}, {"hidden_act": "gelu"}]
)
def test_another_base_is_traced(tmp_path, traced, change):
    """By its config."""
    base_text(llama(tmp_path / "one"))
    base_text(llama(tmp_path / "other", **change))
    base_text(llama(tmp_path / "again"))

    assert traced == ["base", "base"]


@pytest.mark.parametrize("change", [{"target_modules": ["v_proj"]}, {"bias": "all"}])
def test_another_adapter_is_traced(tmp_path, traced, change):
    """By what its graph has of it; ranks, scalings, rates and starts are nothing of that."""
    backbone = load_backbone(llama(tmp_path, attention_bias=True))
    fields = {"r": 4, "target_modules": ["q_proj"]}
    numbers = {
        "r": 8,
        "use_rslora": True,
        "alpha_pattern": {"0.self_attn.q_proj": 3},
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
    }
    for lora in (fields, {**fields, **numbers}, {**fields, **change}):
        own = job("one", backbone.spec, **lora)
        job_graph(own, backbone, resolve_sites(own, backbone), "packed")

    assert traced == ["one", "one"]


def test_peft_is_asked_about_adapters_that_read_a_graph_of_others(tmp_path, traced, monkeypatch):
    """Once for each kind of fields."""
    backbone = load_backbone(llama(tmp_path))
    asked = []
    counted = staticmethod(lambda job, *given: asked.append(job.name))
    monkeypatch.setattr(trace_cache.export, "wrap_pruned", counted)
    for name, rate in (("a", 0.0), ("b", 0.1), ("c", 0.1), ("d", 0.0)):
        own = job(name, backbone.spec, r=4, target_modules=["q_proj"], lora_dropout=rate)
        job_graph(own, backbone, resolve_sites(own, backbone), "packed")

    assert traced == ["a"]
    assert asked == ["b"]


@pytest.fixture
def forget_sources():
    """A call makes this process read source files again; so does the end."""

    def forget():
        sources.own_source.cache_clear()
        sources.source_of.cache_clear()

    yield forget
    forget()


def test_other_code_of_ours_is_traced_anew(tmp_path, traced, monkeypatch, forget_sources):
    """Whatever changed in a room that tracing may run."""
    for room in trace_cache.ROOMS:
        shutil.copytree(sources.PACKAGE / room, tmp_path / "package" / room)
    base_text(llama(tmp_path))
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "package")
    forget_sources()
    base_text(llama(tmp_path))
    (tmp_path / "package" / "ir" / "shapes.py").write_text("# another")
    forget_sources()
    base_text(llama(tmp_path))

    assert traced == ["base", "base"]


def test_other_code_of_a_base_is_traced_anew(tmp_path, traced, monkeypatch, forget_sources):
    """By the file of its modules."""
    base_text(llama(tmp_path))
    (tmp_path / "modeling_llama.py").write_text("# another")
    monkeypatch.setattr(modeling_llama, "__file__", str(tmp_path / "modeling_llama.py"))
    forget_sources()
    base_text(llama(tmp_path))

    assert traced == ["base", "base"]


def test_packages_inside_of_a_package_are_none_of_the_environment(tmp_path, monkeypatch):
    """Some packages bring others with them, and add them to the path when they are imported."""
    home = tmp_path / "site-packages"
    inside, beside = home / "ray" / "bundled", tmp_path / "other"
    for folder, name in ((home, "one"), (inside, "two"), (beside, "three")):
        (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
    keys, before = [], list(trace_cache.sys.path)
    for folders in ([home], [home, inside], [home, beside]):
        monkeypatch.setattr(trace_cache.sys, "path", [*before, *map(str, folders)])
        keys.append(trace_cache._versions.__wrapped__())

    assert keys[0] == keys[1] != keys[2]


def test_other_versions_are_traced_anew(tmp_path, traced, monkeypatch):
    """Of any installed package: which of them are there decides what models run."""
    base_text(llama(tmp_path))
    monkeypatch.setattr(torch, "__version__", "0.0")
    trace_cache._versions.cache_clear()
    try:
        base_text(llama(tmp_path))
    finally:
        trace_cache._versions.cache_clear()

    assert traced == ["base", "base"]


def test_code_that_is_no_librarys_is_never_kept(tmp_path, traced, monkeypatch):
    """A forward or a function that somebody put into a library's class or module."""
    backbone = load_backbone(llama(tmp_path))
    rotate, forward = modeling_llama.rotate_half, modeling_llama.LlamaMLP.forward
    plain_key = trace_cache.base_key(backbone)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "rotate_half", lambda x: 1 * rotate(x))
        assert trace_cache.base_key(backbone) is None
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 1 * forward(self, x))
        assert trace_cache.base_key(backbone) is None
    with monkeypatch.context() as patch:
        patch.setattr(backbone.model, "forward", lambda **given: None)
        assert trace_cache.base_key(backbone) is None
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.rotate_half, "__code__", (lambda x: -x).__code__)
        assert trace_cache.base_key(backbone) is None
    assert trace_cache.base_key(backbone) == plain_key is not None


def test_a_module_from_python_is_traced_each_time(traced):
    """Its code may be any."""
    jobs = hand_written(plain(layers=1))

    for _ in range(2):
        compile(jobs)

    assert traced == 2 * ["base", "one"]
    assert not traces_folder().exists()


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"digest": "", "kept": {}}', "cut", "foreign", "another graph"]
)
def test_a_damaged_entry_is_ignored_and_replaced(tmp_path, traced, damage):
    """Also one that holds together, and is of another base."""
    text = base_text(llama(tmp_path))
    (path,) = traces_folder().iterdir()
    written = path.read_text()
    if damage == "another graph":
        base_text(llama(tmp_path / "other", rms_norm_eps=1e-4))
        (other,) = set(traces_folder().iterdir()) - {path}
        path.write_text(other.read_text())
        traced.pop()
    elif damage == "foreign":
        stored = json.loads(written)
        stored["kept"]["text"] = stored["kept"]["text"].replace("aten.silu", "aten.relu")
        path.write_text(json.dumps(stored))
    else:
        path.write_text(written[: len(written) // 2] if damage == "cut" else damage)

    assert base_text(llama(tmp_path)) == text
    assert base_text(llama(tmp_path)) == text
    assert traced == ["base", "base"]
    assert path.read_text() == written


def test_the_oldest_entries_are_removed(tmp_path, traced, monkeypatch):
    """What was read lately stays."""
    specs = [llama(tmp_path / str(n), rms_norm_eps=10.0**-n) for n in (3, 4, 5)]
    for spec in specs[:2]:
        base_text(spec)
    size = max(path.stat().st_size for path in traces_folder().iterdir())
    base_text(specs[0])
    monkeypatch.setenv(environment.TRACE_CACHE, str(2.5 * size / 2**20))
    base_text(specs[2])
    base_text(specs[0])

    assert len(traced) == 3
    assert len([*traces_folder().iterdir()]) == 2


def test_the_cache_is_switched_off(tmp_path, traced, monkeypatch):
    """Nothing is read, nothing written."""
    monkeypatch.setenv(environment.TRACE_CACHE, "0")
    for _ in range(2):
        base_text(llama(tmp_path))

    assert traced == ["base", "base"]
    assert not traces_folder().exists()


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, traced, monkeypatch):
    """A file stands where the folder would."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "file"))

    assert base_text(llama(tmp_path)) == base_text(llama(tmp_path))


def test_a_loss_is_compared_once(tmp_path, traced, monkeypatch):
    """What is said of it is said again."""
    backbone = load_backbone(llama(tmp_path))
    said = iter(["not compared"])

    class Once:
        require_common_loss = staticmethod(lambda *_: next(said))

    monkeypatch.setattr(trace_cache, "own_loss", Once)

    assert [require_common_loss(backbone) for _ in range(2)] == 2 * ["not compared"]


def test_a_loss_is_compared_anew_on_other_samples(tmp_path, traced, monkeypatch):
    """What was found on one job's rows says nothing of another's."""
    backbone = load_backbone(llama(tmp_path))
    asked = []

    class Each:
        require_common_loss = staticmethod(lambda base, rows, jobs: asked.append(rows))

    monkeypatch.setattr(trace_cache, "own_loss", Each)
    for token in (3, 4, 3):
        require_common_loss(backbone, [LossRow("a row", ((1, token),), ((1, token),))])

    assert len(asked) == 2


def test_tracing_imports_nothing_of_rooms_that_keys_leave_out():
    """Else its code could change without another key."""
    imported = {
        name
        for room in trace_cache.ROOMS
        for path in (trace_cache.PACKAGE / room).resolve().rglob("*.py")
        for name in re.findall(
            r"^ *(?:from|import) tlora_fx\.(\w+)", path.read_text(), re.MULTILINE
        )
    }

    assert imported == {*trace_cache.ROOMS}


@pytest.mark.parametrize("where", ["peft", "masks", "functional"])
def test_what_another_package_puts_in_place_of_a_library_s_has_no_key(tmp_path, monkeypatch, where):
    """Installed ones too: what they trace must not serve who has not replaced anything."""
    owner, name = {
        "peft": (Linear, "forward"),
        "masks": (masking_utils, "sdpa_mask"),
        "functional": (torch.nn.functional, "silu"),
    }[where]
    backbone = load_backbone(llama(tmp_path))
    assert trace_cache.base_key(backbone) is not None
    code = builtins.compile(
        "def f(*given, **named): return plain(*given, **named)", np.__file__, "exec"
    )
    names = {"plain": getattr(owner, name), "__name__": "unsloth.models"}
    exec(code, names)
    monkeypatch.setattr(owner, name, names["f"])

    assert trace_cache.base_key(backbone) is None


def test_sites_of_equal_adapters_are_resolved_once(tmp_path, traced, monkeypatch):
    """Those of others are not theirs; damaged ones are resolved again."""
    asked = []

    class Counted:  # no function: what one of no library traces is not kept
        def __call__(self, job, backbone):
            asked.append(job.name)
            return resolve_sites(job, backbone)

    monkeypatch.setattr(trace_cache, "resolve_sites", Counted())
    base = llama(tmp_path)
    one = job("one", base, r=3, target_modules=["q_proj"])
    two = job("two", base, r=3, target_modules=["q_proj"])
    other = job("other", base, r=5, target_modules=["q_proj"], rank_pattern={"0.*q_proj": 2})

    def sites(*jobs):
        return trace_cache.resolved_sites(jobs, load_backbone(base))

    first, wider = sites(one, other)
    assert (
        sites(two, other)
        == [first, wider]
        == [resolve_sites(each, load_backbone(base)) for each in (two, other)]
    )
    assert asked == ["one", "other"]
    for path in traces_folder().iterdir():
        path.write_text(path.read_text().replace("q_proj", "k_proj"))
    assert sites(two) == [first]
    assert asked == ["one", "other", "two"]

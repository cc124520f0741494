"""Every kernel compiles for every architecture without a GPU, and comes out as it should.

One spec a kind here, two with the slow ones; `scripts/check_kernels.py` compiles all forms and
shapes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("Triton's compiler is built for Linux", allow_module_level=True)

from scripts import check_kernels
from scripts.check_kernels import KernelNotCompilable, Resources, faults, few, resources
from tests.sampled import sampled
from tlora_fx.codegen.kernels import stem
from tlora_fx.codegen.kernels.shrink import tile_for
from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.errors import KernelSpecError, KernelToolMissing, UnknownKernel

SPECS = {stem(spec).removesuffix("_sm90"): spec for spec in few()}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Generated files of this test only."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    "arch",
    [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", sampled(SPECS, one_of=2))
def test_a_kernel_fits_its_architecture(name, arch):
    """Registers, no spills, shared memory; tensor cores and bulk loads where they belong."""
    spec = SPECS[name]
    found = resources(spec, arch)

    assert faults(spec, found) == []
    assert found.stack_bytes == 0
    assert found.total > 100, "a kernel that cannot run is compiled to a trap"


@pytest.mark.parametrize("sites", [1, 2, 3])
@pytest.mark.parametrize("tokens", sampled([8192, 6144, 1024]))
def test_the_shrink_that_draws_masks_fits(tokens, sites):
    """Its tile leaves shares of S."""
    spec = KernelSpec("shrink", 4096, 14336, dropout=True, sites=sites)
    spec = replace(spec, tile=tile_for(spec, tokens, width=32))
    needs = resources(spec)

    assert spec.cut.slab > 0
    assert faults(spec, needs) == []


@pytest.mark.parametrize(
    ("inner", "sites", "arch"),
    sampled([(4096, 4, 90), (2048, 3, 90), (4096, 3, 120), (4096, 3, 80)]),
)
def test_other_shrinks_of_many_masked_tokens_fit(inner, sites, arch):
    """Where large shares would spill, or would be all of x."""
    spec = KernelSpec("shrink", inner, 14336, dropout=True, sites=sites, arch=arch)
    spec = replace(spec, tile=tile_for(spec, 8192, width=32))

    assert spec.cut.slab == 0
    assert faults(spec, resources(spec, arch)) == []


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.slow), 120])
@pytest.mark.parametrize("sites", sampled([1, 3, 4]))
def test_the_shrink_of_many_tokens_fits(arch, sites):
    """Of narrow ranks it loads far ahead, but on cards whose shared memory has no room for that."""
    spec = KernelSpec("shrink", 4096, 4096, sites=sites, arch=arch)
    spec = replace(spec, tile=tile_for(spec, 8192, width=16))

    assert (spec.cut.stages == 6) == (arch != 120)
    assert faults(spec, resources(spec, arch)) == []


@pytest.mark.parametrize(("arch", "waits"), [(80, 0), (90, 1)])
def test_a_kernel_lets_the_next_one_start_and_waits_for_the_one_before(arch, waits):
    """Once each, from Hopper on."""
    found = resources(SPECS["sum_ds_4096x14336_bf16_r16"], arch)

    assert found.count("PREEXIT") == waits
    assert found.count("ACQBULK") == waits


def test_lengths_that_are_no_multiple_of_16_compile_too():
    """Triton specialises on divisibility, so a step of odd length is another kernel."""
    spec = SPECS["forward_4096x14336_bf16_r16"]

    assert faults(spec, resources(spec, tokens_divisible=False)) == []


def test_each_fault_is_named():
    """Too many registers, spills, too much shared memory, and what is missing."""
    found = Resources(90, 256, 8, 300_000, {"LDL.64": 3, "STL": 2, "PREEXIT": 1}, 768)

    assert faults(KernelSpec("forward", 64, 64), found) == [
        "256 registers of at most 255",
        "5 loads and stores of spilled registers",
        "300000 bytes of shared memory of at most 232448",
        "768 columns of tensor memory of at most 512",
        "no tensor-core instructions",
        "no bulk loads (UTMALDG)",
        "it lets the next kernel start and does not wait for the one before",
    ]


def test_instructions_are_counted_by_what_they_do():
    """Opcodes as the disassembler writes them on three architectures."""
    opcodes = {
        "HGMMA.64x256x16.F32.BF16": 4,
        "HMMA.16816.F32.BF16": 2,
        "UTCHMMA": 1,
        "UTMALDG.2D": 3,
        "LDG.E.128": 5,
        "LDGSTS.E.BYPASS.LTC128B.128": 6,
        "LDG.E.LTC128B": 7,
        "LDL": 1,
        "STL.64": 1,
    }
    found = Resources(90, 32, 0, 0, opcodes)

    assert found.tensor_core == 7
    assert found.bulk_loads == 3
    assert found.wide_loads == 11
    assert found.spills == 2


def test_what_triton_cannot_compile_is_told_with_the_kernel(tmp_path):
    """The generated file, the spec, and Triton's own words."""
    tile = Tile(rows=16, columns=100, depth=0, warps=8, stages=2)
    with pytest.raises(KernelNotCompilable, match=r"(?s)pack kernel for sm_90.*power of 2"):
        resources(KernelSpec("pack", 64, 64, tile=tile))


def test_a_missing_disassembler_is_told(monkeypatch, tmp_path):
    """With the place where it was looked for."""
    monkeypatch.setenv("TRITON_CUOBJDUMP_PATH", str(tmp_path / "none"))
    with pytest.raises(KernelToolMissing, match=r"(?s)missing.*none"):
        check_kernels._disassembler()


def test_an_interpreting_process_says_that_it_cannot_compile(monkeypatch):
    """Instead of Triton's riddles."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelToolMissing, match="unset TRITON_INTERPRET"):
        resources(KernelSpec("pack", 64, 64))


@pytest.fixture
def compiles(monkeypatch):
    """Let compiling give these resources instead of asking Triton."""

    def give(found):
        monkeypatch.setattr(check_kernels, "resources", lambda spec, arch=None: found)

    return give


def check(*words):
    """The exit status of the script."""
    return check_kernels.app(list(words), standalone_mode=False)


def test_a_check_that_finds_a_fault_fails(capsys, compiles):
    """Each spec and architecture is a line, with its faults."""
    compiles(Resources(90, 101, 0, 4096, {"STL": 2}))
    status = check("kinds", "pack", "--arch", "90", "--extent", "few")
    out = capsys.readouterr().out

    assert status == 1
    assert "pack_4096x14336_bf16_r16 " in out
    assert "2 loads and stores of spilled registers" in out
    assert "2 specs, 2 faults" in out


def test_a_check_without_faults_succeeds(capsys, compiles):
    """For all architectures where none is named."""
    compiles(Resources(90, 101, 0, 4096, {}))
    status = check("kinds", "pack", "--extent", "few")

    assert not status
    assert capsys.readouterr().out.count(" ok\n") == 6


def test_one_kernel_is_checked(capsys, compiles):
    """By the options that `tlora-fx kernels show` takes."""
    compiles(Resources(90, 101, 0, 4096, {"LDG.E.128": 7}))
    status = check("one", "pack", "--in", "4096", "--out", "14336", "--extend", "tail")

    assert not status
    assert "  7 16-byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("pak",), UnknownKernel, "nearest  pack"),
        (("forward", "--arch", "90", "--arch", "999"), KernelSpecError, "capability 999"),
    ],
)
def test_what_no_gpu_or_kernel_is_called_is_refused(compiles, words, error, said):
    """Before any kernel is compiled."""
    compiles(None)
    with pytest.raises(error, match=said):
        check("kinds", *words)

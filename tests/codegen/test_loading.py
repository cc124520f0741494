"""Generated files: written once, never trusted blindly, kept somewhere in any case."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from tlora_fx.codegen import loading
from tlora_fx.codegen.importing import TRITON_CACHE
from tlora_fx.codegen.kernels import build
from tlora_fx.codegen.loading import (
    KernelCacheWarning,
    keep_triton_cache,
    kernel_folder,
    load,
    stored,
)
from tlora_fx.codegen.spec import KernelSpec
from tlora_fx.errors import KernelCacheError

KERNEL = build(KernelSpec("pack", 64, 32))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder of this test."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_a_kernel_is_written_once(folder):
    """The second time its file stays as it is."""
    path = stored(KERNEL)
    before = path.stat().st_mtime_ns

    assert stored(KERNEL) == path == folder / f"{KERNEL.name}.py"
    assert path.stat().st_mtime_ns == before
    assert path.read_text() == KERNEL.text
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_a_kernel_that_was_altered_by_hand_is_made_anew(folder):
    """And the user is told, because the change is lost."""
    path = stored(KERNEL)
    path.write_text(KERNEL.text.replace("jobs", "work"))
    with pytest.warns(KernelCacheWarning, match="altered by hand"):
        stored(KERNEL)

    assert path.read_text() == KERNEL.text


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    """TLORA_FX_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TLORA_FX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert kernel_folder() == tmp_path / ".cache/tlora-fx/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_folder() == tmp_path / "xdg/tlora-fx/kernels"
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "own"))
    assert kernel_folder() == tmp_path / "own/kernels"


@pytest.fixture
def unwritable(tmp_path, monkeypatch):
    """A cache folder that cannot be made: a file lies in its way."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "file"))
    loading._instead.cache_clear()
    yield tmp_path
    loading._instead.cache_clear()


def test_without_a_writable_cache_a_temporary_folder_serves(unwritable):
    """It is told once, with the folder and what to do."""
    with pytest.warns(KernelCacheWarning, match="TLORA_FX_CACHE") as told:
        first = stored(KERNEL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stored(KERNEL) == first

    assert len(told) == 1
    assert first.read_text() == KERNEL.text
    assert not first.is_relative_to(unwritable)


def test_without_any_writable_folder_the_error_names_both(unwritable, monkeypatch):
    """There is nothing to fall back to."""

    def full(prefix):
        raise OSError("no space left")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(KernelCacheError, match=r"(?s)file/kernels.*no space left"):
        stored(KERNEL)


def test_a_kernel_is_loaded_once_a_process(folder):
    """Equal specs give one module, whose file lies in the cache."""
    pytest.importorskip("triton")
    spec = KernelSpec("pack", 96, 32)
    module = load(spec)
    before = len(loading._loaded)

    assert load(KernelSpec("pack", 96, 32)) is module
    assert len(loading._loaded) == before
    assert module.__file__ == str(stored(build(spec)))
    assert list(module.SIGNATURE)[:2] == ["jobs", "a_0"]
    assert (module.META["num_warps"], module.META["num_stages"]) == (8, 2)


@pytest.mark.parametrize("told", ["0", "1"])
def test_kernels_do_not_overlap_where_the_environment_says_so(folder, monkeypatch, told):
    """TLORA_FX_PDL=0 counts when a module is loaded; its text is the same."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TLORA_FX_PDL", told)
    module = load(KernelSpec("pack", 128, 32 + int(told)))
    compiled = os.environ.get("TRITON_INTERPRET") != "1"

    assert module.META.get("launch_pdl", False) is (told == "1" and compiled)
    assert bool(module.OVERLAP.value) is (told == "1" and compiled)


def test_loading_needs_no_triton_until_a_kernel_is_asked_for():
    """The package can be imported and text generated where Triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tlora_fx.codegen import kernels, loading\n"
        "from tlora_fx.codegen.spec import KernelSpec\n"
        "kernels.build(KernelSpec('pack', 64, 32))\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n"
        "    loading.load(KernelSpec('pack', 64, 32))\n"
        "except Exception as error:\n"
        "    assert type(error).__name__ == 'KernelToolMissing', error\n"
        "else:\n"
        "    raise AssertionError('it loaded')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("given", [None, "/own/place"])
def test_kernels_are_kept_in_one_folder_whoever_compiles_them(monkeypatch, given):
    """Inductor names a folder of its own only where none is named."""
    monkeypatch.delenv(TRITON_CACHE, raising=False)
    from triton import knobs

    usual = knobs.cache.dir
    if given:
        monkeypatch.setenv(TRITON_CACHE, given)
    else:
        # It is taken away again behind the test.
        monkeypatch.setenv(TRITON_CACHE, "")
        monkeypatch.delenv(TRITON_CACHE)
    keep_triton_cache()

    assert os.environ[TRITON_CACHE] == (given or usual) == knobs.cache.dir

"""Reading the environment variables of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tlora_fx
from tlora_fx.cli import main
from tlora_fx.errors import EnvironmentVariableWrong
from tlora_fx.host import environment
from tlora_fx.host.environment import CHOICES
from tlora_fx.host.paths import cache_folder, profile_folder, profile_folders
from tlora_fx.ops.kernels import select

VARIABLES = {
    value
    for value in vars(environment).values()
    if isinstance(value, str) and value.startswith("TLORA_FX_")
}
PAGE = Path(tlora_fx.__file__).parents[1] / "docs/environment.md"
READERS = {
    environment.KERNELS: environment.kernel_mode,
    environment.STRICT: environment.wants_strict_kernels,
    environment.PDL: environment.overlaps_kernels,
    environment.FLASH4: environment.allows_flash_attention_4,
    environment.PEER_COPIES: environment.wants_peer_copies,
}


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    """No variable is set, and the home folder is an empty one."""
    for name in (*CHOICES, environment.CACHE, environment.PROFILES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("name", CHOICES)
def test_a_variable_is_read_when_it_is_asked_for(monkeypatch, name):
    """An unset or empty variable means the default, and each value means something of its own."""
    default, *others = CHOICES[name]
    unset = READERS[name]()
    monkeypatch.setenv(name, "")
    assert READERS[name]() == unset
    monkeypatch.setenv(name, default)
    assert READERS[name]() == unset
    meanings = [unset]
    for value in others:
        monkeypatch.setenv(name, value)
        meanings.append(READERS[name]())

    assert len(set(meanings)) == len(CHOICES[name])


@pytest.mark.parametrize("name", environment.MAX_BYTES)
def test_a_size_is_read_in_its_unit(monkeypatch, name):
    """0 keeps nothing; what is no size is refused."""
    default = environment.max_bytes(name)
    sizes = []
    for text in ("", "0", "1", "2.5"):
        monkeypatch.setenv(name, text)
        sizes.append(environment.max_bytes(name))
    assert sizes == [default, 0, sizes[2], 2.5 * sizes[2]]
    for wrong in ("-1", "many", "nan", "inf"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(EnvironmentVariableWrong, match=name):
            environment.max_bytes(name)


@pytest.mark.parametrize("name", CHOICES)
def test_a_misspelt_value_is_refused(monkeypatch, name):
    """The error names the variable and the values that it may have."""
    monkeypatch.setenv(name, "fo")
    with pytest.raises(EnvironmentVariableWrong) as refused:
        READERS[name]()

    assert name in str(refused.value)
    assert refused.value.facts["expected"] == ", ".join(CHOICES[name])


def test_another_case_is_refused_with_the_right_word(monkeypatch):
    """OFF is no value; off is."""
    monkeypatch.setenv(environment.KERNELS, "OFF")
    with pytest.raises(EnvironmentVariableWrong) as refused:
        environment.require_known_values()

    assert refused.value.facts["nearest"] == "off"


def test_a_command_refuses_a_misspelt_value_before_it_begins(monkeypatch, capsys):
    """A command's help is still printed."""
    monkeypatch.setenv(environment.STRICT, "yes")
    with pytest.raises(SystemExit) as stopped:
        main(["passes"])

    assert stopped.value.code == 1
    assert "TLORA_FX_STRICT" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["passes", "--help"])
    assert not stopped.value.code


def test_strict_mode_is_the_environments_until_it_is_set(monkeypatch):
    """The variable is read at the first question, not at import."""
    monkeypatch.setattr(select, "_settings", select._Settings())
    monkeypatch.setenv(environment.STRICT, "1")
    with select.strict(False):
        assert not select.is_strict()
    assert select.is_strict()
    assert True in select.facts()


def test_kernels_and_profiles_have_one_cache_folder(monkeypatch, tmp_path):
    """TLORA_FX_CACHE, else XDG_CACHE_HOME, else ~/.cache; profiles lie inside it."""
    assert cache_folder() == tmp_path / ".cache/tlora-fx"
    assert profile_folders() == [cache_folder() / "profiles"]
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert cache_folder() == tmp_path / "xdg/tlora-fx"
    monkeypatch.setenv(environment.CACHE, "~/own")

    assert cache_folder() == tmp_path / "own"
    assert profile_folder() == tmp_path / "own/profiles"


def test_profiles_of_the_default_folder_are_found_beside_a_cache_of_ones_own(monkeypatch, tmp_path):
    """Earlier versions wrote them there."""
    monkeypatch.setenv(environment.CACHE, "~/own")

    assert profile_folders() == [tmp_path / "own/profiles", tmp_path / ".cache/tlora-fx/profiles"]


def test_the_folder_of_profiles_is_expanded(monkeypatch, tmp_path):
    """It replaces the others."""
    monkeypatch.setenv(environment.PROFILES, "~/p")

    assert profile_folder() == tmp_path / "p"
    assert profile_folders() == [tmp_path / "p"]


def test_a_folder_of_an_unknown_user_is_refused(monkeypatch):
    """`~nobody-here/p` has no home folder."""
    monkeypatch.setenv(environment.PROFILES, "~nobody-here/p")
    with pytest.raises(EnvironmentVariableWrong, match="TLORA_FX_PROFILES"):
        profile_folder()


def test_the_page_lists_each_variable_with_its_default_and_its_values():
    """docs/environment.md and host/environment.py know the same variables."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `TLORA")]
    rows = {cells[0].strip("| `"): cells for cells in (line.split(" | ") for line in lines)}

    assert set(rows) == VARIABLES
    for name, values in CHOICES.items():
        assert rows[name][3] == f"`{values[0]}`"
        assert all(f"`{value}`" in rows[name][2] for value in values)


def test_no_other_module_names_a_variable_of_ours():
    """Names of variables are strings of host/environment.py alone."""
    root = Path(tlora_fx.__file__).parent
    rooms = [root, *(root.parent / name for name in ("codegen", "passes", "planners"))]
    files = {path.resolve() for room in rooms for path in room.rglob("*.py")}
    texts = {path: path.read_text("utf-8") for path in files}
    named = {
        path.name
        for path, text in texts.items()
        if "TLORA_FX_" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in VARIABLES
    }

    assert named == {"environment.py"}

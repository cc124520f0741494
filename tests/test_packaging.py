"""The public names, and the three rooms that have one import name each."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tlora_fx

ROOT = Path(__file__).parents[1]
ROOMS = ("passes", "codegen", "planners")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with the repository's root on its path."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", [name for name in tlora_fx.__all__ if name != "__version__"])
def test_every_public_name_is_found_where_it_lives(name):
    """What `__all__` lists, an attribute of the package gives."""
    value = getattr(tlora_fx, name)

    assert value.__name__ == name


def test_public_functions_survive_the_import_of_submodules():
    """An import of a submodule gives the package an attribute of its name: none is public."""
    submodules = {module.name for module in pkgutil.iter_modules(tlora_fx.__path__)}

    assert submodules >= {"tracing", "compiler", *ROOMS}
    assert submodules.isdisjoint(tlora_fx.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    """A typing mistake reads as with any module."""
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = tlora_fx.Trainr


def test_importing_the_package_loads_no_torch():
    """The names are lazy: the package by itself imports nothing heavy."""
    result = python("import sys, tlora_fx; sys.exit('torch' in sys.modules)")

    assert result.returncode == 0


def test_the_newest_release_of_the_changelog_is_the_version():
    """A release writes both."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(r"^## ([\d.]+) ", text, flags=re.MULTILINE)[1] == tlora_fx.__version__


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_its_bare_name(room):
    """`import passes` would load every module a second time, so it is an error that says so."""
    result = python(f"import {room}")

    assert result.returncode == 1
    assert f"imported as 'tlora_fx.{room}'" in result.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_relative_link(room):
    """The links in the package hold wherever the repository lies."""
    link = ROOT / "tlora_fx" / room

    assert link.is_symlink()
    assert link.readlink() == Path("..") / room

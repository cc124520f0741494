"""Objects of the user's own code, by the name that a job file or the command line gives them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any


def user_object(name: str) -> Any:
    """Object that MODULE:NAME or FILE.py:NAME names; the code is run.

    raises   whatever the code raises; ImportError, OSError, AttributeError
    """
    source, _, attribute = name.rpartition(":")
    module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    return getattr(module, attribute)


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

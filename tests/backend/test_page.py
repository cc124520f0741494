"""What docs/torch-compile.md shows of the backend runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests import fresh

PAGE = Path(__file__).parents[2] / "docs" / "torch-compile.md"


def test_the_pages_example_trains(tmp_path):
    """The block runs in a fresh process, warns of nothing, and its loss falls."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition("\n## The backend, for a PEFT model of one job\n")[2]
    code, trl = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL)

    told = fresh.run("-c", code, cwd=tmp_path)

    assert told.returncode == 0, told.stderr
    assert "BackendWarning" not in told.stderr
    assert "from tlora_fx.integrations.trl import TloraFxCallback" in trl
    losses = [float(line.split()[1]) for line in told.stdout.splitlines()]
    assert losses[2] < losses[0]

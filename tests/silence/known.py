"""Bases that still train otherwise than alone, or are refused in the wrong words, each with how.

What is mended must leave this list: the marks made of it are strict.
"""

from __future__ import annotations

#: By the name of the test's case.
CPU = "a value that tracing left on the CPU is refused as a pass's defect (T0212), not by its cause"
WRITTEN: dict[str, str] = {
    "auto: sizes: tensor of lines": CPU,
    "auto: state: what was first, its mask": CPU,
    "packed: state: what was first, its mask": CPU,
}
#: By the number of the program.
GENERATED: dict[int, str] = {}

"""The readable program."""

from __future__ import annotations

from tests.inspect.programs import fused, lowered
from tlora_fx.inspect.program_text import program_lines, render_program, source_lines


def test_the_code_of_a_state_reads_as_accepted(golden):
    """The whole text, as somebody looked at it."""
    golden("inspect/code-fused.txt", render_program(fused()))


def test_statements_are_coloured_by_whom_they_serve():
    """Shared ones calmly, each job's in its own colour, a lowered one as for several."""
    styles = {text.strip(): style for line in program_lines(fused()) for text, style in line}
    one = {text.strip(): style for line in program_lines(lowered()) for text, style in line}

    def of(found, name: str) -> str:
        return next(style for text, style in found.items() if text.startswith(f"{name} ="))

    assert of(styles, "norm") == "shared"
    assert of(styles, "lora_A_0") == "job 0"
    assert of(styles, "lora_A_1") == "job 1"
    assert of(one, "up_proj") == "adapters"


def test_the_code_that_trains_is_shown_letter_by_letter(quickstart, quickstart_stages):
    """Colours add nothing to ssm.py, and no statement is left without one."""
    lines = source_lines(quickstart.source, quickstart_stages[-1].program)
    plain = [text for line in lines for text, style in line if not style and " = " in text]

    assert ["".join(text for text, _ in line) for line in lines] == quickstart.source.splitlines()
    assert [line for line in plain if line.startswith("        ")] == []

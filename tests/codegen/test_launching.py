"""The stand-in of a compiled kernel asks Triton once a form, and then starts the form itself."""

from types import SimpleNamespace

import pytest
import torch

from tlora_fx.codegen import launching


class Form:
    """A compiled kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.started = []

    def run(self, *arguments):
        self.started.append(arguments)


class Function:
    """A `@triton.jit` function of an address, a number and a number that changes."""

    def __init__(self) -> None:
        specialized = SimpleNamespace(do_not_specialize=False, do_not_specialize_on_alignment=False)
        free = SimpleNamespace(do_not_specialize=True, do_not_specialize_on_alignment=True)
        self.params = [SimpleNamespace(**vars(one)) for one in (specialized, specialized, free)]
        for place, one in enumerate(self.params):
            one.num = place
        self.forms = []

    def __getitem__(self, grid):
        def start(*arguments, **meta):
            self.forms.append(Form())
            return self.forms[-1]

        return start


@pytest.fixture
def launcher(monkeypatch):
    """A stand-in for `Function`, of which nobody watches the launches."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    quiet = SimpleNamespace(calls=[])
    monkeypatch.setattr(launching, "_hooks", lambda: (quiet, quiet))
    made = launching.Launcher(Function())
    made._stream = lambda device: 9
    return made


def test_a_form_is_compiled_once_and_then_started(launcher):
    """Numbers that change do not matter; divisibility of the others does."""
    x = torch.zeros(32)
    for changing in (1, 2, 16):
        launcher[4, 2](x, 16, changing, num_warps=4)
    launcher[4, 2](x, 17, 1, num_warps=4)
    launcher[4, 2](x[1:], 16, 1, num_warps=4)
    first, *others = launcher.function.forms

    assert len(others) == 2
    assert [one[-1] for one in first.started] == [2, 16]
    assert first.started[0][:4] == (4, 2, 1, 9)


def test_launches_are_written_on_the_tape(launcher):
    """What is written starts the same form with other arguments."""
    launching.tape.started = entries = []
    try:
        launcher[(3,)](torch.zeros(32), 16, 5, num_warps=4)
        with launching.tape.away():
            launcher[(3,)](torch.zeros(32), 16, 6, num_warps=4)
    finally:
        launching.tape.started = None
    (entry,) = entries
    entry.start(8, (1024, 16, 7))

    assert entry.by_address
    assert launcher.function.forms[0].started[-1][3] == 8
    assert launcher.function.forms[0].started[-1][-3:] == (1024, 16, 7)

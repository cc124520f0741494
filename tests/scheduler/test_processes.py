"""What a server of workers leaves behind before it forks, and which idle workers it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _triton

from tlora_fx.scheduler.local.processes import _Resident, _Server, forget_no_device


def test_workers_ask_anew_whether_triton_has_a_device():
    """A library asked while devices were hidden, and torch kept the answer."""
    _triton.has_triton()
    assert _triton.has_triton.cache_info().currsize

    forget_no_device()

    assert not _triton.has_triton.cache_info().currsize


class Idle(_Server):
    """A server of idle workers that are no processes."""

    def __init__(self, held, free):
        super().__init__(None, 0)
        self.free, self.ended = dict(free), []
        for pid, (gpu, size) in enumerate(held):
            worker = _Resident(
                str(pid), frozenset({gpu}), 0, 0, idle=True, since=pid, held=size, team=pid
            )
            self.residents[pid] = worker

    def dismiss(self, pid, order=0):
        worker = self.residents.pop(pid)
        self.ended.append(pid)
        for gpu in worker.place:
            self.free[gpu] += worker.held

    def trim(self, order=0, needs=0):
        """There is enough of main memory."""


SIZES = st.integers(0, 20)
WORKERS = st.lists(st.tuples(st.integers(0, 2), SIZES), max_size=8)


@given(WORKERS, st.tuples(SIZES, SIZES, SIZES), st.sets(st.integers(0, 2), min_size=1), SIZES)
def test_no_more_idle_workers_end_than_an_order_needs(held, free, place, needs):
    """The oldest of a GPU first, until it has room there; those of other GPUs stay."""
    server = Idle(held, enumerate(free))
    server.free_memory({"start": 1, "stays": "new", "place": list(place), "needs": needs})

    for gpu in range(3):
        there = [pid for pid, (where, _) in enumerate(held) if where == gpu]
        ended = [pid for pid in there if pid in server.ended]
        assert ended == there[: len(ended)]
        fits = [needs <= free[gpu] + sum(held[pid][1] for pid in there[:n])
                for n in range(len(there) + 1)]  # fmt: skip
        least = fits.index(True) if True in fits else len(there)
        assert len(ended) == (least if gpu in place else 0)

"""Threads on CPUs: our command line sets what its user has not."""

from __future__ import annotations

import pytest

from tlora_fx.host import threads
from tlora_fx.host.threads import ThreadRules


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    """The process may run on eight, and its container may use all of them."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(threads, "usable_cpus", lambda: 8)


def set_up(environment):
    """The rules, and what they have set."""
    rules, after = ThreadRules(), dict(environment)
    rules.set_up(after)
    return rules, {name: value for name, value in after.items() if name not in environment}


def test_threads_wait_without_spinning():
    """As many as there are CPUs, which OpenMP counts itself."""
    rules, added = set_up({})

    assert added == {"OMP_WAIT_POLICY": "passive"}
    assert rules.adapts


def test_a_container_with_less_cpu_time_has_fewer_threads(monkeypatch):
    """OpenMP counts the CPUs of the machine."""
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    rules, added = set_up({})

    assert added["OMP_NUM_THREADS"] == "2"
    assert rules.adapts


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_users_number_of_threads_stays(monkeypatch, name):
    """In a small container too, and whatever the base."""
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    rules, added = set_up({name: "6"})

    assert added == {"OMP_WAIT_POLICY": "passive"}
    assert not rules.adapts


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_users_way_of_waiting_stays(name):
    """Whichever library's variable says it."""
    rules, added = set_up({name: "1"})

    assert added == {}
    assert rules.adapts


def test_an_empty_variable_counts_as_unset():
    """As those of ours do."""
    rules, _ = set_up({"OMP_NUM_THREADS": ""})

    assert rules.adapts


def test_without_our_command_line_nothing_is_chosen():
    """Other programs have threads of their own choice."""
    assert not ThreadRules().adapts

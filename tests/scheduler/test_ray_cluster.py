"""Ray's nodes as policies see them."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.cli import main
from tlora_fx.cost.hardware import Cluster
from tlora_fx.errors import RayUnreachable
from tlora_fx.scheduler.ray.cluster import HEAD_SECONDS, RayCluster, cluster_of, seats_of

NODES = st.lists(st.tuples(st.integers(1, 8), st.sampled_from("ab")), min_size=1, max_size=6)


def told(*nodes, resource="GPU"):
    """As `ray.nodes()` tells nodes of (id, size, rack)."""
    return [
        {
            "NodeID": name,
            "Alive": True,
            "Resources": {resource: float(size)},
            "Labels": {"rack": rack},
        }
        for name, size, rack in nodes
    ]


def joined(*nodes):
    seats = seats_of(told(*nodes), "cuda", None)
    return RayCluster("cuda", seats, cluster_of(seats, "h200"))


def hear(here, nodes):
    """The changes once `ray.nodes()` has told this."""
    here._seen = (time.monotonic(), nodes)
    return here.changes()


@given(NODES)
def test_what_stands_together_for_a_policy_stands_together(sizes):
    """Each GPU is in one node, and each node of a policy in one of Ray's; so are racks."""
    here = joined(*((f"n{index}", size, rack) for index, (size, rack) in enumerate(sizes)))
    cluster = here.cluster
    seats = [here.node(gpu) for gpu in range(cluster.gpus)]

    assert cluster.gpus == sum(size for size, _ in sizes)
    assert [seats.count(seat) for seat in here.seats] == [seat.gpus for seat in here.seats]
    for gpu, other in zip(range(cluster.gpus), range(1, cluster.gpus), strict=False):
        tier = cluster.tier((gpu, other))
        if tier == "node":
            assert seats[gpu] is seats[other]
        if tier == "rack":
            assert seats[gpu].rack == seats[other].rack


def test_a_lost_node_is_told_once_and_another_takes_its_seat():
    """Of its size and its rack."""
    small, big, other = ("s", 2, "a"), ("b", 4, "a"), ("o", 4, "b")
    here = joined(small, big, other)
    assert here.cluster == Cluster(10, 2, 1, "h200")
    seat = next(seat for seat in here.seats if seat.node == "b")
    numbers = [seat.first // 2, seat.first // 2 + 1]

    assert hear(here, told(small, big, other)) == []
    assert hear(here, told(small, other)) == [(number, False) for number in numbers]
    assert here.cluster.lost == frozenset(numbers)
    assert hear(here, told(small, other, ("x", 4, "b"), ("y", 2, "a"))) == []
    assert hear(here, told(small, other, ("z", 4, "a"))) == [(number, True) for number in numbers]
    assert here.cluster.lost == frozenset()
    assert seat.node == "z"


def test_slots_of_a_cpu_share_its_cores():
    """Each node has as many parts as are asked for."""
    nodes = told(("n", 6, "a"), ("head", 0, "a"), resource="CPU")

    (whole,) = seats_of(nodes, "cpu", None)
    (parts,) = seats_of(nodes, "cpu", 2)

    assert (whole.gpus, whole.cpus) == (1, 6.0)
    assert (parts.gpus, parts.cpus) == (2, 3.0)


def test_a_head_that_is_silent_is_gone():
    """The run ends; what it has committed stays."""
    here = joined(("n", 1, "a"))
    here._seen = (time.monotonic() - HEAD_SECONDS - 1, [])

    with pytest.raises(RayUnreachable, match="head"):
        here.changes()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--executor", "rya"], "T0953"),
        (["--ray-address", "10.0.0.1:6379"], "T0953"),
        (["--executor", "ray", "--ray-address", "ray://10.0.0.1:10001"], "T0959"),
        (["--executor", "ray", "--ray-address", "127.0.0.1:1"], "T0959"),
        (["--executor", "ray", "--ray-address", "127.0.0.1:99999"], "T0959"),
    ],
)
def test_a_wrong_executor_is_told_before_anything_starts(tmp_path, capsys, arguments, code):
    """And nothing is left behind."""
    (tmp_path / "jobs").mkdir()

    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "jobs"), "-o", str(tmp_path / "run"), *arguments])

    assert f"error[{code}]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_to_install_is_said_where_ray_is_missing(tmp_path, capsys, monkeypatch):
    """Before Ray would be imported."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(SystemExit):
        main(["run", str(tmp_path), "--executor", "ray"])

    assert "pip install 'tlora-fx[ray]'" in capsys.readouterr().err

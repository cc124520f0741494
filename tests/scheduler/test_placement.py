"""Which GPUs a group gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.cost.hardware import Cluster
from tlora_fx.scheduler.search.objective import tier_for
from tlora_fx.scheduler.search.placement import Placer


def test_a_small_group_goes_where_least_is_left_over():
    """The node that has just enough room is taken before an empty one."""
    placer = Placer(Cluster(24))
    placer.take(range(5))

    assert placer.find(3) == (5, 6, 7)
    assert placer.find(4) == (8, 9, 10, 11)


def test_a_group_that_fits_into_a_node_is_never_cut():
    """Free GPUs of two nodes are no place for a group of a node's size."""
    placer = Placer(Cluster(16))
    placer.take([0, 8])

    assert placer.find(8) is None
    assert placer.find(9) == (1, 2, 3, 4, 5, 6, 7, 9, 10)


def test_a_group_that_fits_into_a_rack_stays_in_one():
    """Sixteen free GPUs of two racks are no place for sixteen."""
    placer = Placer(Cluster(64, nodes_per_rack=4))
    placer.take([*range(24), *range(32, 56)])

    assert placer.free == 16
    assert placer.find(16) is None


def test_a_group_wider_than_a_rack_spans_racks():
    """There is no other place for it."""
    placer = Placer(Cluster(64, nodes_per_rack=4))

    assert placer.find(40) == tuple(range(40))


def test_lost_nodes_have_no_room():
    """Nothing is placed on a node that is not there."""
    placer = Placer(Cluster(16, lost=frozenset({0})))

    assert placer.find(8) == tuple(range(8, 16))
    assert placer.free == 8


def test_a_group_that_grows_keeps_its_gpus():
    """More GPUs come from the node where it runs, though another is fuller."""
    placer = Placer(Cluster(16))
    placer.take([0, 1, 2, 3, 4])

    assert placer.find(3, keep=(9, 12)) == (8, 9, 12)


def test_nodes_that_are_set_aside_are_left_alone():
    """`without` hides nodes, and only inside."""
    placer = Placer(Cluster(16))

    with placer.without({0}):
        assert placer.find(2) == (8, 9)
    assert placer.find(2) == (0, 1)


@given(st.lists(st.integers(1, 40), max_size=30), st.sets(st.integers(0, 7), max_size=4))
def test_places_are_disjoint_and_stand_in_the_smallest_unit(counts, lost):
    """Whatever is asked for, no GPU is given twice, and small groups are whole."""
    cluster = Cluster(60, nodes_per_rack=4, lost=frozenset(lost))
    placer = Placer(cluster)
    taken: list[int] = []

    for count in counts:
        place = placer.find(count)
        if place is None:
            continue
        placer.take(place)
        taken += place
        assert len(place) == count
        assert cluster.tier(place) == tier_for(cluster, count)

    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(cluster.present())
    assert placer.free == cluster.capacity() - len(taken)


def test_a_group_whose_gpus_lie_apart_is_brought_together():
    """GPUs of two groups that merge are kept only where they stand as near as others could."""
    placer = Placer(Cluster(128))

    place = placer.find(8, keep=(0, 1, 2, 3, 40, 41, 42, 43))

    assert place == tuple(range(8))


@given(
    st.sets(st.integers(0, 59), min_size=1, max_size=40),
    st.sets(st.integers(0, 59), max_size=40),
    st.sets(st.integers(0, 7), max_size=3),
)
def test_whatever_a_group_would_keep_it_stands_as_near_as_it_was_promised(keep, taken, lost):
    """The tier of every place is the one by which its step was predicted."""
    cluster = Cluster(60, nodes_per_rack=4, lost=frozenset(lost))
    there = set(cluster.present())
    own = sorted((keep - taken) & there)
    placer = Placer(cluster)
    placer.take(sorted(taken & there))

    place = placer.find(len(own), keep=own) if own else None

    if place is not None:
        assert cluster.tier(place) == tier_for(cluster, len(own))
        assert not set(place) & taken

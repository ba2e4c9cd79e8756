"""Who does what in a step, from its members alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.parallel.replicas.quorum import NEW, Member, Quorum, share


def member(index: int, step: int = 5, **values: object) -> Member:
    own = Member(f"{index}:id", index, step, "lineage", f"nonce {index}", False, f"host{index}:1")
    return replace(own, **values)  # type: ignore[arg-type]


def quorum(*members: Member, own: int = 0) -> Quorum:
    return Quorum.from_members(members, members[own].id)


def test_members_with_the_newest_state_train_and_others_copy_it_from_them_in_turn() -> None:
    members = [member(3), member(0, NEW), member(2), member(1, 4), member(4, NEW)]
    seen = [quorum(*members, own=i) for i in range(5)]
    assert [x.rank for x in seen] == [3, 0, 2, 1, 4]
    for one in seen:
        assert one.step == 5
        assert one.indices == [2, 3]
        assert one.sources == {0: 2, 1: 3, 4: 2}
        assert one.store == "host2:1"
    assert [x.trains for x in seen] == [True, False, True, False, False]


def test_of_two_states_of_one_step_that_of_most_members_stays() -> None:
    members = [member(0, lineage="a"), member(1, lineage="b"), member(2, lineage="b")]
    assert quorum(*members).indices == [1, 2]
    assert quorum(*members).sources == {0: 1}
    assert quorum(*members[:2]).indices == [0], "of as many, that of the first"


def test_lineages_differ_after_steps_of_other_members() -> None:
    members = [member(0), member(1), member(2)]
    after = {quorum(*some).after_step() for some in (members, members[:2], [replace(x, step=6) for x in members])}
    assert len(after) == 3
    assert len({quorum(*members, own=i).after_step() for i in range(3)}) == 1


def test_the_writer_stays_the_same_as_long_as_it_has_the_state() -> None:
    assert quorum(member(0), member(1)).writer == 0
    assert quorum(member(0), member(1, writes=True)).writer == 1
    assert quorum(member(0), member(1, NEW, writes=True)).writer == 0


def test_connections_are_named_anew_whenever_somebody_lacks_them() -> None:
    members = [member(0), member(1), member(2)]
    key = quorum(*members).key
    connected = [replace(x, nonce=key) for x in members]
    assert quorum(*connected, own=2).key == key, "all have them"
    lost = [connected[0], replace(connected[1], nonce="new"), connected[2]]
    left = connected[:2]
    joined = [*connected, member(3)]
    started_again = [*connected[:2], replace(connected[2], id="2:other")]
    keys = [quorum(*some).key for some in (lost, left, joined, started_again)]
    assert len({key, *keys}) == 5
    assert len({quorum(*lost, own=i).key for i in range(3)}) == 1, "all members name them alike"


def test_a_quorum_without_oneself_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not contain 9:id"):
        Quorum.from_members([member(0)], "9:id")


@pytest.mark.parametrize("count", [1, 2, 7, 8, 24])
def test_shares_are_whole_disjoint_and_as_even_as_can_be(count: int) -> None:
    for members in range(1, count + 1):
        shares = [share(count, members, rank) for rank in range(members)]
        assert sorted(x for one in shares for x in one) == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

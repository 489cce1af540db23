"""Hash trees: valid proofs lead to the root, and no others do."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_protocol.hash_tree import HashTree, leaf_digest, root_above


def tree_of(num_leaves: int) -> tuple[HashTree, list[bytes]]:
    leaves = [leaf_digest(number.to_bytes(4, "big")) for number in range(num_leaves)]
    return HashTree.of(leaves), leaves


def test_root_of_three_leaves_follows_the_protocol_page() -> None:
    tree, (a, b, c) = tree_of(3)
    left, right = hashlib.sha256(b"\x01" + a + b).digest(), hashlib.sha256(b"\x01" + c + bytes(32)).digest()
    assert tree.root == hashlib.sha256(b"\x01" + left + right).digest()
    assert a == hashlib.sha256(b"\x00" + bytes(4)).digest()
    assert leaf_digest(b"ab", b"c") == leaf_digest(b"abc")


@given(st.data(), st.integers(1, 70))
def test_proof_of_any_range_leads_to_the_root_and_holds_the_proof_of_each_leaf_in_it(
    data: st.DataObject, num_leaves: int
) -> None:
    tree, leaves = tree_of(num_leaves)
    start = data.draw(st.integers(0, num_leaves - 1))
    stop = data.draw(st.integers(start + 1, num_leaves))
    part = HashTree.proven(num_leaves, start, leaves[start:stop], tree.proof(start, stop))
    assert part.root == tree.root
    assert part.leaves(start, stop) == leaves[start:stop]
    each = data.draw(st.integers(start, stop - 1))
    assert part.proof(each, each + 1) == tree.proof(each, each + 1)


@given(st.data(), st.integers(2, 40))
def test_another_leaf_place_or_proof_gives_another_root_or_is_refused(data: st.DataObject, num_leaves: int) -> None:
    tree, leaves = tree_of(num_leaves)
    index = data.draw(st.integers(0, num_leaves - 1))
    other = data.draw(st.integers(0, num_leaves - 1).filter(lambda each: each != index))
    proof = tree.proof(index, index + 1)
    assert root_above(num_leaves, index, leaves[index], proof) == tree.root
    assert root_above(num_leaves, index, leaves[other], proof) != tree.root
    assert HashTree.proven(num_leaves, index, [leaves[other]], proof).root != tree.root
    for start, digests in ((other, proof), (index, proof[:-1]), (index, [*proof, bytes(32)])):
        try:
            found = HashTree.proven(num_leaves, start, [leaves[index]], digests).root
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                root_above(num_leaves, start, leaves[index], digests)
            continue
        assert found == root_above(num_leaves, start, leaves[index], digests) != tree.root


@pytest.mark.parametrize(("start", "num_leaves"), [(-1, 1), (3, 1), (2, 2), (0, 0)])
def test_range_outside_the_tree_is_refused(start: int, num_leaves: int) -> None:
    with pytest.raises(ValueError, match="leaves from"):
        HashTree.proven(3, start, [bytes(32)] * num_leaves, [])


@pytest.mark.parametrize("index", [-1, 3])
def test_leaf_outside_the_tree_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"from {index} on in a tree of 3"):
        root_above(3, index, bytes(32), [bytes(32)] * 2)


@pytest.mark.parametrize("leaves", [[], [bytes(31)], [bytes(32), bytes(31)]])
def test_tree_of_no_leaves_or_of_what_is_no_digest_is_refused(leaves: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"leaves from|not a digest"):
        HashTree.of(leaves)

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from swarm.serving.session.replay_buffer import ReplayBuffer


@given(st.lists(st.integers(0, 70), min_size=1, max_size=20), st.data())
def test_replay_buffer_returns_any_appended_rows_as_one(lengths: list[int], data: st.DataObject) -> None:
    buffer, whole = ReplayBuffer(3), b""
    for length in lengths:
        rows = data.draw(st.binary(min_size=3 * length, max_size=3 * length))
        buffer.append(rows)
        whole += rows
    assert 3 * buffer.length == len(whole)
    if whole:
        start = data.draw(st.integers(0, buffer.length - 1))
        end = data.draw(st.integers(start + 1, buffer.length))
        assert buffer.rows(start, end) == whole[3 * start : 3 * end]

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from swarm_protocol.proto import control_pb2, failure_pb2, records_pb2, serving_pb2, session_pb2, training_pb2
from swarm_protocol.wire import count_values

NAMES = st.lists(st.text(min_size=1, max_size=5), max_size=5)


@given(missing=NAMES, message=st.text(min_size=1), retry=st.floats(0.5, 9.0))
def test_count_values_of_flat_messages_is_the_number_of_their_fields(
    missing: list[str], message: str, retry: float
) -> None:
    data = failure_pb2.Failure(message=message, retry_after_s=retry, missing=missing).SerializeToString()
    assert count_values(data, 0, failure_pb2.Failure.DESCRIPTOR, most=100) == 2 + len(missing)


@given(part_values=st.lists(st.integers(0, 127), max_size=20), num_members=st.integers(0, 20))
def test_count_values_counts_inside_messages_and_packed_numbers(part_values: list[int], num_members: int) -> None:
    members = [training_pb2.Contribution(peer_id="a", num_tokens=300)] * num_members
    data = training_pb2.Group(members=members, part_values=part_values).SerializeToString()
    packed = len(part_values) + 1 if part_values else 0
    assert count_values(data, 0, training_pb2.Group.DESCRIPTOR, most=1000) == packed + 3 * num_members


def test_count_values_of_maps_counts_entries_keys_and_values() -> None:
    data = records_pb2.ServeRecord(rtt_ms={"a": 1.0, "b": 2.0}).SerializeToString()
    assert count_values(data, 0, records_pb2.ServeRecord.DESCRIPTOR, most=100) == 6


def test_count_values_of_bulk_is_one_and_of_a_message_around_it_two() -> None:
    file = serving_pb2.ModelFile(payload=bytes(10**6))
    data = serving_pb2.FilesResponse(files=[file]).SerializeToString()
    assert count_values(data, 0, serving_pb2.FilesResponse.DESCRIPTOR, most=100) == 2


def test_count_values_counts_each_unknown_field_once() -> None:
    data = serving_pb2.ModelFile(payload=bytes(100), name="x").SerializeToString()
    assert count_values(data, 0, control_pb2.StatusRequest.DESCRIPTOR, most=100) == 2


def test_count_values_stops_soon_after_the_given_maximum() -> None:
    data = failure_pb2.Failure(missing=[""] * 1000).SerializeToString()
    assert count_values(data, 0, failure_pb2.Failure.DESCRIPTOR, most=10) == 11


@given(data=st.binary(max_size=64))
def test_count_values_of_any_bytes_is_at_least_what_a_parser_makes_of_them(data: bytes) -> None:
    try:
        num_values = count_values(data, 0, session_pb2.Frame.SampledToken.DESCRIPTOR, most=1000)
    except ValueError:
        return
    try:
        parsed = session_pb2.Frame.SampledToken.FromString(data)
    except DecodeError:
        return
    numbers = (parsed.top_ids, parsed.top_logprobs)
    assert num_values >= len(parsed.ListFields()) + sum(len(packed) - bool(packed) for packed in numbers)


@pytest.mark.parametrize(
    "data",
    [b"\x80", b"\x08", b"\x0a", b"\x0a\x05abcd", b"\x09abc", b"\x0dabc", b"\x0b", b"\x0c", b"\x0e", b"\x80" * 11],
    ids=["tag", "number", "length", "text", "double", "float", "group", "group end", "wire type 6", "endless"],
)
def test_count_values_of_bytes_that_are_no_message_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"number does not end|longer than its message|no known wire type"):
        count_values(data, 0, failure_pb2.Failure.DESCRIPTOR, most=100)


def test_count_values_of_a_message_that_reaches_beyond_the_one_around_it_is_a_value_error() -> None:
    inner = b"\x12\x7f"  # ModelFile.payload of 127 bytes, which are missing
    data = b"\x12" + bytes([len(inner)]) + inner + b"\x08\x01" * 100
    with pytest.raises(ValueError, match="longer than its message"):
        count_values(data, 0, serving_pb2.FilesResponse.DESCRIPTOR, most=1000)

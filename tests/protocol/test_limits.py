from __future__ import annotations

from swarm_protocol import limits
from swarm_protocol.records import lookup_keys

# of the DHT below, for all records of one key
DHT_REPLY_BYTES = 4 * 2**20


def test_limits_of_lifetimes_leave_room_for_a_lost_refresh_and_a_skewed_clock() -> None:
    refresh_s = limits.RECORD_LIFETIME_S / 2
    assert refresh_s - limits.MAX_CLOCK_SKEW_S > 0
    assert limits.RECORD_LIFETIME_S <= limits.MAX_RECORD_LIFETIME_S < limits.MAX_SIGNED_LIFETIME_S


def test_limits_of_records_let_a_thousand_nodes_share_their_keys() -> None:
    largest = limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES
    records_a_key = DHT_REPLY_BYTES // largest
    assert records_a_key * limits.NUM_KEY_SHARDS > 1000


def test_limits_of_names_let_every_key_be_a_subject() -> None:
    longest = max(lookup_keys("serve", "n" * limits.MAX_NAME_BYTES), key=len)
    assert len(longest) <= limits.MAX_SUBJECT_BYTES
    steps = f"{'n' * limits.MAX_NAME_BYTES}/{limits.MAX_OUTER_STEP}/{2**32}"
    assert len(steps) <= limits.MAX_SUBJECT_BYTES


def test_limits_of_signed_payloads_fit_a_message() -> None:
    assert limits.MAX_SIGNED_PAYLOAD_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES < limits.MAX_MESSAGE_BYTES
    assert limits.MAX_RECORD_BYTES <= limits.MAX_SIGNED_PAYLOAD_BYTES

from __future__ import annotations

from swarm_protocol import limits
from swarm_protocol.records import child_keys, lookup_key


def test_limits_of_lifetimes_leave_room_for_a_lost_refresh_and_a_skewed_clock() -> None:
    refresh_s = limits.RECORD_LIFETIME_S / 2
    assert refresh_s - limits.MAX_CLOCK_SKEW_S > 0
    assert limits.RECORD_LIFETIME_S <= limits.MAX_RECORD_LIFETIME_S < limits.MAX_SIGNED_LIFETIME_S


def test_limits_of_records_let_a_thousand_nodes_share_their_keys() -> None:
    assert limits.MAX_RECORDS_PER_KEY * (1 + limits.NUM_CHILD_KEYS) > 1000


def test_limits_of_names_let_every_key_be_a_subject() -> None:
    longest = lookup_key("serve", "n" * limits.MAX_NAME_BYTES)
    for _ in range(limits.MAX_KEY_DEPTH):
        longest = child_keys(longest)[0]
    assert child_keys(longest) == ()
    assert len(longest) <= limits.MAX_SUBJECT_BYTES
    steps = f"{'n' * limits.MAX_NAME_BYTES}/{limits.MAX_OUTER_STEP}/{2**32}"
    assert len(steps) <= limits.MAX_SUBJECT_BYTES


def test_limits_of_signed_payloads_fit_a_message() -> None:
    assert limits.MAX_SIGNED_PAYLOAD_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES < limits.MAX_MESSAGE_BYTES
    assert limits.MAX_RECORD_BYTES <= limits.MAX_SIGNED_PAYLOAD_BYTES

"""The specification of the protocol names what the code has: messages, limits, signatures, protocol ids, words."""

from __future__ import annotations

import re
import sys
from typing import Any, get_args

import pytest
from support.site_pages import ROOT, hooks, written
from swarm.network import framing
from swarm.network.discovery import mdns_messages
from swarm.network.libp2p import greeting
from swarm.network.paths import address_survey, dialler, introductions, opener, peer_addresses
from swarm.network.peer_budgets import NUM_GUARANTEED
from swarm.network.relay import circuit_messages
from swarm.network.relay.relay import RelayLimits
from swarm.training.run.methods import Methods
from swarm_protocol import limits, records, reduction_messages, rows, sampler, session_frames, training_messages
from swarm_protocol.checks import check_text
from swarm_protocol.errors import SwarmError
from swarm_protocol.failure_messages import encode_failure
from swarm_protocol.proto import failure_pb2
from swarm_protocol.version import PROTOCOL_VERSION

PAGES = written("reference/protocol")
TEXT = "\n".join(PAGES.values())
PROTO = ROOT / "protocol" / "swarm_protocol" / "proto"
LIMITS_PAGE = hooks().limits_page()
LOCAL = {"control", "p2pd"}  # these stay on one machine
LIMITS = sorted(name for name in vars(limits) if name.isupper())
SOURCES = {
    path: path.read_text("utf-8")
    for folder in ("protocol", "swarm/swarm", "node")
    for path in (ROOT / folder).rglob("*.py")
}


def found(pattern: str) -> set[str]:
    """Return the first group of `pattern` wherever it matches the code."""
    return {match for text in SOURCES.values() for match in re.findall(pattern, text, flags=re.MULTILINE)}


def messages() -> list[str]:
    names = [
        name
        for path in PROTO.glob("*.proto")
        if path.stem not in LOCAL
        for name in re.findall(r"^\s*message (\w+)", path.read_text("utf-8"), flags=re.MULTILINE)
    ]
    assert {"Hello", "Frame", "SequenceRef", "Group", "Compute", "FindRequest"} <= set(names)
    return sorted(names)


def test_protocol_pages_explain_each_message() -> None:
    missing = [name for name in messages() if not re.search(rf"\b{name}s?\b", TEXT)]
    assert missing == [], "no page of docs/reference/protocol describes these"


def test_protocol_pages_hold_every_proto_file() -> None:
    shown = set(
        re.findall(r'--8<-- "protocol/swarm_protocol/proto/(\w+)\.proto"', PAGES["reference/protocol/messages.md"])
    )
    assert shown == {path.stem for path in PROTO.glob("*.proto")}


def test_protocol_pages_use_each_limit_and_list_it_with_its_value() -> None:
    missing = [name for name in LIMITS if not re.search(rf"\b{name}\b", TEXT)]
    assert missing == [], "no page of docs/reference/protocol says what these limit"
    values = {name: f"{getattr(limits, name):,.0f}" for name in LIMITS}
    unlisted = {n: v for n, v in values.items() if not re.search(rf"\| `{n}` \| {v} \| \S", LIMITS_PAGE)}
    assert unlisted == {}, "docs/reference/protocol lacks the value or the reason of these"


def test_protocol_pages_name_no_limit_that_does_not_exist() -> None:
    statuses = {status.name for status in circuit_messages.CircuitStatus}
    words = set(re.findall(r"\b((?:MAX|MIN|NUM)_[A-Z_]+|[A-Z_]+_(?:BYTES|S|TOKENS|VERSION))\b", TEXT)) - statuses
    assert words - {"PROTOCOL_VERSION"} <= set(LIMITS)


def test_identity_page_names_every_signature_domain_and_purpose() -> None:
    identity = PAGES["reference/protocol/identity.md"]
    domains = found(r"^(?:_|[A-Z]+_)(?:DOMAIN|PURPOSE) = b\"(.*)\"$")
    purposes = found(r"^[A-Z]+_PURPOSE = \"(.*)\"$")
    assert domains == {
        "swarm-envelope:",
        "swarm-manifest:",
        "swarm-run:",
        "swarm-slices:",
        "swarm-report:",
        "swarm-vote:",
    }
    private = {"network-invitation", "network-member", "network-revocations"}
    of_runs = {"run-invitation", "run-invitee", "run-vouch", "run-revocation"}
    assert purposes == {
        "record",
        "group",
        "part",
        "interval",
        "resume",
        "endorsement",
        "possession",
        "answer",
        *private,
        *of_runs,
    }
    assert [word for word in domains | purposes if f"`{word}`" not in identity] == []
    signers = {path.name for path, text in SOURCES.items() if re.search(r"identity\.sign\(", text)}
    assert signers == {"envelope.py", "signed_run.py", "certificate.py", "manifest_messages.py"}, (
        "anything else that is signed needs its own domain, described there"
    )


def test_transport_page_names_every_method_and_protocol_id() -> None:
    transport = PAGES["reference/protocol/transport.md"]
    methods = found(r"^(?:[A-Z]+_)?METHOD = \"(.*)\"$")
    assert {"ping", "serving.lane"} <= methods
    methods |= set(vars(Methods("RUN")).values())
    assert "train.vote/RUN" in methods
    assert [name for name in methods if not re.search(rf"`{re.escape(name)}(/MODEL)?`", transport)] == []
    ids = {greeting.HELLO, circuit_messages.HOP, circuit_messages.STOP, greeting.method_prefix("NETWORK_ID")}
    assert [name for name in ids if name not in transport] == []
    assert f"/swarm/{PROTOCOL_VERSION}/" in transport
    kinds = set(re.findall(r"/swarm/\d+/NETWORK_ID/(\w+)/", transport))
    assert kinds == found(r"self\._name\(\"(\w+)\"") | {"dht", "paths"}


def test_paths_page_names_every_method_and_bound() -> None:
    page = PAGES["reference/protocol/paths.md"]
    for method in (peer_addresses.OBSERVE, peer_addresses.DIAL_BACK, introductions.INTRODUCE, introductions.INTRODUCED):
        assert f"| `{method}` |" in page
    for said in (
        f"at most {peer_addresses.DIAL_S:.0f} seconds",
        f"refuses when {peer_addresses.MAX_WAITING} already wait or when an asker has waited for "
        f"{peer_addresses.TURN_S:.0f} seconds",
        f"at most {peer_addresses.MAX_PER_PEER} times in {peer_addresses.PERIOD_S:.0f} seconds",
        f"at most {peer_addresses.MAX_PER_NETWORK} times, and all askers together at most "
        f"{peer_addresses.MAX_PER_PERIOD} times",
        f"for {introductions.RETRY_S:.0f} seconds",
        f"at most {introductions.MAX_BURST} introductions in {introductions.BURST_S:.0f} seconds",
        f"send to at most {introductions.MAX_ADDRS} addresses",
        f"for up to {opener.OPEN_S:.0f} seconds",
        f"every {address_survey.CONFIRM_S / 60:.0f} minutes",
        f"at most {dialler.MAX_TOLD} addresses in {dialler.TOLD_S:.0f} seconds",
    ):
        assert said in " ".join(page.split()), said


def test_transport_page_has_the_bounds_of_multicast_packets() -> None:
    said = " ".join(PAGES["reference/protocol/transport.md"].split())
    assert f"more than {mdns_messages.MAX_QUESTIONS} questions or {mdns_messages.MAX_RECORDS} records" in said
    assert f"more than {mdns_messages.MAX_LABELS} labels or {mdns_messages.MAX_POINTERS} pointers" in said


def test_transport_page_has_the_frames_and_error_codes() -> None:
    transport = PAGES["reference/protocol/transport.md"]
    assert [kind for kind in framing.Kind if f"| {kind.value} | {kind.name} |" not in transport] == []
    internal = failure_pb2.Failure.FromString(encode_failure(KeyError())[1:]).code
    codes = {each.code for each in (SwarmError, *subclasses(SwarmError))} | {internal}
    assert set(re.findall(r"^\| `(\w+)` \| [a-z]", transport, flags=re.MULTILINE)) - {"ping"} == codes


def subclasses(kind: type[SwarmError]) -> set[type[SwarmError]]:
    direct = {each for each in kind.__subclasses__() if each.__module__ == "swarm_protocol.errors"}
    return direct.union(*map(subclasses, direct))


def test_relay_page_has_the_limits_and_statuses() -> None:
    relay, bounds = PAGES["reference/protocol/relay.md"], RelayLimits()
    for said in (
        f"| reservations | {bounds.reservations} |",
        f"| circuits | {bounds.circuits} |",
        f"| circuits of one peer, either end | {bounds.circuits_per_peer} |",
        f"| circuits from one peer to another | {bounds.circuits_per_pair} |",
        f"| requests of one peer at a time | {bounds.circuits_per_peer + 1} |",
        f"| requests of all peers at a time | {bounds.requests}; beyond it, {NUM_GUARANTEED} of each peer |",
        f"| a circuit without a byte for | {bounds.idle_s:.0f} s |",
    ):
        assert said in relay
    assert [each.name for each in circuit_messages.CircuitStatus if f"`{each.name}` ({each.value})" not in relay] == []


WORDS: dict[str, tuple[Any, ...]] = {
    "sessions": (*get_args(session_frames.WantedOutput), *rows.CODECS, rows.TOKENS, *sampler.GRAMMAR_KINDS),
    "rounds": (*get_args(reduction_messages.OpeningKind), *get_args(training_messages.ReplyKind)),
    "records": tuple(
        word
        for kind in (records.Reachability, records.NodeState, records.ServeState, records.TrainerState, records.Role)
        for word in get_args(kind)
        if word
    ),
}


@pytest.mark.parametrize("page", WORDS)
def test_protocol_page_names_each_word_that_a_field_may_hold(page: str) -> None:
    text = PAGES[f"reference/protocol/{page}.md"]
    assert [word for word in WORDS[page] if f"`{word}`" not in text] == []


def test_sessions_page_says_who_sends_each_frame() -> None:
    frames = {kind.__name__ for kind in get_args(session_frames.Frame)}
    table = re.findall(r"^\| (\w+) \| (?:client|server), ", PAGES["reference/protocol/sessions.md"], flags=re.MULTILINE)
    assert set(table) == frames


def test_index_page_lists_the_characters_that_text_may_not_contain() -> None:
    (listed,) = re.findall(r"Refused are U\+([^.]+)\.", PAGES["reference/protocol/index.md"])
    pairs = [each.split("–") for each in re.split(r",\s|\sand\s", listed)]
    refused = {number for pair in pairs for number in range(int(pair[0], 16), int(pair[-1], 16) + 1)}
    for number in range(sys.maxunicode + 1):
        try:
            check_text(chr(number), "text", max_chars=1)
            assert number not in refused
        except ValueError:
            assert number in refused

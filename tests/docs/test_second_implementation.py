"""Bytes and choices made only from the words of the specification equal those of the code.

The code here follows docs/reference/protocol and uses none of the code that it is compared with, except for keys and
protobuf. If a test fails, the pages or the code have changed something that others rely on.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import statistics
import struct

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st
from interop.second_observer import identifying, later_settings
from support.replica_states import state_of
from swarm.network import framing
from swarm.network.discovery import mdns_messages
from swarm.network.libp2p import stream_resume
from swarm.serving.sampling.drawing import pick
from swarm.serving.wire.page_keys import page_keys
from swarm.training.allreduce.parts import part_sizes
from swarm.training.round.quorum import quorum
from swarm.training.round.round_state import attempt_beacon, coordinator_of
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import LATER_SETTINGS, sign_mapping, to_mapping
from swarm.training.state.lease import Cursor, LeaseStripe
from swarm_compression import get_codec, get_row_codec
from swarm_protocol import rows
from swarm_protocol.envelope import unseal
from swarm_protocol.frames import Frames
from swarm_protocol.identity import Identity, peer_id_of
from swarm_protocol.manifest_messages import manifest_dtype
from swarm_protocol.network_invitation import NetworkSecret
from swarm_protocol.proto import session_pb2
from swarm_protocol.records import TrainerRecord, publish_key
from swarm_protocol.session_frames import StepRequest, TokenDraw
from swarm_protocol.toml_text import parse_toml
from swarm_protocol.training_messages import Contribution

SEED = bytes(range(32))
KEY = Ed25519PrivateKey.from_private_bytes(SEED)
PUBLIC = KEY.public_key().public_bytes_raw()
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(5)]


def test_identity_page_describes_a_peer_id() -> None:
    digits = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    number, text = int.from_bytes(bytes.fromhex("002408011220") + PUBLIC, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = digits[digit] + text
    peer_id = "1" + text  # base58 has a 1 for each leading zero byte
    assert peer_id == peer_id_of(PUBLIC)
    assert len(peer_id) == 52
    assert peer_id.startswith("12D3KooW")


def prefixed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def test_identity_page_describes_an_envelope_that_others_accept() -> None:
    times = struct.pack(">dd", 1000.0, 1060.0)
    texts = b"".join(prefixed(text) for text in (b"record", b"swarm", b"nodes/3"))
    signed = b"\x01" + texts + PUBLIC + times + prefixed(b"payload")
    envelope = unseal(signed + KEY.sign(b"swarm-envelope:" + signed), purpose="record", network_id="swarm", now=1030.0)
    assert (envelope.subject, envelope.payload, envelope.peer_id) == ("nodes/3", b"payload", peer_id_of(PUBLIC))


def test_identity_page_describes_what_a_run_files_signature_covers_and_its_id() -> None:
    config = RunConfig(name="own", outer_steps=2)
    run = sign_mapping(config, to_mapping(config), Identity(SEED), 1_767_225_600)
    mapping = parse_toml(run.text, "here")
    table = mapping.pop("signature")
    content = {"run": mapping, "peer_id": table["peer_id"], "issued_at": table["issued_at"]}
    signed = b"swarm-run:" + json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    KEY.public_key().verify(run.signature, signed)
    settings = content | {"run": identifying(to_mapping(run.config), later_settings())}
    text = json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()
    assert run.run_id == "own-" + hashlib.sha256(b"swarm-run:" + text).hexdigest()[:12]


def test_identity_page_lists_the_settings_that_were_added_later() -> None:
    listed = dict[str, object]()
    for key, value in later_settings().items():
        listed |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    assert listed == dict(LATER_SETTINGS)


def test_transport_page_describes_the_frames_of_a_stream() -> None:
    assert framing.frame(framing.Kind.DATA, b"abc") == struct.pack(">BI", 1, 3) + b"abc"
    assert framing.credit(4 * 2**20) == struct.pack(">BI", 2, 4 * 2**20)
    assert framing.acknowledgement(7) == struct.pack(">BI", 6, 7)
    assert framing.body_bytes(framing.Kind.ACK, 7) == 0
    kinds = [(int(kind), len(piece)) for kind, piece in framing.pieces(bytes(2**20 + 5))]
    assert kinds == [(0, 2**20), (1, 5)]
    assert framing.cost(0) == 256
    assert framing.WINDOW_BYTES == 4 * 2**20


def test_transport_page_describes_how_a_stream_is_resumed() -> None:
    assert stream_resume.REQUEST.pack(bytes(range(16)), 7) == bytes(range(16)) + struct.pack(">Q", 7)
    assert stream_resume.ANSWER.pack(1, 0) == b"\x01" + bytes(8)


@pytest.mark.parametrize("peer_id", PEERS)
def test_records_page_describes_a_records_key(peer_id: str) -> None:
    digits = oct(int.from_bytes(hashlib.sha256(peer_id.encode()).digest(), "big"))
    record = TrainerRecord(run="own-1", outer_step=0, state="joining")
    assert publish_key(record, peer_id) == "train/own-1#"
    assert publish_key(record, peer_id, 2) == f"train/own-1#{digits[-1]}{digits[-2]}"


def test_private_page_describes_hidden_names_and_sealed_answers_in_a_local_network() -> None:
    def key(use: str) -> bytes:
        return hmac.digest(bytes(32), b"swarm private network: " + use.encode(), "sha256")

    def hidden(text: str) -> str:
        return base64.b32encode(hmac.digest(key("names"), text.encode(), "sha256")).decode()[:32].lower()

    secret = NetworkSecret(bytes(32))
    assert secret.protocol_name("/swarm/hello") == f"/{hidden('/swarm/hello')}"
    digest = base64.b32encode(hashlib.sha256(hidden("multicast DNS").encode()).digest()).decode().lower()
    service = f"_swarm-{digest[:8]}._udp.local."
    assert mdns_messages.service_of("private-any", secret) == service
    packet = mdns_messages.read_packet(mdns_messages.answer(service, PEERS[0], ["/ip4/10.0.0.1/tcp/1"], secret))
    instance, txt = packet.records
    assert instance.data[1:33].decode() == hidden(PEERS[0])
    sealed = base64.b64decode(txt.data[1:].removeprefix(b"sealed="))
    opened = ChaCha20Poly1305(key("seal")).decrypt(sealed[:12], sealed[12:], service.encode())
    assert opened.decode() == f"dnsaddr=/ip4/10.0.0.1/tcp/1/p2p/{PEERS[0]}"


def test_manifests_page_describes_a_revision() -> None:
    digest = bytes(range(32))
    revision = hashlib.blake2b(b"manifest" + b"\0" + digest + b"bfloat16", digest_size=16).hexdigest()
    assert len(revision) == 32
    assert manifest_dtype(digest, revision) == "bfloat16"


def test_sessions_page_describes_a_message_with_rows() -> None:
    header = session_pb2.Frames()
    step = header.frames.add().step
    step.sequence_id, step.position, step.want = bytes(16), 7, "last"
    step.rows.codec, step.rows.num_rows = "tokens", 2
    head = header.SerializeToString()
    data = b"\x01" + struct.pack("<I", len(head)) + head + struct.pack("<2i", 5, 6)
    tokens = rows.Rows(codec="tokens", num_rows=2, num_columns=0, payload=memoryview(struct.pack("<2i", 5, 6)))
    [frame] = Frames.from_bytes(data).frames
    assert frame == StepRequest(sequence_id=bytes(16), position=7, want="last", rows=tokens)


def test_sessions_page_describes_int8_rows() -> None:
    x_RC = torch.randn(3, 130, generator=torch.Generator().manual_seed(0))
    data = get_row_codec("int8").encode(x_RC)
    row = 130 + 2 * math.ceil(130 / 64)
    assert len(data) == 3 * row
    scales = (np.frombuffer(data[row : row + 6], "<u2").astype("<u4") << 16).view("<f4")  # bfloat16
    codes = np.frombuffer(data[row + 6 : 2 * row], "i1")
    expected = get_row_codec("int8").decode(data, 3, 130)[1].numpy()
    np.testing.assert_array_equal(np.repeat(scales, 64)[:130] * codes, expected)


def test_sessions_page_describes_the_keys_of_pages() -> None:
    tokens = list(range(40))
    key = hashlib.blake2b(b"revision", digest_size=16, person=b"swarm-prefix").digest()
    expected = []
    for page in range(2):
        content = struct.pack("<16I", *tokens[16 * page : 16 * page + 16])
        key = hashlib.blake2b(key + content, digest_size=16).digest()
        expected.append(key)
    assert page_keys("revision", tokens) == expected


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=20),
    st.floats(0.1, 2),
    st.integers(0, 5),
    st.floats(0.05, 1),
    st.floats(0, 0.5),
    st.integers(-(2**40), 2**40),
    st.integers(0, 1000),
)
def test_sessions_page_describes_which_token_is_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, index: int
) -> None:
    scaled = [(logit - max(logits)) / temperature for logit in logits]
    kept = sorted(range(len(logits)), key=lambda token_id: -scaled[token_id])
    if min_p:
        kept = [token_id for token_id in kept if scaled[token_id] >= math.log(min_p)]
    kept = kept[: top_k or None]
    weights = torch.softmax(torch.tensor([scaled[token_id] for token_id in kept], dtype=torch.float64), dim=0).tolist()
    sums = np.cumsum(weights)
    count = next((number + 1 for number, total in enumerate(sums) if total >= top_p), len(kept))
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    goal = (int.from_bytes(digest, "little") >> 11) * 2.0**-53 * sums[count - 1]
    drawn = next((kept[number] for number in range(count) if sums[number] > goal), kept[count - 1])
    draw = TokenDraw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, index=index)
    assert pick(torch.tensor(logits), draw) == drawn


def test_rounds_page_describes_the_coordinator_and_the_quorum() -> None:
    beacon = hashlib.sha256(f"own/{'ab' * 32}/4/2".encode()).digest()
    expected = min(PEERS, key=lambda peer: hashlib.sha256(beacon + peer.encode()).digest())
    assert coordinator_of(attempt_beacon("own", b"\xab" * 32, 4, 2), PEERS) == expected
    assert [quorum(number) for number in range(1, 9)] == [math.ceil(2 * number / 3) for number in range(1, 9)]


@given(st.lists(st.sampled_from((0, 100, 120, 149, 151, 400, 1000)), min_size=5, max_size=5), st.integers(1, 10**7))
def test_rounds_page_describes_the_parts(rates: list[int], num_values: int) -> None:
    usual = statistics.median([rate for rate in rates if rate] or [1])
    ratios = [(rate or usual) / usual for rate in rates]
    shares = [1.0 if 1 / 1.5 < ratio < 1.5 else min(max(ratio, 1 / 4), 4.0) for ratio in ratios]
    leaf = min(max(num_values // 4096 // 256 * 256, 256), 98_304)
    edges, passed = [0], 0.0
    for share in shares:
        passed += share
        edges.append(min(round(num_values * passed / sum(shares) / leaf) * leaf, num_values))
    edges[-1] = num_values
    members = tuple(
        Contribution(peer_id=peer, bytes_per_s=rate) for peer, rate in zip(sorted(PEERS), rates, strict=True)
    )
    assert part_sizes(num_values, members) == tuple(np.diff(edges).tolist())


def test_rounds_page_describes_a_states_name() -> None:
    theta_N = torch.arange(300_000, dtype=torch.float32)
    stripes = (LeaseStripe(cursor=Cursor(next_sample=9, holes=(range(2, 4),)), roster=(PEERS[0],)),)
    roster = tuple(sorted(PEERS))
    state = state_of(theta_N, -theta_N, outer_step=3, stripes=stripes, roster=roster)
    content = theta_N.numpy().tobytes() + (-theta_N).numpy().tobytes()
    chunks = [content[at : at + 2**20] for at in range(0, len(content), 2**20)]
    head = {
        "outer_step": 3,
        "lanes": [{"next_sample": 9, "holes": [[2, 4]], "roster": [PEERS[0]]}],
        "roster": roster,
        "num_values": 300_000,
    }
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    manifest = struct.pack("<I", len(text)) + text + b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    assert state.digest == hashlib.sha256(manifest).digest()


def test_rounds_page_describes_int8_vectors() -> None:
    x_N = torch.randn(600, generator=torch.Generator().manual_seed(0))
    data = get_codec("int8").encode(x_N)
    scales, codes = np.frombuffer(data[:12], "<f4"), np.frombuffer(data[12:], "i1")
    assert len(codes) == 600
    np.testing.assert_array_equal(np.repeat(scales, 256)[:600] * codes, get_codec("int8").decode(data, 600).numpy())
    absmax = np.array([block.abs().max().item() for block in x_N.split(256)], dtype="<f4")
    bits = (absmax / np.float32(127)).view("<u4") & np.uint32(0xFFFFFF00)  # 16 significant bits
    np.testing.assert_array_equal(bits.view("<f4"), scales)

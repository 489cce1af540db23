"""An observer of a training run, written from docs/reference/protocol/rounds.md and identity.md."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import struct
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from interop.libp2p_channel import peer_id_of, public_key_of
from interop.second_node import Node, Refused, read_envelope, unpack
from swarm_protocol.proto import training_pb2

IDENTITY_PAGE = Path(__file__).parents[2] / "docs/reference/protocol/identity.md"
LIFETIME_S = 360 * 86400.0


def digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def verify(peer_id: str, signature: bytes, *parts: bytes) -> None:
    Ed25519PublicKey.from_public_bytes(public_key_of(peer_id)).verify(signature, b"".join(parts))


def number(value: int) -> bytes:
    return struct.pack(">Q", value)


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def later_settings() -> dict:
    """Read from the page on signatures which settings a run's id leaves out, where they have these values."""
    return tomllib.loads(IDENTITY_PAGE.read_text().partition("```toml\n")[2].partition("```")[0])


def identifying(settings: dict, later: dict) -> dict:
    """Return the settings from which a run's id is computed."""
    kept = {}
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(later.get(key), dict):
            if table := identifying(value, later[key]):
                kept[key] = table
        elif key not in later or value != later[key]:
            kept[key] = value
    return kept


def check_run_file(text: bytes) -> tuple[dict, str]:
    """Check the author's signature, and return the settings with the run's id. The file must have all settings."""
    settings = tomllib.loads(text.decode())
    signed = settings.pop("signature")
    stated = {"peer_id": signed["peer_id"], "issued_at": signed["issued_at"]}
    message = b"swarm-run:" + canonical(stated | {"run": settings})
    verify(signed["peer_id"], base64.b64decode(signed["signature"]), message)
    named = digest(b"swarm-run:" + canonical(stated | {"run": identifying(settings, later_settings())}))
    return settings, f"{settings['name']}-{named.hex()[:12]}"


@dataclass(frozen=True)
class Step:
    """One committed step, checked."""

    step: int
    num_tokens: int  # 0: the round only admitted members
    before: bytes
    after: bytes
    origin: bytes
    part_values: tuple[int, ...]
    part_digests: tuple[bytes, ...]
    members: tuple[str, ...]


class Observer:
    def __init__(self, node: Node, run: str):
        self.node, self.run = node, run
        self._head = node.network.encode() + b"\0" + run.encode() + b"\0"

    async def run_file(self, peer_id: str) -> bytes:
        return await self.node.call(peer_id, f"train.run_file/{self.run}", b"")

    async def history(self, peer_id: str, first: int) -> list[bytes]:
        stream = await self.node.stream(peer_id, f"stream/train.history/{self.run}")
        request = training_pb2.StandingRequest(run=self.run, step=first, watches=True)
        await stream.send(b"\1" + request.SerializeToString())
        certificates = []
        try:
            while True:
                certificates.append(await stream.receive())
        except EOFError:
            return certificates

    async def standing(self, peer_id: str) -> training_pb2.Standing:
        request = training_pb2.StandingRequest(run=self.run, step=1, watches=True)
        answer = await self.node.call(peer_id, f"train.standing/{self.run}", b"\1" + request.SerializeToString())
        return unpack(training_pb2.Standing, answer)

    def check_certificate(self, data: bytes) -> Step:
        certificate = unpack(training_pb2.Certificate, data)
        group_digest = digest(certificate.group)
        group, coordinator = self.open_group(certificate.group)
        members = [member.peer_id for member in group.members]
        if members != sorted(set(members)) or coordinator not in members:
            raise ValueError("members")
        sequence = 0
        for member in group.members:
            self.check_report(group, member, sequence)
        outcome = certificate.outcome
        outcome_digest = digest(outcome.origin_digest, outcome.state_digest, *outcome.part_digests)
        for vote in certificate.votes:
            self.check_vote(members[vote.place], vote.signature, group, group_digest, outcome_digest, sequence)
        if len({vote.place for vote in certificate.votes}) < math.ceil(2 * len(members) / 3):
            raise ValueError("votes")
        if not group.HasField("lock") and outcome.origin_digest != group_digest:
            raise ValueError("origin")
        if len(outcome.part_digests) != len(group.part_values):
            raise ValueError("parts")
        return Step(
            step=group.step,
            num_tokens=sum(member.num_tokens for member in group.members),
            before=group.state_digest,
            after=outcome.state_digest,
            origin=outcome.origin_digest,
            part_values=tuple(group.part_values),
            part_digests=tuple(outcome.part_digests),
            members=tuple(members),
        )

    def open_group(self, data: bytes) -> tuple[training_pb2.Group, str]:
        envelope = read_envelope(data, "group", self.node.network, LIFETIME_S)
        group = unpack(training_pb2.Group, envelope.payload)
        if envelope.subject != f"{self.run}/{group.step}/{group.attempt}" or group.run != self.run:
            raise ValueError("subject")
        return group, peer_id_of(envelope.signer)

    def check_vote(self, peer_id, signature, group, group_digest, outcome_digest, sequence) -> None:
        place = number(group.step) + number(group.attempt)
        digests = group_digest + outcome_digest + group.state_digest
        verify(peer_id, signature, b"swarm-vote:commit\0", self._head, place, digests, number(sequence))

    def check_report(self, group, member, sequence: int) -> None:
        commitment = member.commitment
        if member.num_tokens:
            slices = number(group.step) + group.state_digest + commitment.root
            verify(member.peer_id, commitment.signature, b"swarm-slices:", self._head, slices)
        verify(member.peer_id, member.signature, b"swarm-report:", self._head, self.report(group, member, sequence))

    def report(self, group, member, sequence: int) -> bytes:
        is_locked = member.HasField("locked")
        parts = [number(group.step), number(group.attempt), number(sequence), group.state_digest]
        parts += [number(member.num_tokens), number(member.num_samples), struct.pack(">d", member.loss)]
        parts += [bytes([member.leaving]), number(member.bytes_per_s), member.commitment.root or bytes(32)]
        parts += [bytes([is_locked]), number(member.locked.attempt), member.locked.outcome_digest or bytes(32)]
        parts += [number(len(member.followers))]
        for follower in member.followers:
            parts += [number(follower.place), number(follower.num_tokens), number(follower.num_samples)]
            parts += [bytes([follower.leaving]), number(follower.steps_left)]
        parts += [peer_id.encode() + b"\0" for peer_id in member.newcomers]
        parts += [number(member.steps_left), bytes([member.discounted]), number(len(member.effects))]
        parts += [struct.pack(">q", effect) for effect in member.effects]
        return b"".join(parts)

    async def manifest(self, peer_id: str, state: bytes) -> tuple[dict, list[bytes]]:
        request = b"\1" + training_pb2.ManifestRequest(state_digest=state).SerializeToString()
        manifest = await self.node.call(peer_id, f"train.manifest/{self.run}", request)
        if digest(manifest) != state:
            raise ValueError("manifest")
        size = int.from_bytes(manifest[:4], "little")
        chunks = manifest[4 + size :]
        return json.loads(manifest[4 : 4 + size]), [chunks[at : at + 32] for at in range(0, len(chunks), 32)]

    async def state(self, peer_id: str, state: bytes) -> tuple[dict, bytes]:
        """Fetch a state's head, and the bytes of theta and momentum."""
        head, chunks = await self.manifest(peer_id, state)
        parts = []
        for index, wanted in enumerate(chunks):
            request = training_pb2.ChunkRequest(state_digest=state, index=index)
            chunk = await self.node.call(peer_id, f"train.chunk/{self.run}", b"\1" + request.SerializeToString())
            if digest(chunk) != wanted:
                raise ValueError("chunk")
            parts.append(chunk)
        return head, b"".join(parts)

    async def part(self, peer_id: str, origin: bytes, index: int) -> bytes:
        stream = await self.node.stream(peer_id, f"stream/train.part/{self.run}")
        request = training_pb2.PartRequest(origin_digest=origin, index=index)
        await stream.send(b"\1" + request.SerializeToString())
        data = b""
        try:
            while True:
                data += await stream.receive()
        except EOFError:
            return data

    async def state_after(self, peer_id: str, outer_step: int) -> tuple[Step, bytes]:
        """Wait until the member has made this step or a later one, and return its newest one with the state."""
        while True:
            standing = await self.standing(peer_id)
            if standing.outer_step < outer_step:
                await asyncio.sleep(0.05)
                continue
            step = self.check_certificate(standing.certificate)
            if (step.step, step.after) != (standing.outer_step, standing.state_digest):
                raise ValueError("standing")
            try:
                head, values = await self.state(peer_id, step.after)
            except Refused:  # it has made a further step
                continue
            if head["outer_step"] != step.step or head["num_values"] * 8 != len(values):
                raise ValueError("head")
            return step, values

    async def delta(self, peer_id: str, step: Step, num_values: int) -> np.ndarray:
        """Fetch and decode the result of a step's reduction."""
        parts = []
        for index, size in enumerate(step.part_values):
            data = await self.part(peer_id, step.origin, index)
            if digest(data) != step.part_digests[index]:
                raise ValueError("part")
            parts.append(decode_part(data, size, num_values))
        return np.concatenate(parts)


def leaf_values(num_values: int) -> int:
    return min(max(num_values // 4096 // 256 * 256, 256), 98_304)


def decode_part(data: bytes, num_values: int, vector_values: int) -> np.ndarray:
    """Decode a part in int8: frames of whole leaves, each with the scales of 256 values and then their codes."""
    leaf, at, pieces = leaf_values(vector_values), 0, []
    frame = 98_304 // leaf * leaf
    for first in range(0, num_values, frame):
        size = min(frame, num_values - first)
        num_scales = -(-size // 256)
        scales = np.frombuffer(data, "<f4", num_scales, at)
        codes = np.frombuffer(data, "i1", size, at + 4 * num_scales)
        pieces.append(codes.astype(np.float32) * np.repeat(scales, 256)[:size])
        at += 4 * num_scales + size
    if at != len(data):
        raise ValueError("size")
    return np.concatenate(pieces)


def outer_step(state: bytes, delta: np.ndarray, learning_rate: float, momentum: float) -> bytes:
    """Make the outer step of nesterov, with each product and each sum rounded to float32."""
    theta, velocity = np.frombuffer(state, "<f4").reshape(2, -1)
    mu, eta = np.float32(momentum), np.float32(learning_rate)
    velocity = velocity * mu + delta
    return np.concatenate([theta - (velocity * mu + delta) * eta, velocity]).tobytes()

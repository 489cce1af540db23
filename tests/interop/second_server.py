"""A server of a model's last blocks, written from docs/reference/protocol: sessions.md, records.md and manifests.md.

It computes a whole sequence again for each step, and draws only likeliest tokens. It refuses what it does not know, so
clients use other servers for that. The files of its model have one chunk each.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interop.libp2p_channel import peer_id_of
from interop.libp2p_host import Stream
from interop.second_node import MessageStream, Node, Refused, make_envelope, pack, unpack
from interop.second_session import Frame, read_frames, write_frame
from swarm_protocol.proto import failure_pb2, manifest_pb2, records_pb2, serving_pb2, session_pb2
from transformers import AutoModelForCausalLM

CHUNK_BYTES = 64 * 1024
SIGNED_S = 30 * 86400.0
NUM_FINGERPRINT = 16


def decoded(rows: list[bytes], codec: str) -> np.ndarray:
    """Decode rows of hidden states."""
    if codec == "raw":
        return np.array([np.frombuffer(row, "<f4") for row in rows])
    return np.array([(np.frombuffer(row, "<u2").astype("<u4") << 16).view("<f4") for row in rows])


class LastBlocks:
    """The blocks from `start` on, the last norm and the head of a model in a folder.

    A server that lies multiplies its inputs by a `factor`.
    """

    def __init__(self, folder: Path, start: int):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.model.layers = self._model.model.layers[start:]
        self.factor = 1.0

    @torch.inference_mode()
    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Return the logits [V] after hidden states [T, H] of all positions so far."""
        inputs = torch.from_numpy(hidden * np.float32(self.factor))[None]
        return self._model(inputs_embeds=inputs, use_cache=False, logits_to_keep=1).logits[0, -1].numpy()


@dataclass(eq=False)
class Sequence:
    """One client's sequence: its inputs as they came, and what counts as the output of each draw, by position."""

    client: str
    opened: Frame.OpenSequence
    lane: MessageStream
    inputs: list[bytes] = field(default_factory=list)
    draws: dict[int, bytes] = field(default_factory=dict)
    num_links: int = 0


class Server:
    """Serves what `like`, the record of a server of the blocks before, leaves to the end of the model."""

    def __init__(self, node: Node, folder: Path, like: records_pb2.ServeRecord, answers: dict[str, bytes]):
        self.node, self.folder, self.model = node, folder, like.model
        self.record = records_pb2.ServeRecord(
            model=like.model,
            revision=like.revision,
            num_blocks=like.num_blocks,
            start=like.end,
            end=like.num_blocks,
            state="serving",
            prefill_ms_per_token=0.001,  # the test wants it to be asked
            decode_ms_per_block=0.001,
            free_kv_tokens=like.free_kv_tokens,
            manifest=like.manifest,
            dtype=like.dtype,
            max_blocks=like.num_blocks - like.end,
        )
        self.blocks = LastBlocks(folder, like.end)
        self.num_looped = 0
        self._weights = unpack(
            manifest_pb2.ModelManifest, unpack(manifest_pb2.SignedManifest, answers["manifest"]).manifest
        ).weights
        self._sequences: dict[tuple[str, bytes], Sequence] = {}
        self._lanes: dict[str, MessageStream] = {}  # to next servers
        for name, answer in answers.items():
            node.serve(f"serving.{name}/{self.model}", lambda _peer_id, _request, answer=answer: answer)
        node.serve(f"serving.possession/{self.model}", self._prove)
        node.host.handlers[node.protocol(f"stream/serving.lane/{self.model}")] = self._serve_lane

    async def announce(self, state: str) -> None:
        self.record.state = state
        if not await self.node.publish(f"serve/{self.model}", self.record):
            raise ConnectionError("No node took the record.")

    def _prove(self, peer_id: str, request: bytes) -> bytes:
        """Answer a PossessionRequest with the drawn chunks. A file of one chunk has its leaf as root, and no path."""
        asked = unpack(manifest_pb2.PossessionRequest, request)
        statement = manifest_pb2.PossessionStatement(
            manifest=asked.manifest, nonce=asked.nonce, asker=peer_id, drawn=asked.drawn
        )
        chunks = [(self.folder / self._weights[drawn.file].name).read_bytes() for drawn in asked.drawn]
        for chunk in chunks:
            if len(chunk) > CHUNK_BYTES:
                raise ValueError("This server holds only files of one chunk.")
            statement.paths.add(digest=hashlib.sha256(b"\0" + chunk).digest())
        signed = self._signed("possession", pack(statement))
        return pack(manifest_pb2.PossessionResponse(statement=signed, chunks=chunks))

    def _signed(self, purpose: str, payload: bytes) -> bytes:
        return make_envelope(self.node.host, purpose, self.node.network, self.model, payload, SIGNED_S)

    # --- sessions ---

    async def _serve_lane(self, stream: Stream, peer_id: str) -> None:
        """Answer the frames of a client, or of the server before, until the stream ends."""
        lane = await MessageStream.accept(stream)
        try:
            while True:
                for kind, body, payload in read_frames(await lane.receive()):
                    await self._take(kind, body, payload, lane, peer_id)
        except (EOFError, Refused):
            self._sequences = {key: each for key, each in self._sequences.items() if each.lane is not lane}
            await lane.close()

    async def _take(self, kind: str, body: Any, payload: bytes, lane: MessageStream, peer_id: str) -> None:
        client = body.client_peer_id if kind == "push" else peer_id
        sequence = self._sequences.get((client, body.sequence_id))
        if kind == "open":
            await self._open(Sequence(client, body, lane))
        elif kind == "step":
            if sequence and body.position <= len(sequence.inputs):
                await self._run(sequence, body, payload)
            else:
                await self._end(lane, body.sequence_id)
        elif kind == "push":
            await self._take_push(sequence, body, payload, lane, peer_id)
        elif sequence and kind == "link":
            await self._link(sequence, body)
        elif sequence and kind == "close":
            if body.commit_to:
                await lane.send(write_frame(committed=self._commitment(sequence, body.commit_to)))
            del self._sequences[client, body.sequence_id]

    async def _open(self, sequence: Sequence) -> None:
        wanted, own = sequence.opened, self.record
        is_known = not wanted.HasField("sampler") and wanted.codec in ("raw", "bf16")
        if (wanted.revision, wanted.start, wanted.end) != (own.revision, own.start, own.end) or not is_known:
            await self._end(sequence.lane, wanted.sequence_id)
            return
        self._sequences[sequence.client, wanted.sequence_id] = sequence
        await sequence.lane.send(
            write_frame(ready=Frame.SequenceReady(sequence_id=wanted.sequence_id, max_step_tokens=512))
        )

    async def _end(self, lane: MessageStream, sequence_id: bytes) -> None:
        failure = pack(failure_pb2.Failure(code="refused", message="This server does not serve that."))
        await lane.send(write_frame(ended=Frame.SequenceEnded(sequence_id=sequence_id, failure=failure)))

    async def _link(self, sequence: Sequence, update: Frame.LinkUpdate) -> None:
        sequence.num_links += 1
        for name in ("previous", "next"):
            sequence.opened.ClearField(name)
            if update.HasField(name):
                getattr(sequence.opened, name).CopyFrom(getattr(update, name))
        heard = Frame.LinkAck(
            sequence_id=update.sequence_id, num_links=sequence.num_links, position=len(sequence.inputs)
        )
        await sequence.lane.send(write_frame(linked=heard))

    async def _take_push(
        self, sequence: Sequence | None, push: Frame.Push, payload: bytes, lane: MessageStream, peer_id: str
    ) -> None:
        sender = Frame.SequenceRef(peer_id=peer_id, sequence_id=push.source_id)
        if sequence and sequence.opened.previous == sender and push.position <= len(sequence.inputs):
            await self._run(sequence, push, payload)
            return
        refused = Frame.PushRefused(
            client_peer_id=push.client_peer_id,
            sequence_id=push.sequence_id,
            position=push.position,
            failure=pack(failure_pb2.Failure(code="violation", message="The push is not expected.")),
        )
        await lane.send(write_frame(push_refused=refused))

    async def _run(self, sequence: Sequence, step: Frame.StepRequest | Frame.Push, payload: bytes) -> None:
        """Run the rows that the sequence does not have yet, and tell the client."""
        if step.want not in ("nothing", "token") or step.draw.temperature or step.draw.HasField("num_logprobs"):
            await self._end(sequence.lane, sequence.opened.sequence_id)
            return
        inputs, size = sequence.inputs, len(payload) // step.rows.num_rows
        rows = [payload[at : at + size] for at in range(0, len(payload), size)]
        if not (rows := rows[len(inputs) - step.position :]):
            return
        inputs += rows
        result = Frame.StepResult(sequence_id=sequence.opened.sequence_id, position=len(inputs), batch_size=1)
        result.num_links = sequence.num_links
        result.upstream_ms.extend(getattr(step, "upstream_ms", ()))
        if step.want == "token":
            self._draw(sequence, step.draw, result.token)
            result.looped = await self._loop(sequence, step.draw, result.token.token_id)
        await sequence.lane.send(write_frame(result=result))

    def _draw(self, sequence: Sequence, draw: Frame.TokenDraw, token: Frame.SampledToken) -> None:
        logits = self.blocks.logits(decoded(sequence.inputs, sequence.opened.codec))
        token.token_id = int(logits.argmax())
        if draw.index % 16 == 0:
            largest = np.argsort(-logits, kind="stable")[:NUM_FINGERPRINT]
            token.fingerprint = largest.astype("<i4").tobytes() + logits[largest].astype("<f4").tobytes()
        options = (draw.index, draw.seed, draw.temperature, draw.top_p, draw.top_k, draw.min_p)
        sequence.draws[len(sequence.inputs) - 1] = f"{options}{token.token_id}/".encode() + token.fingerprint

    async def _loop(self, sequence: Sequence, draw: Frame.TokenDraw, token_id: int) -> bool:
        """Push the token to the first server if the client lets this server draw ahead."""
        if not draw.ahead or not sequence.opened.HasField("next"):
            return False
        first = sequence.opened.next
        push = Frame.Push(
            client_peer_id=sequence.client,
            sequence_id=first.sequence_id,
            position=len(sequence.inputs),
            want="token",
            draw=draw,
            rows=Frame.Rows(codec="tokens", num_rows=1),
            source_id=sequence.opened.sequence_id,
        )
        push.draw.index, push.draw.ahead = draw.index + 1, draw.ahead - 1
        if first.peer_id not in self._lanes:
            self._lanes[first.peer_id] = await self.node.stream(first.peer_id, f"stream/serving.lane/{self.model}")
        await self._lanes[first.peer_id].send(write_frame(struct.pack("<i", token_id), push=push))
        self.num_looped += 1
        return True

    def _commitment(self, sequence: Sequence, until: int) -> Frame.Commitment:
        """Sign the inputs and the draws before a position."""
        inputs = sequence.inputs[:until]
        outputs = {position: each for position, each in sequence.draws.items() if position < until}
        stated = session_pb2.AnswerCommitment(
            client_peer_id=sequence.client,
            sequence_id=sequence.opened.sequence_id,
            model=self.model,
            revision=self.record.revision,
            start=self.record.start,
            end=self.record.end,
            inputs_to=len(inputs),
            inputs_digest=digest_of(inputs),
            outputs_from=min(outputs, default=0),
            outputs_to=max(outputs, default=-1) + 1,
            outputs_digest=digest_of([outputs[position] for position in sorted(outputs)]),
        )
        signed = self._signed("answer", pack(stated))
        return Frame.Commitment(sequence_id=sequence.opened.sequence_id, signed=signed)


def digest_of(contents: list[bytes]) -> bytes:
    """Return the digest over the digests of positions."""
    each = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
    return hashlib.sha256(b"".join(each)).digest()


@asynccontextmanager
async def serving(node: Node, model: str, folder: Path) -> AsyncIterator[Server]:
    """Serve the blocks that follow those of the first server, with the files that it gives, until the block ends."""
    await node.listen()
    records = {
        peer_id_of(signer): unpack(records_pb2.ServeRecord, envelope.payload)
        for signer, envelope in (await node.find(f"serve/{model}")).items()
    }
    first, like = next((peer_id, record) for peer_id, record in records.items() if not record.start)
    asked = manifest_pb2.ModelManifestRequest(digest=like.manifest)
    manifest = await node.call(first, f"serving.manifest/{model}", pack(asked))
    files = await node.call(first, f"serving.files/{model}", pack(serving_pb2.FilesRequest(model=model)))
    server = Server(node, folder, like, {"manifest": manifest, "files": files})
    await server.announce("serving")
    try:
        yield server
    finally:
        await server.announce("draining")

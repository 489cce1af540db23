"""A libp2p connection before it has streams: peer ids, multistream-select and Noise XX, from their specifications."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
KEY_HEAD = bytes.fromhex("08011220")
STATIC_KEY = b"noise-libp2p-static-key:"
NOISE = b"Noise_XX_25519_ChaChaPoly_SHA256"
MULTISTREAM = "/multistream/1.0.0"


def base58(data: bytes) -> str:
    number, text = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def peer_id_of(public_key: bytes) -> str:
    return base58(b"\x00\x24" + KEY_HEAD + public_key)


def public_key_of(peer_id: str) -> bytes:
    number = 0
    for letter in peer_id:
        number = number * 58 + ALPHABET.index(letter)
    return number.to_bytes(37)[-32:]


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


class Cipher:
    def __init__(self, key: bytes):
        self._aead, self._count = ChaCha20Poly1305(key), 0

    def _nonce(self) -> bytes:
        self._count += 1
        return bytes(4) + struct.pack("<Q", self._count - 1)

    def encrypt(self, data: bytes, about: bytes = b"") -> bytes:
        return self._aead.encrypt(self._nonce(), data, about)

    def decrypt(self, data: bytes, about: bytes = b"") -> bytes:
        return self._aead.decrypt(self._nonce(), data, about)


class Handshake:
    """The symmetric state of Noise XX."""

    def __init__(self) -> None:
        self.chain, self.digest = NOISE, hashlib.sha256(NOISE).digest()
        self._cipher: Cipher | None = None

    def _derive(self, secret: bytes) -> tuple[bytes, bytes]:
        seed = hmac.digest(self.chain, secret, "sha256")
        first = hmac.digest(seed, b"\1", "sha256")
        return first, hmac.digest(seed, first + b"\2", "sha256")

    def mix(self, data: bytes) -> bytes:
        self.digest = hashlib.sha256(self.digest + data).digest()
        return data

    def mix_key(self, own: X25519PrivateKey, other: bytes) -> None:
        self.chain, key = self._derive(own.exchange(X25519PublicKey.from_public_bytes(other)))
        self._cipher = Cipher(key)

    def encrypt(self, data: bytes) -> bytes:
        return self.mix(self._cipher.encrypt(data, self.digest))

    def decrypt(self, data: bytes) -> bytes:
        plain = self._cipher.decrypt(data, self.digest)
        self.mix(data)
        return plain

    def split(self) -> tuple[Cipher, Cipher]:
        first, second = self._derive(b"")
        return Cipher(first), Cipher(second)


class Raw:
    """The TCP connection as multistream-select and then Noise need it, before there are streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.outward: Cipher | None = None
        self.inward: Cipher | None = None
        self.plain = bytearray()

    def write_frame(self, data: bytes) -> None:
        self.writer.write(struct.pack(">H", len(data)) + data)

    async def read_frame(self) -> bytes:
        return await self.reader.readexactly(*struct.unpack(">H", await self.reader.readexactly(2)))

    def send(self, data: bytes) -> None:
        if self.outward is None:
            self.writer.write(data)
            return
        for at in range(0, len(data), 65000):
            self.write_frame(self.outward.encrypt(data[at : at + 65000]))

    async def read(self, size: int) -> bytes:
        if self.inward is None:
            return await self.reader.readexactly(size)
        while len(self.plain) < size:
            self.plain += self.inward.decrypt(await self.read_frame())
        taken = bytes(self.plain[:size])
        del self.plain[:size]
        return taken

    async def select(self, protocol: str) -> None:
        for line in (MULTISTREAM, protocol):
            self.send(varint(len(line) + 1) + line.encode() + b"\n")
        for line in (MULTISTREAM, protocol):
            if (heard := await self.hear()) != line.encode() + b"\n":
                raise ConnectionError(f"The peer answered {heard!r} to {line}.")

    async def hear(self) -> bytes:
        return await self.read((await self.read(1))[0])

    async def accept(self, protocol: str) -> None:
        """Negotiate one protocol as the side that was dialled."""
        for line in (MULTISTREAM, protocol):
            while await self.hear() != line.encode() + b"\n":
                self.send(b"\x03na\n")
            self.send(varint(len(line) + 1) + line.encode() + b"\n")

    async def secure(self, key: Ed25519PrivateKey) -> str:
        """Do Noise XX as the dialler, and return the peer id that the other side has proved."""
        noise, own, static = Handshake(), X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.write_frame(noise.mix(own.public_key().public_bytes_raw()))
        noise.mix(b"")
        answer = await self.read_frame()
        other = noise.mix(answer[:32])
        noise.mix_key(own, other)
        other_static = noise.decrypt(answer[32:80])
        noise.mix_key(own, other_static)
        peer_id = proved_peer(noise.decrypt(answer[80:]), other_static)
        sealed = noise.encrypt(static.public_key().public_bytes_raw())
        noise.mix_key(static, other)
        self.write_frame(sealed + noise.encrypt(proof_of(key, static)))
        self.outward, self.inward = noise.split()
        return peer_id

    async def secure_dialled(self, key: Ed25519PrivateKey) -> str:
        """Do Noise XX as the side that was dialled, and return the peer id that the dialler has proved."""
        noise, own, static = Handshake(), X25519PrivateKey.generate(), X25519PrivateKey.generate()
        other = noise.mix(await self.read_frame())
        noise.mix(b"")
        answer = noise.mix(own.public_key().public_bytes_raw())
        noise.mix_key(own, other)
        answer += noise.encrypt(static.public_key().public_bytes_raw())
        noise.mix_key(static, other)
        self.write_frame(answer + noise.encrypt(proof_of(key, static)))
        last = await self.read_frame()
        other_static = noise.decrypt(last[:48])
        noise.mix_key(own, other_static)
        peer_id = proved_peer(noise.decrypt(last[48:]), other_static)
        self.inward, self.outward = noise.split()
        return peer_id


def proof_of(key: Ed25519PrivateKey, static: X25519PrivateKey) -> bytes:
    """Make the payload by which a side of Noise proves its peer id."""
    signed = key.sign(STATIC_KEY + static.public_key().public_bytes_raw())
    public_key = KEY_HEAD + key.public_key().public_bytes_raw()
    return b"\x0a" + varint(len(public_key)) + public_key + b"\x12" + varint(len(signed)) + signed


def proved_peer(payload: bytes, static: bytes) -> str:
    """Check the other side's payload, and return its peer id."""
    identity = read_fields(payload)
    public = identity[1][len(KEY_HEAD) :]
    Ed25519PublicKey.from_public_bytes(public).verify(identity[2], STATIC_KEY + static)
    return peer_id_of(public)


def read_fields(message: bytes) -> dict[int, bytes]:
    """Read a protobuf message whose fields are all byte strings with lengths below 16,384."""
    fields, at = {}, 0
    while at < len(message):
        number, size, at = message[at] >> 3, message[at + 1], at + 2
        if size > 127:
            size, at = size & 127 | message[at] << 7, at + 1
        fields[number], at = message[at : at + size], at + size
    return fields

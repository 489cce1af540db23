"""Keys and values of all sequences on a span, in pages of PAGE_TOKENS positions.

There is one tensor of keys and one of values per block, of the shape that each block declares: families differ in heads
and widths, some from block to block. The engine keeps the books of which page belongs to which sequence. A pool is not
thread-safe: one thread owns it. `Prefault` has a thread of its own, which only touches memory.

Legend of shapes: S slots (a slot is one position of one page), K heads of keys and values, D width of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, IntegrityError
from torch import Tensor

from swarm.heap import make_resident

PAGE_TOKENS = limits.PAGE_TOKENS

_HUGE_PAGE_BYTES = 2**21


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The shape of what one block keeps of one position: keys [num_heads, key_width] and values [num_heads,
    value_width]."""

    num_heads: int
    key_width: int
    value_width: int

    @property
    def num_values(self) -> int:
        return self.num_heads * (self.key_width + self.value_width)


class KVPool:
    """`num_pages` pages for each of the blocks in `shapes`. Pages start as zeros, which take no memory until they are
    written or asked for.

    Raises ConfigError if there is no memory for them.
    """

    def __init__(
        self, shapes: Sequence[KVShape], num_pages: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_pages = num_pages
        self.dtype = dtype
        self._shapes = tuple(shapes)
        self._page_values = [PAGE_TOKENS * shape.num_values for shape in shapes]
        num_slots = num_pages * PAGE_TOKENS
        try:
            self.keys_SKD = [_zeros(num_slots, s.num_heads, s.key_width, dtype, device) for s in shapes]
            self.values_SKD = [_zeros(num_slots, s.num_heads, s.value_width, dtype, device) for s in shapes]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"no memory for a cache of {num_pages * sum(self._page_values) * dtype.itemsize} bytes",
                remedy="allow a smaller cache",
            ) from error

    @property
    def device(self) -> torch.device:
        return self.keys_SKD[0].device

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on all blocks."""
        return self.bytes_of_page(0, len(self._shapes))

    def bytes_of_page(self, start: int, end: int) -> int:
        """Return the bytes of one page on the span's blocks `start` to `end` (counted from the span's first one)."""
        return sum(self._page_values[start:end]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys_SKD, *self.values_SKD))

    @property
    def num_pages_at_once(self) -> int:
        """Number of pages for which the system gives memory at once, in the tensors on average."""
        return -(-_HUGE_PAGE_BYTES * 2 * len(self._shapes) // self.page_bytes)

    def make_resident(self, first: int, end: int) -> None:
        """Have the system give the memory of pages `first` to `end` now, on a CPU. In any thread."""
        for tensor in self._tensors():
            if tensor.device.type == "cpu":
                pages = _by_page(tensor)[first:end]
                make_resident(pages.data_ptr(), pages.nbytes)

    def layout(self, start: int, end: int) -> bytes:
        """Describe how `read` lays out these blocks: only pools with the same layout can exchange pages.

        The number of bytes does not distinguish types of the same width.
        """
        shapes = [(shape.num_heads, shape.key_width, shape.value_width) for shape in self._shapes[start:end]]
        return f"{self.dtype}, {sys.byteorder}, pages of {PAGE_TOKENS}, {shapes}".encode()

    def read(self, pages: Sequence[int], start: int, end: int) -> bytes:
        """Return the pages' content on the span's blocks `start` to `end` (counted from the span's first one).

        Block by block: the keys of all pages, then their values, in the pool's dtype and the machine's byte order.
        """
        index = torch.tensor(list(pages), dtype=torch.int64)
        parts = []
        for tensor in self._tensors(start, end):
            chosen = _by_page(tensor).index_select(0, index.to(tensor.device)).cpu()
            parts.append(chosen.view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def write(self, pages: Sequence[int], start: int, end: int, data: bytes) -> None:
        """Put back what `read` gave, perhaps on another peer, for as many pages.

        Raises IntegrityError, and changes nothing, for another number of bytes or for numbers that are not finite.
        """
        expected = len(pages) * self.bytes_of_page(start, end)
        if len(data) != expected:
            raise IntegrityError(f"{len(data)} bytes of cache for {len(pages)} pages, which take {expected}")
        if not data:
            return
        values = torch.frombuffer(bytearray(data), dtype=self.dtype)
        if not values.isfinite().all():
            raise IntegrityError("a cache with numbers that are not finite")
        index, at = torch.tensor(list(pages), dtype=torch.int64), 0
        for tensor in self._tensors(start, end):
            by_page = _by_page(tensor)
            num_values = len(pages) * by_page.shape[1]
            given = values[at : at + num_values].view(len(pages), -1)
            by_page.index_copy_(0, index.to(tensor.device), given.to(tensor.device))
            at += num_values

    def _tensors(self, start: int = 0, end: int | None = None) -> Iterator[Tensor]:
        for keys, values in zip(self.keys_SKD[start:end], self.values_SKD[start:end], strict=True):
            yield keys
            yield values


def _zeros(num_slots: int, num_heads: int, width: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(num_slots, num_heads, width, dtype=dtype, device=device)
    # torch would write every zero; the system gives pages of zeros when they are first used
    zeros = np.zeros(num_slots * num_heads * width * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(num_slots, num_heads, width)


def _by_page(tensor_SKD: Tensor) -> Tensor:
    """Return [number of pages, values in a page], sharing memory."""
    return tensor_SKD.view(tensor_SKD.shape[0] // PAGE_TOKENS, -1)


class Prefault:
    """Make the next pages of `pool` resident before a step has to wait for them. Owns the thread that does it.

    A pool takes no memory until it is written. The system clears what it gives, some megabytes for each tensor of each
    block, and on a virtual machine it may have to ask its host. Decoding would see that as one step in dozens that
    takes many times as long as the others. Pages are first used in order. A long prompt waits for pages beyond those
    ahead.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._num_ahead = pool.num_pages_at_once
        self._num_requested = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-prefault")

    def keep_ahead(self, num_touched: int) -> None:
        """Keep as many pages resident beyond the first `num_touched` as the system gives at once, or half of them.

        Returns at once.
        """
        first, end = max(self._num_requested, num_touched), min(num_touched + self._num_ahead, self._pool.num_pages)
        if end - first >= min(-(-self._num_ahead // 2), self._pool.num_pages - first) > 0:
            self._num_requested = end
            self._thread.submit(self._pool.make_resident, first, end)

    def close(self, *, wait: bool) -> None:
        """Drop the requests that wait; with `wait`, block until the one under way has ended."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

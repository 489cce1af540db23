"""The keys and values of all sequences on a span, in pages of PAGE_TOKENS positions.

Each block has a tensor of keys and one of values, in the block's own shape: heads and widths differ between families,
and in some between blocks. The engine tracks which page belongs to which sequence. A pool is not thread-safe: one
thread owns it. `Prefault` has its own thread, which only touches memory.

Shapes: S slots (a slot is one position of one page), K heads of keys and values, D width of a head.
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
    """The shapes that one block caches of one position: keys [num_heads, key_width] and values [num_heads,
    value_width]."""

    num_heads: int
    key_width: int
    value_width: int

    @property
    def num_values(self) -> int:
        return self.num_heads * (self.key_width + self.value_width)


class KVPool:
    """A pool of `num_pages` pages for each block in `shapes`. Pages start as zeros, which take no memory until they are
    written or made resident.

    Raises ConfigError if there is not enough memory.
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
                f"not enough memory for a cache of {num_pages * sum(self._page_values) * dtype.itemsize} bytes",
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
        """Return the bytes of one page on blocks [start, end), counted from the span's first."""
        return sum(self._page_values[start:end]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys_SKD, *self.values_SKD))

    @property
    def num_pages_at_once(self) -> int:
        """Number of pages in the memory that the system provides at once (a huge page in each tensor), rounded up."""
        return -(-_HUGE_PAGE_BYTES * 2 * len(self._shapes) // self.page_bytes)

    def make_resident(self, first: int, end: int) -> None:
        """Make the memory of pages [first, end) resident now, on a CPU. Any thread may call this."""
        for tensor in self._tensors():
            if tensor.device.type == "cpu":
                pages = _by_page(tensor)[first:end]
                make_resident(pages.data_ptr(), pages.nbytes)

    def layout(self, start: int, end: int) -> bytes:
        """Return a description of the layout of `read` for these blocks. Only pools with equal layouts can exchange
        pages.

        The number of bytes alone does not distinguish dtypes of the same width.
        """
        shapes = [(shape.num_heads, shape.key_width, shape.value_width) for shape in self._shapes[start:end]]
        return f"{self.dtype}, {sys.byteorder}, pages of {PAGE_TOKENS}, {shapes}".encode()

    def read(self, pages: Sequence[int], start: int, end: int) -> bytes:
        """Return the pages' content on blocks [start, end), counted from the span's first.

        Block by block: the keys of all pages, then their values, in the pool's dtype and the machine's byte order.
        """
        index = torch.tensor(list(pages), dtype=torch.int64)
        parts = []
        for tensor in self._tensors(start, end):
            chosen = _by_page(tensor).index_select(0, index.to(tensor.device)).cpu()
            parts.append(chosen.view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def write(self, pages: Sequence[int], start: int, end: int, data: bytes) -> None:
        """Write what `read` returned, perhaps on another peer, to as many pages.

        Raises IntegrityError, and changes nothing, for a wrong number of bytes or numbers that are not finite.
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

    def clear(self, slots: Tensor) -> None:
        """Set the keys and values of these slots to zero, in all blocks."""
        for tensor_SKD in (*self.keys_SKD, *self.values_SKD):
            tensor_SKD.index_fill_(0, slots.to(self.device), 0)

    def _tensors(self, start: int = 0, end: int | None = None) -> Iterator[Tensor]:
        for keys, values in zip(self.keys_SKD[start:end], self.values_SKD[start:end], strict=True):
            yield keys
            yield values


def _zeros(num_slots: int, num_heads: int, width: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(num_slots, num_heads, width, dtype=dtype, device=device)
    # torch would write every zero; the system provides zero pages at their first use
    zeros = np.zeros(num_slots * num_heads * width * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(num_slots, num_heads, width)


def _by_page(tensor_SKD: Tensor) -> Tensor:
    """Return a view [number of pages, values in a page]."""
    return tensor_SKD.view(tensor_SKD.shape[0] // PAGE_TOKENS, -1)


class Prefault:
    """Makes the next pages of `pool` resident before a step has to wait for them, in its own thread.

    A pool takes no memory until it is written. The system clears memory at its first use, some megabytes for each
    tensor of each block, and a virtual machine may have to ask its host for it. Without this class, one decode step in
    dozens would take many times as long as the others. Pages are first used in order. A long prompt still waits for
    pages that are not resident yet.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._num_ahead = pool.num_pages_at_once
        self._num_requested = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-prefault")

    def keep_ahead(self, num_touched: int) -> None:
        """Keep `num_pages_at_once` pages, or at least half of them, resident after the first `num_touched`.

        Returns at once.
        """
        first, end = max(self._num_requested, num_touched), min(num_touched + self._num_ahead, self._pool.num_pages)
        if end - first >= min(-(-self._num_ahead // 2), self._pool.num_pages - first) > 0:
            self._num_requested = end
            self._thread.submit(self._pool.make_resident, first, end)

    def close(self, *, wait: bool) -> None:
        """Drop waiting requests. With `wait`, block until the running one has ended."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

"""Formats speeds, sizes, times, reachability and strangers' text for people, in few characters.

"–" stands for an unknown number. Pure.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Literal, TypeAlias, get_args

from rich.cells import cell_len, set_cell_size
from swarm.network.multiaddr import is_loopback, is_private
from swarm_protocol.identity import SHORT_ID_CHARS

UNKNOWN = "–"
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
BARS = "▁▂▃▄▅▆▇█"
MINUTE_S, DAY_S = 60.0, 86_400.0
MAX_AT = 1e11
"""The latest time in Unix seconds that the calendar supports; a database may contain any number."""


def rate(tokens_per_s: float | None) -> str:
    """Format a rate, such as `41 tok/s` or `3.1k tok/s`."""
    written = count(tokens_per_s)
    return written if written == UNKNOWN else f"{written} tok/s"


def count(number: float | None) -> str:
    """Format a number with two or three significant digits: `4.1`, `41`, `3.1k`, `2.4M`."""
    if number is None or not math.isfinite(number):
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.1f}{letter}" if abs(scaled) < 100 else f"{scaled:.0f}{letter}"
    return f"{number:.1f}" if 0 < abs(number) < 10 else f"{number:.0f}"


def size(num_bytes: float) -> str:
    """Format bytes in powers of 1024: `512 B`, `4.8 GiB`."""
    power = min(int(math.log2(num_bytes) // 10), len(BYTE_UNITS) - 1) if num_bytes >= 1 else 0
    return f"{digits(num_bytes / 2 ** (10 * power))} {BYTE_UNITS[power]}"


def whole_mebibytes(num_bytes: int) -> str:
    """Format bytes that the dashboard has rounded down to whole MiB: `under 1 MiB`, `4.8 GiB`."""
    return size(num_bytes) if num_bytes >= 2**20 else "under 1 MiB"


def decimal_size(num_bytes: float) -> str:
    """Format bytes in powers of 1000, as providers of traffic do: `412 GB`."""
    return _in_units(num_bytes, ("TB", "GB", "MB", "kB"))


def bit_rate(bytes_per_s: float) -> str:
    """Format bytes per second as bits per second in powers of 1000: `18.4 Mbit/s`."""
    return _in_units(bytes_per_s * 8, ("Gbit/s", "Mbit/s", "kbit/s"))


def _in_units(value: float, units: Sequence[str]) -> str:
    """Format a value in the first of `units` that it reaches. The last one is a thousand, each other a thousand times
    the next one."""
    for place, unit in enumerate(units[:-1]):
        if value >= (size := 1e3 ** (len(units) - place)) * 0.9995:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value / 1e3)} {units[-1]}"


PAUSES = {"hours": "outside its lending hours", "budget": "its monthly traffic is nearly used up"}
"""Why a node lends nothing, by the `pause` of its record or status."""


def lends_again(at: float | None, now: float) -> str:
    """Return `lends again at 22:00` in local time, with the date if it is a day or more away."""
    when = None if at is None else calendar(at, None)
    if at is None or when is None:
        return "lends again later"
    return f"lends again at {when:{'%H:%M' if at - now < DAY_S else '%H:%M on %d %B'}}"


def calendar(at: float, zone: tzinfo | None = UTC) -> datetime | None:
    """Return a Unix time in UTC, or in local time if `zone` is None. Return None for a time that no calendar has, which
    a peer may claim."""
    try:
        return datetime.fromtimestamp(at, zone)
    except (OverflowError, ValueError, OSError):
        return None


def utc(at: float) -> str:
    """Format a Unix time in UTC to the minute, as in messages."""
    return f"{datetime.fromtimestamp(min(max(at, 0.0), MAX_AT), UTC):%Y-%m-%d %H:%M UTC}"


def moment(at: float) -> str:
    """Format a Unix time in UTC to the second. A time that no calendar has is shown as 1970."""
    return f"{calendar(at) or calendar(0):%Y-%m-%d %H:%M:%S UTC}"


def day(at: float) -> str:
    """Format the day of a Unix time in UTC."""
    return moment(at).partition(" ")[0]


def round_trip(rtt_ms: float | None) -> str:
    """Format a round trip in milliseconds as `duration` does, but as `<1 ms` below a millisecond."""
    if rtt_ms is None or not math.isfinite(rtt_ms):
        return UNKNOWN
    return duration(rtt_ms / 1e3) if rtt_ms >= 1 else "<1 ms"


def progress(num_bytes: float, total_bytes: float, cells: int = 20) -> str:
    """Format progress: `[█████·····] 50 %, 1.2 GiB of 2.4 GiB`."""
    share = min(1.0, max(0.0, num_bytes / total_bytes)) if total_bytes > 0 else 1.0
    full = int(share * cells)
    return f"[{'█' * full}{'·' * (cells - full)}] {int(share * 100)} %, {size(num_bytes)} of {size(total_bytes)}"


def duration(seconds: float | None) -> str:
    """Format seconds: `320 ms`, `4.2 s`, `12 s`, `3 min 31 s`, `25 min`, `3 h 12 min`, `4 days`.

    Negative durations, as between two clocks, become `0 s`.
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 99.5:
        return _short(seconds)
    if seconds < 10 * MINUTE_S - 0.5:
        return _two(round(seconds), "min", "s")
    if seconds < 60 * MINUTE_S - 30:
        return f"{seconds / MINUTE_S:.0f} min"
    minutes = round(seconds / MINUTE_S)
    if minutes < 2 * 24 * 60:
        return _two(minutes, "h", "min")
    return f"{minutes // (24 * 60)} days"


def _short(seconds: float) -> str:
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{digits(seconds * 1000)} ms"
    return f"{digits(round(seconds, 1))} s" if seconds < 9.95 else f"{seconds:.0f} s"


def _two(value: int, large: str, small: str) -> str:
    rest = f" {value % 60} {small}" if value % 60 else ""
    return f"{value // 60} {large}{rest}"


def digits(value: float) -> str:
    """Format a number with three significant digits: `0.41`, `3.2`, `58`."""
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    written = f"{value:.{decimals}f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


Reach: TypeAlias = Literal["public", "relay", "local network only", "this machine only", "unknown"]
REACHES: tuple[Reach, ...] = get_args(Reach)


def reach(found: str, addrs: Sequence[str]) -> Reach:
    """Return from where others can reach a node.

    `found` is the reachability in its record or status, and `addrs` are its announced addresses. A seed on the same
    machine or local network can also dial local addresses, and then calls the node public. Records and the control
    socket keep that word; every display must use this function.
    """
    if found == "relay":
        return "relay"
    if addrs and all(map(is_loopback, addrs)):
        return "this machine only"
    if found != "public":
        return "unknown"
    return "local network only" if addrs and all(map(is_private, addrs)) else "public"


def path_counts(counts: Mapping[str, int]) -> str:
    """Format numbers of peers, such as those by path: `12 direct, 3 dialled back, 4 punched, 2 relayed`, or `none`."""
    return ", ".join(f"{number:,} {clean(kind, 24)}" for kind, number in counts.items() if number) or "none"


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean(text: str, width: int) -> str:
    """Return at most `width` cells of `text`, with control characters, line ends and direction overrides replaced.

    The result may look like markup: print it as `rich.text.Text`, never as a string.
    """
    width = max(1, width)
    head = "".join(letter if letter.isprintable() else REPLACEMENT for letter in text[: width + 1])
    if len(text) <= width and cell_len(head) <= width:
        return head
    return set_cell_size(head, width - 1).rstrip() + "…"


MAX_SHOWN_CHARS = 300
MAX_MARKS = 2
"""Maximum combining marks on one letter. Living languages need no more."""

NOTHING = "—"
MAX_SPANS = 4


def shown(text: str, *, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return `text` made `plain`, or "—" if nothing visible is left."""
    return plain(text, max_chars) or NOTHING


def plain(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return `text` in one line of at most `max_chars`, cut with "…".

    Control characters, bidirectional overrides and invisible characters become blanks. Excess combining marks are
    dropped. `str.isprintable` is false for all of Unicode's "other" and "separator" categories except the space.
    """
    # cut first, so that ten megabytes cost no more than a line; dropped characters only make the line shorter
    line = text[: 4 * max_chars]
    if not (line.isascii() and line.isprintable()):
        kept: list[str] = []
        num_marks = 0
        for character in line:
            num_marks = num_marks + 1 if unicodedata.category(character) in {"Mn", "Me"} else 0
            if num_marks <= MAX_MARKS:
                kept.append(character if character.isprintable() else " ")
        line = "".join(kept)
    line = " ".join(line.split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"


def blocks(spans: tuple[tuple[int, int], ...], num_blocks: int) -> str:
    """Format half-open spans: "blocks 4:8 and 10:11 of 32", "block 3 of 32". Only the first MAX_SPANS are named."""
    told = [f"{start}:{end}" for start, end in spans[:MAX_SPANS]]
    if is_single_block(spans):
        told = [str(spans[0][0])]
    if more := len(spans) - len(told):
        told.append(f"{plural(more, 'more span')}")
    *others, last = told
    noun = "block" if is_single_block(spans) else "blocks"
    return f"{noun} {', '.join(others)}{' and ' if others else ''}{last} of {num_blocks}"


def is_single_block(spans: tuple[tuple[int, int], ...]) -> bool:
    return sum(end - start for start, end in spans) == 1


def name_cell(name: str, width: int) -> str:
    """Return `name` made `clean` for `width` cells. A `short_id` at its end is kept, and the text before it is cut."""
    head, mark, end = name.rpartition(" …")
    if not mark or len(end) != SHORT_ID_CHARS or width <= len(mark) + SHORT_ID_CHARS:
        return clean(name, width)
    return clean(head, width - len(mark) - SHORT_ID_CHARS) + mark + clean(end, SHORT_ID_CHARS)


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return the newest `width` values as bars, the lowest value as the shortest. Values that are not finite are left
    out."""
    shown = [value for value in values if math.isfinite(value)][-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)

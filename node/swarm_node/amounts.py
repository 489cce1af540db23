"""How numbers are told to people: speeds, sizes and times in a few characters, and "–" for what is not known."""

from __future__ import annotations

import math

UNKNOWN = "–"


def rate(tokens_per_s: float | None) -> str:
    """`41 tok/s`, `3.1k tok/s`."""
    return UNKNOWN if _is_unknown(tokens_per_s) else f"{count(tokens_per_s)} tok/s"


def count(number: float | None) -> str:
    """Two or three digits that matter: `4.1`, `41`, `3.1k`, `2.4M`."""
    if number is None or _is_unknown(number):
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.1f}{letter}" if abs(scaled) < 100 else f"{scaled:.0f}{letter}"
    return f"{number:.1f}" if 0 < abs(number) < 10 else f"{number:.0f}"


def size(num_bytes: float) -> str:
    """`512 B`, `4.8 GB`, in powers of 1000."""
    told = count(num_bytes)
    return f"{told[:-1]} {told[-1].upper()}B" if told[-1:].isalpha() else f"{num_bytes:.0f} B"


def progress(num_bytes: float, total_bytes: float, cells: int = 20) -> str:
    """`[█████·····] 50 %, 1.2 GB of 2.4 GB`."""
    share = min(1.0, max(0.0, num_bytes / total_bytes)) if total_bytes > 0 else 1.0
    full = int(share * cells)
    return f"[{'█' * full}{'·' * (cells - full)}] {int(share * 100)} %, {size(num_bytes)} of {size(total_bytes)}"


def duration(seconds: float | None) -> str:
    """`41 s`, `3 min`, `2 h 5 min`, `4 d 2 h`; what is negative, as between two clocks, is no time at all."""
    if seconds is None or _is_unknown(seconds):
        return UNKNOWN
    whole = int(max(0.0, seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{whole} s"


def seconds(value: float | None) -> str:
    """A short time with what matters of it: `0.42 s`, `12 s`."""
    if value is None or _is_unknown(value):
        return UNKNOWN
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _is_unknown(number: float | None) -> bool:
    return number is None or not math.isfinite(number)

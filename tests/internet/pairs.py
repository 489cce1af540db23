"""Lists the pairs of hosts that meet in the lab, and what is expected of their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two hosts, of which `one` makes the first contact. It is the host with the forwarded port if there is one, since
    only one port is forwarded."""

    name: str
    one: str
    other: str
    finds_path: bool = True
    """False if there is no direct path at all."""

    @property
    def look_s(self) -> float:
        """How long to look for a direct path."""
        return 1.2 * MAX_DIRECT_S if self.finds_path else 2.0


PAIRS = (
    Pair(name="public+public", one="open1", other="open2"),
    Pair(name="public+NAT", one="open1", other="home1"),
    Pair(name="forwarded+NAT", one="fwd1", other="home1"),
    Pair(name="NAT+NAT", one="home1", other="home2"),
    Pair(name="symmetric+public", one="sym1", other="open1"),
    Pair(name="carrier+public", one="cgn1", other="open1"),
    Pair(name="symmetric+symmetric", one="sym1", other="sym2", finds_path=False),
)
"""The matrix of the tests."""

OTHERS = (
    Pair(name="behind one NAT", one="home1", other="home1b"),
    # the port that a symmetric NAT gives this peer is not the one that others have seen, and the home's router drops it
    Pair(name="symmetric+NAT", one="sym1", other="home1", finds_path=False),
)
"""Pairs that only talk, and neither train nor serve."""

MAX_SEED_SHARE = 0.05
MAX_DIRECT_S = 10.0


def each_pair(
    fixture: str, *, with_path: bool, more: Sequence[Pair] = (), quick: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Run a test with `fixture` for each pair and for `more`. With `with_path`, only pairs with a direct path are used.
    `quick` names the pairs whose tests are also quick ones."""
    pairs = [pair for pair in (*PAIRS, *more) if pair.finds_path or not with_path]
    marked = dict.fromkeys(quick, pytest.mark.quick)
    values = [pytest.param(pair, id=pair.name, marks=marked.get(pair.name, ())) for pair in pairs]
    return pytest.mark.parametrize(fixture, values, indirect=True)

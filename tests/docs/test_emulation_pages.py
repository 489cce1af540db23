"""The tables on the pages of the small internet and of the WAN proxy equal those in the code."""

from __future__ import annotations

import re

import pytest
from internet.lab import BACKBONE, HOME_ROUTER, PUBLIC, ROUTERS
from support.site_pages import written
from support.wan_proxy import LINKS, MBIT_BYTES

PAGES = written("guides")


def rows(page: str, section: str) -> list[list[str]]:
    """Return the cells of a section's first table, without its header."""
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGES[f"guides/{page}"], flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_page_names_each_host_with_its_address_and_its_router() -> None:
    told = {name.strip("`"): (address, behind) for name, address, behind, _ in rows("small-internet.md", "Hosts")}
    public = {host: (f"{BACKBONE}.{last}", "") for host, last in PUBLIC.items()}
    homes = {
        host: (f"{ROUTERS[name].lan}.{ROUTERS[name].hosts[host]}", ROUTERS[name].outer)
        for host, name in HOME_ROUTER.items()
    }
    assert told == public | homes


def test_page_has_the_figures_of_each_line() -> None:
    for name, *figures in rows("wan-proxy.md", "Lines"):
        line = LINKS[name.strip("`")]
        rates = [line.down_bytes_per_s / MBIT_BYTES, line.up_bytes_per_s / MBIT_BYTES]
        assert [float(figure) for figure in figures] == pytest.approx(
            [*rates, 1000 * line.latency_s, 1000 * line.jitter_s, line.loss]
        )
    assert [row[0].strip("`") for row in rows("wan-proxy.md", "Lines")] == list(LINKS)

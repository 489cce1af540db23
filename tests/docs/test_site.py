"""What the build of the site changes in its pages."""

from __future__ import annotations

import re

from support.site_pages import DOCS, hooks, written


def test_long_names_in_cells_break_after_slashes_dots_and_underscores_only() -> None:
    cell = "<td>in <code>training/member/peer_calls.py</code>, <code>QUIET_S</code> and <code>0.5 s</code></td>"
    broken = "<code>training/<wbr>member/<wbr>peer_<wbr>calls.py</code>"
    assert hooks().breakable(cell) == cell.replace("<code>training/member/peer_calls.py</code>", broken)
    assert hooks().breakable("<p><code>peer_calls.py</code></p>") == "<p><code>peer_calls.py</code></p>"


def test_page_for_unknown_addresses_leads_to_the_four_tutorials() -> None:
    page = (DOCS / "theme" / "404.html").read_text("utf-8")
    tutorials = set(written("tutorials")) - {"tutorials/index.md"}
    assert {name.replace(".html", ".md") for name in re.findall(r"'([\w/]+\.html)' \| url", page)} == tutorials

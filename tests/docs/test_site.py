"""What the build of the site changes in its pages."""

from __future__ import annotations

from support.site_pages import hooks


def test_long_names_in_cells_break_after_slashes_dots_and_underscores_only() -> None:
    cell = "<td>in <code>training/member/peer_calls.py</code>, <code>QUIET_S</code> and <code>0.5 s</code></td>"
    broken = "<code>training/<wbr>member/<wbr>peer_<wbr>calls.py</code>"
    assert hooks().breakable(cell) == cell.replace("<code>training/member/peer_calls.py</code>", broken)
    assert hooks().breakable("<p><code>peer_calls.py</code></p>") == "<p><code>peer_calls.py</code></p>"

"""Reports of positions whose tokens the client does not know yet, and what becomes of drafts among them."""

from __future__ import annotations

from collections.abc import Collection

from swarm.serving.session.step_reports import EarlyReports, StepReport


def report(first: int, position: int, num_drafts: int = 0, content: int = 0) -> StepReport:
    """Return a report with a row of one byte for each position from `first` on."""
    rows = bytes([content or at for at in range(first, position)])
    return StepReport(position=position, rows=rows, num_drafts=num_drafts, compute_ms=1.0)


def taken(reports: EarlyReports, num_run: int, num_known: int, drafted: Collection[int] = ()) -> bytes:
    """Take out all reports, and return the rows."""
    rows = b""
    while (each := reports.take(num_run, num_known, drafted, 1)) is not None:
        assert not each.num_drafts
        num_run, rows = each.position, rows + bytes(each.rows)
    return rows


def test_rows_wait_until_their_tokens_are_known() -> None:
    reports = EarlyReports()
    reports.add(report(4, 6), 1)
    reports.add(report(6, 8), 1)
    assert taken(reports, 4, 5) == b"\x04"
    assert taken(reports, 5, 5) == b""
    assert taken(reports, 5, 8) == b"\x05\x06\x07"
    assert not reports


def test_drafts_are_used_as_far_as_they_were_right() -> None:
    for drafted, rows in (((), b"\x04"), ({5}, b"\x04\x05"), ({6}, b"\x04"), ({5, 6}, b"\x04\x05\x06")):
        reports = EarlyReports()
        reports.add(report(4, 7, num_drafts=2), 1)
        assert taken(reports, 4, 9, drafted) == rows
        assert not reports


def test_drafts_wait_for_their_own_tokens() -> None:
    reports = EarlyReports()
    reports.add(report(4, 7, num_drafts=2), 1)
    assert taken(reports, 4, 5) == b"\x04"
    assert reports.last is not None
    assert (reports.last.firm_end, reports.last.position) == (5, 7)
    assert taken(reports, 5, 6, {5}) == b"\x05"
    assert reports.last.firm_end == 6
    assert taken(reports, 6, 7, {5}) == b""
    assert not reports


def test_report_that_goes_on_from_a_draft_replaces_those_after_it() -> None:
    for first, before in ((5, b"\x04"), (6, b"\x04\x05"), (7, b"\x04\x05\x06")):
        reports = EarlyReports()
        reports.add(report(4, 7, num_drafts=2), 1)
        reports.add(report(first, first + 1, content=99), 1)
        assert taken(reports, 4, 9) == before + b"\x63"

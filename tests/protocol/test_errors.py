"""The text of an error, however deeply it is wrapped."""

from __future__ import annotations

from swarm_protocol.errors import ConfigError, cause, reason_of


def test_cause_of_nested_groups_is_the_error_with_a_remedy() -> None:
    ours = ConfigError("no room", remedy="free some")
    inner = ExceptionGroup("tasks", [ValueError("a defect"), ours])
    assert cause(BaseExceptionGroup("tasks", [inner])) is ours
    assert cause(ours) is ours
    first = ValueError("first")
    assert cause(ExceptionGroup("tasks", [first, ValueError("second")])) is first


def test_reason_that_quotes_a_stranger_s_file_has_no_terminal_codes() -> None:
    assert reason_of(ValueError("unknown \x1b[31mred\n\u202eline\x07")) == "unknown [31mred line"


def test_reason_of_a_missing_key_says_that_it_is_missing() -> None:
    assert reason_of(KeyError("swish")) == "there is no 'swish'"

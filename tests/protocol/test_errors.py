"""What an error says, whatever it is wrapped in."""

from __future__ import annotations

from swarm_protocol.errors import ConfigError, cause


def test_cause_of_nested_groups_is_the_failure_that_says_what_to_do() -> None:
    ours = ConfigError("no room", remedy="free some")
    inner = ExceptionGroup("tasks", [ValueError("a defect"), ours])
    assert cause(BaseExceptionGroup("tasks", [inner])) is ours
    assert cause(ours) is ours
    first = ValueError("first")
    assert cause(ExceptionGroup("tasks", [first, ValueError("second")])) is first

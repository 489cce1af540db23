from __future__ import annotations

import math
import re
import sys
import unicodedata

import pytest
from swarm_protocol.checks import (
    check_addr,
    check_choice,
    check_count,
    check_digest,
    check_float,
    check_int,
    check_name,
    check_text,
)

INVISIBLE = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0d\uffa0\U000e0100-\U000e01ef]"
)
"""Fillers, blanks and marks that select a variation. U+FE0E and U+FE0F select text and pictures, as in most emoji."""


def test_check_text_accepts_exactly_the_visible_characters_that_unicode_has_assigned() -> None:
    for character in map(chr, range(sys.maxunicode + 1)):
        category = unicodedata.category(character)
        if category == "Cn":
            continue
        if character == " " or (category[0] not in "CZ" and not INVISIBLE.fullmatch(character)):
            assert check_text(f"a{character}", "field", max_chars=2) == f"a{character}"
        else:
            with pytest.raises(ValueError, match=r"^field is not one line"):
                check_text(f"a{character}", "field", max_chars=2)


@pytest.mark.parametrize("newer", ["\U0001fa77", "\U0001fae9", "\U0001faef"])
def test_check_text_accepts_characters_that_are_newer_than_some_pythons(newer: str) -> None:
    # of Unicode 15, 16 and 17: Python 3.11 knows 14, and all nodes accept the same names
    assert check_text(newer, "field", max_chars=1) == newer


@pytest.mark.parametrize(
    "text",
    [
        "a\x00b",
        "a\x1b[31m",
        "a\x7f",
        "a\r\n",
        "a\u2028b",
        "a\u202eb",
        "a\u2066b",
        "a\u200fb",
        "\ufeffa",
        "\u3164",
        "Ada\U000e0101",
        "\udfff",
        b"a",
        1,
    ],
)
def test_check_text_refuses_what_could_deceive_a_reader(text: object) -> None:
    with pytest.raises(ValueError, match="field"):
        check_text(text, "field", max_chars=20)


def test_check_text_bounds_its_length() -> None:
    assert check_text("ab", "field", max_chars=2) == "ab"
    assert check_text("", "field", max_chars=2) == ""
    with pytest.raises(ValueError, match="3 characters, more than 2"):
        check_text("abc", "field", max_chars=2)
    with pytest.raises(ValueError, match="field is empty"):
        check_text("", "field", max_chars=2, empty=False)


@pytest.mark.parametrize("name", ["a", "_a", "meta-llama/Llama-3.1-8B", "model:tag", "a@b+c", "a/b/c", "9", "a..b"])
def test_check_name_accepts_usual_names_of_models_and_runs(name: str) -> None:
    assert check_name(name, "field") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/..",
        "a/../b",
        ".a",
        "-a",
        "/a",
        "a/",
        "a//b",
        "a b",
        "a\\b",
        "a\x00",
        "é",
        "a\n",
        "a" * 129,
        None,
    ],
)
def test_check_name_refuses_what_could_leave_a_folder_or_hide(name: object) -> None:
    with pytest.raises(ValueError, match="field"):
        check_name(name, "field")


@pytest.mark.parametrize("addr", ["/ip4/127.0.0.1/tcp/0", "/ip6/fe80::1%eth0/udp/1/quic-v1", "/dns4/a.example/tcp/1"])
def test_check_addr_accepts_multiaddrs(addr: str) -> None:
    assert check_addr(addr, "field") == addr


@pytest.mark.parametrize(
    "addr", ["", "/", "ip4/1.2.3.4", "/ip4//tcp", "/ip4/1.2.3.4/", "/ip4/a b", "/ip4/" + "1" * 256]
)
def test_check_addr_refuses_other_text(addr: str) -> None:
    with pytest.raises(ValueError, match="field"):
        check_addr(addr, "field")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, 10.1, "1", None, 10**400])
def test_check_float_refuses_values_that_are_not_finite_or_out_of_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"^field is .*, not a number in"):
        check_float(value, "field", high=10.0)


@pytest.mark.parametrize("value", [-1, 11, 1.0, True, "1", None, 10**400])
def test_check_int_refuses_values_that_are_not_whole_or_out_of_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"^field is .*, not a whole number in"):
        check_int(value, "field", high=10)


def test_checks_return_the_accepted_value() -> None:
    assert check_int(10, "field", high=10) == 10
    assert check_float(10, "field", high=10.0) == 10
    assert check_choice("a", "field", ("a", "b")) == "a"
    assert check_digest(bytes(32), "field") == bytes(32)
    assert check_digest(b"", "field", empty=True) == b""
    check_count(("a", "b"), "field", max_items=2)


def test_checks_of_choice_digest_and_count_refuse_other_values() -> None:
    with pytest.raises(ValueError, match="field is none of a, b"):
        check_choice("c", "field", ("b", "a"))
    for digest in (b"", bytes(31), bytearray(32), "a" * 32):
        with pytest.raises(ValueError, match="field is not 32 bytes"):
            check_digest(digest, "field")
    for values in (["a"], ("a", "b", "c")):
        with pytest.raises(ValueError, match="field is not a tuple of at most 2 items"):
            check_count(values, "field", max_items=2)
    with pytest.raises(ValueError, match="field names something twice"):
        check_count(("a", "a"), "field", max_items=2)

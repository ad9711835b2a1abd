"""What a command wrote comes as text where it is text, and never loses a byte where it is none."""

from __future__ import annotations

import base64

import pytest

from hawker.model.exec_output import as_text


@pytest.mark.parametrize("data", [b"", b"plain\n", "\u00fc\u20ac".encode()])
def test_text_is_text_and_nothing_else(data: bytes) -> None:
    assert as_text("stdout", data) == {"stdout": data.decode()}


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\xc3", b"\xed\xa0\x80"], ids=["bytes", "half", "surrogate"])
def test_bytes_that_are_no_text_are_given_as_they_are_beside_it(data: bytes) -> None:
    found = as_text("stderr", data)
    assert base64.b64decode(found["stderr_base64"]) == data
    assert found["stderr"] == data.decode(errors="replace"), "as who looks at the text alone has always seen it"


def test_a_character_that_the_limit_cut_in_two_makes_no_bytes_of_a_text() -> None:
    assert as_text("stdout", "a\u20ac".encode()[:-1], cut=True) == {"stdout": "a"}
    assert "stdout_base64" in as_text("stdout", b"a\xff", cut=True)

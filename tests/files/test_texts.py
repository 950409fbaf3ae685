"""Texts of other people lose what controls a terminal, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neobert_hf.files.texts import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, Größe 漢字 \U0001f600 e\u0301 \u05d0\u200f", "plain, Größe 漢字 \U0001f600 e\u0301 \u05d0\u200f"),
        ("a\tb\nc\r\nd\re\u2028f\x85g", "a b c d e f g"),
        ("a \x1b[31mred\x1b[0m b\x1b[2J\x1b[1;1H\x1b[?25l", "a red b"),  # colour, clear, move, hide the cursor
        ("a\x9b31mb", "ab"),  # the same by one C1 character
        ("a\x1b]0;PWNED\x07b", "ab"),  # title of the window, ended by BEL
        ("a\x1b]52;c;cm0gLXJm\x1b\\b", "ab"),  # clipboard, ended by ST
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ b", "link b"),
        ("a\x9d0;PWNED\x9cb", "ab"),
        ("a\x1bPq#0\x1b\\b\x1b_app\x1b\\c\x1b^pm\x9cd", "abcd"),  # DCS, APC, PM
        ("a\x1bcb\x1b(0c\x1b7d", "abcd"),  # reset, character set, save the cursor
        ("a\x1b]0;no end", "a0;no end"),  # the rest of the document is not hidden
        ("a\x1b[31", "a31"),
        ("a\x1b\x1b[31mb\x1b", "ab"),
        ("a\x1b\x00[31mb", "a[31mb"),
        ("a\x1b[3\x001mb", "a31mb"),
        ("a\x00\x07\x08\x0e\x7f\x80\x9fb", "ab"),
        ("user\u202egpj.exe\u202c \u2066a\u2069", "usergpj.exe a"),
        ("file \udc9b31m \ud800", "file \ufffd31m \ufffd"),  # names that are not UTF-8
        ("", ""),
    ],
)
def test_a_text_loses_its_control_sequences_and_nothing_else(text, shown):
    assert printable(text) == shown


@given(st.text(st.sampled_from("\x1b[]0;m\x07\\\x9b\x9c\x9d\x90P^_ \n\u202eab\ud800")))
def test_no_control_character_survives_and_the_result_is_stable(text):
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown

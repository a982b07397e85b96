"""Texts from data in messages: they move no cursor and add no line."""

import pickle

import pytest

from batchgen.errors import BatchgenError, UsageError, listed
from batchgen.text import one_line, printable

# Title, colour, bidirectional override, line separator, C1, half of a character.
HOSTILE = "\x1b]0;x\x07\r\nFAKE done: 9 rows\u202e\u2028\x9b\ud800"


def test_t12_a_control_character_is_written_as_an_escape_and_other_text_as_it_is() -> None:
    assert printable(HOSTILE) == ("\\x1b]0;x\\x07\\r\nFAKE done: 9 rows\\u202e\\u2028\\x9b\\ud800")
    assert one_line(f"a\t{HOSTILE}").startswith("a\\t\\x1b]0;x\\x07\\r\\nFAKE")
    kept = "plain: é 中 🙂 \\n\ttab\nsecond line"
    assert printable(kept) == kept


def test_t12_data_in_an_error_adds_no_line_and_the_errors_own_lines_stay() -> None:
    error = UsageError(f"column {listed([HOSTILE])} is none:", "  name another")
    assert str(error).splitlines() == [
        "column \\x1b]0;x\\x07\\r\\nFAKE done: 9 rows\\u202e\\u2028\\x9b\\ud800 is none:",
        "  name another",
    ]
    assert str(BatchgenError()) == ""


def test_an_error_is_the_same_after_a_journey_between_processes() -> None:
    error = UsageError("first", "second")
    with pytest.raises(UsageError, match="first\nsecond"):
        raise pickle.loads(pickle.dumps(error))

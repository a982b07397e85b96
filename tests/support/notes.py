"""What tests show at the end of their output, also where a worker of several ran them."""

from collections.abc import Callable, Iterable

import pytest

Note = Callable[[str], None]
"""Shows a text; the type of the fixture ``note``."""

NOTE = "note"


def texts(reports: Iterable[pytest.TestReport]) -> list[tuple[str, str]]:
    """Return the names of tests and what they told."""
    return [
        (report.nodeid, str(text))
        for report in reports
        for name, text in report.user_properties
        if name == NOTE
    ]

"""What a part finds out, as records that travel from its process and into the JSON file."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is right or wrong."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured.

    Attributes:
        predicted: what the roofline gives for it, in the same unit; None if it says nothing.
        note: what the figure was measured on.
    """

    name: str
    value: float
    unit: str
    predicted: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that the time did not suffice for."""

    name: str


Record = Check | Figure | LeftOut


@dataclass(slots=True)
class PartOutcome:
    """All that one part found out."""

    part: str
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Take a record in."""
        if isinstance(record, Check):
            self.checks.append(record)
        elif isinstance(record, Figure):
            self.figures.append(record)
        else:
            self.left_out.append(record.name)

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON's own types."""
        return asdict(self)

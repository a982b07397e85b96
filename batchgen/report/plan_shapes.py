"""The few shapes that a plan's picture is made of, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH = 794
"""A4 at 96 dots an inch."""
MARGIN = 40
INNER = WIDTH - 2 * MARGIN

_FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_INK, _QUIET = "#1a1a1a", "#5a5a5a"
DARK, MIDDLE, LIGHT = "#1f4e79", "#7fa3c7", "#d5e1ee"

# Mean width of a character in units of the font's size; texts are cut by it.
_CHARACTER = 0.53


@dataclass(slots=True)
class Sheet:
    """A page that grows downwards; all lengths are in pixels.

    Attributes:
        y: where the next thing begins.
    """

    y: float = MARGIN
    _parts: list[str] = field(default_factory=list)

    def title(self, text: str) -> None:
        """Write the page's title."""
        self.y += 18
        self.text(text, size=20, weight="bold")
        self.y += 6

    def heading(self, text: str) -> None:
        """Begin a panel."""
        self.y += 26
        self.text(text, size=13, weight="bold")
        self._parts.append(
            f'<line x1="{MARGIN}" y1="{self.y + 5:.1f}" x2="{WIDTH - MARGIN}" '
            f'y2="{self.y + 5:.1f}" stroke="{_INK}" stroke-width="0.6"/>'
        )
        self.y += 10

    def line(self, text: str, *, quiet: bool = False) -> None:
        """Write a line below, wrapped where it is too long."""
        for piece in wrapped(text, int(INNER / (11 * _CHARACTER))):
            self.y += 15
            self.text(piece, size=11, quiet=quiet)

    def text(
        self,
        text: str,
        *,
        x: float = MARGIN,
        size: float = 11,
        weight: str = "normal",
        anchor: str = "start",
        quiet: bool = False,
        y: float | None = None,
    ) -> None:
        """Write a text with its baseline at ``y``, by default the sheet's own."""
        at = self.y if y is None else y
        self._parts.append(
            f'<text x="{x:.1f}" y="{at:.1f}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}" fill="{_QUIET if quiet else _INK}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Fill a rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" '
            f'height="{max(0.0, height):.1f}" fill="{color}"/>'
        )

    def bars(
        self,
        rows: Sequence[tuple[str, float, float, str]],
        *,
        label_width: float,
        longest: float = 0,
    ) -> None:
        """Draw a bar for each row: its label, the ends of its range, and what stands behind.

        The bar is dark up to the lower end and light from there to the upper one.

        Args:
            longest: what a bar over the whole width stands for, where some row is not the
                longest.
        """
        longest = max([longest, *(high for _, _, high, _ in rows)]) or 1
        room = INNER - label_width - 175
        for label, low, high, said in rows:
            self.y += 19
            left = MARGIN + label_width
            characters = int(label_width / (11 * _CHARACTER))
            self.text(shortened(label, characters), size=11)
            self.box(left, self.y - 10, room * high / longest, 13, MIDDLE)
            self.box(left, self.y - 10, room * low / longest, 13, DARK)
            self.text(said, x=left + room * high / longest + 6, size=11)

    def columns(self, bins: Sequence[tuple[int, int, int]], *, height: float) -> None:
        """Draw a histogram: least value, greatest value and count of each bin."""
        most = max((count for _, _, count in bins), default=0) or 1
        width = INNER / max(1, len(bins))
        base = self.y + height + 16
        for at, (low, _, count) in enumerate(bins):
            x, tall = MARGIN + at * width, height * count / most
            # What is there is seen, however little it is.
            tall = max(tall, 1.0) if count else 0.0
            self.box(x + 1, base - tall, width - 2, tall, DARK)
            if count:
                self.text(_short(count), x=x + width / 2, y=base - tall - 3, size=8,
                          anchor="middle", quiet=True)  # fmt: skip
            self.text(_short(low), x=x, y=base + 12, size=9, quiet=True)
        self.y = base + 14

    def svg(self, description: str) -> str:
        """Return the picture.

        Args:
            description: for those who cannot see it.
        """
        height = self.y + MARGIN
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="{_FONT}" role="img">\n'
            f"<title>Plan</title>\n<desc>{escape(description)}</desc>\n"
            f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


def wrapped(text: str, width: int) -> list[str]:
    """Break a text at blanks into lines of at most so many characters."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [shortened(line, width) for line in lines]


def shortened(text: str, width: int) -> str:
    """Cut a text in its middle to at most so many characters."""
    if len(text) <= width:
        return text
    half = max(1, (width - 3) // 2)
    return f"{text[:half]}...{text[-half:]}"


def _short(count: int) -> str:
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= 10 * size:
            return f"{count / size:.0f}{unit}"
    return str(count)

"""Numbers as people read them: few digits, a unit, nothing for what is not known."""

import math

UNKNOWN = "-"
_TIB = 1 << 40


def count(value: float | None) -> str:
    """Return a count with its thousands apart."""
    return UNKNOWN if value is None else f"{round(value):,}"


def compact(value: float) -> str:
    """Return a number of any size in at most five characters, for an axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a share in percent."""
    return UNKNOWN if value is None else f"{value:.1%}"


def size(value: float | None) -> str:
    """Return a number of bytes."""
    if value is None:
        return UNKNOWN
    for unit, name in ((_TIB, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return (
                f"{value / unit:.3g} {name}"
                if value < 100 * unit
                else f"{value / unit:,.0f} {name}"
            )
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a time: milliseconds below a second, hours and minutes above a minute."""
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def ticks(most: float, wanted: int = 4) -> list[float]:
    """Return round numbers from 0 to the first that is not below ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * (1 - 1e-9))
    return [step * n for n in range(math.ceil(most / step - 1e-9) + 1)]


def time_ticks(most_s: float, wanted: int = 4) -> list[tuple[float, str]]:
    """Return round moments from 0 to ``most_s``, and how each is written."""
    for unit_s, name, steps in (
        (1, "s", (1, 2, 5, 10, 15, 20, 30)),
        (60, "min", (1, 2, 5, 10, 15, 20, 30)),
        (3600, "h", (1, 2, 4, 6, 12, 24, 48, 96, 168, 336)),
    ):
        for step in steps:
            if step * unit_s * (wanted + 1) > most_s:
                at = range(0, int(most_s // unit_s) + 1, step)
                if len(at) > 1:
                    return [(each * unit_s, f"{each:,} {name}") for each in at]
                return [(each, f"{each:.2g} s") for each in ticks(most_s)[:-1]]
    return [(0.0, "0"), (most_s, duration(most_s))]

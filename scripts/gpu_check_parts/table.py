"""The table that stands last: what failed, and every figure beside its prediction."""

from collections.abc import Sequence

from gpu_check_parts.outcome import PartOutcome


def summary_table(outcomes: Sequence[PartOutcome]) -> str:
    """Write it as Markdown: figures of all parts, then the checks by part, failures by name."""
    lines = [
        "",
        "| part | figure | measured | roofline | share | on |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        for figure in outcome.figures:
            predicted = share = ""
            if figure.predicted is not None:
                predicted = f"{figure.predicted:,.4g}"
                share = f"{_share(figure.value, figure.predicted, figure.unit):.0%}"
            cells = [
                outcome.part, figure.name, f"{figure.value:,.4g} {figure.unit}", predicted, share,
                figure.note,
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| part | checks passed | failed | left out | s |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        failed = ", ".join(check.name for check in outcome.failed)
        passed = f"{len(outcome.checks) - len(outcome.failed)} of {len(outcome.checks)}"
        left_out = ", ".join(outcome.left_out)
        lines.append(
            f"| {outcome.part} | {passed} | {failed} | {left_out} | {outcome.seconds:.0f} |"
        )
    return "\n".join(lines)


def _share(value: float, predicted: float, unit: str) -> float:
    """Return how much of the possible was reached: for times less is more."""
    if unit in {"s", "ms", "us"}:
        return predicted / value if value else 0.0
    return value / predicted if predicted else 0.0

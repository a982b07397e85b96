"""Compare a job's outputs with the prefix cache on, off, and with blocks of another size.

    python scripts/compare_outputs.py job=sentiment --rows 16 --reference

Everything but the options below is what would follow `python -m batchgen`. For each row that
differs, the first differing token is held against the stock transformers model: a near-tie,
where rounding decides between the two tokens, or a fault. Nothing is written.

Exit code: 0 where all rows are equal or differ at a near-tie, 1 where a row is DIFFERENT,
2 and above as for `python -m batchgen`.
"""

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from job_rows import (
    JobRows,
    Run,
    SampleKey,
    compose_job,
    open_rows,
    positive,
    with_block_size,
)
from stock import StockModel

from batchgen.cli.checks import check
from batchgen.config import Config
from batchgen.data.output.schema import RowResult
from batchgen.engine.request import Request
from batchgen.engine.step import SampleBatch
from batchgen.errors import BatchgenError
from batchgen.job.load import load_job_model
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.runtime.detokenize import decode
from batchgen.runtime.sampler import sample

# How far rounding may move the logits of two tokens against each other. In half precision
# two units in the last place of a logit between 16 and 32.
NEAR_TIE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}

_LARGEST_BLOCK = 256


class Verdict(StrEnum):
    """How one row came out against the baseline."""

    EQUAL = "equal"
    NEAR_TIE = "near-tie"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, slots=True)
class Finding:
    """A row's comparison; position, in output tokens, and words only where it differs."""

    verdict: Verdict
    position: int | None = None
    words: str = ""


class Judge:
    """Tells a near-tie from a fault, by the stock model's logits.

    Args:
        next_logits: gives the [V] float32 logits after a request's tokens.
        next_sample: describes how its next token is chosen.
        bound: how far rounding may move two logits against each other.
    """

    def __init__(
        self,
        next_logits: Callable[[Request], torch.Tensor],
        next_sample: Callable[[Request], SampleBatch],
        bound: float,
    ) -> None:
        self._next_logits = next_logits
        self._next_sample = next_sample
        self._bound = bound

    def look(self, request: Request, tokens: tuple[int, int]) -> tuple[float, bool]:
        """Look at two tokens that were chosen at the end of a request.

        Returns:
            The distance of their logits, penalties applied, and whether it is a near-tie.
        """
        batch = self._next_sample(request)
        logits = self._next_logits(request)
        tilted = torch.stack([logits, *(logits + tilt for tilt in self._tilts(logits, tokens))])
        chosen = {int(sample(row, batch).token_ids[0]) for row in tilted.split(1)}
        # The sampler has applied the penalties to what it was given.
        scores = tilted[0]
        return abs(float(scores[tokens[0]] - scores[tokens[1]])), set(tokens) <= chosen

    def _tilts(self, logits: torch.Tensor, tokens: tuple[int, int]) -> list[torch.Tensor]:
        """Changes of the logits as large as rounding: where they decide, it is a near-tie.

        A greedy row takes the larger logit, so each token is raised alone. A random row takes
        the token at which the sum of probabilities, in the order of ids, passes its noise: all
        the logits up to the lower token are moved against the rest.
        """
        step = torch.full_like(logits, -self._bound / 2)
        step[: min(tokens) + 1] = self._bound / 2
        alone = [torch.zeros_like(logits), torch.zeros_like(logits)]
        for token, tilt in zip(tokens, alone, strict=True):
            tilt[token] = self._bound
        return [step, -step, *alone]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Find the first position where two outputs differ, or where one alone ends."""
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


class Comparison:
    """Compares answers to the same rows.

    Args:
        rows: the rows.
        judge: looks at their first differing tokens.
        baseline: the answers that the others are held against.
    """

    def __init__(self, rows: JobRows, judge: Judge, baseline: dict[SampleKey, RowResult]) -> None:
        self._rows = rows
        self._judge = judge
        self._baseline = baseline

    def findings(self, answers: dict[SampleKey, RowResult]) -> dict[SampleKey, Finding]:
        """Compare all answers."""
        # A row that failed has one answer, whatever the number of its samples.
        return {
            key: self._compare(expected, answers.get(key) or answers[key[0], 0])
            for key, expected in self._baseline.items()
        }

    def _compare(self, expected: RowResult, other: RowResult) -> Finding:
        if expected.error_type or other.error_type:
            if expected.error_type == other.error_type:
                return Finding(Verdict.EQUAL)
            words = f"{other.error_message or 'ok'}, baseline {expected.error_message or 'ok'}"
            return Finding(Verdict.DIFFERENT, 0, words)
        ours, theirs = other.output_token_ids or (), expected.output_token_ids or ()
        position = first_difference(ours, theirs)
        if position is None:
            return Finding(Verdict.EQUAL)
        if position == len(ours):
            words = f"ends ({other.finish_reason}), baseline goes on"
            return Finding(Verdict.DIFFERENT, position, words)
        if position == len(theirs):
            words = f"goes on, baseline ends ({expected.finish_reason})"
            return Finding(Verdict.DIFFERENT, position, words)
        return self._judged(expected, position, (ours[position], theirs[position]))

    def _judged(self, expected: RowResult, position: int, tokens: tuple[int, int]) -> Finding:
        gap, is_near = self._judge.look(self._rows.request_before(expected, position), tokens)
        ours, theirs = (_spell(token, self._rows.inputs.tokenizer) for token in tokens)
        words = f"{ours}, baseline {theirs}; logits {gap:.1e} apart"
        return Finding(Verdict.NEAR_TIE if is_near else Verdict.DIFFERENT, position, words)


def _spell(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token)
    return f"{token} {decode(tokenizer, [token], skip_special_tokens=False)!r}"


def variants(config: Config, block_size: int | None) -> dict[str, Config]:
    """Name the configurations to compare, the baseline first.

    Args:
        config: the job.
        block_size: the other block size; None is twice the job's, or half of it where that
            would be too large.

    Raises:
        UsageError: the other block size makes no sense.
    """
    own = config.pool.block_size
    other = block_size or (2 * own if 2 * own <= _LARGEST_BLOCK else own // 2)
    baseline = replace(config, pool=replace(config.pool, prefix_caching=True))
    chosen = {
        f"cache on, blocks of {own}": baseline,
        "cache off": replace(config, pool=replace(config.pool, prefix_caching=False)),
        f"blocks of {other}": with_block_size(baseline, other),
    }
    for each in chosen.values():
        check(each)
    return chosen


def run_variants(rows: JobRows, chosen: dict[str, Config]) -> tuple[dict[str, Run], torch.dtype]:
    """Run the rows through each configuration over one loaded model, which is gone afterwards."""
    model = load_job_model(next(iter(chosen.values())))
    runs = {}
    for name, config in chosen.items():
        _say(f"running {rows.store.num_rows} rows: {name}")
        runs[name] = rows.run(config, model)
        # The next pool is sized from the memory that this one has given back.
        gc.collect()
        if model.model.device.type == "cuda":
            torch.cuda.empty_cache()
    return runs, model.model.dtype


def report(
    findings: dict[str, dict[SampleKey, Finding]],
    baseline: dict[SampleKey, RowResult],
    title: str,
) -> str:
    """Word the findings: a line for each row, then one for each difference."""
    names = list(findings)
    widths = [max(len(name), len("DIFFERENT at 00000")) for name in names]
    labels = {key: _label(key, baseline) for key in sorted(baseline)}
    first = max(map(len, labels.values()), default=0)
    heads = "  ".join(f"{name:<{width}}" for name, width in zip(names, widths, strict=True))
    lines = [f"baseline: {title}", f"{'row':<{first}}  tokens  {heads}".rstrip()]
    details = []
    for key, label in labels.items():
        row = [findings[name][key] for name in names]
        cells = "  ".join(f"{_cell(each):<{w}}" for each, w in zip(row, widths, strict=True))
        lines.append(f"{label:<{first}}  {_length(baseline[key]):>6}  {cells}".rstrip())
        details += [
            f"{label}, {name}, output token {each.position}: {each.words}: {each.verdict}"
            for name, each in zip(names, row, strict=True)
            if each.verdict is not Verdict.EQUAL
        ]
    return "\n".join([*lines, "", *details, *([""] if details else []), *_totals(findings)])


def _label(key: SampleKey, baseline: dict[SampleKey, RowResult]) -> str:
    sampled = f" sample {key[1]}" if (key[0], 1) in baseline else ""
    return f"{baseline[key].id}{sampled}"


def _length(answer: RowResult) -> str:
    return str(answer.error_type or len(answer.output_token_ids or ()))


def _cell(finding: Finding) -> str:
    at = "" if finding.position is None else f" at {finding.position}"
    return f"{finding.verdict}{at}"


def _totals(findings: dict[str, dict[SampleKey, Finding]]) -> list[str]:
    counted = {
        name: Counter(each.verdict for each in rows.values()) for name, rows in findings.items()
    }
    return [
        f"{name}: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
        for name, counts in counted.items()
    ]


def compare_job(
    arguments: Sequence[str], *, rows: int, block_size: int | None, reference: bool, attention: str
) -> bool:
    """Compare a job's first rows, print the report, and say whether no row is DIFFERENT.

    Raises:
        BatchgenError: as the command itself.
    """
    config = compose_job(arguments)
    chosen = variants(config, block_size)
    with open_rows(config, rows) as tokenised:
        runs, dtype = run_variants(tokenised, chosen)
        stock = StockModel(config, dtype, attention)
        answers = {name: run.answers for name, run in runs.items()}
        if reference:
            _say("running transformers' generate, row by row")
            answers["generate"] = stock.generate(tokenised.stream(config)[1])
        judge = Judge(stock.next_logits, stock.next_sample, NEAR_TIE[dtype])
        title = next(iter(chosen))
        baseline = answers.pop(title)
        comparison = Comparison(tokenised, judge, baseline)
        findings = {name: comparison.findings(each) for name, each in answers.items()}
        print(report(findings, baseline, title))
        for kind, count in runs[title].plan.row_errors.items():
            print(f"not compared: {count} rows with {kind}")
    name = str(dtype).removeprefix("torch.")
    print(f"near-tie: logits that differ by less than {NEAR_TIE[dtype]} decide ({name})")
    verdicts = {each.verdict for found in findings.values() for each in found.values()}
    return Verdict.DIFFERENT not in verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] key=value ...",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", type=positive, default=16, help="rows to compare (16)")
    parser.add_argument("--block-size", type=positive, help="the other block size")
    parser.add_argument("--reference", action="store_true", help="also transformers' generate")
    parser.add_argument(
        "--attention",
        choices=("eager", "sdpa"),
        default="eager",
        help="attention of the stock model (eager: right for every family)",
    )
    options, job = parser.parse_known_args(arguments)
    try:
        return 0 if compare_job(job, **vars(options)) else 1
    except BatchgenError as error:
        _say(f"compare_outputs: {error}")
        return error.exit_code


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

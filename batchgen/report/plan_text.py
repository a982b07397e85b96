"""A plan as text, from what ``_plan.json`` holds in ``mode=plan``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchgen.text import one_line

_BAR = 40
_GROUPS = 5
_MESSAGE_CHARS = 160


def plan_text(plan: Mapping[str, Any]) -> str:
    """Write lengths, groups, block sizes, memory, time, alternatives and failures."""
    sections = (
        _lengths(plan["lengths"]),
        _groups(plan),
        _repeated(plan),
        _block_sizes(plan),
        _memory(plan["memory"]),
        _time(plan["time"]),
        _alternatives(plan["alternatives"]),
        _field_orders(plan["field_orders"]),
        _failing(plan["failing"]),
        [f"note: {note}" for note in plan["notes"]],
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def seconds_text(low: float, high: float) -> str:
    """Write a range of time in the unit that fits its upper end."""
    for unit, seconds in (("h", 3600), ("min", 60)):
        if high >= 2 * seconds:
            return f"{low / seconds:.1f} to {high / seconds:.1f} {unit}"
    return f"{low:.0f} to {high:.0f} s" if high >= 10 else f"{low:.1f} to {high:.1f} s"


def tokens_text(low: int, high: int) -> str:
    """Write a range of tokens, a single number where it is one."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def time_text(time: Mapping[str, Any] | None) -> str:
    """Return how long the generate phase will take, or why that is not known."""
    if time is None:
        return (
            "no calibration yet: no stored run of this model on this machine is long enough; a "
            "run of a few hundred rows leaves its speed for the next plan"
        )
    if time["missing"] is None:
        return f"{seconds_text(time['low_s'], time['high_s'])} ({time['basis']})"
    part = "decode" if time["prefill_low_s"] is None else "prefill"
    what = {"prefill": "the prompts", "decode": "the outputs"}[part]
    known = seconds_text(time[f"{part}_low_s"], time[f"{part}_high_s"])
    return f"{known} for {what} ({time['basis']}); not known for {time['missing']}"


def memory_lines(memory: Mapping[str, Any] | None) -> list[str]:
    """Return what the pool holds and what the job would like it to hold."""
    if memory is None:
        return ["the pool is known when the model is loaded; name pool.num_blocks to plan with it"]
    at_once = memory["rows_at_once_unshared"]
    return [
        f"pool: {memory['num_blocks']:,} blocks of {memory['block_size']} tokens, "
        f"{_bytes(memory['pool_bytes'])} at {memory['kv_bytes_per_token']:,} bytes a token",
        f"rows at once: {memory['rows_at_once']:,} with prefixes held once; with nothing shared "
        f"{at_once['p50']:,} of half the rows' length, {at_once['p95']:,} at the 95th percentile",
        f"for {memory['rows_wanted']:,} rows at once: {memory['blocks_wanted']:,} blocks, "
        f"{_bytes(memory['bytes_wanted'])}; every prompt of the job at once: "
        f"{_bytes(memory['bytes_of_all_prefixes'])}",
    ]


def failing_text(failing: Mapping[str, Any]) -> str:
    """Return how many rows of a kind fail, with an example."""
    first = failing["examples"][0]
    message = one_line(first["message"])
    if len(message) > _MESSAGE_CHARS:
        message = f"{message[:_MESSAGE_CHARS]}..."
    rows = ", ".join(str(each["row_index"]) for each in failing["examples"])
    more = ", ..." if failing["rows"] > len(failing["examples"]) else ""
    return f"{failing['rows']:,} {failing['error_type']} (rows {rows}{more}): {message}"


def bins(lengths: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield each bin's least value, its greatest value, and its count."""
    edges, counts = lengths["edges"], lengths["counts"]
    for at, count in enumerate(counts):
        yield edges[at], edges[at + 1] - 1, count


def remedy_text(remedy: Mapping[str, Any] | None) -> str:
    """Return what would put a shared prefix on a block's edge."""
    if remedy is None:
        return "ends on a block's edge"
    edit = f"{remedy['shorten_by']} tokens less or {remedy['lengthen_by']} more of shared text"
    sizes = " or ".join(map(str, remedy["block_sizes"]))
    return f"none with pool.block_size={sizes}, or {edit}" if sizes else f"none with {edit}"


def _lengths(lengths: Mapping[str, Any]) -> Iterator[str]:
    rows = list(bins(lengths))
    if not rows:
        return
    most = max(count for _, _, count in rows)
    width = max(len(f"{low:,}-{high:,}") for low, high, _ in rows)
    yield "prompt tokens of the requests"
    for low, high, count in rows:
        # What is there is seen, however little it is.
        bar = "#" * (-(-_BAR * count // most))
        yield f"  {f'{low:,}-{high:,}':>{width}}  {count:>9,}  {bar}".rstrip()


def _groups(plan: Mapping[str, Any]) -> Iterator[str]:
    for group in plan["groups"][:_GROUPS]:
        loss = ""
        if group["remainder"]:
            loss = f"; {group['tokens_lost']:,} lost to blocks, {remedy_text(group['remedy'])}"
        yield (
            f"{group['rows']:,} requests share {group['tokens']:,} tokens "
            f"({group['tokens']:,} = {group['tokens'] // plan['block_size']:,} blocks + "
            f"{group['remainder']}), saves {group['tokens_saved']:,}{loss}"
        )
        if group["text"] is not None:
            yield f"    {one_line(group['text'])}"


def _repeated(plan: Mapping[str, Any]) -> Iterator[str]:
    if not plan["repeated"]:
        return
    yield f"rows that repeat another and take its result: {plan['duplicates']:,}; most often"
    for row in plan["repeated"]:
        text = "" if row["text"] is None else f": {one_line(row['text'])}"
        yield f"  row {row['row_index']}, repeated by {row['copies']:,}{text}"


def _block_sizes(plan: Mapping[str, Any]) -> Iterator[str]:
    yield "where whole blocks alone are shared (copies behind the last block make up for it)"
    for cost in plan["block_sizes"]:
        own = "  <- pool.block_size" if cost["block_size"] == plan["block_size"] else ""
        yield (
            f"  block_size {cost['block_size']:>3}: {cost['prefill_tokens']:>13,} tokens of "
            f"prefill, {cost['tokens_lost']:,} of them lost to remainders{own}"
        )


def _memory(memory: Mapping[str, Any] | None) -> list[str]:
    return memory_lines(memory)


def _time(time: Mapping[str, Any] | None) -> list[str]:
    return [f"time to generate: {time_text(time)}"]


def _alternatives(alternatives: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "prefill tokens of alternatives"
    width = max(len(each["change"]) for each in alternatives)
    for each in alternatives:
        tokens = tokens_text(each["prefill_tokens_low"], each["prefill_tokens_high"])
        seconds = ""
        if each["prefill_s_low"] is not None:
            seconds = f"  {seconds_text(each['prefill_s_low'], each['prefill_s_high'])}"
        yield f"  {each['change']:{width}}  {tokens}{seconds}"


def _field_orders(costs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if costs:
        yield "share of prompt tokens that hit, by the order of the fields (it changes the prompts)"
    for cost in costs:
        yield (
            f"  prompt.field_order={cost['field_order']:5}  {cost['hit_share']:6.1%} of "
            f"{cost['request_tokens']:,}"
        )


def _failing(failing: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if failing:
        yield "rows that will fail"
    for each in failing:
        yield f"  {failing_text(each)}"


def _bytes(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.1f} {unit}"

"""Why the hit rate is what it is, and what would raise it."""

from dataclasses import dataclass

# Below this share of the shareable tokens a loss is not worth a line.
_NOTEWORTHY = 0.01
_CAUSES = ("prefix_caching_off", "block_borders", "order", "eviction", "same_step")
# Preemptions for each request from which on they are called frequent.
_FREQUENT = 0.05


@dataclass(frozen=True, slots=True)
class HitFigures:
    """Prompt tokens of the run's requests, by what became of them.

    Attributes:
        request_tokens: prompt tokens of all requests that were started.
        shareable_tokens: of them, those that sharing by the token leaves out of the floor.
        shared_tokens: those that were not computed.
        uncopied_tokens: shared with a part of a block that could not be held for a copy.
        evicted_tokens: of cached blocks that were given up although a later row needed them.
    """

    request_tokens: int
    shareable_tokens: int
    shared_tokens: int
    uncopied_tokens: int
    evicted_tokens: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What preemptions said about the pool's size.

    Attributes:
        num_blocks: blocks of the pool.
        peak_demand: blocks that running and preempted requests wanted at once, at most.
        peak_running: most requests at once.
        preemptions: times a request made room.
        requests: requests of the run.
    """

    num_blocks: int
    peak_demand: int
    peak_running: int
    preemptions: int
    requests: int


def lost_tokens(figures: HitFigures, *, order: str, prefix_caching: bool) -> dict[str, int]:
    """Split what could have been shared and was not, by cause.

    Returns:
        ``prefix_caching_off``, ``block_borders``, ``order``, ``eviction`` and ``same_step``.
        Another order than by prefix keeps prefixes apart for longer than the pool can hold
        them, so it is to blame for the rest. In prefix order what was evicted is, and beyond
        it rows that begin in one step: what lies behind their last whole shared block is
        not there to be copied yet.
    """
    lost = max(0, figures.shareable_tokens - figures.shared_tokens)
    causes = dict.fromkeys(_CAUSES, 0)
    if not prefix_caching:
        return causes | {"prefix_caching_off": lost}
    causes["block_borders"] = min(lost, figures.uncopied_tokens)
    rest = lost - causes["block_borders"]
    if order != "prefix":
        return causes | {"order": rest}
    evicted = min(rest, figures.evicted_tokens)
    return causes | {"eviction": evicted, "same_step": rest - evicted}


def explain(
    figures: HitFigures, pool: PoolFigures, *, order: str, prefix_caching: bool
) -> list[str]:
    """Return in a few lines what was shared, what was lost and what to change."""
    total = max(1, figures.request_tokens)
    lines = [
        f"shared {figures.shared_tokens:,} of {figures.shareable_tokens:,} shareable prompt "
        f"tokens ({figures.shared_tokens / total:.1%} of {figures.request_tokens:,})"
    ]
    causes = lost_tokens(figures, order=order, prefix_caching=prefix_caching)
    advice = {
        "prefix_caching_off": "set pool.prefix_caching=true",
        "block_borders": "the pool had no block left to copy from; raise pool.num_blocks",
        "order": f"schedule.order={order} keeps rows with one prefix apart; use "
        f"schedule.order=prefix or raise pool.num_blocks",
        "eviction": "the pool is too small for the rows in flight; raise pool.num_blocks or "
        "lower engine.max_num_seqs",
        "same_step": "rows that begin in one step share whole blocks only; a smaller "
        "pool.block_size leaves less behind them",
    }
    lines += [
        f"lost {tokens:,} tokens to {cause.replace('_', ' ')}: {advice[cause]}"
        for cause, tokens in causes.items()
        if tokens > _NOTEWORTHY * max(1, figures.shareable_tokens)
    ]
    return lines + _preemptions(pool)


def explain_part(figures: HitFigures, pool: PoolFigures) -> list[str]:
    """Return what was shared by the requests that a run began, where it did not begin all."""
    if not figures.request_tokens:
        return ["this run began no request, so there was nothing to share"]
    total = figures.request_tokens
    shared = (
        f"shared {figures.shared_tokens:,} of the {figures.request_tokens:,} prompt tokens "
        f"({figures.shared_tokens / total:.1%}) of the requests that this run began"
    )
    return [shared, *_preemptions(pool)]


def _preemptions(pool: PoolFigures) -> list[str]:
    if pool.preemptions <= _FREQUENT * max(1, pool.requests):
        return []
    fewer = max(1, pool.peak_running * pool.num_blocks // max(1, pool.peak_demand))
    return [
        f"{pool.preemptions} preemptions for {pool.requests} requests: pool.num_blocks="
        f"{pool.peak_demand} or engine.max_num_seqs={fewer} would avoid them"
    ]

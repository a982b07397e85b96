"""The engine driven at random over tiny pools, and all that must hold after each step.

The model is brute force: it keeps for every slot the token prefix that its KV stands for
(:class:`tests.support.fake_model.FakeExecutor`), and knows from the prompt alone what a request
must generate.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any
from zlib import crc32

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.core import EngineCore, FinishedOutput
from batchgen.engine.invariants import InvariantChecker
from batchgen.engine.preemption import PreemptionCosts, PreemptionPolicy
from batchgen.engine.prefix_index import Node
from batchgen.engine.request import FinishReason, Request, Status
from batchgen.errors import RowError, RowErrorType
from batchgen.sampling import SamplingParams
from tests.support.drive import make_scheduler
from tests.support.fake_model import FakeExecutor
from tests.support.invariants import check_invariants

# Few tokens, so that prompts share prefixes and outputs run into prompts of other rows.
TOKENS = 3
EOS = 2
STEMS = ([0] * 10, [0, 1] * 5)
# A request that gets no further than this many steps at the end is stuck.
_PATIENCE = 3_000


@dataclass(frozen=True)
class Setup:
    """One engine: sizes, policies, costs, and the prompts whose order it knows ahead.

    ``over_admits`` keeps nothing free at admission, so that rows have to make room often
    (a switch of tokasaurus' tests): admission is thrift, never safety.
    """

    block_size: int
    num_blocks: int
    swap_blocks: int
    max_num_seqs: int
    budget: int
    admission: AdmissionPolicy
    over_admits: bool
    preemption: PreemptionPolicy
    swap_s_per_block: float
    prefix_caching: bool
    ahead: bool
    short_of_memory: float
    window: int | None
    planned: tuple[tuple[int, ...], ...] | None


def random_prompt(rng: Random) -> list[int]:
    """A part of a stem and a tail of its own."""
    stem = rng.choice(STEMS)[: rng.randint(0, 10)]
    return stem + [rng.randrange(TOKENS) for _ in range(rng.randint(not stem, 4))]


def fitting_window(window: int | None, budget: int, block_size: int, num_blocks: int) -> int | None:
    """The window, if the pool holds what one row can see and compute at once."""
    most = -(-((window or 0) + budget) // block_size) + 1
    return window if most <= num_blocks else None


def random_setup(rng: Random) -> Setup:
    """A pool of a few blocks, all policies equally likely."""
    planned = tuple(tuple(random_prompt(rng)) for _ in range(40))
    block_size = rng.randint(1, 4)
    return Setup(
        block_size=block_size,
        num_blocks=rng.randint(12, 40) // block_size,
        swap_blocks=rng.choice((0, 3, 8, 16)),
        max_num_seqs=rng.choice((1, 3, 8, 8)),
        budget=rng.choice((1, 4, 10, 40)),
        admission=rng.choice(list(AdmissionPolicy)),
        over_admits=rng.random() < 0.5,
        preemption=rng.choice(list(PreemptionPolicy)),
        swap_s_per_block=rng.choice((0.0, 0.3, 9.0)),
        prefix_caching=rng.random() < 0.9,
        ahead=rng.random() < 0.5,
        short_of_memory=rng.choice((0.0, 0.0, 0.1)),
        window=rng.choice((None, None, None, 2, 6)),
        planned=rng.choice((None, planned)),
    )


def _says(history: Sequence[int]) -> int | None:
    """The model: mostly goes on, at times ends, now and then has no numbers to give."""
    code = crc32(bytes(history))
    if code % 97 == 0:
        return None
    return EOS if code % 29 == 0 else code // 97 % (TOKENS - 1)


def expected_output(prompt: Sequence[int], max_tokens: int) -> tuple[list[int], FinishReason]:
    """What the prompt alone says that a request generates, and how it ends."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = _says(tokens)
        if token is None:
            return tokens[len(prompt) :], FinishReason.ERROR
        tokens.append(token)
        if token == EOS:
            return tokens[len(prompt) :], FinishReason.STOP
    return tokens[len(prompt) :], FinishReason.LENGTH


class _BruteForceFuture:
    """The next arrival with the prefix, by looking at all of them."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts

    def next_use(self, example: int, num_tokens: int, after: int) -> int | None:
        prefix = self._prompts[example][:num_tokens]
        if len(prefix) < num_tokens:
            return None
        later = range(after + 1, len(self._prompts))
        return next((i for i in later if self._prompts[i][:num_tokens] == prefix), None)


class EngineModel:
    """An engine under test and the truth beside it.

    Attributes:
        live: requests that have not ended.
        seen: how often what happened, over all steps.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.live: dict[int, Request] = {}
        self.seen: Counter[str] = Counter()
        self._known = setup.planned is not None
        self._prompts = [list(prompt) for prompt in setup.planned or ()]
        self._aborts: dict[int, RowError] = {}
        self._max_tokens: dict[int, int] = {}
        self.scheduler = make_scheduler(
            setup.num_blocks,
            setup.block_size,
            swap_blocks=setup.swap_blocks,
            prefix_caching=setup.prefix_caching,
            window=setup.window,
            max_num_seqs=setup.max_num_seqs,
            budget=setup.budget,
            eos=(EOS,),
            admission=setup.admission,
            preemption=setup.preemption,
            costs=PreemptionCosts(swap_s_per_block=setup.swap_s_per_block),
            future=_BruteForceFuture(self._prompts) if self._known else None,
        )
        if setup.over_admits:
            self.scheduler._admission.growth = lambda request, held: 0
            self.scheduler._admission.growth_of_all = lambda running: 0
        self._ledger = InvariantChecker(self.scheduler)
        self._rng = Random(repr(setup))
        self._fake = FakeExecutor(
            setup.block_size, choose=_says, window=setup.window, is_short=self._is_short
        )
        self._step = -1
        ticks = count()
        self._engine = EngineCore(
            self.scheduler, self, overlap=setup.ahead, clock=lambda: float(next(ticks))
        )
        self._tables_before: dict[int, list[int]] = {}

    # -- what may happen ----------------------------------------------------------------

    def submit(self, prompt: Sequence[int], max_tokens: int, priority: int) -> None:
        """Add a request; where the future is known, its prompt is the planned one."""
        number = len(self._max_tokens)
        if number == len(self._prompts):
            self._prompts.append(list(prompt))
        self._max_tokens[number] = max_tokens
        request = Request.create(
            number,
            self._prompts[number],
            SamplingParams(max_tokens=max_tokens),
            max_model_len=10_000,
            priority=priority,
        )
        self.live[number] = request
        self.scheduler.add(request)
        self._settle()

    def abort(self, which: int) -> None:
        """End one of the live requests: waiting, running and swapped ones are as likely."""
        statuses = sorted({request.status for request in self.live.values()})
        status, which = statuses[which % len(statuses)], which // len(statuses)
        numbers = [n for n, request in self.live.items() if request.status is status]
        number = numbers[which % len(numbers)]
        request = self.live[number]
        self.seen[f"aborts {request.status}"] += 1
        self._aborts[number] = RowError(RowErrorType.ENGINE_ERROR, "aborted")
        self.scheduler.fail(request, self._aborts[number])
        self._settle()
        assert number not in self.live

    def step(self) -> None:
        """Run one step of the engine."""
        self._tables_before = {
            number: list(request.block_table) for number, request in self.live.items()
        }
        self.seen["steps"] += self._engine.step()
        self._settle()

    def drain(self) -> None:
        """Run to the end; nothing may be left anywhere."""
        for _ in range(_PATIENCE):
            if not self.live:
                break
            self.step()
        assert not self.live, f"stuck: {self.scheduler.describe()}"
        pool, swap = self.scheduler.blocks.pool, self.scheduler.swap_space
        assert pool.num_owned == 0
        assert pool.num_free + pool.num_cached == pool.num_blocks
        assert swap.num_free == swap.num_blocks
        self._ledger.check_end()
        self._count_events()

    # -- the executor between scheduler and model ----------------------------------------

    def execute(self, plan: Any) -> FinishedOutput:
        """Check the plan, run it over the slots, check the slots.

        With overlap the tokens before it are not processed yet: the slots are checked then.
        """
        self.seen["rows that run a placeholder"] += int((plan.token_ids < 0).sum())
        is_part = plan.step == self._step
        output = self._run(plan)
        if not (is_part or self.setup.ahead):
            self.check_slots()
        return output

    def _is_short(self, plan: Any) -> bool:
        """Whether the device finds no memory for a pass; for a single token it always does."""
        short = plan.num_tokens > 1 and self._rng.random() < self.setup.short_of_memory
        self.seen["passes out of memory"] += short
        return short

    def _run(self, plan: Any) -> FinishedOutput:
        if plan.step == self._step:
            # A part of a plan that was checked as a whole.
            assert not len(plan.copies) + len(plan.swap_out) + len(plan.swap_in)
            return self._fake.execute(plan)
        self._step = plan.step
        check_invariants(self.scheduler, plan)
        self._ledger.check_plan(plan)
        self._check_writes(plan)
        self._check_copies(plan)
        if not len(plan.swap_out):
            self._fake.forget(self.scheduler.blocks.pool.free_blocks())
        output = self._fake.execute(plan)
        self._fake.plans.clear()
        self.seen["copies"] += len(plan.copies)
        self.seen["swap-ins"] += len(plan.swap_in)
        released = sum(request.num_released > 0 for request in self.scheduler.running)
        self.seen["rows that a window has left"] += released
        return output

    # -- what must hold -------------------------------------------------------------------

    def _settle(self) -> None:
        """Take those that ended, check them and the state that they left."""
        for request in self.scheduler.take_finished():
            assert self.live.pop(request.request_id, None) is request, "it ended twice"
            self._check_ended(request)
        assert self.scheduler.num_unfinished == len(self.live)
        check_invariants(self.scheduler)
        self.check_slots()

    def _check_ended(self, request: Request) -> None:
        account = request.account
        assert request.status is Status.FINISHED
        assert account.hit_blocks + account.new_blocks == account.freed_blocks
        assert not request.block_table
        assert request.swapped is None
        number, capacity = request.request_id, self.setup.num_blocks * self.setup.block_size
        if self.setup.window is not None:
            # Its window and a step always fit: no row is too long.
            capacity = 1_000_000
            assert account.peak_blocks <= self._most_blocks_of_a_window()
        prompt, found = self._prompts[number], request.output_token_ids
        tokens, reason = expected_output(prompt, self._max_tokens[number])
        if number in self._aborts:
            assert request.error is self._aborts[number]
            assert found == tokens[: len(found)]
        elif len(prompt) >= capacity:
            assert request.error is not None
            assert request.error.type is RowErrorType.EXCEEDS_KV_CAPACITY
        elif len(prompt) + len(tokens) > capacity + 1 or (
            len(prompt) + len(tokens) == capacity + 1 and reason is FinishReason.ERROR
        ):
            # It fills the pool alone: the last token needs no slot.
            assert found == tokens[: capacity + 1 - len(prompt)]
            assert request.finish_reason is FinishReason.LENGTH
            self.seen["pool filled alone"] += 1
        else:
            assert (found, request.finish_reason) == (tokens, reason)
            self.seen["ended " + reason] += 1

    def _most_blocks_of_a_window(self) -> int:
        """What a row sees and computes in a step, beginning anywhere in a block."""
        return -(-(self.setup.window + self.setup.budget) // self.setup.block_size) + 1

    def _check_writes(self, plan: Any) -> None:
        """Only the one request that held a block before the step may write into it."""
        size = self.setup.block_size
        holders: dict[int, set[int]] = {}
        for number, table in self._tables_before.items():
            for block in table:
                holders.setdefault(block, set()).add(number)
        writers = self._requests_of(plan)
        starts = plan.query_starts.tolist()
        for row, request in enumerate(writers):
            for slot in plan.slots[starts[row] : starts[row + 1]].tolist():
                others = holders.get(slot // size, set()) - {request.request_id}
                kept = [n for n in others if slot // size in self._table(n)]
                assert not kept, f"{request.request_id} writes into a block of {kept}"

    def _requests_of(self, plan: Any) -> list[Request]:
        """Find each row's request by its block table and the tokens in it."""
        found = []
        for row in range(plan.num_rows):
            table, length = plan.block_tables[row].tolist(), plan.context_lens[row]
            running = list(self.scheduler.running)
            rows = [
                r for r in running
                if [max(0, block) for block in r.block_table] == table[: len(r.block_table)]
            ]  # fmt: skip
            found.append(next(request for request in rows if request.num_computed == length))
        return found

    def _table(self, number: int) -> list[int]:
        return self.live[number].block_table

    def _check_copies(self, plan: Any) -> None:
        """A copy's source is held until the step is over, and nobody writes into it."""
        size = self.setup.block_size
        written = {slot // size for slot in plan.slots.tolist()}
        targets = {*plan.copies[:, 1].tolist(), *plan.swap_in[:, 1].tolist()}
        for source in plan.copies[:, 0].tolist():
            assert self.scheduler.blocks.pool.ref_counts[source] > 0
            assert source not in targets
            # Its owner may go on, behind the part that is copied.
            firsts = [slot for slot in plan.slots.tolist() if slot // size == source]
            assert not firsts or firsts[0] % size > 0
        free = set(self.scheduler.blocks.pool.free_blocks())
        assert not free & targets
        assert not free & written

    def check_slots(self) -> None:
        """Every slot holds what the table, the index or the swap space names it for."""
        size = self.setup.block_size
        for node, prefix in self._named_prefixes():
            self._check_block(node.block, prefix, len(node.key))
        for request in list(self.scheduler.running):
            tokens = tuple(request.token_ids[: request.num_computed])
            for column, block in enumerate(request.block_table):
                if block < 0:
                    continue
                stored = tokens[: (column + 1) * size]
                self._check_block(block, stored, len(stored) - column * size)
        for request in self.scheduler.swapped:
            self._check_swapped(request)

    def _named_prefixes(self) -> Iterator[tuple[Node, tuple[int, ...]]]:
        stack = [(self.scheduler.blocks.index.root, ())]
        while stack:
            node, prefix = stack.pop()
            for child in node.children.values():
                stack.append((child, prefix + child.key))
                yield stack[-1]

    def _check_block(self, block: int, tokens: tuple[int, ...], length: int) -> None:
        """The block's first slots hold the last ``length`` tokens' KV."""
        start = len(tokens) - length
        for offset in range(length):
            found = self._fake.slots.get(block * self.setup.block_size + offset)
            assert found == tokens[: start + offset + 1], (
                f"slot {offset} of block {block} holds {found}, not {tokens}"
            )

    def _check_swapped(self, request: Request) -> None:
        swapped, size = request.swapped, self.setup.block_size
        tokens = tuple(request.token_ids[: swapped.num_computed])
        for column, cpu in enumerate(swapped.blocks, start=swapped.first):
            for at in range(column * size, min((column + 1) * size, len(tokens))):
                assert self._fake.swap[cpu][at - column * size] == tokens[: at + 1]

    def _count_events(self) -> None:
        counters, pool = self.scheduler.counters, self.scheduler.blocks.pool
        self.seen["preemptions"] += counters.preemptions
        self.seen["swap-outs"] += counters.swapped_out_blocks
        self.seen["recomputed tokens"] += counters.recomputed_tokens
        self.seen["cached tokens"] += counters.cached_tokens
        kind = "known" if self._known else "unknown"
        self.seen[f"evictions, future {kind}"] += pool.evicted_needed + pool.evicted_unneeded


def drive(rng: Random, steps: int, **given: Any) -> Counter[str]:
    """Drive engines with a seeded mix of everything until ``steps`` steps have run."""
    seen: Counter[str] = Counter()
    while seen["steps"] < steps:
        setup = replace(random_setup(rng), **given)
        fits = fitting_window(setup.window, setup.budget, setup.block_size, setup.num_blocks)
        model = EngineModel(replace(setup, window=fits))
        for _ in range(60):
            _act(model, rng)
        model.drain()
        seen += model.seen
    return seen


def _act(model: EngineModel, rng: Random) -> None:
    kind = rng.random()
    if kind < 0.4 and len(model.live) < 14:
        prompt, forks = random_prompt(rng), rng.choice((1, 1, 3))
        for _ in range(forks):
            model.submit(prompt, rng.randint(1, 24), rng.randint(0, 2))
    elif kind < 0.45 and model.live:
        model.abort(rng.randrange(99))
    else:
        for _ in range(rng.randint(1, 4)):
            model.step()

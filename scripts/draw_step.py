"""Draw the engine at one real step: block tables, pool, free list, prefix tree, memory curve.

    python scripts/draw_step.py --to docs/step.svg
    python scripts/draw_step.py --to out/step.svg --step 20 pool.num_blocks=40 input.limit=16

A few reviews run through the model of the demo in a pool so small that all of it can be drawn.
Everything in the drawing is read from the running scheduler; the words in the tree are the
tokens of its blocks. Without `--step` it is the first step in which rows run, wait and have
ended, and blocks are shared, cached and free. Keys after the options override the small job's.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fetch_model import fetch_model
from job_rows import compose_job, open_rows
from prepare_data import prepare_data

from batchgen.cli.escapes import in_quotes
from batchgen.engine.prefix_index import Node
from batchgen.engine.scheduler import Scheduler
from batchgen.job.load import build_engine, load_job_model
from batchgen.job.stream import RequestStream
from batchgen.prompts.tokenizer import Tokenizer

_TEMPLATE = "Is this review of a product good or bad?\\nReview: {{ text }}\\nAnswer:"
_KEYS = (
    f'prompt.template="{_TEMPLATE}"',
    "prompt.format=plain",
    "input.limit=12",
    "sampling.max_tokens=8",
    "sampling.ignore_eos=true",
    "pool.block_size=8",
    "pool.num_blocks=24",
    "pool.swap_blocks=0",
    "engine.max_num_seqs=4",
    "engine.max_num_batched_tokens=48",
)
_WIDTH = 900
_BOX, _LINE = 34, 20
_STYLE = """
  svg { font: 13px system-ui, sans-serif; } text { fill: #1b2430; } .soft { fill: #566273; }
  .head { font-weight: 600; } .mono { font: 12px ui-monospace, Menlo, Consolas, monospace; }
  .paper { fill: #ffffff; } .shared { fill: #1f5fa8; } .own { fill: #a9cbee; }
  .cached { fill: #eab676; } .free { fill: none; } .box { stroke: #566273; fill: none; }
  .on { fill: #ffffff; } .off { fill: #1b2430; } .rule { stroke: #d8dee6; }
  .mark { stroke: #b3261e; stroke-width: 2; } .room { fill: #e3e8ee; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e7ebf1; } .soft { fill: #a6b1bf; } .paper { fill: #13171c; }
    .shared { fill: #74aef2; } .own { fill: #2c4a6b; } .cached { fill: #8a5a22; }
    .on { fill: #13171c; } .off { fill: #e7ebf1; } .box { stroke: #a6b1bf; }
    .rule { stroke: #353f4b; } .mark { stroke: #ff958c; } .room { fill: #2a323c; }
  }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A running row's block table.

    Attributes:
        name: the row's.
        blocks: of the pool, in order.
        tokens: known so far, prompt and output.
        prompt_tokens: of them, the prompt's.
    """

    name: str
    blocks: list[int]
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A node of the prefix tree.

    Attributes:
        depth: below the root, from 0.
        block: its block.
        words: its tokens as text.
    """

    depth: int
    block: int
    words: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler after a step.

    Attributes:
        step: its number, from 1.
        tables: of the running rows.
        waiting, ended: rows that have not started, rows that are done.
        ref_counts: by block.
        free: the free list, in the order in which blocks are taken.
        cached: blocks that nobody holds and that can be hit.
        tree: the prefix tree, parents before children.
    """

    step: int
    tables: list[Table]
    waiting: int
    ended: int
    ref_counts: list[int]
    free: list[int]
    cached: list[int]
    tree: list[TreeLine]

    @property
    def owned(self) -> int:
        """Blocks in at least one table."""
        return sum(count > 0 for count in self.ref_counts)

    @property
    def shows_everything(self) -> bool:
        """Whether every kind of row and block is there."""
        kinds = (self.waiting, self.ended, self.free, self.cached, len(self.tables) > 1)
        return all(kinds) and max(self.ref_counts) > 1


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole run.

    Attributes:
        shots: the scheduler after every step.
        block_size: tokens in a block.
    """

    shots: list[Snapshot]
    block_size: int


def run_trace(keys: Sequence[str]) -> Trace:
    """Run the small job and look at the scheduler after every step."""
    reviews = in_quotes(str(prepare_data() / "reviews.parquet"))
    model = in_quotes(str(fetch_model()))
    config = compose_job([f"input.path={reviews}", f"model.path={model}", *_KEYS, *keys])
    shots: list[Snapshot] = []
    with open_rows(config) as rows:
        plan, stream = rows.stream(config)
        model, ends = load_job_model(config), rows.inputs.eos_token_ids
        engine = build_engine(config, model, eos_token_ids=ends, future=plan.future).engine
        for _ in engine.run(stream.requests()):
            if engine.stats.steps > len(shots):
                number, tokenizer = len(shots) + 1, rows.inputs.tokenizer
                shots.append(_look(engine.scheduler, stream, plan.requests, number, tokenizer))
    return Trace(shots, config.pool.block_size)


def choose(shots: Sequence[Snapshot], step: int | None) -> Snapshot:
    """Return the step with a number, or one that shows as much as possible.

    Raises:
        SystemExit: there is no such step.
    """
    if step is None:
        whole = [shot for shot in shots if shot.shows_everything]
        return max(whole or shots, key=lambda shot: (len(shot.tables), -shot.step))
    if not 1 <= step <= len(shots):
        raise SystemExit(f"--step {step}: the run has the steps 1 to {len(shots)}")
    return shots[step - 1]


def _look(
    scheduler: Scheduler, stream: RequestStream, requests: int, step: int, tokenizer: Tokenizer
) -> Snapshot:
    pool, counters = scheduler.blocks.pool, scheduler.counters
    tables = [
        Table(
            stream.name_of(request).removesuffix(", sample 0"),
            list(request.block_table),
            len(request.token_ids),
            request.num_prompt_tokens,
        )
        for request in scheduler.running
    ]
    return Snapshot(
        step=step,
        tables=tables,
        waiting=requests - counters.started_requests,
        ended=counters.finished_requests,
        ref_counts=list(pool.ref_counts),
        free=pool.free_blocks(),
        cached=[block for block in range(pool.num_blocks) if pool.is_cached(block)],
        tree=list(_tree(scheduler.blocks.index.root, tokenizer)),
    )


def _tree(node: Node, tokenizer: Tokenizer) -> Iterator[TreeLine]:
    for key in node.ordered:
        child = node.children[key]
        words = tokenizer.decode(list(child.key), skip_special_tokens=False)
        yield TreeLine(child.depth - 1, child.block, words)
        yield from _tree(child, tokenizer)


def draw(shots: Sequence[Snapshot], shown: Snapshot, block_size: int) -> str:
    """Return the drawing as SVG.

    Args:
        shots: of all steps, for the curve.
        shown: the one that is drawn.
        block_size: tokens in a block.
    """
    left = [*_tables(shown, block_size), *_pool(shown)]
    tree, tree_height = _tree_panel(shown)
    height = max(120 + 44 * len(shown.tables) + 260, 96 + tree_height)
    curve = _curve(shots, shown, height)
    title = (
        f"Step {shown.step} of {len(shots)}: {len(shown.tables)} rows run, {shown.waiting} wait, "
        f"{shown.ended} ended"
    )
    parts = [
        f'<rect class="paper" width="{_WIDTH}" height="{height + 196}"/>',
        _text(20, 30, title, "head"),
        *left,
        *tree,
        *curve,
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height + 196}" '
        f'role="img" aria-label="{escape(title)}: block tables, pool, free list, prefix tree and '
        f'the use of the pool over all steps"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _tables(shown: Snapshot, block_size: int) -> Iterator[str]:
    yield _text(20, 66, f"Block tables: a row's KV, {block_size} tokens a block", "head")
    for number, table in enumerate(shown.tables):
        y = 82 + 44 * number
        words = f"{table.name}: {table.prompt_tokens} + {table.tokens - table.prompt_tokens} tokens"
        yield _text(20, y + 10, words, "soft")
        for place, block in enumerate(table.blocks):
            # A leading entry that a window has left is no block any more.
            if block >= 0:
                yield from _block(20 + place * _BOX, y + 14, block, shown)


def _pool(shown: Snapshot) -> Iterator[str]:
    y = 106 + 44 * len(shown.tables)
    yield _text(20, y, "The pool: under each block its reference count", "head")
    for block, count in enumerate(shown.ref_counts):
        row, column = divmod(block, 12)
        x, top = 20 + column * _BOX, y + 12 + row * 46
        yield from _block(x, top, block, shown)
        yield _text(x + _BOX / 2, top + 36, str(count), "soft", "middle")
    y += 20 + 46 * -(-len(shown.ref_counts) // 12)
    legend = (
        ("shared", "owned by several rows"),
        ("own", "owned by one"),
        ("cached", "cached: no owner, can be hit"),
        ("free", "free"),
    )
    for place, (style, words) in enumerate(legend):
        x, top = 20 + place % 2 * 232, y + place // 2 * 22
        yield f'<rect class="{style}" x="{x}" y="{top}" width="14" height="14"/>'
        yield f'<rect class="box" x="{x}" y="{top}" width="14" height="14"/>'
        yield _text(x + 20, top + 12, words, "soft")
    y += 64
    yield _text(20, y, f"Free list, next first: {_listed(shown.free)}", "mono")
    yield _text(20, y + 20, f"Cached: {_listed(shown.cached)}", "mono")


def _listed(blocks: Sequence[int]) -> str:
    shown = " ".join(map(str, blocks[:14]))
    return f"{shown} ..." if len(blocks) > 14 else shown or "none"


def _block(x: float, y: float, block: int, shown: Snapshot) -> Iterator[str]:
    count = shown.ref_counts[block]
    cached = "cached" if block in shown.cached else "free"
    style = "shared" if count > 1 else "own" if count else cached
    box = f'x="{x}" y="{y}" width="{_BOX - 4}" height="22" rx="2"'
    yield f'<rect class="{style}" {box}/><rect class="box" {box}/>'
    ink = "on" if style == "shared" else "off"
    yield _text(x + (_BOX - 4) / 2, y + 15, str(block), ink, "middle")


def _tree_panel(shown: Snapshot) -> tuple[list[str], int]:
    x = 470
    parts = [_text(x, 66, "Prefix tree: a block under the one before it", "head")]
    # Where the last block of each depth stands: the next one below it hangs there.
    bottoms: dict[int, int] = {}
    for number, line in enumerate(shown.tree):
        y = 78 + number * (_LINE + 6)
        at = x + line.depth * 18
        if line.depth:
            top = bottoms[line.depth - 1]
            parts.append(f'<path class="box" d="M{at - 9} {top} V{y + 11} h9"/>')
        bottoms[line.depth] = y + 22
        parts += _block(at, y, line.block, shown)
        # What a line of the drawing holds.
        room = max(8, 50 - 3 * line.depth)
        words = line.words.replace("\n", "\\n")
        words = words if len(words) <= room else f"{words[: room - 1]}…"
        parts.append(_text(at + _BOX + 4, y + 15, words, "mono"))
    return parts, len(shown.tree) * (_LINE + 6)


def _curve(shots: Sequence[Snapshot], shown: Snapshot, top: int) -> Iterator[str]:
    """The pool over all steps, with a mark at the one that is drawn."""
    total = len(shown.ref_counts)
    base, height, width = top + 170, 120, _WIDTH - 90
    yield _text(20, top + 30, "The pool over the run, in blocks", "head")
    steps = len(shots)
    scale = width / max(1, steps - 1)

    def line(heights: Sequence[int]) -> list[str]:
        return [
            f"{60 + place * scale:.1f},{base - value / total * height:.1f}"
            for place, value in enumerate(heights)
        ]

    owned = [shot.owned for shot in shots]
    used = [shot.owned + len(shot.cached) for shot in shots]
    full = line([total] * steps)
    for style, above, below in (
        ("shared", line(owned), line([0] * steps)),
        ("cached", line(used), line(owned)),
        ("room", full, line(used)),
    ):
        yield f'<polygon class="{style}" points="{" ".join([*above, *below[::-1]])}"/>'
    x = 60 + (shown.step - 1) * scale
    yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{base - height - 6}" y2="{base}"/>'
    yield _text(x, base + 18, f"step {shown.step}", "", "middle")
    for value in (0, total):
        yield _text(52, base - value / total * height + 4, str(value), "soft", "end")
    yield _text(60, base + 18, "1", "soft")
    yield _text(60 + width, base + 18, str(steps), "soft", "end")
    yield _text(_WIDTH - 30, top + 30, "from below: owned, cached, free", "soft", "end")


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'xml:space="preserve">{escape(text)}</text>'
    )


def main() -> None:
    """Read the command line, run the job, draw the step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="the SVG file")
    parser.add_argument("--step", type=int, help="which step, from 1")
    parser.add_argument("keys", nargs="*", help="of the job, as for batchgen")
    options = parser.parse_args()
    trace = run_trace(options.keys)
    shown = choose(trace.shots, options.step)
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text(draw(trace.shots, shown, trace.block_size), encoding="utf-8")
    print(f"step {shown.step} of {len(trace.shots)} drawn in {options.to}")


if __name__ == "__main__":
    main()

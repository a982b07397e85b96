"""What a job writes, against transformers and against other readers of the files."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.cli import app
from batchgen.data.output.schema import output_schema
from tests.job.harness import Job

TEXTS = [
    "The quick brown fox",
    "The quick brown fox jumps over the lazy dog.",
    "The quick brown fox jumps over the story.",
    "A review of the movie: good acting, bad story",
    "A review of the movie: good acting, and a fine end.",
    "yes",
]
SHOTS = [{"text": "good story", "answer": "yes"}, {"text": "bad end", "answer": "no"}]


def chat_ids(tokenizer: Any, *turns: tuple[str, str]) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def from_prompt(job: Job, tokenizer: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    return [{"prompt": text} for text in TEXTS], [tokenizer(text)["input_ids"] for text in TEXTS]


def from_messages(job: Job, tokenizer: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    turns = [(("system", "brief"), ("user", text)) for text in TEXTS]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in each]}
        for each in turns
    ]
    return rows, [chat_ids(tokenizer, *each) for each in turns]


def from_token_ids(job: Job, tokenizer: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    prompts = [[5 + n, *range(30, 30 + 9 * n)] for n in range(6)]
    return [{"prompt_token_ids": ids} for ids in prompts], prompts


def with_template(job: Job, kind: str) -> list[dict[str, Any]]:
    shots = job.folder / "shots.jsonl"
    shots.write_text("".join(json.dumps(shot) + "\n" for shot in SHOTS))
    job.given |= {
        "prompt.template": '"Review: {{ text }}\\nAnswer:"',
        "prompt.system": '"Say yes or no."',
        "prompt.shots_file": str(shots),
        "prompt.format": kind,
    }
    return [{"text": text} for text in TEXTS]


def from_plain_template(job: Job, tokenizer: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    head = (
        "Say yes or no.\n\n"
        "Review: good story\nAnswer: yes\n\n"
        "Review: bad end\nAnswer: no\n\n"
    )  # fmt: skip
    prompts = [f"{head}Review: {text}\nAnswer:" for text in TEXTS]
    return with_template(job, "plain"), [tokenizer(text)["input_ids"] for text in prompts]


def from_chat_template(job: Job, tokenizer: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    turns = [("system", "Say yes or no.")]
    for shot in SHOTS:
        turns += [("user", f"Review: {shot['text']}\nAnswer:"), ("assistant", shot["answer"])]
    prompts = [[*turns, ("user", f"Review: {text}\nAnswer:")] for text in TEXTS]
    return with_template(job, "chat"), [chat_ids(tokenizer, *each) for each in prompts]


SOURCES = [from_prompt, from_messages, from_token_ids, from_plain_template, from_chat_template]


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_tokens_and_text_of_transformers_generate(
    job: Job, tokenizer: Any, generate: Callable[..., list[int]], source: Callable[..., Any]
) -> None:
    rows, prompts = source(job, tokenizer)
    job.write([{"id": f"r{n}", **row} for n, row in enumerate(rows)])
    assert job() == 0
    for row, prompt in zip(job.rows(), prompts, strict=True):
        expected = generate(prompt)
        assert row["output_token_ids"] == expected
        assert row["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert row["prompt_tokens"] == len(prompt)
        assert row["completion_tokens"] == len(expected)


def test_other_readers_join_the_output_to_the_input_with_every_digit_of_the_ids(job: Job) -> None:
    ids = [2**53 + 1, 2**53 + 2, -(2**63), 2**63 - 1, 0, 7]
    job.write(pa.table({"id": pa.array(ids, pa.int64()), "prompt": TEXTS}))
    assert job("output.rows_per_part=2") == 0
    names = {entry.name for entry in job.out.iterdir()} - {part.name for part in job.parts}
    assert names == {
        "_SUCCESS", "_manifest.json", "_metrics.jsonl", "_plan", "_plan.json", "_report.html",
        "_summary.json",
    }  # fmt: skip
    joined = duckdb.sql(
        f"SELECT i.id, i.prompt, o.row_index FROM read_parquet('{job.out}/*.parquet') o "
        f"JOIN read_parquet('{job.input}') i USING (id) ORDER BY o.row_index"
    ).fetchall()
    assert joined == [(*pair, n) for n, pair in enumerate(zip(ids, TEXTS, strict=True))]
    table = pq.read_table(job.out)
    assert len(table) == 6
    assert table.schema.equals(output_schema(pa.int64()))
    for part in job.parts:
        assert pq.read_schema(part).equals(output_schema(pa.int64()))


def test_an_account_closes_in_every_row_also_under_preemption(job: Job) -> None:
    job.write([{"prompt": f"{TEXTS[n % 5]} {n}"} for n in range(24)])
    assert job("pool.num_blocks=12", "pool.block_size=4", "sampling.max_tokens=16") == 0
    assert job.summary["preemptions"] > 0
    for row in job.rows():
        assert row["hit_blocks"] + row["new_blocks"] == row["freed_blocks"]
        assert row["prompt_blocks"] == math.ceil(row["prompt_tokens"] / 4)
        assert row["peak_blocks"] >= row["prompt_blocks"]


def test_the_command_as_it_is_typed_from_another_directory(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([{"id": "a", "prompt": TEXTS[0]}])
    monkeypatch.chdir(job.folder)
    paths = [f"model.path={job.given['model.path']}", "input.path=input.parquet", "output.dir=out"]
    assert app.main([*paths, "sampling.max_tokens=3", "pool.num_blocks=64"]) == 0
    assert job.rows("id, completion_tokens") == [{"id": "a", "completion_tokens": 3}]
    assert str(job.out) in job.json("_manifest.json")["config"]


# -- requests and rows ----------------------------------------------------------------


def test_greedy_rows_that_are_the_same_request_are_computed_once(job: Job) -> None:
    warm = json.dumps({"temperature": 1.0})
    seeded = json.dumps({"seed": 9})
    same = "The same words"
    rows = [
        (same, None),
        ("Others", None),
        (same, None),
        (same, warm),
        (same, warm),
        (same, seeded),
    ]
    job.write([{"id": n, "prompt": p, "sampling_params": s} for n, (p, s) in enumerate(rows)])
    assert job() == 0
    summary = job.summary
    assert (summary["rows"], summary["requests"], summary["duplicates"]) == (6, 4, 2)
    first, _, second, warm_1, warm_2, third = job.rows()
    account = ("prompt_blocks", "hit_blocks", "new_blocks", "freed_blocks", "peak_blocks")
    for copy in (second, third):
        assert copy["generated_text"] == first["generated_text"]
        assert copy["output_token_ids"] == first["output_token_ids"]
        assert copy["cached_tokens"] == copy["prompt_tokens"] == first["prompt_tokens"]
        assert [copy[name] for name in account] == [0] * 5
    assert first["new_blocks"] > 0
    # Noise is keyed by the id: the same prompt twice is two draws.
    assert warm_1["output_token_ids"] != warm_2["output_token_ids"]


def test_samples_differ_come_again_and_the_first_is_that_of_n_1(job: Job) -> None:
    job.write([{"id": n, "prompt": text} for n, text in enumerate(TEXTS[:4])])
    assert job("sampling.n=3", "sampling.temperature=1") == 0
    three = job.results()
    assert [row["sample_index"] for row in job.rows()] == [0, 1, 2] * 4
    for row in range(4):
        assert len({result[5] for result in three[3 * row : 3 * row + 3]}) == 3
    assert job("sampling.n=3", "sampling.temperature=1", "output.overwrite=true") == 0
    assert job.results() == three
    assert job("sampling.n=1", "sampling.temperature=1", "output.overwrite=true") == 0
    assert job.results() == three[::3]
    assert job("sampling.temperature=1", "sampling.seed=5", "output.overwrite=true") == 0
    assert job.results() != three[::3]


def test_greedy_samples_are_equal_rows_of_one_request(job: Job) -> None:
    job.write([{"id": n, "prompt": text} for n, text in enumerate(TEXTS[:2])])
    assert job("sampling.n=2") == 0
    rows = job.rows()
    assert [(row["id"], row["sample_index"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[0]["output_token_ids"] == rows[1]["output_token_ids"]
    assert rows[1]["new_blocks"] == 0
    assert job.summary["requests"] == 2


def test_a_rows_own_parameters_win(
    job: Job, tokenizer: Any, generate: Callable[..., list[int]]
) -> None:
    own = [(None, None), (3, None), (None, {"max_tokens": 5}), (2, {"max_tokens": 5, "n": 2})]
    rows = [
        {"id": n, "prompt": TEXTS[0], "max_tokens": limit, "sampling_params": params}
        for n, (limit, params) in enumerate(
            (limit, params and json.dumps(params)) for limit, params in own
        )
    ]
    job.write(rows)
    assert job() == 0
    full = generate(tokenizer(TEXTS[0])["input_ids"])
    got = [(row["id"], row["output_token_ids"]) for row in job.rows()]
    assert got == [(0, full), (1, full[:3]), (2, full[:5]), (3, full[:2]), (3, full[:2])]
    assert {row["finish_reason"] for row in job.rows()} == {"length"}


SETTINGS = [
    ("schedule.order=input",),
    ("schedule.order=length",),
    ("pool.block_size=4",),
    ("pool.block_size=32", "pool.prefix_caching=false"),
    ("engine.max_num_seqs=2",),
    ("engine.max_num_batched_tokens=7",),
    ("engine.admission=worst_case", "pool.num_blocks=8"),
    ("pool.num_blocks=14", "pool.block_size=4", "engine.preemption=swap"),
    ("pool.num_blocks=14", "pool.block_size=4", "engine.preemption=recompute"),
]


def test_no_result_depends_on_order_pool_blocks_or_neighbours(job: Job) -> None:
    warm = json.dumps({"temperature": 0.9, "top_p": 0.95, "n": 2, "max_tokens": 12})
    penalised = json.dumps({"repetition_penalty": 1.3, "frequency_penalty": 0.5})
    job.write(
        [
            {"id": f"r{n}", "prompt": f"{TEXTS[n % 5]} {n % 9}", "sampling_params": params}
            for n, params in enumerate([None, warm, penalised] * 5)
        ]
    )
    assert job() == 0
    expected = job.results()
    assert len(expected) == 20
    for number, setting in enumerate(SETTINGS):
        job.out = job.folder / f"out{number}"
        assert job(f"output.dir={job.out}", *setting) == 0
        assert job.results() == expected, setting
        if "pool.num_blocks=14" in setting:
            assert job.summary["preemptions"] > 0


# -- ends -----------------------------------------------------------------------------


class Ends:
    """Greedy outputs of 16 tokens that nothing has ended, to cut by hand."""

    def __init__(self, tokenizer: Any, generate: Callable[..., list[int]]) -> None:
        self.tokenizer = tokenizer
        prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
        self.outputs = [generate(prompt, 16, eos_token_id=None) for prompt in prompts]
        self.prompts = prompts

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def cut_at_token(self, token: int) -> list[tuple[list[int], str]]:
        return [
            (output[: output.index(token) + 1], "stop") if token in output else (output, "length")
            for output in self.outputs
        ]

    def cut_at_text(self, stop: str) -> list[tuple[list[int], str | None]]:
        cut: list[tuple[list[int], str | None]] = []
        for output in self.outputs:
            ends = (n for n in range(1, 17) if stop in self.text(output[:n]))
            end = next(ends, None)
            cut.append((output, None) if end is None else (output[:end], stop))
        return cut

    def stop_over_a_border(self) -> str:
        """The end of one token and the beginning of the next, both of them letters."""
        for output in self.outputs:
            for left, right in itertools.pairwise(output[2:]):
                pair = self.text([left])[-1:] + self.text([right])[:1]
                if pair.isascii() and pair.isprintable() and len(pair) == 2:
                    return pair
        raise AssertionError("no such pair in the outputs")


@pytest.fixture(scope="module")
def ends(tokenizer: Any, generate: Callable[..., list[int]]) -> Ends:
    return Ends(tokenizer, generate)


@pytest.fixture
def long_job(job: Job) -> Job:
    job.write([{"id": n, "prompt": text} for n, text in enumerate(TEXTS)])
    job.given["sampling.max_tokens"] = "16"
    return job


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_over_a_token_border_ends_the_row(
    long_job: Job, ends: Ends, included: bool
) -> None:
    stop = ends.stop_over_a_border()
    stops = json.dumps([stop, "never in it"])
    flag = f"sampling.include_stop_str_in_output={included}"
    assert long_job(f"sampling.stop={stops}", "sampling.ignore_eos=true", flag) == 0
    rows = long_job.rows()
    for row, (output, reason) in zip(rows, ends.cut_at_text(stop), strict=True):
        text = ends.text(output)
        if reason is not None:
            text = text[: text.find(stop)] + stop * included
        assert row["output_token_ids"] == output
        assert row["generated_text"] == text
        assert row["stop_reason"] == reason
        assert row["finish_reason"] == ("length" if reason is None else "stop")
    assert any(row["stop_reason"] == stop for row in rows)


def test_c07_stops_that_stand_in_the_prompt_end_nothing(long_job: Job, ends: Ends) -> None:
    outputs = {token for output in ends.outputs for token in output}
    token = next(each for prompt in ends.prompts for each in prompt if each not in outputs)
    stop = "The quick"
    assert all(stop not in ends.text(output) for output in ends.outputs)
    stops = f"sampling.stop={json.dumps([stop])}", f"sampling.stop_token_ids=[{token}]"
    assert long_job(*stops, "sampling.ignore_eos=true") == 0
    rows = long_job.rows()
    assert [row["output_token_ids"] for row in rows] == ends.outputs
    assert {row["finish_reason"] for row in rows} == {"length"}


def test_a_stop_token_ends_the_row_and_stands_in_the_ids(long_job: Job, ends: Ends) -> None:
    token = ends.outputs[0][4]
    assert long_job(f"sampling.stop_token_ids=[{token}]", "sampling.ignore_eos=true") == 0
    for row, (output, reason) in zip(long_job.rows(), ends.cut_at_token(token), strict=True):
        assert row["output_token_ids"] == output
        assert row["finish_reason"] == reason
        assert row["stop_reason"] == (str(token) if reason == "stop" else None)


@pytest.fixture
def eos_job(long_job: Job, ends: Ends, copied_model: Path) -> tuple[Job, int]:
    """The model with another end of sequence: one that comes up."""
    token = ends.outputs[0][2]
    settings = copied_model / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": token}))
    return long_job, token


def test_an_end_of_sequence_ends_the_row_without_a_stop_reason(eos_job: Any, ends: Ends) -> None:
    job, token = eos_job
    assert job() == 0
    rows = job.rows()
    for row, (output, reason) in zip(rows, ends.cut_at_token(token), strict=True):
        assert row["output_token_ids"] == output
        assert (row["finish_reason"], row["stop_reason"]) == (reason, None)
    assert rows[0]["completion_tokens"] == 3


def test_ignore_eos_emits_it_and_goes_on(eos_job: Any, ends: Ends) -> None:
    job, token = eos_job
    assert job("sampling.ignore_eos=true") == 0
    assert [row["output_token_ids"] for row in job.rows()] == ends.outputs
    assert token in job.rows()[0]["output_token_ids"]


def test_min_tokens_holds_the_end_back(
    eos_job: Any, ends: Ends, generate: Callable[..., list[int]]
) -> None:
    job, token = eos_job
    assert job("sampling.min_tokens=9") == 0
    for row, prompt in zip(job.rows(), ends.prompts, strict=True):
        expected = generate(prompt, 16, eos_token_id=token, min_new_tokens=9)
        assert row["output_token_ids"] == expected
    assert job.rows()[0]["output_token_ids"] != ends.outputs[0]

"""A small job that is run to be killed, and what must hold of its output at any moment."""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from batchgen.cli import app
from batchgen.keys import declared_keys

# What must not depend on how the rows were run.
RESULT_COLUMNS = (
    "id",
    "row_index",
    "sample_index",
    "status",
    "generated_text",
    "output_token_ids",
    "finish_reason",
    "stop_reason",
    "error_type",
)

Results = dict[tuple[Any, int], tuple[Any, ...]]


def composed(given: Mapping[str, str]) -> dict[str, Any]:
    """What Hydra, which takes a third of a second, would make of ``key=value`` arguments."""
    result: dict[str, Any] = {}
    for name, key in declared_keys().items():
        value = copy.copy(key.default)
        if name in given:
            value = yaml.safe_load(given[name])
            value = key.kind(value) if key.choices else value
        *groups, leaf = name.split(".")
        place = result
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return result


def run_composed(values: dict[str, Any]) -> int:
    """Run the command on composed values, from its edge inwards."""
    with mock.patch.object(app, "compose", lambda *_: [values]):
        return app.main([])


def make_model(folder: Path) -> Path:
    """Save the smallest model with text: one layer over bytes, random weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that prompts matter and no two tokens are nearly as likely.
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_input(path: Path, num_rows: int) -> None:
    """Write rows of all kinds: shared prefixes, duplicates, random samples, errors."""
    random = json.dumps({"temperature": 1.0, "n": 2})
    rows = []
    for n in range(num_rows):
        text = f"Label this: sentence {n % (num_rows - 2)} of group {n % 3}."
        prompt = {3: None, 6: text * 7, 10: text * 6}.get(n, text)
        own = random if n % 5 == 1 else None
        rows.append({"id": f"r{n}", "prompt": prompt, "sampling_params": own})
    schema = pa.schema([(name, pa.string()) for name in ("id", "prompt", "sampling_params")])
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


class KilledJob:
    """An input, a model and an output directory.

    Args:
        folder: holds all of it.
        model: a folder from :func:`make_model`.
        num_rows: input rows, at least 12.

    Attributes:
        out: the output directory, or a copy of it.
        given: the command.
        environment: added to each run's environment.
        left_over: names that no finished output has.
    """

    def __init__(self, folder: Path, model: Path, num_rows: int = 12) -> None:
        self.out = folder / "out"
        self.log = folder / "log.txt"
        self.environment: dict[str, str] = {}
        self.left_over = {"_lock", "_staged", "_switch.json", "_quarantine"}
        self.given = {
            "model.path": str(model),
            "input.path": str(folder / "input.parquet"),
            "output.dir": str(self.out),
            "output.rows_per_part": "4",
            "output.order": "input",
            "sampling.max_tokens": "3",
            "engine.max_num_seqs": "6",
            # Less than four rows want, and less than one of the prompts needs.
            "pool.num_blocks": "12",
            "pool.swap_blocks": "8",
        }
        make_input(folder / "input.parquet", num_rows)

    def clear(self) -> None:
        """Remove the output."""
        shutil.rmtree(self.out, ignore_errors=True)

    def parts(self) -> list[Path]:
        """Return the files that readers of the directory see."""
        return sorted(self.out.glob("*.parquet"))

    def results(self) -> Results:
        """Read every part, each byte of it, as independent readers do.

        Raises:
            AssertionError: a file under a final name is not whole, or a row is there twice.
        """
        found: Results = {}
        for part in self.parts():
            for row in read_whole(part):
                key = row["id"], row["sample_index"]
                assert key not in found, f"{key} stands twice, the second time in {part.name}"
                found[key] = tuple(_plain(row[name]) for name in RESULT_COLUMNS)
        return found

    def check_kept(self, expected: Results) -> int:
        """Check an interrupted output; return the rows in it.

        Raises:
            AssertionError: a part is not whole, a row stands twice or is not what it is in an
                undisturbed run.
        """
        found = self.results() if self.out.exists() else {}
        for key, result in found.items():
            assert result == expected[key], f"{key}: {result} for {expected[key]}"
        return len(found)

    def check_finished(self, expected: Results) -> None:
        """Check a finished output.

        Raises:
            AssertionError: it is not what an undisturbed run gives, or something is left over.
        """
        found = self.results()
        assert found == expected, sorted(found.keys() ^ expected.keys())
        names = {entry.name for entry in self.out.iterdir()}
        assert "_SUCCESS" in names
        left = [name for name in names if name.startswith("_tmp")]
        assert not left and not names & self.left_over, names
        summary = json.loads((self.out / "_summary.json").read_text())
        assert summary["rows"] == len(expected)
        failed = {row["id"] for row in pq.read_table(self.out / "_errors").to_pylist()}
        assert failed == {key[0] for key, result in expected.items() if result[3] == "error"}
        if summary["output_order"] == "input":
            order = [(row, sample) for _, row, sample, *_ in found.values()]
            assert order == sorted(order)


def read_whole(part: Path) -> list[dict[str, Any]]:
    """Read every byte of a part.

    Raises:
        AssertionError: it is not whole.
    """
    try:
        with pq.ParquetFile(part, page_checksum_verification=True) as file:
            rows: list[dict[str, Any]] = file.read().to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise AssertionError(f"{part} is not whole: {error}") from error
    return rows


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

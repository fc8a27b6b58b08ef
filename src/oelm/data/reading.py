"""Rows out of files: text, JSONL, CSV and Parquet, plain or compressed, read in bounded memory.

Owns what a file may look like. Refuses, in one line with file and place: an empty file, UTF-16, bytes that are not
UTF-8, NUL bytes, an endless line, a column that is missing or of the wrong type. Nothing here knows a data set.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from oelm.errors import DataError, MachineError, nearest


TEXT = frozenset({".txt", ".text", ".tokens", ".raw", ".md"})
TABLES = frozenset({".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow"})
COMPRESSED = frozenset({".xz", ".gz"})
BLOCK = 1 << 20  # bytes read at a time
PIECE = 1 << 20  # characters handed to a tokenizer at a time
LONGEST_LINE = 64 << 20  # bytes of one JSONL or CSV line
# What Unicode calls white space; Python's isspace() also counts four separators that tokenizers do not.
WHITE = "".join(chr(code) for code in range(0x3001) if chr(code).isspace() and not 0x1C <= code <= 0x1F)
SEPARATOR = "<|endoftext|>"  # a line of its own between the documents of a text file

_SEPARATOR = re.compile(re.escape(SEPARATOR) + r"[ \t]*\r?\n")  # literal first: that is what makes it quick
_LAST_SEPARATOR = re.compile(rf"(?:^|(?<=\n)){re.escape(SEPARATOR)}[ \t]*\Z")


class Piece(NamedTuple):
    """A part of a document; `starts` when it is the first part."""

    text: str
    starts: bool


def kind_of(path: Path) -> str:
    """The suffix that says how to read the file, without compression: `.txt`, `.jsonl`, `.parquet` and so on."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ".txt"


def readable(path: Path) -> bool:
    """Whether the name is one that this module reads."""
    return kind_of(path) in TEXT | TABLES


def count(path: Path) -> int | None:
    """Rows of a Parquet file from its footer; None where counting would mean reading."""
    return int(_parquet(path).metadata.num_rows) if kind_of(path) == ".parquet" else None


def rows(path: Path, columns: Mapping[str, str], *, optional: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a table, each keyed by role; `columns` maps a role to the file's column.

    Roles in `optional` are None where the file has no such column.
    """
    readers: dict[str, Callable[[Path, Mapping[str, str], frozenset[str]], Iterator[dict[str, Any]]]] = {
        ".parquet": _parquet_rows,
        ".arrow": _arrow_rows,
        ".jsonl": _jsonl_rows,
        ".ndjson": _jsonl_rows,
        ".csv": _csv_rows,
        ".tsv": _csv_rows,
    }
    reader = readers.get(kind_of(path))
    if reader is None:
        raise DataError(f"{path}: is not a table with columns; give JSONL, CSV or Parquet")
    found = False
    for row in reader(path, columns, frozenset(optional)):
        found = True
        yield row
    if not found:
        raise DataError(f"{path}: holds no rows; give a file with data")


def documents(path: Path, column: str = "text") -> Iterator[Piece]:
    """The documents of a file in pieces of bounded length: a text file is one document unless it has separators."""
    if kind_of(path) not in TABLES:
        yield from text_documents(path)
        return
    for number, row in enumerate(rows(path, {"text": column}), start=1):
        text = row["text"]
        if not isinstance(text, str):
            kind = "nothing" if text is None else type(text).__name__
            raise DataError(f"{path}: row {number}: column {column!r} holds {kind}, not text; name the text column")
        if "\0" in text:
            raise DataError(f"{path}: row {number}: column {column!r} holds a NUL character; clean the text")
        yield from cut(text)


def cut(text: str, limit: int = PIECE) -> Iterator[Piece]:
    """A document in pieces of at most `limit` characters.

    A cut falls before a run of white space or before the last of it, where every tokenizer that splits on white
    space splits anyhow: the pieces' tokens are the document's. Only a run or word longer than `limit` is cut within.
    """
    starts = True
    while len(text) > limit:
        at = cut_point(text, limit)
        yield Piece(text[:at], starts)
        text, starts = text[at:], False
    yield Piece(text, starts)


def cut_point(text: str, limit: int) -> int:
    """The last good place to cut at or before `limit`, else `limit` itself."""
    if text[limit] in WHITE:  # a run of white space goes on beyond the limit: cut where it begins
        return len(text[:limit].rstrip(WHITE)) or limit
    at = max(text.rfind(mark, 1, limit) for mark in WHITE)
    return at if at > 0 else limit


def text_documents(path: Path) -> Iterator[Piece]:
    """Pieces of a text file; a line `<|endoftext|>` ends a document."""
    held, starts, found = "", True, False
    for block in _decoded(path):
        found = found or not block.isspace()
        held += block
        begin = 0
        for match in _SEPARATOR.finditer(held):
            if match.start() and held[match.start() - 1] != "\n":
                continue
            if match.start() > begin or not starts:
                yield Piece(held[begin : match.start()], starts)
            begin, starts = match.end(), True
        held = held[begin:]
        while len(held) > 2 * PIECE:
            at = cut_point(held, PIECE)
            yield Piece(held[:at], starts)
            held, starts = held[at:], False
    if not found:
        raise DataError(f"{path}: is empty; give a file with text")
    held = _LAST_SEPARATOR.sub("", held)
    if held:
        yield Piece(held, starts)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded and checked, each with its line end."""
    for number, raw in _raw_lines(path):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line {number}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
        if "\0" in text:
            raise DataError(f"{path}: line {number}: holds NUL bytes; it is not text")
        yield number, text


def _open(path: Path) -> IO[bytes]:
    try:
        suffix = path.suffix.lower()
        if suffix == ".xz":
            return lzma.open(path, "rb")
        if suffix == ".gz":
            return gzip.open(path, "rb")  # type: ignore[return-value]
        return open(path, "rb")
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DataError | MachineError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: no such file; check the name")
    if isinstance(error, IsADirectoryError):
        return DataError(f"{path}: is a folder; name a file in it")
    if isinstance(error, gzip.BadGzipFile):
        return DataError(f"{path}: is not a whole gzip file ({error}); fetch it again")
    return MachineError(f"{path}: cannot be read ({error.strerror or error}); check its permissions")


def _blocks(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        while True:
            try:
                block = file.read(BLOCK)
            except (lzma.LZMAError, EOFError) as error:
                raise DataError(f"{path}: is cut off or damaged ({error}); fetch it again") from None
            except OSError as error:
                raise _unreadable(path, error) from None
            if not block:
                return
            yield block


def _checked_blocks(path: Path) -> Iterator[bytes]:
    """Blocks without a UTF-8 byte order mark; UTF-16 is refused."""
    for number, block in enumerate(_blocks(path)):
        if number == 0:
            if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{path}: is UTF-16; save it as UTF-8")
            block = block.removeprefix(codecs.BOM_UTF8)
        yield block


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for block in _checked_blocks(path):
        nul = block.find(b"\0")
        if nul >= 0:
            raise DataError(f"{path}: byte {done + nul:,} is NUL; it is not text (or it is UTF-16: save it as UTF-8)")
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: byte {done - waiting + error.start:,} is not UTF-8; save the file as UTF-8"
            ) from None
        done += len(block)
        if text:
            yield text
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise DataError(f"{path}: ends within a UTF-8 character; it is cut off, fetch it again") from None


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    held, number, found = bytearray(), 1, False
    for block in _checked_blocks(path):
        held += block
        *whole, rest = held.split(b"\n")
        for line in whole:
            found = True
            yield number, bytes(line) + b"\n"
            number += 1
        held = bytearray(rest)
        if len(held) > LONGEST_LINE:
            raise DataError(f"{path}: line {number} is longer than {LONGEST_LINE >> 20} MiB; is a line end missing?")
    if held:
        yield number, bytes(held)
    elif not found:
        raise DataError(f"{path}: is empty; give a file with data")


def pick(row: Mapping[str, Any], columns: Mapping[str, str], optional: frozenset[str], place: str) -> dict[str, Any]:
    """A row keyed by role; an error says the nearest column's name and the place."""
    picked: dict[str, Any] = {}
    for role, column in columns.items():
        if column in row:
            picked[role] = row[column]
        elif role in optional:
            picked[role] = None
        else:
            raise DataError(f"{place}: has no column {column!r} (wanted as {role}); {nearest(column, row)}")
    return picked


def _jsonl_rows(path: Path, columns: Mapping[str, str], optional: frozenset[str]) -> Iterator[dict[str, Any]]:
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\ud" in line.lower():
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{path}: line {number}: holds half of a surrogate pair; it is no text") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number}: is not JSON ({error}); one object a line is expected") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number}: is a {type(row).__name__}, not an object with columns")
        yield pick(row, columns, optional, f"{path}: line {number}")


def _csv_rows(path: Path, columns: Mapping[str, str], optional: frozenset[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(LONGEST_LINE)
    delimiter = "\t" if kind_of(path) == ".tsv" else ","
    reader = csv.DictReader((text for _, text in lines(path)), delimiter=delimiter, strict=True)
    try:
        names = list(reader.fieldnames or ())
        pick(dict.fromkeys(names), columns, optional, f"{path}: line 1")
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"{path}: line {reader.line_num}: has another number of fields than the {len(names)} of the header"
                )
            yield pick(row, columns, optional, f"{path}: line {reader.line_num}")
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: is not CSV ({error})") from None


def _arrow() -> Any:
    """pyarrow, untyped, and imported when a table is read."""
    import pyarrow as pa
    import pyarrow.parquet

    return pa


def _parquet(path: Path) -> Any:
    pa = _arrow()
    try:
        return pa.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the name") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a whole Parquet file ({_first_line(error)}); fetch it again") from None


def _parquet_rows(path: Path, columns: Mapping[str, str], optional: frozenset[str]) -> Iterator[dict[str, Any]]:
    pa = _arrow()
    file = _parquet(path)
    names = file.schema_arrow.names
    pick(dict.fromkeys(names), columns, optional, str(path))
    wanted = sorted({column for column in columns.values() if column in names})
    try:
        # Few rows at a time: a batch of long documents is what the memory goes to.
        for batch in file.iter_batches(batch_size=256, columns=wanted):
            for row in batch.to_pylist():
                yield pick(row, columns, optional, str(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: is damaged ({_first_line(error)}); fetch it again") from None


def _arrow_rows(path: Path, columns: Mapping[str, str], optional: frozenset[str]) -> Iterator[dict[str, Any]]:
    pa = _arrow()
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            pick(dict.fromkeys(stream.schema.names), columns, optional, str(path))
            for batch in stream:
                for row in batch.to_pylist():
                    yield pick(row, columns, optional, str(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a whole Arrow stream ({_first_line(error)}); fetch it again") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__

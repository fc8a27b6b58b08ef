"""Files as users have them: every kind is read, every fault is one line with file and place."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data import reading
from oelm.data.reading import Piece
from oelm.errors import DataError


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _text(path: Path) -> str:
    return "".join(piece.text for piece in reading.documents(path))


def _fault(path: Path, columns: dict[str, str] | None = None) -> str:
    with pytest.raises(DataError) as caught:
        list(reading.documents(path) if columns is None else reading.rows(path, columns))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b" \n\n \t\n", "is empty"),
        ("naïve".encode("utf-16"), "is UTF-16"),
        ("naïve".encode("utf-16-le"), "NUL"),
        (b"good so far \xff then bad", "byte 12 is not UTF-8"),
        (b"a" * (1 << 20) + b"\xc3", "ends within a UTF-8 character"),
        (b"some\0thing", "byte 4 is NUL"),
    ],
)
def test_text_faults_name_file_and_place(tmp_path: Path, data: bytes, said: str) -> None:
    assert said in _fault(_written(tmp_path / "x.txt", data))


def test_bad_byte_is_counted_over_blocks(tmp_path: Path) -> None:
    data = "é".encode() * (1 << 20) + b"\xff"
    assert f"byte {2 << 20:,} is not UTF-8" in _fault(_written(tmp_path / "x.txt", data))


def test_byte_order_mark_and_one_line(tmp_path: Path) -> None:
    assert _text(_written(tmp_path / "x.txt", "\ufeffone line".encode())) == "one line"


@pytest.mark.parametrize("opener", [lzma.open, gzip.open])
def test_compressed_text_is_the_same_text(tmp_path: Path, opener: object) -> None:
    path = tmp_path / ("x.txt.xz" if opener is lzma.open else "x.txt.gz")
    with opener(path, "wb") as file:  # type: ignore[operator]
        file.write("Grüße\r\nund mehr\n".encode())
    assert _text(path) == "Grüße\r\nund mehr\n"
    path.write_bytes(path.read_bytes()[:-9])
    assert "fetch it again" in _fault(path)


def test_separator_lines_part_documents(tmp_path: Path) -> None:
    path = _written(
        tmp_path / "x.txt",
        b"one <|endoftext|> still one <|endoftext|>\n<|endoftext|>\n<|endoftext|> \r\ntwo\n<|endoftext|>",
    )
    assert list(reading.documents(path)) == [
        Piece("one <|endoftext|> still one <|endoftext|>\n", True),
        Piece("two\n", True),
    ]


def test_many_documents_over_block_edges(tmp_path: Path) -> None:
    stories = [f"story {number} " + "word " * (number % 97) + "\n" for number in range(9000)]
    path = _written(tmp_path / "x.txt", "<|endoftext|>\n".join(stories).encode())
    pieces = list(reading.documents(path))
    assert [piece.text for piece in pieces] == stories
    assert all(piece.starts for piece in pieces)


def test_a_huge_line_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    with open(path, "wb") as file:
        for _ in range(40):
            file.write(b"x" * 300_000 + b" " + b"y" * 200_000)
    pieces = list(reading.documents(path))
    assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert max(len(piece.text) for piece in pieces) <= 2 * reading.PIECE
    assert "".join(piece.text for piece in pieces) == path.read_text()


@given(st.text(alphabet=" \n\tab'é.7", max_size=300), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_document(text: str, limit: int) -> None:
    pieces = list(reading.cut(text, limit))
    assert "".join(piece.text for piece in pieces) == text
    assert all(len(piece.text) <= limit for piece in pieces)
    assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_escaped_characters_are_text(tmp_path: Path) -> None:
    path = _written(tmp_path / "x.jsonl", b'{"text": "a \\ud83d\\ude00 b"}')
    assert _text(path) == "a 😀 b"


def test_cuts_fall_before_white_space() -> None:
    text = "some words \n\n and  more of them\tin a line. " * 60
    for limit in (12, 40, 333):
        pieces = [piece.text for piece in reading.cut(text, limit)]
        for before, after in itertools.pairwise(pieces):
            assert after[0] in reading.WHITE
            assert before[-1] not in reading.WHITE or after[1] not in reading.WHITE


ROWS = [{"text": "one, two", "label": 1}, {"text": 'a "quoted"\nline', "label": 0}]


def test_tables_of_all_kinds_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    for name, delimiter in (("x.csv", ","), ("x.tsv", "\t")):
        with open(tmp_path / name, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    columns = {"text": "text", "y": "label"}
    wanted = [{"text": row["text"], "y": row["label"]} for row in ROWS]
    assert list(reading.rows(tmp_path / "x.jsonl", columns)) == wanted
    assert list(reading.rows(tmp_path / "x.parquet", columns)) == wanted
    as_text = [{"text": row["text"], "y": str(row["y"])} for row in wanted]
    assert list(reading.rows(tmp_path / "x.csv", columns)) == as_text
    assert list(reading.rows(tmp_path / "x.tsv", columns)) == as_text
    assert reading.count(tmp_path / "x.parquet") == 2
    assert reading.count(tmp_path / "x.csv") is None


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.jsonl", b"", "is empty"),
        ("x.jsonl", b"\n\n", "holds no rows"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: is not JSON"),
        ("x.jsonl", b'{"text": "a"}\n[1]\n', "line 2: is a list"),
        ("x.jsonl", b'{"txt": "a"}\n', "line 1: has no column 'text' (wanted as text); did you mean 'txt'?"),
        ("x.jsonl", b'{"text": "a\xff"}\n', "line 1: byte 11 is not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\0"}', "line 2: holds NUL"),
        ("x.jsonl", b'{"text": "a \\ud83d b"}', "line 1: holds half of a surrogate pair"),
        ("x.jsonl", b"[" * 100_000, "line 1: is not JSON"),
        ("x.csv", b"text,label\n", "holds no rows"),
        ("x.csv", b"txt,label\na,1\n", "line 1: has no column 'text'"),
        ("x.csv", b"text,label\na,1,2\n", "line 2: has another number of fields"),
        ("x.csv", b'text,label\n"a,1\n', "is not CSV"),
        ("x.parquet", b"", "is not a whole Parquet file"),
        ("x.parquet", b"PAR1 and nothing", "is not a whole Parquet file"),
        ("x.arrow", b"nothing", "is not a whole Arrow stream"),
        ("x.txt", b"text", "is not a table"),
    ],
)
def test_table_faults_name_file_and_line(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    assert said in _fault(_written(tmp_path / name, data), {"text": "text"})


def test_an_endless_line_of_a_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 2 << 20)
    path = _written(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": "' + b"a" * (5 << 20))
    assert "line 2 is longer than 2 MiB" in _fault(path, {"text": "text"})


def test_a_flipped_byte_in_parquet_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(
        pa.table({"text": [f"row {number} of many" for number in range(5000)]}), path, compression="zstd"
    )
    data = bytearray(path.read_bytes())
    for place in range(200, 2000, 7):
        data[place] ^= 0xFF
    assert "fetch it again" in _fault(_written(path, bytes(data)), {"text": "text"})


def test_text_column_must_hold_text(tmp_path: Path) -> None:
    path = _written(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": null}\n')
    assert "row 2: column 'text' holds nothing" in _fault(path)
    path = _written(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": "b\\u0000c"}\n')
    assert "row 2: column 'text' holds a NUL character" in _fault(path)


def test_missing_file_is_said(tmp_path: Path) -> None:
    for name in ("x.txt", "x.jsonl", "x.parquet"):
        with pytest.raises(DataError, match="no such file"):
            list(reading.documents(tmp_path / name))

"""The table of language-modelling corpora: a row says where a corpus is, its splits, counts and licence.

A new corpus is a new row. Nothing is read here but the demo's topics, which Python itself carries.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from oelm.data.reading import PIECE, TABLES, Piece, kind_of
from oelm.data.sources import DataSet, FilesFound, Found, Hub, Layout
from oelm.errors import DataError


DEMO = DataSet(
    name="demo",
    kind="lm",
    title="The reference topics that CPython carries (pydoc_data.topics), split by topic",
    licence="PSF-2.0",
    note="prose of the Python language reference, 0.4 MB: for trying things out, not for conclusions; differs by Python version",
)

_HEAD = "wikitext-103.train-head.tokens*"


def _wikitext(train: str, name: str, suffix: str, *, partial: bool = False) -> Layout:
    return Layout(
        files={
            "train": (f"wikitext/{train}",),
            "validation": (f"wikitext/{name}.valid.{suffix}*",),
            "test": (f"wikitext/{name}.test.{suffix}*",),
        },
        partial=partial,
        note="train is the first articles of WikiText-103's only" if partial else "",
    )


CORPORA: dict[str, DataSet] = {
    row.name: row
    for row in (
        DataSet(
            name="tinystories",
            kind="lm",
            title="TinyStories (Eldan and Li 2023)",
            licence="CDLA-Sharing-1.0",
            layouts=(
                Layout(
                    files={"train": ("tinystories/train.parquet",), "test": ("tinystories/test.parquet",)},
                    note="validation is carved from train by hash",
                ),
            ),
            hub=Hub(
                id="roneneldan/TinyStories",
                splits={"train": "train", "test": "validation"},
                note="the official validation split is read once, as test; validation is carved from train by hash",
            ),
            official={"train": 2_119_719, "test": 21_990},
            carve={"validation": 0.01},
        ),
        DataSet(
            name="openwebtext",
            kind="lm",
            title="OpenWebText (Gokaslan and Cohen 2019)",
            licence="CC0-1.0 (packaging; the texts belong to their authors)",
            layouts=(
                Layout(
                    files={"train": ("web-text/openwebtext-sample.txt*",)},
                    partial=True,
                    note="a sample of 0.5 MB whose documents run together: for a smoke test",
                ),
            ),
            hub=Hub(
                id="Skylion007/openwebtext",
                splits={"train": "train"},
                stream=True,
                note="the main revision: the Parquet conversion holds a part of it",
            ),
            official={"train": 8_013_769},
            carve={"validation": 0.0025, "test": 0.0025},
        ),
        DataSet(
            name="wikitext-103",
            kind="lm",
            title="WikiText-103, word-level tokens (Merity et al. 2016)",
            licence="CC BY-SA 3.0",
            layouts=(
                _wikitext("wikitext-103.train.tokens*", "wikitext-103", "tokens"),
                _wikitext(_HEAD, "wikitext-103", "tokens", partial=True),
                Layout(
                    files={
                        "train": ("wikitext-103/wiki.train.tokens",),
                        "validation": ("wikitext-103/wiki.valid.tokens",),
                        "test": ("wikitext-103/wiki.test.tokens",),
                    },
                ),
            ),
            hub=Hub(id="Salesforce/wikitext", config="wikitext-103-v1"),
        ),
        DataSet(
            name="wikitext-2",
            kind="lm",
            title="WikiText-2, raw text (Merity et al. 2016)",
            licence="CC BY-SA 3.0",
            layouts=(
                _wikitext("wikitext-2-raw.train.txt*", "wikitext-2-raw", "txt"),
                _wikitext(_HEAD, "wikitext-2-raw", "txt", partial=True),
                Layout(
                    files={
                        "train": ("wikitext-2-raw/wiki.train.raw",),
                        "validation": ("wikitext-2-raw/wiki.valid.raw",),
                        "test": ("wikitext-2-raw/wiki.test.raw",),
                    },
                ),
            ),
            hub=Hub(id="Salesforce/wikitext", config="wikitext-2-raw-v1"),
        ),
        DataSet(
            name="wikipedia",
            kind="lm",
            title="English Wikipedia",
            licence="CC BY-SA 3.0",
            layouts=(
                Layout(
                    files={
                        "train": ("wikipedia-en-2015/train-*-of-*.parquet",),
                        "validation": ("wikipedia-en-2015/valid.parquet",),
                        "test": ("wikipedia-en-2015/test.parquet",),
                    },
                    official={"train": 26_381, "validation": 250, "test": 250},
                    note="26,881 articles of an early 2015 dump, split by article",
                ),
            ),
            hub=Hub(
                id="wikimedia/wikipedia",
                config="20231101.en",
                splits={"train": "train"},
                stream=True,
                note="the 2023 dump of the hub, not the 2015 articles: their numbers do not compare",
            ),
            official={"train": 6_407_814},
            carve={"validation": 0.001, "test": 0.001},
        ),
        DataSet(
            name="c4-sample",
            kind="lm",
            title="C4, English: the first 1,000 documents of train",
            licence="ODC-BY 1.0; the texts under the terms of Common Crawl",
            layouts=(Layout(files={"train": ("web-text/c4-en-sample.parquet",)}),),
            hub=Hub(id="allenai/c4", config="en", splits={"train": "train"}, stream=True, rows=1000),
            official={"train": 1000},
            carve={"validation": 0.1, "test": 0.1},
            note="a sample by name: for a smoke test or a web-text perplexity",
        ),
        DEMO,
    )
}


@dataclass(frozen=True, kw_only=True)
class DemoFound:
    """The demo text: every Python has it."""

    dataset: DataSet = DEMO
    place: str = "package"

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "validation", "test")

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        from pydoc_data import topics

        once = {text: name for name, text in sorted(topics.topics.items(), reverse=True)}  # some topics share a text
        for name, text in sorted((name, text) for text, name in once.items()):
            if _topic_split(name) == split:
                yield {"text": text}

    def documents(self, split: str) -> Iterator[Piece]:
        for row in self.rows(split):
            yield Piece(row["text"], True)

    def counts(self) -> dict[str, int | None]:
        return {split: sum(1 for _ in self.rows(split)) for split in self.splits}

    def identity(self) -> str:
        whole = hashlib.sha256()
        for split in self.splits:
            for row in self.rows(split):
                whole.update(f"{split}\0{row['text']}\0".encode())
        return whole.hexdigest()

    def describe(self) -> dict[str, Any]:
        version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
        return {
            "status": "demo",
            "place": self.place,
            "from": [f"pydoc_data.topics of Python {version}"],
            "licence": self.dataset.licence,
            "rows": self.counts(),
            "note": self.dataset.note,
        }


def _topic_split(name: str) -> str:
    share = int.from_bytes(hashlib.sha256(f"oelm demo: {name}".encode()).digest()[:8]) / 2**64
    return "test" if share < 0.1 else "validation" if share < 0.2 else "train"


# Words of the official token files, a line end counted as one: what published perplexities divide by.
OFFICIAL_WORDS: dict[str, dict[str, int]] = {
    "wikitext-103": {"train": 103_227_021, "validation": 217_646, "test": 245_569},
    "wikitext-2": {"train": 2_088_628, "validation": 217_646, "test": 245_569},
}


def words_of(name: str) -> Literal["spaces", "wikitext"]:
    """How words are counted for perplexity per word: WikiText counts a line end as a word."""
    return "wikitext" if name in OFFICIAL_WORDS else "spaces"


def separated(name: str) -> bool:
    """Whether documents are told apart by an end-of-text token; WikiText is one stream, as published numbers take it."""
    return name not in OFFICIAL_WORDS


def documents(found: Found, split: str) -> Iterator[Piece]:
    """The text of a split in pieces; WikiText's lines are joined and cut into articles."""
    if found.dataset.name not in OFFICIAL_WORDS:
        return found.documents(split)
    if isinstance(found, FilesFound) and kind_of(found.files[split][0]) not in TABLES:
        return _articles(piece.text for piece in found.documents(split))
    # A table has a row for each line, and an empty row for the line " \n".
    return _articles(row["text"] or " \n" for row in found.rows(split))


_HEADING = re.compile(r"(?<=\n \n) = (?!= )[^\n]* = \n(?= \n)")


def _articles(texts: Iterable[str]) -> Iterator[Piece]:
    """An article begins at a heading of the first level after an empty line, cut before the heading's space."""
    held: list[str] = []
    size, first = 0, True
    for text in texts:
        held.append(text)
        size += len(text)
        if size < PIECE:
            continue
        joined = "".join(held)
        *whole, rest = _split_articles(joined)
        for article in whole:
            yield Piece(article, True)
        if len(rest) > 8 * PIECE:
            raise DataError("a WikiText split has no article headings; is it the official file?")
        held, size, first = [rest], len(rest), False
    joined = "".join(held)
    if first and not joined.strip():
        raise DataError("a WikiText split is empty; fetch it again")
    for article in _split_articles(joined):
        yield Piece(article, True)


def _split_articles(text: str) -> list[str]:
    edges = [0, *(match.start() for match in _HEADING.finditer(text)), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(edges) if stop > start]

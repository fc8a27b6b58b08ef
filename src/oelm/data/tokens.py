"""Tokenizers by name: gpt2, bert, bytes, demo-bpe, or a tokenizer.json of the user's; and training a small BPE.

Owns how they are found, what their special tokens are, and the hash that says whether two of them give the same ids.
Refuses to treat special tokens that occur in text as anything but text.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oelm.data import hub, sources
from oelm.errors import ConfigError, DataError, nearest
from oelm.values import digest


NAMES = ("gpt2", "bert", "bytes", "demo-bpe")
END = "<|endoftext|>"
DEMO_VOCABULARY = 1536
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 258, 1 << 20

_HUB = {"gpt2": ("openai-community/gpt2", "gpt2"), "bert": ("google-bert/bert-base-uncased", "bert-base-uncased")}
_FOLDER = {"gpt2": "gpt2", "bert": "bert-base-uncased"}
_KNOWN_SIZE = {"gpt2": 50_257, "bert": 30_522}
_ENDS = (END, "[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>")
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tokenizer and what a batch has to know of it."""

    name: str
    backend: Any  # a tokenizers.Tokenizer, for who needs offsets
    hash: str
    vocab_size: int
    eos_id: int  # parts documents
    pad_id: int
    cls_id: int | None = None
    sep_id: int | None = None
    unk_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, on all cores."""
        return [item.ids for item in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def arrays(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The same as arrays, for stores."""
        if self.name == "bytes":  # its ids are the bytes; a tokenizer would take a thousand times as long to say so
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, dtype=np.uint32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are left out."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    def to_json(self) -> str:
        """The tokenizer's own file."""
        return str(self.backend.to_str())


def load_tokens(name: str, folder: Path | str | None = None) -> Tokens:
    """The tokenizer of that name, or of that file."""
    if name == "bytes":
        return _bytes()
    if name == "demo-bpe":
        return _demo_bpe()
    if name in _FOLDER:
        return _from_file(name, _locate(name, folder))
    path = _named_file(name)
    if path.suffix == ".json" or os.path.isfile(path):
        return _from_file(name, path)
    raise DataError(f"tokenizer {name[:80]!r} is unknown; {nearest(name, NAMES)}; or name a tokenizer.json")


def _named_file(name: str) -> Path:
    path = Path(name).expanduser()
    return path / "tokenizer.json" if os.path.isdir(path) else path  # os.path: a name may be no path at all


def expected(name: str, folder: Path | str | None = None) -> str:
    """What has to be done before `load_tokens` can work without a network; empty when nothing has to."""
    if name in ("bytes", "demo-bpe"):
        return ""
    if name not in _FOLDER:
        return "" if os.path.isfile(_named_file(name)) else "no such file; save the model's tokenizer there"
    where = f"tokenizers/{_FOLDER[name]}/tokenizer.json"
    if any((root / where).is_file() for _, root in sources.data_folders(folder)):
        return ""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return f"put {where} into a data folder (--data or OELM_DATA)"
    if any(isinstance(try_to_load_from_cache(one, "tokenizer.json"), str) for one in _HUB[name]):
        return ""
    return f"would come from the Hugging Face hub ({_HUB[name][0]}); or put {where} into a data folder (--data or OELM_DATA)"


def from_text(name: str, text: str, where: str) -> Tokens:
    """A tokenizer from the text of its file."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"{where}: is not a tokenizer.json ({str(error)[:100]}); save it again") from None
    return _wrapped(name, backend, where)


def fingerprint(backend: Any) -> str:
    """A hash of what decides the ids: equal for two files that differ in layout only."""
    whole = json.loads(backend.to_str())
    model = whole.get("model") or {}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ()]
    pre = _without(whole.get("pre_tokenizer"), "trim_offsets")
    deciding = {
        "type": model.get("type"),
        "unk": model.get("unk_token"),
        "vocab": model.get("vocab"),
        "merges": merges,
        "normalizer": whole.get("normalizer"),
        "pre_tokenizer": pre,
        "added": [[token["id"], token["content"]] for token in whole.get("added_tokens") or ()],
    }
    return digest(deciding, 64)


def _without(data: Any, key: str) -> Any:
    if isinstance(data, dict):
        return {name: _without(value, key) for name, value in data.items() if name != key}
    return [_without(value, key) for value in data] if isinstance(data, list) else data


@functools.lru_cache(maxsize=8)
def _from_stamped_file(name: str, path: Path, size: int, stamp: int) -> Tokens:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8; it is no tokenizer.json") from None
    tokens = from_text(name, text, str(path))
    expected = _KNOWN_SIZE.get(name)
    if expected is not None and tokens.vocab_size != expected:
        raise DataError(f"{path}: has {tokens.vocab_size:,} tokens, {name} has {expected:,}; it is another tokenizer")
    return tokens


def _from_file(name: str, path: Path) -> Tokens:
    try:
        stat = path.stat()
    except OSError:
        raise DataError(f"{path}: no such tokenizer file; check the name") from None
    return _from_stamped_file(name, path, stat.st_size, stat.st_mtime_ns)


def _locate(name: str, folder: Path | str | None) -> Path:
    for _, root in sources.data_folders(folder):
        path = root / "tokenizers" / _FOLDER[name] / "tokenizer.json"
        if path.is_file():
            return path
    path_or_none = _from_hub(name)
    if path_or_none is None:
        raise DataError(
            f"tokenizer {name!r} is not on this machine and the hub "
            f"{'is switched off (HF_HUB_OFFLINE)' if hub.offline() else 'cannot be reached'}: put "
            f"tokenizers/{_FOLDER[name]}/tokenizer.json into a folder and name it with --folder or OELM_DATA, "
            f'or use tokenizer = "bytes"'
        )
    return path_or_none


def _from_hub(name: str) -> Path | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    for repository in _HUB[name]:
        cached = try_to_load_from_cache(repository, "tokenizer.json")
        if isinstance(cached, str):
            return Path(cached)
    if hub.offline() or not hub.answers():
        return None
    try:
        return Path(hf_hub_download(_HUB[name][0], "tokenizer.json"))
    except Exception as error:  # the hub's library raises what its transport raises
        raise DataError(f"{_HUB[name][0]}: tokenizer.json cannot be fetched ({str(error)[:100]})") from None


def _wrapped(name: str, backend: Any, where: str) -> Tokens:
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "<|endoftext|>" inside a text is text, not the end of a document
    vocabulary = backend.get_vocab(with_added_tokens=True)
    eos = _first(vocabulary, _ENDS)
    if eos is None:
        raise DataError(f"{where}: has no end-of-text token (one of {', '.join(_ENDS)}); add one to the tokenizer")
    pad = _first(vocabulary, _PADS)
    return Tokens(
        name=name,
        backend=backend,
        hash=fingerprint(backend),
        vocab_size=max(vocabulary.values()) + 1,
        eos_id=eos,
        pad_id=eos if pad is None else pad,
        cls_id=_first(vocabulary, ("[CLS]", "<s>")),
        sep_id=_first(vocabulary, ("[SEP]", "</s>")),
        unk_id=_first(vocabulary, ("[UNK]", "<unk>")),
    )


def _first(vocabulary: dict[str, int], names: Iterable[str]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)


@functools.cache
def _bytes() -> Tokens:
    """One token a byte: id 0 to 255 is the byte, 256 the end of a document."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: byte for byte, letter in _byte_letters().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, normalized=False)])
    return _wrapped("bytes", backend, "the byte tokenizer")


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level BPE: GPT-2's table, in which printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


def train_bpe(texts: Iterable[str], vocabulary: int, name: str = "bpe") -> Tokens:
    """A byte-level BPE of at most `vocabulary` tokens, trained on these texts; every text has ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if not SMALLEST_VOCABULARY <= vocabulary <= LARGEST_VOCABULARY:
        raise ConfigError(
            f"a vocabulary of {vocabulary:,}: must be between {SMALLEST_VOCABULARY} (the bytes, the end of text and a "
            f"merge) and {LARGEST_VOCABULARY:,}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(END, normalized=False)],
        initial_alphabet=sorted(_byte_letters().values()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _wrapped(name, backend, "the trained tokenizer")


@functools.cache
def _demo_bpe() -> Tokens:
    """A small byte-level BPE, trained on the demo's training topics only."""
    from oelm.data.corpora import DemoFound

    return train_bpe((row["text"] for row in DemoFound().rows("train")), DEMO_VOCABULARY, "demo-bpe")

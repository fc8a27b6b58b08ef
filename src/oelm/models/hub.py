"""Hugging Face models by hub name or local folder, behind the calling interface of our own.

Owns loading (safetensors only, float32, heads drawn from the run's seed) and the differences between families: segment
numbers, packed documents, pooled heads, encoder-decoders. Refuses code from the hub and pickled weights, and a checkpoint
that does not fill the body of the model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from oelm.errors import CheckpointError, ConfigError, MachineError
from oelm.models.shapes import PACKAGED, HubModel


AUTO_CLASSES = {
    "lm": "AutoModelForCausalLM",
    "classify": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
    "qa": "AutoModelForQuestionAnswering",
    "seq2seq-classify": "AutoModelForSequenceClassification",
}

# The configurations of hub models that presets name, for counting and for random weights without a download:
# the configuration's type and what differs from that type's defaults.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base-uncased": ("bert", {}),
    "t5-small": (
        "t5",
        {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128},
    ),
    "facebook/bart-base": (
        "bart",
        {
            "d_model": 768,
            "vocab_size": 50265,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
        },
    ),
    "sentence-transformers/all-MiniLM-L6-v2": (
        "bert",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
}

_FOLDER_FORM = "config.json and model.safetensors"


class Hosted(nn.Module):
    """A Hugging Face model as `inner`: `model(inputs, ...)` gives features, `model.logits(features)` logits."""

    def __init__(self, inner: Any, spec: HubModel) -> None:
        super().__init__()
        self.inner = inner
        self.spec = spec
        self.config = inner.config
        accepted = inspect.signature(inner.forward).parameters
        self._accepts = frozenset(accepted)
        self._reads_types = "token_type_ids" in accepted and getattr(self.config, "type_vocab_size", 0) >= 2
        self._whole_head = False
        if spec.head == "lm":
            self._whole_head = not _reads_forward(inner, spec.path)

    @property
    def vocabulary(self) -> Tensor | None:
        """The matrix that alone turns features into logits of tokens; None where the head does more than that."""
        if self.spec.head != "lm":
            raise ConfigError(f"model.head is {self.spec.head!r}: only a language model has a vocabulary head")
        return None if self._whole_head else cast(Tensor, self.inner.get_output_embeddings().weight)

    def forward(
        self,
        inputs: Tensor,
        *,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        types: Tensor | None = None,
        last: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Features of `inputs` (B, T): hidden states of a language model, else what `logits` needs."""
        given: dict[str, Any] = {"input_ids": inputs}
        if cache is not None:
            given |= {"past_key_values": cache, "use_cache": True}
        if documents is not None:
            given |= self._packed(documents)
        elif mask is not None:
            given["attention_mask"] = mask.long()
        if types is not None and self._reads_types:
            given["token_type_ids"] = types
        if self.spec.head == "lm":
            return cast(Tensor, self.inner(**given).logits if self._whole_head else self._body(given))
        if self.spec.head == "seq2seq-classify":
            if hasattr(self.inner, "_shift_right"):  # T5's decoder is not fed by itself, BART's is
                given["decoder_input_ids"] = self.inner._shift_right(inputs)
            return _at(self._body(given), mask, last)
        if self.spec.head == "classify" and hasattr(self.inner, "score"):
            return _at(self._body(given), mask, last)
        out = self.inner(**given)
        return torch.stack((out.start_logits, out.end_logits), dim=-1) if self.spec.head == "qa" else out.logits

    def logits(self, features: Tensor) -> Tensor:
        """What the head says of the features."""
        if self.spec.head == "lm":
            return features if self._whole_head else cast(Tensor, self.inner.get_output_embeddings()(features))
        if self.spec.head == "seq2seq-classify":
            return cast(Tensor, self.inner.classification_head(features))
        if self.spec.head == "classify" and hasattr(self.inner, "score"):
            return cast(Tensor, self.inner.score(features))
        return features

    def new_cache(self) -> Any:
        """An empty cache for generation."""
        return _transformers().DynamicCache(config=self.config)

    def _body(self, given: dict[str, Any]) -> Tensor:
        return cast(Tensor, self.inner.base_model(**given).last_hidden_state)

    def _packed(self, documents: Tensor) -> dict[str, Tensor]:
        """The mask and positions that keep packed documents apart."""
        if "position_ids" not in self._accepts:
            raise ConfigError(
                f"{self.spec.path}: a {self.config.model_type} model takes no positions, so packed documents would leak; "
                'use data.packing = "windows"'
            )
        steps = torch.arange(documents.shape[1], device=documents.device)
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = torch.where(begins, steps, 0).cummax(dim=1).values
        same = documents[:, :, None] == documents[:, None, :]
        seen = (same & (steps[:, None] >= steps[None, :]))[:, None]
        if self.config._attn_implementation != "sdpa":  # written-out attention adds its mask: true would be 1, false 0
            dtype = next(self.inner.parameters()).dtype
            seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return {"attention_mask": seen, "position_ids": steps - starts}


def _at(hidden: Tensor, mask: Tensor | None, last: Tensor | None) -> Tensor:
    """Hidden states at the last valid position."""
    if last is None:
        last = torch.full_like(hidden[:, 0, 0], hidden.shape[1] - 1, dtype=torch.long)
        if mask is not None:
            last = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).amax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


@torch.no_grad()
def _reads_forward(inner: Any, path: str) -> bool:
    """Whether logits are features times the output embedding and nothing else (no bias, scale or cap): tried out.

    The same trial refuses a model whose tokens see what comes after them: it would learn to copy its targets.
    """
    head = inner.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.is_meta:
        return False
    training = inner.training
    inner.eval()
    probe = torch.tensor([[0, 1, 2], [0, 1, 3]], device=weight.device) % weight.shape[0]
    hidden = inner.base_model(input_ids=probe).last_hidden_state
    whole = inner(input_ids=probe).logits
    inner.train(training)
    if not torch.allclose(whole[0, :2], whole[1, :2], rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"{path}: a {inner.config.model_type} model sees the tokens to come and cannot be a language model; "
            "use head = 'classify', 'tag' or 'qa'"
        )
    if getattr(head, "bias", None) is not None or hidden.shape[-1] != weight.shape[1]:
        return False
    return torch.allclose(hidden @ weight.t(), whole, rtol=1e-4, atol=1e-5)


def load_hub(
    spec: HubModel, *, vocab: int | None = None, labels: int | None = None, seed: int = 0, context: int | None = None
) -> Hosted:
    """The model of a hub name or folder in float32; what is not in its checkpoint is drawn from the seed."""
    transformers = _transformers()
    source, revision = locate(spec)
    with _quiet(transformers), torch.random.fork_rng(devices=[]), _explained(spec):
        try:
            inner = _load(transformers, source, revision, spec, vocab, labels, seed, context, local=True)
        except OSError:
            if Path(source).is_dir() or not _hub_answers():
                raise
            inner = _load(transformers, source, revision, spec, vocab, labels, seed, context, local=False)
        hosted = Hosted(inner, spec)
    return hosted.train()


def _load(
    transformers: Any,
    source: str,
    revision: str | None,
    spec: HubModel,
    vocab: int | None,
    labels: int | None,
    seed: int,
    context: int | None,
    *,
    local: bool,
) -> Any:
    """The model itself; `local`: from a folder or the cache alone, without asking the hub for something newer."""
    fetch = {"revision": revision, "trust_remote_code": False, "local_files_only": local}
    config = _config(transformers, source, spec, labels, fetch)
    _check_fit(config, spec, vocab, context)
    auto = getattr(transformers, AUTO_CLASSES[spec.head])
    if type(config) not in auto._model_mapping:
        raise ConfigError(
            f"{spec.path}: transformers has no {spec.head!r} head for {config.model_type} models; choose another head"
        )
    torch.manual_seed(seed)
    if spec.config_only:
        return auto.from_config(config, dtype=torch.float32)
    inner, report = auto.from_pretrained(
        source,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **fetch,
    )
    _check_filled(inner, report, spec)
    return inner


def locate(spec: HubModel) -> tuple[str, str | None]:
    """Where a model is: a folder, a package that carries it, or its name and revision on the hub."""
    path = Path(spec.path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path}: is a folder without config.json; a model's folder has {_FOLDER_FORM}")
        return str(path), None
    if path.exists():
        raise ConfigError(f"{path}: is a file; name the folder that has {_FOLDER_FORM}")
    if spec.path.startswith(("/", "./", "../", "~")) or spec.path.count("/") > 1:
        raise ConfigError(f"{path}: no such folder; a model's folder has {_FOLDER_FORM}")
    package, inside = PACKAGED.get(spec.path, ("", ""))
    found = importlib.util.find_spec(package) if package and spec.revision is None else None
    if found is not None and found.submodule_search_locations:
        folder = Path(next(iter(found.submodule_search_locations))) / inside
        if (folder / "config.json").is_file():
            return str(folder), None
    return spec.path, spec.revision


def _hub_answers() -> bool:
    """Whether the hub can be reached, asked once: its own client tries again for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MachineError(
            "transformers is not installed, and Hugging Face models need it; pip install 'oelm[hf]'"
        ) from None
    return transformers


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and load reports: what matters of them is checked here and said as an error."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _explained(spec: HubModel) -> Iterator[None]:
    """What transformers and the hub raise, as one line of ours."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"{spec.path}: its safetensors file is damaged ({_first_line(error)}); get it again"
        ) from None
    except OSError as error:
        if Path(spec.path).expanduser().is_dir():
            raise ConfigError(
                f"{spec.path}: cannot be loaded ({_first_line(error)}); the folder must have {_FOLDER_FORM} "
                "(pickled .bin files are never read)"
            ) from None
        raise MachineError(
            f"{spec.path}: is no local folder and cannot be had from the hub ({_first_line(error)}); "
            f"download it where there is a network and set model.path to the folder with {_FOLDER_FORM}"
        ) from None
    except (ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{spec.path}: transformers cannot build this model ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def _config(transformers: Any, source: str, spec: HubModel, labels: int | None, fetch: dict[str, Any]) -> Any:
    given = dict(fetch)
    if spec.head in ("classify", "tag", "seq2seq-classify"):
        given["num_labels"] = labels or spec.labels
    elif spec.head == "qa":
        given["num_labels"] = 2
    if spec.config_only and source in CONFIGS and spec.revision is None:
        kind, changes = CONFIGS[source]
        labels_given = {"num_labels": given["num_labels"]} if "num_labels" in given else {}
        config = transformers.AutoConfig.for_model(kind, **changes, **labels_given)
    else:
        config = transformers.AutoConfig.from_pretrained(source, **given)
    config.use_cache = False  # training never reads it; generation asks for it
    if spec.head == "seq2seq-classify" and not getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f'{spec.path}: a {config.model_type} model is no encoder-decoder; use head = "classify" for it'
        )
    if spec.head == "classify" and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f'{spec.path}: a {config.model_type} model is an encoder-decoder; use head = "seq2seq-classify" for it'
        )
    return config


def _check_fit(config: Any, spec: HubModel, vocab: int | None, context: int | None) -> None:
    rows = getattr(config, "vocab_size", None)
    if vocab is not None and rows is not None and vocab > rows:
        raise ConfigError(
            f"{spec.path}: has {rows:,} token embeddings and the data's tokenizer {vocab:,} tokens; "
            "set data.tokenizer to the model's own tokenizer.json"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and config.model_type in ("roberta", "xlm-roberta", "camembert"):
        longest -= (getattr(config, "pad_token_id", None) or 0) + 1  # their positions start behind the padding's
    if context is not None and longest is not None and context > longest:
        raise ConfigError(
            f"{spec.path}: reads at most {longest} tokens and data.context = {context}; lower data.context"
        )


def _check_filled(inner: Any, report: dict[str, Any], spec: HubModel) -> None:
    """Only heads of tasks may be absent from a checkpoint; a body that stays random is another model's checkpoint."""
    prefix = "" if spec.head == "lm" else inner.base_model_prefix + "."
    names = {
        *report["missing_keys"],
        *(entry if isinstance(entry, str) else entry[0] for entry in report["mismatched_keys"]),
    }
    body = sorted(name for name in names if name.startswith(prefix) and ".pooler." not in name)
    if body:
        raise CheckpointError(
            f"{spec.path}: its checkpoint does not fill {len(body)} tensors of a {inner.config.model_type} model, "
            f"{body[0]} first; is it this model's checkpoint?"
        )

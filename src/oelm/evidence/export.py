"""A finished run as a folder that others can use: weights, tokenizer, and a model card written from the record.

Our language models become GPT-2 of transformers where every part of them can be said there, and only after the logits
were compared; Hugging Face models are saved by their own library. Refuses add-ons and heads that would be lost.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import oelm
from oelm.errors import ConfigError, DataError, MachineError
from oelm.evidence.results import read_record, replace_text
from oelm.models.shapes import Shape


if TYPE_CHECKING:
    from torch import nn

    from oelm.train.run import Run

ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new"}
TOLERANCE = 1e-4  # of logits, float32, between our code and transformers'


def export(folder: Path | str, target: Path | str, *, checkpoint: str = "best", push: str | None = None) -> Path:
    """Write `target`: model, tokenizer and README.md; with `push`, upload it to that repository of the hub."""
    from oelm.evidence.probes import load_run

    folder, target = Path(folder), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: is there already; name a folder that is new or empty")
    record = read_record(folder / "result.json")
    run, model = load_run(folder, checkpoint)
    converted = to_gpt2(model, run) if isinstance(run.model, Shape) else None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as made:
        if converted is None:
            oelm.save_pretrained(model, made)
        else:
            converted.save_pretrained(made)
        _save_tokenizer(run, Path(made))
        replace_text(Path(made) / "README.md", card(folder, record, run))
        Path(made).chmod(0o755)
        if target.exists():
            target.rmdir()
        Path(made).rename(target)
        Path(made).mkdir()  # the context manager removes it
    if push is not None:
        _push(target, push)
    return target


def to_gpt2(model: nn.Module, run: Run) -> Any:
    """Our language model as transformers' GPT2LMHeadModel, its logits compared with ours."""
    import torch

    try:
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.utils import logging
    except ImportError:
        raise MachineError("export: needs transformers; pip install 'oelm[hf]'") from None
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    shape: Any = model.shape
    for reason in _not_gpt2(run, shape):
        raise ConfigError(f"export: GPT-2 has no place for {reason}; such a model is read with oelm only (oelm sample)")
    config = GPT2Config.from_dict(
        {
            "vocab_size": shape.vocab,
            "n_positions": shape.context,
            "n_embd": shape.width,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.hidden,
            "activation_function": ACTIVATIONS[shape.activation],
            "resid_pdrop": shape.dropout,
            "embd_pdrop": shape.dropout,
            "attn_pdrop": shape.dropout,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": shape.tied,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    )
    converted: Any = GPT2LMHeadModel(config)
    converted.load_state_dict(_gpt2_weights(model, shape))
    converted.tie_weights()
    converted.eval()
    ids = torch.randint(0, shape.vocab, (2, min(shape.context, 64)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.logits(model(ids))  # type: ignore[operator]
        theirs = converted(ids).logits
    worst = float((ours - theirs).abs().max())
    if not worst <= TOLERANCE * max(1.0, float(ours.abs().max())):
        raise DataError(f"export: GPT-2's logits differ from this model's by {worst:.2g}; nothing was written")
    return converted


def _not_gpt2(run: Run, shape: Any) -> list[str]:
    """What GPT-2 cannot express, in words; empty: it can."""
    return [
        words
        for present, words in (
            (shape.head != "lm", f"the head {shape.head!r}"),
            (bool(run.variant.addons), f"the add-ons {', '.join(run.variant.addons)}"),
            (run.variant.init == "slices", "heads without Q/K matrices"),
            (shape.positions != "learned", f"{shape.positions} positions"),
            (shape.norm != "layer", f"the norm {shape.norm!r}"),
            (not shape.causal, "attention that looks ahead"),
            (shape.kv_heads not in (None, shape.heads), "shared key heads"),
        )
        if present
    ]


def _gpt2_weights(model: Any, shape: Any) -> dict[str, Any]:
    """GPT-2's names and its transposed matrices; a projection without biases gets zeros."""
    import torch

    def bias(linear: Any) -> Any:
        return torch.zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias

    weights = {
        "transformer.wte.weight": model.embed.weight,
        "transformer.wpe.weight": model.position.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
        "lm_head.weight": model.embed.weight if shape.tied else model.head.weight,
    }
    for number, block in enumerate(model.blocks):
        at = f"transformer.h.{number}."
        a = block.attn
        weights |= {
            f"{at}ln_1.weight": block.norm1.weight,
            f"{at}ln_1.bias": block.norm1.bias,
            f"{at}ln_2.weight": block.norm2.weight,
            f"{at}ln_2.bias": block.norm2.bias,
            f"{at}attn.c_attn.weight": torch.cat([a.q.weight, a.k.weight, a.v.weight]).t(),
            f"{at}attn.c_attn.bias": torch.cat([bias(a.q), bias(a.k), bias(a.v)]),
            f"{at}attn.c_proj.weight": a.o.weight.t(),
            f"{at}attn.c_proj.bias": bias(a.o),
            f"{at}mlp.c_fc.weight": block.mlp.up.weight.t(),
            f"{at}mlp.c_fc.bias": bias(block.mlp.up),
            f"{at}mlp.c_proj.weight": block.mlp.down.weight.t(),
            f"{at}mlp.c_proj.bias": bias(block.mlp.down),
        }
    return {name: tensor.detach().float().contiguous() for name, tensor in weights.items()}


def card(folder: Path, record: dict[str, Any], run: Run) -> str:
    """The model card: what was trained on what, numbers with intervals over sibling seeds, limits."""
    from oelm.evidence.labels import model_label, variant_label
    from oelm.evidence.report import template_text

    data = record.get("data") or {}
    siblings = _siblings(folder, run)
    identified = run.identified()
    view = {
        "name": str(record.get("run_id") or folder.name),
        "study": record.get("study") or "none",
        "status": record.get("status"),
        "model": model_label(identified["model"]),
        "variant": variant_label(run.variant),
        "task": run.model.head,
        "data": run.data.name,
        "data_status": data.get("status") or "unknown",
        "demonstration": data.get("status") in ("demo", "synthetic"),
        "partial": data.get("status") == "partial",
        "selection": run.data.selection,
        "fingerprint": data.get("fingerprint") or "not recorded",
        "tokens_seen": data.get("tokens_seen"),
        "params": record.get("params") or {},
        "digest": (record.get("frozen_digest") or {}).get("end") or "nothing is frozen",
        "metrics": _numbers(record, siblings),
        "seeds": len(siblings),
        "settings": [
            (key, json.dumps(value)) for group in ("optimizer", "budget") for key, value in identified[group].items()
        ],
        "seed": run.seed,
        "precision": run.precision,
        "environment": list((record.get("environment") or {}).items()),
    }
    return template_text(view, "card.md.j2")


def _siblings(folder: Path, run: Run) -> list[dict[str, Any]]:
    """Finished records beside this one that differ from it in the seed only, itself included."""
    found = []
    for path in sorted(folder.resolve().parent.glob("*/result.json")):
        record = read_record(path)
        same = {key: value for key, value in record["run"].items() if key != "seed"}
        mine = {key: value for key, value in run.model_dump(mode="json").items() if key != "seed"}
        if record.get("status") == "done" and same == mine:
            found.append(record)
    return found


def _numbers(record: dict[str, Any], siblings: list[dict[str, Any]]) -> list[dict[str, str]]:
    """This run's metrics, and the mean over seeds with its t interval."""
    from scipy import stats

    lines = []
    for split in ("validation", "test"):
        for metric, value in ((record.get("metrics") or {}).get(split) or {}).items():
            if not isinstance(value, float):  # counts are whole numbers
                continue
            values = [((one.get("metrics") or {}).get(split) or {}).get(metric) for one in siblings]
            numbers = [float(v) for v in values if isinstance(v, int | float)]
            over = "one seed: no interval"
            if len(numbers) > 1 and max(numbers) > min(numbers):
                low, high = stats.ttest_1samp(numbers, 0.0).confidence_interval(0.95)
                over = f"{sum(numbers) / len(numbers):.5g} ({low:.5g} to {high:.5g}), {len(numbers)} seeds"
            lines.append({"name": f"{split} {metric}", "value": f"{value:.5g}", "over": over})
    return lines


def _save_tokenizer(run: Run, folder: Path) -> None:
    from oelm.data.tokens import load_tokens

    if run.data.name == "recall":
        return
    tokens = load_tokens(run.data.tokenizer)
    replace_text(folder / "tokenizer.json", tokens.to_json())
    replace_text(
        folder / "tokenizer_config.json",
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": run.data.context}) + "\n",
    )


def _push(folder: Path, repository: str) -> None:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MachineError("export --push: needs huggingface_hub; pip install 'oelm[hf]'") from None
    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except Exception as error:  # the hub's client raises what its transport raises
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise MachineError(
            f"{folder}: is written, but the hub did not take it ({reason}); log in and push it"
        ) from None

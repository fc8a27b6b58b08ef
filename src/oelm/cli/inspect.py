"""`oelm inspect`: what a model and a variant cost, from the configuration alone. No download; no weights but for --time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from oelm.cli.output import as_json
from oelm.errors import ConfigError, nearest


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("inspect")(inspect)


def inspect(
    name: str = typer.Argument(
        ...,
        metavar="NAME_OR_CONFIG",
        help="A preset (bert-base, gpt-512), or a Hugging Face config.json or its folder.",
    ),
    variant: str = typer.Option("oelm-freeze", "--variant", help="The treatment to account for."),
    classes: int = typer.Option(None, "--classes", min=1, help="Labels of a classifier [bert-base: 3]."),
    length: int = typer.Option(None, "--length", min=1, help="Tokens a sequence [at most 512, as the model allows]."),
    batch: int = typer.Option(1, "--batch", min=1, help="Sequences a step."),
    time: bool = typer.Option(
        False, "--time", help="Also measure a training step on this machine: the ceiling of time. Builds the model."
    ),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Count parameters, bytes and FLOPs of a model from its configuration, and what freezing can save of them.

    Examples: oelm inspect bert-base --length 128; oelm inspect gpt-512 --variant progressive --json;
    oelm inspect gpt-512 --time
    """
    from oelm.method.account import account
    from oelm.method.variant import named

    treatment = named(variant)
    model = empty_model(name, classes, _fastest() if time else "meta")
    found = account(model, variant=treatment, length=length, batch=batch, time=time)
    if json_:
        as_json({"name": name} | found.to_dict())
    else:
        typer.echo(f"{name}: {found}")


def _fastest() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def empty_model(name: str, classes: int | None = None, device: str = "meta") -> Any:
    """The model of that name or configuration file, on the meta device, or untrained on another."""
    import torch

    from oelm.models.shapes import PRESETS, Shape

    with torch.device(device):
        preset = PRESETS.get(name)
        if isinstance(preset, Shape):
            from oelm.models.gpt import GPT

            return GPT(_with_classes(preset, name, classes))
        if preset is not None:
            return _hub_model(preset.path, preset.head, classes or preset.labels)
        if name in known_configs():
            return _hub_model(name, None, classes)
        return _from_file(name, classes)


def _with_classes(shape: Any, name: str, classes: int | None) -> Any:
    if classes is None:
        return shape
    if shape.head not in ("classify", "tag"):
        raise ConfigError(f"--classes: {name} is not a classifier; leave it out, or inspect {name}-classifier")
    return shape.changed(labels=classes)


def _hub_model(path: str, head: str | None, classes: int | None) -> Any:
    transformers = _transformers()
    kind, changes = known_configs()[path]
    config = transformers.AutoConfig.for_model(kind, **changes)
    return _build(config, "seq2seq-classify" if head == "seq2seq-classify" else None, classes)


def _from_file(name: str, classes: int | None) -> Any:
    from oelm.models.shapes import PRESETS

    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise ConfigError(f"{name}: the folder has no config.json; name a Hugging Face model folder")
        known = [*PRESETS, *known_configs()]
        raise ConfigError(f"{name}: is neither a preset nor a config.json or its folder; {nearest(name, known)}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        kind = data["model_type"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{file}: is not a Hugging Face config.json (a JSON table with model_type)") from None
    transformers = _transformers()
    known_types = list(transformers.CONFIG_MAPPING.keys())
    if not isinstance(kind, str) or kind not in known_types:
        raise ConfigError(f"{file}: model_type {kind!r} is unknown here; {nearest(str(kind), known_types)}")
    try:
        config = transformers.AutoConfig.for_model(kind).from_dict(data)
    except Exception as error:  # a foreign configuration's own checks may raise anything
        raise ConfigError(f"{file}: the configuration cannot be used ({' '.join(str(error).split())[:200]})") from None
    architecture = (data.get("architectures") or [None])[0]
    return _build(config, architecture, classes)


def _build(config: Any, architecture: str | None, classes: int | None) -> Any:
    """The named architecture, a classifier when classes are asked for, else the bare model."""
    transformers = _transformers()
    try:
        if classes is not None:
            config.num_labels = classes
            return transformers.AutoModelForSequenceClassification.from_config(config)
        if architecture is not None and hasattr(transformers, architecture):
            return getattr(transformers, architecture)._from_config(config)
        return transformers.AutoModel.from_config(config)
    except Exception as error:  # as above
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{config.model_type}: no model can be built from this configuration ({reason})") from None


def known_configs() -> dict[str, tuple[str, dict[str, Any]]]:
    from oelm.models.hub import CONFIGS

    return CONFIGS


def _transformers() -> Any:
    from oelm.errors import MachineError

    try:
        import transformers
    except ImportError:
        raise MachineError("transformers is not installed; pip install 'oelm[hf]'") from None
    return transformers

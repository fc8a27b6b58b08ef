"""Tidy results: one row a run, failed and diverged ones too, as a CSV that no hand can have edited.

Owns results/<study>.csv, <study>.curves.csv, for classifiers <study>.examples.csv (which test examples each compared run
got right) and <study>.sha256 (the form of sha256sum). Refuses a CSV whose digest is not the recorded one, and numbers that
are not finite: they become empty cells beside the status.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.errors import DataError, MachineError
from oelm.evidence.labels import data_label, model_label, variant_label
from oelm.study.cost import devices_of
from oelm.study.rates import chosen_rates
from oelm.study.rows import Planned, Study, expand
from oelm.train import examples
from oelm.train.run import Run
from oelm.values import canonical


Row = dict[str, Any]
Curve = list[tuple[float, float]]
Packed = tuple[int, str]  # how many test examples, and which were right, as oelm.train.examples packs them

FIRST = [
    *("study", "row", "arm", "purpose", "cell", "at", "run_id", "status", "seed", "lr", "model", "variant"),
    *("optimizer", "schedule", "batch", "steps", "epochs", "token_budget", "precision"),
    *("data", "data_status", "fingerprint", "tokens_seen", "examples_seen"),
]
METRICS = ("validation", "best", "test")
LAST = [
    *("params_total", "params_trainable", "params_frozen", "logit_std", "frozen_start", "frozen_end"),
    *("seconds", "devices", "train_seconds", "step_seconds_median", "tokens_per_s", "peak_bytes", "energy_j"),
    *("oelm", "torch", "python", "device", "source", "git", "dirty", "error", "settings"),
]
TEXT = {
    *("study", "row", "arm", "purpose", "cell", "at", "run_id", "status", "model", "variant", "optimizer", "schedule"),
    *("precision", "data", "data_status", "fingerprint", "frozen_start", "frozen_end"),
    *("oelm", "torch", "python", "device", "source", "git", "error", "settings", "right"),
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "'")


@dataclass(frozen=True, kw_only=True)
class Table:
    """All runs of a study, in a fixed order, with their validation curves and test examples by run id."""

    study: str
    rows: tuple[Row, ...]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    right: Mapping[str, Packed] = field(default_factory=dict)

    @property
    def metrics(self) -> list[str]:
        """The columns that hold measured quality: validation.loss, test.accuracy, …"""
        return sorted({key for row in self.rows for key in row if key.split(".")[0] in METRICS and "." in key})

    def where(self, **wanted: Any) -> list[Row]:
        """The rows whose columns have these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]


def collect(study: Study, runs_root: Path | str, overrides: Mapping[str, Any] | None = None) -> Table:
    """Every run the study plans and every record in its folder: runs not yet made are rows too ("missing")."""
    folder = Path(runs_root) / study.name
    records = {record["run_id"]: record for record in _records(folder)}
    rates = chosen_rates(study, records.values(), overrides)
    planned = {one.id: one for one in expand(study, rates, overrides)}
    rows = [_row(study.name, one, records.get(one.id)) for one in planned.values()]
    rows += [_stray(study.name, record) for run_id, record in records.items() if run_id not in planned]
    compared = [one.id for one in planned.values() if one.purpose != "tune" and one.id in records]
    right = {run_id: _right(folder / run_id, records[run_id]) for run_id in compared}
    return table(
        study.name,
        rows,
        {run_id: _curve(record) for run_id, record in records.items()},
        {run_id: packed for run_id, packed in right.items() if packed},
    )


def table(
    study: str,
    rows: Iterable[Row],
    curves: Mapping[str, Curve] | None = None,
    right: Mapping[str, Packed] | None = None,
) -> Table:
    """A table in its fixed order, its texts free of control characters."""
    ordered = sorted(({key: visible(value) for key, value in row.items()} for row in rows), key=_order)
    return Table(
        study=study,
        rows=tuple(ordered),
        curves=dict(sorted((curves or {}).items())),
        right=dict(sorted((right or {}).items())),
    )


def write(results: Table, folder: Path | str) -> Path:
    """Write the CSV, its curves, its examples and their digests, each replaced whole; the same table, the same bytes."""
    folder = Path(folder)
    texts = {f"{results.study}.csv": _to_csv(results), f"{results.study}.curves.csv": _curves_to_csv(results)}
    examples_name = f"{results.study}.examples.csv"
    if results.right:
        texts[examples_name] = _examples_to_csv(results)
    digests = "".join(f"{_sha256(text.encode())}  {name}\n" for name, text in texts.items())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (*texts.items(), (f"{results.study}.sha256", digests)):
            replace_text(folder / name, text)
        if not results.right:
            (folder / examples_name).unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: results cannot be written there ({error.strerror or error}); check it") from None
    return folder / f"{results.study}.csv"


def load(path: Path | str) -> Table:
    """Read a results CSV and its curves back, refusing what was edited since the program wrote it."""
    path = Path(path)
    raw = _read(path)
    listed = (line.split("  ", 1) for line in _read(path.with_suffix(".sha256")).decode().splitlines() if "  " in line)
    sums = {name: digest for digest, name in listed}
    curves_path, examples_path = path.with_suffix(".curves.csv"), path.with_suffix(".examples.csv")
    curves_raw = _read(curves_path)
    examples_raw = _read(examples_path) if examples_path.name in sums or examples_path.exists() else None
    for name, content in ((path.name, raw), (curves_path.name, curves_raw), (examples_path.name, examples_raw)):
        if content is None:
            continue
        if sums.get(name) != _sha256(content):
            raise DataError(
                f"{path.parent / name}: was edited after the program wrote it (its SHA-256 differs); run `oelm analyze {path.stem}` again from the run records"
            )
    rows = [
        {key: _cell_value(key, text) for key, text in row.items()} for row in csv.DictReader(io.StringIO(raw.decode()))
    ]
    curves: dict[str, Curve] = {}
    for line in csv.DictReader(io.StringIO(curves_raw.decode())):
        curves.setdefault(str(_cell_value("run_id", line["run_id"])), []).append(
            (float(line["tokens"]), float(line["loss"]))
        )
    right = {}
    for line in csv.DictReader(io.StringIO((examples_raw or b"").decode())):
        right[str(_cell_value("run_id", line["run_id"]))] = (
            int(line["count"]),
            str(_cell_value("right", line["right"])),
        )
    return Table(study=path.stem, rows=tuple(rows), curves=curves, right=right)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_record(path: Path) -> dict[str, Any]:
    """One result.json, or a DataError that names it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is not a run record ({error}); run that row again") from None
    if not isinstance(record, dict) or record.get("schema") != 1 or not isinstance(record.get("run"), dict):
        raise DataError(f"{path}: is no run record of this version (schema 1); run that row again")
    return record


def _records(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("*/result.json")):
        record = read_record(path)
        record["run_id"] = path.parent.name
        found.append(record)
    return found


def _row(study: str, planned: Planned, record: Mapping[str, Any] | None) -> Row:
    names: Row = {
        "row": planned.row,
        "arm": planned.arm,
        "purpose": planned.purpose,
        "cell": planned.cell,
        "at": canonical(planned.at),
        "run_id": planned.id,
    }
    return settings_columns(study, names, planned.run) | (_measured(record) if record else {"status": "missing"})


def _stray(study: str, record: Mapping[str, Any]) -> Row:
    """A record that the study's file does not plan (any more): shown, never compared."""
    run = Run.read(record["run"], where=f"{record['run_id']}/result.json")
    row = str(record.get("row"))
    names: Row = {
        "row": row,
        "arm": row,
        "purpose": "not planned",
        "cell": row,
        "at": "{}",
        "run_id": record["run_id"],
    }
    return settings_columns(study, names, run) | _measured(record)


def settings_columns(study: str, names: Row, run: Run) -> Row:
    """The columns that a run's settings fill, after those that name it."""
    data = run.identified()
    optimizer, budget = data["optimizer"], data["budget"]
    return (
        {"study": study}
        | names
        | {
            "seed": run.seed,
            "lr": optimizer["lr"],
            "model": model_label(data["model"]),
            "variant": variant_label(run.variant),
            "optimizer": optimizer["name"],
            "schedule": optimizer["schedule"],
            "batch": budget["batch"],
            "steps": budget["steps"],
            "epochs": budget["epochs"],
            "token_budget": budget["tokens"],
            "precision": run.precision,
            "data": data_label(data["data"]),
            "settings": canonical(data),
        }
    )


def _measured(record: Mapping[str, Any]) -> Row:
    """The columns that come from a run record, flat."""
    data, cost, environment = (_table(record, name) for name in ("data", "cost", "environment"))
    params, digests = _table(record, "params"), _table(record, "frozen_digest")
    row: Row = {
        "status": str(record.get("status")),
        "data_status": data.get("status"),
        "fingerprint": data.get("fingerprint"),
        "tokens_seen": number(data.get("tokens_seen")),
        "examples_seen": number(data.get("examples_seen")),
        "params_total": number(params.get("total")),
        "params_trainable": number(params.get("trainable")),
        "params_frozen": number(params.get("frozen")),
        "logit_std": number(record.get("logit_std")),
        "frozen_start": digests.get("start"),
        "frozen_end": digests.get("end"),
        "error": record.get("error"),
    }
    for name in ("seconds", "train_seconds", "step_seconds_median", "tokens_per_s", "peak_bytes", "energy_j"):
        row[name] = number(cost.get(name))
    row["devices"] = None if row["seconds"] is None else devices_of(record)
    for name in ("oelm", "torch", "python", "device", "source", "git"):
        value = environment.get(name)
        row[name] = None if value is None else str(value)
    dirty = environment.get("dirty")
    row["dirty"] = None if dirty is None else int(bool(dirty))
    for split in METRICS:
        for metric, value in _table(_table(record, "metrics"), split).items():
            if not isinstance(value, dict | list | str):
                row[f"{split}.{metric}"] = number(value)
    return row


def _table(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | int | None:
    """The number if it is one and finite; a missing, NaN or infinite value is None, never 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _curve(record: Mapping[str, Any]) -> Curve:
    points = record.get("curve")
    return [
        (float(point[0]), float(point[1]))
        for point in (points if isinstance(points, list) else [])
        if isinstance(point, list) and len(point) == 2 and number(point[0]) is not None and number(point[1]) is not None
    ]


def _right(folder: Path, record: Mapping[str, Any]) -> Packed | None:
    """Which test examples a run got right, where it kept them; they must say what its record says."""
    bits = examples.read(folder, record)
    if bits is None:
        return None
    said = _table(_table(record, "metrics"), "test").get("accuracy")
    if not isinstance(said, int | float) or abs(float(bits.mean()) - said) > 1e-6:
        raise DataError(
            f"{folder}: {examples.FILE} gives a test accuracy of {bits.mean():.6f}, result.json says {said}; run that row again"
        )
    return len(bits), examples.pack(bits)


def visible(value: Any) -> Any:
    """Text on one line: control characters, bidi marks and lone surrogates as their escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value) if isinstance(value, str) else value


def _order(row: Row) -> tuple[Any, ...]:
    return (
        str(row.get("at")),
        str(row.get("arm")),
        str(row.get("purpose")),
        row.get("lr") or 0.0,
        row.get("seed") or 0,
        str(row.get("run_id")),
    )


def _to_csv(results: Table) -> str:
    middle = results.metrics
    return _csv_text([*FIRST, *middle, *LAST], results.rows)


def _curves_to_csv(results: Table) -> str:
    lines = ({"run_id": run, "tokens": t, "loss": v} for run, curve in results.curves.items() for t, v in curve)
    return _csv_text(["run_id", "tokens", "loss"], lines)


def _examples_to_csv(results: Table) -> str:
    lines = ({"run_id": run, "count": count, "right": packed} for run, (count, packed) in results.right.items())
    return _csv_text(["run_id", "count", "right"], lines)


def _csv_text(columns: list[str], rows: Iterable[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n", extrasaction="raise")
    writer.writeheader()
    for row in rows:
        writer.writerow({column: _cell_text(row.get(column)) for column in columns})
    return buffer.getvalue()


def _cell_text(value: Any) -> str:
    """A cell that no spreadsheet takes for a formula; numbers in their shortest exact form."""
    if value is None:
        return ""
    if isinstance(value, int | float):
        whole = isinstance(value, int) or (value.is_integer() and abs(value) < 2**53)
        return str(int(value)) if whole else repr(value)
    text = str(value)
    return "'" + text if text.startswith(_FORMULA) else text


def _cell_value(column: str | None, text: str | None) -> Any:
    if not text:
        return None
    if column in TEXT:
        return text[1:] if text.startswith("'") else text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise DataError(f"results: column {column!r} holds {text[:40]!r}, which is no number") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; `oelm analyze` writes it, with its digest, from the run records"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

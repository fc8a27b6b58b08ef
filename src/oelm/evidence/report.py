"""Reports: one self-contained HTML, Markdown, LaTeX and PDF of a study, rendered from its table and nothing else.

Owns the view that every format shares and the templates' escaping. The same table gives the same bytes (a PDF: by the
same browser). Refuses a page that would load anything from a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.errors import ConfigError, MachineError, nearest
from oelm.evidence import narrative
from oelm.evidence.labels import budget_of, count, duration, stratum_of
from oelm.evidence.results import Row, Table, replace_text
from oelm.evidence.statistics import Comparison, judge
from oelm.study.rows import Study


if TYPE_CHECKING:
    from jinja2 import Environment

FORMATS = ("html", "md", "tex", "pdf", "figures")
SHOWN = ("loss", "perplexity", "bits_per_byte", "accuracy", "macro_f1", "f1", "exact_match")  # of all that is recorded
View = dict[str, Any]


def render(
    study: Study,
    results: Table,
    out_dir: Path | str,
    formats: Sequence[str] = ("html", "md", "tex"),
    *,
    allow_mixed: bool = False,
) -> list[Path]:
    """Write the study's report in the asked formats; the paths written."""
    check_formats(formats)
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    view = view_of(study, results, allow_mixed=allow_mixed)
    return write_formats(view, folder, study.name, formats, page="report")


def check_formats(formats: Sequence[str]) -> None:
    """Refuse an unknown format before anything is rendered."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"--format {name}: is not one of {', '.join(FORMATS)}; {nearest(name, FORMATS)}")


def write_formats(view: View, folder: Path, stem: str, formats: Sequence[str], *, page: str) -> list[Path]:
    """One view in several formats."""
    written = []
    for name in ("html", "md", "tex"):
        if name in formats or (name == "html" and "pdf" in formats):
            written.append(write_page(view, folder / f"{stem}.{name}", f"{page}.{name}.j2"))
    if "figures" in formats:
        written += _save_figures(view, folder / f"{stem}-figures")
    if "pdf" in formats:
        from oelm.evidence.pdf import print_pdf

        written.append(print_pdf(folder / f"{stem}.html", folder / f"{stem}.pdf"))
    return written


def view_of(study: Study, results: Table, *, allow_mixed: bool = False) -> View:
    """Everything a template shows, already computed; strings are raw, the templates escape."""
    comparisons = judge(study, results, allow_mixed=allow_mixed)
    primary = [c for c in comparisons if c.primary]
    return {
        "title": study.name,
        "question": study.question,
        "demonstration": any(row.get("data_status") in ("demo", "synthetic") for row in results.rows),
        "answer": narrative.answer(comparisons, results),
        "study_notes": list(study.notes),
        "comparisons": [_comparison(c, primary) for c in primary],
        "elsewhere": [_comparison(c, comparisons) for c in comparisons if not c.primary],
        "points": [_points(c, primary) for c in primary if c.points],
        "arms": _arms(results),
        "figures": _figures(study, results, comparisons),
        "settings": _settings(results),
        "deviations": narrative.deviations(study, comparisons, results),
        "change": narrative.what_would_change(comparisons),
        "cost": _cost(results),
        "environment": _environment(results),
        "runs": [_run(row) for row in results.rows],
        "raw_comparisons": comparisons,
    }


def _figures(study: Study, results: Table, comparisons: Sequence[Comparison]) -> list[Any]:
    from oelm.evidence import figures

    return figures.of_study(study, results, comparisons)


def _comparison(c: Comparison, among: Sequence[Comparison]) -> View:
    e = c.estimate
    return {
        "arm": c.arm,
        "against": c.against,
        "short": narrative.place_among(c, among),
        "where": c.place,
        "metric": "perplexity" if c.as_perplexity else c.metric,
        "n": c.n,
        "rates": f"{_rate(c.rate)} / {_rate(c.reference_rate)}",
        "difference": narrative.difference(c, e.mean) if e else "–",
        "difference_order": e.mean if e else "",
        "t": narrative.interval(c, e.t_interval) if e else "–",
        "bca": narrative.interval(c, e.bca_interval) if e else "–",
        "examples": narrative.over_examples(c),
        "p": narrative.p_value(e.p) if e else "–",
        "p_order": e.p if e and e.p is not None else "",
        "p_smallest": narrative.p_value(e.p_smallest) if e else "–",
        "p_holm": narrative.p_value(c.p_holm),
        "family": c.family,
        "p_tost": narrative.p_value(e.p_equivalent) if e else "–",
        "p_not_worse": narrative.p_value(c.p_not_worse_holm),
        "margin": narrative.margin(c),
        "verdict": c.said,
        "kind": "none" if c.demonstration else c.verdict.split()[0],
    }


def _points(c: Comparison, among: Sequence[Comparison]) -> View:
    place = narrative.place_among(c, among)
    return {
        "name": f"{c.arm} against {c.against}" + (f", {place}" if place else ""),
        "metric": c.metric,
        "rows": [
            {
                "seed": p.seed,
                "value": f"{p.value:.6g}",
                "reference": f"{p.reference:.6g}",
                "difference": narrative.difference(c, p.value - p.reference),
            }
            for p in c.points
        ],
    }


def _arms(results: Table) -> list[View]:
    """One line per arm and place: what it measured, cost and contained; tuning budgets beside the chosen rate."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in results.rows:
        if row["purpose"] in ("compare", "original"):
            groups.setdefault((stratum_of(row), *budget_of(row), row["arm"]), []).append(row)
    lines = []
    for (stratum, _, budget, arm), rows in sorted(groups.items()):
        tuned = [r for r in results.where(arm=arm, purpose="tune") if stratum_of(r) == stratum]
        done = [row for row in rows if row["status"] == "done"]
        lines.append(
            {
                "arm": arm,
                "variant": ", ".join(sorted({str(row["variant"]) for row in rows})),
                "where": f"{stratum}, {budget}",
                "rate": ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in rows})),
                "tuning": f"{len({r['lr'] for r in tuned})} rates × {len({r['seed'] for r in tuned})} seeds"
                if tuned
                else "none",
                "n": f"{len(done)} of {len(rows)}",
                "diverged": sum(row["status"] == "diverged" for row in rows),
                "measured": _measured(done, results.metrics),
                "trainable": count(_median(done, "params_trainable")),
                "total": count(_median(done, "params_total")),
                "frozen": _share(done),
                "logit_std": _short(_median(done, "logit_std")),
                "step": duration(_median(done, "step_seconds_median")),
                "tokens": count(_median(done, "tokens_seen")),
            }
        )
    return lines


def _measured(rows: list[Row], metrics: list[str]) -> list[View]:
    """Mean and spread of each recorded metric but those of the best checkpoint."""
    found = []
    for metric in metrics:
        values = [float(row[metric]) for row in rows if row.get(metric) is not None]
        if metric.startswith("best.") or metric.split(".")[1] not in SHOWN or not values:
            continue
        mean = sum(values) / len(values)
        spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else " (one seed)"
        found.append({"metric": metric, "text": f"{mean:.5g}{spread}", "order": mean})
    return found


def _median(rows: list[Row], column: str) -> float | None:
    values = sorted(float(row[column]) for row in rows if row.get(column) is not None)
    return values[len(values) // 2] if values else None


def _share(rows: list[Row]) -> str:
    frozen, total = _median(rows, "params_frozen"), _median(rows, "params_total")
    return "–" if frozen is None or not total else f"{100 * frozen / total:.2f} %"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:g}"


def _settings(results: Table) -> list[View]:
    """Settings as dotted keys: one value where all runs share it, the list of values where they differ."""
    values: dict[str, dict[str, None]] = {}
    for row in results.rows:
        for key, value in _flat(json.loads(row["settings"]) if row.get("settings") else {}):
            values.setdefault(key, {})[json.dumps(value, ensure_ascii=False)] = None
    lines = []
    for key, seen in sorted(values.items()):
        shown = list(seen)[:12]
        more = f", … ({len(seen)} in all)" if len(seen) > len(shown) else ""
        lines.append({"key": key, "value": ", ".join(shown) + more, "differs": len(seen) > 1})
    return lines


def _flat(table: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cost(results: Table) -> list[tuple[str, str]]:
    seconds = [row["seconds"] * (row.get("devices") or 1.0) for row in results.rows if row.get("seconds") is not None]
    energy = [row["energy_j"] for row in results.rows if row.get("energy_j") is not None]
    peak = [row["peak_bytes"] for row in results.rows if row.get("peak_bytes") is not None]
    tokens = [row["tokens_seen"] for row in results.rows if row.get("tokens_seen") is not None]
    return [
        ("runs with a measured time", f"{len(seconds)} of {len(results.rows)}"),
        ("device-hours", f"{sum(seconds) / 3600:.3g}" if seconds else "not measured"),
        ("energy", f"{sum(energy) / 3.6e6:.3g} kWh ({len(energy)} runs)" if energy else "not measured"),
        ("largest peak memory", f"{max(peak) / 2**30:.3g} GiB" if peak else "not measured"),
        ("tokens trained on", count(float(sum(tokens))) if tokens else "not recorded"),
    ]


def _environment(results: Table) -> list[tuple[str, str]]:
    lines = []
    for name in ("oelm", "torch", "python", "device", "source", "git", "data_status", "fingerprint"):
        values = sorted({str(row[name]) for row in results.rows if row.get(name) is not None})
        lines.append((name.replace("_", " "), ", ".join(values) or "not recorded"))
    return lines


def _run(row: Row) -> View:
    return {
        "id": row["run_id"],
        "arm": row["arm"],
        "purpose": row["purpose"],
        "status": row["status"],
        "seed": row["seed"],
        "lr": _rate(row["lr"]),
        "loss": _short(row.get("validation.loss")),
        "accuracy": _short(row.get("validation.accuracy")),
        "seconds": duration(row.get("seconds")),
        "seconds_order": row.get("seconds") or "",
        "error": row.get("error") or "",
    }


def _save_figures(view: View, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in view["figures"]:
        (folder / f"{figure.name}.pdf").write_bytes(figure.pdf())
        replace_text(folder / f"{figure.name}.svg", figure.svg)
        written += [folder / f"{figure.name}.svg", folder / f"{figure.name}.pdf"]
    return written


def write_page(view: View, path: Path, template: str) -> Path:
    """One view as one file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, template_text(view, template))
    except OSError as error:
        raise MachineError(f"{path}: cannot be written ({error.strerror or error}); check the folder") from None
    return path


# ---- templates


def template_text(view: View, template: str) -> str:
    """One template filled with one view; the template's own suffix says what is escaped."""
    kind = template.removesuffix(".j2").rsplit(".", 1)[1]
    text = _environment_for(kind).get_template(template).render(**view)
    return text if text.endswith("\n") else text + "\n"


def _environment_for(kind: str) -> Environment:
    """Jinja2 with every expression escaped for its format; `safe` is never used on data."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    options: dict[str, Any] = {"loader": PackageLoader("oelm.evidence"), "undefined": StrictUndefined}
    if kind == "html":
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, **options)
        script = (Path(__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
        environment.globals["script"] = script
        environment.globals["script_hash"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return environment
    escapes: dict[str, Callable[[str], str]] = {"md": markdown_escape, "tex": latex_escape, "toml": json.dumps}
    escape = escapes[kind]
    # No HTML here: `finalize` escapes every expression for Markdown, LaTeX or TOML.
    return Environment(
        finalize=lambda value: escape(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )


_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#!|~$&])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "×": r"$\times$",
    "…": r"\ldots{}",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "·": r"$\cdot$",
    "²": r"\textsuperscript{2}",
    "±": r"$\pm$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
    "|": r"\textbar{}",
}


def markdown_escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text))


def latex_escape(text: str) -> str:
    """Text that LaTeX prints as it is, on one line."""
    return "".join(_LATEX.get(c, c) for c in _one_line(text))


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)

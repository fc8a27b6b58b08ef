"""original.toml against the specification's table, field by field. The table is typed here a second time on purpose."""

from __future__ import annotations

import pytest

from oelm.method.variant import name_of
from oelm.models.shapes import PRESETS, HubModel, Shape
from oelm.study.rows import Planned, expand, load_study


# id: data, variant, rate, (unit, amount), batch, reported
TABLE = {
    "XNLI-01": ("xnli-en", "baseline", 2e-5, ("epochs", 3), 16, 0.7671),
    "XNLI-02": ("xnli-en", "orthogonalize-frozen", 1e-4, ("epochs", 3), 16, 0.7779),
    "SST-2-01": ("sst2", "baseline", 2e-5, ("epochs", 3), 32, 0.9312),
    "SST-2-02": ("sst2", "orthogonalize-frozen", 1e-4, ("epochs", 3), 32, 0.9128),
    "MNLI-01": ("mnli", "baseline", 2e-5, ("epochs", 3), 32, 0.8344),
    "MNLI-02": ("mnli", "orthogonalize-frozen", 1e-4, ("epochs", 3), 32, 0.8223),
    "GPT-01": ("tinystories", "baseline", 3e-4, ("steps", 100_000), 8, 4.27),
    "GPT-02": ("tinystories", "oelm-freeze", 1e-3, ("steps", 100_000), 8, 4.69),
    "GPT-03": ("tinystories", "oelm-random", 1e-3, ("steps", 100_000), 8, 4.97),
    "GPT-04": ("openwebtext", "baseline", 3e-4, ("steps", 100_000), 8, 47.24),
    "GPT-05": ("openwebtext", "oelm-freeze", 1e-3, ("steps", 100_000), 8, 54.29),
    "GPT-06": ("wikitext-103", "baseline", 3e-4, ("steps", 200_000), 8, 25.13),
    "GPT-07": ("wikitext-103", "oelm-freeze", 1e-3, ("steps", 200_000), 8, 29.03),
    "IMDB-01": ("imdb", "baseline", 3e-4, ("epochs", 3), 16, 0.7856),
    "IMDB-02": ("imdb", "oelm-freeze", 1e-3, ("epochs", 3), 16, 0.8570),
    "AGNEWS-01": ("ag-news", "baseline", 3e-4, ("epochs", 3), 16, 0.8705),
    "AGNEWS-02": ("ag-news", "oelm-freeze", 1e-3, ("epochs", 3), 16, 0.9274),
    "GXNLI-01": ("xnli-en", "baseline", 3e-4, ("epochs", 3), 16, 0.4639),
    "GXNLI-02": ("xnli-en", "oelm-freeze", 1e-3, ("epochs", 3), 16, 0.5799),
}
STUDY = load_study("original")
ROWS: dict[str, Planned] = {one.row: one for one in expand(STUDY)}


def test_all_nineteen_and_no_more() -> None:
    assert list(ROWS) == list(TABLE)


@pytest.mark.parametrize("row", TABLE)
def test_a_row_is_what_the_table_says(row: str) -> None:
    data, variant, rate, (unit, amount), batch, reported = TABLE[row]
    run = ROWS[row].run
    assert run.data.name == data
    assert name_of(run.variant) == variant
    assert run.optimizer.lr == rate
    assert getattr(run.budget, unit) == amount
    assert run.budget.batch == batch
    assert run.seed == 42
    said = next(one.reported for one in STUDY.rows if one.name == row)
    assert reported in said.values()


@pytest.mark.parametrize("row", TABLE)
def test_what_all_rows_share(row: str) -> None:
    optimizer = ROWS[row].run.optimizer
    assert (optimizer.name, optimizer.beta1, optimizer.beta2) == ("adamw", 0.9, 0.999)
    assert (optimizer.weight_decay, optimizer.decay, optimizer.clip) == (0.01, "all", 1.0)
    assert ROWS[row].run.budget.accumulate == 1
    assert not ROWS[row].run.data.bucketing


def of_kind(start: str) -> list[Planned]:
    return [one for row, one in ROWS.items() if row.startswith(start)]


def test_language_models() -> None:
    for one in of_kind("GPT-"):
        run = one.run
        assert run.model == PRESETS["gpt-512"]
        assert isinstance(run.model, Shape)
        assert (run.model.width, run.model.layers, run.model.heads, run.model.hidden) == (512, 6, 8, 2048)
        assert (run.model.context, run.model.vocab, run.model.dropout) == (512, 50257, 0.1)
        assert run.model.tied
        assert not run.model.qkv_bias
        assert (run.model.positions, run.model.norm) == ("learned", "layer")
        assert (run.data.tokenizer, run.data.context, run.data.packing) == ("gpt2", 512, "windows")
        assert (run.optimizer.schedule, run.optimizer.warmup, run.optimizer.floor) == ("cosine", 1000, 0.0)
        assert run.eval_every == 1000
        assert run.precision != "fp32"


def test_classifiers_select_on_the_test_split_as_the_original_did() -> None:
    for one in of_kind("IMDB-") + of_kind("AGNEWS-") + of_kind("GXNLI-"):
        run = one.run
        assert isinstance(run.model, Shape)
        assert not run.model.causal
        assert (run.model.head, run.model.pool) == ("classify", "last")
        assert run.model.labels == {"imdb": 2, "ag-news": 4, "xnli-en": 3}[run.data.name]
        assert run.data.selection == "test"
        assert run.data.context == 512
        assert (run.optimizer.schedule, run.optimizer.warmup) == ("cosine", 0)
        assert any("test split" in note for note in one.notes)


def test_bert() -> None:
    for one in of_kind("XNLI-") + of_kind("SST-") + of_kind("MNLI-"):
        run = one.run
        assert isinstance(run.model, HubModel)
        assert run.model.path == "bert-base-uncased"
        assert run.model.labels == (2 if run.data.name == "sst2" else 3)
        assert (run.data.tokenizer, run.data.context) == ("bert", 128)
        assert (run.optimizer.schedule, run.optimizer.warmup) == ("linear", 0.1)


def test_faults_are_labelled() -> None:
    for row, one in ROWS.items():
        assert "one seed" in one.notes, row
        if row.endswith("-02") or row in ("GPT-03", "GPT-05", "GPT-07"):
            assert any("uncrossed rate" in note for note in one.notes), row
    assert any("norm NOT matched" in note for note in ROWS["GPT-03"].notes)

"""Every study's first row trains two steps: its settings, with the model and the budget made tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oelm.data.corpora import CORPORA
from oelm.data.sources import find_local
from oelm.data.task_table import TASKS
from oelm.models.shapes import HubModel
from oelm.study.rows import cells, expand, load_study, studies_here
from oelm.study.runner import Options, task_of
from oelm.study.worker import train_one


TINY = {"vocab_size": 300, "num_labels": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random models of the families that studies name, as folders of the hub's form."""
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **TINY
    )
    t5 = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=1, **TINY
    )
    folders = {}
    for name, model in (
        ("bert", transformers.BertModel(bert)),
        ("t5", transformers.T5ForConditionalGeneration(t5)),
    ):
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
    return folders


def overrides(run: Any, models: dict[str, str]) -> dict[str, Any]:
    """What makes a row tiny and leaves its kind as it is."""
    changes: dict[str, Any] = {
        "budget.steps": 2,
        "budget.batch": 64,
        "optimizer.warmup": 0,
        "eval_every": 0,
        "precision": "fp32",
    }
    if run.data.name in CORPORA:  # preparing the real text takes minutes
        changes |= {"data.name": "demo", "data.tokenizer": "demo-bpe", "data.context": 32}
    elif run.data.name == "recall":
        changes |= {"data.pairs": 4, "data.context": 32}
    else:
        context = 96 if run.data.name == "squad" else 32
        changes |= {"data.tokenizer": "bytes", "data.context": context, "data.examples": 64}
    if isinstance(run.model, HubModel):
        changes["model.path"] = models["t5" if run.model.head.startswith("seq2seq") else "bert"]
    else:
        changes |= {"model.width": 32, "model.heads": 4, "model.hidden": 64}
    return changes


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted(studies_here()))
def test_the_first_row_trains_two_steps(
    name: str, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "cache"))
    study = load_study(name)
    rates = {cell.name: study.tuning.rates[0] for cell in cells(study)} if study.tuning else {}
    plain = expand(study, rates)[0]
    dataset = TASKS.get(plain.run.data.name)
    if dataset is not None and find_local(dataset) is None:
        pytest.skip(f"data {plain.run.data.name!r} is not beside the checkout (../shared/data)")
    planned = expand(study, rates, overrides(plain.run, models), (plain.row,))[0]
    answer = train_one(task_of(planned, study.name, tmp_path, "cpu", Options()))
    assert answer["code"] == 0, answer["message"]
    record = json.loads((tmp_path / planned.id / "result.json").read_bytes())
    assert record["status"] == "done"
    assert record["metrics"]["validation"]
    metrics = {one.metric for one in study.contrasts()} | ({study.tuning.select} if study.tuning else set())
    for metric in metrics:
        assert isinstance(record["metrics"]["validation"].get(metric), float), (metric, record["metrics"]["validation"])
    split = {one.split for one in study.contrasts()}
    assert "test" not in split or record["metrics"]["test"]

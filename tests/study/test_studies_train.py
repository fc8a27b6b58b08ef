"""Every study's first row trains two steps: its settings, with the model and the budget made tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oelm.data.corpora import CORPORA
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small files of every kind of task, as a user would bring them."""
    made: dict[str, Any] = {
        "classify": lambda n: {"text": f"a {'good' if n % 2 else 'bad'} film {n}", "label": n % 2},
        "tag": lambda n: {"tokens": ["Anna", f"n{n}"], "tags": ["B-per", "O"]},
        "qa": lambda n: {
            "context": f"Town {n} has a tower.",
            "question": "What has it?",
            "answers": {"text": ["tower"], "answer_start": [len(f"Town {n} has a ")]},
        },
    }
    folders = {}
    for task, row in made.items():
        folder = tmp_path_factory.mktemp(task)
        for i, split in enumerate(("train", "validation", "test")):
            lines = [json.dumps(row(1000 * i + n)) for n in range(64)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        folders[task] = str(folder)
    return folders


def overrides(run: Any, models: dict[str, str], texts: dict[str, str]) -> dict[str, Any]:
    """What makes a row tiny and leaves its kind as it is: no study's own data is read."""
    changes: dict[str, Any] = {
        "budget.steps": 2,
        "budget.batch": 16,
        "optimizer.warmup": 0,
        "eval_every": 0,
        "precision": "fp32",
    }
    if run.data.name in CORPORA:
        changes |= {"data.name": "demo", "data.tokenizer": "demo-bpe", "data.context": 32}
    elif run.data.name == "recall":
        changes |= {"data.pairs": 4, "data.context": 32}
    else:
        kind = TASKS[run.data.name].kind
        here = {"name": "local", "path": texts[kind], "task": kind, "tokenizer": "bytes", "context": 96}
        changes["data"] = here | {"selection": run.data.selection}
    if isinstance(run.model, HubModel):
        changes["model.path"] = models["t5" if run.model.head.startswith("seq2seq") else "bert"]
    else:
        changes |= {"model.width": 32, "model.heads": 4, "model.hidden": 64}
    return changes


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted(studies_here()))
def test_the_first_row_trains_two_steps(
    name: str, models: dict[str, str], texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "home"))
    study = load_study(name)
    rates = {cell.name: study.tuning.rates[0] for cell in cells(study)} if study.tuning else {}
    plain = expand(study, rates)[0]
    planned = expand(study, rates, overrides(plain.run, models, texts), (plain.row,))[0]
    answer = train_one(task_of(planned, study.name, tmp_path, "cpu", Options()))
    assert answer["code"] == 0, answer["message"]
    record = json.loads((tmp_path / planned.id / "result.json").read_bytes())
    assert record["status"] == "done"
    for one in study.contrasts():
        if plain.arm in (one.arm, one.against):
            assert isinstance(record["metrics"][one.split].get(one.metric), float), (one, record["metrics"])
    if study.tuning:
        assert isinstance(record["metrics"]["best"].get(study.tuning.select), float)

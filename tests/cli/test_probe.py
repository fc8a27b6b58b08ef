"""oelm probe and oelm export on a run that the loop made."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import oelm
from oelm.cli.main import app
from oelm.errors import ConfigError
from oelm.evidence.probes import load_run


RUN = """
model = { preset = "gpt-tiny", dropout = 0.0 }
data = { name = "demo", tokenizer = "demo-bpe", context = 64 }
variant = "oelm-freeze"
budget = { steps = 3, batch = 2 }
optimizer = { lr = 1e-3 }
precision = "fp32"
eval_tokens = 512
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    (folder / "run.toml").write_text(RUN)
    done = CliRunner().invoke(
        app, ["train", str(folder / "run.toml"), "--out", str(folder / "runs"), "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    (result,) = (folder / "runs").rglob("result.json")
    return result.parent


@pytest.fixture
def bert_run(tmp_path):
    """Train a small BERT of a local folder with a variant; the run's folder."""
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertModel(transformers.BertConfig(vocab_size=300, **small)).save_pretrained(tmp_path / "bert")
    rows = [f"text number {n},{'odd' if n % 2 else 'even'}" for n in range(60)]
    (tmp_path / "rows.csv").write_text("text,label\n" + "\n".join(rows) + "\n")

    def train(variant):
        variant = variant if variant[0] in '"{' else f'"{variant}"'
        (tmp_path / "run.toml").write_text(f"""
model = {{ path = "{tmp_path}/bert", head = "classify" }}
data = {{ name = "local", path = "{tmp_path}/rows.csv", task = "classify", tokenizer = "bytes", context = 32 }}
variant = {variant}
budget = {{ steps = 2, batch = 4 }}
optimizer = {{ lr = 1e-3 }}
""")
        out = tmp_path / "run"
        done = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--out", str(out), "--device", "cpu"])
        assert done.exit_code == 0, done.output
        return out

    return train


def test_probe_writes_a_page_and_json(run_folder, tmp_path):
    page = tmp_path / "probe.html"
    done = CliRunner().invoke(
        app, ["probe", str(run_folder), str(run_folder), "--out", str(page), "--text", "a b <b> a b", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found) == 2
    assert len(found[0]["entropy"]) == 2
    assert len(found[0]["entropy"][0]) == 4
    assert found[0]["loss"] > 0
    text = page.read_text()
    assert "Prefix matching" in text
    assert "<b>" not in text


def test_export_loads_in_plain_transformers(run_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    target = tmp_path / "model"
    done = CliRunner().invoke(app, ["export", str(run_folder), str(target)])
    assert done.exit_code == 0, done.output
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    ids = tokenizer("The statement", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], model.config.vocab_size)
    card = (target / "README.md").read_text()
    record = json.loads((run_folder / "result.json").read_text())
    assert record["data"]["fingerprint"] in card
    assert "Demonstration" in card
    assert f"{record['metrics']['validation']['loss']:.5g}" in card


@pytest.mark.parametrize("variant", ["baseline", "oelm-freeze", "progressive"])
def test_export_of_a_hugging_face_run_loads_and_restores(bert_run, tmp_path, variant):
    transformers = pytest.importorskip("transformers")
    folder, target = bert_run(variant), tmp_path / "model"
    done = CliRunner().invoke(app, ["export", str(folder), str(target), "--checkpoint", "latest"])
    assert done.exit_code == 0, done.output
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(target)
    trained = load_run(folder, "latest")[1].inner.state_dict()
    assert trained.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, trained[name]) for name, value in plain.state_dict().items())
    oelm.restore(plain, target)
    training = [layer.attention.self.query.weight.requires_grad for layer in plain.bert.encoder.layer]
    assert training == {"baseline": [True, True], "oelm-freeze": [False, False], "progressive": [False, True]}[variant]


@pytest.mark.parametrize("variant", ['"tied-shift"', '{ base = "baseline", addons = ["head-gain"] }'])
def test_export_refuses_what_plain_transformers_would_drop(bert_run, tmp_path, variant):
    done = CliRunner().invoke(app, ["export", str(bert_run(variant)), str(tmp_path / "model")])
    assert "has no place for the add-ons" in str(done.exception)
    assert not (tmp_path / "model").exists()


def test_export_does_not_overwrite_and_probe_names_what_is_no_run(run_folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    done = CliRunner().invoke(app, ["export", str(run_folder), str(tmp_path / "full")])
    assert isinstance(done.exception, ConfigError)
    assert (tmp_path / "full" / "file").read_text() == "mine"
    done = CliRunner().invoke(app, ["probe", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "run.toml" in str(done.exception)

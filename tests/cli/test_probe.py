"""oelm probe and oelm export on a run that the loop made."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.errors import ConfigError


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


def test_export_does_not_overwrite_and_probe_names_what_is_no_run(run_folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    done = CliRunner().invoke(app, ["export", str(run_folder), str(tmp_path / "full")])
    assert isinstance(done.exception, ConfigError)
    assert (tmp_path / "full" / "file").read_text() == "mine"
    done = CliRunner().invoke(app, ["probe", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "run.toml" in str(done.exception)

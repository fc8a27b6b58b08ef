"""oelm compare: a template of twelve lines that the study's own reader accepts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.errors import ConfigError
from oelm.study.rows import expand, load_study


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'my "data".csv').write_text("text,label\ngood,yes\nbad,no\n")
    return tmp_path


def invoke(*words):
    return CliRunner().invoke(app, ["compare", *words])


def test_the_template_is_written_once_and_is_a_study(here):
    done = invoke("mine.toml", "--data", 'my "data".csv', "--model", "some/model", "--label", "answer")
    assert done.exit_code == 0, done.output
    study = load_study(here / "mine.toml")
    planned = expand(study)
    assert len((here / "mine.toml").read_text().splitlines()) == 12
    assert {one.arm for one in planned} == {"baseline", "keep-frozen", "orthogonalize-frozen"}
    assert planned[0].run.model.path == "some/model"
    assert planned[0].run.data.path == str(here / 'my "data".csv')
    assert planned[0].run.data.columns == {"text": "text", "label": "answer"}
    before = (here / "mine.toml").read_bytes()
    assert invoke("mine.toml", "--dry-run").exit_code == 0
    assert (here / "mine.toml").read_bytes() == before


def test_a_preset_stands_for_its_pretrained_model(here):
    assert invoke("mine.toml", "--data", 'my "data".csv', "--model", "minilm").exit_code == 0
    assert expand(load_study(here / "mine.toml"))[0].run.model.path == "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mine.toml", "--data", 'my "data".csv', "--model", "gpt-512"), "from scratch"),
        (("mine.toml",), "--data"),
        (("mine.toml", "--data", "no.csv"), "no.csv"),
        (("mine",), ".toml"),
    ],
)
def test_mistakes_are_one_line(here, words, said):
    done = invoke(*words)
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)
    assert not (here / "mine.toml").exists()

"""`oelm inspect` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from oelm.cli import inspect
from oelm.errors import ConfigError, OelmError


def app() -> typer.Typer:
    made = typer.Typer()
    made.callback()(lambda: None)
    inspect.register(made)
    return made


def run(*words: str) -> str:
    result = CliRunner().invoke(app(), ["inspect", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def data(*words: str) -> Any:
    return json.loads(run(*words, "--json"))


def test_bert_base_needs_no_download_and_has_three_classes() -> None:
    found = data("bert-base", "--length", "128")
    assert found["parameters"]["total"] == 109_484_547
    assert found["parameters"]["trainable"] == 95_310_339
    assert found["parameters"]["frozen"] == 14_174_208
    assert found["variant"] == "oelm-freeze"
    assert round(100 * found["ceilings"]["flops"], 1) == 5.4
    assert data("bert-base", "--classes", "5")["parameters"]["total"] == 109_484_547 + 2 * 769


def test_gpt_512_as_a_table() -> None:
    text = run("gpt-512")
    for words in ("44,896,768", "3,145,728", "7.01 %", "12,582,912 bytes less", "2.2 %", "2.3 %", "length 512"):
        assert words in text
    assert "fault of measurement" in text


def test_time_is_measured_on_request() -> None:
    found = data("gpt-tiny", "--time")
    assert 0 < found["time"]["saved_share"] == found["ceilings"]["time"] < 0.5
    assert "of the time measured here" in run("gpt-tiny", "--time")


def test_variants_are_taken_by_name() -> None:
    assert data("gpt-tiny", "--variant", "baseline")["parameters"]["frozen"] == 0
    assert data("gpt-tiny", "--variant", "progressive")["parameters"]["thawing"] > 0


def config(folder: Path, **changes: Any) -> Path:
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    } | changes
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return file


def test_any_config_file_or_its_folder(tmp_path: Path) -> None:
    file = config(tmp_path)
    found = data(str(file))
    assert found["model"] == "LlamaForCausalLM"
    matrices = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
    assert found["parameters"]["total"] == matrices + 2 * 100 * 64 + 5 * 64
    assert found["parameters"]["frozen"] == 2 * (64 * 64 + 32 * 64)
    assert found["flops"]["length"] == 32
    assert data(str(tmp_path))["parameters"] == found["parameters"]
    assert data(str(tmp_path), "--classes", "2")["model"] == "LlamaForSequenceClassification"
    assert data(str(config(tmp_path, architectures=None)))["model"] == "LlamaModel"


def test_a_huge_model_is_counted_without_its_memory(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        hidden_size=8192,
        num_hidden_layers=8,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    assert data(str(file), "--length", "16")["parameters"]["total"] > 8 * 10**9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-513", "did you mean 'gpt-512'"),
        ("bert-bse", "did you mean 'bert-base'"),
        ("/nowhere/config.json", "neither a preset"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(name)


def test_wrong_words_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'oelm-freeze'"):
        run("gpt-tiny", "--variant", "oelm-freze")
    with pytest.raises(ConfigError, match="not a classifier"):
        run("gpt-512", "--classes", "3")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        run(str(tmp_path))
    assert CliRunner().invoke(app(), ["inspect", "gpt-tiny", "--length", "0"]).exit_code == 2


BERT = '{"model_type": "bert", '
DAMAGED = ["", "{", "[]", '"bert"', "{}", '{"model_type": 3}', '{"model_type": "bertt"}', "\x00", '{"model_type": []}']
DAMAGED += [BERT + '"hidden_size": "wide"}', BERT + '"hidden_size": 7}', '{"model_type": "mamba"}']


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_configurations_are_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(OelmError) as caught:
        run(str(file))
    assert "\n" not in str(caught.value)
    assert str(caught.value)

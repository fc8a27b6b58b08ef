"""Tiny random models of every family, with inputs, and what is to be found in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


WIDTH, LAYERS, HEADS, VOCAB = 32, 3, 4, 96
TOKENS = {"input_ids": (2, 9)}


@dataclass(frozen=True)
class Case:
    """build() gives the model in float64; forward(model) gives its main output."""

    make: Callable[[], nn.Module]
    forward: Callable[[nn.Module], Tensor]
    stacks: dict[str, int]  # stack -> attention layers
    heads: int = HEADS
    kv_heads: int = HEADS
    head_dim: int = 8
    fused: bool = False
    scaled: bool = True
    bias: bool = False  # of q
    plain: bool = True  # slices possible: width == heads * head_dim

    def build(self) -> nn.Module:
        """The same model each time; the global generator stays where it is."""
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.make()


def _settings(**more: Any) -> dict[str, Any]:
    base = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return base | more


def _hf(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return _stirred(made)

    return build


def _stirred(model: nn.Module) -> nn.Module:
    """Float64, evaluation, and no parameter at a neutral value: zeros and ones hide mistakes."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.1 * noise)
    return model


def _ids(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (2, 9), generator=generator)


def text(model: nn.Module) -> Tensor:
    return model(input_ids=_ids(model)).logits


def hidden(model: nn.Module) -> Tensor:
    return model(input_ids=_ids(model)).last_hidden_state


def seq2seq(model: nn.Module) -> Tensor:
    ids = _ids(model)
    return model(input_ids=ids, decoder_input_ids=ids[:, :6]).logits


def image(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return model(pixel_values=torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)).logits


def speech(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 8, 32, generator=generator, dtype=torch.float64)
    return model(input_features=features, decoder_input_ids=_ids(model)[:, :6]).logits


def stream(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return model(torch.randn(2, 9, WIDTH, generator=generator, dtype=torch.float64))


def attention(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, WIDTH, generator=generator, dtype=torch.float64)
    return model(x, x, x)[0]


def other_widths(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 9, WIDTH, generator=generator), torch.randn(2, 7, 40, generator=generator)
    return model(x.double(), y.double(), y.double())[0]


def tokens(model: nn.Module) -> Tensor:
    return model.logits(model(_ids(model)))


class TimmAttention(nn.Module):
    """timm.layers.Attention, in shape."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class TimmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = TimmAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(TimmBlock() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(1))


def _gpt(**more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from oelm.models.gpt import GPT
        from oelm.models.shapes import Shape

        settings = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "hidden": 48, "vocab": VOCAB, "context": 32}
        return _stirred(GPT(Shape(**(settings | {"dropout": 0.0} | more))))

    return build


def _encoder(**more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True, **more)
        return _stirred(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=not more))

    return build


MAIN, ENCODER, DECODER = {"main": LAYERS}, {"encoder": LAYERS}, {"decoder": LAYERS}
BOTH = {"encoder": LAYERS, "decoder": 2, "decoder.cross": 2}
_SEQ2SEQ = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": 64}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_decoder_layers": 2, "num_heads": HEADS}
_T5 |= {"vocab_size": VOCAB, "decoder_start_token_id": 0}
_GQA = _settings(num_key_value_heads=2)
_FALCON = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCAB}
_FALCON |= {"bos_token_id": 1, "eos_token_id": 2}

CASES: dict[str, Case] = {
    "gpt": Case(_gpt(), tokens, MAIN),
    "gpt-gqa-bias": Case(_gpt(kv_heads=2, qkv_bias=True, positions="rope"), tokens, MAIN, kv_heads=2, bias=True),
    "gpt2": Case(_hf("GPT2LMHeadModel", "GPT2Config", **_GPT2), text, MAIN, fused=True, bias=True),
    "gpt-neox": Case(_hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_settings()), text, MAIN, fused=True, bias=True),
    "gpt-neo": Case(
        _hf(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            **_settings(num_layers=LAYERS, num_heads=HEADS, attention_types=[[["global"], LAYERS]]),
        ),
        text,
        MAIN,
        scaled=False,
    ),
    "gptj": Case(_hf("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **_GPT2), text, MAIN),
    "llama": Case(_hf("LlamaForCausalLM", "LlamaConfig", **_GQA), text, MAIN, kv_heads=2),
    "mistral": Case(_hf("MistralForCausalLM", "MistralConfig", **_GQA), text, MAIN, kv_heads=2),
    "qwen2": Case(_hf("Qwen2ForCausalLM", "Qwen2Config", **_GQA), text, MAIN, kv_heads=2, bias=True),
    "qwen3": Case(
        _hf("Qwen3ForCausalLM", "Qwen3Config", **_GQA, head_dim=16), text, MAIN, kv_heads=2, head_dim=16, plain=False
    ),
    "gemma": Case(
        _hf("GemmaForCausalLM", "GemmaConfig", **_settings(num_key_value_heads=1, head_dim=16)),
        text,
        MAIN,
        kv_heads=1,
        head_dim=16,
        plain=False,
    ),
    "gemma2": Case(_hf("Gemma2ForCausalLM", "Gemma2Config", **_GQA, head_dim=8), text, MAIN, kv_heads=2),
    "gemma3": Case(_hf("Gemma3ForCausalLM", "Gemma3TextConfig", **_GQA, head_dim=8), text, MAIN, kv_heads=2),
    "olmo": Case(_hf("OlmoForCausalLM", "OlmoConfig", **_GQA), text, MAIN, kv_heads=2),
    "olmo2": Case(_hf("Olmo2ForCausalLM", "Olmo2Config", **_GQA), text, MAIN, kv_heads=2),
    "phi": Case(_hf("PhiForCausalLM", "PhiConfig", **_GQA, qk_layernorm=True), text, MAIN, kv_heads=2, bias=True),
    "phi3": Case(_hf("Phi3ForCausalLM", "Phi3Config", **_GQA), text, MAIN, kv_heads=2, fused=True),
    "falcon-groups": Case(
        _hf("FalconForCausalLM", "FalconConfig", **_FALCON, new_decoder_architecture=True, num_kv_heads=2),
        text,
        MAIN,
        kv_heads=2,
        fused=True,
    ),
    "falcon-mqa": Case(
        _hf("FalconForCausalLM", "FalconConfig", **_FALCON, multi_query=True, bias=True),
        text,
        MAIN,
        kv_heads=1,
        fused=True,
        bias=True,
    ),
    "falcon-old": Case(
        _hf("FalconForCausalLM", "FalconConfig", **_FALCON, multi_query=False, alibi=True), text, MAIN, fused=True
    ),
    "bloom": Case(
        _hf("BloomForCausalLM", "BloomConfig", hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCAB),
        text,
        MAIN,
        fused=True,
        bias=True,
    ),
    "mpt": Case(
        _hf(
            "MptForCausalLM",
            "MptConfig",
            d_model=WIDTH,
            n_heads=HEADS,
            n_layers=LAYERS,
            vocab_size=VOCAB,
            max_seq_len=64,
        ),
        text,
        MAIN,
        fused=True,
    ),
    "opt": Case(
        _hf("OPTForCausalLM", "OPTConfig", **_settings(ffn_dim=48, word_embed_proj_dim=WIDTH)), text, DECODER, bias=True
    ),
    "bert": Case(_hf("BertForSequenceClassification", "BertConfig", **_settings()), text, ENCODER, bias=True),
    "bert-base-model": Case(_hf("BertModel", "BertConfig", **_settings()), hidden, ENCODER, bias=True),
    "roberta": Case(_hf("RobertaForSequenceClassification", "RobertaConfig", **_settings()), text, ENCODER, bias=True),
    "distilbert": Case(
        _hf(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            dim=WIDTH,
            n_layers=LAYERS,
            n_heads=HEADS,
            hidden_dim=48,
            vocab_size=VOCAB,
            max_position_embeddings=64,
        ),
        text,
        MAIN,
        bias=True,
    ),
    "electra": Case(
        _hf("ElectraForSequenceClassification", "ElectraConfig", **_settings(embedding_size=16)),
        text,
        ENCODER,
        bias=True,
    ),
    "albert": Case(
        _hf("AlbertForSequenceClassification", "AlbertConfig", **_settings(embedding_size=16)),
        text,
        {"encoder": 1},
        bias=True,
    ),
    "albert-groups": Case(
        _hf("AlbertForMaskedLM", "AlbertConfig", **_settings(embedding_size=16, num_hidden_groups=3)),
        text,
        ENCODER,
        bias=True,
    ),
    "deberta-v2": Case(
        _hf(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **_settings(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
        ),
        text,
        ENCODER,
        bias=True,
        plain=False,
    ),
    "deberta-v3": Case(
        _hf(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **_settings(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, share_att_key=True),
        ),
        text,
        ENCODER,
        bias=True,
        plain=False,
    ),
    "modernbert": Case(
        _hf("ModernBertForSequenceClassification", "ModernBertConfig", **_settings(cls_token_id=1, sep_token_id=2)),
        text,
        MAIN,
        fused=True,
    ),
    "modernbert-decoder": Case(
        _hf("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", **_settings(cls_token_id=1, sep_token_id=2)),
        text,
        MAIN,
    ),
    "mpnet": Case(_hf("MPNetForSequenceClassification", "MPNetConfig", **_settings()), text, ENCODER, bias=True),
    "t5": Case(_hf("T5ForConditionalGeneration", "T5Config", **_T5), seq2seq, BOTH, scaled=False),
    "mt5": Case(_hf("MT5ForConditionalGeneration", "MT5Config", **_T5), seq2seq, BOTH, scaled=False),
    "bart": Case(
        _hf("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ, max_position_embeddings=64),
        seq2seq,
        BOTH,
        bias=True,
    ),
    "mbart": Case(
        _hf("MBartForConditionalGeneration", "MBartConfig", **_SEQ2SEQ, max_position_embeddings=64),
        seq2seq,
        BOTH,
        bias=True,
    ),
    "whisper": Case(
        _hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **_SEQ2SEQ,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        speech,
        BOTH,
        bias=True,
    ),
    "vit": Case(
        _hf(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=48,
            image_size=16,
            patch_size=8,
        ),
        image,
        MAIN,
        bias=True,
    ),
    "timm": Case(lambda: _stirred(TimmLike()), stream, MAIN, fused=True, bias=True),
    "torch-attention": Case(
        lambda: _stirred(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
        attention,
        {"main": 1},
        fused=True,
        bias=True,
        plain=False,
    ),
    "torch-attention-widths": Case(
        lambda: _stirred(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=40, vdim=40)),
        other_widths,
        {"main": 1},
        fused=True,
        bias=True,
        plain=False,
    ),
    "torch-encoder": Case(_encoder(), stream, MAIN, fused=True, bias=True, plain=False),
    "torch-encoder-no-bias": Case(_encoder(bias=False, norm_first=True), stream, MAIN, fused=True, plain=False),
}

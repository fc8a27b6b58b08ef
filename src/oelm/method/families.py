"""The table of families: how each names, fuses and scales its projections; and patterns for models outside it.

A family is a row. Owns also what an unknown model is told: the nearest module names and a pattern that would match.
Refuses to look inside a model further than names and shapes; projections.py does that.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from oelm.errors import MethodError, nearest
from oelm.method.split import ROLES


@dataclass(frozen=True)
class Family:
    """How one family's attention module is recognised and laid out. Paths are relative to it; `..` goes up.

    owner   a regular expression that the module's class name matches in full
    fused   the child that holds several roles at once; `roles` says which, `layout` how (see split.Layout)
    nested  the block is the module list one level above the nearest (T5: block.3.layer.0.SelfAttention)
    scaled  whether logits are divided by the square root of head_dim
    plain   whether q and k are plain products with the hidden state, so that a slice can take their place
    """

    name: str
    q: str = ""
    k: str = ""
    v: str = ""
    o: str = ""
    owner: str = r".*"
    fused: str = ""
    roles: tuple[str, ...] = ()
    layout: str = "concat"
    nested: bool = False
    scaled: bool = True
    plain: bool = True

    def path(self, role: str) -> str:
        """The child that holds this role."""
        return self.fused if role in self.roles else str(getattr(self, role))


QKV = ROLES
_T5 = r"\w*T5\w*Attention|SwitchTransformersAttention|Pop2PianoAttention|UdopAttention"

# The first row that fits wins: rows that ask for a class or for more children stand before the general ones.
FAMILIES: tuple[Family, ...] = (
    Family("torch MultiheadAttention", layout="in_proj", o="out_proj", plain=False),
    Family(
        "GPT-2 cross-attention", owner=r"\w*GPT2Attention", q="q_attn", fused="c_attn", roles=("k", "v"), o="c_proj"
    ),
    Family("GPT-2", owner=r"(\w*GPT2|ImageGPT)Attention", fused="c_attn", roles=QKV, o="c_proj"),
    Family("nanoGPT", owner=r"CausalSelfAttention", fused="c_attn", roles=QKV, o="c_proj"),
    Family(
        "GPT-NeoX, BLOOM, Falcon",
        owner=r"(GPTNeoX|Bloom|Falcon|Persimmon)\w*",
        fused="query_key_value",
        roles=QKV,
        layout="groups",
        o="dense",
    ),
    Family("Phi-3", owner=r"Phi[34]\w*", fused="qkv_proj", roles=QKV, o="o_proj"),
    Family("ModernBERT", owner=r"ModernBert\w*", fused="Wqkv", roles=QKV, o="Wo"),
    Family("MPT", owner=r"Mpt\w*", fused="Wqkv", roles=QKV, o="out_proj"),
    Family("timm", fused="qkv", roles=QKV, o="proj"),
    Family("T5", owner=_T5, q="q", k="k", v="v", o="o", nested=True, scaled=False),
    Family("OELM's GPT, MPNet", q="q", k="k", v="v", o="o"),
    Family("GPT-Neo", owner=r"GPTNeo\w*", q="q_proj", k="k_proj", v="v_proj", o="out_proj", scaled=False),
    Family("Llama, Mistral, Qwen, Gemma, OLMo, ViT", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),
    Family("OPT, BART, Whisper, CLIP", q="q_proj", k="k_proj", v="v_proj", o="out_proj"),
    Family("Phi", q="q_proj", k="k_proj", v="v_proj", o="dense"),
    Family("ModernBERT decoder", owner=r"ModernBert\w*", q="q_proj", k="k_proj", v="v_proj", o="Wo"),
    Family("DeBERTa", q="query_proj", k="key_proj", v="value_proj", o="../output.dense", plain=False),
    Family("DistilBERT", q="q_lin", k="k_lin", v="v_lin", o="out_lin"),
    Family("ALBERT", q="query", k="key", v="value", o="dense"),
    Family("BERT, RoBERTa, ELECTRA", q="query", k="key", v="value", o="../output.dense"),
    Family("diffusers", q="to_q", k="to_k", v="to_v", o="to_out.0"),
)

# Relative to the block: where the feed-forward's matrices are. Norms in there are not its matrices.
FEED_FORWARD = (
    "mlp",
    "ffn",
    "ffn_output",
    "feed_forward",
    "intermediate",
    "output.dense",
    "fc1",
    "fc2",
    "linear1",
    "linear2",
    "layer.1.DenseReluDense",
    "layer.2.DenseReluDense",
)
CROSS = re.compile(r"cross_?att|encoder_?attn|encdecatt|encoder_decoder_att", re.IGNORECASE)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head")
SCALES = ("scaling", "scale", "inv_norm_factor")
PATTERN_KEYS = ("q", "k", "v", "o", "kv", "qkv", "layout", "heads")


def is_matrix(module: nn.Module) -> bool:
    """A Linear or a GPT-2 Conv1D, which keeps its matrix transposed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return False
    return isinstance(module, nn.Linear) or is_transposed(module)


_QUANTISED = re.compile(r"4bit|8bit|awq|gptq|hqq|eetq|fp[48]|quanti[sz]ed|quant\w*linear", re.IGNORECASE)


def is_quantised(module: nn.Module) -> bool:
    """A layer whose own matrix is not plain floating-point numbers: by its values, its class, or where that is from."""
    kind = type(module)
    # torch's own output projection is a plain Linear that is called NonDynamicallyQuantizableLinear
    if kind.__name__.startswith("NonDynamically") or "parametrizations" in module._modules:
        return False
    weight = getattr(module, "weight", None)
    if callable(weight):  # torch.ao's layers compute theirs
        return kind.__module__.startswith("torch.ao.")
    if isinstance(weight, Tensor):
        integers = not (weight.is_floating_point() or weight.is_complex()) or weight.element_size() < 2
        if integers or type(weight).__module__.startswith("torchao."):
            return True
    return isinstance(module, nn.Linear) and bool(_QUANTISED.search(kind.__name__))


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def whole(holder: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def pattern_family(pattern: Mapping[str, Any]) -> Family | None:
    """The row that a pattern describes; None where it says but how many heads a known family has."""
    given: object = pattern
    if not isinstance(given, Mapping):
        raise MethodError(f'pattern: expected a table such as {{"q": "attn.to_q", "k": "attn.to_k"}}, got {given!r}')
    for key, value in pattern.items():
        if key not in PATTERN_KEYS:
            raise MethodError(f"pattern: unknown key {key!r}; {nearest(str(key), PATTERN_KEYS)}")
        if key == "heads":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MethodError(f"pattern: heads must be a whole number above 0, got {value!r}")
        elif not isinstance(value, str) or not value:
            raise MethodError(f"pattern: {key} must be the end of a module's name, got {value!r}")
    layout = pattern.get("layout", "concat")
    if layout not in ("concat", "groups"):
        raise MethodError(f"pattern: layout {layout!r} is not concat (all q, all k, all v) or groups (head by head)")
    if set(pattern) == {"heads"}:
        return None
    given_roles = {"q", "k", "v", "kv", "qkv"} & set(pattern)
    if given_roles not in ({"qkv"}, {"q", "kv"}, {"q", "k"}, {"q", "k", "v"}):
        raise MethodError("pattern: name q and k (and v, o); where they are fused, qkv alone or q and kv")
    names = {role: pattern.get(role, "") for role in ("q", "k", "v", "o")}
    if "qkv" in pattern:
        return Family("pattern", fused=pattern["qkv"], roles=QKV, layout=layout, o=names["o"])
    if "kv" in pattern:
        return Family("pattern", q=names["q"], fused=pattern["kv"], roles=("k", "v"), layout=layout, o=names["o"])
    return Family("pattern", **names)


_NOISE = (
    "proj|projection|projections|linear|lin|layer|layers|weight|weights|attention|attn|dense|head|heads|self|multi|"
    "fc|net|map|mapping|transform|matrix|mat|fn|conv|vector|vec|states|embed|to|in|mixer|w|f"
)
_WORDS = re.compile(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*")
_SAID = {"q": "q|query|queries", "k": "k|key|keys", "v": "v|value|values", "o": "o|out|output|outputs|c"}
_SAID |= {"kv": "kv|keyvalue", "qkv": "qkv|querykeyvalue"}
_MEANS = {word: role for role, words in _SAID.items() for word in words.split("|")}
_COUNT = re.compile(
    r"_?(n|num|no|number_of)?_?(q|query|attn|attention|self_attention)?_?heads?|heads?_?(num|count)|n?h", re.IGNORECASE
)
_OTHER_ORDER = re.compile(r"kqv|kvq|vkq|vqk|qvk", re.IGNORECASE)


@dataclass
class _Guess:
    """Ends of module names by role, found in one kind of parent; and what about them is only likely."""

    names: dict[str, str]
    parent: str
    doubts: list[str]


def nothing_found(model: nn.Module, modules: Mapping[str, nn.Module], pattern: Mapping[str, Any] | None) -> str:
    """What was looked for, the nearest names, and a pattern that would match them."""
    kind = type(model).__name__
    matrices: dict[str, list[str]] = {}  # kind of name, its numbers left out -> names
    for name, module in modules.items():
        if is_matrix(module):
            matrices.setdefault(re.sub(r"(?<![^.])\d+(?=\.)", "*", name), []).append(name)
    if not matrices:
        return f"no attention projections in {kind}: it has no Linear modules at all; exchange its matrices for Linears"
    guess = _by_name(matrices) or _by_shape(matrices, modules)
    if guess is not None:
        near = [_join(guess.parent, last) for last in guess.names.values()]
        heads, seen = guess_heads(modules, matrices[near[0]][0], fused="qkv" in guess.names)
        guess.doubts += [] if seen else ["heads"]
        body = {**guess.names, "heads": heads}
        if {"qkv", "kv"} & set(guess.names):
            body["layout"] = "concat"
            guess.doubts.append('layout ("groups" is head by head)')
    else:
        sought = [str(v) for k, v in (pattern or {}).items() if k in ("q", "k", "v", "o", "kv", "qkv")]
        sought = sought or sorted({f.path(r).rpartition("/")[2] for f in FAMILIES for r in ("q", "k") if f.path(r)})
        near = sorted(matrices, key=lambda t: -max(_likeness(t, s) for s in sought))[:4]
        body = {}
    shown = ", ".join(f"{t} ({len(matrices[t])}x)" for t in near)
    looked = f"pattern {dict(pattern)!r} matches no module" if pattern is not None else "no known family matches"
    said = f"no attention projections found in {kind}: {looked}; nearest modules: {shown}; "
    if not body:
        return said + 'if it has attention, name its projections: pattern={"q": ..., "k": ..., "v": ..., "heads": ...}'
    assert guess is not None
    doubts = f" (guessed, so check: {', '.join(guess.doubts)})" if guess.doubts else ""
    return f"{said}try pattern={json.dumps(body)}{doubts}"


def _join(parent: str, last: str) -> str:
    return f"{parent}.{last}" if parent else last


def _likeness(template: str, sought: str) -> float:
    last = template.rpartition(".")[2]
    return difflib.SequenceMatcher(None, last, sought.rpartition(".")[2]).ratio()


def _role_of(name: str) -> str | None:
    """The role that a word of this name says when the words that say nothing are left out; empty: none of it does."""
    words = [word.lower() for word in _WORDS.findall(name)]
    telling = [word for word in words if not re.fullmatch(_NOISE, word)]
    for said in ("".join(telling), *(w.removeprefix("w").removesuffix("w") for w in telling[:1] if len(telling) == 1)):
        if said in _MEANS:
            return _MEANS[said]
    return None if telling else ""


def _by_name(matrices: Mapping[str, list[str]]) -> _Guess | None:
    """From names that sound like q, k, v, o within one parent: the first that has queries and keys."""
    parents: dict[str, dict[str, str]] = {}
    for template in matrices:
        parent, _, last = template.rpartition(".")
        role = _role_of(last)
        if role == "" and parent and "*" not in last:  # attn.query.linear
            parent, _, outer = parent.rpartition(".")
            role, last = _role_of(outer), f"{outer}.{last}"
        if role:
            parents.setdefault(parent, {}).setdefault(role, last)
    for roles in (("qkv", "o"), ("q", "kv", "o"), ("q", "k", "v", "o")):
        for parent, found in parents.items():
            if set(roles[:-1]) - {"v"} <= set(found):
                return _Guess({role: found[role] for role in roles if role in found}, parent, [])
    return None


def _by_shape(matrices: Mapping[str, list[str]], modules: Mapping[str, nn.Module]) -> _Guess | None:
    """From one parent's matrices: one three times as high as wide beside a square one, or three that read one width."""
    parents: dict[str, dict[str, tuple[int, int]]] = {}
    for template, names in matrices.items():
        parent, _, last = template.rpartition(".")
        weight = modules[names[0]].weight
        assert isinstance(weight, Tensor)
        out, width = weight.shape if not is_transposed(modules[names[0]]) else weight.shape[::-1]
        parents.setdefault(parent, {})[last] = (out, width)
    for parent, found in parents.items():
        fused = next(
            (last for last, (out, width) in found.items() if out == 3 * width and not _OTHER_ORDER.search(last)), None
        )
        square = next((last for last, (out, width) in found.items() if out == width), None)
        if fused is not None and square is not None:
            return _Guess({"qkv": fused, "o": square}, parent, ["which is qkv, o"])
    for parent, found in parents.items():
        widths = {width for _, width in found.values()}
        if len(found) in (3, 4) and len(widths) == 1 and "*" not in "".join(found):
            ordered = dict(zip(("q", "k", "v", "o"), found, strict=False))
            return _Guess(ordered, parent, ["which is q, k, v, o"])
    return None


def guess_heads(modules: Mapping[str, nn.Module], name: str, *, fused: bool) -> tuple[int, bool]:
    """How many query heads, and whether a module says so: from the projection outwards, else 64 channels a head."""
    weight = modules[name].weight
    assert isinstance(weight, Tensor)
    width = int(min(weight.shape) if fused else weight.shape[1 if is_transposed(modules[name]) else 0])
    around: list[Any] = []
    while name:
        name = name.rpartition(".")[0]
        around += [modules[name], getattr(modules[name], "config", None)]
    for holder in (*around, *modules.values()):
        values = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
        for key, value in values.items():
            if isinstance(value, int) and not isinstance(value, bool) and value > 0 and width % value == 0:
                if _COUNT.fullmatch(str(key)):
                    return value, True
                if key in HEAD_DIMS:
                    return width // value, True
    return next((width // n for n in (64, 32, 16, 8) if width % n == 0 and width > n), 1), False

"""The table of families: how each names, fuses and scales its projections; and patterns for models outside it.

A family is a row. Owns also what an unknown model is told: the nearest module names and a pattern that would match.
Refuses to look inside a model further than names and shapes; projections.py does that.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

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
PATTERN_KEYS = ("q", "k", "v", "o", "qkv", "layout", "heads")


def is_matrix(module: nn.Module) -> bool:
    """A Linear or a GPT-2 Conv1D, which keeps its matrix transposed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return False
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def whole(holder: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def pattern_family(pattern: Mapping[str, Any]) -> Family:
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
    if ("qkv" in pattern) == bool({"q", "k"} & set(pattern)):
        raise MethodError("pattern: name q and k (and v, o), or the fused projection as qkv")
    if "qkv" not in pattern and not {"q", "k"} <= set(pattern):
        raise MethodError("pattern: name both q and k")
    names = {role: pattern.get(role, "") for role in ("q", "k", "v", "o")}
    if "qkv" in pattern:
        return Family("pattern", fused=pattern["qkv"], roles=QKV, layout=layout, o=names["o"])
    return Family("pattern", **names)


_NOISE = re.compile(r"proj(ection)?|linear|layer|lin|weight|attention|attn|dense|head|fc|to|in|w|_|\d")
_MEANS = {"q": "q", "query": "q", "queries": "q", "k": "k", "key": "k", "keys": "k", "v": "v", "value": "v"}
_MEANS |= {"values": "v", "o": "o", "out": "o", "output": "o", "qkv": "qkv", "querykeyvalue": "qkv"}


def nothing_found(model: nn.Module, modules: Mapping[str, nn.Module], pattern: Mapping[str, Any] | None) -> str:
    """What was looked for, the nearest names, and a pattern that would match them."""
    kind = type(model).__name__
    templates: dict[str, int] = {}
    for name, module in modules.items():
        if is_matrix(module):
            template = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            templates[template] = templates.get(template, 0) + 1
    if not templates:
        return f"no attention projections in {kind}: it has no Linear modules at all"
    sought = [str(v) for k, v in (pattern or {}).items() if k in ("q", "k", "v", "o", "qkv")]
    sought = sought or sorted({f.path(r).rpartition("/")[2] for f in FAMILIES for r in ("q", "k") if f.path(r)})
    guess = _guess(templates)
    near = [t for t in templates if any(t == v or t.endswith("." + v) for v in guess.values())]
    if not near:
        scored = sorted(templates, key=lambda t: -max(_likeness(t, s) for s in sought))
        near = scored[:4]
    shown = ", ".join(f"{t} ({templates[t]}x)" for t in near[:6])
    heads = next((n for m in modules.values() if (n := whole(m, HEADS))), None)
    if heads is None:
        heads = whole(getattr(model, "config", None), HEADS)
    if guess:
        body = ", ".join(f'"{role}": "{name}"' for role, name in guess.items())
        body += f', "heads": {heads if heads else "<number of heads>"}'
    else:
        last = near[0].rpartition("*.")[2]
        body = f'"q": "{last}", "k": "<name>", "v": "<name>", "o": "<name>", "heads": <number of heads>'
    looked = f"pattern {dict(pattern)!r} matches no module" if pattern is not None else "no known family matches"
    return f"no attention projections found in {kind}: {looked}; nearest modules: {shown}; try pattern={{{body}}}"


def _likeness(template: str, sought: str) -> float:
    last = template.rpartition(".")[2]
    return difflib.SequenceMatcher(None, last, sought.rpartition(".")[2]).ratio()


def _guess(templates: Mapping[str, int]) -> dict[str, str]:
    """role -> end of a module's name, from names that sound like q, k, v, o within one parent."""
    by_parent: dict[str, dict[str, str]] = {}
    for template in templates:
        parent, _, last = template.rpartition(".")
        role = _MEANS.get(_NOISE.sub("", last.lower())) or _MEANS.get(last.lower())
        if role:
            by_parent.setdefault(parent, {}).setdefault(role, last)
    for found in by_parent.values():
        if "qkv" in found:
            return {role: found[role] for role in ("qkv", "o") if role in found}
        if {"q", "k"} <= set(found):
            return {role: found[role] for role in ("q", "k", "v", "o") if role in found}
    return {}

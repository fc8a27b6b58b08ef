"""What `apply` did, as a plain table; and the spread of the attention logits, measured.

Owns the counts by role and the warnings. Refuses to judge: it says what is, so that temperatures are never compared by
accident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oelm.method.projections import Part, Site, feed_forward, find_sites
from oelm.method.record import Record
from oelm.method.refusals import shared_modules
from oelm.method.split import ROLES, Slice
from oelm.method.variant import Variant, name_of


TOKENS = 256
MEASURED_LAYERS = 8
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_norm", "key_norm"))


@dataclass(frozen=True)
class Row:
    """One role's share of the model, in parameters but for `matched`, which counts modules."""

    role: str
    matched: int
    frozen: int
    trainable: int

    @property
    def parameters(self) -> int:
        return self.frozen + self.trainable


@dataclass(frozen=True)
class Report:
    """What `apply` did. `print(report)` is a table; `to_dict()` is plain data."""

    model: str
    variant: str
    seed: int
    settings: dict[str, Any]
    families: tuple[str, ...]
    layers: dict[str, list[int]]
    rows: tuple[Row, ...]
    total: int
    trainable: int
    frozen: int
    thawing: int
    logit_std: float | None
    logit_std_rest: float | None
    digest: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = asdict(self)
        data["rows"] = [asdict(row) | {"parameters": row.parameters} for row in self.rows]
        data["families"], data["warnings"] = list(self.families), list(self.warnings)
        data["frozen_share"] = self.frozen / self.total if self.total else 0.0
        return data

    def __str__(self) -> str:
        return _table(self)


def report_on(model: nn.Module, record: Record) -> Report:
    """The report of a model that was just converted."""
    sites = find_sites(model, record.pattern)
    variant = record.variant
    treated = _treated(sites, record)
    rest = [site for site in sites if not site.cross and site not in treated]
    own = [site for site in treated if not site.cross] or treated
    unique = list(model.parameters())
    layers: dict[str, list[int]] = {}
    for site in treated:
        layers.setdefault(site.stack, []).append(site.layer)
    thawing = record.thawing
    return Report(
        model=type(model).__name__,
        variant=name_of(variant),
        seed=record.seed,
        settings=variant.to_dict(),
        families=record.families,
        layers=layers,
        rows=tuple(_rows(model, sites)),
        total=sum(p.numel() for p in unique),
        trainable=sum(p.numel() for p in unique if p.requires_grad),
        frozen=sum(p.numel() for p in unique if not p.requires_grad),
        thawing=sum(p.numel() for n, p in model.named_parameters() if n in thawing),
        logit_std=_spread(own or rest),
        logit_std_rest=_spread(rest) if own and rest else None,
        digest=record.digest(),
        warnings=tuple(_warnings(model, sites, treated, variant)),
    )


def logit_std(model: nn.Module, pattern: Mapping[str, Any] | None = None) -> float | None:
    """The standard deviation of the attention logits on random normed input, over the layers' self-attention.

    None on the meta device. Rotations change it little and are left out; masks and position biases are no part of it.
    """
    return _spread([site for site in find_sites(model, pattern) if not site.cross])


def _treated(sites: list[Site], record: Record) -> list[Site]:
    if not record.variant.touches:
        return []
    keys = {(e.stack, e.layer) for e in record.entries}
    return [
        s for s in sites if (s.stack, s.layer) in keys or any(isinstance(p.module, Slice) for p in s.parts.values())
    ]


def _pieces(part: Part) -> list[tuple[int, int, bool]]:
    """(identity, elements, trains) of a part's weight and bias, where still fused the part's share of them."""
    found = []
    rows = part.rows()
    if rows is not None and part.parameter is not None:
        found.append((id(part.parameter), rows.numel(), part.parameter.requires_grad))
    bias = part.bias
    if isinstance(bias, nn.Parameter):
        share = bias.numel()
        if part.layout is not None:
            share = part.layout.heads[part.role] * part.layout.head_dim
        elif part.weight_name != "weight" and part.bias_name == "in_proj_bias":
            share //= len(ROLES)
        found.append((id(bias), share, bias.requires_grad))
    return found


def _rows(model: nn.Module, sites: list[Site]) -> list[Row]:
    """One row a role; a tied parameter is counted once, with the role that comes first."""
    rows: list[Row] = []
    seen: set[tuple[int, str]] = set()
    whole: set[int] = set()
    for role in (*ROLES, "o"):
        matched = frozen = trainable = 0
        for site in sites:
            part = site.parts.get(role)
            if part is None:
                continue
            matched += 1
            for identity, elements, trains in _pieces(part):
                key = (identity, role if part.layout is not None or "in_proj" in part.bias_name else "")
                if key in seen:
                    continue
                seen.add(key)
                whole.add(identity)
                frozen += 0 if trains else elements
                trainable += elements if trains else 0
        rows.append(Row(role, matched, frozen, trainable))
    ffn = {id(p): p for n in feed_forward(sites, model) if id(p := model.get_parameter(n)) not in whole}
    matrices = sum(p.dim() >= 2 for p in ffn.values())
    rows.append(_row("ffn", matrices, list(ffn.values())))
    others = [p for p in model.parameters() if id(p) not in whole and id(p) not in ffn]
    rows.append(_row("other", len(others), others))
    return rows


def _row(role: str, matched: int, parameters: list[nn.Parameter]) -> Row:
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    return Row(role, matched, frozen, sum(p.numel() for p in parameters) - frozen)


@torch.no_grad()
def _spread(sites: list[Site]) -> float | None:
    """The root mean variance of the logits over at most a few layers, evenly taken."""
    if not sites:
        return None
    step = max(1, len(sites) // MEASURED_LAYERS)
    variances = [_logit_variance(site) for site in sites[::step]]
    known = [v for v in variances if v is not None]
    return math.sqrt(sum(known) / len(known)) if known else None


def _logit_variance(site: Site) -> float | None:
    """Of q·k times the family's scale between different random tokens, normed to mean 0 and variance 1."""
    q = _projected(site, "q", 0)
    k = _projected(site, "k", 0)
    if q is None or k is None:
        return None
    logits = torch.einsum("thd,shd->hts", q, k.repeat_interleave(site.n_heads // site.n_kv_heads, dim=1)) * site.scale
    apart = ~torch.eye(TOKENS, dtype=torch.bool)  # a token's logit with itself is not random under tied projections
    return float(logits[:, apart].double().var(correction=0))


def _projected(site: Site, role: str, seed: int) -> Tensor | None:
    part = site.parts[role]
    rows = part.rows()
    width = site.n_heads * site.head_dim if rows is None else rows.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, width, generator=generator)
    x = nn.functional.layer_norm(x, (width,))
    if rows is None:
        out = part.module(x)
    else:
        if rows.is_meta:
            return None
        out = x @ rows.detach().reshape(-1, width).float().cpu().t()
        bias = part.bias
        if isinstance(bias, Tensor):
            out = out + _own_bias(part, bias).detach().float().cpu()
    heads = site.heads(role)
    out = out.unflatten(-1, (heads, site.head_dim))
    return _normed(site, role, out)


def _own_bias(part: Part, bias: Tensor) -> Tensor:
    if part.layout is not None:
        return part.layout.take(bias, part.role).flatten()
    if part.weight_name != "weight" and part.bias_name == "in_proj_bias":
        return bias.chunk(len(ROLES))[ROLES.index(part.role)]
    return bias


def _norm_of(site: Site, role: str) -> nn.Module | None:
    for pair in NORMS:
        norm = getattr(site.module, pair[0 if role == "q" else 1], None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            return norm
    return None


def _normed(site: Site, role: str, out: Tensor) -> Tensor:
    """After the family's own normalisation of queries and keys, per head or over the whole width."""
    norm = _norm_of(site, role)
    if norm is None:
        return out
    like = next(iter(norm.parameters()), None)
    whole = like is not None and like.shape[-1] == out.shape[-1] * out.shape[-2] != site.head_dim
    value = out.flatten(-2) if whole else out
    if like is not None:
        value = value.to(like.device, like.dtype)
    normed: Tensor = norm(value)
    return normed.float().cpu().reshape(out.shape)


def _warnings(model: nn.Module, sites: list[Site], treated: list[Site], variant: Variant) -> list[str]:
    found = []
    drawn = variant.init in ("orthogonal", "gaussian", "orthogonalize")
    if any(not site.family.scaled for site in treated):
        dims = sorted({site.head_dim for site in treated})
        found.append(
            f"this family does not divide its logits by sqrt(head_dim = {dims[0]}): the draw stays orthonormal and its "
            f"logits are {math.sqrt(dims[0]):.3g} times as wide as in a family that does; gain may be the remedy"
        )
    if drawn and any(_norm_of(site, "q") is not None for site in treated):
        found.append("queries and keys are normalised after projection: the draw's scale and gain have no effect")
    if variant.std is not None:
        found.append(f"std = {variant.std} is not norm-matched: compare its logits' spread before its results")
    if not variant.cross and treated and any(site.cross for site in sites):
        found.append(
            'cross-attention was found and left alone (cross = true treats it too; its stacks end in ".cross")'
        )
    repeats = getattr(getattr(model, "config", None), "num_hidden_groups", None)
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if isinstance(repeats, int) and isinstance(layers, int) and layers > len(sites):
        found.append(f"{layers} layers share {len(sites)} set{'s' if len(sites) > 1 else ''} of parameters")
    for name, other in shared_modules(model):
        if treated and any(f"{site.name}.".startswith(f"{name}.") for site in treated):
            found.append(f"{other} is {name} itself: what is done to one is done to both")
    if treated and any(getattr(site.module, "share_att_key", False) for site in treated):
        found.append("q and k also project the relative positions here: what is done to them is done to both")
    if variant.init == "slices" and any(site.n_kv_heads != site.n_heads for site in treated):
        found.append("a key head reads the slice of the first query head of its group")
    return found


def _table(report: Report) -> str:
    head = ("role", "matched", "frozen", "trainable", "parameters")
    lines = [
        [row.role, *(f"{n:,}" for n in (row.matched, row.frozen, row.trainable, row.parameters))] for row in report.rows
    ]
    lines.append(["total", "", *(f"{n:,}" for n in (report.frozen, report.trainable, report.total))])
    widths = [max(len(head[i]), *(len(line[i]) for line in lines)) for i in range(len(head))]

    def laid_out(cells: Any) -> str:
        first, *rest = cells
        return "  ".join(
            [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
        ).rstrip()

    settings = report.settings
    scale = f"std {settings['std']}" if settings["std"] is not None else f"gain {settings['gain']:g}"
    layers = "; ".join(f"{stack} {_ranges(numbers)}" for stack, numbers in report.layers.items()) or "none"
    share = report.frozen / report.total if report.total else 0.0
    text = [
        f"{report.model}: {report.variant}, seed {report.seed} ({', '.join(report.families)})",
        f"init {settings['init']} per {settings['scope']}, {scale}, freeze {settings['freeze']}, layers {layers}",
        laid_out(head),
        *(laid_out(line) for line in lines),
        f"frozen {share:.2%} of the parameters"
        + (f", of which {report.thawing:,} thaw later" if report.thawing else ""),
    ]
    if report.logit_std is not None:
        beside = "" if report.logit_std_rest is None else f" (untreated layers {report.logit_std_rest:.3g})"
        text.append(f"attention logits at step 0: standard deviation {report.logit_std:.3g}{beside}")
    text += [f"warning: {warning}" for warning in report.warnings]
    return "\n".join(text)


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)

"""What a model and a variant cost: parameters, bytes, FLOPs, and the most that freezing can save of them.

Numbers are computed on a copy of the model that has shapes but no values (the meta device); FLOPs are counted by
torch's own counter. Unconverted models are accepted with a variant, models on meta too; the model given is not touched.
It refuses to promise time: it gives ceilings, that of time measured on request, and says when a claim above them is a
fault of measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.apply import convert
from oelm.method.flops import default_length, example_inputs, flops_of, is_causal, on_meta, quadratic_flops
from oelm.method.record import Record, record_of
from oelm.method.timing import Timing, timed
from oelm.method.variant import Variant, as_variant, name_of


ADAMW_STATES = 2  # running mean and mean square, one float32 each a parameter
STATE_BYTES = 4
ADAMW_PASSES = 7  # reads weight, gradient and two states; writes weight and two states


@dataclass(frozen=True)
class Parameters:
    total: int
    trainable: int
    frozen: int  # now; `thawing` of them will train later
    thawing: int
    addons: int

    @property
    def frozen_share(self) -> float:
        return self.frozen / self.total if self.total else 0.0


@dataclass(frozen=True)
class Bytes:
    """Of the tensors alone, at the model's own precision; files add a header."""

    weights: int
    gradients: int
    adamw_state: int
    checkpoint_full: int  # the weights
    checkpoint_compact: int  # without the matrices that are drawn again from the seed
    training_checkpoint: int  # the weights and AdamW's state
    memory_saved: int  # gradients and state that freezing makes unnecessary


@dataclass(frozen=True)
class Flops:
    """Of one forward and backward pass; a product of (a, b) and (b, c) counts 2abc."""

    length: int | None
    batch: int
    forward: int
    backward: int
    total: int
    attention: int | None  # the part that grows with the square of the length
    causal: bool
    all_trained: int  # the same pass when everything trains, in the unconverted model where it is known
    saved: int
    saved_share: float
    saved_share_causal: float | None  # with causal attention counted half


@dataclass(frozen=True)
class Traffic:
    """What AdamW reads and writes each step."""

    bytes: int
    all_trained: int
    saved_share: float


@dataclass(frozen=True)
class Account:
    """What `account` found; print it, or take `to_dict()`."""

    model: str
    variant: str
    parameters: Parameters
    bytes: Bytes
    flops: Flops | None
    optimizer: Traffic
    time: Timing | None  # where it was asked for
    notes: tuple[str, ...]

    @property
    def ceiling(self) -> float:
        """The largest share of a step's cost that freezing can save, by FLOPs, optimiser traffic or measured time."""
        return max(share for share in self._ceilings.values() if share is not None)

    @property
    def _ceilings(self) -> dict[str, float | None]:
        return {
            "flops": self.flops.saved_share if self.flops else None,
            "flops_causal_half": self.flops.saved_share_causal if self.flops else None,
            "optimizer_traffic": self.optimizer.saved_share,
            "time": self.time.saved_share if self.time else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = asdict(self)
        data["parameters"]["frozen_share"] = self.parameters.frozen_share
        if self.time is not None:
            data["time"]["saved_share"] = self.time.saved_share
        data["ceilings"] = self._ceilings | {"largest": self.ceiling}
        data["notes"] = list(self.notes)
        return data

    def __str__(self) -> str:
        return _table(self)


def account(
    model: nn.Module,
    *,
    variant: Variant | str | Mapping[str, Any] | None = None,
    length: int | None = None,
    batch: int = 1,
    inputs: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    time: bool = False,
) -> Account:
    """Count parameters, bytes and FLOPs of `model`, as it is or as `variant` would make it.

    `length` is the number of tokens of each of `batch` sequences. `inputs(batch, length)` makes the forward
    arguments on the meta device for a model whose inputs cannot be guessed. `time` also measures a training step of a
    copy of the model, where the model is, and what freezing can save of it.
    """
    for name, value in (("length", length), ("batch", batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise MethodError(f"account: {name} must be a whole number above 0, got {value!r}")
    plain = on_meta(model)
    applied = plain
    if variant is not None:
        if record_of(model) is not None:
            raise MethodError("account: this model is converted already; leave variant out, or give a fresh model")
        applied = on_meta(model)
        convert(applied, as_variant(variant))
    record = record_of(applied)
    thawing = set(record.thawing) if record is not None else set()
    drawn = _drawn(record) if record is not None else set()
    named = dict(applied.named_parameters())
    parameters = Parameters(
        total=_count(named.values()),
        trainable=_count(p for p in named.values() if p.requires_grad),
        frozen=_count(p for p in named.values() if not p.requires_grad),
        thawing=_count(p for n, p in named.items() if n in thawing and not p.requires_grad),
        addons=_count(p for n, p in named.items() if _is_addon(n)),
    )
    everything = _count(plain.parameters())
    notes: list[str] = []
    flops = _flops(plain, applied, length, batch, inputs, notes)
    timing = None
    if time:
        make = inputs or (lambda b, n: example_inputs(applied, b, n))
        timing = timed(model, variant, make, batch, length if length is not None else default_length(applied))
    traffic = _traffic(named.values())
    all_traffic = ADAMW_PASSES * STATE_BYTES * everything
    result = Account(
        model=type(model).__name__,
        variant=name_of(record.variant) if record is not None else "none",
        parameters=parameters,
        bytes=_bytes(applied, drawn),
        flops=flops,
        optimizer=Traffic(traffic, all_traffic, 1 - traffic / all_traffic if all_traffic else 0.0),
        time=timing,
        notes=(),
    )
    return Account(**{**_fields(result), "notes": (*notes, *_notes(result))})


def _drawn(record: Record) -> set[str]:
    """Names that a compact checkpoint leaves out; a record made on the meta device has no hashes to say so."""
    fresh = record.variant.init in ("orthogonal", "gaussian")
    return {
        e.name
        for e in record.entries
        if e.frozen and not e.tied and (e.zeros or (fresh and e.kind == "weight" and e.role in record.variant.roles))
    }


def _fields(result: Account) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__dataclass_fields__}


def _count(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def _is_addon(name: str) -> bool:
    return ".addons." in f".{name}"


def _traffic(parameters: Any) -> int:
    return ADAMW_PASSES * STATE_BYTES * _count(p for p in parameters if p.requires_grad)


def _bytes(model: nn.Module, drawn: set[str]) -> Bytes:
    """`state_dict` would count tied tensors twice; parameters() and buffers() do not."""
    saved = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    buffers = [b for name, b in model.named_buffers() if name in saved]
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *buffers))
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    state = ADAMW_STATES * STATE_BYTES
    return Bytes(
        weights=weights,
        gradients=sum(p.numel() * p.element_size() for p in trained),
        adamw_state=state * _count(trained),
        checkpoint_full=weights,
        checkpoint_compact=weights
        - sum(p.numel() * p.element_size() for name, p in model.named_parameters() if name in drawn),
        training_checkpoint=weights + state * _count(trained),
        memory_saved=sum(p.numel() * (p.element_size() + state) for p in frozen),
    )


def _flops(
    plain: nn.Module,
    applied: nn.Module,
    length: int | None,
    batch: int,
    inputs: Callable[[int, int], Mapping[str, Tensor]] | None,
    notes: list[str],
) -> Flops | None:
    """Count the pass as it is, and with everything trained; None with a note where it cannot run without values."""
    make = inputs or (lambda b, n: example_inputs(applied, b, n))
    length = length if length is not None else default_length(applied)
    causal = is_causal(plain)
    base = getattr(applied, "base_model", applied)  # some heads of Hugging Face look at token numbers: not on meta
    for body in (applied, base) if base is not applied and inputs is None else (applied,):
        trained = on_meta(plain if body is applied else getattr(plain, "base_model", plain)).requires_grad_(True)
        try:
            forward, total = flops_of(body, make(batch, length))
            _, everything = flops_of(trained, make(batch, length))
            attention = quadratic_flops(trained, make, batch, length, everything) if causal else None
            break
        except MethodError as error:
            notes.append(str(error))
            return None
        except Exception as error:  # whatever a foreign forward may raise: the parameters and bytes still stand
            reason = " ".join(str(error).split())[:160] or type(error).__name__
    else:
        notes.append(f"FLOPs not counted: {type(applied).__name__} did not run on the meta device ({reason})")
        return None
    if body is not applied:
        notes.append(f"FLOPs are those of {type(body).__name__}, without the head, which needs token numbers")
    saved = everything - total
    half = None if attention is None else saved / (everything - attention // 2)
    return Flops(
        length=length,
        batch=batch,
        forward=forward,
        backward=total - forward,
        total=total,
        attention=attention,
        causal=causal,
        all_trained=everything,
        saved=saved,
        saved_share=saved / everything if everything else 0.0,
        saved_share_causal=half,
    )


def _notes(result: Account) -> list[str]:
    notes = []
    if result.parameters.frozen or result.ceiling > 0:
        limits = [] if result.flops is None else [f"{_percent(result.flops.saved_share)} of a step's FLOPs"]
        if result.time is None:
            limits.append(f"{_percent(result.optimizer.saved_share)} of AdamW's traffic")
        else:
            limits.append(f"{_percent(result.time.saved_share)} of the time measured here")
        notes.append(
            f"freezing can save at most {' and '.join(limits)}; a claimed speed-up far above "
            f"{'both' if len(limits) == 2 else 'that'} is a fault of measurement"
        )
        if result.time is None:
            notes.append(
                "time is not FLOPs: its ceiling is measured from the profile of a step, with account(..., time=True) "
                "or oelm inspect NAME --time"
            )
    if result.parameters.thawing:
        notes.append("the savings hold until the thaw; the optimiser's state grows with every layer that thaws")
    return notes


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _table(result: Account) -> str:
    p, b, t = result.parameters, result.bytes, result.optimizer
    rows = [
        ("parameters", f"{p.total:,}", ""),
        ("  trainable", f"{p.trainable:,}", f"{100 * p.trainable / p.total:.2f} %" if p.total else ""),
        ("  frozen", f"{p.frozen:,}", f"{100 * p.frozen_share:.2f} %"),
    ]
    if p.thawing:
        rows.append(("    of which will thaw", f"{p.thawing:,}", ""))
    if p.addons:
        rows.append(("  add-ons", f"{p.addons:,}", ""))
    rows += [
        ("weights", _mib(b.weights), ""),
        ("gradients", _mib(b.gradients), ""),
        ("AdamW state", _mib(b.adamw_state), f"freezing saves {_mib(b.memory_saved)} with the gradients"),
        ("checkpoint, weights", _mib(b.checkpoint_full), f"{b.checkpoint_full:,} bytes of tensors"),
        ("  compact", _mib(b.checkpoint_compact), f"{b.checkpoint_full - b.checkpoint_compact:,} bytes less"),
        ("checkpoint, training", _mib(b.training_checkpoint), "weights and AdamW state"),
        ("optimiser traffic a step", _mib(t.bytes), f"freezing saves {_percent(t.saved_share)}"),
    ]
    f = result.flops
    if f is not None:
        where = f"batch {f.batch}" + (f", length {f.length}" if f.length else "")
        rows += [
            (f"FLOPs ({where})", f"{f.total:.3e}", f"forward {f.forward:.3e}, backward {f.backward:.3e}"),
            ("  freezing saves", _percent(f.saved_share), f"of {f.all_trained:.3e} when all trains"),
        ]
        if f.saved_share_causal is not None:
            rows.append(("  causal attention half", _percent(f.saved_share_causal), "what a causal kernel computes"))
    m = result.time
    if m is not None:
        where = f"batch {m.batch}" + (f", length {m.length}" if m.length else "")
        parts = f"its products take {m.products_seconds:.2g} s, its AdamW {m.optimizer_seconds:.2g} s"
        rows += [
            (f"time ({where})", f"{m.step_seconds:.3g} s", f"a training step measured on {m.device} in {m.dtype}"),
            ("  freezing saves at most", _percent(m.saved_share), parts),
        ]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [f"{result.model}, variant {result.variant}"]
    lines += [f"{a:<{wide[0]}}  {v:>{wide[1]}}  {more}".rstrip() for a, v, more in rows]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join(lines)

"""The fast step of one CUDA device: forward, backward, clipping and AdamW as one captured graph over a compiled model.

The model's parameters stay float32 masters at all times that anybody looks: only while a graph is made do the
matrices lend their names to bfloat16 working copies, which the optimiser's kernel refreshes beside the masters.
A frozen matrix has a working copy and nothing else: no gradient, no state, no part in the norm.
Equal to Step within bfloat16's rounding (tests/train/test_capture.py). One graph per shape of batch. Needs Triton:
`oelm.train.step.make_step` says when this module may be imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as triton_language
from torch import Tensor, nn

from oelm.models.attention import Attention, distinct_weights
from oelm.models.fused import padded_rows
from oelm.models.gpt import GPT
from oelm.train import kernels
from oelm.train.objectives import bare
from oelm.train.optim import Optimizers
from oelm.train.step import Batch, Look, Step


PIECE = 1024  # elements of one program of the optimiser's kernel
NORM_PIECE = 8192  # of the norm's, which reads one stream instead of four
WARPS = 8
ALIGNED = 256  # bytes; where arrays of a batch begin
# Arrays that travel with a batch: what sorts its inputs, the schedule's factor, the step's number.
ORDER, FACTOR, NUMBER = "order", "factor", "number"
STAGES = 8  # batches the host may be ahead of the device
GRAPHS = 24  # shapes of batch that are captured; further ones take the plain step


class _Cuts:
    """Parameters cut into pieces of one size: the row and the start of every piece."""

    def __init__(self, params: list[nn.Parameter], piece: int, device: torch.device) -> None:
        cuts = [(row, start) for row, p in enumerate(params) for start in range(0, p.numel(), piece)]
        self.piece = piece
        self.count = len(cuts)
        self.rows = torch.tensor([row for row, _ in cuts], dtype=torch.int32, device=device)
        self.starts = torch.tensor([start for _, start in cuts], dtype=torch.int64, device=device)


class _Group:
    """Trained parameters of one kind of gradient, and the tables the kernels read."""

    def __init__(self, params: list[nn.Parameter], *, half: bool, even: bool, device: torch.device) -> None:
        self.params = params
        self.half, self.even = half, even
        self.table = torch.zeros(len(params), kernels.COLUMNS, dtype=torch.int64, device=device)
        self.sizes = torch.tensor([p.numel() for p in params], dtype=torch.int64, device=device)
        self.update = _Cuts(params, PIECE, device)
        self.norm = _Cuts(params, NORM_PIECE, device)

    def of(self, cuts: _Cuts) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The arguments every kernel over pieces begins and ends with."""
        how = {"BLOCK": cuts.piece, "EVEN": self.even, "F32": not self.half, "HALF": triton_language.bfloat16}
        return (self.table, cuts.rows, cuts.starts, self.sizes), how | {"num_warps": WARPS}


class _Layout:
    """Where the arrays of a batch lie in one piece of memory, so that one copy brings them all to the device."""

    def __init__(self, arrays: Batch) -> None:
        self.places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        at = 0
        for name, array in arrays.items():
            self.places[name] = (at, array.nbytes, torch.from_numpy(array[:0]).dtype, array.shape)
            at += -(-array.nbytes // ALIGNED) * ALIGNED
        self.size = at

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The arrays' places in a memory of bytes, as tensors of their own type and shape."""
        return {
            name: memory[at : at + length].view(dtype).view(shape)
            for name, (at, length, dtype, shape) in self.places.items()
        }


class _Stage:
    """One batch on its way to the device: pinned memory that is not written again before it was read."""

    def __init__(self, layout: _Layout) -> None:
        self.memory = torch.empty(layout.size, dtype=torch.uint8).pin_memory()
        self.arrays = {name: view.numpy() for name, view in layout.views(self.memory).items()}
        self.read: torch.cuda.Event | None = None

    def send(self, batch: Batch, target: Tensor) -> None:
        if self.read is not None:
            self.read.synchronize()
        for name, array in self.arrays.items():
            array[...] = batch[name]
        target.copy_(self.memory, non_blocking=True)
        self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.read.record()


class _Graph:
    """One shape of batch: its inputs' memory, the graph, and the tables of the gradients whose memory the graph owns."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in batch.items()}
        layout = _Layout(arrays)
        self.memory = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.inputs = layout.views(self.memory)
        self.stages = [_Stage(layout) for _ in range(STAGES)]
        self.turn = 0
        self.feed(arrays)
        self.graph = torch.cuda.CUDAGraph()
        self.groups: list[_Group] = []
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)
        self.partial = torch.zeros(0, device=device)

    def feed(self, batch: Batch) -> None:
        """Queue the copy of a batch; the host waits only when it is STAGES batches ahead."""
        stage = self.stages[self.turn % STAGES]
        self.turn += 1
        stage.send(batch, self.memory)


class CapturedStep(Step):
    """Step, replayed. Batches of a shape too many, or short ones, take the plain step of the parent class."""

    def __init__(self, model: nn.Module, objective: Any, optimizers: Optimizers, **how: Any) -> None:
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._pool: Any = None
        self._work: dict[nn.Parameter, Tensor] = {}
        self._stacked: dict[Attention, Tensor] = {}
        self._slots: dict[nn.Parameter, int] = {}
        self._states: dict[nn.Parameter, dict[str, Tensor]] = {}
        super().__init__(model, objective, optimizers, **how)
        device = self.device
        self._scale = torch.ones((), device=device)
        self._loss = torch.zeros((), device=device)
        self._slot = torch.zeros((), dtype=torch.int64, device=device)
        self._compiled = torch.compile(self._mean_loss, dynamic=False)
        inner = bare(model)
        self._embedding = inner.embed.weight if isinstance(inner, GPT) else None

    def __call__(self, step: int, batch: Batch, factor: float) -> None:
        whole = batch
        batch = {**batch, FACTOR: np.array([factor], dtype=np.float32), NUMBER: np.array([step], dtype=np.float64)}
        if self._embedding is not None:
            batch[ORDER] = sorting(batch["inputs"], self._embedding.shape[0])
        key = tuple((name, a.shape, a.dtype.str) for name, a in sorted(batch.items()))
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= GRAPHS:
                super().__call__(step, whole, factor)
                self._slot.add_(1)
                self._refresh()
                return
            graph = self._capture(batch)
            self._graphs[key] = graph
        graph.feed(batch)
        graph.graph.replay()
        self._filled += 1

    def look(self) -> Look:
        found = super().look()
        self._slot.zero_()
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        self._rebuild()

    def _rebuild(self) -> None:
        """Drop every graph: requires_grad changed, or optimiser state was replaced."""
        super()._rebuild()
        self._graphs.clear()
        self._work.clear()
        self._stacked.clear()
        self._slots.clear()
        self._pool = None

    # -- working copies

    def _make_work(self) -> None:
        """Memory for the working copies: q, k and v of a layer above each other, the vocabulary with room to pad."""
        for module in self.model.modules():
            if isinstance(module, Attention):
                linears = [m for m in (module.q, module.k, module.v) if type(m) is nn.Linear]
                params = distinct_weights(linears)
                if len(linears) < 3 or any(p.dtype != torch.float32 for p in params):
                    continue
                sizes = [p.shape[0] for p in params]
                stacked = torch.zeros(sum(sizes), params[0].shape[1], dtype=torch.bfloat16, device=self.device)
                self._stacked[module] = stacked
                self._work.update(zip(params, torch.split(stacked, sizes), strict=True))
        for param in self.model.parameters():
            if param.ndim >= 2 and param.dtype == torch.float32 and param not in self._work:
                rows, rest = param.shape[0], param.shape[1:]
                room = torch.zeros((padded_rows(rows), *rest), dtype=torch.bfloat16, device=param.device)
                self._work[param] = room[:rows]

    def _borrow(self) -> dict[nn.Parameter, Tensor]:
        """Give every matrix its bfloat16 working copy; returns the masters."""
        masters = {param: param.data for param in self._work}
        for param, work in self._work.items():
            param.data = work
        for module, stacked in self._stacked.items():
            module.stacked = stacked
        return masters

    def _return(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        for param, master in masters.items():
            param.data = master
        for module in self._stacked:
            module.stacked = None

    def _refresh(self) -> None:
        """Working copies from the masters, after somebody else wrote those."""
        for param, work in self._work.items():
            work.copy_(param.data)

    # -- making a graph

    def _capture(self, batch: Batch) -> _Graph:
        if not self._slots:
            self._adopt()
            self._make_work()
        graph = _Graph(batch, self.device)
        random = torch.cuda.get_rng_state(self.device)
        self._refresh()
        masters = self._borrow()
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # compiles, and lets every library make its handles outside the graph
                    self._forward_backward(graph)
            torch.cuda.current_stream().wait_stream(side)
            self._tables(graph)
            with torch.cuda.graph(graph.graph, pool=self._pool):
                loss = self._forward_backward(graph)
                self._loss.copy_(loss)
                self._launch(graph)
            self._addresses(graph, masters)
        finally:
            self._return(masters)
            for param in self._params:
                param.grad = None
        self._pool = self._pool or graph.graph.pool()
        torch.cuda.set_rng_state(random, self.device)
        return graph

    def _mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = self.objective.loss(self.model, batch)[0]
        return loss

    def _forward_backward(self, graph: _Graph) -> Tensor:
        """Gradients of one batch. The embedding is looked up here, so that its gradient needs no matrix of its own:
        the few rows of the batch are added to the gradient that the head made of the same matrix."""
        for param in self._params:
            param.grad = None
        batch = {name: value for name, value in graph.inputs.items() if name not in (ORDER, FACTOR, NUMBER)}
        embedded = None
        weight = self._embedding
        if weight is not None and weight.requires_grad:
            embedded = F.embedding(batch["inputs"], weight.detach()).requires_grad_()
            batch = {**batch, "embedded": embedded}
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = self._compiled(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if embedded is not None and weight is not None:
            assert embedded.grad is not None
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            rows = embedded.grad.flatten(0, -2)
            count, width = rows.shape
            kernels.add_rows[(count, -(-width // 512))](
                weight.grad, rows, batch["inputs"], graph.inputs[ORDER], count, width, TILE=8, BLOCK=512, num_warps=4
            )
        return loss.detach().float()

    def _tables(self, graph: _Graph) -> None:
        """Which parameters got a gradient, cut into pieces. Addresses follow when the graph owns the gradients."""
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for param in self._params:
            if param.grad is not None:
                kinds.setdefault((param.grad.dtype != torch.float32, param.numel() % 16 == 0), []).append(param)
        graph.groups = [_Group(ps, half=half, even=even, device=self.device) for (half, even), ps in kinds.items()]
        slots = [self._slots[p] for g in graph.groups for p in g.params]
        graph.slots = torch.tensor(slots, dtype=torch.int64, device=self.device)
        graph.partial = torch.zeros(sum(g.norm.count for g in graph.groups), device=self.device)

    def _addresses(self, graph: _Graph, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Fill the tables, while the working copies are in place and the graph's gradients have names."""
        for group in graph.groups:
            table = torch.zeros(group.table.shape, dtype=torch.int64)
            for row, param in enumerate(group.params):
                grad = param.grad
                assert grad is not None
                assert grad.is_contiguous(), "the kernels read gradients as they lie in memory"
                state = self._states[param]
                tensors = (masters.get(param, param.data), param.data, grad, state["exp_avg"], state["exp_avg_sq"])
                table[row] = torch.tensor([*(t.data_ptr() for t in tensors), self._slots[param]])
            group.table.copy_(table)

    def _adopt(self) -> None:
        """AdamW's own state of every parameter, made as AdamW makes it where there is none yet.

        The step counts become views of one tensor, so that one kernel counts them all.
        """
        self._slots, self._states = {}, {}
        rates: list[float] = []
        decays: list[float] = []
        own_rates = iter(self.optimizers.rates)
        for optimizer in self.optimizers.each:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    state = optimizer.state[param]
                    if not state:
                        state["step"] = torch.zeros((), device=self.device)
                        state["exp_avg"] = torch.zeros_like(param)
                        state["exp_avg_sq"] = torch.zeros_like(param)
                    self._slots[param] = len(rates)
                    self._states[param] = state
                    rates.append(next(own_rates))
                    decays.append(float(group["weight_decay"]))
        self._counts = torch.stack([s["step"].to(self.device, torch.float32) for s in self._states.values()])
        for state, count in zip(self._states.values(), self._counts, strict=True):
            state["step"] = count
        self._rates = torch.tensor(rates, device=self.device)
        self._decays = torch.tensor(decays, device=self.device)

    def _launch(self, graph: _Graph) -> None:
        settings = self.optimizers.settings
        done = 0
        for group in graph.groups:
            tables, how = group.of(group.norm)
            kernels.squares[(group.norm.count,)](*tables, graph.partial[done:], **how)
            done += group.norm.count
        kernels.decide[(1,)](
            graph.partial,
            done,
            self._loss,
            float(self.clip),
            self._scale,
            self._bad,
            self._bad_at,
            graph.inputs[NUMBER],
            self._slot,
            self._losses,
            self._norms,
            self._counts,
            graph.slots,
            len(graph.slots),
            BLOCK=1024,
            num_warps=8,
        )
        for group in graph.groups:
            tables, how = group.of(group.update)
            kernels.adamw[(group.update.count,)](
                *tables,
                self._counts,
                self._rates,
                self._decays,
                graph.inputs[FACTOR],
                self._scale,
                self._bad,
                settings.beta2,
                1.0 - settings.beta1,
                1.0 - settings.beta2,
                _log(settings.beta1),
                _log(settings.beta2),
                settings.eps,
                **how,
            )


def sorting(ids: np.ndarray[Any, Any], vocab: int) -> np.ndarray[Any, Any]:
    """The order that sorts the ids, as the embedding's gradient wants it; 16-bit numbers are sorted by radix."""
    flat = ids.reshape(-1).astype(np.uint16 if vocab <= 2**16 else np.int32)
    return np.argsort(flat, kind="stable").astype(np.int32)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf

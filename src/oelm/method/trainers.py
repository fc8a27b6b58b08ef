"""OELM inside the training loops of others: Hugging Face's Trainer and Lightning.

Owns a callback for each, and the optimiser that Trainer would not build (its own leaves out what is still frozen, so a
thaw would train nothing). Refuses a thaw under DistributedDataParallel, which these loops wrap once and for all.
Neither library is imported before one of these functions is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import MethodError
from oelm.method.compact import write_record
from oelm.method.record import record_of, verify
from oelm.method.thaw import Schedule, param_groups, schedule


def trainer_optimizer(
    model: nn.Module,
    args: Any,
    *,
    layer_decay: float = 1.0,
    no_decay: Callable[[str, Tensor], bool] | None = None,
) -> torch.optim.Optimizer:
    """The optimiser that `args` (TrainingArguments) names, holding all that trains or will thaw.

    Give it to Trainer as `optimizers=(trainer_optimizer(model, args), None)`: the schedule stays Trainer's own.
    """
    from transformers import Trainer

    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    if "optimizer_dict" in options or "params" in options or "model" in options:
        raise MethodError(f"trainer_optimizer: optim = {args.optim!r} builds its own groups; use an AdamW of torch")
    rate = options.pop("lr", args.learning_rate)
    groups = param_groups(model, lr=rate, weight_decay=args.weight_decay, layer_decay=layer_decay, no_decay=no_decay)
    return kind(groups, lr=rate, **options)  # type: ignore[no-any-return]


def trainer_callback(total_steps: int | None = None) -> Any:
    """A TrainerCallback: thaws what is due, verifies at every save and at the end, writes oelm.json at saves.

    `total_steps` is what fractions of the budget refer to; Trainer's own number of steps when left out.
    """
    from transformers import TrainerCallback

    class OelmCallback(TrainerCallback):
        def __init__(self) -> None:
            self.schedule: Schedule | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            self.schedule = schedule(model, total_steps or state.max_steps)
            sharded = getattr(args, "fsdp", None) or getattr(args, "deepspeed", None)
            _refuse_wrapped(self.schedule, args.world_size > 1 and not sharded, "Trainer")
            self.schedule.step(state.global_step)
            verify(model, _plain(more.get("optimizer")))

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            assert self.schedule is not None
            self.schedule.step(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            verify(model)
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero and folder.is_dir():
                write_record(model, folder)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            verify(model, _plain(more.get("optimizer")))

    return OelmCallback()


def lightning_callback(total_steps: int | None = None) -> Any:
    """A Lightning Callback: thaws what is due, verifies at the start, at every checkpoint and at the end.

    The module's `configure_optimizers` builds its optimiser from `oelm.param_groups(self, ...)`.
    """
    from lightning import Callback

    class OelmCallback(Callback):
        def __init__(self) -> None:
            self.schedule: Schedule | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.schedule = schedule(pl_module, total_steps or _finite(trainer.estimated_stepping_batches))
            ddp = "DDP" in type(trainer.strategy).__name__
            _refuse_wrapped(self.schedule, ddp and trainer.world_size > 1, "Lightning's DDPStrategy")
            self.schedule.step(trainer.global_step)
            for optimizer in trainer.optimizers:
                verify(pl_module, optimizer)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            assert self.schedule is not None
            self.schedule.step(trainer.global_step)

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            verify(pl_module)
            record = record_of(pl_module)
            assert record is not None
            checkpoint["oelm"] = json.dumps(record.to_dict())  # text: loads with weights_only=True

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            verify(pl_module)

    return OelmCallback()


def _plain(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimiser inside accelerate's."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _finite(steps: float) -> int | None:
    return int(steps) if 0 < steps < float("inf") else None


def _refuse_wrapped(plan: Schedule, wrapped: bool, who: str) -> None:
    if wrapped and plan.boundaries():
        raise MethodError(
            f"a thaw under DistributedDataParallel needs a new wrapping, which {who} cannot do: its gradients would "
            "silently not be averaged; use FSDP2, one process, or a loop of your own with oelm.method.thaw.rewrap"
        )

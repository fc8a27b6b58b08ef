"""Hugging Face's Trainer and Lightning: what thaws trains, and an interrupted run ends where a straight one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oelm
from oelm.errors import FrozenWeightsChanged, MethodError
from oelm.method.trainers import lightning_callback, trainer_callback, trainer_optimizer
from oelm.models.gpt import GPT
from oelm.models.shapes import Shape


VARIANT = oelm.Variant(thaw=oelm.Thaw(start=5, end=14))
ROWS, BATCH, EPOCHS = 48, 4, 2
STEPS = ROWS // BATCH * EPOCHS


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, 60, (ROWS, 8), generator=generator)
        self.labels = (self.ids.sum(1) % 3).long()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def bert(variant: oelm.Variant | str = VARIANT) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    model = BertForSequenceClassification(config)  # with its dropout: a resumed run must draw the same masks
    oelm.apply(model, variant, seed=1)
    return model


def trainer(model: Any, folder: Path, stop: int | None = None, **more: Any) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop:
                control.should_training_stop = True

    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        weight_decay=0.1,
        save_strategy="steps",
        save_steps=8,
        logging_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        **more,
    )
    return Trainer(
        model=model,
        args=args,
        train_dataset=Rows(),
        optimizers=(trainer_optimizer(model, args), None),
        callbacks=[trainer_callback(), Stop()],
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def equal(a: nn.Module, b: nn.Module) -> bool:
    one, two = weights(a), weights(b)
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_an_interrupted_run_resumed_after_a_thaw_ends_bit_equal(tmp_path: Path) -> None:
    straight = bert()
    start = weights(straight)
    trainer(straight, tmp_path / "straight").train()
    query = "bert.encoder.layer.{}.attention.self.query.weight"
    assert not torch.equal(weights(straight)[query.format(1)], start[query.format(1)])  # thawed at 5
    assert not torch.equal(weights(straight)[query.format(0)], start[query.format(0)])  # thawed at 14

    broken = bert()
    trainer(broken, tmp_path / "broken", stop=10).train()  # killed in the first epoch, after its last save at 8
    assert torch.equal(weights(broken)[query.format(0)], start[query.format(0)])
    assert not equal(broken, straight)
    resumed = bert()
    trainer(resumed, tmp_path / "broken").train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-8"))
    assert equal(resumed, straight)


def test_a_checkpoint_of_trainer_can_be_restored(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    model = bert("oelm-freeze")
    trainer(model, tmp_path).train()
    folder = tmp_path / "checkpoint-24"
    assert json.loads((folder / "oelm.json").read_text())["seed"] == 1
    plain = BertForSequenceClassification.from_pretrained(folder)
    oelm.restore(plain, folder)
    oelm.verify(plain)
    assert equal(plain, model)


def test_trainers_own_optimiser_is_refused_where_it_would_train_nothing(tmp_path: Path) -> None:
    one = trainer(bert(), tmp_path)
    one.optimizer = None
    one.create_optimizer()  # what Trainer does when it is given none: it leaves out what is frozen now
    with pytest.raises(FrozenWeightsChanged, match="will thaw but the optimiser does not hold it"):
        one.train()


def test_frozen_weights_that_move_stop_the_run(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    model = bert("oelm-freeze")

    class Vandal(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with torch.no_grad():
                model.bert.encoder.layer[0].attention.self.query.weight.add_(1e-3)

    one = trainer(model, tmp_path)
    one.add_callback(Vandal())
    with pytest.raises(FrozenWeightsChanged, match=r"layer\.0\.attention\.self\.query\.weight"):
        one.train()


def test_layer_decay_reaches_the_optimiser_and_fused_variants_are_kept(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), learning_rate=1.0, optim="adamw_torch", use_cpu=True)
    optimizer = trainer_optimizer(bert(), args, layer_decay=0.5)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["lr"] for group in optimizer.param_groups} == {1.0, 0.5, 0.25, 0.125}


def test_a_thaw_under_one_wrapping_is_refused() -> None:
    from types import SimpleNamespace

    args = SimpleNamespace(world_size=2, fsdp=None, deepspeed=None)
    state = SimpleNamespace(max_steps=20, global_step=0)
    with pytest.raises(MethodError, match="DistributedDataParallel"):
        trainer_callback().on_train_begin(args, state, None, model=bert())
    trainer_callback().on_train_begin(args, state, None, model=bert("oelm-freeze"))


# Lightning


def lightning_run(folder: Path, epochs: int, resume: Path | None = None, variant: Any = VARIANT) -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(Shape(width=16, layers=2, heads=2, hidden=32, vocab=60, context=8, dropout=0.0))
            oelm.apply(self.model, variant, seed=1)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model.logits(self.model(batch["input_ids"])).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(oelm.param_groups(self, lr=1e-2))

    lightning.seed_everything(4, verbose=False)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[lightning_callback(STEPS), lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)],
    )
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=resume)
    return module


def quiet() -> pytest.MarkDecorator:
    return pytest.mark.filterwarnings("ignore")


@quiet()
def test_lightning_thaws_on_time_and_again_when_resumed(tmp_path: Path) -> None:
    first = lightning_run(tmp_path / "a", epochs=1)
    flags = [block.attn.q.weight.requires_grad for block in first.model.blocks]
    assert flags == [False, True]  # 12 of 24 steps: the upper layer thawed at 5, the lower will at 14
    resumed = lightning_run(tmp_path / "a", epochs=2, resume=tmp_path / "a" / "last.ckpt")
    assert all(block.attn.q.weight.requires_grad for block in resumed.model.blocks)
    assert not torch.equal(resumed.model.blocks[0].attn.q.weight, first.model.blocks[0].attn.q.weight)
    assert equal(resumed, lightning_run(tmp_path / "b", epochs=2))


@quiet()
def test_lightning_stops_when_the_optimiser_lacks_what_will_thaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def naive(module: nn.Module, **_: Any) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad]

    monkeypatch.setattr(oelm, "param_groups", naive)
    with pytest.raises(FrozenWeightsChanged, match="will thaw but the optimiser does not hold it"):
        lightning_run(tmp_path, epochs=1)


def test_neither_library_is_imported_by_the_module() -> None:
    import subprocess
    import sys

    code = "import sys, oelm.method.trainers; print({'transformers', 'lightning'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

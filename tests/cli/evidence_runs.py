"""A small study on disk, its runs' records written as the engine writes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path


STUDY = """
question = "Does freezing cost anything on made-up numbers?"
margin = { percent = 5 }
arms = ["baseline", "oelm-freeze"]
family = [{ arm = "oelm-freeze", against = "baseline", metric = "perplexity", split = "validation" }]
base = { model = "gpt-tiny", data = { name = "wikipedia", context = 64 }, budget = { steps = 100 } }
comparison = { seeds = [1, 2, 3, 4, 5, 6] }
"""


def records():
    path = Path(__file__).parents[1] / "evidence" / "records.py"
    spec = importlib.util.spec_from_file_location("evidence_records", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_study(folder, *, effect=0.2):
    from oelm.study.rows import load_study

    (folder / "mine.toml").write_text(STUDY)
    study = load_study(folder / "mine.toml")
    made = records()
    for number, one in enumerate(made.expand(study)):
        loss = 3 + effect * (one.arm != "baseline") + one.run.seed / 100 + number % 5 / 500
        made.save(folder / "runs", made.record(one, study.name, loss=loss))
    return study

"""Studies as data: what they expand to, and how mistakes in them are said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_studies import BASE, TUNED, small, study

from oelm.errors import ConfigError
from oelm.study.rates import chosen_rates, rates_that_failed, waiting_cells
from oelm.study.rows import (
    LIMIT,
    cells,
    expand,
    load_study,
    parse_overrides,
    read_study,
    studies_here,
    with_overrides,
)
from oelm.train.run import Run


def refused(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_study(data, where="s.toml", name="s")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("s.toml: ")
    return message


def record(planned: Any, loss: float, status: str = "done") -> dict[str, Any]:
    return {"run_id": planned.id, "status": status, "metrics": {"validation": {"loss": loss}}}


def test_arms_times_axes_in_the_order_of_the_file() -> None:
    one = study(axes={"budget.steps": [5, 10], "seed": [1, 2, 3]})
    planned = expand(one)
    assert len(planned) == 2 * 2 * 3
    assert planned[0].row == "baseline-steps5-seed1"
    assert {p.run.budget.steps for p in planned} == {5, 10}
    assert {p.purpose for p in planned} == {"compare"}
    assert len({p.cell for p in planned}) == 4  # runs that differ in seed alone belong together


def test_axes_variant_is_another_way_to_write_arms() -> None:
    written = small()
    arms = written.pop("arms")
    other = read_study(written | {"axes": {"variant": arms}}, where="s", name="small")
    assert [p.id for p in expand(other)] == [p.id for p in expand(study())]


def test_an_axis_of_tables_sets_several_settings_under_a_label() -> None:
    task = [{"label": "a", "data.context": 32}, {"label": "b", "budget": {"epochs": 2.0}, "model": {"dropout": 0.5}}]
    one = study(axes={"task": task}, arms=["baseline"])
    first, second = expand(one)
    assert (first.at, second.at) == ({"task": "a"}, {"task": "b"})
    assert first.run.data.context == 32
    assert second.run.budget.steps is None
    assert second.run.budget.epochs == 2.0
    assert second.run.budget.batch == 2
    assert second.run.model.dropout == 0.5  # type: ignore[union-attr]


def test_tuning_first_then_fresh_seeds_at_the_chosen_rate() -> None:
    one = study(**TUNED)
    tuning = expand(one)
    assert [p.purpose for p in tuning] == ["tune"] * 12
    losses = {1e-3: 3.0, 3e-3: 2.0, 1e-2: 2.5}
    records = [record(p, losses[p.run.optimizer.lr]) for p in tuning]
    rates = chosen_rates(one, records)
    assert rates == {"baseline": 3e-3, "oelm-freeze": 3e-3}
    compare = [p for p in expand(one, rates) if p.purpose == "compare"]
    assert [p.row for p in compare] == ["baseline-s11", "baseline-s12", "oelm-freeze-s11", "oelm-freeze-s12"]
    assert {p.run.optimizer.lr for p in compare} == {3e-3}


def test_a_cell_waits_for_all_its_tuning_runs() -> None:
    one = study(**TUNED)
    records = [record(p, 1.0) for p in expand(one)][:-1]
    assert chosen_rates(one, records) == {"baseline": 1e-3}  # a tie goes to the smaller rate


def test_a_rate_that_diverged_on_one_seed_loses() -> None:
    one = study(**TUNED)
    records = []
    for planned in expand(one):
        best = planned.run.optimizer.lr == 1e-2
        dead = best and planned.run.seed == 2
        records.append(record(planned, 0.1 if best else 2.0, "diverged" if dead else "done"))
    assert chosen_rates(one, records)["baseline"] == 1e-3


def test_a_cell_whose_rates_all_diverged_has_none() -> None:
    one = study(**TUNED)
    records = [record(p, 1.0, "diverged") for p in expand(one)]
    assert chosen_rates(one, records) == {}
    assert rates_that_failed(one, records) == ["baseline", "oelm-freeze"]


def test_accuracy_is_better_when_higher() -> None:
    one = study(**(TUNED | {"tuning": {"rates": [1e-3, 1e-2], "seeds": [1], "select": "accuracy"}}))
    records = []
    for planned in expand(one):
        accuracy = {"accuracy": 0.5 + planned.run.optimizer.lr}
        records.append({"run_id": planned.id, "status": "done", "metrics": {"validation": accuracy}})
    assert set(chosen_rates(one, records).values()) == {1e-2}


def test_tuning_at_one_budget_serves_the_others() -> None:
    tuning = {"rates": [1e-3, 3e-3], "seeds": [1], "at": {"budget.steps": 5}}
    one = study(**(TUNED | {"tuning": tuning, "axes": {"budget.steps": [5, 50]}}))
    runs = expand(one)
    assert {p.run.budget.steps for p in runs} == {5}
    rates = chosen_rates(one, [record(p, 1 / p.run.optimizer.lr) for p in runs])
    assert rates == dict.fromkeys((cell.name for cell in cells(one)), 3e-3)


def test_a_tuning_share_is_a_finished_schedule_of_its_own() -> None:
    tuning = {"rates": [1e-3], "seeds": [1], "share": 0.5}
    base = BASE | {"budget": {"steps": 100, "batch": 2}}
    one = study(**(TUNED | {"tuning": tuning, "base": base}))
    assert {p.run.budget.steps for p in expand(one)} == {50}


def test_where_changes_or_skips_the_cells_it_names() -> None:
    where = [
        {"when": {"arm": "oelm-freeze", "budget.steps": [10, 20]}, "skip": True},
        {"when": {"arm": "baseline"}, "set": {"optimizer.clip": 0.5}},
    ]
    one = study(axes={"budget.steps": [5, 10, 20]}, where=where)
    planned = expand(one)
    assert [p.cell for p in planned] == [
        "baseline-steps5",
        "baseline-steps10",
        "baseline-steps20",
        "oelm-freeze-steps5",
    ]
    assert {p.run.optimizer.clip for p in planned if p.arm == "baseline"} == {0.5}


def test_contrasts_take_every_point_of_an_axis_and_the_largest_common_budget() -> None:
    where = [{"when": {"arm": "oelm-freeze", "budget.steps": 20}, "skip": True}]
    family = [{"arm": "oelm-freeze", "against": "baseline", "metric": "loss"}]
    axes = {"data.context": [32, 64], "budget.steps": [5, 10, 20]}
    full = study(axes=axes, where=where, family=family).contrasts()
    assert [c.at for c in full] == [{"data.context": n, "budget.steps": 10} for n in (32, 64)]


def test_overrides_merge_replace_and_swap_budgets() -> None:
    base = {"model": "gpt-512", "budget": {"steps": 5, "batch": 2}, "variant": "oelm-freeze"}
    changed = with_overrides(base, {"model.dropout": 0.0, "budget.tokens": 7, "variant": {"layers": "last:2"}})
    assert changed["model"] == {"preset": "gpt-512", "dropout": 0.0}
    assert changed["budget"] == {"tokens": 7, "batch": 2}
    assert changed["variant"] == {"base": "oelm-freeze", "layers": "last:2"}
    assert with_overrides(changed, {"model": {"preset": "gpt-tiny"}})["model"] == {"preset": "gpt-tiny"}
    assert base["budget"] == {"steps": 5, "batch": 2}


@given(
    st.lists(st.sampled_from(["baseline", "oelm-freeze", "gauss-frozen", "q-only"]), min_size=1, unique=True),
    st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=3, unique=True),
)
def test_every_expansion_has_distinct_rows_ids_and_runs(arms: list[str], steps: list[int], seeds: list[int]) -> None:
    one = study(arms=arms, axes={"budget.steps": steps}, comparison={"seeds": seeds})
    planned = expand(one)
    assert len(planned) == len(arms) * len(steps) * len(seeds)
    assert len({p.row for p in planned}) == len({p.run.identity() for p in planned}) == len(planned)
    assert planned == expand(one)


def test_overrides_of_a_command_change_every_run_and_its_id() -> None:
    one = study()
    assert parse_overrides(["budget.steps=2", "data.name=imdb", "optimizer.lr=1e-4", "variant=q-only"]) == {
        "budget.steps": 2,
        "data.name": "imdb",
        "optimizer.lr": 1e-4,
        "variant": "q-only",
    }
    changed = expand(one, overrides={"budget.steps": 2})
    assert {p.run.budget.steps for p in changed} == {2}
    assert not {p.id for p in changed} & {p.id for p in expand(one)}


def test_patterns_choose_rows_and_comparisons_have_names_before_their_rates() -> None:
    one = study(**(TUNED | {"axes": {"budget.steps": [5, 50]}}))
    chosen = expand(one, names=("baseline-steps5-*",))
    assert {p.row for p in chosen} == {
        f"baseline-steps5-tune-lr{r}-s{s}" for r in ("0.001", "0.003", "0.01") for s in (1, 2)
    }
    assert expand(one, names=("baseline-steps5-s11",)) == []  # known, but not before its rate is
    assert [p.row for p in expand(one, {"baseline-steps5": 3e-3}, names=("*-s11",))] == ["baseline-steps5-s11"]
    with pytest.raises(ConfigError, match="no row, arm, cell"):
        expand(one, names=("baseline-steps7*",))


def test_cells_wait_for_the_rate_of_the_cell_that_tunes_for_them() -> None:
    tuning = {"rates": [1e-3, 3e-3], "seeds": [1], "at": {"budget.steps": 5}}
    one = study(**(TUNED | {"tuning": tuning, "axes": {"budget.steps": [5, 50]}}))
    assert waiting_cells(one, {}, ("baseline",)) == {
        "baseline-steps5": "baseline-steps5",
        "baseline-steps50": "baseline-steps5",
    }
    assert waiting_cells(one, {"baseline-steps50": 1e-3}, ("baseline-steps50-s1?",)) == {}


# ---- mistakes


def test_a_million_runs_are_refused_with_their_count() -> None:
    axes = {"seed": list(range(1000)), "optimizer.lr": [i / 1e4 for i in range(1, 501)]}
    assert f"1,000,000 runs (limit {LIMIT:,})" in refused(small(axes=axes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": [{"name": "A", "set": {"seed": 1}}, {"name": "A", "set": {"seed": 2}}]}, "row 'A' is there twice"),
        ({"rows": [{"name": "A", "set": {"seed": 1}}, {"name": "B", "set": {"seed": 1}}]}, "are the same run"),
        ({"arms": ["baseline", "baseline"]}, "arm 'baseline' is listed twice"),
        ({"arms": ["basline"]}, "did you mean 'baseline'?"),
        ({"arms": {"a b": "baseline"}}, "arm 'a b': use letters"),
        ({"axes": {"optimiser.lr": [1e-3]}}, "did you mean 'optimizer'?"),
        ({"axes": {"optimizer.lrr": [1e-3]}}, "unknown key; did you mean 'lr'?"),
        ({"axes": {"optimizer.lr": ["1e-3"]}}, "write the number without quotes"),
        ({"axes": {"optimizer.lr": []}}, "axes.optimizer.lr"),
        ({"comparison": {"seeds": [1]}, "tuning": {"rates": [1e-3], "seeds": [1]}}, "the comparison needs fresh seeds"),
        ({"tuning": {"rates": [1e-3], "seeds": [1]}}, "add [comparison]"),
        ({"comparison": {"seeds": [1, 1]}}, "listed twice"),
        ({"family": [{"arm": "x", "against": "baseline", "metric": "loss"}]}, "arm 'x' is not in this study"),
        ({"family": [{"arm": "baseline", "against": "baseline", "metric": "los"}]}, "did you mean 'loss'?"),
        ({"where": [{"when": {"budget.steps": 5}}]}, "is not an axis of this study"),
        ({"margin": {"percent": 5, "points": 1}}, "exactly one of percent and points"),
        ({"question": "?"}, "question"),
        ({"comparision": {"seeds": [1]}}, "did you mean 'comparison'?"),
        ({"arms": [], "axes": {}}, "nothing would run"),
        ({"base": BASE | {"budget": {"batch": 2}}}, "exactly one of steps, epochs and tokens"),
        ({"axes": {"seed": [1]}, "comparison": {"seeds": [2]}}, "keep comparison.seeds"),
        (
            {
                "axes": {"budget.steps": [5, 10]},
                "where": [{"when": {"arm": "baseline", "budget.steps": 5}, "skip": True}],
                "tuning": {"rates": [1e-3], "seeds": [1], "at": {"budget.steps": 5}},
                "comparison": {"seeds": [2]},
            },
            "baseline-steps10 takes the rate of baseline-steps5, which [[where]] skips",
        ),
    ],
)
def test_mistakes_are_said_in_one_line(changes: dict[str, Any], said: str) -> None:
    assert said in refused(small(**changes))


def test_a_study_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fair-lm'"):
        load_study("fair-ml")


def test_set_without_a_value_is_refused() -> None:
    for bad in (["steps"], ["=3"], ["a=1", "a=2"], ["a=[1,"]):
        with pytest.raises(ConfigError, match="--set"):
            parse_overrides(bad)


# ---- the studies that come with it


@pytest.mark.parametrize("name", sorted(studies_here()))
def test_every_study_expands_and_says_what_it_asks(name: str) -> None:
    one = load_study(name)
    assert one.question.endswith("?")
    assert one.margin is not None
    assert one.family
    rate = {cell.name: one.tuning.rates[0] for cell in cells(one)} if one.tuning else {}
    planned = expand(one, rate)
    assert planned
    known = set(one.arm_names())
    assert all(c.arm in known and c.against in known for c in one.contrasts())
    assert all(Run.read(p.run.model_dump(), where=p.row) == p.run for p in planned[:50])


def test_the_demo_is_thirty_small_runs() -> None:
    demo = load_study("demo")
    assert len(expand(demo, dict.fromkeys(demo.arm_names(), 0.003))) == 30


def test_studies_need_no_torch() -> None:
    code = (
        "import sys; from oelm.study import archive, plan, rows, runner, watch, web;"
        "rows.load_study('original'); print({'torch', 'transformers', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "set()"

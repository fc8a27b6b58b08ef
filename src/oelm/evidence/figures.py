"""Every plot of a study's report.

Owns which plots there are and what they show; drawing.py owns how they look. Refuses to draw what it has no numbers
for: such a figure is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from oelm.evidence.drawing import COLOURS, INK, Figure, figure, legend, log_axis, looks, mesh, readable, slug
from oelm.evidence.labels import budget_of, count, stratum_of
from oelm.evidence.narrative import gap_line, place_among
from oelm.evidence.results import Row, Table
from oelm.evidence.statistics import COMPARED, Comparison
from oelm.study.rows import HIGHER_IS_BETTER, Study


if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def of_study(study: Study, results: Table, comparisons: Sequence[Comparison]) -> list[Figure]:
    """Every figure that the table has numbers for, in the order of the report."""
    primary = [c for c in comparisons if c.primary]
    made = [
        differences(primary),
        *(learning_curves(results, stratum) for stratum in _strata(results)),
        gap_over_tokens(comparisons),
        gap_over_scale(results, comparisons),
        *(rate_curves(study, results, stratum) for stratum in _strata(results)),
        *(stability_map(study, results, stratum) for stratum in _strata(results)),
        *(quality_against_cost(study, results, stratum) for stratum in _strata(results)),
    ]
    return [figure for figure in made if figure is not None]


def differences(comparisons: Sequence[Comparison]) -> Figure | None:
    """Every compared pair of seeds as a dot, with the mean and its t interval."""
    shown = [c for c in comparisons if c.points]
    if not shown:
        return None

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots(len(_units(shown)), 1, squeeze=False)[:, 0]
        for axis, (unit, group) in zip(axes, _units(shown).items(), strict=True):
            for y, c in enumerate(reversed(group)):
                scale = _scaled(c)
                values = [scale(p.value - p.reference) for p in c.points]
                axis.plot(values, np.full(len(values), y - 0.18), "o", color=COLOURS[0], alpha=0.8, ms=4)
                mean = scale(c.estimate.mean) if c.estimate else float(np.mean(values))
                if c.estimate and c.estimate.t_interval:
                    axis.plot([scale(v) for v in c.estimate.t_interval], [y, y], color=INK, lw=1.6)
                axis.plot(mean, y, "D", color=COLOURS[1], ms=6)
            if group[0].margin is not None:
                limit = _scaled(group[0])(group[0].margin if group[0].lower_is_better else -group[0].margin)
                axis.axvline(limit, color=COLOURS[2], ls=":", label="margin")
                axis.legend(loc="best")
            axis.axvline(0, color=INK, lw=0.8)
            axis.set_yticks(range(len(group)), [_label(c, shown) for c in reversed(group)])
            axis.set_ylim(-0.6, len(group) - 0.4)
            axis.set_xlabel(unit)

    return figure(
        "differences",
        "Paired differences",
        "Each small dot is one seed's difference (arm minus reference); diamonds are means, bars 95 % t intervals.",
        draw,
        height=1.1 + 0.55 * len(shown) + 0.4 * len(_units(shown)),
    )


def learning_curves(results: Table, stratum: str) -> Figure | None:
    """Validation loss over tokens at the largest budget: mean line, band from the smallest to the largest seed."""
    rows = [row for row in _largest_budget(results, stratum) if len(results.curves.get(row["run_id"], [])) > 1]
    if not rows:
        return None

    def draw(canvas: Canvas) -> None:
        axis = canvas.subplots()
        for look, (arm, members) in looks(_by(rows, "arm")):
            curves = [dict(results.curves[row["run_id"]]) for row in members]
            tokens = sorted(set.intersection(*(set(curve) for curve in curves)))
            if len(tokens) < 2:
                continue
            values = np.array([[curve[t] for t in tokens] for curve in curves])
            axis.plot(tokens, values.mean(0), label=f"{arm} (n = {len(curves)})", color=look[0], ls=look[2])
            axis.fill_between(tokens, values.min(0), values.max(0), color=look[0], alpha=0.18, lw=0)
        axis.set_xlabel("tokens")
        axis.xaxis.set_major_formatter(lambda value, _: count(value))
        axis.set_ylabel("validation loss (nats)")
        legend(axis)

    return figure(
        f"curves-{slug(stratum)}",
        f"Learning curves: {stratum}",
        "Mean over seeds at the largest budget; bands reach from the best to the worst seed. Points inside a schedule mislead about the end of a shorter one.",
        draw,
    )


def gap_over_tokens(comparisons: Sequence[Comparison]) -> Figure | None:
    """The gap of each pair at every budget, each a set of finished schedules."""
    lines = {
        (c.arm, c.against, c.place.replace(f", {c.budget}", "", 1)): gap_line(comparisons, c)
        for c in comparisons
        if c.primary
    }
    lines = {key: line for key, line in lines.items() if len(line) > 1 and all(c.tokens for c in line)}
    if not lines:
        return None

    def draw(canvas: Canvas) -> None:
        axis = canvas.subplots()
        for look, ((arm, against, stratum), line) in looks(lines):
            scale = _scaled(line[0])
            tokens = [c.tokens for c in line]
            means = [scale(c.estimate.mean) for c in line if c.estimate]
            label = f"{arm} − {against}" + (f" ({stratum})" if len({key[2] for key in lines}) > 1 else "")
            axis.plot(tokens, means, color=look[0], marker=look[1], ls=look[2], label=label)
            for c in line:
                if c.estimate and c.estimate.t_interval:
                    axis.plot([c.tokens, c.tokens], [scale(v) for v in c.estimate.t_interval], color=look[0], lw=1)
        axis.axhline(0, color=INK, lw=0.8)
        log_axis(axis, {c.tokens or 0.0 for line in lines.values() for c in line}, count)
        axis.set_xlabel("tokens seen")
        axis.set_ylabel(_unit(next(iter(lines.values()))[0]))
        legend(axis)

    return figure(
        "gap-over-tokens",
        "Gap over tokens",
        "Every point is the mean paired difference of finished schedules of that budget, with its 95 % t interval.",
        draw,
    )


def gap_over_scale(results: Table, comparisons: Sequence[Comparison]) -> Figure | None:
    """The gap of each pair against the model's size, where a study has several sizes on one data set."""
    sizes = {stratum_of(row): row["params_total"] for row in results.rows if row.get("params_total")}
    largest: dict[tuple[str, ...], Comparison] = {}
    for c in sorted(comparisons, key=lambda c: c.tokens or 0.0):
        if c.estimate is not None and c.stratum in sizes:
            largest[c.arm, c.against, c.metric, c.stratum] = c
    lines: dict[tuple[str, ...], list[Comparison]] = {}
    for c in largest.values():
        lines.setdefault((c.arm, c.against, c.data, c.metric), []).append(c)
    lines = {key: line for key, line in lines.items() if len({sizes[c.stratum] for c in line}) > 1}
    if not lines:
        return None

    def draw(canvas: Canvas) -> None:
        axis = canvas.subplots()
        for look, ((arm, against, data, _), line) in looks(lines):
            scale = _scaled(line[0])
            ordered = sorted(line, key=lambda c: float(sizes[c.stratum]))
            for c in ordered:
                if c.estimate and c.estimate.t_interval:
                    x = sizes[c.stratum]
                    axis.plot([x, x], [scale(v) for v in c.estimate.t_interval], color=look[0], lw=1)
            means = [scale(c.estimate.mean) for c in ordered if c.estimate]
            axis.plot(
                [sizes[c.stratum] for c in ordered],
                means,
                color=look[0],
                marker=look[1],
                ls=look[2],
                label=f"{arm} − {against}" + (f" ({data})" if len({key[2] for key in lines}) > 1 else ""),
            )
        axis.axhline(0, color=INK, lw=0.8)
        log_axis(axis, {float(sizes[c.stratum]) for line in lines.values() for c in line}, count)
        axis.set_xlabel("parameters")
        axis.set_ylabel(_unit(next(iter(lines.values()))[0]))
        legend(axis)

    return figure(
        "gap-over-scale",
        "Gap against scale",
        "Mean paired difference against the number of parameters, each at its largest budget, with 95 % t intervals.",
        draw,
    )


def rate_curves(study: Study, results: Table, stratum: str) -> Figure | None:
    """Quality against learning rate for each arm: every run a dot, means joined, diverged runs at the top edge."""
    column = _column(study)
    rows = [row for row in _largest_budget(results, stratum, swept=True) if row["status"] in ("done", "diverged")]
    if len({row["lr"] for row in rows}) < 2:
        return None

    def draw(canvas: Canvas) -> None:
        axis = canvas.subplots()
        for look, (arm, members) in looks(_by(rows, "arm")):
            rates = sorted({row["lr"] for row in members})
            finished = [row for row in members if row.get(column) is not None and row["status"] == "done"]
            means = {rate: [float(r[column]) for r in finished if r["lr"] == rate] for rate in rates}
            drawn = [rate for rate in rates if means[rate]]
            axis.plot(
                drawn,
                [np.mean(means[rate]) for rate in drawn],
                color=look[0],
                marker=look[1],
                ls=look[2],
                label=arm,
            )
            axis.plot([r["lr"] for r in finished], [r[column] for r in finished], ".", color=look[0], alpha=0.5)
            lost = [row["lr"] for row in members if row["status"] == "diverged"]
            axis.plot(lost, np.full(len(lost), 0.98), "x", color=look[0], transform=axis.get_xaxis_transform())
        log_axis(axis, {row["lr"] for row in rows}, lambda rate: f"{rate:g}")
        axis.set_xlabel("learning rate")
        axis.set_ylabel(column.replace(".", " "))
        legend(axis)

    return figure(
        f"rates-{slug(stratum)}",
        f"Learning rates: {stratum}",
        "Every dot is a run, lines join the means; a cross at the top edge is a run that diverged.",
        draw,
    )


def stability_map(study: Study, results: Table, stratum: str) -> Figure | None:
    """Rate × seed for each arm: where training survives."""
    column = _column(study)
    rows = [row for row in _largest_budget(results, stratum, swept=True) if row["status"] in ("done", "diverged")]
    rates, seeds = sorted({row["lr"] for row in rows}), sorted({row["seed"] for row in rows})
    values = [float(row[column]) for row in rows if row["status"] == "done" and row.get(column) is not None]
    if len(rates) < 3 or len(seeds) < 2 or not values:
        return None
    arms = _by(rows, "arm")
    columns = min(3 if len(rates) <= 6 else 2, len(arms))

    def draw(canvas: Canvas) -> None:
        grid = canvas.subplots(-(-len(arms) // columns), columns, squeeze=False)
        low, high = min(values), float(np.quantile(values, 0.95)) if column.endswith("loss") else max(values)
        for axis in grid.flat[len(arms) :]:
            axis.set_axis_off()
        for axis, (arm, members) in zip(grid.flat, arms.items(), strict=False):
            cells = np.full((len(seeds), len(rates)), np.nan)
            for row in members:
                here = seeds.index(row["seed"]), rates.index(row["lr"])
                if row["status"] == "diverged":
                    axis.text(here[1], here[0], "×", ha="center", va="center", color=COLOURS[1], fontsize=13)
                elif row.get(column) is not None:
                    cells[here] = row[column]
                    axis.text(
                        here[1],
                        here[0],
                        f"{row[column]:.3g}",
                        ha="center",
                        va="center",
                        fontsize=6.5,
                        color=readable(float(row[column]), low, high),
                    )
            image = mesh(axis, cells, low, high)
            axis.set_title(arm, fontsize=10)
            axis.grid(visible=False)
            axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates], rotation=90, fontsize=8)
            axis.set_yticks(range(len(seeds)), [str(seed) for seed in seeds], fontsize=8)
        canvas.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label=column.replace(".", " "))

    return figure(
        f"stability-{slug(stratum)}",
        f"Stability: {stratum}",
        "Learning rate (across) by seed (down) for each arm; × is a run that diverged, an empty cell one that was not made.",
        draw,
        height=0.9 + -(-len(arms) // columns) * (1.4 + 0.22 * len(seeds)),
        width=8.5,
    )


def quality_against_cost(study: Study, results: Table, stratum: str) -> Figure | None:
    """Quality against trained parameters, training time and tokens; the open line is the Pareto front."""
    column = _column(study)
    rows = [
        row
        for row in results.rows
        if stratum_of(row) == stratum
        and row["purpose"] in COMPARED
        and row["status"] == "done"
        and row.get(column) is not None
    ]
    costs = [
        (key, label)
        for key, label in (
            ("params_trainable", "trained parameters"),
            ("train_seconds", "training time (s)"),
            ("tokens_seen", "tokens seen"),
        )
        if len({row.get(key) for row in rows} - {None}) > 1
    ]
    if not costs or len({row["arm"] for row in rows}) < 2:
        return None

    def draw(canvas: Canvas) -> None:
        from matplotlib.ticker import MaxNLocator

        grid = canvas.subplots(1, len(costs), squeeze=False, sharey=True)[0]
        for axis, (key, label) in zip(grid, costs, strict=True):
            points = []
            for look, (arm, members) in looks(_by(rows, "arm")):
                for budget in sorted({budget_of(row) for row in members}):
                    at = [row for row in members if budget_of(row) == budget and row.get(key) is not None]
                    if not at:
                        continue
                    at = _at_best_rate(at, column)
                    axis.plot([r[key] for r in at], [r[column] for r in at], ".", color=look[0], alpha=0.4, ms=4)
                    x = float(np.mean([row[key] for row in at]))
                    y = float(np.mean([row[column] for row in at]))
                    points.append((x, y))
                    axis.plot(x, y, look[1], color=look[0], ms=7, label=arm)
            front = _front(points, higher=column.split(".")[1] in HIGHER_IS_BETTER)
            axis.plot([p[0] for p in front], [p[1] for p in front], color=INK, lw=0.8, drawstyle="steps-post")
            axis.set_xlabel(label)
            axis.xaxis.set_major_formatter(lambda value, _: count(value))
            axis.xaxis.set_major_locator(MaxNLocator(4))
        grid[0].set_ylabel(column.replace(".", " "))
        legend(grid[-1])

    return figure(
        f"cost-{slug(stratum)}",
        f"Quality against cost: {stratum}",
        "Means over seeds at each arm's best rate, every run a dot; the thin line is the Pareto front. Times compare only on one device.",
        draw,
        width=8.5,
    )


# ---- shared parts


def _by(rows: Sequence[Row], column: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: str(r[column])):
        groups.setdefault(str(row[column]), []).append(row)
    return groups


def _strata(results: Table) -> list[str]:
    return sorted({stratum_of(row) for row in results.rows})


def _largest_budget(results: Table, stratum: str, *, swept: bool = False) -> list[Row]:
    """The compared runs of a stratum's largest budget; `swept`: the runs at many rates instead."""
    rows = [row for row in results.rows if stratum_of(row) == stratum]
    if swept and any(row["purpose"] == "tune" for row in rows):
        rows = [row for row in rows if row["purpose"] == "tune"]
    else:
        rows = [row for row in rows if row["purpose"] in COMPARED]
    largest = max((budget_of(row) for row in rows), default=None)
    return [row for row in rows if budget_of(row) == largest]


def _column(study: Study) -> str:
    """The validation column of the study's first metric."""
    metric = study.family[0].metric if study.family else "loss"
    return "validation." + ("loss" if metric == "perplexity" else metric)


def _scaled(c: Comparison) -> Callable[[float], float]:
    if c.as_perplexity:
        return lambda nats: 100 * float(np.expm1(nats))
    return (lambda value: value) if c.lower_is_better else (lambda value: 100 * value)


def _unit(c: Comparison) -> str:
    if c.as_perplexity:
        return "difference of perplexity (%)"
    return f"difference of {c.metric}" + ("" if c.lower_is_better else " (points)")


def _units(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault(_unit(c), []).append(c)
    return groups


def _at_best_rate(rows: list[Row], column: str) -> list[Row]:
    """The runs at the rate whose mean is best (there is one rate where rates were tuned)."""
    sign = -1.0 if column.split(".")[1] in HIGHER_IS_BETTER else 1.0
    by_rate = {rate: [row for row in rows if row["lr"] == rate] for rate in sorted({row["lr"] for row in rows})}
    return min(by_rate.values(), key=lambda group: sign * float(np.mean([row[column] for row in group])))


def _label(c: Comparison, among: Sequence[Comparison]) -> str:
    place = place_among(c, among)
    return f"{c.arm} − {c.against}" + (f"\n{place}" if place else "")


def _front(points: Sequence[tuple[float, float]], *, higher: bool) -> list[tuple[float, float]]:
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (p[0], -p[1] if higher else p[1])):
        if not best or (y > best[-1][1] if higher else y < best[-1][1]):
            best.append((x, y))
    return best

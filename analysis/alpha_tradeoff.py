"""`dart-lab figure alpha-tradeoff`: importance against redundancy, task by task, with what choosing α is really worth.

The score is α · importance + (1 − α) · uniqueness (arXiv 2502.11501): α = 1 is FastV, α = 0 keeps what is least like
the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dart_lab.displays.alpha_tradeoff import draw_alpha_tradeoff
from dart_lab.displays.figure import FigureData, FigureOptions, FigureSpec
from dart_lab.errors import DartLabError
from dart_lab.pruners.alpha import Alpha
from dart_lab.pruners.base import Pruner
from dart_lab.pruners.fastv import FastV
from dart_lab.pruners.none_kept import NoneKept
from dart_lab.studies.bootstrap import bootstrap_sums, sums_by_image
from dart_lab.studies.plan import NONE_KEPT, UNPRUNED
from dart_lab.studies.scores import score_table

from .sweep import interval, open_bench, points

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)  # the published sweep
KEEP = (192, 144, 96, 64, 32)
SAMPLES = 240
FAMILIES = ("exist", "relation", "text", "knowledge")
SHOWN = "all"
#: Published scores of LLaVA-1.5-7B at 144 of 576 tokens, α as above (arXiv 2502.11501; MME in points, others percent).
PUBLISHED: Mapping[str, tuple[float, ...]] = {
    "MME": (1707, 1714, 1711, 1706, 1711, 1699, 1680, 1688, 1689),
    "POPE": (82.8, 82.6, 82.4, 81.9, 81.6, 79.7, 77.9, 75.6, 71.8),
    "SQA": (64.8, 65.2, 65.2, 65.1, 65.3, 65.2, 65.5, 65.7, 65.3),
}


def compute(options: FigureOptions, progress: bool) -> FigureData:
    """Answer the questions of every task at every α and budget.

    Args:
        options: `keep` defaults to five budgets, `n` to 240 questions, a quarter of them of each family.
        progress: show a progress bar on stderr.

    Raises:
        DartLabError: as `open_bench`; methods other than alpha.
    """
    if options.methods not in (None, ("alpha",)):
        raise DartLabError("alpha-tradeoff is about one method, alpha; leave --methods out")
    bench = open_bench(options, n=SAMPLES, keep=KEEP, families=FAMILIES)
    layer = bench.options.layer
    budgets = [int(keep) for keep in bench.options.keep or ()]
    conditions: dict[str, Pruner | None] = {UNPRUNED: None, NONE_KEPT: NoneKept(layer=layer)}
    for keep in budgets:
        conditions[f"fastv {keep}"] = FastV(keep=keep, layer=layer)
        conditions |= {f"{alpha:g} {keep}": Alpha(keep=keep, alpha=alpha, layer=layer) for alpha in ALPHAS}
    records = bench.answers(conditions, progress)
    return FigureData(records, {**bench.facts("alpha-tradeoff"), **measure(records, seed=bench.options.seed)})


def measure(records: pd.DataFrame, *, seed: int = 0, n_boot: int = 1000) -> dict[str, Any]:
    """All numbers of the figure from its records.

    Args:
        records: with conditions "α keep", "fastv keep", "unpruned" and "none kept".
        seed: of bootstraps and of the halves.
        n_boot: resamples of pictures. Default 1000.

    Returns:
        `tasks`, `alphas`, `budgets`, `images`; `curves`: one entry a task and budget with `scores` (value, low, high
        for every α), `best` (α, and the interval of the best α over resampled pictures) and `halves` (α chosen on one
        half of the pictures, judged on the other, against α = 0.5 there); `floors`: task → unpruned and none kept;
        `fastv_differs`: answers at α = 1 that are not FastV's; `adaptive`, see `adaptive_scores`; `published`.
    """
    sweep = _sweep(records)
    tasks, budgets = list(dict.fromkeys(records["family"])), sorted(sweep["keep"].unique(), reverse=True)
    alphas = sorted(sweep["alpha"].unique())
    scores = score_table(sweep, by=("family", "keep", "alpha"), seed=seed, n_boot=n_boot)
    curves = []
    for task in tasks:
        for keep in budgets:
            own = scores[(scores["family"] == task) & (scores["keep"] == keep)].sort_values("alpha")
            wide = _wide(sweep[(sweep["family"] == task) & (sweep["keep"] == keep)], alphas)
            curves.append(
                {
                    "task": task, "keep": int(keep), "scores": [interval(row) for _, row in own.iterrows()],
                    "best": best_alpha(wide, alphas, seed=seed, n_boot=n_boot),
                    "halves": across_halves(wide, alphas, seed=seed),
                }
            )  # fmt: skip
    ends = score_table(records[records["condition"].isin([UNPRUNED, NONE_KEPT])], by=("family", "condition"), seed=seed)
    floors: dict[str, dict[str, Any]] = {}
    for _, row in ends.iterrows():
        floors.setdefault(row["family"], {})[row["condition"]] = interval(row)
    return {
        "tasks": tasks, "alphas": [float(a) for a in alphas], "budgets": [int(k) for k in budgets],
        "images": int(records["image_id"].nunique()), "curves": curves, "floors": floors,
        "fastv_differs": fastv_differs(records),
        "adaptive": [adaptive_scores(sweep[sweep["keep"] == keep], alphas, seed=seed) for keep in budgets],
        "published": {
            "keep": 144, "source": "arXiv 2502.11501, LLaVA-1.5-7B",
            "scores": {name: list(scores) for name, scores in PUBLISHED.items()},
        },
    }  # fmt: skip


def best_alpha(wide: pd.DataFrame, alphas: list[float], *, seed: int, n_boot: int) -> dict[str, float]:
    """The α with the best score (the lowest of equal ones), and the 95 % interval of the best α when pictures are
    resampled: a wide one says that the data does not tell.
    """
    sums = sums_by_image(wide[alphas].to_numpy(), wide["image_id"].to_numpy())
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=n_boot)
    draws = np.asarray(alphas)[(weights @ sums).argmax(axis=1)]
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return {"value": float(alphas[int(sums.sum(axis=0).argmax())]), "low": float(low), "high": float(high)}


def across_halves(wide: pd.DataFrame, alphas: list[float], *, seed: int, middle: float = 0.5) -> dict[str, float]:
    """α chosen on one half of the pictures and judged on the other, both ways round.

    Returns `chosen`: mean score of the chosen α on the half that did not choose it; `middle`: of α = 0.5 there; `best`:
    of the α that is best there, which nobody can know beforehand.
    """
    right = wide[alphas].to_numpy()
    out = {"chosen": 0.0, "middle": 0.0, "best": 0.0}
    for choose, judge in _halves(wide, seed):
        if not choose.any() or not judge.any():
            return dict.fromkeys(out, float(right.mean()))
        there = right[judge].mean(axis=0)
        out["chosen"] += there[int(right[choose].mean(axis=0).argmax())] / 2
        out["middle"] += there[alphas.index(middle)] / 2 if middle in alphas else there.mean() / 2
        out["best"] += there.max() / 2
    return {name: float(value) for name, value in out.items()}


def adaptive_scores(sweep: pd.DataFrame, alphas: list[float], *, seed: int, n_boot: int = 1000) -> dict[str, Any]:
    """What could be won by choosing α: rules learnt on one half of the pictures, judged on the other, both ways round.

    Returns `keep`, and for every rule its score with the interval over pictures, the rule as it was learnt (`value`,
    `low`, `high`), and as `gain` the paired difference to `fixed` with its own. `fixed`: the one α that is best over
    all tasks; `per_task`: the best α of each task; `predicted`: α by the words of the question (logistic regressions of
    "is the answer right at this α", the α with the largest probability); `oracle`: for every task the α that is best on
    the half that judges.
    """
    wide = _wide(sweep, alphas)
    right, family = wide[alphas].to_numpy(), wide["family"].to_numpy()
    scored = {name: np.empty(len(wide)) for name in ("fixed", "per_task", "predicted", "oracle")}
    for choose, judge in _halves(wide, seed):
        picks = {
            "fixed": np.full(judge.sum(), right[choose].mean(axis=0).argmax()),
            "per_task": _by_task(right[choose], family[choose], family[judge]),
            "predicted": _predicted(wide["question"].to_numpy(), right, choose, judge, seed),
            "oracle": _by_task(right[judge], family[judge], family[judge]),
        }
        for name, pick in picks.items():
            scored[name][judge] = right[judge][np.arange(judge.sum()), pick]

    def mean(values: np.ndarray) -> dict[str, float]:
        rows = np.column_stack([values, np.ones(len(values))])
        table = bootstrap_sums(
            rows, wide["image_id"].to_numpy(), lambda sums: sums[..., :1] / sums[..., 1:], n_boot=n_boot, seed=seed
        )
        return interval(table.iloc[0])

    rules = {name: {**mean(own), "gain": mean(own - scored["fixed"])} for name, own in scored.items()}
    return {"keep": int(sweep["keep"].iloc[0]), **rules}


def _halves(wide: pd.DataFrame, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two halves of the pictures as masks over rows: (chooses, judges), both ways round."""
    images = wide["image_id"].unique()
    first = set(np.random.default_rng(seed).permutation(images)[: len(images) // 2])
    half = wide["image_id"].isin(first).to_numpy()
    return [(half, ~half), (~half, half)]


def lines(facts: Mapping[str, Any]) -> list[str]:
    """The best α of every task and budget, and what choosing it was worth."""
    out = []
    for curve in facts["curves"]:
        best, halves = curve["best"], curve["halves"]
        out.append(
            f"{curve['task']}, keep {curve['keep']}: best α {best['value']:g} [{best['low']:g}, {best['high']:g}]; "
            f"chosen on one half it scores {100 * halves['chosen']:.1f} % on the other, "
            f"α = 0.5 {100 * halves['middle']:.1f} %"
        )
    for row in facts["adaptive"]:
        words = "; ".join(
            f"{name} {100 * row[rule]['value']:.1f} % ({points(row[rule]['gain'])})"
            for rule, name in (
                ("per_task", "one a task"), ("predicted", "by the question's words"), ("oracle", "oracle a task")
            )
        )  # fmt: skip
        out.append(
            f"all tasks, keep {row['keep']}: one α {100 * row['fixed']['value']:.1f} %; {words}; in brackets points "
            "more than with one α"
        )
    return [*out, f"answers at α = 1 that differ from FastV's: {facts['fastv_differs']}"]


def fastv_differs(records: pd.DataFrame) -> int:
    """How many answers at α = 1 are not FastV's."""
    differ = 0
    for condition in records["condition"].unique():
        if condition.startswith("fastv "):
            pair = [records[records["condition"] == name].set_index("sample")["prediction"]
                    for name in (condition, f"1 {condition.split()[1]}")]  # fmt: skip
            differ += int((pair[0] != pair[1].reindex(pair[0].index)).sum())
    return differ


def _sweep(records: pd.DataFrame) -> pd.DataFrame:
    """The rows of the sweep, with `alpha` and `keep` as numbers."""
    parts = records["condition"].str.extract(r"^(?P<alpha>[\d.]+) (?P<keep>\d+)$")
    own = records[parts["alpha"].notna()].copy()
    own["alpha"], own["keep"] = parts["alpha"].dropna().astype(float), parts["keep"].dropna().astype(int)
    if not len(own):
        raise DartLabError("the records hold no sweep over α")
    return own


def _wide(sweep: pd.DataFrame, alphas: list[float]) -> pd.DataFrame:
    """One row a sample: its correctness at every α, and what it is."""
    wide = sweep.pivot(index="sample", columns="alpha", values="correct")[alphas]
    about = sweep.drop_duplicates("sample").set_index("sample")[["image_id", "family", "question"]]
    return wide.join(about).reset_index()


def _by_task(right: np.ndarray, learnt: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """For every question the α that is best over the learnt questions of its task."""
    overall = right.mean(axis=0).argmax()
    best = {task: right[learnt == task].mean(axis=0).argmax() for task in np.unique(learnt)}
    return np.array([best.get(task, overall) for task in asked])


def _predicted(
    questions: np.ndarray, right: np.ndarray, choose: np.ndarray, judge: np.ndarray, seed: int
) -> np.ndarray:
    """For every question the α at which its words promise the best chance of a right answer."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    words = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\S+").fit(questions[choose])
    known, asked = words.transform(questions[choose]), words.transform(questions[judge])
    chance = np.empty((judge.sum(), right.shape[1]))
    for column in range(right.shape[1]):
        target = right[choose, column] > 0.5
        if target.all() or not target.any():
            chance[:, column] = target.mean()
            continue
        model = LogisticRegression(max_iter=500, random_state=seed).fit(known, target)
        chance[:, column] = model.predict_proba(asked)[:, 1]
    return chance.argmax(axis=1)


def _draw(table: pd.DataFrame, facts: Mapping[str, Any]) -> Any:
    return draw_alpha_tradeoff(facts)


FIGURE = FigureSpec(
    name="alpha-tradeoff",
    summary="importance against redundancy: score over α by task and budget, and what choosing α is worth",
    compute=compute,
    draw=_draw,
    lines=lines,
    trace=False,
)

"""Score tables against hand-computed values and sklearn; retention against the published averages."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import f1_score, precision_score, recall_score

from dart_lab.errors import DartLabError
from dart_lab.studies.comparison import paired
from dart_lab.studies.scores import complete, pope_score, retention, score_table


def answers(seed: int = 0, n: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"image_id": np.repeat(np.arange(n // 2), 2), "answer": rng.choice(["yes", "no"], n)})
    table["prediction"] = np.where(rng.random(n) < 0.7, table["answer"], rng.choice(["Yes, it is.", "No."], n))
    table["correct"] = (table["prediction"].str.lower().str[:2] == table["answer"].str[:2]).astype(float)
    table["condition"] = "all"
    return table


def test_f1_and_its_parts_agree_with_sklearn() -> None:
    table = answers()
    said = (table["prediction"].str.lower().str[:1] == "y").astype(int)
    is_yes = (table["answer"] == "yes").astype(int)
    got = score_table(table, "f1").set_index("score")["value"]
    assert got["f1"] == pytest.approx(f1_score(is_yes, said))
    assert got["precision"] == pytest.approx(precision_score(is_yes, said))
    assert got["recall"] == pytest.approx(recall_score(is_yes, said))
    assert got["yes_share"] == pytest.approx(said.mean())
    assert got["accuracy"] == pytest.approx(table["correct"].mean())


def test_f1_without_any_yes_is_not_a_number() -> None:
    table = pd.DataFrame({"condition": "a", "image_id": [1, 2], "prediction": "no", "answer": "no"})
    assert np.isnan(score_table(table, "f1").set_index("score").loc["f1", "value"])


def test_mme_needs_both_questions_of_a_picture_for_acc_plus() -> None:
    table = pd.DataFrame(
        {
            "condition": "a", "image_id": [1, 1, 2, 2, 3, 3], "answer": ["yes", "no"] * 3,
            "prediction": ["yes", "no", "yes", "yes", "no", "yes"],
        }
    )  # fmt: skip
    got = score_table(table, "mme").set_index("score")["value"]
    assert got["acc"] == pytest.approx(3 / 6) and got["acc_plus"] == pytest.approx(1 / 3)
    assert got["mme"] == pytest.approx(100 * (3 / 6 + 1 / 3))


def test_groups_keep_their_order_and_pope_averages_its_categories() -> None:
    parts = [answers(seed).assign(family=name) for seed, name in enumerate(["random", "popular", "adversarial"])]
    table = pd.concat(parts)
    scores = score_table(table, "f1", by=("condition", "family"))
    f1 = scores[scores["score"] == "f1"]
    assert f1["family"].tolist() == ["random", "popular", "adversarial"]
    assert pope_score(scores)["value"].tolist() == pytest.approx([f1["value"].mean()])


def test_intervals_hold_their_value_and_bca_follows_the_skew() -> None:
    """Few misses: the percentile interval is symmetric in ranks, BCa reaches further down."""
    table = pd.DataFrame({"condition": "a", "image_id": range(60), "correct": [0.0] * 2 + [1.0] * 58})
    plain, better = (score_table(table, n_boot=4000, method=method).iloc[0] for method in ("percentile", "bca"))
    for row in (plain, better):
        assert row["low"] <= row["value"] <= row["high"]
    assert better["low"] < plain["low"]


def test_errors_name_what_is_missing() -> None:
    with pytest.raises(DartLabError, match="Did you mean 'accuracy'"):
        score_table(answers(), "acuracy")
    with pytest.raises(DartLabError, match="no column 'prediction'"):
        score_table(answers().drop(columns="prediction"), "f1")
    with pytest.raises(DartLabError, match="no records"):
        score_table(answers().iloc[:0])
    with pytest.raises(DartLabError, match="Did you mean 'all'"):
        retention(pd.DataFrame({"condition": ["all"], "task": ["a"], "value": [1.0]}), "alll")
    with pytest.raises(DartLabError, match="scores nothing"):
        retention(pd.DataFrame({"condition": ["all"], "task": ["a"], "value": [0.0]}), "all")


#: LLaVA-1.5-7B at 144 tokens (arXiv 2502.11501): scores by task, and the average that is printed beside them.
TASKS = "GQA MMB MMB_CN MME POPE SQA TextVQA VizWiz".split()
PUBLISHED = {
    "unpruned": [61.9, 64.7, 58.1, 1862, 85.9, 69.5, 58.2, 50.0],
    "Random": [59.0, 62.2, 54.1, 1736, 79.4, 67.8, 51.7, 51.9],
    "Pooling": [59.1, 62.5, 55.2, 1763, 81.4, 69.1, 53.4, 51.9],
    "FastV": [56.5, 59.3, 42.1, 1689, 71.8, 65.3, 53.6, 51.3],
    "SparseVLM": [55.1, 59.5, 51.0, 1711, 77.6, 69.3, 54.9, 51.4],
}
PRINTED = {"Random": 95.0, "Pooling": 96.4, "FastV": 89.8, "SparseVLM": 93.5}


def test_retention_is_the_papers_average() -> None:
    """Published averages come out to the printed decimal."""
    rows = [(name, task, value) for name, row in PUBLISHED.items() for task, value in zip(TASKS, row, strict=True)]
    table = retention(pd.DataFrame(rows, columns=["condition", "task", "value"]), "unpruned").set_index("condition")
    for method, printed in PRINTED.items():
        assert table.loc[method, "avg_pct"] == pytest.approx(printed, abs=0.06)


def test_failures_are_named_and_complete_leaves_what_every_condition_answered() -> None:
    rows = [(task, condition, sample) for task in "st" for condition in "ab" for sample in (1, 2, 3)]
    records = pd.DataFrame(rows, columns=["task", "condition", "sample"], index=[0] * len(rows))
    records["image_id"], records["correct"] = records["sample"], np.arange(len(rows), dtype=float) % 2
    records.iloc[1, 4] = np.nan  # sample 2 of task s, condition a
    with pytest.raises(DartLabError, match=r"1 of 6 records .* complete\(records\)"):
        score_table(records)
    left = complete(records)
    assert left.groupby("task")["sample"].unique().map(list).to_dict() == {"s": [1, 3], "t": [1, 2, 3]}
    assert left["correct"].tolist() == [0, 0, 1, 1] + [0, 1, 0, 1, 0, 1]
    assert score_table(left, by=("task", "condition"))["n"].tolist() == [2, 2, 3, 3]
    with pytest.raises(DartLabError, match="no sample was answered"):
        complete(records.iloc[[1, 4]])
    with pytest.raises(DartLabError, match="take one task at a time"):
        paired(left)

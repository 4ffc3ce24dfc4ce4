"""Paired tests against scipy and brute force; their level on null data; planted flips."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.studies.bootstrap import bootstrap_sums
from dart_lab.studies.comparison import agreement, differences, flips, holm, paired, permutation_test


def records(gain: float = 0.0, n: int = 80, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    base = (rng.random(n) < 0.5).astype(float)
    better = np.where(rng.random(n) < gain, 1.0, base)
    parts = []
    for name, values in (("random", base), ("dart", better)):
        parts.append(pd.DataFrame({"condition": name, "sample": np.arange(n), "image_id": np.arange(n) // 2,
                                   "correct": values, "prediction": np.where(values > 0, "yes", "no")}))  # fmt: skip
    return pd.concat(parts, ignore_index=True)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8))
def test_the_permutation_test_agrees_with_all_sign_flips(gaps: list[int]) -> None:
    seen = abs(sum(gaps))
    exact = np.mean([abs(sum(s * g for s, g in zip(signs, gaps, strict=True))) >= seen
                     for signs in itertools.product([-1, 1], repeat=len(gaps))])  # fmt: skip
    assert permutation_test(gaps, n_perm=4000, seed=1) == pytest.approx(exact, abs=0.035)


def test_the_permutation_test_agrees_with_scipys() -> None:
    gaps = np.random.default_rng(3).normal(0.3, 1.0, size=40)
    theirs = scipy.stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=9999, rng=0)
    assert permutation_test(gaps) == pytest.approx(theirs.pvalue, abs=0.015)


def test_rows_of_a_picture_flip_together() -> None:
    gaps = np.random.default_rng(3).normal(0.3, 1.0, size=20)
    assert permutation_test(np.repeat(gaps, 5), np.repeat(np.arange(20), 5)) == permutation_test(gaps)


def test_scale_does_not_matter_and_no_difference_is_certain() -> None:
    gaps = np.random.default_rng(4).normal(0.2, 1.0, size=30)
    assert permutation_test(gaps) == permutation_test(1e-6 * gaps) == permutation_test(-gaps)
    assert permutation_test(np.zeros(5)) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_holm_is_its_definition(p: list[float]) -> None:
    order = sorted(range(len(p)), key=lambda i: p[i])
    expected, running = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        expected[i] = running
    assert holm(p) == pytest.approx(expected)


def test_null_comparisons_reject_at_their_level() -> None:
    """The same two conditions in 1,000 seeds: 5 % of tests reject, and after Holm 5 % of families of four."""
    rng, runs = np.random.default_rng(0), 1000
    single = family = 0
    for run in range(runs):
        p = [permutation_test(rng.normal(size=60), n_perm=199, seed=run) for _ in range(4)]
        single += sum(value <= 0.05 for value in p)
        family += min(holm(p)) <= 0.05
    assert single / (4 * runs) == pytest.approx(0.05, abs=0.012)
    assert family / runs <= 0.065


def test_identical_conditions_give_no_difference_at_all() -> None:
    table = differences(records(0.0), "random", n_boot=50, n_perm=50).iloc[0]
    assert (table["value"], table["low"], table["high"], table["p"]) == (0.0, 0.0, 0.0, 1.0)


def test_a_planted_gain_is_found_with_its_size_and_its_flips() -> None:
    table = records(0.4)
    wide = paired(table)
    gain = (wide["dart"] - wide["random"]).sum()
    row = differences(table, "random").iloc[0]
    assert row["value"] == pytest.approx(gain / len(wide)) and row["low"] > 0 and row["p_holm"] < 0.01
    same = agreement(table, "random").iloc[0]
    assert (same["gained"], same["lost"]) == (gain, 0) and same["agreement"] == pytest.approx(1 - gain / len(wide))
    changed = flips(table, "random")
    assert len(changed) == gain and (changed["after"] > changed["before"]).all()


def test_pairing_is_by_sample_whatever_the_order_and_drops_what_one_side_lacks() -> None:
    table = records(0.4)
    shuffled = table.sample(frac=1, random_state=0)
    assert paired(shuffled)[["random", "dart"]].sort_index().equals(paired(table)[["random", "dart"]])
    assert len(paired(table.drop(index=[0, 85]))) == 78


def test_errors_say_what_is_wrong() -> None:
    table = records()
    with pytest.raises(DartLabError, match="stands twice"):
        paired(pd.concat([table, table.iloc[:1]]))
    with pytest.raises(DartLabError, match="nothing can be paired"):
        paired(table[(table["condition"] == "dart") | (table["sample"] < 0)].assign(correct=np.nan))
    with pytest.raises(DartLabError, match="Did you mean 'random'"):
        differences(table, "randon")
    with pytest.raises(DartLabError, match="no condition beside"):
        differences(table[table["condition"] == "random"], "random")
    with pytest.raises(DartLabError, match="from 0 to 1"):
        holm([1.2])


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_intervals_cover_what_they_promise(method: str) -> None:
    """Accuracies of 0.8 over 120 pictures with two questions each: 95 % intervals hold it 93 to 97 times in 100."""
    rng, runs, images = np.random.default_rng(11), 1500, 120
    held = 0
    for run in range(runs):
        skill = rng.beta(8, 2, size=images)  # questions on one picture are alike
        right = (rng.random((images, 2)) < skill[:, None]).astype(float)
        rows = np.column_stack([right.ravel(), np.ones(2 * images)])
        table = bootstrap_sums(rows, np.repeat(np.arange(images), 2), lambda s: s[..., :1] / s[..., 1:],
                               n_boot=400, seed=run, method=method).iloc[0]  # fmt: skip
        held += table["low"] <= 0.8 <= table["high"]
    assert 0.93 <= held / runs <= 0.97


def test_bca_agrees_with_scipys() -> None:
    values = np.random.default_rng(0).gamma(1.0, size=60)
    rows = np.column_stack([values, np.ones(60)])
    ours = bootstrap_sums(rows, None, lambda s: s[..., :1] / s[..., 1:], n_boot=20000, method="bca").iloc[0]
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=20000, method="BCa", rng=1).confidence_interval
    assert (ours["low"], ours["high"]) == pytest.approx((theirs.low, theirs.high), abs=0.01)

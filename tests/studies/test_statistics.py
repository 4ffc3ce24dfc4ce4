"""Intervals cover what they promise, and each measure agrees with scipy or a count by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dart_lab.errors import DartLabError
from dart_lab.studies.statistics import bootstrap_by_image, correlation, gini, jackknife, kl_from_uniform

shares = arrays(np.float64, st.integers(1, 30), elements=st.floats(0, 100)).filter(lambda x: x.sum() > 1e-3)


def test_the_bootstrap_agrees_with_scipys() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=80)
    ours = bootstrap_by_image(values, n_boot=20000, seed=1).iloc[0]
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=20000, method="percentile", random_state=2)
    assert ours["mean"] == pytest.approx(values.mean())
    assert ours["low"] == pytest.approx(theirs.confidence_interval.low, abs=0.01)
    assert ours["high"] == pytest.approx(theirs.confidence_interval.high, abs=0.01)


def test_questions_on_one_picture_are_resampled_together() -> None:
    """Ten copies of each value as rows of one image give the interval of the values themselves."""
    values = np.random.default_rng(0).normal(size=30)
    once = bootstrap_by_image(values, seed=4)
    copied = bootstrap_by_image(np.repeat(values, 10), np.repeat(np.arange(30), 10), seed=4)
    assert np.allclose(once[["mean", "low", "high"]], copied[["mean", "low", "high"]])
    assert copied.iloc[0]["n"] == 300 and copied.iloc[0]["images"] == 30


def test_images_with_more_questions_weigh_more() -> None:
    table = bootstrap_by_image([0.0, 1.0, 1.0, 1.0], ["a", "b", "b", "b"])
    assert table.iloc[0]["mean"] == 0.75


def test_coverage_by_image_is_kept_where_rows_of_an_image_agree() -> None:
    rng, runs, images, rows = np.random.default_rng(7), 200, 40, 5
    by_image = by_row = 0
    for run in range(runs):
        values = (rng.normal(size=(images, 1)) + 0.3 * rng.normal(size=(images, rows))).ravel()
        ids = np.repeat(np.arange(images), rows)
        right = bootstrap_by_image(values, ids, n_boot=200, seed=run).iloc[0]
        wrong = bootstrap_by_image(values, n_boot=200, seed=run).iloc[0]
        by_image += right["low"] <= 0 <= right["high"]
        by_row += wrong["low"] <= 0 <= wrong["high"]
    assert 0.89 <= by_image / runs <= 0.985
    assert by_row / runs < 0.75, "rows of one image are not independent: the naive interval is too short"


def test_same_seed_same_interval_and_columns_keep_their_names() -> None:
    table = pd.DataFrame({"a": [1.0, 2.0, 5.0], "b": [0.0, 1.0, 0.0]})
    first, second = bootstrap_by_image(table, seed=5), bootstrap_by_image(table, seed=5)
    assert first.equals(second) and list(first.index) == ["a", "b"]
    assert not bootstrap_by_image(table, seed=6, n_boot=50).equals(bootstrap_by_image(table, seed=5, n_boot=50))


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=50)
    without = (values.sum() - values) / 49
    row = jackknife(values.mean(), without, level=0.95).iloc[0]
    reach = scipy.stats.norm.ppf(0.975) * values.std(ddof=1) / np.sqrt(50)
    assert row["low"] == pytest.approx(values.mean() - reach) and row["high"] == pytest.approx(values.mean() + reach)


def test_the_jackknife_covers_a_ratio_of_means() -> None:
    rng, runs, hits = np.random.default_rng(3), 400, 0
    for _ in range(runs):
        x, y = rng.gamma(4.0, size=60), rng.gamma(8.0, size=60)
        row = jackknife(x.mean() / y.mean(), (x.sum() - x) / (y.sum() - y)).iloc[0]
        hits += row["low"] <= 0.5 <= row["high"]
    assert 0.91 <= hits / runs <= 0.985


@settings(deadline=None)
@given(shares)
def test_gini_is_half_the_relative_mean_difference(x: np.ndarray) -> None:
    differences = np.abs(x[:, None] - x[None]).mean()
    assert gini(x) == pytest.approx(differences / (2 * x.mean()), abs=1e-9)


@settings(deadline=None)
@given(shares)
def test_kl_agrees_with_scipy(x: np.ndarray) -> None:
    expected = scipy.stats.entropy(x, np.ones_like(x))
    assert kl_from_uniform(x) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(shares, st.floats(0.1, 10), st.randoms())
def test_unevenness_ignores_scale_and_order(x: np.ndarray, scale: float, random) -> None:
    mixed = np.array(random.sample(x.tolist(), len(x))) * scale
    assert gini(mixed) == pytest.approx(float(gini(x)), abs=1e-9)
    assert kl_from_uniform(mixed) == pytest.approx(float(kl_from_uniform(x)), abs=1e-9)


def test_known_values_of_kl_and_gini() -> None:
    half = np.repeat([0.0, 2.0], 288)
    assert kl_from_uniform(half) == pytest.approx(np.log(2)) and gini(half) == pytest.approx(0.5)
    one = np.eye(576)[0]
    assert kl_from_uniform(one) == pytest.approx(np.log(576)) and gini(one) == pytest.approx(1 - 1 / 576)


def test_correlation_agrees_with_numpy_row_by_row() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 30)), rng.normal(size=(4, 30))
    expected = [np.corrcoef(x, y)[0, 1] for x, y in zip(a, b, strict=True)]
    assert np.allclose(correlation(a, b), expected)
    assert correlation(np.full(576, 1 / 3), rng.normal(size=576)) == 0.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bootstrap_by_image([]), "at least one row"),
        (lambda: bootstrap_by_image([1.0, np.nan]), "NaN"),
        (lambda: bootstrap_by_image([1.0, 2.0], ["a"]), "2 rows but 1 image ids"),
        (lambda: bootstrap_by_image([1.0], n_boot=0), "n_boot=0"),
        (lambda: bootstrap_by_image([1.0], level=95), "level=95"),
        (lambda: jackknife(1.0, [1.0]), "two images at least"),
        (lambda: gini([0.0, 0.0]), "not all 0"),
        (lambda: kl_from_uniform([-1.0, 2.0]), "at least 0"),
    ],
)
def test_mistakes_are_named(call, says: str) -> None:
    with pytest.raises(DartLabError) as error:
        call()
    assert says in str(error.value)

"""The method table on planted answers, its picture from its records, and a whole run on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dart_lab.analysis.method_table import FIGURE, blind_records, compute, lines, measure
from dart_lab.displays.figure import FigureOptions, run_figure
from dart_lab.errors import DartLabError
from dart_lab.studies.answering import answer_all
from dart_lab.tasks import Sample, load_task
from tests.models import tiny_llava

KEPT = {"unpruned": 576, "none kept": 0, "random@64": 64, "good@64": 64, "bad@64": 64}


def planted(n: int = 60) -> pd.DataFrame:
    """`bad` is wrong on every third question that Random gets right, `good` right where Random is wrong."""
    number = np.arange(n)
    random = number % 2 == 0
    right = {
        "unpruned": np.ones(n, bool), "none kept": number % 10 == 0, "random@64": random,
        "good@64": random | (number % 3 == 0), "bad@64": random & (number % 3 != 0),
    }  # fmt: skip
    parts = [
        pd.DataFrame(
            {
                "condition": name, "sample": number, "image_id": number // 2, "correct": right[name].astype(float),
                "family": np.where(number % 2, "odd", "even"), "asked": kept, "got": kept,
                "processed": float(kept), "output": float(kept),
            }
        )
        for name, kept in KEPT.items()
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def test_planted_differences_come_out_and_only_the_bad_one_is_below_random() -> None:
    rows = {row["condition"]: row for row in measure(planted())["rows"]}
    assert rows["good@64"]["accuracy"]["all"]["value"] == pytest.approx(40 / 60)
    assert rows["good@64"]["accuracy"]["odd"]["value"] == pytest.approx(10 / 30)
    assert rows["good@64"]["minus_random"]["value"] == pytest.approx(10 / 60)
    assert rows["bad@64"]["minus_random"]["value"] == pytest.approx(-10 / 60)
    assert {name for name, row in rows.items() if row.get("below_random")} == {"bad@64"}
    assert "minus_random" not in rows["random@64"] and "minus_random" not in rows["unpruned"]
    assert rows["good@64"]["above_none"] and "above_none" not in rows["none kept"]


def test_a_method_no_better_than_nothing_is_named() -> None:
    table = planted()
    nothing = table["condition"] == "none kept"
    table.loc[table["condition"] == "bad@64", "correct"] = table.loc[nothing, "correct"].to_numpy()
    facts = {**measure(table), "refused": {"tome@64": "too deep"}}
    text = lines(facts)
    assert [line for line in text if "not above none kept" in line and line.startswith("| bad | 64")]
    assert "tome@64: too deep" in text and text[-2].endswith("bad@64")


def test_what_holm_takes_back_is_said() -> None:
    """One row below Random among many that do not differ: the interval alone marks it, the correction does not."""
    table = planted(40)
    random = table[table["condition"] == "random@64"]
    same = [random.assign(condition=f"same{i}@64") for i in range(40)]
    facts = {**measure(pd.concat([table, *same], ignore_index=True)), "refused": {}}
    bad = next(row for row in facts["rows"] if row["condition"] == "bad@64")
    assert bad["below_random"] and not bad["below_random_holm"]
    assert bad["minus_random"]["p_holm"] == pytest.approx(min(1, 42 * bad["minus_random"]["p"]))
    text = lines(facts)
    assert any("not after Holm" in line for line in text if line.startswith("| bad"))
    assert text[-1] == "of these after Holm's correction over 42 comparisons: none"


def test_the_blind_floor_never_learns_from_its_own_pictures() -> None:
    def sample(question: str, answer: str, image: str) -> Sample:
        return Sample(id=f"{image}{question}", image=None, question=question, answer=answer, family="f", image_id=image)  # type: ignore[arg-type]

    asked = [sample("a?", "no", "1"), sample("b?", "no", "1"), sample("c?", "x", "2")]
    learnt = [
        *asked,
        sample("a?", "yes", "3"),
        sample("a?", "no", "4"),
        sample("a?", "yes", "5"),
        sample("z?", "no", "6"),
    ]
    records = blind_records(asked, learnt)
    assert records["prediction"].tolist() == ["yes", "no", "no"]  # by question; by family, the alphabet on a tie
    assert records["correct"].tolist() == [0.0, 1.0, 0.0]


def test_a_task_that_teaches_its_own_floor_leaves_the_picture_out() -> None:
    samples = list(load_task("shapes", n=42, seed=3))
    records = blind_records(samples, samples).set_index("sample")
    for sample in samples:
        others = [one for one in samples if one.image_id != sample.image_id]
        seen = [one.answer for one in others if one.question == sample.question] or [
            one.answer for one in others if one.family == sample.family
        ]
        assert records.loc[sample.id, "prediction"] == max(sorted(set(seen)), key=seen.count)


def test_a_small_model_from_nothing_to_the_picture_and_again_from_its_records(tmp_path: Path) -> None:
    folder = tiny_llava(tmp_path / "model", grid=4, layers=6, vision_layers=4)
    options = FigureOptions(
        model=str(folder), methods=("fastv", "tome", "vla-pruner", "pyramiddrop"), keep=(6, 3), n=6,
        out=tmp_path / "out", batch_size=3,
    )  # fmt: skip
    said: list[str] = []
    paths = run_figure("method-table", options, echo=said.append)
    again = run_figure("method-table", FigureOptions(out=tmp_path / "again"), from_file=paths[0], echo=lambda _: None)
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(paths, again, strict=True)] == [True] * 4
    table = pd.read_parquet(paths[0])
    counts = table.groupby("condition")[["asked", "got"]].max()
    assert counts.loc["fastv@6"].tolist() == [6, 6] and counts.loc["tome@3"].tolist() == [3, 3]
    assert counts.loc["unpruned", "got"] == 16 and counts.loc["none kept", "got"] == 0
    assert len(table) == 6 * (3 + 2 * (4 + 1))  # floors and unpruned; random, three methods and coarse pictures
    assert any("vla-pruner@6" in line and "history" in line.lower() for line in said)
    facts = json.loads(paths[1].read_text(encoding="utf-8"))
    notes = "".join(text.get_text() for text in FIGURE.draw(table, facts).texts)
    assert "Not run (the facts say why): vla-pruner." in notes
    pyramid = table[table["condition"] == "pyramiddrop@6"].iloc[0]
    assert pyramid["processed"] == pytest.approx((2 * 16 + 4 * 6) / 6, abs=1)


def test_records_hold_what_each_layer_processed() -> None:
    import dart_lab as dl
    from dart_lab.pruners import DART, FasterVLM

    vlm, task = dl.load("tiny"), load_task("shapes", n=2, seed=1)
    records = answer_all(vlm, task, {"all": None, "dart": DART(keep=64, layer=2), "front": FasterVLM(keep=64)})
    means = records.set_index("condition")[["visual", "got", "processed", "output"]].groupby(level=0).mean()
    assert means.loc["all"].tolist() == [576, 576, 576, 576]
    assert means.loc["dart"].tolist() == [576, 64, (2 * 576 + 6 * 64) / 8, (576 + 7 * 64) / 8]
    assert means.loc["front"].tolist() == [576, 64, 64, 64]
    alone = [vlm.ask([sample.image], [sample.question])[0] for sample in task]
    assert records.query("condition == 'all'")["prediction"].tolist() == alone


@pytest.mark.parametrize(("options", "words"), [({"keep": (0.5,)}, "whole numbers"), ({"n": 1}, "two questions")])
def test_options_at_fault(options: dict[str, object], words: str) -> None:
    with pytest.raises(DartLabError, match=words):
        compute(FigureOptions(**options), False)  # type: ignore[arg-type]


def test_the_figure_says_what_it_lacks() -> None:
    with pytest.raises(DartLabError, match="make the figure again"):
        FIGURE.draw(pd.DataFrame(), {"rows": []})

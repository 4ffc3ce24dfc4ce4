"""A folder of pictures as a task: what is read, and what is said when it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from dart_lab.errors import DartLabError
from dart_lab.tasks import load_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, color in (("red.png", (255, 0, 0)), ("grey.png", (90, 90, 90))):
        Image.new("RGB", (20, 10), color).save(tmp_path / name)
    return tmp_path


def test_csv_and_jsonl_give_the_same_samples(folder: Path) -> None:
    rows = [
        {
            "image": "red.png",
            "question": "what color, exactly?",
            "answer": "red",
            "family": "color",
            "choices": "red|blue",
        },
        {"image": "grey.png", "question": "is it red?", "answer": "", "family": "", "choices": ""},
    ]
    quoted = [",".join(f'"{value}"' for value in row.values()) for row in rows]
    (folder / "questions.csv").write_text("\n".join([",".join(rows[0]), *quoted]))
    from_csv = list(load_task(folder))
    (folder / "questions.csv").unlink()
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    from_jsonl = list(load_task(str(folder)))
    for samples in (from_csv, from_jsonl):
        assert [s.question for s in samples] == ["what color, exactly?", "is it red?"]
        assert [s.answer for s in samples] == ["red", ""]
        assert samples[0].choices == ("red", "blue")
        assert samples[0].image.getpixel((3, 3)) == (255, 0, 0)
        assert samples[1].family == "question"
        assert samples[0].foreground is None


def test_a_choice_of_samples_is_fixed_by_the_seed(folder: Path) -> None:
    lines = ["image,question"] + [f"red.png,question {i}?" for i in range(30)]
    (folder / "questions.csv").write_text("\n".join(lines))
    first = [s.question for s in load_task(folder, n=5, seed=1)]
    assert first == [s.question for s in load_task(folder, n=5, seed=1)]
    assert first != [s.question for s in load_task(folder, n=5, seed=2)]
    assert len(set(first)) == 5


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ("image,question\nredd.png,what?", "'red.png'"),
        ("image,question\nred.png, ", "question is empty"),
        ("imag,question\nred.png,what?", "no column 'image'"),
        ("image,question,anwser\nred.png,what?,x", "'answer'"),
        ("image,question", "has no questions"),
    ],
)
def test_a_wrong_table_is_one_helpful_line(folder: Path, table: str, part: str) -> None:
    (folder / "questions.csv").write_text(table)
    with pytest.raises(DartLabError) as caught:
        load_task(folder)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_table_a_broken_line_a_broken_picture_and_too_large_an_n(folder: Path) -> None:
    with pytest.raises(DartLabError, match=r"neither questions\.csv nor questions\.jsonl"):
        load_task(folder)
    (folder / "questions.jsonl").write_text('{"image": "red.png", "question": "what?"}\nnot json')
    with pytest.raises(DartLabError, match="line 2: not JSON"):
        load_task(folder)
    (folder / "broken.png").write_bytes((folder / "red.png").read_bytes()[:40])
    (folder / "questions.jsonl").write_text('{"image": "broken.png", "question": "what?"}')
    with pytest.raises(DartLabError, match="n is 2"):
        load_task(folder, n=2)
    task = load_task(folder)
    with pytest.raises(DartLabError, match="cannot be read as a picture"):
        task[0]
    with pytest.raises(DartLabError, match="not a folder"):
        load_task(folder / "nowhere")


def test_a_task_is_a_sequence(folder: Path) -> None:
    (folder / "questions.csv").write_text("image,question\nred.png,a?\ngrey.png,b?")
    task = load_task(folder)
    assert len(task) == 2
    assert [s.id for s in task] == [s.id for s in task]
    assert task[-1].question == "b?"
    assert [s.question for s in task[:1]] == ["a?"]
    with pytest.raises(IndexError):
        task[2]

"""Training batches: what patches show is derived anew from the pixels, and answers lie where the spans say."""

from __future__ import annotations

import numpy as np
import torch

from dart_lab.tasks import questions, scene
from dart_lab.tiny import data, words

SHARES = (1.0,) * 7


def batch(grid: int = 16, images: int = 6) -> data.Batch:
    rng = np.random.Generator(np.random.PCG64(11))
    return data.make_batch(rng, grid=grid, images=images, questions_each=10, shares=SHARES)


def test_centers_share_their_weight_among_neighbours() -> None:
    drawn = scene.compose(np.random.Generator(np.random.PCG64(2)))
    weights = data.center_weights(drawn)
    assert np.allclose(weights.sum(axis=1), 1)
    rows, columns = np.divmod(np.arange(576), 24)
    for thing, weight in zip(drawn.things, weights, strict=True):  # the weighted mean of the patches is the center
        assert np.isclose((weight * (columns + 0.5)).sum() * 14, thing.x, atol=1e-3)
        assert np.isclose((weight * (rows + 0.5)).sum() * 14, thing.y, atol=1e-3)


def test_covering_is_the_brute_force_majority() -> None:
    drawn = scene.compose(np.random.Generator(np.random.PCG64(3)), 12 * 14)
    found = data.covering(drawn).reshape(12, 12)
    for row in range(12):
        for column in range(12):
            tile = drawn.index[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
            areas = {int(k): int((tile == k).sum()) for k in np.unique(tile) if k > 0}
            best = max(areas, key=lambda k: (areas[k], -k)) if areas else 0
            assert found[row, column] == (best if areas and areas[best] >= 0.15 * 196 else 0)


def test_patch_colors_are_the_colors_of_the_pixels() -> None:
    made = batch()
    for i in range(len(made.origin)):
        tiles = made.pixels[i].view(3, 16, 14, 16, 14).permute(1, 3, 2, 4, 0).reshape(256, 196, 3)
        for patch in torch.nonzero(made.patches.color[i] != data.NONE).flatten().tolist():
            color = scene.COLORS[int(made.patches.color[i, patch]) - 1]
            wanted = torch.tensor(questions_color(color)) / 127.5 - 1
            assert ((tiles[patch] - wanted).abs().amax(dim=1) < 0.14).float().mean() >= 0.14


def questions_color(name: str) -> tuple[int, int, int]:
    from dart_lab.tasks import drawing

    return drawing.COLORS[name]


def test_spans_hold_the_answers_and_targets_are_the_next_tokens() -> None:
    made = batch()
    for i, spans in enumerate(made.answers):
        ids, segment = made.text.ids[i], made.text.segment[i]
        assert len({int(s) for s in segment if s >= 0}) == len(spans)
        for number, (family, end, length) in enumerate(spans):
            answer = words.decode(made.target[i, end : end + length].tolist())
            assert int(made.target[i, end + length - 1]) == words.IDS[words.EOS]
            question = words.decode(ids[segment == number].tolist())
            assert f"? {' '.join(words.SUFFIX)}" in question
            choices = {
                "exist": ("yes", "no"), "relation": ("yes", "no"), "count": tuple("1234"),
                "ground": questions.CELL_NAMES, "text": questions.NUMBERS,
            }.get(questions.FAMILIES[family])  # fmt: skip
            assert choices is None or answer in choices
            inside = segment == number
            assert made.text.place[i][inside].tolist() == list(range(int(inside.sum())))
            assert (made.family[i, end : end + length] == family).all()


def test_nouns_and_counts_are_where_the_batch_says() -> None:
    made = batch()
    nouns = {*scene.COLORS, *questions.PLURALS.values()}
    for (i, position), target in zip(made.count_at.tolist(), made.count_target, strict=True):
        assert words.VOCABULARY[int(made.text.ids[i, position])] in nouns
        assert words.VOCABULARY[int(made.text.ids[i, position + 1])] == "?"
        span = next(s for s in made.answers[i] if s[1] == position + 1 + len(words.SUFFIX))
        assert int(words.decode([int(made.target[i, span[1]])])) == round(float(target.sum()))
    for (i, position), (column, row) in zip(made.referent_at.tolist(), made.referent_strip.tolist(), strict=True):
        shape = scene.SHAPES.index(words.VOCABULARY[int(made.text.ids[i, position])]) + 1
        color = scene.COLORS.index(words.VOCABULARY[int(made.text.ids[i, position - 1])]) + 1
        match = (made.patches.shape[i] == shape) & (made.patches.color[i] == color)
        assert match.any()  # its object is in the picture, in the cell that holds the strip
        assert {int(c) for c in made.patches.column[i][match]} == {column // 2}
        assert {int(r) for r in made.patches.row[i][match]} == {row // 2}


def test_the_same_state_gives_the_same_batch() -> None:
    first, second = batch(), batch()
    assert torch.equal(first.pixels, second.pixels)
    assert torch.equal(first.text.ids, second.text.ids)

"""A planted model on which every role and share must come out exactly; and what a rolebook refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dart_lab as dl
from dart_lab.displays.rolebook import draw_evidence
from dart_lab.displays.style import png_bytes
from dart_lab.errors import DartLabError
from dart_lab.roles.fit import fit_rolebook
from dart_lab.roles.labels import ROLES, TokenRoles, agreement
from dart_lab.roles.pool import Pool, open_pool
from dart_lab.roles.rolebook import Rolebook, load_rolebook
from dart_lab.roles.rules import EMBEDLENS_2026, RULES
from dart_lab.roles.stability import book_agreement
from tests.roles.planted import (
    BOTH,
    CHANNEL,
    HOW,
    LLM,
    PLANS,
    SIGN,
    SIZE,
    SPIKE,
    TOKENS,
    WIDTH,
    Plan,
    fitted,
    inputs_of,
    planted_pool,
    planted_vlm,
    truth,
)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return planted_vlm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def book(vlm: Any, tmp_path_factory: pytest.TempPathFactory) -> Rolebook:
    return fitted(vlm, PLANS["everything planted"], tmp_path_factory.mktemp("book") / "book")


@pytest.mark.parametrize("name", PLANS)
def test_planted_roles_come_out_exactly(vlm: Any, tmp_path: Path, name: str) -> None:
    plan = PLANS[name]
    found = fitted(vlm, plan, tmp_path / "book")
    for role in ROLES:
        cell = found.prevalence[role]
        assert cell["value"] == pytest.approx(plan.share(role), abs=1e-12), role
        assert cell["low"] == pytest.approx(cell["high"], abs=1e-12)  # every picture has the same share
    assert found.channels == (CHANNEL,)
    new, codes = planted_pool(plan, 5, seed=1)
    assigned = found.assign(vlm, inputs_of(vlm, [new[number] for number in range(5)]))
    for roles, own in zip(assigned, codes, strict=True):
        for role in ROLES:
            assert np.array_equal(roles[role], truth(own, role)), role
    assert not list(tmp_path.glob("*.work"))


def test_centring_shows_what_a_common_direction_hides(vlm: Any, tmp_path: Path) -> None:
    """With one large vector added to every token all of them look alike; less their mean they do not."""
    plan, projector = PLANS["one token a group"], dl.vlm.compat.projector(vlm.model)
    common = 40 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    common[[CHANNEL, SIGN]] = 0.0
    handle = projector.register_forward_hook(lambda module, args, output: output + common)
    pool, codes = planted_pool(plan, SIZE)
    try:
        plain = fit_rolebook(vlm, pool, tmp_path / "plain", how=HOW)
        book = fit_rolebook(vlm, pool, tmp_path / "book", how=dataclasses.replace(HOW, centred=True))
        book = load_rolebook(tmp_path / "book", vlm)
        roles = book.assign(vlm, inputs_of(vlm, [pool[0]]))[0]
    finally:
        handle.remove()
    assert plain.prevalence["alive"]["value"] == 0 and "Fit.centred" in plain.evidence["why"]["dead"]
    assert book.prevalence["dead"]["value"] == pytest.approx(plan.share("dead"), abs=1e-12)
    assert np.array_equal(roles["dead"], truth(codes[0], "dead"))


def test_a_projector_that_loads_the_channel_of_every_token_makes_no_sinks(vlm: Any, tmp_path: Path) -> None:
    """Most tokens hold more than the cut on the sink channel, though none of them spikes; planted sinks are found."""
    projector = dl.vlm.compat.projector(vlm.model)

    def load(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., CHANNEL] = 20.0
        return output

    found = {}
    handle = projector.register_forward_hook(load)
    try:
        for name in ("none planted", "sinks of both kinds", "one LLM sink"):
            found[name] = fitted(vlm, PLANS[name], tmp_path / name)
    finally:
        handle.remove()
    for name, book in found.items():
        assert "pictures' median token holds" in book.evidence["why"]["llm-sink"] and HOW.energy < book.energy < 1
        assert book.prevalence["llm-sink"]["value"] == pytest.approx(PLANS[name].share("llm-sink"), abs=1e-12), name


def test_overlapping_roles_keep_all_their_flags(vlm: Any, tmp_path: Path) -> None:
    plan = PLANS["roles that overlap"]
    new, codes = planted_pool(plan, 1, seed=2)
    roles = fitted(vlm, plan, tmp_path / "book").assign(vlm, inputs_of(vlm, [new[0]]))[0]
    assert np.array_equal(roles.flags["llm-sink"], np.isin(codes[0], (LLM, BOTH)))
    assert roles.flags["vit-sink"][codes[0] == BOTH].all() and roles["vit-sink"][codes[0] == BOTH].all()


def test_every_rule_runs_and_the_vocabulary_rule_finds_the_planted_words(vlm: Any, book: Rolebook) -> None:
    new, codes = planted_pool(PLANS["everything planted"], 2, seed=4)
    inputs = inputs_of(vlm, [new[0], new[1]])
    labels = {}
    for role, rules in RULES.items():
        for rule in rules:
            found = book.assign(vlm, inputs, definition={role: rule})
            labels[f"{role} {rule}"] = np.concatenate([roles.primary for roles in found])
            if rule == "none":
                assert not any(roles.flags[role].any() for roles in found)
            if rule == "centroid":
                assert all(np.array_equal(r.flags[role], truth(c, role)) for r, c in zip(found, codes, strict=True))
    table = agreement(labels)
    assert len(table) == len(labels) * (len(labels) - 1) // 2
    assert table.query("a == 'vit-sink norm-auto' and b == 'llm-sink energy'")["kappa"].item() == 1.0
    lens = book.assign(vlm, inputs, definition=EMBEDLENS_2026)
    assert all(roles.flags["dead"][truth(own, "dead")].all() for roles, own in zip(lens, codes, strict=True))
    guessed = book.assign(vlm, inputs, when="input")
    assert all(np.array_equal(r["llm-sink"], truth(c, "llm-sink")) for r, c in zip(guessed, codes, strict=True))


def test_a_stopped_fit_goes_on_to_the_same_bytes(vlm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = planted_pool(PLANS["everything planted"], 200)
    small = dataclasses.replace(HOW, stored=400)
    fit_rolebook(vlm, pool, tmp_path / "whole", how=small)
    asked: list[int] = []

    def stops(number: int) -> Any:
        asked.append(number)
        if len(asked) > 130:
            raise KeyboardInterrupt
        return pool.make(number)

    with pytest.raises(KeyboardInterrupt):
        fit_rolebook(vlm, dataclasses.replace(pool, make=stops), tmp_path / "cut", how=small)
    assert not (tmp_path / "cut").exists() and len(list((tmp_path / "cut.work").glob("block-*"))) == 1
    with pytest.raises(DartLabError, match="another model, pool or setting"):
        fit_rolebook(vlm, pool, tmp_path / "cut", how=HOW)
    fit_rolebook(vlm, pool, tmp_path / "cut", how=small)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_the_order_of_the_pictures_does_not_matter_to_shares(vlm: Any, tmp_path: Path, book: Rolebook) -> None:
    pool, _ = planted_pool(PLANS["everything planted"], SIZE)
    turned = dataclasses.replace(pool, make=lambda number: pool.make(SIZE - 1 - number))
    assert fit_rolebook(vlm, turned, tmp_path / "b", how=HOW).prevalence == book.prevalence


def test_a_book_comes_back_and_refuses_other_models(vlm: Any, book: Rolebook, tmp_path: Path) -> None:
    path = book.save(tmp_path / "book")
    again = load_rolebook(path, vlm)
    assert again.facts() == book.facts() and json.dumps(again.facts())
    assert all(torch.equal(again.centroids[role], book.centroids[role]) for role in book.centroids)
    weight = vlm.model.get_input_embeddings().weight
    kept = weight[3, 0].item()
    with torch.no_grad():
        weight[3, 0] = kept + 1
    with pytest.raises(DartLabError, match="other weights"):
        load_rolebook(path, vlm)
    with torch.no_grad():
        weight[3, 0] = kept
    before = vlm.processor.image_processor.image_mean
    vlm.processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    with pytest.raises(DartLabError, match="image_mean"):
        load_rolebook(path, vlm)
    vlm.processor.image_processor.image_mean = before
    (tmp_path / "text").write_text("no book")
    with pytest.raises(DartLabError, match="no rolebook"):
        load_rolebook(tmp_path / "text")
    with pytest.raises(DartLabError, match="no such file"):
        load_rolebook(tmp_path / "missing")


def test_bad_pictures_are_named_and_left_out(vlm: Any, tmp_path: Path) -> None:
    pool, _ = planted_pool(Plan(dead_a=9), SIZE)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(SIZE):
        pool[number].save(folder / f"{number:03}.png")
    (folder / "broken.png").write_bytes(b"no picture")
    found = fit_rolebook(vlm, open_pool(folder, n=None, seed=0), tmp_path / "book", how=HOW)
    assert found.pool["pictures"] == SIZE and len(found.pool["skipped"]) == 1
    assert found.prevalence["dead"]["value"] == pytest.approx(9 / TOKENS)
    assert any("left out: 1" in line for line in found.lines())
    (tmp_path / "empty").mkdir()
    cases = ((tmp_path / "empty", None, "2 or more"), ("shapess", None, "neither"), ("shapes", 1, "n=1"))
    for images, n, message in cases:
        with pytest.raises(DartLabError, match=message):
            open_pool(images, n=n, seed=0)


def test_unknown_names_get_one_line(vlm: Any, book: Rolebook) -> None:
    inputs = inputs_of(vlm, [planted_pool(Plan(), 1)[0][0]])
    with pytest.raises(DartLabError, match="Did you mean 'centroid'"):
        book.assign(vlm, inputs, definition={"dead": "centroids"})
    with pytest.raises(DartLabError, match="unknown role"):
        book.assign(vlm, inputs, definition={"living": "centroid"})
    with pytest.raises(DartLabError, match="unknown role"):
        book.assign(vlm, inputs)[0]["zombie"]
    with pytest.raises(DartLabError, match="in this order"):
        TokenRoles(flags={"dead": np.zeros(3, bool)})
    with pytest.raises(DartLabError, match="two definitions"):
        agreement({"one": np.zeros(3, np.int64)})


def test_a_model_with_merged_patches_has_no_norms_to_tell(vlm: Any, book: Rolebook) -> None:
    states = dl.vlm.states.visual_states(vlm, inputs_of(vlm, [planted_pool(Plan(), 1)[0][0]]), book.layers)[0]
    merged = dataclasses.replace(states, vision=None)
    assert not book.roles_of(merged).flags["vit-sink"].any()
    with pytest.raises(DartLabError, match="merges patches"):
        book.roles_of(merged, definition={"vit-sink": "norm-top"})


def test_an_empty_pool_is_an_error(vlm: Any, tmp_path: Path) -> None:
    def broken(number: int) -> Any:
        raise DartLabError(f"picture {number} is broken")

    with pytest.raises(DartLabError, match="only 0 pictures"):
        fit_rolebook(vlm, Pool("broken", 4, broken, {}), tmp_path / "book", how=HOW)


def test_books_of_other_pools_agree_on_planted_roles(vlm: Any, book: Rolebook, tmp_path: Path) -> None:
    plan = PLANS["everything planted"]
    other = fit_rolebook(vlm, planted_pool(plan, SIZE, seed=9)[0], tmp_path / "other", how=HOW, seed=3)
    blind = dataclasses.replace(book, dead_cosine=None)
    pool, codes = planted_pool(plan, 4, seed=5)
    table = book_agreement(vlm, {"book": book, "other": other, "blind": blind}, pool)
    found = table.set_index(["a", "b", "role"]).sort_index()
    assert found.loc[("book", "other"), "kappa"].dropna().eq(1).all()  # NaN: no token is alive in this plan
    assert found.loc[("book", "blind", "dead"), "kappa"] == 0  # one calls none so
    assert found.loc[("book", "other", "dead"), "a share"] == np.mean([truth(own, "dead").mean() for own in codes])
    with pytest.raises(DartLabError, match="two at least"):
        book_agreement(vlm, {"book": book}, pool)


def test_the_evidence_is_drawn(book: Rolebook) -> None:
    figure = draw_evidence(book.facts())
    norms, similar, spikes = figure.axes
    assert norms.lines[0].get_xdata()[0] == pytest.approx(np.log(book.vit_cut))
    assert similar.lines[0].get_xdata()[0] == book.dead_cut
    assert spikes.get_title() == f"Channel {CHANNEL} on text alone" and max(spikes.lines[0].get_ydata()) == SPIKE
    assert png_bytes(figure) == png_bytes(draw_evidence(book.facts()))

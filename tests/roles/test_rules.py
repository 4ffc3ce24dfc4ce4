"""Definitions other than the fit's own, on a model whose roles are planted; how far they agree; what they refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.roles.clusters import dense_clusters
from dart_lab.roles.dead_rules import Faint, LeaveOneOut, Unchanged
from dart_lab.roles.fit import Fit, fit_rolebook
from dart_lab.roles.llm_rules import Energy, LikeFirst, Loud
from dart_lab.roles.rolebook import Rolebook, load_rolebook
from dart_lab.roles.rule import Lens
from dart_lab.roles.rule_agreement import rule_agreement
from dart_lab.roles.rules import RULES, check_definition, parse_definition
from dart_lab.roles.vit_rules import ColumnSums, Norm, NormSpread, NormTop, VisionChannels
from dart_lab.vlm import compat
from dart_lab.vlm.states import visual_states
from tests.roles.planted import (
    BOTH,
    CHANNEL,
    DEAD_A,
    DEAD_B,
    LLM,
    NORM,
    VIT,
    Plan,
    inputs_of,
    planted_pool,
    planted_vlm,
)

SIZE = 40
EVERYTHING = Plan(vit=1, llm=3, dead_a=12, dead_b=5, both=1)
HOW = Fit(references=12, stored=2000, draws=200, alive_centroids=8, energy=0.5)
VIT_CHANNEL = 9  # of the vision features


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The planted model; its tower spikes on one channel where its norms are large."""
    vlm = planted_vlm(tmp_path_factory.mktemp("model"))

    def spike(module: Any, args: Any, output: Any) -> Any:
        features = [state.clone() for state in output.hidden_states]
        for state in features:
            state[..., VIT_CHANNEL] = torch.where(state.norm(dim=-1) > NORM / 2, 5000.0, 0.0)
        output.hidden_states = tuple(features)
        return output

    compat.vision_tower(vlm.model).register_forward_hook(spike)  # type: ignore[union-attr]
    return vlm


@pytest.fixture(scope="module")
def book(vlm: Any, tmp_path_factory: pytest.TempPathFactory) -> Rolebook:
    return fit_rolebook(vlm, planted_pool(EVERYTHING, SIZE)[0], tmp_path_factory.mktemp("book") / "book", how=HOW)


@pytest.mark.parametrize(
    ("role", "rule", "codes"),
    [
        ("vit-sink", "norm", (VIT, BOTH)),
        ("vit-sink", Norm(1e5), ()),
        ("vit-sink", "channels", (VIT, BOTH)),
        ("vit-sink", VisionChannels((VIT_CHANNEL,)), (VIT, BOTH)),
        ("llm-sink", "energy-or-attention", (LLM, BOTH)),
        ("llm-sink", "like-bos", (LLM, BOTH)),
        ("llm-sink", LikeFirst(after=3), (LLM, BOTH)),
        ("llm-sink", Energy(channels=(CHANNEL,)), (LLM, BOTH)),
    ],
    ids=str,
)
def test_planted_tokens_are_found_by_other_definitions(
    vlm: Any, book: Rolebook, role: str, rule: Any, codes: tuple[int, ...]
) -> None:
    new, planted = planted_pool(EVERYTHING, 3, seed=1)
    found = book.assign(vlm, inputs_of(vlm, [new[number] for number in range(3)]), definition={role: rule})
    for roles, own in zip(found, planted, strict=True):
        assert np.array_equal(roles.flags[role], np.isin(own, codes))


def test_the_largest_cluster_of_a_partition_has_its_tokens_and_those_near_it(vlm: Any, book: Rolebook) -> None:
    new, planted = planted_pool(EVERYTHING, 3, seed=1)
    found = book.assign(vlm, inputs_of(vlm, [new[n] for n in range(3)]), definition={"dead": "largest-cluster"})
    for roles, own in zip(found, planted, strict=True):
        assert roles.flags["dead"][own == DEAD_A].all() and not roles.flags["dead"][own == DEAD_B].any()
        assert roles.flags["dead"].sum() < 12 + 7  # of the 14 alive ones, a few


def test_the_tower_s_channels_and_the_clusters_are_kept_in_the_book(vlm: Any, book: Rolebook, tmp_path: Path) -> None:
    assert book.vit_channels == (VIT_CHANNEL,) and str(VIT_CHANNEL) in book.evidence["why"]["vit channels"]
    again = load_rolebook(book.save(tmp_path / "book"), vlm)
    assert again.vit_channels == book.vit_channels and again.clusters is not None and book.clusters is not None
    assert torch.equal(again.clusters.centroids, book.clusters.centroids) and again.clusters.reach == -1
    assert any("channels [9] spike" in line for line in book.lines())


def test_a_tower_without_spikes_has_no_channels(tmp_path: Path) -> None:
    plain = planted_vlm(tmp_path)
    pool = planted_pool(EVERYTHING, 16)[0]
    book = fit_rolebook(plain, pool, tmp_path / "book", how=HOW)
    assert book.vit_channels == () and "no channel" in book.evidence["why"]["vit channels"]
    roles = book.assign(plain, inputs_of(plain, [pool[0]]), definition={"vit-sink": "channels"})[0]
    assert not roles.flags["vit-sink"].any()


def test_clusters_by_density_leave_tokens_out(vlm: Any, tmp_path: Path) -> None:
    """Without a dead token k-means still calls its largest cluster dead, density does not."""
    new, codes = planted_pool(EVERYTHING, 3, seed=2)
    inputs = inputs_of(vlm, [new[number] for number in range(3)])
    how = dataclasses.replace(HOW, clusters="hdbscan")
    book = fit_rolebook(vlm, planted_pool(EVERYTHING, SIZE)[0], tmp_path / "book", how=how)
    book = load_rolebook(tmp_path / "book", vlm)
    for roles, own in zip(book.assign(vlm, inputs, definition={"dead": "largest-cluster"}), codes, strict=True):
        assert np.array_equal(roles.flags["dead"], own == DEAD_A)
    plan = Plan(vit=1, llm=1)
    inputs = inputs_of(vlm, [planted_pool(plan, 1, seed=3)[0][0]])
    flagged = {}
    for clusters in (32, "hdbscan"):
        own = dataclasses.replace(HOW, clusters=clusters)
        found = fit_rolebook(vlm, planted_pool(plan, SIZE)[0], tmp_path / str(clusters), how=own)
        roles = found.assign(vlm, inputs, definition={"dead": "largest-cluster"})[0]
        flagged[clusters] = int(roles.flags["dead"].sum())
    assert flagged[32] > 0 and flagged["hdbscan"] == 0


def test_density_of_few_points() -> None:
    for scattered in (torch.eye(3)[:1], torch.eye(64), torch.eye(3)[:0]):
        assert dense_clusters(scattered, least=0.5, similar=0.8).centroids.shape == (0, scattered.shape[1])
    lumps = torch.eye(4)[[0] * 40 + [1] * 20 + [2, 3]] + 0.01 * torch.randn(62, 4, generator=torch.manual_seed(0))
    found = dense_clusters(lumps, least=0.1, similar=0.8)
    assert found.centroids.argmax(dim=1).tolist() == [0, 1]
    assert 0.9 < found.reach < 1


def test_where_no_channel_spikes_attention_decides(vlm: Any, book: Rolebook) -> None:
    inputs = inputs_of(vlm, [planted_pool(EVERYTHING, 1, seed=4)[0][0]])
    mute, flags = dataclasses.replace(book, channels=()), {}
    for rule in ("energy", "energy-or-attention", Loud(times=1.5), "attention"):
        flags[str(rule)] = mute.assign(vlm, inputs, definition={"llm-sink": rule})[0].flags["llm-sink"]
    assert not flags["energy"].any() and flags[str(Loud(times=1.5))].any()
    assert np.array_equal(flags["energy-or-attention"], flags["attention"])


def test_leaving_one_out_and_the_numbers_of_a_rule(vlm: Any, book: Rolebook) -> None:
    inputs = inputs_of(vlm, [planted_pool(EVERYTHING, 1, seed=5)[0][0]])
    definition = {"llm-sink": "centroid", "dead": LeaveOneOut(below=0.0)}  # nothing needs a run of the layers
    assert not book.assign(vlm, inputs, definition=definition)[0].flags["dead"].any()
    roles = book.assign(vlm, inputs, definition={**definition, "dead": LeaveOneOut(below=1e9)})[0]
    assert roles.flags["dead"].all() and roles.scores["effect"].shape == (36,)
    effect = roles.scores["effect"]
    middle = float(np.median(effect))
    half = book.assign(vlm, inputs, definition={"dead": LeaveOneOut(below=middle)})[0].flags["dead"]
    assert np.array_equal(half, effect < middle) and 0 < half.sum() < 36


def test_books_of_before_refuse_what_they_do_not_hold(vlm: Any, book: Rolebook, tmp_path: Path) -> None:
    old = dataclasses.replace(book, vit_channels=None, clusters=None)
    old = load_rolebook(old.save(tmp_path / "old"), vlm)
    inputs = inputs_of(vlm, [planted_pool(EVERYTHING, 1)[0][0]])
    for role, rule in (("vit-sink", "channels"), ("dead", "largest-cluster")):
        with pytest.raises(DartLabError, match="fit it again"):
            old.assign(vlm, inputs, definition={role: rule})
    assert old.assign(vlm, inputs)[0].flags["dead"].any()


def test_rules_of_one_role_are_compared(vlm: Any, book: Rolebook) -> None:
    pool, _ = planted_pool(EVERYTHING, 5, seed=6)
    table, left_out = rule_agreement(vlm, book, pool, "dead", batch=2)
    assert list(left_out) == ["leave-one-out"]
    assert len(table) == 21 and set(table["tokens"]) == {180}  # 7 rules that are not slow
    pair = table.set_index(["a", "b"]).loc[("largest-cluster", "centroid")]
    inputs, flags = inputs_of(vlm, [pool[number] for number in range(5)]), []
    for rule in ("largest-cluster", "centroid"):
        found = book.assign(vlm, inputs, definition={"dead": rule})
        flags.append(np.concatenate([roles.flags["dead"] for roles in found]))
    (a, b), same = (own.mean() for own in flags), (flags[0] == flags[1]).mean()
    chance = a * b + (1 - a) * (1 - b)
    assert (pair["a share"], pair["b share"]) == (a, b)
    assert pair["kappa"] == pytest.approx((same - chance) / (1 - chance)) and 0 < pair["ari"] < 1
    two, none = rule_agreement(vlm, book, pool, "dead", ["leave-one-out", "cosine"])
    assert len(two) == 1 and not none
    with pytest.raises(DartLabError, match="agreement needs two"):
        rule_agreement(vlm, book, pool, "dead", ["cosine"])
    with pytest.raises(DartLabError, match="fit it again"):
        rule_agreement(vlm, dataclasses.replace(book, clusters=None), pool, "dead", ["cosine", "largest-cluster"])
    with pytest.raises(DartLabError, match="unknown rule"):
        rule_agreement(vlm, book, pool, "dead", ["cosin", "lens"])


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({"dead": Norm(100)}, "no rule for dead"),
        ({"dead": Lens("vit-sink")}, "no rule for dead"),
        ({"dead": ["cosine"]}, "no rule for dead"),
        ({"dead": None}, "no rule for dead"),
        ({"alive": "none"}, "unknown role"),
        ({"vit-sink": "norms"}, "Did you mean 'norm'"),
    ],
    ids=str,
)
def test_rules_that_are_none(definition: Any, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        check_definition(definition)


@pytest.mark.parametrize("rule", ["energy", "attention", "received", "like-bos", Unchanged(), LeaveOneOut()], ids=str)
def test_before_the_run_only_rules_that_need_none(rule: Any) -> None:
    role = "llm-sink" if isinstance(rule, str) else "dead"
    with pytest.raises(DartLabError, match=r"needs a run of the language model; .*centroid, lens, none"):
        check_definition({role: rule}, "input")
    assert check_definition({role: "centroid"}, "input")[role] is RULES[role]["centroid"]


@pytest.mark.parametrize(
    "text", ["", "dead", "dead=", "=cosine", "dead=cosine,", "dead=cosine,dead=lens", "dead=cosin"]
)
def test_definitions_in_words_that_cannot_be_read(text: str) -> None:
    with pytest.raises(DartLabError, match=r"give each role one rule|Did you mean 'cosine'"):
        parse_definition(text)


def test_channels_of_ones_own_must_exist(vlm: Any, book: Rolebook) -> None:
    inputs = inputs_of(vlm, [planted_pool(EVERYTHING, 1)[0][0]])
    for role, rule in (("llm-sink", Energy(channels=(99,))), ("vit-sink", VisionChannels((99,)))):
        with pytest.raises(DartLabError, match="channels 0 to 31"):
            book.assign(vlm, inputs, definition={role: rule})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Norm("x"), "give a number"), (lambda: Norm(float("nan")), "give a number"),
        (lambda: Norm(None), "give a number"), (lambda: NormTop(share=-1), "above 0 and at most 1"),
        (lambda: ColumnSums(share=float("nan")), "above 0 and at most 1"),
        (lambda: LikeFirst(after=1.5), "whole number"),
        (lambda: LikeFirst(after=-1), "at least 0"), (lambda: VisionChannels(5), "in a tuple"),
        (lambda: Energy(channels=(True,)), "whole number"), (lambda: Lens("dead", ids=5), "in a tuple"),
        (lambda: Lens("dead", nearest=0), "at least 1"), (lambda: Loud(times=10**400), "give a number"),
    ],
)  # fmt: skip
def test_numbers_of_rules_that_are_none(build: Any, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        build()


@pytest.mark.parametrize("definition", [5, "dead=unchanged", [("dead", "cosine")], {None: "cosine"}], ids=str)
def test_definitions_that_are_none(definition: Any) -> None:
    with pytest.raises(DartLabError, match=r"give a mapping|unknown role"):
        check_definition(definition)


def test_ids_beyond_the_vocabulary_and_rows_without_a_picture(vlm: Any, book: Rolebook) -> None:
    picture = planted_pool(EVERYTHING, 1)[0][0]
    with pytest.raises(DartLabError, match="the vocabulary has ids 0 to"):
        book.assign(vlm, inputs_of(vlm, [picture]), definition={"dead": Lens("dead", ids=(10**9,))})
    inputs = vlm.prepare([picture, None], ["what shape is the red circle ?", "what ?"])
    for role, rules in RULES.items():
        for rule in rules:
            if rule in ("attention", "energy-or-attention"):
                continue  # there is no text behind a picture that is not there: refused
            found = book.assign(vlm, inputs, definition={role: rule})
            assert [own.tokens for own in found] == [36, 0], rule


def test_a_picture_is_judged_by_itself(vlm: Any, book: Rolebook) -> None:
    """Rules that rank a picture's tokens say the same of two pictures in one prompt as of each alone."""
    new = planted_pool(EVERYTHING, 2, seed=8)[0]
    alone = visual_states(vlm, inputs_of(vlm, [new[0], new[1]]), column_sums=True)
    both = visual_states(vlm, vlm.prepare([[new[0], new[1]]], ["what shape is the red circle ?"]), column_sums=True)[0]
    attention = dict.fromkeys(book.layers, torch.cat([torch.linspace(1, 9, 36) ** 2, torch.linspace(90, 10, 36)]))
    halves = [dict.fromkeys(book.layers, attention[book.layers[0]][own]) for own in (slice(36), slice(36, 72))]
    rules = [NormTop(), NormTop(share=0.2), NormSpread(deviations=1), ColumnSums(share=0.1)]
    for rule in (*rules, Loud(times=1.5), Faint()):
        whole = rule.flags(book, dataclasses.replace(both, attention=attention))[0]
        parts = [rule.flags(book, dataclasses.replace(one, attention=own))[0]
                 for one, own in zip(alone, halves, strict=True)]  # fmt: skip
        assert torch.equal(whole, torch.cat(parts)) and whole[:36].any() and whole[36:].any(), rule


@pytest.mark.parametrize("clusters", ["kmeans", 0, 2.5, True], ids=str)
def test_numbers_of_clusters_that_are_none(clusters: Any) -> None:
    with pytest.raises(DartLabError, match=r'clusters=.*or "hdbscan"'):
        Fit(clusters=clusters)

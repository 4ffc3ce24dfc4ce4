"""What must hold for every method, whatever it does: driven from the registry, so that a new method is held to it too.

Where a property does not hold for a method, `EXCEPT` says why. All invariants, of methods by attention and redundancy
(A) and of the others (B), and where each is shown:

* A1 pure selection: subset, unique, sorted, text stays, exact count, head order:
  test_contract_of_every_method, test_every_layout
* A1 scaling states or keys changes nothing:
  test_scale_of_states_and_keys, test_dart.py::test_scaling_states_or_keys_changes_nothing
* A2 DART's certificate:
  test_dart.py::test_every_pruned_token_resembles_every_pivot
* A3 copies of a pivot are kept last:
  test_dart.py::test_copies_of_a_pivot_are_kept_last
* A4 the question counts only through text pivots:
  test_dart.py::test_the_question_counts_only_through_text_pivots
* A5 FastV: a constant; the ends of α:
  test_fastv.py::test_adding_a_constant_changes_nothing,
  test_wrappers.py::test_the_ends_of_alpha_are_the_two_methods
* A5 FastV_VIS does not see the question:
  test_fastv.py::test_fastv_vis_cannot_see_the_question, test_the_question
* A6 windows: counts, one window, one token each:
  test_wrappers.py::test_windows_agree_with_the_loop_also_in_a_batch,
  test_wrappers.py::test_one_window_is_the_plain_method,
  test_wrappers.py::test_as_many_tokens_as_windows_are_one_in_each
* A7, B1 keeping all is the model itself:
  test_keeping_all, vlm/test_oracle.py::test_keeping_all_is_bit_identical,
  vlm/test_stage_whole.py::test_keeping_all_in_any_stage_is_the_model_itself
* A7 a cut behind the last layer, which would do nothing, is refused:
  vlm/test_errors.py::test_refused_in_one_line_and_restored
* A8, B2 dropping is masking, decode steps too:
  vlm/test_oracle.py::test_dropping_equals_masking
* A9 lengths of the caches, positions of decode steps:
  vlm/test_oracle.py::test_dropping_equals_masking, vlm/test_by_hand.py::test_prompt_and_eight_steps
* A10, B16 budgets, FLOPs, caches:
  test_cost.py::test_published_share_of_flops, test_cost.py::test_published_cache_sizes,
  test_cost.py::test_sparsevlm_budgets_are_averages_of_outputs,
  test_cost.py::test_others_are_averages_of_tokens_processed
* A11 the lemma, and where it fails:
  test_dart.py::test_lemma_holds_where_norms_are_equal, test_dart.py::test_lemma_fails_for_unequal_norms
* B1 two reductions are one:
  test_compose.py::test_applying_both_is_applying_one_after_the_other, vlm/test_stage_cuts.py::test_two_cuts_are_one
* B3 rows of attention:
  vlm/test_stage_signals.py::test_rows_are_those_of_eager_attention
* B4 column sums:
  vlm/test_stage_signals.py::test_chunked_column_sums_are_those_of_the_whole_map
* B5 farthest point:
  test_diversity.py::test_farthest_point_reaches_half_of_the_best_chord_and_a_quarter_of_the_best_distance,
  test_diversity.py::test_identical_tokens_are_taken_once_each_by_index
* B6 DPP:
  test_diversity.py::test_dpp_map_equals_greedy_determinants,
  test_diversity.py::test_dpp_map_takes_one_of_each_orthogonal_group_first
* B7 facility location:
  test_diversity.py::test_facility_location_takes_the_largest_recounted_gain_and_gains_fall
* B8 ToMe: sizes, mass, r = 0, class token, unmerging:
  test_merging.py::test_bipartite_matching_is_the_loop,
  test_merging.py::test_tome_reaches_its_budget_block_by_block, test_merged_tokens
* B9 SparseVLM: counts, raters:
  test_staged.py::test_sparsevlm_leaves_what_was_published,
  test_staged.py::test_raters_are_never_none_and_the_same_at_every_stage
* B10 MustDrop: windows, key tokens:
  test_staged.py::test_mustdrop_windows_remove_a_window_s_tokens_but_one,
  test_merging.py::test_windows_share_the_patches_out_and_know_their_similarity,
  test_staged.py::test_mustdrop_drops_by_both_thresholds_and_never_a_key,
  vlm/test_stage_tower.py::test_key_tokens_survive_every_stage
* B11 HiRED:
  test_hired.py::test_exact_spends_all_and_official_never_more,
  test_hired.py::test_a_blob_of_early_attention_draws_the_budget_to_its_quadrant
* B12 VisionZip:
  test_visionzip.py::test_every_patch_that_is_not_dominant_is_assigned_once,
  test_visionzip.py::test_the_published_split
* B13 PyramidDrop:
  test_staged.py::test_pyramid_matched_budgets, test_staged.py::test_pyramid_shares_are_of_the_original_count
* B14 Elastic Cache:
  test_merging.py::test_cache_buckets_are_nearest_anchors, test_staged.py::test_elastic_cache_keeps_its_ends
* B15 one picture after another:
  test_nothing_is_left_from_one_picture_to_the_next
* B17 a sample in a batch is a sample alone:
  test_a_sample_alone_and_in_a_batch, vlm/test_oracle.py::test_a_row_decides_alone_as_in_its_batch
* B18 the question:
  test_the_question, vlm/test_stage_question.py::test_the_question_comes_too_late_for_what_does_not_ask_it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from dart_lab.errors import DartLabError
from dart_lab.pruners import Pruner, ScorePruner, Then, Union, Windowed
from dart_lab.pruners.reduction import PAD, Reduction
from dart_lab.testing import check_pruner
from tests.pruners.layouts import LAYOUTS, asked_otherwise, made, methods, only, parts, permuted

#: Property → method (or stage of it) → why it does not hold there.
EXCEPT: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "permutation": {
        "fastv-vis": "the last visual token asks",
        "mustdrop@VIT_BLOCK0": "a window is represented by its first patch",
        "random": "draws places",
        "tome": "pairs even tokens with odd ones",
        "visionzip": "contextual tokens are spaced evenly among the rest",
    },
    "keeping all": {
        "prumerge": "every kept patch takes in its nearest neighbours, kept or not",
        "visionzip": "dominant tokens come before contextual ones",
    },
    "one home": {
        "feature-downsample": "windows overlap where the sides do not divide",
        "ficoco-l": "a discarded token is shared out among its nearest",
        "ficoco-v": "a discarded patch is shared out among its nearest",
        "prumerge": "a patch is near several kept ones",
    },
})
#: Methods whose decision the question may change, and through what. (`vla-pruner` keeps all until it has a history.)
ASKS: Mapping[str, str] = MappingProxyType({
    "alpha": "attention of the last token",
    "cdpruner": "relevance to the question",
    "dart": "text pivots",
    "elastic-cache": "attention received from all, text included",
    "fastv": "attention of the last token",
    "ficoco-l": "attention of the question",
    "mustdrop@LLM_LAYER": "attention of the question",
    "pyramiddrop": "attention of the last token",
    "sparsevlm": "attention of raters",
    "uniqueness": "cosine with the last token",
    "window-fastv": "attention of the last token",
})
every_part = pytest.mark.parametrize("key", list(parts()))


def excepted(table: Mapping[str, str], key: str) -> bool:
    return key.partition("@")[0] in table or any("@" in name and key.startswith(name) for name in table)


def budgets(part: Pruner) -> Iterator[Pruner]:
    """The part as it is, and, where it takes a number, with one token and with all."""
    yield part
    if part.keep is not None:
        yield replace(part, keep=1)
        yield replace(part, keep=1.0)


def same(one: Reduction, two: Reduction) -> bool:
    return torch.equal(one.keep, two.keep) and torch.equal(one.weights(), two.weights())


# ---- selection


@pytest.mark.parametrize("name", list(methods()))
def test_contract_of_every_method(name: str) -> None:
    check_pruner(methods()[name])


@every_part
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout(key: str, layout: str) -> None:
    """Exactly what was asked, unless that is refused, and a merge's slots hold real tokens of the sample."""
    part = parts()[key]
    batch = made(part, LAYOUTS[layout])
    signals = batch.signals()
    for method in budgets(part):
        try:
            asked = method.asked(signals)
        except DartLabError:
            assert method is not part, "refused as it is"
            continue
        found = method(signals)  # this checks: sorted, unique, inside the image, the promised count
        assert torch.equal(found.counts[asked != PAD], asked[asked != PAD]), method
        if found.merge is not None:
            assert not (found.members() & ~signals.valid[:, None]).any(), "padding is merged"
            assert ((found.slot_sizes() > 0) == (found.sequence != PAD)).all()


@every_part
def test_a_sample_alone_and_in_a_batch(key: str) -> None:
    """Neither the other rows nor the padding matter, also for what is merged."""
    part = parts()[key]
    whole = made(part, LAYOUTS["left padded"], seed=3)
    together = part(whole.signals())
    for row in range(len(whole.visual)):
        alone = part(only(whole, row).signals())
        kept = int(together.counts[row])
        assert together.keep[row, :kept].tolist() == alone.keep[0].tolist()
        torch.testing.assert_close(
            together.weights()[row, :kept, : alone.weights().shape[2]], alone.weights()[0], atol=1e-6, rtol=1e-5
        )


@every_part
def test_nothing_is_left_from_one_picture_to_the_next(key: str) -> None:
    part = parts()[key]
    first, second = (made(part, LAYOUTS["a square"], seed=seed) for seed in (1, 2))
    before = part(second.signals())
    part(first.signals())
    after = part(second.signals())
    assert torch.equal(before.keep, after.keep) and torch.equal(before.weights(), after.weights())


@every_part
def test_keeping_all(key: str) -> None:
    part = parts()[key]
    if part.keep is None or excepted(EXCEPT["keeping all"], key):
        return
    batch = made(part, LAYOUTS["left padded"])
    found = replace(part, keep=1.0)(batch.signals())
    n = batch.visual.shape[1]
    states = torch.randn(len(batch.visual), n, 3) * (batch.visual != PAD)[:, :, None]
    assert torch.equal(found.counts, (batch.visual != PAD).sum(dim=1))
    assert torch.equal(found.apply(states), states), "to the last bit"


def test_a_number_without_a_grid_is_refused_in_one_line() -> None:
    """A number of tokens that has no grid is refused in words; nothing else refuses any layout above."""
    with pytest.raises(DartLabError, match="no height × width") as fault:
        batch = made(methods()["feature-downsample"], LAYOUTS["a square"])
        replace(methods()["feature-downsample"], keep=5)(batch.signals())
    assert "\n" not in str(fault.value)


@every_part
def test_inside_wrappers(key: str) -> None:
    """Wrappers hold the contract around any method, or say what it lacks: a score, or that it only drops."""
    part = parts()[key]
    if part.keep is None:
        return
    half = replace(part, keep=0.5)
    merges = half(made(part, LAYOUTS["a square"]).signals()).merge is not None
    wraps: dict[str, tuple[Callable[[], Pruner], bool]] = {
        "gives no score": (lambda: Windowed(half), not isinstance(half, ScorePruner)),
        "must only drop|no height": (lambda: Then(replace(half, keep=0.75), half), merges),
        "must only drop": (lambda: Union(half, replace(half, keep=0.25)), merges),
    }
    for words, (wrap, refused) in wraps.items():
        with pytest.raises(DartLabError, match=words) if refused else nullcontext():
            check_pruner(wrap())


# ---- symmetries


@every_part
def test_scale_of_states_and_keys(key: str) -> None:
    """Four times as long states, or keys, decide the same. (A power of two: no rounding.)"""
    part = parts()[key]
    batch = made(part, LAYOUTS["two images of unlike sizes"], seed=5)
    plain = part(batch.signals())
    for name in ("hidden", "normed", "embeds", "delta", "keys", "values"):
        scaled = part(batch.signals(**{name: 4 * batch.tensors[name]}))
        assert torch.equal(scaled.keep, plain.keep), name
        torch.testing.assert_close(scaled.weights(), plain.weights())


@every_part
def test_order_of_the_tokens(key: str) -> None:
    """Tokens that change places, their positions on the picture with them, are kept or not as before."""
    part = parts()[key]
    changed = 0
    for seed in range(3):
        batch = made(part, LAYOUTS["two images of unlike sizes"], seed=seed)
        mixed, order = permuted(part, batch, seed)
        plain, other = part(batch.signals()), part(mixed.signals())
        changed += sorted(order[other.keep[0][other.keep[0] != PAD]].tolist()) != plain.keep[0].tolist()
    assert (changed > 0) == excepted(EXCEPT["permutation"], key)


@every_part
def test_the_question(key: str) -> None:
    """Another question, all else equal, changes nothing for a method that does not ask it; and something if it does."""
    part = parts()[key]
    changed = 0
    for seed in range(4):
        batch = made(part, LAYOUTS["two images of unlike sizes"], seed=seed)
        other = asked_otherwise(part, batch, seed + 50)
        changed += not same(part(batch.signals()), part(other.signals()))
    assert (changed > 0) == excepted(ASKS, key)


# ---- merging


@every_part
def test_merged_tokens(key: str) -> None:
    """Slots are weighted means; a token goes to one slot at most; the patches that slots stand for are those inside."""
    part = parts()[key]
    batch = made(part, LAYOUTS["left padded"], seed=1)
    sizes = torch.randint(1, 5, batch.attended.shape, generator=torch.Generator().manual_seed(0)).float()
    signals = batch.signals(sizes=sizes)
    found = part(signals)
    if found.merge is None:
        return
    weights, filled = found.weights(), found.sequence != PAD
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(dim=2), filled.float())
    if excepted(EXCEPT["one home"], key):
        return
    homes = found.members().sum(dim=1)
    assert homes.max() == 1
    before = sizes.gather(1, batch.visual.clamp(min=0)) if "sizes" in part.needs else torch.ones(batch.visual.shape)
    torch.testing.assert_close(found.slot_sizes(before).sum(dim=1), (homes * before).sum(dim=1))
    if "sizes" in part.needs:  # mass is conserved
        states = torch.randn(*batch.visual.shape, 3) * signals.valid[:, :, None]
        mass = (found.slot_sizes(before)[:, :, None] * found.apply(states)).sum(dim=1)
        torch.testing.assert_close(mass, (before[:, :, None] * states).sum(dim=1), atol=1e-4, rtol=1e-4)


# ---- the tables


def test_the_tables_name_methods_that_are_there() -> None:
    known = {*methods(), *parts()}
    for table in (*EXCEPT.values(), ASKS):
        for name in table:
            assert name in known or any(key.startswith(name) for key in known), name


def test_the_page_of_invariants_points_at_tests() -> None:
    assert __doc__ is not None
    here = Path(__file__).parent
    for file, name in re.findall(r"(?:([\w/]+\.py)::)?\b(test_\w+)\b(?!\.py)", __doc__):
        path = Path(__file__) if not file else (here.parent if "/" in file else here) / file
        assert f"def {name}(" in path.read_text(encoding="utf-8"), (file, name)
    numbers = {*re.findall(r"\b(A\d+|B\d+)\b", __doc__)}
    assert numbers == {f"A{i}" for i in range(1, 12)} | {f"B{i}" for i in range(1, 19)}

"""The numbers that papers print, and those they should have printed."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_lab.errors import DartLabError
from dart_lab.pruners import (
    DART,
    Cost,
    FastV,
    KeepAll,
    ModelShape,
    NoneKept,
    Pruner,
    Random,
    Schedule,
    Then,
    Windowed,
    cost_of,
    parse_pruner,
    solve_keep,
)
from dart_lab.pruners.tome import ToMe

LLAVA = ModelShape(layers=32, width=4096, mlp_width=11008, heads=32, kv_heads=32, head_dim=128, visual=576)
NEXT = dataclasses.replace(LLAVA, visual=2880, crops=5)
SYSTEM_AND_QUESTION = 36  # text tokens with which FastV's published ratios come out


# ---- multiply-accumulates


@pytest.mark.parametrize(("cut", "visual", "keep", "mlp", "percent"), [
    # FastV's equation 5 with 7B sizes; DART's appendix D prints it
    (2, 2880, 320, "2ndm", 15.46),
    (2, 2880, 324, "2ndm", 15.58),
    (2, 2880, 320, "3ndm", 15.70),
    (1, 2880, 320, "2ndm", 12.64),
    (2, 576, 288, "2ndm", 52.44),
    (3, 576, 288, "2ndm", 54.03),
])
def test_published_share_of_flops(cut: int, visual: int, keep: int, mlp: str, percent: float) -> None:
    cost = Cost.of({cut: keep}, dataclasses.replace(LLAVA, visual=visual))
    assert 100 * cost.macs_ratio(mlp=mlp) == pytest.approx(percent, abs=0.006)


@pytest.mark.parametrize(("layer", "percent"), [(2, 55.2), (3, 56.7)])
def test_fastv_prints_its_share_with_the_text_counted_in(layer: int, percent: float) -> None:
    shape = dataclasses.replace(LLAVA, text=SYSTEM_AND_QUESTION)
    cost = cost_of(FastV(keep=0.5, layer=layer), shape)
    assert 100 * cost.macs_ratio(text=True) == pytest.approx(percent, abs=0.06)


@given(
    st.integers(1, 6), st.integers(1, 64), st.integers(1, 64), st.integers(1, 4), st.integers(1, 8), st.integers(1, 40),
    st.integers(0, 40), st.data(),
)
def test_macs_are_those_of_the_matrices_one_by_one(
    layers: int, width: int, mlp: int, kv_heads: int, head_dim: int, visual: int, text: int, data: st.DataObject
) -> None:
    heads = kv_heads * data.draw(st.integers(1, 3))
    shape = ModelShape(layers=layers, width=width, mlp_width=mlp, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                       visual=visual, text=text)
    kept = {data.draw(st.integers(0, layers - 1)): data.draw(st.integers(0, visual))}
    cost, total = Cost.of(kept, shape), 0
    for layer in range(layers):
        tokens = text + (kept[next(iter(kept))] if layer >= next(iter(kept)) else visual)
        matrices = [(width, heads * head_dim), (width, kv_heads * head_dim), (width, kv_heads * head_dim),
                    (heads * head_dim, width), (width, mlp), (width, mlp), (mlp, width)]
        total += sum(tokens * rows * columns for rows, columns in matrices)
        total += 2 * heads * tokens * tokens * head_dim  # logits, weighted values
    assert cost.macs(mlp="3ndm", text=True) == total


def test_the_formula_of_the_papers() -> None:
    n, d, m = 576, 4096, 11008
    assert Cost.of({}, LLAVA).macs() == 32 * (4 * n * d**2 + 2 * n**2 * d + 2 * n * d * m)
    assert Cost.of({}, LLAVA).macs(mlp="3ndm") == 32 * (4 * n * d**2 + 2 * n**2 * d + 3 * n * d * m)


# ---- KV cache


@pytest.mark.parametrize(("tokens", "megabytes", "mebibytes", "printed"), [
    (2880, 1509.94944, 1440, 1512.1), (320, 167.77216, 160, 168.0),  # DART's table 2 prints the last
])
def test_published_cache_sizes(tokens: int, megabytes: float, mebibytes: int, printed: float) -> None:
    cost = Cost.of({0: tokens}, NEXT)
    assert cost.kv_bytes() == megabytes * 1e6 == mebibytes * 2**20
    assert cost.kv_bytes() / 1e6 == pytest.approx(printed, rel=0.002)
    assert cost.kv_rounded_mb() == 0.525 * tokens == pytest.approx(printed, abs=0.11)


@pytest.mark.parametrize(("kept", "megabytes"), [(320, 251.7), (324, 253.6)])
def test_the_cache_of_the_layers_before_the_cut_stays_whole(kept: int, megabytes: float) -> None:
    cost = Cost.of({2: kept}, NEXT)
    assert cost.kv_bytes() / 1e6 == pytest.approx(megabytes, abs=0.05)
    assert cost.kv_bytes() == (2 * 2880 + 30 * kept) * 16384
    assert cost.kv_ratio() == pytest.approx(cost.kv_bytes() / 1509.94944e6)


def test_grouped_queries_and_wider_numbers_in_the_cache() -> None:
    grouped = dataclasses.replace(LLAVA, kv_heads=8, value_bytes=4)
    assert Cost.of({2: 64}, grouped).kv_bytes() * 2 == Cost.of({2: 64}, LLAVA).kv_bytes()
    with_text = dataclasses.replace(LLAVA, text=40)
    extra = Cost.of({2: 64}, with_text).kv_bytes(text=True) - Cost.of({2: 64}, with_text).kv_bytes()
    assert extra == 32 * 40 * 16384


# ---- layer averages


@pytest.mark.parametrize(("after", "output", "processed"), [
    # SparseVLM cuts the outputs of layers 2, 6 and 15: tokens after each cut, recycled ones included
    ((309, 204, 113), 192.0, 206.5), ((312, 117, 39), 128.6, 145.4), ((249, 55, 27), 96.9, 114.1),
    ((82, 32, 18), 64.8, 82.3),
    ((300, 200, 118), 192.4, 206.8), ((238, 108, 60), 128.0, 144.1), ((246, 54, 28), 96.8, 113.9),
    ((66, 34, 20), 64.4, 81.8),
])
def test_sparsevlm_budgets_are_averages_of_outputs(after: tuple[int, ...], output: float, processed: float) -> None:
    cost = Cost.of(dict(zip((3, 7, 16), after, strict=True)), LLAVA)
    assert cost.average("output") == pytest.approx(output, abs=0.06)
    assert cost.average("processed") == pytest.approx(processed, abs=0.06)


@pytest.mark.parametrize(("model", "kept", "average"), [
    (LLAVA, {2: 144}, 171.0),  # FastV, the example of the fairness thread
    (LLAVA, {2: 196}, 219.75), (LLAVA, {2: 132}, 159.75), (LLAVA, {2: 68}, 99.75), (NEXT, {2: 324}, 483.75),  # DART
    (LLAVA, {8: 288, 16: 144, 24: 72}, 270.0), (NEXT, {8: 1440, 16: 720, 24: 360}, 1350.0),  # PyramidDrop's default
    (LLAVA, {2: 312, 10: 156, 20: 78}, 192.0), (LLAVA, {2: 184, 10: 92, 20: 46}, 128.0),
    (LLAVA, {2: 56, 10: 28, 20: 14}, 64.0),
    (NEXT, {2: 920, 10: 460, 20: 230}, 640.0), (NEXT, {2: 280, 10: 140, 20: 70}, 320.0),
    (LLAVA, {3: 288, 17: 144, 22: 1}, 202.8),  # V2Drop
    (LLAVA, {0: 48, 8: 35, 16: 26, 24: 19}, 32.0),  # VisionDrop
    (LLAVA, {0: 96, 16: 32}, 64.0),  # VScan
    (LLAVA, {0: 192}, 192.0),  # whatever acts before the language model
])
def test_others_are_averages_of_tokens_processed(model: ModelShape, kept: dict[int, int], average: float) -> None:
    assert Cost.of(kept, model).average() == pytest.approx(average, abs=0.06)


@given(st.lists(st.integers(0, 576), min_size=1, max_size=4), st.data())
def test_averages_are_means_over_layers(counts: list[int], data: st.DataObject) -> None:
    layers = sorted(data.draw(st.sets(st.integers(0, 31), min_size=len(counts), max_size=len(counts))))
    kept = dict(zip(layers, sorted(counts, reverse=True), strict=True))
    cost = Cost.of(kept, LLAVA)
    for layer in range(32):
        before = [count for start, count in kept.items() if start <= layer]
        assert cost.processed[layer] == (before[-1] if before else 576)
    outputs = [*cost.processed[1:], cost.kept]
    assert cost.average("output") == sum(outputs) / 32 <= cost.average("processed")


# ---- budgets that match an average


@pytest.mark.parametrize(("model", "target", "layers", "shape", "kept"), [
    (LLAVA, 192, (2,), "flat", (166,)), (LLAVA, 128, (2,), "flat", (98,)), (LLAVA, 64, (2,), "flat", (30,)),
    (NEXT, 640, (2,), "flat", (491,)), (NEXT, 320, (2,), "flat", (149,)),
    (LLAVA, 192, (2, 10, 20), "halving", (312, 156, 78)), (LLAVA, 128, (2, 10, 20), "halving", (184, 92, 46)),
    (LLAVA, 64, (2, 10, 20), "halving", (56, 28, 14)),
    (NEXT, 640, (2, 10, 20), "halving", (920, 460, 230)), (NEXT, 320, (2, 10, 20), "halving", (280, 140, 70)),
    (NEXT, 160, (0,), "flat", (160,)),
])
def test_matched_budgets(
    model: ModelShape, target: int, layers: tuple[int, ...], shape: str, kept: tuple[int, ...]
) -> None:
    found = solve_keep(target, model, layers=layers, shape=shape)
    assert found == dict(zip(layers, kept, strict=True))


@given(
    st.sets(st.integers(0, 31), min_size=1, max_size=4), st.sampled_from(["flat", "halving"]),
    st.sampled_from(["processed", "output"]), st.floats(1, 576),
)
def test_a_solution_has_the_average_and_a_refusal_names_the_nearest(
    layers: set[int], shape: str, convention: str, target: float
) -> None:
    ordered = tuple(sorted(layers))
    how = {"layers": ordered, "shape": shape, "convention": convention}
    try:
        kept = solve_keep(target, LLAVA, **how)
    except DartLabError as error:
        nearest = float(str(error).split("the nearest is ")[1].split(",")[0])
        kept = solve_keep(nearest + (0.005 if nearest > target else -0.005), LLAVA, **how)  # printed rounded
        assert Cost.of(kept, LLAVA).average(convention) == pytest.approx(nearest, abs=0.51)
        assert kept[ordered[0]] == 576 or kept[ordered[-1]] == 1
    else:
        assert Cost.of(kept, LLAVA).average(convention) == pytest.approx(target, abs=0.51)  # half a token each


def test_two_whole_layers_of_five_crops_cost_more_than_160() -> None:
    for layers, shape in (((2,), "flat"), ((2, 10, 20), "halving")):
        with pytest.raises(DartLabError, match=r"average of 160 .* nearest is 18\d\.\d\d, or cut earlier"):
            solve_keep(160, NEXT, layers=layers, shape=shape)


# ---- from a method to its cost


@pytest.mark.parametrize(("method", "model", "kept"), [
    # what DART's released code really keeps
    (DART(keep=192, budget="official"), LLAVA, 196), (DART(keep=128, budget="official"), LLAVA, 132),
    (DART(keep=64, budget="official"), LLAVA, 68), (DART(keep=100, budget="official"), LLAVA, 100),
    (DART(keep=320, budget="official", official_path="llava_next"), NEXT, 324),
    (DART(reduction_ratio=0.667, budget="official"), LLAVA, 188),
    (DART(reduction_ratio=0.778, budget="official"), LLAVA, 124),
    (DART(reduction_ratio=0.889, budget="official"), LLAVA, 60),
    (DART(reduction_ratio=0.889, budget="official"), NEXT, 316),
    (DART(reduction_ratio=0.778, budget="official"), dataclasses.replace(LLAVA, visual=1000), 220),
    (DART(keep=128), LLAVA, 128), (FastV(reduction_ratio=0.75, budget="official"), LLAVA, 144),
    (Random(keep=0.111), LLAVA, 64), (NoneKept(), LLAVA, 0), (KeepAll(), LLAVA, 576),
    (Windowed(FastV(keep=144)), LLAVA, 144), (Then(FastV(keep=0.5), DART(keep=0.25)), LLAVA, 72),
    (parse_pruner("alpha:0.25"), LLAVA, 144),
])
def test_what_a_method_keeps_is_found_without_a_model(method: Pruner, model: ModelShape, kept: int) -> None:
    cost = cost_of(method, model)
    assert cost.kept == kept and cost.processed == (model.visual,) * 2 + (kept,) * 30
    assert cost.method == method.name


def test_a_schedule_costs_stage_by_stage() -> None:
    text = "2:fastv:0.5;8:dart:0.25"
    original, left = cost_of(Schedule(text), LLAVA), cost_of(Schedule(text, share_of="left"), LLAVA)
    assert original.processed == (576,) * 2 + (288,) * 6 + (144,) * 24 and original.asked == (288, 144)
    assert left.processed == (576,) * 2 + (288,) * 6 + (72,) * 24 and left.asked == (288, 72)
    solved = solve_keep(128, LLAVA, layers=(2, 10, 20), shape="halving")
    assert cost_of(Schedule({k: FastV(keep=n) for k, n in solved.items()}), LLAVA).average() == 128


def test_keeping_everything_saves_nothing() -> None:
    cost = cost_of(KeepAll(), LLAVA)
    assert cost.macs_ratio() == cost.kv_ratio() == 1 and cost.average() == cost.average("output") == 576


def test_the_report_names_every_number() -> None:
    report = cost_of(parse_pruner("2:fastv:0.5;8:dart:0.25"), dataclasses.replace(LLAVA, text=36)).report()
    assert len({(m.name, m.unit, m.convention) for m in report}) == len(report) and all(m.unit for m in report)
    by = {(m.name, m.unit, m.convention): m.value for m in report}
    assert by["layers 2–7", "visual tokens", "processed"] == 288
    assert by["layer average", "visual tokens", "processed"] == 198
    assert by["layer average", "visual tokens", "output"] == 184.5
    for mlp in ("2ndm", "3ndm"):
        for tokens in ("visual tokens alone", "visual and text"):
            how = f"4nd²+2n²d+{mlp}, {tokens}"
            assert by["prefill", "TFLOP", how] == 2 * by["prefill", "TMAC", how]
            assert 0 < by["prefill, share of unpruned", "%", how] < 100
    assert by["KV cache", "MiB", "exact, visual tokens alone"] == 99


@pytest.mark.parametrize(("keep", "model", "larger", "blocks"), [
    (192, LLAVA, 17, 16), (128, LLAVA, 20, 11), (64, LLAVA, 23, 6), (32, NEXT, 24, 15),
])
def test_tome_merges_one_more_in_its_first_blocks(keep: int, model: ModelShape, larger: int, blocks: int) -> None:
    cost = cost_of(ToMe(keep=keep), model)
    assert cost.processed == (keep * model.crops,) * 32
    left = [576 + 1, *cost.asked]  # class token included, each crop
    assert [a - b for a, b in pairwise(left)] == [larger] * blocks + [larger - 1] * (23 - blocks)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: cost_of(DART(epsilon=0.3), LLAVA), "depends on the picture"),
    (lambda: cost_of(FastV(keep=64, layer=32), LLAVA), "between 0 and 31"),
    (lambda: cost_of(FastV(keep=600), LLAVA), "only 576 visual tokens"),
    (lambda: Cost.of({4: 10, 2: 5}, LLAVA), "must increase"),
    (lambda: Cost.of({2: 5, 4: 10}, LLAVA), "must not grow"),
    (lambda: Cost.of({2: 64}, LLAVA).macs(mlp="4ndm"), "Did you mean"),
    (lambda: Cost.of({2: 64}, LLAVA).average("outputs"), "Did you mean 'output'"),
    (lambda: solve_keep(128, LLAVA, layers=(4, 2)), "must increase"),
    (lambda: solve_keep(128, LLAVA, shape="half"), "Did you mean 'halving'"),
    (lambda: dataclasses.replace(LLAVA, width=0), "width=0"),
    (lambda: dataclasses.replace(LLAVA, crops=5), "not 5 equal crops"),
])
def test_what_cost_refuses(make, message: str) -> None:
    with pytest.raises(DartLabError, match=message):
        make()

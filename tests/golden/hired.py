"""HiRED: LLaVA's one view, and LLaVA-NeXT's shares over crops, with the released code's strips and roundings."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dart_lab.pruners.hired import HiRED
from dart_lab.pruners.reduction import Reduction, gather_tokens
from tests.golden.case import Case
from tests.golden.crops import patches


def run(case: Case) -> None:
    if "bottom_cls_row" in case.inputs:
        pruner = HiRED(keep=float(case.params["token_budget_rate"]), budget="official")
        got = pruner(patches(case.inputs["bottom_cls_row"]))
        assert got.counts.tolist() == [case.outputs["n_kept"]]
        assert torch.equal(got.keep[0], case.outputs["kept_sorted"])
        return
    check_exact_budget(case)
    if "exception" in case.outputs:
        return
    got, images = decide(case, "official"), case.params["num_patches"]
    for i, mask in enumerate(got.mask().split(images)):
        assert mask.sum(dim=1).tolist() == case.outputs["counts_per_patch"][i]
        assert torch.equal(mask, case.outputs[f"mask_{i}"].bool())
    if "packed_token_ids" in case.outputs:
        check_packed(case, got)


def decide(case: Case, budget: str) -> Reduction:
    """Decide for all images of a case at once; each crop grid as the released code reads it."""
    p, top = case.params, case.inputs["top_cls_rows"]
    signals = patches(case.inputs["bottom_cls_rows"])
    early = patches(top)
    side = int(top.shape[2] ** 0.5)
    place = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), dim=-1).reshape(-1, 2)
    grid = torch.cat([torch.zeros_like(place), place], dim=1).expand(len(top), -1, -1)
    image = torch.repeat_interleave(torch.arange(len(p["num_patches"])), torch.tensor(p["num_patches"]))
    regions = [region for shape in case.outputs["grid_fn_return_rows_cols"] for region in regions_of(*shape)]
    signals = replace(
        signals, image=image, region=torch.tensor(regions), grid=grid,
        providers={**signals.providers, "attention@0": early.providers["attention"]},
    )
    return HiRED(keep=float(p["token_budget_rate"]), alpha=float(p["alpha"]), budget=budget)(signals)


def regions_of(rows: int, columns: int) -> list[tuple[float, float, float, float]]:
    """The whole picture, then its rows × columns parts."""
    parts = [(c / columns, r / rows, (c + 1) / columns, (r + 1) / rows) for r in range(rows) for c in range(columns)]
    return [(0.0, 0.0, 1.0, 1.0), *parts]


def check_exact_budget(case: Case) -> None:
    """The exact budget spends everything, without exceeding a crop."""
    total, got, images = case.params["token_budget_rate"], decide(case, "exact"), case.params["num_patches"]
    for sizes, counts in zip(got.size.split(images), got.counts.split(images), strict=True):
        assert int(counts.sum()) == int(int(sizes.sum()) * total + 0.5)
        assert bool((counts <= sizes).all())


def check_packed(case: Case, got: Reduction) -> None:
    """Kept tokens in the order of the released packing, whose grid has rows and columns swapped (see EXCEPTIONS.md)."""
    n = case.params["num_vision_tokens"]
    numbers = torch.arange(got.keep.shape[0] * n).reshape(-1, n, 1)
    kept = gather_tokens(numbers, got.keep)[..., 0][got.keep >= 0].tolist()
    base = [number for number in kept if number < n]
    want = case.outputs["packed_token_ids"].tolist()
    assert want[: len(base)] == base
    stitched = stitch(numbers[1:, :, 0], *case.outputs["grid_fn_return_rows_cols"][0], case.params["image_sizes"][0])
    rest = [number for line in stitched.tolist() for number in [*(m for m in line if m in set(kept)), -1]]
    assert want[len(base) :] == rest


def stitch(crops: Tensor, across: int, down: int, size: tuple[int, int]) -> Tensor:
    """Crops `(crops, n)` as one picture, padding of an image of `size` (height, width) cut off."""
    side = int(crops.shape[1] ** 0.5)
    whole = crops.reshape(down, across, side, side).transpose(1, 2).reshape(down * side, across * side)
    height, width = size
    if width / height > whole.shape[1] / whole.shape[0]:
        cut = (whole.shape[0] - height * whole.shape[1] // width) // 2
        return whole[cut : whole.shape[0] - cut]
    cut = (whole.shape[1] - width * whole.shape[0] // height) // 2
    return whole[:, cut : whole.shape[1] - cut]

"""Group mass against dense attention: every kernel, grouped heads, padding, pruned runs, prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.probes.attention_mass import AttentionMass, MassTrace, group_mass
from dart_lab.pruners import DART
from dart_lab.vlm import recording
from dart_lab.vlm.insert import prune
from dart_lab.vlm.masking import mask_drop
from dart_lab.vlm.recording import record
from dart_lab.vlm.tap import Captured
from tests.vlm.common import IMAGE, ONE, THREE, TOKENS, Uneven, alone, batch, hidden_columns, small_llava
from tests.vlm.kernels import FLASH, emulated_flash, uncompiled_flex
from tests.vlm.stepping import decode

ROLES = {"dead": [np.arange(0, 5)] * 3, "sink": [np.array([7])] * 3, "none": [np.array([], dtype=int)] * 3}


def dense(query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    """Plain softmax attention in float64."""
    groups = query.shape[1] // key.shape[1]
    logits = query.double() @ key.double().repeat_interleave(groups, dim=1).mT * query.shape[-1] ** -0.5
    return logits.masked_fill(~allowed, float("-inf")).softmax(dim=-1).nan_to_num(nan=0.0)


def by_loops(weights: Tensor, allowed: Tensor, rows: Tensor, columns: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mass and pairwise score by their definitions, one pair of groups at a time."""
    batch, heads = weights.shape[:2]
    mass, pairwise = (torch.zeros(batch, heads, groups, groups, dtype=torch.float64) for _ in range(2))
    for b in range(batch):
        for g in range(groups):
            for h in range(groups):
                block = weights[b][:, rows[b] == g][:, :, columns[b] == h]
                pairs = int(allowed[b, 0][rows[b] == g][:, columns[b] == h].sum())
                mass[b, :, g, h] = block.sum(dim=(1, 2)) / max(int((rows[b] == g).sum()), 1)
                pairwise[b, :, g, h] = block.sum(dim=(1, 2)) / pairs if pairs else float("nan")
    return mass, pairwise


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 3, 11])
def test_the_kernel_form_equals_the_definition(
    kv_heads: int, groups: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Also with more groups than a head is wide (8), which takes several calls."""
    generator = torch.Generator().manual_seed(groups)
    batch, heads, keys, count, width = 2, 4, 20, 13, 8
    sizes = ((heads, count), (kv_heads, keys))
    query, key = (torch.randn(batch, h, n, width, generator=generator).to(dtype) for h, n in sizes)
    columns = torch.randint(-1, groups, (batch, keys), generator=generator)
    rows = columns[:, keys - count :]
    allowed = torch.ones(keys, keys, dtype=torch.bool).tril()[keys - count :] & (columns != -1)[:, None, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(values: Tensor) -> Tensor:
        return sdpa(query, key, values, attn_mask=allowed, enable_gqa=True).transpose(1, 2)

    mass, pairwise, number, visible = group_mass(
        attend, rows, columns, groups, shape=(kv_heads, keys, width), dtype=dtype
    )
    expected, each = by_loops(dense(query, key, allowed), allowed, rows, columns, groups)
    torch.testing.assert_close(mass[:, :, :groups].double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(pairwise[:, :, :groups].double(), each, atol=tolerance, rtol=0, equal_nan=True)
    assert torch.equal(number[:, :groups], torch.stack([(rows == g).sum(dim=1) for g in range(groups)], dim=1))
    assert (number[:, groups] == 1).all()
    assert (visible >= 0).all()


def recorded(model: Any, inputs: dict[str, Tensor], pruner: Any = None, steps: int = 3, **more: Any) -> Any:
    """Trace, run and outputs of a decode with the probe on; the probe inside or outside the prune block."""
    probe = AttentionMass(**{"groups": ROLES, **more})
    if pruner is None:
        with record(model, probe) as trace:
            return trace, None, decode(model, inputs, steps)
    with record(model, probe) as trace, prune(model, pruner) as run:
        return trace, run, decode(model, inputs, steps)


def eager_masses(model: Any, inputs: dict[str, Tensor], hidden: Tensor | None, trace: MassTrace) -> dict[int, Tensor]:
    """Layer → masses of the prompt from the weights that an eager model returns, dropped columns masked."""
    names = trace.spec.names
    group = torch.full(inputs["input_ids"].shape, -1)
    for row, (ids, mask) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)):
        visual = (ids == IMAGE).nonzero()[:, 0]
        group[row, mask] = names.index("before")
        group[row, int(visual[-1]) + 1 :] = names.index("after")
        group[row, visual] = names.index("visual")
        group[row, int(mask.int().argmax())] = names.index("bos")
        for name, members in ROLES.items():
            group[row, visual[torch.from_numpy(members[row])]] = names.index(name)
    out = {}
    for layer in range(4):
        if hidden is not None and layer >= 2:
            with mask_drop(model, hidden, layer=2), torch.no_grad():
                weights = model(**inputs, output_attentions=True).attentions[layer]
            gone = hidden
        else:
            with torch.no_grad():
                weights = model(**inputs, output_attentions=True).attentions[layer]
            gone = torch.zeros_like(group, dtype=torch.bool)
        here = torch.where(gone, -1, group)
        allowed = torch.ones(here.shape[1], here.shape[1], dtype=torch.bool).tril()[None, None]
        allowed = allowed & (here != -1)[:, None, None]
        out[layer] = by_loops(weights.double(), allowed, here, here, len(names))[0]
    return out


@pytest.mark.parametrize("images", [ONE, THREE], ids=["one", "padded"])
@pytest.mark.parametrize("pruner", [None, DART(keep=6, layer=2), Uneven(layer=2)], ids=["full", "dart", "ragged"])
@pytest.mark.parametrize("kv_heads", [None, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masses_of_a_model_equal_its_own_dense_weights(
    images: tuple[int, ...], pruner: Any, kv_heads: int | None, attention: str
) -> None:
    model, inputs = small_llava(kv_heads=kv_heads, attention=attention), batch(images)
    trace, run, _ = recorded(model, inputs, pruner)
    model.set_attn_implementation("eager")
    expected = eager_masses(model, inputs, None if run is None else hidden_columns(model, inputs, run), trace)
    for layer, (mass, _, number, _) in trace.passes[0].layers.items():
        here = torch.from_numpy(mass[:, :, :-1]).double()
        present = torch.from_numpy(number[:, :-1] > 0)[:, None, :, None].expand_as(here)
        # a whole model behind each side, in float32; the next test has the same queries and keys on both
        torch.testing.assert_close(here[present], expected[layer][present], atol=3e-6, rtol=0)
    table = trace.table(heads=True)
    sums = table.groupby(["sample", "step", "layer", "head", "query"], sort=False)["mass"].sum()
    assert np.allclose(sums, 1, atol=1e-6), sums[~np.isclose(sums, 1, atol=1e-6)]
    assert (table.loc[table["key"] == "none", "mass"] == 0).all()


@contextmanager
def kernel(name: str) -> Iterator[Any]:
    """A model with that attention kernel."""
    with ExitStack() as stack:
        stack.enter_context(emulated_flash() if name == FLASH else nullcontext())
        stack.enter_context(uncompiled_flex() if name == "flex_attention" else nullcontext())
        model = small_llava(kv_heads=2, attention="sdpa" if name == FLASH else name)
        if name == FLASH:
            model.model.language_model.config._attn_implementation_internal = name
        yield model


@pytest.mark.parametrize("pruner", [None, DART(keep=6, layer=2), Uneven(layer=2)], ids=["full", "dart", "ragged"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", FLASH])
def test_masses_are_those_of_the_queries_and_keys_that_the_kernel_got(
    attention: str, pruner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads, a padded batch, prefill and decode: dense float64 attention of the same numbers says the same."""
    calls: list[Captured] = []
    worst: list[float] = []
    observe, measure = recording._Recorder.observe, recording.group_mass

    def observed(self: Any, layer: int, captured: Captured) -> None:
        calls.append(captured)
        observe(self, layer, captured)

    def measured(attend: Any, rows: Tensor, columns: Tensor, groups: int, **more: Any) -> Any:
        found = measure(attend, rows, columns, groups, **more)
        query, key = calls[-1].query, calls[-1].key
        count, keys = query.shape[2], key.shape[2]
        allowed = torch.ones(keys, keys, dtype=torch.bool).tril()[keys - count :] & (columns != -1)[:, None, None]
        expected, each = by_loops(dense(query, key, allowed), allowed, rows, columns, groups)
        present = (found[2][:, :groups] > 0)[:, None, :, None].expand_as(expected)
        mass, pairwise = (value[:, :, :groups].double() for value in found[:2])
        worst.append(float((mass - expected)[present].abs().max()))
        worst.append(float((pairwise - each).nan_to_num(nan=0.0).abs().max()))
        assert torch.equal(pairwise.isnan(), each.isnan())
        return found

    monkeypatch.setattr(recording._Recorder, "observe", observed)
    monkeypatch.setattr(recording, "group_mass", measured)
    with kernel(attention) as model:
        recorded(model, batch(THREE), pruner, steps=2)
    assert len(worst) == 2 * 3 * 4  # mass and pairwise score of a prompt and two steps in four layers
    assert max(worst) <= 2e-6, max(worst)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_is_not_touched_by_a_probe(attention: str) -> None:
    model, inputs = small_llava(attention=attention), batch(THREE)
    plain = decode(model, inputs, 4)
    _, _, probed = recorded(model, inputs, steps=4)
    assert torch.equal(plain.prompt, probed.prompt) and torch.equal(plain.tokens, probed.tokens)
    with prune(model, Uneven(layer=2)):
        pruned = decode(model, inputs, 4)
    _, _, both = recorded(model, inputs, Uneven(layer=2), steps=4)
    assert torch.equal(pruned.prompt, both.prompt)
    assert all(torch.equal(a, b) for a, b in zip(pruned.logits, both.logits, strict=True))
    assert not any(name.startswith("_dart_lab") for module in model.modules() for name in vars(module))


def test_decode_steps_look_back_at_the_groups_of_the_prompt() -> None:
    """Generated tokens see the prompt's groups, and each other; counts of keys are those that are left."""
    model, inputs = small_llava(), batch(ONE)
    trace, run, _ = recorded(model, inputs, DART(keep=6, layer=2), steps=3)
    assert run is not None
    table = trace.table().query("query == 'generated'").set_index(["step", "layer", "key"])
    kept = run.kept[0]
    for step in (1, 2, 3):
        for layer in range(4):
            here = table.loc[(step, layer)]["keys"]
            assert here["generated"] == step
            assert here["dead"] == (5 if layer < 2 else np.isin(kept, ROLES["dead"][0]).sum())
            visual = here[["dead", "sink", "none", "visual"]].sum()
            assert visual == (TOKENS if layer < 2 else 6)
    assert [each.step for each in trace.passes] == [0, 1, 2, 3]
    assert trace.passes[0].token_ids.tolist() == inputs["input_ids"].tolist()
    assert all(each.token_ids.shape == (1, 1) for each in trace.passes[1:])


def test_without_a_cache_the_same_masses_come_out() -> None:
    """Each step runs the whole prompt again; the newest token's masses are those of the cached step."""
    model, inputs = small_llava(), batch(ONE)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "suppress_tokens": [IMAGE]}
    del inputs["position_ids"]
    tables = []
    for use_cache in (True, False):
        with record(model, AttentionMass(groups=ROLES)) as trace, prune(model, DART(keep=6, layer=2)):
            model.generate(**inputs, **options, use_cache=use_cache)
        assert [each.samples for each in trace.passes] == [[0]] * 4
        tables.append(trace.table().query("query == 'last'").set_index(["step", "layer", "key"])["mass"])
    assert tables[0].index.equals(tables[1].index)
    assert np.allclose(tables[0], tables[1], atol=1e-6)


def test_beams_and_rows_of_a_batch_are_told_apart() -> None:
    images = (1, 1, 1)  # one picture each: older releases mix up the pictures of several under beams
    model, inputs = small_llava(), batch(images)
    del inputs["position_ids"]
    with record(model, AttentionMass(layers=[1])) as trace:
        model.generate(**inputs, num_beams=2, max_new_tokens=3, do_sample=False, suppress_tokens=[IMAGE])
    assert trace.passes[0].samples == [0, 0, 1, 1, 2, 2]
    single = alone(batch(images), images, 1)
    with record(model, AttentionMass(layers=[1])) as own, torch.no_grad():
        model(**single)
    theirs = trace.table().query("sample == 1 and row == 2 and step == 0")["mass"].to_numpy()
    assert np.allclose(theirs, own.table()["mass"], atol=1e-5)


def test_renormalised_masses_share_what_the_named_groups_get() -> None:
    model, inputs = small_llava(), batch(ONE)
    visual = ("dead", "sink", "none", "visual")
    trace, _, _ = recorded(model, inputs, steps=0, renormalise=visual)
    plain, _, _ = recorded(model, inputs, steps=0)
    ours = trace.table(heads=True).query("query == 'last'")
    inside = ours[ours["key"].isin(visual)]
    assert np.allclose(inside.groupby(["layer", "head"])["mass"].sum(), 1, atol=1e-6)
    assert ours.loc[~ours["key"].isin(visual), "mass"].isna().all()
    raw = plain.table(heads=True).query("query == 'last'")
    share = raw[raw["key"].isin(visual)]["mass"] / raw[raw["key"].isin(visual)].groupby(["layer", "head"])[
        "mass"
    ].transform("sum")
    assert np.allclose(inside["mass"], share, atol=1e-6)


def test_half_precision_stays_close() -> None:
    model, inputs = small_llava(), batch(ONE)
    full, _, _ = recorded(model, inputs, steps=0, layers=[0])
    half, _, _ = recorded(model.to(torch.bfloat16), {**inputs, "pixel_values": inputs["pixel_values"].bfloat16()},
                          steps=0, layers=[0])  # fmt: skip
    assert np.abs(full.table(heads=True)["mass"] - half.table(heads=True)["mass"]).max() < 5e-2
    sums = half.table(heads=True).groupby(["head", "query"])["mass"].sum()
    assert np.allclose(sums, 1, atol=5e-3)


def test_bad_probes_are_refused_in_words() -> None:
    model, inputs = small_llava(), batch(ONE)
    with pytest.raises(DartLabError, match="name of a fixed group"):
        AttentionMass(groups={"visual": [[0]]})
    with pytest.raises(DartLabError, match="groups='dead': give name"):
        AttentionMass(groups="dead")  # type: ignore[arg-type]
    with pytest.raises(DartLabError, match="Did you mean 'dead'"):
        AttentionMass(groups={"dead": [[0]]}, renormalise=("deda",))
    with pytest.raises(DartLabError, match="layers 0 to 3"), record(model, AttentionMass(layers=[4])):
        pass
    with pytest.raises(DartLabError, match="no probe"), record(model, "mass"):  # type: ignore[arg-type]
        pass
    for groups, words in (
        ({"dead": [[99]]}, "has token 99"),
        ({"dead": [[1]], "sink": [[1]]}, "in another group too"),
        ({"dead": []}, "for 0 samples"),
    ):
        with pytest.raises(DartLabError, match=words), record(model, AttentionMass(groups=groups)):
            model(**inputs)
    with torch.no_grad():
        model(**inputs)  # nothing was left behind
    assert not any(name.startswith("_dart_lab") for module in model.modules() for name in vars(module))

"""The evidence of a rolebook as a picture: where its cuts lie, and how high the sinks of text spike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dart_lab.displays.curves import wrapped
from dart_lab.displays.roles import ROLE_COLOURS
from dart_lab.displays.style import CHANCE, PALETTE, house_style

_SIZE = (11.0, 5.2)


def draw_evidence(facts: Mapping[str, Any]) -> Figure:
    """Three panels: norms in the tower, similarity to tokens of other pictures, and the loudest channel by layer.

    Args:
        facts: `Rolebook.facts()`.
    """
    pool, why = facts["pool"], facts["evidence"]["why"]
    with house_style():
        figure = Figure(figsize=_SIZE)
        norms, similar, spikes = figure.subplots(1, 3)
        figure.subplots_adjust(left=0.07, right=0.99, top=0.86, bottom=0.42, wspace=0.3)
        cut = facts["vit_cut"]
        _histogram(norms, facts["evidence"]["histograms"]["log vit norm"], None if cut is None else float(np.log(cut)),
                   "vit-sink")  # fmt: skip
        norms.set(title="Norm before the projector", xlabel="ln of the L2 norm", ylabel="visual tokens")
        _histogram(similar, facts["evidence"]["histograms"]["foreign similarity"], facts["dead_cut"], "dead")
        space = ", less the mean token" if pool["centred"] else ""
        similar.set(title="Repeated in other pictures", xlabel=f"foreign similarity (cosine{space})",
                    ylabel="visual tokens")  # fmt: skip
        _spikes(spikes, facts["evidence"]["text sinks"], bool(facts["channels"]))
        figure.suptitle(f"What the roles were read from: {pool['pictures']} pictures of {pool['name']}")
        said = "  ".join(f"{role}: {why[role]}." for role in ("vit-sink", "dead", "llm-sink") if role in why)
        figure.text(0.02, 0.02, wrapped(said, 165), fontsize=7.5, va="bottom")
    return figure


def _histogram(axes: Axes, bins: Mapping[str, Any], cut: float | None, role: str) -> None:
    counts = np.asarray(bins["counts"], dtype=float)
    if not len(counts):
        axes.text(0.5, 0.5, "nothing to tell", ha="center", va="center", transform=axes.transAxes)
        return
    edges = (bins["first"] + np.arange(len(counts) + 1)) * bins["width"]
    axes.stairs(np.maximum(counts, 0.5), edges, fill=True, color=CHANCE, baseline=0.5)
    axes.set_yscale("log")
    if cut is not None:
        axes.axvline(cut, color=ROLE_COLOURS[role], linestyle="--", label=f"from here: {role}")
    else:
        axes.plot([], [], " ", label=f"no {role} is told by this")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, -0.42))


def _spikes(axes: Axes, profile: Mapping[str, Any], found: bool) -> None:
    layers = profile["layers"]
    name = "sinks of text" if found else "<bos> and delimiters"
    axes.plot(layers, profile["sinks"], color=PALETTE[3], marker="o", markersize=3, label=f"{name}, channel")
    if profile["ordinary"]:
        axes.plot(layers, profile["ordinary"], color=PALETTE[0], marker="s", markersize=3,
                  label="largest of ordinary text, channel")  # fmt: skip
    axes.plot(layers, profile["median"], color=PALETTE[6], linestyle=":", label="median of all, any channel")
    axes.set_yscale("log")
    axes.set(title=f"Channel {profile['channel']} on text alone", xlabel="input of decoder layer", ylabel="|x|")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, -0.62))

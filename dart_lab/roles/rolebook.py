"""`Rolebook`: what a pool of pictures taught about the roles of one checkpoint's visual tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dart_lab.errors import DartLabError
from dart_lab.files import write_files
from dart_lab.roles.clusters import Clusters
from dart_lab.roles.identity import identity_of
from dart_lab.roles.labels import ALIVE, DEAD, LLM_SINK, ROLES, VIT_SINK, TokenRoles
from dart_lab.roles.rule import ATTENTION, COLUMN_SUMS, EFFECT, RECEIVED, VOCABULARY, Rule
from dart_lab.roles.rules import Definition, check_definition
from dart_lab.vlm.leave_one_out import leave_one_out
from dart_lab.vlm.states import VisualStates, visual_states

FORMAT = 2  # counts up when a book's content changes its meaning
_META, _MEAN, _CLUSTERS = "rolebook", "mean", "clusters"


@dataclass(frozen=True, eq=False, kw_only=True)
class Rolebook:
    """Calibrated on a pool of pictures; applies to the checkpoint it was fitted on and to no other.

    Attributes:
        identity: hashes of weights and tokenizer, and the picture settings.
        pool: where the pictures came from, how many, the seed, and every parameter of the fit.
        vit_cut: norm of the vision feature from which a token is a ViT sink; None: this encoder has none.
        channels: channels on which sinks of the language model spike; empty: it has none that spike.
        layers: the decoder layers whose inputs are looked at for spikes.
        energy: share of a token's energy on one sink channel that makes a spike.
        often: share of `layers` in which it must spike.
        dead_cut: foreign similarity that separates dead tokens of the pool; None: there are none.
        dead_cosine: cosine to the nearest dead centroid from which a token is dead; None: there are none.
        centroids: role → `(k, channels)` unit vectors in the space that enters decoder layer 0, or in that space less
            `mean`; a role that was not found has none.
        mean: `(channels,)` what is subtracted before tokens are compared; None: nothing (`Fit.centred`).
        words: role → the vocabulary id nearest to each of its centroids.
        prevalence: role → value, low, high: share of the pool's tokens by primary role, 95 % over pictures.
        evidence: why the cuts are where they are: sentences, precision and recall of the rules that need no run of the
            language model, stability, histograms; plain JSON values.
        vit_channels: channels of the vision features on which the tokens with the largest norms spike; empty: they do
            not; None: an older fit did not look.
        clusters: of the pool's tokens that are no sinks, in the space of the centroids; None: an older fit made none.
        table: `(vocabulary, channels)`, only while the rule "lens" is used; not saved.
    """

    identity: Mapping[str, Any]
    pool: Mapping[str, Any]
    vit_cut: float | None
    channels: tuple[int, ...]
    layers: tuple[int, ...]
    energy: float
    often: float
    dead_cut: float | None
    dead_cosine: float | None
    centroids: Mapping[str, Tensor]
    words: Mapping[str, list[int]]
    prevalence: Mapping[str, Mapping[str, float]]
    evidence: Mapping[str, Any] = field(default_factory=dict)
    mean: Tensor | None = None
    vit_channels: tuple[int, ...] | None = None
    clusters: Clusters | None = None
    table: Tensor | None = field(default=None, repr=False)

    def assign(
        self,
        vlm: Any,
        inputs: Mapping[str, Any],
        *,
        definition: Definition | None = None,
        when: Literal["run", "input"] = "run",
    ) -> list[TokenRoles]:
        """The roles of every visual token of a batch.

        Args:
            vlm: the `VLM` that the book was fitted on.
            inputs: what `vlm.prepare` returned.
            definition: role → name of a rule, or the rule with numbers of one's own; see `dart_lab.roles.rules.RULES`.
                Default: those of the fit.
            when: "run" (default): LLM sinks are seen in an unpruned run up to 0.6 of the layers. "input": they are
                guessed from the vectors that enter decoder layer 0, by the nearest centroid; `evidence` says how well.

        Returns:
            One entry a sample.

        Raises:
            DartLabError: no visual tokens, an unknown rule, or a rule that this model cannot serve.
        """
        chosen = check_definition(definition, when)
        needs_words = any(VOCABULARY in rule.needs for rule in chosen.values())
        book = self.with_table(vlm) if needs_words and self.table is None else self
        return [book._labels(one, chosen) for one in book.states(vlm, inputs, chosen.values())]

    def states(self, vlm: Any, inputs: Mapping[str, Any], rules: Collection[Rule]) -> list[VisualStates]:
        """What these rules read of a batch, one entry a sample; arguments and errors as `assign`."""
        needs = frozenset[str]().union(*(rule.needs for rule in rules))
        layers = sorted({layer for rule in rules for layer in rule.layers(self)})
        found = visual_states(
            vlm, inputs, layers, attention=ATTENTION in needs, received=RECEIVED in needs,
            column_sums=COLUMN_SUMS in needs,
        )  # fmt: skip
        if EFFECT in needs:
            effects = leave_one_out(vlm, inputs)
            found = [dataclasses.replace(one, effect=own) for one, own in zip(found, effects, strict=True)]
        return found

    def roles_of(self, states: VisualStates, *, definition: Definition | None = None) -> TokenRoles:
        """The roles of one sample's visual tokens, from their states: with the inputs of `layers`, or without any."""
        ran = states.layers or states.effect is not None or not self.layers
        when: Literal["run", "input"] = "run" if ran else "input"
        return self._labels(states, check_definition(definition, when))

    def _labels(self, states: VisualStates, chosen: Mapping[str, Rule]) -> TokenRoles:
        flags: dict[str, np.ndarray] = {}
        scores: dict[str, np.ndarray] = {}
        for role in ROLES[:-1]:
            flag, found = chosen[role].flags(self, states)
            flags[role] = flag.cpu().numpy()
            scores |= {name: score.float().cpu().numpy() for name, score in found.items()}
        return TokenRoles(flags=flags, scores=scores)

    def with_table(self, vlm: Any) -> Rolebook:
        """The same book with the model's vocabulary at hand, which the rule "lens" compares with."""
        return dataclasses.replace(self, table=vocabulary(vlm, centred=self.mean is not None))

    def centre(self, embeds: Tensor) -> Tensor:
        """Tokens `(n, channels)` in the space of the centroids, float32."""
        return embeds.float() if self.mean is None else embeds.float() - self.mean.to(embeds.device)

    def save(self, path: str | Path) -> Path:
        """Write the book as one safetensors file: centroids as tensors, all else as JSON in its header.

        Raises:
            DartLabError: the file cannot be written.
        """
        from safetensors.torch import save

        path = Path(path)
        tensors = {role: rows.contiguous() for role, rows in sorted(self.centroids.items())}
        if self.mean is not None:
            tensors[_MEAN] = self.mean.contiguous()
        if self.clusters is not None:
            tensors[_CLUSTERS] = self.clusters.centroids.contiguous()
        if not tensors:
            tensors = {"none": torch.zeros(0)}
        write_files({path: save(tensors, {_META: json.dumps(self.facts(), ensure_ascii=False)})})
        return path

    def facts(self) -> dict[str, Any]:
        """Everything but the centroids, as plain JSON values."""
        return {
            "format": FORMAT, "identity": self.identity, "pool": self.pool, "vit_cut": self.vit_cut,
            "channels": list(self.channels), "layers": list(self.layers), "energy": self.energy, "often": self.often,
            "dead_cut": self.dead_cut, "dead_cosine": self.dead_cosine, "words": self.words,
            "prevalence": self.prevalence, "evidence": self.evidence,
            "vit_channels": None if self.vit_channels is None else list(self.vit_channels),
            "reach": None if self.clusters is None else self.clusters.reach,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """What the book says, in words: one line a finding."""
        why, share = self.evidence["why"], self.prevalence
        sizes = {role: len(rows) for role, rows in self.centroids.items()}
        out = [f"pool: {self.pool['pictures']} pictures of {self.pool['name']}, {self.pool['tokens']} visual tokens"]
        if self.pool["skipped"]:
            out.append(f"left out: {len(self.pool['skipped'])} pictures that could not be read or run")
        for role in ROLES:
            cell = share[role]
            note = f"; {why[role]}" if role in why else ""
            out.append(
                f"{role}: {cell['value']:.2%} [{cell['low']:.2%}, {cell['high']:.2%}], "
                f"{sizes.get(role, 0)} centroids{note}"
            )
        if "vit channels" in why:
            out.append(f"channels of the vision tower: {why['vit channels']}")
        for name, cell in self.evidence["rules without a run"].items():
            out.append(f"{name} known without a run: precision {cell['precision']:.2f}, recall {cell['recall']:.2f}")
        if 0 < share[VIT_SINK]["per picture"] < 1 or 0 < share[LLM_SINK]["per picture"] < 1:
            out.append("warning: less than one sink a picture; what is said of that group rests on few tokens")
        return out


def vocabulary(vlm: Any, *, centred: bool = False) -> Tensor:
    """`(vocabulary, channels)` float32: the input embeddings, `centred` less their mean; special and unused rows are
    zero.
    """
    table: Tensor = vlm.model.get_input_embeddings().weight.detach().float().clone()
    tokenizer = vlm.processor.tokenizer
    table[[number for number in tokenizer.all_special_ids if number < len(table)]] = 0
    table[len(tokenizer) :] = 0
    if centred:
        used = table.abs().amax(dim=1) > 0
        table[used] -= table[used].mean(dim=0)
    return table


def load_rolebook(path: str | Path, vlm: Any | None = None) -> Rolebook:
    """Read a book and, where a model is given, make sure that it is the one that the book is about.

    Args:
        path: file that `Rolebook.save` or ``dart-lab roles fit`` wrote.
        vlm: the loaded model; None: do not compare (to look at the book alone).

    Raises:
        DartLabError: no such file, another kind of file, a book of another version, or of another model.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise DartLabError(f"{path}: no such file; make a rolebook with dart-lab roles fit")
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})[_META])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise DartLabError(f"{path} is no rolebook; make one with dart-lab roles fit") from error
    if facts.pop("format", None) != FORMAT:
        raise DartLabError(f"{path} was written by another version of dart-lab; fit it again")
    tensors.pop("none", None)
    facts |= {"channels": tuple(facts["channels"]), "layers": tuple(facts["layers"])}
    if facts.get("vit_channels") is not None:
        facts["vit_channels"] = tuple(facts["vit_channels"])
    mean, rows, reach = tensors.pop(_MEAN, None), tensors.pop(_CLUSTERS, None), facts.pop("reach", None)
    clusters = None if rows is None else Clusters(rows, reach)
    book = Rolebook(centroids=tensors, mean=mean, clusters=clusters, **facts)
    if vlm is not None:
        check_identity(book, vlm, path)
    return book


def check_identity(book: Rolebook, vlm: Any, path: str | Path = "the rolebook") -> None:
    """Raise `DartLabError` unless the book was fitted on this model, tokenizer and picture settings."""
    now = identity_of(vlm)
    for part, what in (("weights", "other weights"), ("tokenizer", "another tokenizer")):
        if book.identity[part] != now[part]:
            raise DartLabError(
                f"{path} was fitted on {what} ({book.identity[part][:12]}…, the model has {now[part][:12]}…); "
                "fit a rolebook on this model"
            )
    old, new = book.identity["image"], now["image"]
    differ = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if differ:
        name = differ[0]
        raise DartLabError(
            f"{path} was fitted with {name}={old.get(name)}, the processor has {new.get(name)}; "
            "prepare pictures as the book says, or fit it again"
        )


__all__ = ["ALIVE", "DEAD", "FORMAT", "Rolebook", "check_identity", "load_rolebook"]

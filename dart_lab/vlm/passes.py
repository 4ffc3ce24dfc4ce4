"""Follow a model's forward passes: which tokens come in, which of them are visual, what the cache already holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dart_lab.errors import DartLabError
from dart_lab.pruners.reduction import PAD
from dart_lab.vlm import compat
from dart_lab.vlm.cuts import Cut
from dart_lab.vlm.encoded import DIGEST, Encoded
from dart_lab.vlm.families import Family
from dart_lab.vlm.families.base import placed
from dart_lab.vlm.families.minicpm import marked_ids
from dart_lab.vlm.families.videos import VIDEO_PIXELS, video_token
from dart_lab.vlm.layout import TokenLayout, groups, unknown_place
from dart_lab.vlm.role_signals import RoleSignals
from dart_lab.vlm.run import Sample
from dart_lab.vlm.tap import Captured

PICTURES_SHOWN = 4  # samples of a block whose pictures are kept for display


@dataclass(frozen=True, eq=False)
class Held:
    """A shortened layer after a pass: its `columns` `(batch, slots)`, whether some slots are empty (`hollow`), and how
    far renumbered positions lag behind, `(batch,)`, before the pass (`shift`) and after it (`later_shift`).
    """

    columns: Tensor
    hollow: bool
    shift: Tensor | None
    later_shift: Tensor | None


@dataclass(eq=False)
class Pass:
    """One forward pass of the decoder layers.

    `past` columns were cached before; `length` tokens come in; `visual` `(batch, length)` marks the visual ones (None:
    there are none); `attended` `(batch, past + length)` marks real tokens (None: all). `expand`: rows
    of the batch that belong to one sample (beams, several returned sequences). `held`: what each shortened layer's
    cache holds after this pass. `number` `(batch, length)`: which of the sample's visual tokens each one is, where some
    are gone already. `entered`: the input of layers whose input a method asks for. `ids` `(batch, length)`: its token
    ids, where they are known. `picture_rows`: rows of the tower's input that each picture of the batch occupies.
    """

    past: int
    length: int
    visual: Tensor | None
    attended: Tensor | None
    samples: list[Sample] = field(default_factory=list)
    layout: TokenLayout | None = None
    step: int = 0
    expand: int = 1
    decided: set[int] = field(default_factory=set)
    cuts: dict[int, Cut] = field(default_factory=dict)
    captured: dict[int, Captured] = field(default_factory=dict)
    number: Tensor | None = None
    entered: dict[int, Tensor] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    memo: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    ids: Tensor | None = None
    picture_rows: list[range] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Columns after this pass."""
        return self.past + self.length

    def cut_at(self, layer: int) -> Cut | None:
        """The cut that layer `layer` runs under."""
        reached = [k for k in self.cuts if k <= layer]
        return self.cuts[max(reached)] if reached else None


@dataclass(eq=False)
class Prompt:
    """The last prompt that was run from its beginning; recognises the same prompt run again with more tokens behind."""

    ids: Tensor
    pixels: Tensor | None
    visual: Tensor
    current: Pass

    def continues(self, ids: Tensor | None, pixels: Tensor | None) -> bool:
        """True if `ids` (token ids or embeddings) are this prompt and something more, on the same pictures."""
        if ids is None or ids.dim() != self.ids.dim() or ids.shape[0] != self.ids.shape[0]:
            return False
        before = self.ids.shape[1]
        if ids.shape[1] <= before or not torch.equal(ids[:, :before], self.ids):
            return False
        return pixels is self.pixels or (
            pixels is not None and self.pixels is not None and torch.equal(pixels, self.pixels)
        )


class PassWatcher:
    """Hooks that keep `current` (the running `Pass`) up to date; subclasses act in the decoder layers.

    Args:
        model: any supported Hugging Face model object, or a decoder together with `visual`.
        family: the adapter; None for a decoder without pictures.
        visual: `(batch, sequence)` bool, marks the visual tokens of callers that bring `inputs_embeds`.
    """

    def __init__(self, model: Any, family: Family | None, visual: Tensor | None) -> None:
        self.model, self.family, self._given = model, family, visual
        self.roles: RoleSignals | None = None
        self.text = compat.text_model(model)
        self.current: Pass | None = None
        self.prompt: Prompt | None = None
        self._ids: Tensor | None = None
        self._inputs: dict[str, Any] = {}
        self._prompt_inputs: dict[str, Any] = {}
        self._encoded = Encoded()
        self._expand = 1
        self._shown = 0
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Hang the hooks in."""
        for module in (self.model, getattr(self.model, "model", None)):
            if isinstance(module, nn.Module) and module is not self.text:
                self._hook(module.register_forward_pre_hook(self._note_ids, with_kwargs=True))
        self._hook(self.text.register_forward_pre_hook(self._begin, with_kwargs=True))
        for tower in compat.vision_towers(self.model):
            self._hook(tower.register_forward_pre_hook(self._encoded.note, with_kwargs=True))
        self._watch_generate()

    def detach(self) -> None:
        """Take every hook out again; whatever others hung in stays."""
        while self._undo:
            self._undo.pop()()

    def take_prompt(self, other: PassWatcher) -> None:
        """Know the prompt and the pictures that another watcher of this model saw, as if they had come by here."""
        self.prompt, self._encoded.pixels = other.prompt, other._encoded.pixels

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _watch_generate(self) -> None:
        """Learn how often `generate` repeats each sample (beams, returned sequences); refuse a prompt in chunks; in
        assisted decoding, let no candidate run with the prompt.
        """

        def note(*args: Any, **kwargs: Any) -> None:
            self._expand = int(kwargs.get("expand_size", args[0] if args else 1))

        def note_inputs(*args: Any, **kwargs: Any) -> None:
            self._encoded.expect()
            named = next((x for x in (*args, *kwargs.values()) if isinstance(x, dict)), {})
            self._prompt_inputs = {  # releases that encode pictures ahead of the prompt keep grids from `forward`
                name: x for name, x in named.items() if isinstance(x, Tensor) and not x.is_floating_point()
            }
            if isinstance(named.get(VIDEO_PIXELS), Tensor):  # of which the shape alone is looked at
                self._prompt_inputs[VIDEO_PIXELS] = named[VIDEO_PIXELS].to("meta")

        runner = compat.generating_model(self.model)
        self._precede(runner, "_prepare_model_inputs", note_inputs)
        self._precede(runner, "_expand_inputs_for_generation", note)
        for name in compat.PREFILL_METHODS:
            self._precede(runner, name, compat.refuse_chunks)
        self._surround(runner, compat.ASSISTANT_METHOD, lambda method: lambda *args, **kwargs: compat.prompt_first(
            method(*args, **kwargs)
        ))
        self._precede(self.model, compat.EMBEDDING_METHOD, self._note_data)

    def _precede(self, owner: Any, name: str, act: Callable[..., None]) -> None:
        """Call `act` with the same arguments before the method `name` of `owner`, if it has one."""

        def around(method: Callable[..., Any]) -> Callable[..., Any]:
            def both(*args: Any, **kwargs: Any) -> Any:
                act(*args, **kwargs)
                return method(*args, **kwargs)

            return both

        self._surround(owner, name, around)

    def _surround(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put what `around` makes of it in the place of the method `name` of `owner`, if it has one."""
        method = getattr(owner, name, None)
        if method is None or name in vars(owner):
            return
        setattr(owner, name, around(method))
        self._undo.append(lambda: vars(owner).pop(name, None))

    def _note_data(self, data: Mapping[str, Any]) -> None:
        """The same as `_note_ids` for a model that takes its inputs as one dict, its pictures as views of any size."""
        self._ids, self._inputs = marked_ids(data), dict(data)
        self._encoded.note_views([view for own in data.get("pixel_values") or () for view in own])
        self._check_whole(self._ids, self._inputs)

    def _note_ids(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._ids = ids if isinstance(ids, Tensor) else None
        if module is self.model or not self._inputs:  # the inner model is not given everything
            given = {name: x for name, x in kwargs.items() if x is not None}
            # inputs of `generate` come once a sample, those of `forward` once a beam
            self._inputs = given | self._prompt_inputs if self._expand > 1 else self._prompt_inputs | given
            if any(name.startswith("pixel_values") for name in given):  # they are about to be encoded
                self._encoded.expect()
        if module is self.model and self._ids is not None and self._ids.shape[1] > 1:
            self._check_whole(self._ids, self._inputs)

    def _check_whole(self, ids: Tensor, inputs: dict[str, Any]) -> None:
        """Raise the adapter's error for a prompt that was cut inside an image before the model stumbles over it."""
        if self.family is None or self._given is not None:
            return
        if self.prompt is not None and self.prompt.continues(ids, self._encoded.pixels):
            return
        first = 0
        ids = ids[:: self._expand]
        inputs = {**inputs, "input_ids": ids}
        visual = self.family.visual_mask(self.model, ids).cpu().numpy()
        for own, row in zip(ids.cpu().numpy(), visual, strict=True):
            first += placed(self.family, self.model, own, np.flatnonzero(row), inputs, first)[1]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids, self._ids = self._ids, None
        given, self._inputs = self._inputs, {}
        self._encoded.expect()
        embeds = kwargs.get("inputs_embeds")
        if ids is not None and embeds is not None and len(ids) != len(embeds):  # noted before beams were made
            ids = ids.repeat_interleave(len(embeds) // len(ids), dim=0)
        if ids is None:
            ids = kwargs.get("input_ids", args[0] if args else None)
        content: Tensor | None = embeds if ids is None else ids
        if content is None:
            self.current = None
            return
        cache, length = compat.cache_of(kwargs), content.shape[1]
        past = self.past(kwargs)
        attended = self.attended(kwargs, past + length)
        visual = self._visual(ids, content, past)
        self.current = now = Pass(past, length, visual, attended, expand=self._expand, ids=ids)
        self._expand = 1  # only the pass that follows an expansion has its rows repeated; later ones have no new prompt
        if length == 1 and past:
            self._refuse_right_padding(now)
        if visual is None:
            return
        if cache is None and self.prompt is not None and self.prompt.continues(content, self._encoded.pixels):
            first = self.prompt.current
            now.samples, now.layout, now.expand = first.samples, first.layout, first.expand
            now.step = self.prompt.current.step + content.shape[1] - self.prompt.ids.shape[1]
            self.continue_prompt(now)
        else:
            self._place(now, visual, ids, {**given, **kwargs})
            if past == 0:
                self.prompt = Prompt(content, self._encoded.pixels, visual, now)

    def past(self, kwargs: dict[str, Any]) -> int:
        """Columns that came before this pass, from the text model's keyword arguments."""
        return compat.cached_length(kwargs)

    def attended(self, kwargs: dict[str, Any], total: int) -> Tensor | None:
        """`(batch, total)` bool: which columns, up to the end of this pass, are real tokens; None: it is not said."""
        return compat.real_tokens(kwargs.get("attention_mask"), total)

    def marked(self, now: Pass) -> Tensor:
        """`(batch, length)` bool: the visual tokens of a pass that has some. Raises `DartLabError` if it has none."""
        if now.visual is None:
            raise DartLabError("there is no prompt with visual tokens in this pass")
        return now.visual

    def sizes(self, now: Pass, device: torch.device) -> Tensor:
        """`(batch,)` int64: visual tokens of each row's sample, before any stage."""
        each = [len(sample.tokens) for sample in now.samples for _ in range(now.expand)]
        return torch.tensor(each, device=device)

    def role_providers(
        self, now: Pass, number: Tensor, positions: Tensor, length: int
    ) -> dict[str, Callable[[], Tensor]]:
        """Signals of the roles that the caller gave, for a stage whose visual tokens `number` lie at `positions`."""
        if self.roles is None:
            return {}
        return self.roles.providers(now.samples, now.expand, number, positions, length)

    def grid(self, now: Pass, number: Tensor) -> Tensor | None:
        """Places `(batch, n, 4)` of the visual tokens `number` `(batch, n)`; None where no layout is known."""
        if now.layout is None:
            return None
        places = torch.from_numpy(now.layout.grid_index()).to(number.device)
        grid = places.gather(1, number.clamp(min=0)[:, :, None].expand(-1, -1, places.shape[2]))
        return grid.masked_fill((number == PAD)[:, :, None], PAD)

    def continue_prompt(self, now: Pass) -> None:
        """Called instead of a new decision when a prompt is run again, without a cache, with more tokens behind."""

    def _visual(self, ids: Tensor | None, content: Tensor, past: int) -> Tensor | None:
        batch, length = content.shape[:2]
        if self._given is not None:
            if not isinstance(self._given, Tensor):
                raise DartLabError(f"visual is a {type(self._given).__name__}; give a (batch, sequence) bool tensor")
            given = self._given.to(content.device).bool()
            if past:
                return None
            if given.dim() != 2 or length < given.shape[1] or batch % given.shape[0]:
                raise DartLabError(
                    f"visual has shape {tuple(given.shape)}, the prompt is ({batch}, {length}); mark every token of it"
                )
            given = given.repeat_interleave(batch // given.shape[0], dim=0)
            visual = torch.nn.functional.pad(given, (0, length - given.shape[1]))
        elif ids is None or self.family is None or (length == 1 and past):
            return None
        else:
            visual = self.family.visual_mask(self.model, ids)
        return visual if bool(visual.any()) else None

    def _refuse_right_padding(self, now: Pass) -> None:
        """A decode step behind padding would read the wrong positions; look once, at the first step."""
        if now.attended is None or self.prompt is None or now.past != self.prompt.ids.shape[1]:
            return
        seen = now.attended[:, 1:] | ~now.attended[:, :-1]
        if not bool(seen.all()):
            raise DartLabError(
                "the batch is padded on the right, so the model would continue after padding; set padding_side='left'"
            )

    def _place(self, now: Pass, marked: Tensor, ids: Tensor | None, kwargs: dict[str, Any]) -> None:
        """Work out the layout and open one `Sample` for each prompt of the batch."""
        visual = marked.cpu().numpy()
        if ids is not None and now.past and self._given is None and visual[:, 0].any():
            raise DartLabError(
                "the prompt came in chunks that cut the image; pruning needs it whole: switch chunked prefill off"
            )
        attended = np.ones_like(visual) if now.attended is None else now.attended[:, now.past :].cpu().numpy()
        samples: list[Sample] = []
        kwargs = kwargs if ids is None else {**kwargs, "input_ids": ids[:: now.expand]}
        image = 0
        for row in range(0, len(visual), now.expand):
            position = np.flatnonzero(visual[row])
            own = None if ids is None else ids[row].cpu().numpy()
            if self.family is None or own is None:
                tokens, images = unknown_place(position), 1
            else:
                tokens, images = placed(self.family, self.model, own, position, kwargs, image)
            samples.append(Sample(tokens, own, images))
            image += images
        now.samples, now.picture_rows = samples, self._picture_rows(kwargs, samples)
        self._note_views(samples, now.picture_rows)
        now.layout = TokenLayout(
            groups(visual, attended), tuple(sample.tokens for sample in samples for _ in range(now.expand))
        )

    def _picture_rows(self, inputs: dict[str, Any], samples: Sequence[Sample]) -> list[range]:
        """Rows of the tower's input that belong to each picture of these samples; empty if that cannot be told."""
        if self.family is None or not any(sample.images for sample in samples):
            return []
        each = self.family.pixel_rows(self.model, inputs, [sample.tokens for sample in samples])
        return [] if each is None else self._encoded.rows(each, self._are_videos(samples))

    def _are_videos(self, samples: Sequence[Sample]) -> list[bool]:
        """For each picture of these samples whether it is a video, as its first placeholder says."""
        video = video_token(getattr(self.model, "config", None))
        found: list[bool] = []
        for sample in samples:
            _, first = np.unique(sample.tokens.image, return_index=True)
            ids, places = sample.token_ids, sample.tokens.position[first]
            found += [ids is not None and video is not None and int(ids[place]) == video for place in places]
        return found

    def _note_views(self, samples: Sequence[Sample], rows: Sequence[range]) -> None:
        """Keep the first few pictures as the model saw them, for a look at what was kept."""
        image = 0
        for sample in samples:
            if self.family is None or not rows or self._shown == PICTURES_SHOWN:
                return
            if sample.images:
                sample.view = self._encoded.view(rows[image][self.family.whole])
                self._shown += 1
            image += sample.images

    def seeds(self, now: Pass) -> tuple[int, ...]:
        """One number a row: a fingerprint of the sample's token ids and pictures, whatever batch it came in."""
        out: list[int] = []
        image = 0
        for number, sample in enumerate(now.samples):
            digest, row = hashlib.blake2b(digest_size=DIGEST), number * now.expand
            real = slice(None) if now.attended is None else now.attended[row, now.past :].cpu().numpy()
            if sample.token_ids is not None:
                digest.update(np.ascontiguousarray(sample.token_ids[real], dtype=np.int64).tobytes())
            elif self.prompt is not None:
                digest.update(self.prompt.ids[row].detach().float().cpu().numpy()[real].tobytes())
            for rows in now.picture_rows[image : image + sample.images]:
                digest.update(self._encoded.content(rows))
            image += sample.images
            out += [int.from_bytes(digest.digest(), "big")] * now.expand
        return tuple(out)

"""The words ``tiny`` reads and writes: every word of the drawn world's questions and answers, one token each.

Numbers and cells are two tokens, ``47`` is ``4 ##7`` and ``c4`` is ``c ##4``, in the manner of WordPiece.
"""

from __future__ import annotations

from dart_lab.tasks import questions, scene

PAD, BOS, EOS, UNKNOWN, IMAGE = "<pad>", "<bos>", "<eos>", "<unk>", "<image>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN, IMAGE)
PREFIX = (BOS, "user", ":")  # before the image
SUFFIX = ("assistant", ":")  # after the question
_TEMPLATE_WORDS = (
    "is there a an any what color shape number is on the plate object objects how many are which cell holds thing has "
    "of word goes with left right above below yes no"
)


def _vocabulary() -> tuple[str, ...]:
    words = {*_TEMPLATE_WORDS.split(), *scene.SHAPES, *scene.COLORS, *questions.PLURALS.values()}
    words |= {*questions.COLOR_FACTS.values(), *questions.SHAPE_FACTS.values(), "user", "assistant", ":", "?"}
    words |= {
        piece for answer in (*questions.NUMBERS, *questions.CELL_NAMES) for piece in (answer[0], f"##{answer[1]}")
    }
    return (*SPECIAL, *sorted(words))


VOCABULARY: tuple[str, ...] = _vocabulary()
IDS: dict[str, int] = {word: number for number, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of a question or an answer; an unknown word is ``<unk>``.

    >>> [VOCABULARY[i] for i in encode("which cell holds the red circle?")][-3:]
    ['red', 'circle', '?']
    >>> [VOCABULARY[i] for i in encode("47")]
    ['4', '##7']
    """
    ids: list[int] = []
    for word in text.lower().replace("?", " ? ").replace(":", " : ").split():
        if word in IDS:
            ids.append(IDS[word])
        elif len(word) == 2 and word[0] in IDS and f"##{word[1]}" in IDS:
            ids += [IDS[word[0]], IDS[f"##{word[1]}"]]
        else:
            ids.append(IDS[UNKNOWN])
    return ids


def decode(ids: list[int]) -> str:
    """The text of token ids, specials left out.

    >>> decode(encode("how many objects are red?"))
    'how many objects are red ?'
    >>> decode(encode("c4"))
    'c4'
    """
    words = [VOCABULARY[i] for i in ids if VOCABULARY[i] not in SPECIAL]
    return " ".join(words).replace(" ##", "")

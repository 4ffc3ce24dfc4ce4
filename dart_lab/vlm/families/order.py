"""Pictures and videos of a batch in the order of its prompts; the model's inputs hold them kind by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def prompt_order(ids: np.ndarray, lengths: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Which picture or video comes where.

    Args:
        ids: `(batch, sequence)` token ids.
        lengths: placeholder id → visual tokens of each picture or video of that kind, in the order of the inputs.

    Returns:
        Placeholder id and number within its kind of every picture and video. A prompt with placeholders for more than
        there are ends at the last one.

    >>> prompt_order(np.array([[1, 6, 6, 5, 1], [5, 2, 6, 6, 6]]), {5: [1, 1], 6: [2, 3]})
    [(6, 0), (5, 0), (5, 1), (6, 1)]
    """
    used = dict.fromkeys(lengths, 0)
    found = []
    for row in ids:
        left = row[np.isin(row, list(lengths))]
        while len(left):
            kind = int(left[0])
            number = used[kind]
            if number == len(lengths[kind]):
                break
            found.append((kind, number))
            used[kind] += 1
            left = left[lengths[kind][number] :]
    return found

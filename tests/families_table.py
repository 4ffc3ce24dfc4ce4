"""The page of families, from tests as they run: `python -m tests.families_table > docs/families.md`.

Every cell stands for tests under `tests/vlm/families` that ran just now, and says how many there are. `--cells`
collects the tests without running them and prints the cells that they stand for.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "vlm" / "families"
#: Test → what it shows, in the order of the page's columns.
FEATURES = {
    "test_dropping_equals_masking": "dropping = masking",
    "test_other_kernels_drop_as_sdpa": "same as SDPA",
    "test_keeping_all_is_bit_identical": "keep all: same bits",
    "test_keeping_all_is_bit_identical_and_nothing_is_left_on_the_model": "keep all: same bits, sdpa",
    "test_a_row_of_a_batch_answers_as_alone": "row = alone",
    "test_greedy_decoding_equals_a_recompute_without_cache": "cache = none",
    "test_beam_scores_equal_teacher_forcing": "beams",
    "test_beams_share_the_choice_of_their_prompt": "beams",
    "test_painting_under_a_box_moves_its_token_and_no_distant_one": "pixel boxes",
    "test_painting_in_a_frame_moves_the_tokens_of_that_frame_alone": "video frames",
    "test_dropping_equals_feeding_the_short_prompt": "in front of the decoder",
    "test_dropping_in_front_equals_feeding_the_short_prompt": "in front of the decoder",
    "test_dropping_before_the_language_model_equals_masking_everywhere": "in front of the decoder",
}
METHODS = "test_every_method_runs_or_says_in_a_line_why_not"
FEATURE, METHOD = "feature", "method"
PASSED, REFUSED, FAILED, NONE = "✓", "refused", "✗", "n/a"
HEAD = f"""# Families

Written by `python -m tests.families_table > docs/families.md` from the tests that it ran: edit them, not this.

A cell says what came of how many tests: {PASSED} they passed; {REFUSED}: a line says why it cannot be; {NONE}: there
is no test of it for this kind of model. Models are small and random, of the real classes; flash is an emulation with
FlashAttention's calling rules, flex is FlexAttention without its compiler; where no kernel is named, it is SDPA.
SmolVLM is Idefics3 under another name; MiniCPM-V, whose code is remote, has a stand-in with the same structure.

## Kernels and features

"""
REASONS = """
## Reasons

"""
BETWEEN = """
## Methods

Each with a padded batch of two unlike prompts, on SDPA.

"""

Cell = tuple[str, str, str]  # kind of model, FEATURE or METHOD, name of that


class Outcomes:
    """A pytest plugin: which cell every test belongs to, and what came of it."""

    def __init__(self) -> None:
        self.cells: dict[str, Cell] = {}
        self.results: dict[Cell, list[str]] = defaultdict(list)
        self.reasons: dict[tuple[str, str], list[str]] = defaultdict(list)  # method and reason → kinds of model

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            cell = cell_of(item)
            if cell is not None:
                self.cells[item.nodeid] = cell

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = self.cells.get(report.nodeid)
        if cell is None or (report.when != "call" and report.passed):
            return
        reason = dict(report.user_properties).get("refused")
        if reason is not None:
            self.reasons[cell[2], str(reason)].append(cell[0])
        self.results[cell].append(FAILED if not report.passed else PASSED if reason is None else REFUSED)


def cell_of(item: pytest.Item) -> Cell | None:
    """Where a test belongs on the page, from its parameters; None: nowhere."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    kind = parameters.get("kind", getattr(getattr(item, "module", None), "KIND", None))
    name = getattr(item, "originalname", "")
    if kind is None:
        return None
    if name == METHODS:
        return str(kind), METHOD, str(parameters["name"])
    if name not in FEATURES:
        return None
    backend = f", {parameters['backend']}" if "backend" in parameters else ""
    return str(kind), FEATURE, FEATURES[name] + backend


def run(*options: str) -> Outcomes:
    """Run the tests of all families, their own output to stderr. Raises `SystemExit` if they cannot be collected."""
    outcomes = Outcomes()
    own = f"--ignore={FOLDER / 'test_table.py'}"  # of the page that is being written
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(["-q", "-p", "no:cacheprovider", own, *options, str(FOLDER)], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(int(code))
    return outcomes


def page(results: dict[Cell, list[str]], reasons: dict[tuple[str, str], list[str]]) -> str:
    """The page in Markdown."""
    kinds = list(dict.fromkeys(kind for kind, _, _ in results))
    order = list(dict.fromkeys(FEATURES.values()))
    named = {name for _, what, name in results if what == FEATURE}
    features = sorted(named, key=lambda name: (order.index(name.split(",")[0]), name))
    methods = sorted({name for _, what, name in results if what == METHOD})
    asked = [kind for kind in kinds if any(cell[:2] == (kind, METHOD) for cell in results)]
    first = [[kind, *(shown(results.get((kind, FEATURE, name), [])) for name in features)] for kind in kinds]
    second = [[f"`{name}`", *(shown(results.get((kind, METHOD, name), [])) for kind in asked)] for name in methods]
    said = "".join(f"* `{name}` on {', '.join(on)}: {why}\n" for (name, why), on in sorted(reasons.items()))
    tables = HEAD + table(["model", *features], first) + BETWEEN + table(["method", *asked], second)
    return tables + REASONS + said


def shown(outcomes: Sequence[str]) -> str:
    """One cell.

    >>> shown(["✓", "✓"]), shown(["✓", "✗"]), shown(["refused"]), shown([])
    ('✓ 2', '✗ 1', 'refused', 'n/a')
    """
    for worst in (FAILED, REFUSED):
        if worst in outcomes:
            return f"{worst} {outcomes.count(worst)}" if len(outcomes) > 1 else worst
    return f"{PASSED} {len(outcomes)}" if len(outcomes) > 1 else PASSED if outcomes else NONE


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(words: Sequence[str]) -> int:
    """Print the page, or with `--cells` what it would have cells for; 1 if a test failed."""
    if "--cells" in words:
        print(page({cell: [PASSED] for cell in run("--collect-only", "-qq").cells.values()}, {}))
        return 0
    outcomes = run("-p", "no:xdist")
    print(page(outcomes.results, outcomes.reasons), end="")
    return int(any(FAILED in cell for cell in outcomes.results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The suite on other releases of transformers: `make test-versions`, or `python tests/versions.py 4.57.6 -- tests/vlm`.

With `--short`, the tests of `SHORT` alone: what `make test` runs on the oldest release. Each release has
an environment of its own under `.venvs/`, on top of the one that runs this; it is made once and kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What every release must do at least, and the tests that show it.
SHORT = {
    "models load, from folders of every family": ("tests/vlm/test_load.py", "tests/vlm/test_checkpoints.py"),
    "dropping tokens equals masking them": ("tests/vlm/test_oracle.py",),
    "greedy, sampled and beam search, further turns": ("tests/vlm/test_generate.py",),
    "every kernel, every precision": ("tests/vlm/test_kernels.py",),
    "every family, pictures and videos": (
        "tests/vlm/families/test_every_family.py::test_dropping_equals_masking",
        "tests/vlm/families/test_every_family.py::test_keeping_all_is_bit_identical",
        "tests/vlm/families/test_every_family.py::test_greedy_decoding_equals_a_recompute_without_cache",
    ),
    "records of what was kept and attended": ("tests/probes",),
}
COMPANIONS = ("huggingface-hub", "tokenizers")  # what a release of transformers demands in versions of its own


def environment(version: str, root: Path = ROOT / ".venvs") -> Path:
    """The python of an environment with `transformers==version`; everything else comes from the running one."""
    folder = root / f"transformers-{version}"
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.is_file():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    install(site, f"transformers=={version}")
    metadata = next(site.glob("transformers-*.dist-info")) / "METADATA"
    install(site, *requirements(metadata.read_text(encoding="utf-8")))
    outer = sysconfig.get_path("purelib")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    done.touch()
    return python


def install(site: Path, *packages: str) -> None:
    """Put packages into a folder, alone."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps", "--target", site]
    subprocess.run([*pip, *packages], check=True)


def requirements(metadata: str) -> list[str]:
    """What a package's METADATA demands of the companions.

    >>> requirements("Requires-Dist: numpy>=1.17\\nRequires-Dist: tokenizers<=0.23.0,>=0.22.0\\nRequires-Dist: x")
    ['tokenizers<=0.23.0,>=0.22.0']
    """
    wanted = re.findall(r"^Requires-Dist: (([\w-]+)[^;\n]*)$", metadata, flags=re.MULTILINE)
    return [line.strip() for line, name in wanted if name in COMPANIONS]


def main(words: Sequence[str]) -> int:
    """Run the suite on each version in turn; 1 if one of them fails."""
    cut = words.index("--") if "--" in words else len(words)
    asked, arguments = words[:cut], list(words[cut + 1 :])
    versions = [word for word in asked if word != "--short"]
    if "--short" in asked:
        arguments += [test for tests in SHORT.values() for test in tests]
    failed = []
    for version in versions:
        print(f"transformers {version}", flush=True)
        python = environment(version)
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([python, "-m", "pytest", "-q", *arguments], cwd=ROOT, env=variables, check=False)
        failed += [version] if done.returncode else []
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(versions)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

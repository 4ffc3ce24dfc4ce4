"""The suite on other releases of transformers: `make test-versions`, or `python tests/versions.py 4.57.6 -- tests/vlm`.

Each release has an environment of its own under `.venvs/`, on top of the one that runs this; it is made once and kept.
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
    versions, arguments = words[:cut], words[cut + 1 :]
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

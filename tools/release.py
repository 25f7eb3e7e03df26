"""Builder of the distributions: `make release` writes them to ``dist``, and tries the wheel.

It changes nothing elsewhere and uploads nothing. The wheel is installed into an empty environment,
where the demo has to run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; end this program if it fails."""
    print("$", *command, flush=True)
    status = subprocess.run(command, cwd=cwd, check=False).returncode
    if status:
        sys.exit(f"that failed with status {status}")


def main() -> None:
    """Build, check and try the distributions."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    built = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    (wheel,) = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="tenure-release-") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "-qq", f"{wheel}[cli]", cwd=place)
        run(python, "-m", "tenure", "--version", cwd=place)
        run(python, "-m", "tenure", "demo", cwd=place)
    print("ready:", *(each.name for each in built))


if __name__ == "__main__":
    main()

"""Entry point of the watchdog and its guardian; `tenure.cli.run.guarded` runs this file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent

# Run by path and in Python's isolated mode, the folder cannot be imported as a package.
sys.path.append(str(FOLDER.parent))

if __name__ == "__main__":
    importlib.import_module(f"{FOLDER.name}.watchdog").main(sys.argv[1:])

"""The pictures of README.md are there, and `python -m tools.pictures` draws them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parent.parent


def texts_of(picture: Path) -> str:
    return " ".join(" ".join(ET.parse(picture).getroot().itertext()).split())


def test_the_pictures_are_drawn_from_a_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tools.pictures", tmp_path], cwd=ROOT, check=True)
    demo = texts_of(tmp_path / "demo.svg")
    assert "One mutex, six processes" in demo
    assert "w6" in demo
    top = texts_of(tmp_path / "top.svg").replace("\N{NO-BREAK SPACE}", " ")
    assert "6 owners, 3 waiting" in top
    assert "nightly" in top
    takeover = texts_of(tmp_path / "takeover.svg")
    assert takeover.count("holds, with token") == 3
    assert "LeaseLost: its block was cancelled" in takeover


def test_every_picture_of_the_readme_is_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    assert pictures == [f"docs/pictures/{each}.svg" for each in ("takeover", "demo", "top")]
    for each in pictures:
        ET.parse(ROOT / each)

"""Scripts are assembled from parts that they name."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from tenure.engines.redis import lua
from tenure.engines.redis.lua import SCRIPTS, assemble


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.lua").write_text(text)


def test_a_part_takes_the_place_of_its_line_with_the_parts_that_it_includes(tmp_path: Path) -> None:
    write(
        tmp_path, script="one\n  --#include b.lua\nfour\n", b="two\n--#include c.lua\n", c="three\n"
    )

    assert assemble(tmp_path, "script.lua") == "one\ntwo\nthree\nfour\n"


def test_a_part_is_included_once_at_its_first_mention(tmp_path: Path) -> None:
    write(
        tmp_path,
        script="--#include b.lua\n--#include c.lua\nend\n",
        b="--#include c.lua\nb\n",
        c="c\n",
    )

    assert assemble(tmp_path, "script.lua") == "c\nb\nend\n"


def test_a_part_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, script="--#include b.lua\n")

    with pytest.raises(FileNotFoundError, match=r"b\.lua"):
        assemble(tmp_path, "script.lua")


def test_every_part_is_in_a_script() -> None:
    parts = {
        each.name: each.read_text("utf-8") for each in (resources.files(lua) / "parts").iterdir()
    }

    for name, text in parts.items():
        *_, last = text.splitlines()
        assert any(last in script.text for script in SCRIPTS.values()), name
    assert not any("--#" in script.text for script in SCRIPTS.values())


def test_the_package_names_every_script_and_part() -> None:
    named = re.findall(r"^``(\w+)\.lua``  ", lua.__doc__ or "", re.MULTILINE)
    parts = (resources.files(lua) / "parts").iterdir()

    assert sorted(named) == sorted([*SCRIPTS, *(each.name.removesuffix(".lua") for each in parts)])

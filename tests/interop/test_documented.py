"""What docs/how-to/interop.md shows is run, on a real Redis."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.test_documents import ROOT, read

BLOCKS = [
    block.text
    for block in read(ROOT / "docs" / "how-to" / "interop.md")
    if block.language == "text" and "REDIS_URL" in block.text
]
PRINTED = [
    "acquired: True\nfound: None\n",
    "held: 2 of 4 count 2\nat once: True\n",
    "acquired: True\nheld: 2\n",
]


@pytest.mark.parametrize(("program", "printed"), list(zip(BLOCKS, PRINTED, strict=True)))
def test_the_examples_print_what_they_say(redis_url: str, program: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == printed


@pytest.mark.parametrize(
    ("missing", "extra", "program"),
    [
        ("redis", "interop", "import tenure.interop.effect"),
        ("redis", "interop", "import tenure.interop.blocking"),
        ("hiredis", "redis", "import tenure; tenure.connect('redis://localhost')"),
        ("hiredis", "redis", "from tenure.engines import diagnose; diagnose('redis://localhost')"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    missing: str, extra: str, program: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{missing!r}] = None; {program}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f" {missing}, which is not installed" in done.stderr
    assert f"install it with: pip install 'tenure[{extra}]'" in done.stderr

"""Writing of log lines: never blocks its caller, and counts what it drops."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tenure.server import log
from tenure.server.log import LogWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that holds little."""
    reading, writing = os.pipe()
    if sys.platform == "linux":
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def dropped_line(count: int) -> bytes:
    return b"dropped %d\n" % count


def fill(file: int) -> int:
    """Write to a pipe until it is full; returns how many bytes that took."""
    os.set_blocking(file, False)
    size = 0
    try:
        while True:
            size += os.write(file, bytes(1024))
    except BlockingIOError:
        os.set_blocking(file, True)
        return size


def read(file: int, size: int) -> bytes:
    """Read so many bytes, and wait for them."""
    data = b""
    while len(data) < size:
        data += os.read(file, size - len(data))
    return data


def test_lines_are_written_in_order_and_the_last_ones_before_the_end(
    pipe: tuple[int, int],
) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, dropped_line)
    for number in range(100):
        writer.put(b"%d\n" % number)
    assert writer.close()
    assert os.read(reading, 4096) == b"".join(b"%d\n" % number for number in range(100))


def test_a_reader_that_is_stuck_blocks_nobody_and_hears_what_was_dropped(
    pipe: tuple[int, int],
) -> None:
    reading, writing = pipe
    filling = fill(writing)
    writer = LogWriter(writing, dropped_line, most=1000)
    line = b"x" * 99 + b"\n"
    for _ in range(100):
        writer.put(line)  # it would wait for ever if it blocked
    lost = writer.dropped
    assert 80 <= lost <= 90  # ten wait; up to ten are being written
    read(reading, filling)
    told = read(reading, (100 - lost) * 100 + len(dropped_line(lost)))
    assert told.replace(dropped_line(lost), b"", 1) == line * (100 - lost)
    writer.put(line)
    assert read(reading, 100) == line
    assert writer.close()


def test_closing_waits_a_bounded_time_for_a_reader_that_is_stuck(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_LAST_TIME", 0.05)
    reading, writing = pipe
    filling = fill(writing)
    writer = LogWriter(writing, dropped_line)
    writer.put(b"the last\n")
    assert not writer.close()
    assert not writer.close()
    writer.put(b"too late\n")
    assert writer.dropped == 1
    read(reading, filling)
    assert read(reading, 9) == b"the last\n"
    while not writer.close():
        pass


def test_a_file_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    filling = fill(writing)
    os.set_blocking(writing, False)
    writer = LogWriter(writing, dropped_line)
    writer.put(b"in the end\n")
    read(reading, filling)
    assert read(reading, 11) == b"in the end\n"
    assert writer.close()


def test_lines_that_cannot_be_written_are_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = pipe
    failed = threading.Event()
    full = True

    def write(file: int, data: memoryview) -> int:
        if full and file == writing:
            failed.set()
            raise OSError(errno.ENOSPC, "no space left")
        return real(file, data)

    real = os.write
    monkeypatch.setattr(os, "write", write)
    writer = LogWriter(writing, dropped_line)
    writer.put(b"one\n")
    assert failed.wait(60)
    full = False
    writer.put(b"two\n")
    assert writer.close()
    assert writer.dropped == 1
    assert sorted(os.read(reading, 4096).splitlines()) == [b"dropped 1", b"two"]


def test_without_a_thread_left_lines_wait_for_one(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, dropped_line)
    with monkeypatch.context() as patch:

        def fail(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        writer.put(b"one\n")
    writer.put(b"two\n")
    assert writer.close()
    assert os.read(reading, 4096) == b"one\ntwo\n"


def test_closed_standard_files_are_the_null_device() -> None:
    program = (
        "import os\n"
        "from tenure.server.log import open_standard_files\n"
        "os.close(0); os.close(2)\n"
        "open_standard_files()\n"
        "null = os.stat(os.devnull).st_rdev\n"
        "assert [os.fstat(each).st_rdev == null for each in range(3)] == [True, False, True]\n"
        "print('fine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, capture_output=True, check=True
    )
    assert done.stdout == b"fine\n"

"""`python -m tenure.doctor [URL]`: the examination as plain text, with the standard library only.

It exits with 0 when the store can be used, else with 74.
"""

from __future__ import annotations

import os
import signal
import sys

from tenure.doctor import Finding, examine, healthy, summary

NOT_USABLE, USAGE = 74, 78

_USAGE = "usage: python -m tenure.doctor [URL]\n"


def main(arguments: list[str]) -> int:
    """Examine and print; return the exit code."""
    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if len(arguments) > 1 or any(each.startswith("-") for each in arguments):
        sys.stderr.write(_USAGE)
        return USAGE
    findings: list[Finding] = []
    for finding in examine(*arguments):
        findings.append(finding)
        sys.stdout.write(_line(finding))
        sys.stdout.flush()
    sys.stdout.write(f"{summary(findings)}\n")
    return 0 if healthy(findings) else NOT_USABLE


def _line(finding: Finding) -> str:
    remedy = f"\n{'':27}-> {finding.remedy}" if finding.remedy else ""
    text = f"{finding.level:<8} {finding.what:<16}  {finding.found}{remedy}"
    # A file's name may hold anything.
    return (
        "".join(
            each if each.isprintable() or each == "\n" else f"\\x{ord(each) & 0xFF:02x}"
            for each in text
        )
        + "\n"
    )


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush
        status = 128 + signal.SIGPIPE
    sys.exit(status)

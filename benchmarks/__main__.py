"""Run the measurements, print their rows, and write them as a table, as JSON and as a picture.

``python -m benchmarks [--folder FOLDER] [PART ...]``; without a part all of them run. A part prints
its rows when it ends. One that fails is reported at the end, with the exit code 1, and the others
run nevertheless. The folder (default ``build/benchmarks``) gets ``results.json``, ``results.md``
(the table) and ``results.svg``. docs/evidence/benchmarks.md shows the last two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from benchmarks.measure import Measured

Part = Callable[[], Iterable[Measured]]


def _part(module: str, function: str = "measure") -> Part:
    """Return a part that imports its module when it runs: each needs other libraries."""

    def measure() -> Iterable[Measured]:
        found = getattr(import_module(f"benchmarks.{module}"), function)
        measured: Iterable[Measured] = found()
        return measured

    return measure


PARTS: dict[str, Part] = {
    "memory": _part("in_process"),
    "memory-core": _part("core_size"),
    "sqlite": _part("sqlite_pairs"),
    "sqlite-threads": _part("blocking", "measure_sqlite"),
    "sqlite-full": _part("sqlite_full"),
    "sqlite-processes": _part("processes"),
    "server": _part("served"),
    "server-ydb": _part("ydb_surface"),
    "server-dflockd": _part("dflockd_lines"),
    "server-idle": _part("idle"),
    "server-floods": _part("floods"),
    "server-metrics": _part("scrapes"),
    "ydb": _part("ydb_engine"),
    "redis": _part("redis_pairs"),
    "redis-threads": _part("blocking", "measure_redis"),
    "postgresql": _part("postgresql_pairs"),
    "postgresql-threads": _part("blocking", "measure_postgresql"),
    "etcd": _part("etcd_pairs"),
    "rates": _part("rates"),
    "console": _part("console"),
}
"""The parts by name."""


def chosen(names: Sequence[str], parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return the parts with these names, or whose names begin with one and a dash; all of none.

    Raises:
        ValueError: there is no such part; the error lists all names.
    """
    for name in names:
        if not any(f"{part}-".startswith(f"{name}-") for part in parts):
            raise ValueError(f"there is no part {name!r}; the parts are {', '.join(parts)}")
    return {
        part: measure
        for part, measure in parts.items()
        if not names or any(f"{part}-".startswith(f"{name}-") for name in names)
    }


def run(parts: Mapping[str, Part]) -> tuple[list[Measured], dict[str, Exception]]:
    """Run parts, and print the rows of each; return all rows, and the errors of the failed parts.

    The rows that a part yields before it fails count, too.
    """
    results: list[Measured] = []
    failed: dict[str, Exception] = {}
    for name, measure in parts.items():
        print(f"measuring: {name} ...", flush=True)
        rows: list[Measured] = []
        try:
            rows.extend(measure())  # what it yields before an error stays
        except Exception as error:
            failed[name] = error
            traceback.print_exception(error)
        if rows:
            print(_table(rows), flush=True)
        results += rows
    return results, failed


def _bound(result: Measured) -> str:
    if result.at_least is not None:
        return f">= {result.at_least:.3g}"
    return f"<= {result.at_most:.3g}" if result.at_most is not None else ""


def _row(result: Measured) -> list[str]:
    return [
        result.what,
        f"{result.value:,.4g} {result.unit}"
        if result.value < 1e4
        else f"{result.value:,.0f} {result.unit}",
        f"{result.peer_value:,.0f} ({result.peer})"
        if result.peer_value >= 100
        else f"{result.peer_value:.3g} ({result.peer})",
        f"{result.ratio:.3g}",
        _bound(result),
        "yes" if result.met else "NO",
    ]


def _table(results: list[Measured]) -> str:
    rows = [["measured", "tenure", "beside", "ratio", "bound", "met"], *map(_row, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _markdown(results: list[Measured]) -> str:
    rows = [["Measured", "tenure", "Beside", "Ratio", "Bound"]]
    rows += [["---"] * 5, *(_row(result)[:5] for result in results)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _picture(results: list[Measured], path: Path) -> None:
    """Each ratio against its bound: 1 is the bound, and right of it is better."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tenure"}
    from matplotlib import pyplot as plt

    names, margins = [], []
    for result in reversed(results):
        if result.at_least is not None:
            margins.append(result.ratio / result.at_least)
        elif result.at_most is not None:
            margins.append(result.at_most / max(result.ratio, 1e-3))
        else:
            continue
        names.append(f"{result.what}\n{result.value:,.4g} {result.unit}")
    figure, axes = plt.subplots(figsize=(9, 0.75 * len(names) + 1.2))
    colours = ["tab:green" if margin >= 1 else "tab:red" for margin in margins]
    bars = axes.barh(names, margins, color=colours)
    axes.bar_label(bars, labels=[f" {margin:.2g}x" for margin in margins])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(left=0.2, right=max([*margins, 1]) * 3)
    axes.set_xlabel("times better than the bound (1 = the bound)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str], parts: Mapping[str, Part]) -> int:
    """Run the named parts, and write the results to a folder; return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks", description="Run the measurements.")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("part", nargs="*", help=f"{', '.join(parts)} (default: all)")
    options = parser.parse_args(arguments)
    try:
        selected = chosen(options.part, parts)
    except ValueError as error:
        parser.error(str(error))
    results, failed = run(selected)
    if results:
        _write(results, options.folder)
    for name, problem in failed.items():
        print(f"FAILED: {name}: {problem!r}")
    return 1 if failed else 0


def _write(results: list[Measured], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(
        json.dumps(
            {
                "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "python": platform.python_version(),
                "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
                "results": [asdict(result) | {"met": result.met} for result in results],
            },
            indent=2,
        )
        + "\n"
    )
    (folder / "results.md").write_text(_markdown(results))
    _picture(results, folder / "results.svg")
    print(f"\nwritten: results.json, results.md and results.svg in {folder}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PARTS))

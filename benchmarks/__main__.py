"""Run every measurement, print the table, and write it as JSON and as a picture.

``python -m benchmarks [FOLDER]``; the folder (default ``build/benchmarks``) gets ``results.json``,
``results.md`` (the table) and ``results.svg``. docs/evidence/benchmarks.md shows the last two.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks import (
    blocking,
    core_size,
    dflockd_lines,
    etcd_pairs,
    floods,
    idle,
    in_process,
    postgresql_pairs,
    processes,
    redis_pairs,
    served,
    sqlite_full,
    sqlite_pairs,
    ydb_engine,
    ydb_surface,
)
from benchmarks.measure import Measured

PARTS: list[tuple[str, Callable[[], list[Measured]]]] = [
    ("in one process", in_process.measure),
    ("a large core", core_size.measure),
    ("one SQLite file, one process", sqlite_pairs.measure),
    ("one SQLite file, threads", blocking.measure),
    ("one SQLite file, every commit on disk", sqlite_full.measure),
    ("one SQLite file, several processes", processes.measure),
    ("a server", served.measure),
    ("the server, through YDB's API", ydb_surface.measure),
    ("ydb:// beside bare gRPC streams", ydb_engine.measure),
    ("the server, through dflockd's protocol", dflockd_lines.measure),
    ("sessions that do nothing, at a server", idle.measure),
    ("a server under floods", floods.measure),
    ("one Redis, one process", redis_pairs.measure),
    ("one PostgreSQL, one process", postgresql_pairs.measure),
    ("one member of etcd, one process", etcd_pairs.measure),
]


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
    axes.set_xlim(left=0.2, right=max(*margins, 1) * 3)
    axes.set_xlabel("times better than the bound (1 = the bound)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run every measurement and write the results to a folder."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Measured] = []
    for title, part in PARTS:
        print(f"measuring: {title} ...", flush=True)
        results += part()
    print()
    print(_table(results))
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
    main()

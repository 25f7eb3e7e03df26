"""Layout of a directed graph in layers, for a picture of waits.

Boxes stand in columns, and arrows lead to the right. A box stands one column before the last one to
which an arrow leads. Boxes that are connected in a circle share a column, and their arrows
bend around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 212, 78
"""Size of a box."""

ACROSS, DOWN = 80, 16
"""Space between two columns, and between two boxes of a column."""

MARGIN = 8
HEAD = 9
BEND = 34
"""Least reach of an arrow within its column."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of the graph.

    Attributes:
        awaited: the keys of the nodes to which its arrows lead; unknown ones are left out.
        group: a number that connected nodes share; 0 for none.
    """

    key: str
    awaited: tuple[str, ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class Box:
    """The place of a node: its upper left corner."""

    key: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow: the path of its line, and that of its head.

    Attributes:
        within: whether it leads to a node of the same group.
    """

    line: str
    head: str
    within: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """A graph with all places."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def draw(nodes: Sequence[GraphNode]) -> Picture:
    """Return the picture of a graph. It takes quadratic time or more: pass at most hundreds.

    Parts that are not connected stand below each other, in the order of their first nodes.
    """
    index = {node.key: number for number, node in enumerate(nodes)}
    targets = [sorted({index[key] for key in node.awaited if key in index}) for node in nodes]
    corners: dict[int, tuple[float, float]] = {}
    top = float(MARGIN)
    for part in _parts(targets):
        at = {node: number for number, node in enumerate(part)}
        found = _corners([[at[end] for end in targets[node]] for node in part])
        corners |= {node: (x, top + y) for node, (x, y) in zip(part, found, strict=True)}
        top += max(y for _, y in found) + HEIGHT + 2 * DOWN
    boxes = tuple(Box(node.key, *corners[number]) for number, node in enumerate(nodes))
    arrows = [
        _arrow(boxes[start], boxes[end], within=0 < nodes[start].group == nodes[end].group)
        for start, ends in enumerate(targets)
        for end in ends
    ]
    arrows.sort(key=lambda each: each.within)  # those of a group are drawn last, over the others
    right = max((box.x for box in boxes), default=0) + WIDTH + BEND + HEAD + MARGIN
    bottom = max((box.y for box in boxes), default=0) + HEIGHT + MARGIN
    return Picture(right, bottom, boxes, tuple(arrows))


def _parts(targets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the nodes of each connected part."""
    beside: list[set[int]] = [set(ends) for ends in targets]
    for node, ends in enumerate(targets):
        for end in ends:
            beside[end].add(node)
    parts: list[list[int]] = []
    seen: set[int] = set()
    for node in range(len(targets)):
        left, part = [node], []
        while left:
            each = left.pop()
            if each not in seen:
                seen.add(each)
                part.append(each)
                left += beside[each]
        if part:
            parts.append(sorted(part))
    return parts


def _corners(targets: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return the upper left corners of the boxes of a part, whose top is at 0."""
    circles = _circles(targets)
    layers = _layers(targets, circles)
    places = _places(targets, circles, layers)
    depth, top = max(layers), min(places)
    left = MARGIN + BEND + HEAD if _is_bent(circles, layers, depth) else MARGIN
    return [
        (left + (depth - layer) * (WIDTH + ACROSS), round(place - top, 1))
        for layer, place in zip(layers, places, strict=True)
    ]


def _is_bent(circles: Sequence[int], layers: Sequence[int], layer: int) -> bool:
    """Return true if a column has arrows within it."""
    return any(layers[node] == layer and first != node for node, first in enumerate(circles))


def _circles(targets: Sequence[Sequence[int]]) -> list[int]:
    """Return for each node the first one with which it is connected in both directions."""
    reach = [sum(1 << end for end in ends) for ends in targets]
    for middle in range(len(targets)):
        bit, far = 1 << middle, reach[middle]
        for start, reached in enumerate(reach):
            if reached & bit:
                reach[start] = reached | far
    return [
        next(
            other
            for other in range(node + 1)
            if other == node or (reach[node] >> other & 1 and reach[other] >> node & 1)
        )
        for node in range(len(targets))
    ]


def _layers(targets: Sequence[Sequence[int]], circles: Sequence[int]) -> list[int]:
    """Return for each node the length of the longest way from it, without circles."""
    layers = [0] * len(targets)
    changed = True
    while changed:
        changed = False
        for node, ends in enumerate(targets):
            for end in ends:
                if circles[end] != circles[node] and layers[end] >= layers[circles[node]]:
                    layers[circles[node]] = layers[end] + 1
                    changed = True
            if layers[node] != layers[circles[node]]:
                layers[node] = layers[circles[node]]
                changed = True
    return layers


def _places(
    targets: Sequence[Sequence[int]], circles: Sequence[int], layers: Sequence[int]
) -> list[float]:
    """Return for each node its distance from the top, near those with which it is connected."""
    columns: dict[int, list[int]] = {}
    for node, layer in enumerate(layers):
        columns.setdefault(layer, []).append(node)
    sources: list[list[int]] = [[] for _ in targets]
    for node, ends in enumerate(targets):
        for end in ends:
            sources[end].append(node)
    wished: dict[int, float] = {}
    places = [0.0] * len(targets)

    def place(column: list[int], beside: Sequence[Sequence[int]]) -> None:
        for node in column:
            others = [places[end] for end in beside[node] if layers[end] != layers[node]]
            wished[node] = sum(others) / len(others) if others else places[node]
        for node in column:  # a circle stays together
            wished[node] = max(wished[node], wished[circles[node]])
        column.sort(key=lambda node: (wished[node], circles[node], node))
        top = 0.0
        for node in column:
            places[node] = max(top, wished[node])
            top = places[node] + HEIGHT + DOWN

    for layer in sorted(columns):
        place(columns[layer], targets)
    for layer in sorted(columns, reverse=True)[1:]:
        place(columns[layer], sources)
    return places


def _arrow(start: Box, end: Box, *, within: bool) -> Arrow:
    """Return the arrow between two boxes."""
    if start.x < end.x:  # to the right
        x, y = start.x + WIDTH, start.y + HEIGHT / 2
        tip, level = end.x, end.y + HEIGHT / 2
        middle = (x + tip - HEAD) / 2
        line = f"M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {level:g} {tip - HEAD:g} {level:g}"
        return Arrow(line, _head(tip, level, 1), within)
    # In the column: downwards on the right side, upwards on the left one, apart from each other.
    down = end.y >= start.y
    side = 1 if down else -1
    x = start.x + (WIDTH if down else 0)
    y, level = start.y + HEIGHT * 0.7, end.y + HEIGHT * 0.3
    if not down:
        y, level = start.y + HEIGHT * 0.3, end.y + HEIGHT * 0.7
    if start is end:
        y, level = start.y + HEIGHT * 0.25, start.y + HEIGHT * 0.75
    reach = min(BEND + abs(level - y) / 12, ACROSS * 0.8)
    far, tip = x + side * reach, x
    line = f"M{x:g} {y:g}C{far:g} {y:g} {far:g} {level:g} {tip + side * HEAD:g} {level:g}"
    return Arrow(line, _head(tip, level, -side), within)


def _head(tip: float, level: float, way: int) -> str:
    back = tip - way * HEAD
    return f"M{tip:g} {level:g}L{back:g} {level - HEAD / 2:g}V{level + HEAD / 2:g}Z"

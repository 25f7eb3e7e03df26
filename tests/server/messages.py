"""Messages of the right shape, with anything in them."""

from __future__ import annotations

from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec import Struct

from tenure.wire.messages import ClientMessage, Hello
from tenure.wire.values import Config, Number

KINDS: tuple[type[Struct], ...] = get_args(ClientMessage)

_SMALL = st.integers(0, 3)
_BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "channel": _SMALL,
    "session_id": _SMALL,
    "key": st.sampled_from([b"", b"key", bytes(20)]),
    "node": st.sampled_from(["/default", "/none", "wrong", ""]),
    "path": st.sampled_from(["/default", "/a/b", "/none", "wrong", ""]),
    "name": st.sampled_from(["a", "b", "", "x" * 2000]) | st.text(max_size=5),
    "limit": st.sampled_from([-1, 0, 1, 3, 2**64 - 1, 2**64 - 2]),
    "count": st.sampled_from([-1, 0, 1, 2, 2**53, 2**64 - 1]),
    "window": st.sampled_from([-1.0, 0.0, 1.0, 5.0, 1e9, float("nan")]),
    "timeout": st.sampled_from([None, -1.0, 0.0, 0.5, 1e300, float("nan"), float("inf")]),
}


def _of_type(hint: Any) -> st.SearchStrategy[Any]:
    if hint is Number:
        return _SMALL | st.just(2**63 - 1)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is Union or type(hint).__name__ == "UnionType":
        return st.one_of(*map(_of_type, get_args(hint)))
    if hint is Config:
        return _of_class(Config)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        float: st.floats(),
        int: st.integers(-(2**63), 2**64 - 1),
        list[str]: st.lists(st.text(max_size=3), max_size=2),
        str: st.text(max_size=10),
        type(None): st.none(),
    }
    return simple[hint]


def _of_class(kind: type[Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    fields = {
        name: _BY_NAME[name] if name in _BY_NAME else _of_type(hints[name])
        for name in kind.__struct_fields__
    }
    return st.builds(kind, **fields)


def any_message() -> st.SearchStrategy[Struct]:
    """Any message of a client but a greeting, which would end the conversation."""
    return st.one_of(*(_of_class(kind) for kind in KINDS if kind is not Hello))

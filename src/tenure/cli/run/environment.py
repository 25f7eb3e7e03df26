"""The environment of the command: what it holds, and no credentials of tenure's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import tenure

__all__ = ["environment_of", "slots_of", "without_credentials", "without_secrets"]

_CREDENTIALS = frozenset({"TENURE_TOKEN", "DFLOCKD_AUTH_TOKEN"})
"""The variables that are credentials as a whole."""

_SECRET = re.compile(r"password|passwd|secret|token(?![-_]?file)", re.IGNORECASE)
"""The names of a URL's parameters that are secrets, without names of files."""


def environment_of(
    lease: tenure.Lease, environment: Mapping[str, str], *, credentials: bool
) -> dict[str, str]:
    """Return the environment of a command that runs under a lease.

    Args:
        lease: what is held.
        environment: of `tenure run`.
        credentials: whether the command may have the credentials in it.
    """
    passed = dict(environment) if credentials else without_credentials(environment)
    passed |= {"TENURE_NAME": lease.name, "TENURE_NODE": lease.node}
    with contextlib.suppress(tenure.Unsupported):  # a store without order
        passed["TENURE_FENCING_TOKEN"] = str(lease.fencing_token)
    return passed


async def slots_of(lease: tenure.Lease) -> dict[str, str]:
    """Return the variable with the slots of a semaphore's lease, if its semaphore has slots."""
    try:
        return {"TENURE_SLOT": ",".join(map(str, await lease.slots()))}
    except (tenure.InvalidArgument, tenure.Unsupported):  # a limit too high, or one not known
        return {}


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without tenure's tokens, and its URLs without secrets."""
    return {
        name: without_secrets(value) if name.startswith("TENURE_") else value
        for name, value in environment.items()
        if name not in _CREDENTIALS
    }


def without_secrets(value: str) -> str:
    """Return a URL that names the same store, without user, password and tokens.

    What is no URL with a host is returned as it is.
    """
    scheme, mark, rest = value.partition("://")
    if not mark or scheme.startswith("sqlite"):
        return value
    place, query_mark, query = rest.partition("?")
    authority, slash, path = place.partition("/")
    kept = [each for each in query.split("&") if each and not _is_secret(each)]
    query = query_mark + "&".join(kept) if kept else ""
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}{query}"


def _is_secret(parameter: str) -> bool:
    return _SECRET.search(parameter.partition("=")[0]) is not None

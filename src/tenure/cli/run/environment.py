"""Environment of the command: its lease, without tenure's credentials."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import tenure

_CREDENTIALS = frozenset({"TENURE_TOKEN", "DFLOCKD_AUTH_TOKEN"})
"""Variables that consist of a credential."""

_SECRET = re.compile(r"password|passwd|secret|token(?![-_]?file)", re.IGNORECASE)
"""URL parameters that are secrets; those with names of files are not."""


def environment_of(
    lease: tenure.Lease, environment: Mapping[str, str], *, credentials: bool
) -> dict[str, str]:
    """Return the environment of a command that runs under a lease.

    Args:
        lease: the lease.
        environment: the environment of `tenure run`.
        credentials: whether to keep the credentials.
    """
    passed = dict(environment) if credentials else without_credentials(environment)
    passed |= {"TENURE_NAME": lease.name, "TENURE_NODE": lease.node}
    with contextlib.suppress(tenure.Unsupported):  # a store without an order of grants
        passed["TENURE_FENCING_TOKEN"] = str(lease.fencing_token)
    return passed


async def slots_of(lease: tenure.Lease) -> dict[str, str]:
    """Return the variable with the slots of a semaphore's lease, if its semaphore has slots."""
    try:
        return {"TENURE_SLOT": ",".join(map(str, await lease.slots()))}
    except (tenure.InvalidArgument, tenure.Unsupported):  # the limit is too high, or unknown
        return {}


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without tenure's tokens, and its URLs without secrets."""
    return {
        name: without_secrets(value) if name.startswith("TENURE_") else value
        for name, value in environment.items()
        if name not in _CREDENTIALS
    }


def without_secrets(value: str) -> str:
    """Return the URL of the same store, without user, password and tokens.

    Text that is not a URL with a host is returned unchanged.
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

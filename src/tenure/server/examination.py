"""Examination of the settings, for `tenure serve --check` and for a start.

It binds no address, and does not create a missing store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

from tenure.clock import SystemClock
from tenure.engines import connect_engine, diagnose
from tenure.engines.contract import Finding
from tenure.errors import InvalidArgument, TenureError
from tenure.server.addresses import Address
from tenure.server.auth import read_tokens, readable_by_others
from tenure.server.auth.revocation import read_revoked
from tenure.server.settings import Settings
from tenure.server.tls import TlsFiles, certificate_of, server_context

_SOON = timedelta(days=14)
"""Remaining validity of a certificate below which a warning is given."""

_SOON_FOR_LISTS = timedelta(days=1)
"""Remaining validity of a revocation list below which a warning is given."""

_TIMEOUT = 10.0
"""Timeout of the store's answer in seconds."""


def examine_files(settings: Settings) -> Iterator[Finding]:
    """Report on tokens, certificates and addresses: errors, warnings and facts. Raises nothing."""
    yield from _tokens(settings)
    yield from _audit_log(settings)
    for address, files in settings.tls.items():
        yield _certificate(address, files)
        with contextlib.suppress(OSError):  # reported above
            loose = readable_by_others(files.key)
            if loose is not None:
                yield _warning("key", loose)
    lists = {each.client_crl for each in settings.tls.values() if each.client_crl is not None}
    for path in lists:
        with contextlib.suppress(InvalidArgument):  # reported above
            yield from _revocation_lists(path)
    for address in settings.exposed:
        yield Finding(
            "warning",
            "address",
            f"any client that reaches {address.url} is let in, from other machines too",
            "require tokens with --auth-token-file"
            + ("" if address.tls else ", and encrypt them with TLS")
            + ", or listen at 127.0.0.1",
        )
    for address in settings.legible:
        yield Finding(
            "warning",
            "address",
            f"tokens come to {address.url} unencrypted, and the network can read them",
            f"use TLS: {address.protocol}s://",
        )


def _warning(what: str, text: str) -> Finding:
    found, _, remedy = text.partition("; ")
    return Finding("warning", what, found, remedy)


def _tokens(settings: Settings) -> Iterator[Finding]:
    path = settings.auth_token_file
    if path is None:
        return
    try:
        found = read_tokens(path)
    except InvalidArgument as error:
        yield Finding("failure", "tokens", str(error))
        return
    why = found.shut_out(datetime.now(UTC))
    if why is not None and not settings.tokens:
        yield Finding(
            "failure",
            "tokens",
            f"the token file {path} {why}, so no client could use the server",
            f"tenure token new NAME --file {path}",
        )
        return
    number = len(found.tokens)
    yield Finding("ok", "tokens", f"{number} token{'' if number == 1 else 's'} in {path}")
    loose = readable_by_others(path)
    if loose is not None:
        yield _warning("tokens", loose)


def _audit_log(settings: Settings) -> Iterator[Finding]:
    path = settings.audit_log
    if path is None:
        return
    place = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        yield Finding("failure", "audit log", f"the audit log {path} cannot be written")
    else:
        yield Finding("ok", "audit log", f"actions are recorded in {path}")


def _certificate(address: Address, files: TlsFiles) -> Finding:
    try:
        server_context(files)
        found = certificate_of(files)
    except InvalidArgument as error:
        return Finding("failure", "certificate", str(error))
    left = found.ends - datetime.now(UTC)
    text = f"{address.url} is for {', '.join(found.names)} until {found.ends:%Y-%m-%d}"
    if files.client_ca is not None:
        text += "; clients need one too"
    if left < _SOON:
        return Finding(
            "warning", "certificate", text, f"renew {files.cert}, which ends in {left.days} days"
        )
    return Finding("ok", "certificate", text)


def _revocation_lists(path: str) -> Iterator[Finding]:
    found = read_revoked(path)
    now = datetime.now(UTC)
    if found.ends is not None and found.ends < now + _SOON_FOR_LISTS:
        when = "since" if found.ends <= now else "from"
        yield Finding(
            "warning",
            "revocation list",
            f"{path} is out of date {when} {found.ends:%Y-%m-%d %H:%M}Z, and clients with a "
            "certificate are refused then",
            "install the authority's next list, and reload the server",
        )
    else:
        yield Finding(
            "ok", "revocation list", f"certificates revoked in {path}: {len(found.revoked)}"
        )


async def examine_store(settings: Settings) -> AsyncIterator[Finding]:
    """Check that the store can be opened, and is suitable for a server. Raises nothing."""
    absent = broken = False
    try:
        engine = connect_engine(settings.store, SystemClock())
        # In a thread, because a request to a server runs its own event loop.
        for finding in await asyncio.to_thread(lambda: list(diagnose(settings.store))):
            absent = absent or finding.absent
            broken = broken or finding.level == "failure"
            if finding.level != "ok" or finding.absent:
                yield finding
        if broken:
            return
        if not engine.capabilities.resume:
            yield Finding(
                "failure",
                "store",
                f"{engine.url} has no sessions that outlive a connection",
                "a server needs them; use sqlite:///FILE",
            )
            return
        if absent:
            return
        try:
            async with asyncio.timeout(_TIMEOUT):
                await engine.open()
                nodes = await engine.list_nodes()
            durable = engine.capabilities.durable  # nodes of another server are known by now
        finally:
            await engine.aclose()
        if not durable:
            yield Finding(
                "warning",
                "store",
                f"{engine.url} ends with the server, with everything in it",
                "use sqlite:///FILE",
            )
        yield Finding("ok", "store", f"{engine.url} opens; nodes: {len(nodes)}")
    except TimeoutError:
        yield Finding("failure", "store", f"no answer within {_TIMEOUT:g} s", "see tenure doctor")
    except TenureError as error:
        found, _, remedy = str(error).partition("; ")
        yield Finding("failure", "store", found, remedy)

"""Files in the settings: examined, loaded at the start, and reloaded on each SIGHUP.

`load_files` reads all of them before anything changes, so that a wrong file changes nothing.

**Examination** of the settings is for `tenure serve --check` and for a start. It binds no address,
and does not create a missing store.

**Reloads** (`Reloader`) read the files on a thread, and apply the result on the event loop. Rules:

* Reading and parsing take place on a daemon thread, so a large file or a hanging file system blocks
  neither the event loop nor the end of the process.
* One reload at a time. A request during a reload causes another one, because the files may have
  changed after they were read. Several such requests are merged.
* A failed reload is reported to its callback and changes nothing; the next one is carried out.
* **Cancel.** `aclose` does not wait for the thread, and discards its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Generic, TypeVar

from tenure.clock import SystemClock
from tenure.engines import connect_engine, diagnose
from tenure.engines.contract import Finding
from tenure.errors import InvalidArgument, TenureError
from tenure.server.addresses import Address
from tenure.server.auth import Credentials, Token, read_tokens, readable_by_others
from tenure.server.auth.accounts import CertificateId, read_revoked
from tenure.server.auth.tokens import Rights
from tenure.server.log import LOGGER, log_event
from tenure.server.settings import Settings, Wrong
from tenure.server.tls import TlsFiles, certificate_of, server_context

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """Content of all files.

    Attributes:
        credentials: the accepted credentials; ``None`` if none are required.
        tls: the TLS context of each address with TLS.
        revoked: the revoked client certificates.
        authorities: the trusted authorities of each address whose clients need a certificate.
    """

    credentials: Credentials | None
    tls: Mapping[Address, ssl.SSLContext]
    revoked: frozenset[CertificateId]
    authorities: Mapping[Address, frozenset[bytes]] = field(default_factory=dict)

    def distrusted(self, address: Address, before: LoadedFiles) -> bool:
        """Return true if an authority of this address is no longer trusted."""
        former = before.authorities.get(address, frozenset())
        return bool(former - self.authorities.get(address, frozenset()))

    def changes(self, before: LoadedFiles) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield the changes since `before`, as events and facts of the audit log."""
        if self.credentials is not None and before.credentials is not None:
            yield from _changed_credentials(self.credentials, before.credentials)
        if self.revoked != before.revoked:
            added, gone = self.revoked - before.revoked, before.revoked - self.revoked
            yield (
                "revocation list changed",
                {"certificates_revoked": len(added), "certificates_reinstated": len(gone)},
            )
        for address, authorities in self.authorities.items():
            former = before.authorities.get(address, frozenset())
            if authorities != former:
                added_here, gone_here = authorities - former, former - authorities
                yield (
                    "client authorities changed",
                    {"address": address.url, "added": len(added_here), "removed": len(gone_here)},
                )


def load_files(settings: Settings) -> LoadedFiles:
    """Read all files, and log warnings about them.

    Raises:
        InvalidArgument: a file is invalid; `Wrong` lists all mistakes.
    """
    faults = []
    for finding in examine_files(settings):
        if finding.level == "failure":
            faults.append(finding.found)
        elif finding.level == "warning":
            remedy = finding.remedy or None
            log_event(LOGGER, logging.WARNING, "take care", found=finding.found, remedy=remedy)
    if faults:
        raise Wrong(list(dict.fromkeys(faults)))  # several listeners may share a certificate
    tls = {address: server_context(files) for address, files in settings.tls.items()}
    lists = {files.client_crl for files in settings.tls.values() if files.client_crl is not None}
    return LoadedFiles(
        _credentials(settings),
        tls,
        frozenset[CertificateId]().union(*(read_revoked(path).revoked for path in lists)),
        {
            address: frozenset(tls[address].get_ca_certs(binary_form=True))
            for address, files in settings.tls.items()
            if files.client_ca is not None
        },
    )


def _changed_credentials(
    now: Credentials, before: Credentials
) -> Iterator[tuple[str, dict[str, object]]]:
    tokens, former = ({each.digest: each for each in of.tokens} for of in (now, before))
    for digest, token in former.items():
        if digest not in tokens:
            yield "token revoked", {"token": token.name}
    for digest, token in tokens.items():
        was = former.get(digest)
        if was is None:
            yield "token added", {"token": token.name}
        elif (was.rights, was.expires) != (token.rights, token.expires) or (
            now.named and was.name != token.name
        ):
            renamed = was.name if was.name != token.name else None
            yield "token changed", {"token": token.name, "former_name": renamed}
    yield from _changed_rights("certificate", now.certificates, before.certificates)
    yield from _changed_rights("uid", now.uids, before.uids)


def _changed_rights(
    kind: str, now: Mapping[Any, Rights], before: Mapping[Any, Rights]
) -> Iterator[tuple[str, dict[str, object]]]:
    for each in (*before, *(each for each in now if each not in before)):
        if now.get(each) != before.get(each):
            done = "revoked" if each not in now else "changed" if each in before else "added"
            yield f"{kind} {done}", {kind: each}


def _credentials(settings: Settings) -> Credentials | None:
    own = tuple(Token.plain(*each) for each in settings.tokens.items())
    if settings.auth_token_file is None:
        return Credentials(own) if own else None
    found = read_tokens(settings.auth_token_file)
    return Credentials(own + found.tokens, found.certificates, found.uids, found.named)


class Reloader(Generic[T]):
    """Reloads of one server.

    Args:
        read: reads the files, on a thread.
        apply: applies the result, on the event loop.
        failed: called on the event loop with the error of a reload.
    """

    def __init__(
        self,
        read: Callable[[], T],
        apply: Callable[[T], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self._read = read
        self._apply = apply
        self._failed = failed
        self._idle: Callable[[], object] | None = None
        self._requested = False
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def request(self, idle: Callable[[], object]) -> None:
        """Schedule a reload.

        Args:
            idle: called afterwards, unless there was another request meanwhile.
        """
        self._requested = True
        self._idle = idle
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Apply nothing from now on."""
        self._is_closed = True
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        try:
            while self._requested:
                self._requested = False
                try:
                    self._apply(await self._read_on_a_thread())
                except Exception as error:
                    self._failed(error)
            if self._idle is not None:
                self._idle()
        finally:
            self._task = None

    async def _read_on_a_thread(self) -> T:
        """Read the files. Raises the errors of reading."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def read() -> None:
            try:
                found = self._read()
            except Exception as error:
                settle(partial(answer.set_exception, error))
            else:
                settle(partial(answer.set_result, found))

        def settle(how: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended with the server
                loop.call_soon_threadsafe(lambda: None if answer.done() else how())

        threading.Thread(target=read, name="tenure-reload", daemon=True).start()
        return await answer

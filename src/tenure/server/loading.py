"""Files in the settings, read at the start and on each SIGHUP.

`load_files` reads all of them before anything changes, so that a wrong file changes nothing.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenure.server.addresses import Address
from tenure.server.auth import Credentials, Token, read_tokens
from tenure.server.auth.revocation import CertificateId, read_revoked
from tenure.server.auth.tokens import Rights
from tenure.server.examination import examine_files
from tenure.server.log import LOGGER, log_event
from tenure.server.settings import Settings, Wrong
from tenure.server.tls import server_context


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

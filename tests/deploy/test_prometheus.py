"""A real Prometheus reads a server's metrics, and its queries give what the test counted."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import tenure
from tests.deploy.test_files import DEPLOY
from tests.ports import free_port
from tests.server.http.asking import HOLDER, READER, hosted
from tests.server.http.prometheus import program
from tests.server.http.test_answers import tokens

PATIENCE = 60.0


class Prometheus:
    """One that runs.

    Attributes:
        address: where it can be asked.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    async def ask(self, path: str) -> dict[str, Any]:
        """What its API answers."""

        def read() -> dict[str, Any]:
            with urlopen(f"{self.address}/api/v1/{path}", timeout=PATIENCE) as answered:
                found: dict[str, Any] = json.load(answered)["data"]
                return found

        return await asyncio.to_thread(read)

    async def query(self, query: str) -> dict[str, float]:
        """The values of a query, by their labels but those that Prometheus adds."""
        answered = await self.ask("query?" + urlencode({"query": query}))
        return {
            ",".join(
                value
                for name, value in sorted(each["metric"].items())
                if name not in {"__name__", "instance", "job"}
            ): float(each["value"][1])
            for each in answered["result"]
        }

    async def until(self, query: str, expected: dict[str, float]) -> None:
        """Return when a query gives these values, among others."""
        found: dict[str, float] = {}
        try:
            async with asyncio.timeout(PATIENCE):
                while not expected.items() <= found.items():
                    await asyncio.sleep(0.2)
                    try:
                        found = await self.query(query)
                    except OSError:
                        found = {}  # it is starting
        except TimeoutError:
            raise AssertionError(f"{query}: {found}, not {expected}") from None


@asynccontextmanager
async def watching(folder: Path, address: str, token: str) -> AsyncIterator[Prometheus]:
    """A Prometheus with the configuration of deploy/, which scrapes this server each second."""
    (folder / "token").write_text(token)
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    text = text.replace("/run/secrets/metrics-token", str(folder / "token"))
    text = text.replace("tenure:7080", urlsplit(address).netloc).replace("15s", "1s")
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    place = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={place}",
        "--log.level=warn",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Prometheus(f"http://{place}")
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(30):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def test_a_prometheus_counts_what_the_test_counted(tmp_path: Path) -> None:
    async with (
        hosted(authenticator=tokens(holder={"/": "administer"})) as server,
        watching(tmp_path, server.address, READER) as prometheus,
    ):
        await prometheus.until('up{job="tenure"}', {"": 1})
        url = server.native.address.replace("://", f"://{HOLDER}@")
        async with tenure.connect(url) as client:
            for path in ("/a", "/b"):
                await client.create_node(path)
            async with client.session("/a") as one, client.session("/b") as other:
                for _ in range(3):
                    async with one.mutex("m").lock():
                        pass
                async with other.mutex("m").lock(), one.mutex("kept").lock():
                    waiting = asyncio.ensure_future(one.mutex("kept").lock())
                    leases = 'tenure_leases{node=~"/.*"}'
                    await prometheus.until(leases, {"/a": 1, "/b": 1})
                    await prometheus.until("tenure_waiters", {"/a": 1, "/b": 0})
                    await prometheus.until("sum(tenure_sessions)", {"": 2})
                async with await waiting:
                    pass
        await prometheus.until("tenure_grants_total", {"/a": 5, "/b": 1})
        await prometheus.until("tenure_hold_seconds_count", {"": 6})
        await prometheus.until("sum(tenure_sessions)", {"": 0})
        await prometheus.until("tenure_losses_total", {"evicted": 0, "session_expired": 0})
        await prometheus.until("tenure_store_up", {"": 1})
        quantile = "histogram_quantile(0.5, sum by (le) (tenure_wait_seconds_bucket))"
        (median,) = (await prometheus.query(quantile)).values()
        assert median <= 0.001
        (group,) = (await prometheus.ask("rules"))["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}

"""The fence before keys of Redis, on a Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.crc import key_slot

from tenure.errors import InvalidArgument, StaleToken
from tenure.fencing import RedisFence
from tests.test_documents import ROOT, read

FENCE = RedisFence("report")
BODY = "{report}:body"


@pytest.fixture(params=["bytes", "text"])
def client(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, decode_responses=request.param == "text") as client:
        yield client
        client.flushall()


def test_an_older_token_is_refused_and_the_same_is_not(client: Any) -> None:
    assert FENCE.newest(client) is None
    for token in (33, 33, 34, 34, 2**53 - 1):
        FENCE.write(client, token, ["SET", BODY, f"by {token}"])
        assert FENCE.newest(client) == token
    for token in (2**53 - 2, 33, 0):
        with pytest.raises(StaleToken) as caught:
            FENCE.write(client, token, ["SET", BODY, f"by {token}"], ["SET", "{report}:new", 1])
        assert (caught.value.resource, caught.value.token) == ("report", token)
        assert caught.value.newest == 2**53 - 1
    assert client.get(BODY) in {b"by 9007199254740991", "by 9007199254740991"}
    assert not client.exists("{report}:new")


def test_numbers_are_compared_as_such(client: Any) -> None:
    FENCE.write(client, 9, ["SET", BODY, ""])
    FENCE.write(client, 10, ["SET", BODY, ""])
    with pytest.raises(StaleToken):
        FENCE.write(client, 9, ["SET", BODY, ""])


def test_the_replies_are_those_of_redis(client: Any) -> None:
    replies = FENCE.write(
        client,
        33,
        ["HSET", "{report}:pages", "1", "first", "2", "second"],
        ["SET", BODY, b"\x00\xff", "EX", 60],
        ["SET", BODY, "again", "NX"],
        ["INCRBYFLOAT", "{report}:sum", 1.5],
        ["DEL", "{report}:draft"],
    )
    assert replies in ([2, b"OK", None, b"1.5", 0], [2, "OK", None, "1.5", 0])
    assert 0 < client.ttl(BODY) <= 60
    assert client.ttl(FENCE.key) == -1  # for ever


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("return 7", 7),
        ("return {1, 2, {3}}", [1, 2, [3]]),
        ("return nil", None),
        ("return false", None),
        ("", None),
        ("redis.call('SET', KEYS[1], ARGV[1])  -- and no more", None),
        ("return #KEYS * 10 + #ARGV", 12),
        ("return tonumber(ARGV[2]) % 7", 2),
    ],
)
def test_a_script_finds_its_own_arguments_and_returns_what_it_returns(
    client: Any, body: str, result: Any
) -> None:
    assert FENCE.run(client, 33, body, keys=[BODY], args=["x", 9]) == result
    assert FENCE.newest(client) == 33


def test_a_stale_script_has_not_begun(client: Any) -> None:
    FENCE.write(client, 34, ["SET", BODY, "new"])
    with pytest.raises(StaleToken):
        FENCE.run(client, 33, "return redis.call('DEL', KEYS[1])", keys=[BODY])
    assert client.exists(BODY)


def test_what_redis_finds_wrong_is_raised_by_the_client(client: Any) -> None:
    FENCE.write(client, 33, ["SET", BODY, "text"])
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        FENCE.write(client, 33, ["LPUSH", BODY, "x"])
    with pytest.raises(redis.ResponseError, match="mine"):
        FENCE.run(client, 33, "return redis.error_reply('mine')")
    with pytest.raises(redis.ResponseError, match="not an integer"):
        FENCE.run(client, 33, "return redis.pcall('INCR', KEYS[1])", keys=[BODY])


def test_a_cluster_finds_the_fence_beside_the_keys_of_the_resource() -> None:
    assert FENCE.key == "tenure:fence:{report}"
    assert key_slot(FENCE.key.encode()) == key_slot(BODY.encode())
    assert RedisFence("report", prefix="f:").key == "f:{report}"
    assert "f:{report}" in repr(RedisFence("report", prefix="f:"))


def test_each_resource_has_tokens_of_its_own(client: Any) -> None:
    FENCE.write(client, 34, ["SET", BODY, "new"])
    RedisFence("other").write(client, 5, ["SET", "{other}", "new"])
    assert RedisFence("other").newest(client) == 5


async def test_with_a_client_for_asyncio_it_is_awaited(redis_url: str) -> None:
    async with redis.asyncio.from_url(redis_url) as client:
        assert await FENCE.newest(client) is None
        assert await FENCE.write(client, 34, ["SET", BODY, "new"]) == [b"OK"]
        with pytest.raises(StaleToken):
            await FENCE.write(client, 33, ["SET", BODY, "old"])
        assert await FENCE.run(client, 34, "return redis.call('GET', KEYS[1])", keys=[BODY]) == (
            b"new"
        )
        assert await FENCE.newest(client) == 34
        await client.flushall()


def test_the_example_of_the_documents_runs(
    redis_url: str, client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [
        block
        for block in read(ROOT / "docs" / "how-to" / "fencing.md")
        if "RedisFence(" in block.text
    ]
    monkeypatch.setenv("REDIS_URL", redis_url)
    exec(compile(example.text, example.place, "exec"), {})
    refused, length = capsys.readouterr().out.splitlines()
    assert refused.startswith("refused: the write to 'report' with fencing token 33 was refused")
    assert length == f"length {len('the newer, and more')}"


class Answering:
    """What has an `eval`, and one answer: what is made of it does not need a Redis."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def eval(self, script: str, count: int, *keys_and_args: Any) -> Any:
        assert keys_and_args[0] == FENCE.key
        return self.answer


def test_an_answer_is_read() -> None:
    assert FENCE.write(Answering([1, [b"OK", 1]]), 33, ["SET", BODY, "x"]) == [b"OK", 1]
    assert FENCE.run(Answering([1]), 33, "return nil") is None
    with pytest.raises(StaleToken) as caught:
        FENCE.run(Answering([0, b"34"]), 33, "return 1")
    assert caught.value.newest == 34
    assert FENCE.newest(Answering(b"34")) == 34
    assert FENCE.newest(Answering(None)) is None


async def test_an_answer_that_is_awaited_is_read_when_it_is_there() -> None:
    answer = asyncio.get_running_loop().create_future()
    newest = FENCE.newest(Answering(answer))
    answer.set_result("34")
    assert await newest == 34


@pytest.mark.parametrize(
    "commands", [[], [[]], [["SET"]], ["SET key value"], [b"SET key"], [["GET", "a"], ["GET"]]]
)
def test_what_is_no_command_is_refused(commands: Any) -> None:
    with pytest.raises(InvalidArgument, match="command"):
        FENCE.write(None, 33, *commands)


@pytest.mark.parametrize("token", [-1, True, 2**53, "7"])
def test_what_is_no_token_is_refused(token: Any) -> None:
    with pytest.raises(InvalidArgument, match="fencing token"):
        FENCE.run(None, token, "return 1")


@pytest.mark.parametrize(
    "arguments",
    [{"resource": ""}, {"resource": "{x}"}, {"resource": "x", "prefix": "{app}:"}],
)
def test_what_makes_no_fence_is_refused(arguments: Any) -> None:
    with pytest.raises(InvalidArgument):
        RedisFence(**arguments)

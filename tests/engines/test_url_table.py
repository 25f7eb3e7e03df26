"""URLs of all engines: one table of parameters, and the rules that are the same everywhere."""

from __future__ import annotations

import contextlib
import re
import ssl
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tenure.engines import BUILT_IN
from tenure.engines._kit.url import Parameter, StoreUrl, Tls, number, text
from tenure.errors import InvalidArgument

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "urls.md"

# One complete URL for each scheme, with the scheme that has TLS, if there is one.
URLS = {
    "sqlite": ("sqlite:////var/lib/jobs.db", None),
    "redis": ("redis://one.example.org", "rediss"),
    "rediss": ("rediss://one.example.org", "rediss"),
    "redis+unix": ("redis+unix:///run/redis.sock", "rediss"),
    "redis+cluster": ("redis+cluster://one,two", "rediss"),
    "redis+sentinel": ("redis+sentinel://one,two/mymaster", "rediss"),
    "postgresql": ("postgresql://one.example.org/jobs", None),  # libpq decides about TLS
    "postgres": ("postgres://one.example.org/jobs", None),
    "etcd": ("etcd://one.example.org", "etcds"),
    "etcds": ("etcds://one.example.org", "etcds"),
    "tenure": ("tenure://one.example.org", "tenures"),
    "tenures": ("tenures://one.example.org", "tenures"),
    "tenure+unix": ("tenure+unix:///run/tenure.sock", "tenures"),
    "ydb": ("ydb://one.example.org/local", "ydbs"),
    "ydbs": ("ydbs://one.example.org/local", "ydbs"),
    "dflockd": ("dflockd://one.example.org", "dflockds"),
    "dflockds": ("dflockds://one.example.org", "dflockds"),
}
ENCRYPTED = sorted({secure for _, secure in URLS.values() if secure})


def module(scheme: str) -> Any:
    return import_module(f"{BUILT_IN[scheme]}.url")


def parse(url: str) -> Any:
    return module(url.partition(":")[0].lower()).parse(url)


def refusal(url: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        parse(url)
    return str(caught.value)


PARAMETERS: list[tuple[str, Parameter[Any]]] = [
    (scheme, each)
    for scheme in ("sqlite", "redis", "etcd", "tenure", "ydb", "dflockd")
    for each in module(scheme).PARAMETERS
] + [("postgresql", each) for each in module("postgresql").OWN]  # the others are libpq's


def test_every_scheme_is_in_the_table() -> None:
    assert set(URLS) == set(BUILT_IN) - {"memory"}


def test_one_name_means_one_thing() -> None:
    meanings: dict[str, set[str]] = {}
    for _, each in PARAMETERS:
        for name in (each.name, *each.aliases):
            meanings.setdefault(name, set()).add(each.name)
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


def test_one_name_has_one_syntax_and_the_same_aliases() -> None:
    shapes: dict[str, set[Any]] = {}
    for _, each in PARAMETERS:
        read = getattr(each.read, "args", each.read)
        shapes.setdefault(each.name, set()).add((repr(read), each.aliases, each.secret))
    assert {name: found for name, found in shapes.items() if len(found) > 1} == {}


@pytest.mark.parametrize("scheme", sorted({scheme for scheme, _ in PARAMETERS}))
def test_the_documents_list_every_parameter_and_alias(scheme: str) -> None:
    document = PAGE.read_text(encoding="utf-8")
    rows = {line for line in document.splitlines() if line.startswith("| `")}
    listed = {
        name
        for row in rows
        if f"`{scheme}://`" in row or "all but" in row or "| all" in row
        for name in re.findall(r"`([a-z_]+)`", row)
    }
    names = {
        name
        for engine, each in PARAMETERS
        if engine == scheme
        for name in (each.name, *each.aliases)
    }
    assert names <= listed


@pytest.mark.parametrize("url", [each for each, _ in URLS.values()])
class TestEveryScheme:
    def test_a_complete_url_is_shown_as_a_store(self, url: str) -> None:
        assert parse(url).url.startswith(url.partition("//")[0])
        assert parse(url.replace(url.partition(":")[0], url.partition(":")[0].upper()))

    def test_an_unknown_parameter_is_refused_with_the_nearest_one(self, url: str) -> None:
        known = module(url.partition(":")[0]).PARAMETERS
        for each in known:
            why = refusal(f"{url}?{each.name}x=1")
            assert f"there is no parameter '{each.name}x' here; did you mean " in why
        assert f"there are {known[0].name}, " in refusal(f"{url}?zzzzz=1")
        assert "did you mean" not in refusal(f"{url}?zzzzz=1")

    def test_a_parameter_is_given_once_and_has_a_value(self, url: str) -> None:
        for each in module(url.partition(":")[0]).PARAMETERS:
            assert f"{each.name} has no value" in refusal(f"{url}?{each.name}=")
            for name in (each.name, *each.aliases):
                assert f"has {each.name} twice" in refusal(f"{url}?{each.name}=1&{name}=1")

    @pytest.mark.parametrize(
        "value", ["\udcff", "%00", "%FF", "9" * 400, "a:99999", "a:\u0663", "]["]
    )
    def test_a_strange_value_is_accepted_or_refused(self, url: str, value: str) -> None:
        for each in module(url.partition(":")[0]).PARAMETERS:
            with contextlib.suppress(InvalidArgument):
                parse(f"{url}?{each.name}={value}")

    def test_a_fragment_means_nothing(self, url: str) -> None:
        assert "'#'" in refusal(f"{url}#part")


@pytest.mark.parametrize(
    "url", [each for each, _ in URLS.values() if "unix" not in each and "sqlite" not in each]
)
class TestHosts:
    @pytest.mark.parametrize(
        "hosts",
        ["a b", "-a", "a..b", 64 * "a", "a:b", "a:0", "a:65536", "a:1:2", "[::1", "[a]", "::1"],
    )
    def test_one_that_is_none_is_refused(self, url: str, hosts: str) -> None:
        refusal(re.sub("one[^/]*", hosts, url))

    @pytest.mark.parametrize("hosts", ["a,", ",a", "a,a", "a,,b"])
    def test_a_list_names_different_hosts(self, url: str, hosts: str) -> None:
        refusal(re.sub("one[^/]*", hosts, url))

    @pytest.mark.parametrize("secret", ["S3cr3t/x", "S3cr3t?x", "S3cr3t#x", "x@S3cr3t/x"])
    def test_a_secret_that_cuts_the_url_short_is_not_shown(self, url: str, secret: str) -> None:
        for user in ("", "user:"):
            why = refusal(url.replace("//", f"//{user}{secret}@", 1))
            assert "S3cr3t" not in why
            assert "%2F" in why

    def test_no_message_and_no_description_shows_what_stands_before_the_hosts(
        self, url: str
    ) -> None:
        with_secret = url.replace("//", "//user:S3cr3t%2F@", 1)
        given = parse(with_secret)
        for shown in (given.url, repr(given), refusal(f"{with_secret}?zzz=1")):
            assert "S3cr3t" not in shown

    def test_no_description_shows_a_secret_parameter(self, url: str) -> None:
        for each in module(url.partition(":")[0]).PARAMETERS:
            if each.secret:
                with_user = "user=u&" if each.name == "password" else ""
                given = parse(f"{url}?{with_user}{each.name}=S3cr3t")
                assert "S3cr3t" not in given.url
                assert "S3cr3t" not in repr(given)


@pytest.mark.parametrize(("url", "secure"), [each for each in URLS.values() if each[1]])
def test_parameters_of_tls_are_for_what_is_encrypted(url: str, secure: str) -> None:
    if url.startswith(f"{secure}:"):
        assert "tls_key needs the tls_cert" in refusal(f"{url}?tls_key=/k.pem")
    else:
        assert f"write {secure}://" in refusal(f"{url}?tls_cert=/c.pem")


@pytest.mark.parametrize("scheme", ENCRYPTED)
@pytest.mark.parametrize(
    "spelling", ["tls_ca", "tls-ca", "ssl_ca_certs", "ssl-ca-certs", "root_certificates"]
)
def test_the_file_of_the_authorities_has_one_name_and_its_aliases(
    scheme: str, spelling: str, tmp_path: Path
) -> None:
    url = URLS[scheme][0]
    given = StoreUrl(f"{url}?{spelling}={tmp_path}/none.pem", (scheme,), module(scheme).PARAMETERS)
    tls = given.tls(inside=True, scheme=scheme)
    assert tls is not None
    assert tls.ca == f"{tmp_path}/none.pem"
    with pytest.raises(InvalidArgument, match=r"none\.pem"):
        tls.context()


@pytest.mark.parametrize(
    ("verify", "names", "mode"),
    [
        ("full", True, ssl.CERT_REQUIRED),
        ("required", True, ssl.CERT_REQUIRED),
        ("ca", False, ssl.CERT_REQUIRED),
        ("none", False, ssl.CERT_NONE),
    ],
)
@pytest.mark.parametrize("scheme", [each for each in ENCRYPTED if each != "ydbs"])
def test_certificates_are_checked_as_far_as_the_url_says(
    scheme: str, verify: str, names: bool, mode: ssl.VerifyMode
) -> None:
    tls = parse(f"{URLS[scheme][0]}?tls_verify={verify}").tls
    context = tls.context() if isinstance(tls, Tls) else tls
    assert (context.check_hostname, context.verify_mode) == (names, mode)


@pytest.mark.parametrize("name", [".x", "a..b", "-", "x" * 64, "ä" * 3])
@pytest.mark.parametrize("scheme", [each for each in ENCRYPTED if each != "ydbs"])
def test_the_name_in_a_certificate_is_that_of_a_host(scheme: str, name: str) -> None:
    assert "is the name of a host" in refusal(f"{URLS[scheme][0]}?tls_server_name={name}")


def test_every_python_accepts_the_same_certificates() -> None:
    assert not Tls().context().verify_flags & ssl.VERIFY_X509_STRICT


def test_the_authorities_may_be_a_folder(tmp_path: Path) -> None:
    assert Tls(ca=str(tmp_path)).context().verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("written", ["low_level", "low-level", "ll"])
def test_hyphens_are_underscores_and_values_are_decoded(written: str) -> None:
    parameter = text("low_level", aliases=("ll",))
    assert StoreUrl(f"x://h?{written}=a%20%2Bb+", ("x",), [parameter])[parameter] == "a +b+"


def test_a_number_is_whole_if_its_default_is() -> None:
    whole, real = number("whole", 3, 0, 9), number("real", 3.0, 0, 9)
    given = StoreUrl("x://h?real=1.5", ("x",), [whole, real])
    assert (given[whole], given[real]) == (3, 1.5)
    with pytest.raises(InvalidArgument, match=r"whole is a whole number from 0 to 9, not '1\.5'"):
        StoreUrl("x://h?whole=1.5", ("x",), [whole])
    with pytest.raises(InvalidArgument, match="real is a number from 0 to 9, not 'nan'"):
        StoreUrl("x://h?real=nan", ("x",), [real])


@pytest.mark.parametrize("scheme", sorted(URLS))
def test_a_url_of_another_scheme_is_refused_and_not_shown(scheme: str) -> None:
    for url in (f"{scheme}:/S3cr3t://host/path", f"{scheme}:S3cr3t@host"):
        with pytest.raises(InvalidArgument, match="does not begin with") as refused:
            module(scheme).parse(url)
        assert "S3cr3t" not in str(refused.value)

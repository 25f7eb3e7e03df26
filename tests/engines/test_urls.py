"""What is said of a URL that no engine can be found for."""

from __future__ import annotations

import pytest

import tenure


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("jobs.db", "for a file write sqlite:///jobs.db"),
        ("/var/lib/jobs.db", "for a file write sqlite:////var/lib/jobs.db"),
        ("redis:/host", "write redis://host"),
        ("redis:host:6379", "write redis://host:6379"),
        ("etcds//host", "write etcds://host"),
        ("sqlite:jobs.db", "write sqlite:///jobs.db"),
        (
            "sqlite:/data/x.db",
            (
                "write sqlite:////data/x.db for the absolute path /data/x.db, or "
                "sqlite:///data/x.db for a path that counts from the current folder"
            ),
        ),
        ("C:/jobs.db", "for a file write sqlite:///C:/jobs.db"),
    ],
)
def test_one_without_a_scheme_is_told_how_to_write_it(url: str, advice: str) -> None:
    with pytest.raises(tenure.InvalidArgument) as caught:
        tenure.connect(url)
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize(
    ("url", "advice"),
    [("reddis://host", "did you mean redis://? there are: "), ("http://host", "; there are: ")],
)
def test_an_unknown_scheme_is_told_what_there_is(url: str, advice: str) -> None:
    with pytest.raises(tenure.Unsupported) as caught:
        tenure.connect(url)
    assert advice in str(caught.value)
    assert "sqlite://" in str(caught.value)

"""File systems of fsspec get the timeouts of the configuration, and keep what their users name."""

from __future__ import annotations

import aiohttp
import dask
import pytest

from dask_image_ingest.storage.fsspec_files import file_system, with_defaults

OURS = aiohttp.ClientTimeout(total=None, sock_connect=1.5, sock_read=2.5)
THEIRS = aiohttp.ClientTimeout(total=7)


@pytest.fixture(autouse=True)
def configured():
    names = {"connect-timeout": 1.5, "read-timeout": 2.5}
    with dask.config.set({f"image-ingest.remote.{name}": value for name, value in names.items()}):
        yield


@pytest.mark.parametrize(
    ("url", "given", "expected"),
    [
        ("http://x/a.tar", {}, {"client_kwargs": {"timeout": OURS}, "encoded": True}),
        (
            "https://x/a.tar",
            {"client_kwargs": {"headers": {"A": "b"}}},
            {"client_kwargs": {"timeout": OURS, "headers": {"A": "b"}}, "encoded": True},
        ),
        ("http://x/a.tar", {"client_kwargs": {"timeout": THEIRS}, "encoded": False}, None),
        ("http://x/a.tar", {"timeout": 7}, {"timeout": 7, "encoded": True}),
        ("gs://b/a.tar", {"requests_timeout": 7}, None),
        ("gs://b/a.tar", {"token": "anon"}, {"token": "anon", "requests_timeout": OURS}),
        ("memory://a.tar", {"a": 1}, None),
        (
            "zip://a.tar::https://x/a.zip",
            {"zip": {"mode": "r"}},
            {"zip": {"mode": "r"}, "https": {"client_kwargs": {"timeout": OURS}, "encoded": True}},
        ),
        (
            "zip://a.tar::http://x/a.zip",
            {"http": {"client_kwargs": {"timeout": THEIRS}, "encoded": False}},
            None,
        ),
    ],
)
def test_what_is_given_is_kept(url, given, expected):
    before = repr(given)
    assert with_defaults(url, given) == (given if expected is None else expected)
    assert repr(given) == before


def test_a_change_of_the_configuration_is_heeded():
    first, _ = file_system("http://x/a.tar", None)
    assert first.client_kwargs == {"timeout": OURS}
    with dask.config.set({"image-ingest.remote.read-timeout": 9}):
        assert file_system("http://x/a.tar", None)[0].client_kwargs["timeout"].sock_read == 9

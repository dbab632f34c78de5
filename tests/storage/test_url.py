"""What URLs say without a look at what is behind them."""

from __future__ import annotations

import pytest

from dask_image_ingest.storage.shard import identities


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/k.tar", "s3a://b/k.tar"),
        ("gs://b/k.tar", "gcs://b/k.tar"),
        ("abfs://c/k.tar", "az://c/k.tar"),
        ("memory://out/k.tar", "memory:///out/k.tar"),
        ("tar://inner.tar::s3://b/k.tar", "s3://b/k.tar"),
        ("file:///data/k.tar", "/data/k.tar"),
        ("tar://inner.tar::file:///data/k.tar", "/data/k.tar"),
        ("/data/x/../k.tar", "/data/k.tar"),
        ("unheard-of://b/k.tar", "unheard-of://b/k.tar"),
    ],
)
def test_one_file_has_one_identity_however_it_is_written(one, other):
    assert not identities(one).isdisjoint(identities(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/k.tar", "s3://b/l.tar"),
        ("s3://b/k.tar", "gs://b/k.tar"),
        ("hdfs://one/k.tar", "hdfs://other/k.tar"),
        ("s3://b/k.tar", "/b/k.tar"),
        ("unheard-of://b/k.tar", "unheard-of://c/k.tar"),
    ],
)
def test_other_files_have_others(one, other):
    assert identities(one).isdisjoint(identities(other))


def test_a_link_is_what_it_leads_to(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "k.tar").touch()
    (tmp_path / "one.tar").symlink_to(tmp_path / "link" / "k.tar")
    assert identities(str(tmp_path / "one.tar")) == identities(str(tmp_path / "data" / "k.tar"))

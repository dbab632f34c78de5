"""What URLs say without a look at what is behind them."""

from __future__ import annotations

from dask_image_ingest.storage.shard import identities

SAME = [
    ("s3://b/k.tar", "s3a://b/k.tar"),
    ("gs://b/k.tar", "gcs://b/k.tar"),
    ("abfs://c/k.tar", "az://c/k.tar"),
    ("memory://out/k.tar", "memory:///out/k.tar"),
    ("tar://inner.tar::s3://b/k.tar", "s3://b/k.tar"),
    ("file:///data/k.tar", "/data/k.tar"),
    ("tar://inner.tar::file:///data/k.tar", "/data/k.tar"),
    ("/data/x/../k.tar", "/data/k.tar"),
    ("unheard-of://b/k.tar", "unheard-of://b/k.tar"),
]
OTHERS = [
    ("s3://b/k.tar", "s3://b/l.tar"),
    ("s3://b/k.tar", "gs://b/k.tar"),
    ("hdfs://one/k.tar", "hdfs://other/k.tar"),
    ("s3://b/k.tar", "/b/k.tar"),
    ("unheard-of://b/k.tar", "unheard-of://c/k.tar"),
]


def test_one_file_has_one_identity_however_it_is_written():
    assert [pair for pair in SAME if identities(pair[0]).isdisjoint(identities(pair[1]))] == []
    assert [pair for pair in OTHERS if identities(pair[0]) & identities(pair[1])] == []


def test_a_link_is_what_it_leads_to(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "k.tar").touch()
    (tmp_path / "one.tar").symlink_to(tmp_path / "link" / "k.tar")
    assert identities(str(tmp_path / "one.tar")) == identities(str(tmp_path / "data" / "k.tar"))

"""A damaged shard keeps its whole samples and says what is lost; an unreadable one is skipped."""

from __future__ import annotations

import gzip
import logging
import re
import warnings

import numpy as np
import pytest
from tars import BLOCK, header, padded, tar, zstd

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import samples
from dask_image_ingest.frames.pandas_backend import PandasBackend


@pytest.fixture(scope="module")
def files(photos):
    return [(f"{n}.{p.extension}", p.encoded) for n, p in enumerate(photos[:4])]


@pytest.fixture(scope="module")
def shard(files):
    return tar(files)


def start_of(files, member: int) -> int:
    """Where the header of a member is."""
    return sum(BLOCK + len(padded(data)) for _, data in files[:member])


def damages(files, shard):
    """Name → a damaged shard, how many samples it keeps, the byte that is reported, and why."""
    second, third = start_of(files, 1), start_of(files, 2)
    end = start_of(files, 4)
    forged = bytearray(shard)
    forged[third + 4] ^= 0xFF
    broken_gz = gzip.compress(shard, mtime=0)
    broken_zstd = zstd(shard)
    return {
        "cut in a header": (shard[: second + 100], 1, second, "ends inside the header"),
        "cut in a member": (shard[: second + 700], 1, second, "bytes before the member '1.jpg'"),
        "cut between two": (shard[:third], 2, None, None),
        "no end blocks": (shard[:end], 4, None, None),
        "one end block": (shard[: end + BLOCK], 4, None, None),
        "zero bytes": (b"", 0, None, None),
        "zeros": (bytes(10_240), 0, None, None),
        "trailing garbage": (shard + b"garbage" * 99, 4, len(shard), "follows b'garbage"),
        "wrong checksum": (bytes(forged), 2, third, "checksum .* is wrong"),
        "another file inside": (
            shard[:third] + b"<html>" * 200,
            2,
            third,
            "no header at byte .*HTML",
        ),
        "two tars joined": (shard + shard, 4, len(shard), "follows a tar header"),
        "gzip breaks off": (broken_gz[: len(broken_gz) * 2 // 3], None, None, "gzip stream breaks"),
        "gzip has a wrong checksum": (broken_gz[:-8] + bytes(8), None, None, "gzip stream breaks"),
        "zstd breaks off": (broken_zstd[: len(broken_zstd) * 2 // 3], None, None, "Zstandard"),
    }


NAMES = list(damages([("0.jpg", b""), ("1.jpg", b""), ("2.jpg", b""), ("3.jpg", b"")], bytes(4096)))


@pytest.mark.parametrize("name", NAMES)
def test_complete_samples_are_kept_and_what_is_lost_is_reported(name, files, shard, tmp_path):
    damaged, kept, byte, reason = damages(files, shard)[name]
    path = tmp_path / "damaged.tar"
    path.write_bytes(damaged)
    good = tmp_path / "good.tar"
    good.write_bytes(shard)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = dii.read_webdataset_images([path, good], backend="pandas").compute()
    mine = frame[frame["__url__"] == str(path)]
    expected = frame[frame["__url__"] == str(good)]
    assert len(expected) == 4
    if kept is None:
        kept = len(mine)
        # Zstandard gives nothing of a block that is not whole.
        assert 0 < kept <= 4 or name == "zstd breaks off"
    assert mine["__key__"].tolist() == [str(n) for n in range(kept)]
    assert mine["error"].isna().all()
    for got, want in zip(mine.images.arrays(), expected.images.arrays()[:kept], strict=True):
        np.testing.assert_array_equal(got, want)
    messages = [str(warning.message) for warning in caught]
    if reason is None:
        assert not messages
    else:
        (message,) = messages
        assert re.search(reason, message)
        assert str(path) in message
        assert f"at byte {'' if byte is None else byte}" in message


UNREADABLE = {"a picture": 0, "html": b"<html>not found</html>" * 50, "vanished": None}


def unreadable_shard(kind, tmp_path, files, place=1):
    path = tmp_path / f"{'az'[place]}-unreadable.tar"
    content = UNREADABLE[kind]
    path.write_bytes(files[0][1] if content == 0 else content or tar(files))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("columns", [None, ["__key__"], ["error"]])
@pytest.mark.parametrize("errors", ["null", "drop"])
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("place", [0, 1])
def test_an_unreadable_shard_is_skipped_with_a_warning(
    kind, place, errors, columns, files, tmp_path, caplog
):
    bad = unreadable_shard(kind, tmp_path, files, place)
    good = [tmp_path / "good-1.tar", tmp_path / "good-2.tar"]
    for path in good:
        path.write_bytes(tar(files))
    paths = sorted([*good, bad])
    ddf = dii.read_webdataset_images(
        paths, columns, shard_errors="drop", errors=errors, backend="pandas"
    )
    if kind == "vanished":
        bad.unlink()
    with caplog.at_level(logging.WARNING), pytest.warns(UserWarning, match="skipped: .*unreadable"):
        parts = [partition.compute() for partition in ddf.partitions]
    assert [len(part) for part in parts] == [0 if path == bad else 4 for path in paths]
    assert all(part.dtypes.equals(ddf._meta.dtypes) for part in parts)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["skipped"]


@pytest.mark.parametrize("kind", ["a picture", "vanished"])
def test_an_unreadable_shard_raises_unless_it_may_be_skipped(kind, files, tmp_path):
    bad = unreadable_shard(kind, tmp_path, files)
    good = tmp_path / "good.tar"
    good.write_bytes(tar(files))
    ddf = dii.read_webdataset_images([good, bad], backend="pandas")
    if kind == "vanished":
        bad.unlink()
    with pytest.raises((dii.ShardError, dii.ShardNotFoundError), match=r"unreadable\.tar"):
        ddf.compute()


def test_where_every_shard_is_unreadable_there_is_nothing_to_skip_to(files, tmp_path):
    bad = unreadable_shard("html", tmp_path, files)
    with pytest.raises(dii.ShardError, match=r"none of the 1 shards.*unreadable\.tar.*HTML"):
        dii.read_webdataset_images(bad, shard_errors="drop", backend="pandas")


def test_the_argument_is_checked(files, tmp_path):
    with pytest.raises(dii.ArgumentError, match="shard_errors='ignore'"):
        dii.read_webdataset_images(tmp_path, shard_errors="ignore", backend="pandas")


def test_a_key_that_occurs_in_two_places_gives_two_rows(files, tmp_path):
    path = tmp_path / "repeated.tar"
    path.write_bytes(tar([*files, files[0]]))
    frame = dii.read_webdataset_images(path, backend="pandas").compute()
    assert frame["__key__"].tolist() == ["0", "1", "2", "3", "0"]
    assert frame["error"].isna().all()
    first, *_, last = frame.images.arrays()
    np.testing.assert_array_equal(first, last)


def test_a_picture_twice_in_one_sample_is_an_error_row(files, tmp_path):
    path = tmp_path / "twice.tar"
    path.write_bytes(tar([files[0], files[0], *files[1:]]))
    frame = dii.read_webdataset_images(path, backend="pandas").compute()
    assert frame["__key__"].tolist() == ["0", "1", "2", "3"]
    assert frame["error"].str.split(":").str[0].tolist()[0] == "duplicate-member"
    assert frame["error"].isna().sum() == 3


def test_a_shard_with_problems_is_one_line_in_the_log(tmp_path, files, caplog):
    path = tmp_path / "bad.tar"
    path.write_bytes(tar([*files, *((f"bad{n}.jpg", b"<html>") for n in range(50))]))
    dii.read_webdataset_images(path, backend="pandas").compute()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path}: 50 of 54 images")
    assert record.name == "dask_image_ingest"


def claiming(name: bytes, size: int) -> bytes:
    """A sparse member that claims to expand to ``size`` bytes."""
    records = b""
    for field, value in (("major", 1), ("minor", 0), ("realsize", size)):
        record = f" GNU.sparse.{field}={value}\n".encode()
        length = len(record) + 2
        records += f"{length if length < 100 else length + 1}".encode() + record
    long_header = header(b"p", b"%011o\0" % len(records), b"x") + padded(records)
    return long_header + header(name, b"00000001000\0") + padded(b"0\n")


@pytest.mark.parametrize("size", [2**28 + 1, 2**31, 10**13, 10**30])
def test_a_member_that_claims_terabytes_costs_its_own_value(files, tmp_path, size):
    path = tmp_path / "a.tar"
    claims = claiming(b"x.jpg", size) + claiming(b"y.txt", size)
    path.write_bytes(claims + tar([*files, ("z.txt", b"text")]))
    ddf = dii.read_webdataset_images(path, backend="pandas")
    with pytest.warns(UserWarning, match=r"1 of 7 values of 'txt' .*first that of 'y'"):
        frame = ddf.compute()
    assert frame["error"].str.partition(":")[0].tolist()[:2] == ["too-large", "missing"]
    assert frame["image"].notna().tolist() == [False, False, True, True, True, True, False]
    assert frame["txt"].fillna("none").tolist() == [*["none"] * 6, "text"]
    late = ddf.drop(columns=["image", "error", "txt"])
    assert dii.decode_images(late)["error"].compute().notna().sum() == 3


def test_members_larger_than_max_member_bytes_are_null_and_counted(files, tmp_path, monkeypatch):
    """Those with holes, whose claims cost nothing, and those that are there; the image is not."""
    path = tmp_path / "a.tar"
    large = [("v.txt", b"x" * 1001), ("w.txt", b"x" * 1000), ("v.jpg", files[0][1])]
    assert len(files[0][1]) > 1000
    path.write_bytes(claiming(b"u.txt", 2**30) + tar(large))
    expanded = []
    monkeypatch.setattr(samples, "read_member", recording(samples.read_member, expanded))
    ddf = dii.read_webdataset_images(path, backend="pandas", max_member_bytes=1000)
    said = r"2 of 3 values of 'txt' are larger than max_member_bytes=1,000 .*first that of 'u'"
    with pytest.warns(UserWarning, match=said):
        frame = ddf.compute()
    assert frame["txt"].isna().tolist() == [True, True, False]
    assert frame["image"].notna().tolist() == [False, True, False]
    assert 2**30 not in expanded
    with pytest.warns(UserWarning, match="larger than max_member_bytes=268,435,456"):
        sizes = dii.read_webdataset_images(path, backend="pandas")["txt"].str.len().compute()
    assert sizes.fillna(0).tolist() == [0, 1001, 1000]
    dii.write_index(path)
    indexed = dii.read_webdataset_images(path, backend="pandas", index=True, max_member_bytes=1000)
    with pytest.warns(UserWarning, match=said):
        assert indexed["txt"].isna().compute().tolist() == [True, True, False]


def recording(read, sizes):
    def recorded(content, index, span):
        sizes.append(span[1])
        return read(content, index, span)

    return recorded


@pytest.mark.parametrize("limit", [0, -1, "many", True, [5]])
def test_max_member_bytes_is_a_number_of_bytes(files, tmp_path, limit):
    path = tmp_path / "a.tar"
    path.write_bytes(tar(files))
    with pytest.raises(dii.ArgumentError, match=r"max_member_bytes=.* such as '1 GiB', or None"):
        dii.read_webdataset_images(path, backend="pandas", max_member_bytes=limit)
    for sound in (1, "1 MiB", None, 1e6):
        dii.read_webdataset_images(path, backend="pandas", max_member_bytes=sound)


def test_members_that_no_partition_can_hold_are_refused_before_they_are_read(
    files, tmp_path, monkeypatch
):
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(claiming(b"%02d.txt" % n, 2**28) for n in range(40)) + tar(files))
    monkeypatch.setattr(PandasBackend, "largest_partition", 3 * 2**30)
    ddf = dii.read_webdataset_images(path, backend="pandas")
    monkeypatch.setattr(samples, "read_member", lambda *args: pytest.fail("a member was read"))
    said = r"the members of samples 0-43 of .*a\.tar are 10\.7 GB, most of them of 'txt'"
    with pytest.raises(MemoryError, match=said):
        ddf[["__key__", "txt"]].compute()
    assert len(ddf[["__key__", "nbytes"]].compute()) == 44
    less = dii.read_webdataset_images(path, backend="pandas", max_member_bytes="1 MiB")
    with pytest.warns(UserWarning, match="40 of 44 values of 'txt'"):
        assert less["txt"].isna().compute().all()

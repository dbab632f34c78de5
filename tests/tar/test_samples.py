"""A tar's bytes become samples, as webdataset groups them, from headers alone."""

import contextlib
import io
import mmap
import pickle
import random
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
import webdataset
from distributed.protocol.pickle import dumps, loads
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import (
    BLOCK,
    FORMATS,
    add,
    header,
    padded,
    random_tar,
    samples_of,
    tar,
    webdataset_samples,
    with_checksum,
)

import dask_image_ingest.errors
from dask_image_ingest.errors import DaskImageIngestError, ShardError
from dask_image_ingest.storage import ByteReader, LazyBytes
from dask_image_ingest.tar import index_tar, open_member, read_member


def damage_of(content: LazyBytes) -> tuple[str, int]:
    damage = index_tar(content).damage
    assert damage is not None
    return damage.code, damage.offset


FILES = {"a.jpg": b"A" * 700, "a.txt": b"cat", "b.jpg": b"B" * 512, "b.txt": b"", "c.jpg": b"C"}


# --- grouping -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=100)
def test_random_tars_read_as_webdataset_reads_them(rng):
    for _ in range(20):
        shard = random_tar(rng.randrange(10**9))
        index = index_tar(shard)
        assert index.damage is None
        assert samples_of(shard, index) == webdataset_samples(shard)
        assert list(samples_of(shard, index)) == list(webdataset_samples(shard))


name_alphabet = st.sampled_from([*"a./_\nÉé ", "__"])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(name_alphabet, min_size=1, max_size=12).map("".join))
def test_any_name_is_split_as_webdataset_splits_it(name):
    for kind in (b"0", b"\0"):
        shard = header(name.encode(), kind=kind) + bytes(2 * BLOCK)
        is_macos = name.rpartition("/")[2].startswith("._")
        assert samples_of(shard) == ({} if is_macos else webdataset_samples(shard))


def test_a_key_that_comes_back_is_joined_and_reported():
    shard = tar([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3"), ("b.txt", b"4")])
    index = index_tar(shard)
    assert samples_of(shard, index) == {
        "a": {"jpg": b"1", "txt": b"3"},
        "b": {"jpg": b"2", "txt": b"4"},
    }
    assert index.interleaved == ("a", "b")


def test_the_first_of_duplicate_members_wins_and_is_reported():
    shard = tar([("a.jpg", b"1"), ("a.JPG", b"2"), ("a.txt", b"3"), ("b.txt", b""), ("b.TXT", b"")])
    first, second = index_tar(shard).samples
    assert samples_of(shard)["a"] == {"jpg": b"1", "txt": b"3"}
    assert (first.duplicates, second.duplicates) == (("jpg",), ("txt",))


def test_a_key_that_comes_back_with_what_it_had_begins_another_sample():
    """As where shards were joined: no picture may be lost for having the key of another."""
    once = [("a.jpg", b"1"), ("a.txt", b"2"), ("b.jpg", b"3"), ("b.txt", b"4")]
    again = [("a.txt", b"5"), ("a.jpg", b"6"), ("a.jpg", b"7"), ("c.jpg", b"8"), ("b.jpg", b"9")]
    index = index_tar(tar(once + again))
    assert samples_of(tar(once + again), index) == {
        "a": {"jpg": b"1", "txt": b"2"},
        "b": {"jpg": b"3", "txt": b"4"},
        "a (2)": {"txt": b"5", "jpg": b"6"},
        "c": {"jpg": b"8"},
        "b (2)": {"jpg": b"9"},
    }
    assert index.repeated == ("a", "b")
    assert index.interleaved == ()
    assert [sample.duplicates for sample in index.samples] == [(), (), ("jpg",), (), ()]


def test_what_was_joined_too_early_moves_to_the_new_sample():
    files = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3"), ("a.jpg", b"4"), ("a.cls", b"5")]
    assert samples_of(tar(files)) == {
        "a": {"jpg": b"1"},
        "b": {"jpg": b"2"},
        "a (2)": {"txt": b"3", "jpg": b"4", "cls": b"5"},
    }


def test_each_sample_has_its_own_duplicates_after_that():
    files = ["a.jpg", "a.cls", "a.cls", "b.jpg", "a.txt", "a.txt", "a.jpg"]
    index = index_tar(tar([(name, b"") for name in files]))
    assert [sample.duplicates for sample in index.samples] == [("cls",), (), ("txt",)]


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=100)
def test_members_in_any_order_are_grouped_as_the_rule_says(rng):
    """Keys that come back, members twice: against the rule member by member, in plain Python."""
    for _ in range(300):
        keys = rng.choices("abc", k=rng.randrange(12))
        names = [f"{key}.{rng.choice(('jpg', 'txt', 'cls', 'seg.png'))}" for key in keys]
        index = index_tar(tar([(name, name.encode() * 9) for name in names]))
        expected = grouped(names)
        found = [(each.key, list(each.members), each.duplicates) for each in index.samples]
        assert found == [(key, list(members), tuple(twice)) for key, members, twice in expected]
        kinds = dict.fromkeys(kind for _, members, _ in expected for kind in members)
        assert index.extensions == list(kinds)
        for images in ["jpg"], ["txt", "jpg"], ["seg.png", "cls", "jpg"]:
            chosen = [
                next((e for e in images if e in each.members), None) for each in index.samples
            ]
            offsets, sizes = (index.preferred(images, name) for name in ("offset", "size"))
            assert index.spans(offsets, sizes) == [
                each.members.get(kind) for each, kind in zip(index.samples, chosen, strict=True)
            ]
            others = [
                kind
                for kind in kinds
                if any(kind in set(m) - {c} for (_, m, _), c in zip(expected, chosen, strict=True))
            ]
            assert index.not_preferred(images) == others


def grouped(names):
    """Key, members and duplicates of each sample."""
    samples, open_one, before = [], None, set()
    for name in names:
        key, _, kind = name.partition(".")
        if open_one is None or open_one[0] != key:
            latest = [sample for sample in samples if sample[0] == key]
            open_one = latest[-1] if latest else (key, [], [])
            samples += [] if latest else [open_one]
            before = set(open_one[1])
        if kind in before:
            _, members, twice = open_one
            moved = [each for each in members if each not in before]
            moved_twice = [each for each in twice if each in moved]
            members[:] = [each for each in members if each in before]
            twice[:] = [each for each in twice if each in before]
            open_one, before = (key, moved, moved_twice), set()
            samples.append(open_one)
        _, members, twice = open_one
        if kind not in members:
            members.append(kind)
        elif kind not in twice:
            twice.append(kind)
    return samples


def test_key_is_valid_utf8_whatever_bytes_the_name_has():
    name = b"caf\xe9.jpg"
    forged = header(name)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, name.decode("utf-8", "surrogateescape"), pax_headers={"comment": "é"})
    for shard in (forged, out.getvalue()):
        (sample,) = index_tar(shard).samples
        assert sample.key == "caf\\xe9"


# --- every writer ---------------------------------------------------------------------------------


def test_webdatasets_own_writer_takes_no_detour(tmp_path, monkeypatch):
    with webdataset.ShardWriter(str(tmp_path / "%d.tar"), maxcount=10, verbose=0) as writer:
        for i in range(10):
            writer.write({"__key__": f"k{i}", "jpg": b"J" * i, "txt": f"é{i}", "json": {"i": i}})
    shard = (tmp_path / "0.tar").read_bytes()
    expected = webdataset_samples(shard)
    monkeypatch.delattr("dask_image_ingest.tar.scan._sparse_member")  # needed by odd headers
    index = index_tar(shard)
    assert samples_of(shard, index) == expected
    assert index.pax == index.members == 30  # it writes an mtime before every member


@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
@pytest.mark.parametrize("program", ["tar", "bsdtar"])
def test_archives_of_tar_programs(tmp_path, program, tar_format):
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    if program == "bsdtar":
        tar_format = {"oldgnu": "gnutar", "gnu": "gnutar", "posix": "pax"}.get(
            tar_format, tar_format
        )
    long = "" if tar_format == "v7" else "folder/" * 15
    files = {f"{folder}{i}.jpg": b"x" * i for i in range(5) for folder in ("", "é.d/", long)}
    for name, data in files.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "in" / "link.jpg").symlink_to("0.jpg")
    shard = tmp_path / "out.tar"
    command = [
        program,
        "-C",
        str(tmp_path / "in"),
        f"--format={tar_format}",
        "-cf",
        str(shard),
        ".",
    ]
    subprocess.run(command, check=True)
    found = samples_of(shard.read_bytes())
    assert found == webdataset_samples(shard.read_bytes())
    assert len(found) == len(files)


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=posix", "--sparse-version=0.0"],
        ["--format=posix", "--sparse-version=0.1"],
        ["--format=posix", "--sparse-version=1.0"],
    ],
)
def test_holes_of_sparse_members_are_filled(tmp_path, options):
    contents = {
        "all-hole": bytes(100_000),
        "holes": b"".join(b"data" + bytes(20_000) for _ in range(40)),
        "plain": b"x" * 3000,
        "tail": bytes(50_000) + b"end",
    }
    for name, data in contents.items():
        with (tmp_path / f"{name}.jpg").open("wb") as file:
            for start in range(0, len(data), 4096):
                if page := data[start : start + 4096].rstrip(b"\0"):
                    file.seek(start)
                    file.write(page)
            file.truncate(len(data))
    shard = tmp_path / "out.tar"
    command = ["tar", "-C", str(tmp_path), "--sparse", "--hole-detection=raw", *options]
    subprocess.run([*command, "-cf", str(shard), *(f"{n}.jpg" for n in contents)], check=True)
    assert shard.stat().st_size < 100_000
    content = shard.read_bytes()
    index = index_tar(content)
    assert samples_of(content, index) == {name: {"jpg": data} for name, data in contents.items()}
    assert len(index.sparse) == 3
    assert index.damage is None


def test_sizes_in_base_256_and_without_terminator():
    data = b"x" * 600
    for size in (b"\x80" + (600).to_bytes(11, "big"), b"000000001130", b"1130 \0      "):
        shard = header(b"a.jpg", size) + padded(data) + tar({"b.txt": b"y"})
        assert (
            samples_of(shard)
            == webdataset_samples(shard)
            == {"a": {"jpg": data}, "b": {"txt": b"y"}}
        )


def test_v7_folders_hold_no_data():
    shard = header(b"folder/", kind=b"\0") + header(b"a.jpg", kind=b"\0") + bytes(2 * BLOCK)
    assert samples_of(shard) == webdataset_samples(shard) == {"a": {"jpg": b""}}


def test_signed_checksums_of_old_writers_are_right():
    block = bytearray(header("é.jpg".encode()))
    signed = sum(byte - 256 * (byte > 127) for byte in block[:148] + b" " * 8 + block[156:])
    block[148:156] = b"%06o\0 " % signed
    assert samples_of(bytes(block)) == {"é": {"jpg": b""}}


def test_a_global_pax_header_with_a_comment_changes_nothing():
    out = io.BytesIO()
    headers = {"comment": "a commit"}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as new:
        add(new, "a.jpg", b"1")
    assert samples_of(out.getvalue()) == {"a": {"jpg": b"1"}}


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tar_format", FORMATS)
def test_a_shard_cut_anywhere_keeps_what_is_whole(tar_format):
    files = {**FILES, "long/" * 30 + "d.jpg": b"D" * 900, "é.txt": b"E" * 10}
    shard = tar(files, tar_format)
    with tarfile.open(fileobj=io.BytesIO(shard)) as witness:
        ends = {info.name: info.offset_data + info.size for info in witness}
    padded_ends = {0, *(-(-end // BLOCK) * BLOCK for end in ends.values())}
    for cut in range(BLOCK, len(shard), 37):
        index = index_tar(shard[:cut])
        found = sorted(span[0] + span[1] for s in index.samples for span in s.members.values())
        assert found == sorted(end for end in ends.values() if end <= cut), f"cut at {cut}"
        sound = cut in padded_ends or cut >= max(padded_ends)
        assert (index.damage is None) == sound, f"cut at {cut}"


def test_damage_names_the_member_that_is_cut():
    shard = tar(FILES)
    code, offset = damage_of(shard[:1000])
    assert (code, offset) == ("truncated-member", 0)
    damage = index_tar(shard[:1000]).damage
    assert "'a.jpg'" in damage.reason
    assert "212 bytes" in damage.reason


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (1536 + 300, ("truncated-header", 1536)),
        (BLOCK + 100, ("truncated-member", 0)),
        (BLOCK + 800, ("truncated-padding", BLOCK + 800)),
    ],
)
def test_truncation_is_told_from_truncation(cut, expected):
    assert damage_of(tar(FILES)[:cut]) == expected


def test_a_pax_header_without_its_member_is_damage():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "a.jpg", mtime=1.5)
        add(archive, "b.jpg", mtime=1.5)
    second_pax = 3 * BLOCK
    for cut in range(second_pax + 1, second_pax + 3 * BLOCK):
        for end in (b"", bytes(2 * BLOCK) if cut == second_pax + 2 * BLOCK else b""):
            index = index_tar(out.getvalue()[:cut] + end)
            assert index.damage.code == "truncated-header"
            assert [sample.key for sample in index.samples] == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 1100])
def test_nothing_from_a_bad_checksum_on_is_kept(count):
    shard = tar({f"{i:05d}.jpg": b"x" for i in range(count)})
    rng = random.Random(count)
    for _ in range(8):
        number, place = rng.randrange(1, count), rng.choice([0, 50, 124, 130, 148, 153, 200, 400])
        broken = bytearray(shard)
        broken[number * 2 * BLOCK + place] ^= 1
        assert damage_of(broken) == ("bad-checksum", number * 2 * BLOCK)
        assert len(index_tar(broken).samples) == number
        with tarfile.open(fileobj=io.BytesIO(broken)) as witness:
            assert len(witness.getnames()) == number


def test_another_file_in_the_middle_is_named():
    shard = tar({"a.jpg": b"x"})[: 2 * BLOCK] + b"\xff\xd8\xff\xe0" + bytes(range(256)) * 8
    index = index_tar(shard)
    assert (index.damage.code, index.damage.offset) == ("not-a-tar", 2 * BLOCK)
    assert "JPEG" in index.damage.reason
    assert [sample.key for sample in index.samples] == ["a"]


def test_a_second_tar_is_reported_and_not_read():
    first = tar({"a.jpg": b"x"})
    both = first + tar({"b.jpg": b"y"})
    assert damage_of(both) == ("trailing-data", len(first))
    assert samples_of(both) == webdataset_samples(both) == {"a": {"jpg": b"x"}}
    one_zero_block = first[: 3 * BLOCK] + first
    assert damage_of(one_zero_block) == ("trailing-data", 3 * BLOCK)
    assert samples_of(one_zero_block) == webdataset_samples(one_zero_block)


def test_an_extended_header_that_makes_no_sense_is_damage():
    good = tar({"a.jpg": b"x"})[: 2 * BLOCK]
    senseless = [
        header(b"p", b"00000000010\0", b"x") + padded(b"0 path="),
        header(b"p", b"00000000100\0", b"x") + padded(b"16 GNU.sparse.map=1,b\n"),
        header(b"n", b"\xff" * 12),
        header(b"l", b"77777777777\0", b"L") + bytes(BLOCK),
    ]
    for block in senseless:
        index = index_tar(good + block + tar({"b.jpg": b"x"}))
        assert index.damage.code == "bad-header"
        assert [sample.key for sample in index.samples] == ["a"]


def test_a_sparse_member_cannot_claim_terabytes():
    records = (
        b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n37 GNU.sparse.realsize=9999999999999\n"
    )
    shard = header(b"p", b"%011o\0" % len(records), b"x") + padded(records)
    shard += header(b"a.jpg", b"00000001000\0") + padded(b"0\n")
    index = index_tar(shard)
    with pytest.raises(ShardError, match="2 GiB"):
        read_member(shard, index, index.samples[0].members["jpg"])


def test_no_end_mark_is_no_damage():
    shard = tar(FILES)
    end = sum(BLOCK + len(padded(data)) for data in FILES.values())
    for cut in (end, end + 100, end + BLOCK, end + BLOCK + 100):
        assert index_tar(shard[:cut]).damage is None
        assert len(index_tar(shard[:cut]).samples) == 3


@pytest.mark.parametrize("shard", [b"", bytes(100), bytes(10240)])
def test_an_empty_archive_is_empty_and_sound(shard):
    index = index_tar(shard)
    assert (index.samples, index.damage) == ([], None)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\xff\xd8\xff\xe0" + bytes(1000), "JPEG"),
        (b"<html>404</html>", "HTML"),
        (b"PK\x03\x04" * 500, "zip"),
        (b"random text" * 99, "random text"),
    ],
)
def test_what_is_no_tar_is_refused_by_name(data, what):
    with pytest.raises(ShardError, match=f"x.tar is no tar archive.*{what}.*at byte 0"):
        index_tar(data, "x.tar")


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.rounds(1, nightly=100)
def test_mutated_tars_never_crash_or_hang(rng):
    tars = [random_tar(rng.randrange(10**9)) for _ in range(10)]
    for _ in range(100):
        shard = bytearray(rng.choice(tars) or bytes(BLOCK))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(shard))
            shard[at] = rng.choice([0, 255, 48, 55, rng.randrange(256)])
            if rng.random() < 0.7:  # let it pass for a header
                at -= at % BLOCK
                if at + BLOCK <= len(shard):
                    shard[at : at + BLOCK] = with_checksum(shard[at : at + BLOCK])
        with contextlib.suppress(ShardError):
            samples_of(shard, index_tar(shard))


# --- cost -----------------------------------------------------------------------------------------


class CountingBytes(ByteReader):
    def __init__(self, data: bytes):
        self.data = data
        self.read = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> bytes:
        self.read += len(self.data[part])
        return self.data[part]


def test_scan_reads_headers_only():
    shard = tar({f"{i}.jpg": bytes([1]) * 50_000 for i in range(100)})
    content = CountingBytes(shard)
    assert len(index_tar(content).samples) == 100
    end = len(shard) - 100 * (BLOCK + len(padded(b"x" * 50_000)))
    assert content.read <= 100 * BLOCK + BLOCK + end


def test_members_are_not_copied(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(tar(FILES))
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    index = index_tar(content)
    member = read_member(content, index, index.samples[0].members["jpg"])
    assert np.shares_memory(np.frombuffer(member, np.uint8), np.frombuffer(content, np.uint8))


def test_an_open_member_reads_what_is_asked_of_it():
    content = np.random.default_rng(0).bytes(50_000)
    shard = CountingBytes(tar({"a.jpg": content, "b.jpg": content[:100], "c.jpg": b""}))
    index = index_tar(shard)
    first, short, empty = (sample.members["jpg"] for sample in index.samples)
    shard.read = 0
    member = open_member(shard, index, first)
    assert len(member) == len(content)
    for part in (slice(2048), slice(10, 20), slice(-2, None), slice(30, 20), slice(49_990, 10**6)):
        assert bytes(member[part]) == content[part]
    assert shard.read < 5000
    assert bytes(member[:]) == content
    assert bytes(open_member(shard, index, short)[:]) == content[:100]
    assert bytes(open_member(shard, index, empty)[:10]) == b""


def test_a_shard_that_shrank_is_an_error_and_no_short_member():
    shard = tar(FILES)
    index = index_tar(shard)
    with pytest.raises(ShardError, match="did the shard change"):
        read_member(shard[:600], index, index.samples[0].members["jpg"])


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", dask_image_ingest.errors.__all__)
def test_errors_come_back_from_a_worker_with_their_message(name):
    error = getattr(dask_image_ingest.errors, name)("shard 7 is no tar")
    for copy in (pickle.loads(pickle.dumps(error)), loads(dumps(error))):
        assert type(copy) is type(error)
        assert str(copy) == "shard 7 is no tar"
        assert isinstance(copy, DaskImageIngestError)

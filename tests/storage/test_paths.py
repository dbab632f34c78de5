"""Patterns lead to the shards that a user means, and shards give their bytes."""

import errno
import functools
import gzip
import http.server
import itertools
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import dask
import fsspec
import numpy as np
import pytest
import webdataset
from faulty_server import serving
from fsspec.implementations.memory import MemoryFileSystem
from tars import COMPRESSIONS, samples_of, tar, webdataset_samples, zstd

from dask_image_ingest.errors import (
    ArgumentError,
    MissingDependencyError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.storage import Shard, find_shards, open_shard
from dask_image_ingest.tar import index_tar, read_member

SHARD = tar({f"{i}.{e}": bytes([65 + i]) * 3000 for i in range(9) for e in ("jpg", "txt")})


@pytest.fixture
def folder(tmp_path):
    """A folder such as img2dataset leaves behind."""
    names = [f"shard-{i}.tar" for i in range(12)]
    names += [
        "a.tar.gz",
        "a.tgz",
        "a.tar.zst",
        "UPPER.TAR",
        "shard-0_stats.json",
        "shard-0.parquet",
    ]
    names += [".hidden.tar", "_tmp/x.tar", ".git/x.tar", "deep/er/z.tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def names_of(shards: list[Shard], folder) -> list[str]:
    return [os.path.relpath(shard.url, folder) for shard in shards]


NUMBERED = [f"shard-{i}.tar" for i in range(12)]

LARGE = tar({f"{i}.jpg": bytes([65 + i]) * 3_000_000 for i in range(4)})


# --- which shards ---------------------------------------------------------------------------------


def test_braces_and_globs_give_shards_in_natural_order(folder):
    patterns = ("shard-{0..11}.tar", "shard-*.tar", "shard-{?,??}.tar", "shard-*")
    for pattern in (*patterns, "{shard-[0-9].tar,shard-1?.tar}"):
        assert names_of(find_shards(folder / pattern), folder) == NUMBERED


def test_a_folder_is_searched_to_the_bottom_for_visible_shards(folder):
    expected = ["UPPER.TAR", "a.tar.gz", "a.tar.zst", "a.tgz", "deep/er/z.tar", *NUMBERED]
    assert names_of(find_shards(folder), folder) == expected
    assert names_of(find_shards(f"{folder}/*"), folder) == expected


@pytest.mark.parametrize("kind", ["named pipe", "socket", "device"])
def test_only_regular_files_are_shards(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the name of a socket is short enough
    (tmp_path / "a.tar").write_bytes(SHARD)
    special = tmp_path / "b.tar"
    with ExitStack() as opened:
        if kind == "named pipe":
            os.mkfifo(special)
        elif kind == "socket":
            opened.enter_context(socket.socket(socket.AF_UNIX)).bind(special.name)
        else:
            special.symlink_to("/dev/zero")
        for searched in (tmp_path, f"{tmp_path}/*.tar", f"{tmp_path}/**"):
            assert names_of(find_shards(searched), tmp_path) == ["a.tar"]
        for named in (special, [tmp_path / "a.tar", special], f"{tmp_path}/{{a,b}}.tar"):
            with pytest.raises(ShardError, match=rf"b\.tar is a {kind}, and only regular files"):
                find_shards(named)
        # As where a shard has become one since it was listed; a socket can't be opened at all.
        with (
            pytest.raises(ShardError, match=r"b\.tar (is a|cannot be read)"),
            open_shard(str(special)),
        ):
            pass


def test_a_glob_that_names_a_suffix_gets_what_it_asks_for(folder):
    expected = ["_tmp/x.tar", "deep/er/z.tar", *NUMBERED]
    assert names_of(find_shards(f"{folder}/**/*.tar"), folder) == expected
    assert names_of(find_shards(f"{folder}/*.parquet"), folder) == ["shard-0.parquet"]


def test_lists_mix_and_no_shard_comes_twice(folder, monkeypatch):
    monkeypatch.chdir(folder)
    paths = ["shard-2.tar", folder / "shard-*.tar", f"file://{folder}/shard-{{0..3}}.tar", "./deep"]
    assert names_of(find_shards(paths), folder) == ["deep/er/z.tar", *NUMBERED]
    assert find_shards(iter(paths)) == find_shards(tuple(paths))


def test_braces_expand_as_in_webdataset(folder):
    for pattern in ("shard-{0..11}.tar", "{a.tgz,shard-{1..9..3}.tar}"):
        expected = {str(folder / path) for path in webdataset.shardlists.expand_urls(pattern)}
        assert {shard.url for shard in find_shards(folder / pattern)} == expected


@pytest.mark.parametrize("name", ["x{1..3}.tar", "x[1].tar", "what?.tar", "a{b.tar", "~.tar"])
def test_an_existing_name_is_taken_literally(tmp_path, name):
    (tmp_path / name).write_bytes(b"1")
    assert names_of(find_shards(tmp_path / name), tmp_path) == [name]


def test_a_shard_knows_its_size_and_version(folder):
    path = folder / "shard-1.tar"
    (before,) = find_shards(path)
    assert before == Shard(str(path), len("shard-1.tar"), str(path.stat().st_mtime_ns))
    os.utime(path, ns=(1, 1))
    assert find_shards(path)[0].version != before.version


@pytest.mark.newest
@pytest.mark.slow
def test_20_000_paths_are_found_and_none_is_opened(tmp_path):
    count = 20_000
    for i in range(count):
        if i % 10_000 == 0:  # links are cheaper to make than files
            original = tmp_path / f"{i}.tar"
            original.touch()
        else:
            os.link(original, f"{tmp_path}/{i}.tar")
    opened: list[str] = []
    watching = True
    sys.addaudithook(
        lambda event, args: opened.append(args[0]) if watching and event == "open" else None
    )
    shards = find_shards(f"{tmp_path}/{{0..{count - 1}}}.tar")
    watching = False
    assert [path for path in opened if str(path).endswith(".tar")] == []
    assert names_of(shards[:3] + shards[-1:], tmp_path) == ["0.tar", "1.tar", "2.tar", "19999.tar"]


# --- wrong arguments ------------------------------------------------------------------------------


def test_what_is_missing_is_named(folder):
    cases = {
        "no.tar": f"no such file in {folder}",
        "no/where/x.tar": f"the nearest that exists is {folder}$",
        "no/*.tar": f"the nearest that exists is {folder}$",
        "*.zip": f"nothing in {folder} matches",
        "_tmp/none/": "no such file in .*_tmp$",
        "shard-{0..15}.tar": "4 of 16 paths .*-12.tar, .*-13.tar, .*-14.tar and 1 more",
        "shard-0.tar/x": "no such folder",
    }
    for pattern, reason in cases.items():
        with pytest.raises(ShardNotFoundError, match=reason):
            find_shards(f"{folder}/{pattern}")
    (folder / "empty").mkdir()
    with pytest.raises(ShardNotFoundError, match=r"holds no \.tar"):
        find_shards(folder / "empty")


def test_a_dead_link_in_a_folder_is_no_silent_loss(folder):
    (folder / "shard-99.tar").symlink_to("gone.tar")
    with pytest.raises(ShardNotFoundError, match=r"shard-99.tar is a link"):
        find_shards(folder)


WRONG = [
    ([], "empty"),
    ("", "is no path"),
    ("a\0b", "is no path"),
    (3, "not int"),
    (None, "not NoneType"),
    (b"a.tar", "not bytes"),
    ([b"a.tar"], "is no path"),
    ({"a": 1}, "not dict"),
    ("pipe:cat a.tar", "is a command, and this package runs commands only if"),
    (["a.tar", "pipe:rm -r x"], "is a command, and this package runs commands only if"),
    ("a{b.tar", "unbalanced"),
    ("nothing://a.tar", "nothing"),
    ("://a.tar", "no URL"),
    ("half a character \ud83d.tar", "valid Unicode"),
]


def test_wrong_arguments_are_refused_in_plain_words():
    for paths, reason in WRONG:
        with pytest.raises(ArgumentError, match=reason):
            find_shards(paths)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(MissingDependencyError, match="paramiko"):
        find_shards("sftp://host/a.tar")


# --- remote ---------------------------------------------------------------------------------------


class CountingFileSystem(MemoryFileSystem):
    """A remote file system in memory that counts its requests."""

    protocol = "counting"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    requests: ClassVar = []

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("counting://", "memory://"))

    def info(self, path, **kwargs):
        self.requests.append(("info", path))
        return super().info(path, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self.requests.append(("ls", path))
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.requests.append((start, end))
        return super().cat_file(path, start=start, end=end, **kwargs)


@pytest.fixture
def remote():
    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    fs = fsspec.filesystem("counting")
    fs.store.clear()
    for i in range(20):
        fs.pipe(f"/bucket/s-{i}.tar", SHARD[: 512 * i])
    fs.pipe({"/bucket/sub/x.tgz": b"", "/bucket/_tmp/x.tar": b"", "/bucket/read.me": b""})
    fs.requests.clear()
    yield fs
    fs.store.clear()


REMOTE = [f"counting://bucket/s-{i}.tar" for i in range(20)]


PATTERNS = [
    ("counting://bucket/s-{0..19}.tar", REMOTE),
    ("counting://bucket/s-{0..2}.tar", REMOTE[:3]),
    ("counting://bucket/s-*.tar", REMOTE),
    ("counting://{bucket}/s-1?.tar", []),
    ("counting://bucket/s-1?.tar", REMOTE[10:]),
    ("counting://bucket", [*REMOTE, "counting://bucket/sub/x.tgz"]),
    ("counting://bucket/", [*REMOTE, "counting://bucket/sub/x.tgz"]),
    ("counting://*/sub", ["counting://bucket/sub/x.tgz"]),
    ("counting://bucket/**/*.tgz", ["counting://bucket/sub/x.tgz"]),
]


def test_patterns_mean_the_same_on_a_remote_file_system(remote):
    for pattern, expected in PATTERNS:
        if expected:
            assert [shard.url for shard in find_shards(pattern)] == expected
        else:
            with pytest.raises(ShardNotFoundError):
                find_shards(pattern)


def test_caches_of_fsspec_are_refused_with_what_to_do_instead(remote):
    names = ("s-1.tar", "s-{0..2}.tar", "s-*.tar", "")
    for cache, name in itertools.product(("filecache", "simplecache", "blockcache"), names):
        url = f"{cache}::counting://bucket/{name}"
        said = f"cannot be read through {cache}::.*: leave out {cache}::.* copy the shards to a"
        with pytest.raises(ArgumentError, match=said):
            find_shards(url)
        with pytest.raises(ArgumentError, match=said), open_shard(url):
            pass
    assert not remote.requests


def test_many_remote_shards_cost_one_listing(remote):
    shards = find_shards("counting://bucket/s-{0..19}.tar")
    assert [shard.size for shard in shards] == [512 * i for i in range(20)]
    assert [request for request in remote.requests if request[0] == "ls"] == [("ls", "/bucket")]
    assert len(remote.requests) <= 2  # the other asks whether the braces are part of a name


def test_a_remote_version_is_the_same_however_the_shard_was_found(remote):
    patterns = ["s-1.tar", "s-{0..19}.tar", "s-*.tar", ""]
    found = [find_shards(f"counting://bucket/{pattern}") for pattern in patterns]
    versions = {s.version for shards in found for s in shards if s.url == REMOTE[1]}
    assert len(versions) == 1
    remote.pipe("/bucket/s-1.tar", b"new")
    assert find_shards(REMOTE[1])[0].version not in versions


def test_missing_remote_shards_are_named(remote):
    for pattern in ("s-{0..29}.tar", "s-{18..21}.tar"):
        with pytest.raises(ShardNotFoundError, match=r"s-20.tar"):
            find_shards(f"counting://bucket/{pattern}")
    for pattern in ("bucket/no.tar", "nowhere/", "bucket/*.zip", "no/a-{0..20}.tar"):
        with pytest.raises(ShardNotFoundError, match=r"no such file"):
            find_shards(f"counting://{pattern}")


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "file://", "counting://"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_shard_reads_as_webdataset_reads_it(tmp_path, remote, scheme, compression):
    path = f"{tmp_path}/x"  # no suffix: the first bytes tell
    stored = COMPRESSIONS[compression](SHARD)
    with fsspec.open(scheme + path, "wb") as file:
        file.write(stored)
    with open_shard(scheme + path) as content:
        assert samples_of(content) == webdataset_samples(SHARD)
        assert index_tar(content).damage is None


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_streams_of_many_parts_are_read_to_the_end(tmp_path, compress):
    parts = [SHARD[i : i + 10_000] for i in range(0, len(SHARD), 10_000)]
    (tmp_path / "x").write_bytes(b"".join(map(compress, parts)))
    with open_shard(str(tmp_path / "x")) as content:
        assert bytes(content) == SHARD
    if compress is gzip.compress:
        (tmp_path / "x").write_bytes(compress(SHARD) + bytes(1000))
        with open_shard(str(tmp_path / "x")) as content:
            assert bytes(content) == SHARD


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_stream_that_breaks_off_keeps_what_came_before(tmp_path, compress):
    rng = np.random.default_rng(0)
    files = {f"{i:02d}.jpg": rng.bytes(20_000) for i in range(50)}
    stored = compress(tar(files))
    damages = {
        "cut": stored[: len(stored) // 2],
        "last byte missing": stored[:-1],
        "garbage": stored + b"garbage",
    }
    if compress is gzip.compress:  # Zstandard has no checksum unless its writer asks for one
        damages["corrupt"] = stored[:400_000] + bytes(100) + stored[400_100:]
    for what, data in damages.items():
        (tmp_path / "x").write_bytes(data)
        with open_shard(str(tmp_path / "x")) as content:
            index = index_tar(content)
            found = samples_of(content, index)
        assert index.damage is not None, what
        assert "stream breaks off" in index.damage.reason
        assert len(found) >= (48 if what in ("last byte missing", "garbage") else 10), what
        for key, sample in found.items():
            assert what == "corrupt" or sample["jpg"] == files[f"{key}.jpg"]


def test_what_was_read_outlives_the_shard(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(SHARD)
    with open_shard(str(path)) as content:
        index = index_tar(content)
        view = read_member(content, index, index.samples[1].members["jpg"])
    path.write_bytes(b"")
    assert bytes(view) == b"B" * 3000


def test_a_shard_leaves_no_file_open_and_none_mapped(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(SHARD)

    def held():
        files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        return str(path) in files or str(path) in Path("/proc/self/maps").read_text()

    with open_shard(str(path)) as content:
        assert held()
    assert not held()
    with pytest.raises(ShardError, match=r"x\.tar"):
        content[:10]
    with pytest.raises(ZeroDivisionError), open_shard(str(path)):
        raise ZeroDivisionError
    assert not held()


CHANGES = {
    "cut short": lambda path: os.truncate(path, 2000),
    "emptied": lambda path: path.write_bytes(b""),
    "rewritten": lambda path: path.write_bytes(bytes(len(SHARD))),
    "grown": lambda path: path.write_bytes(SHARD + SHARD),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_local_shard_that_changes_while_it_is_read_is_an_error(tmp_path, change):
    path = tmp_path / "x.tar"
    path.write_bytes(SHARD)
    os.utime(path, (1e9, 1e9))
    changed = pytest.raises(ShardError, match=r"x\.tar has changed while it was read")
    with changed, open_shard(str(path)) as content:
        index = index_tar(content)
        CHANGES[change](path)
        samples_of(content, index)


def test_a_shard_that_is_replaced_by_another_file_is_read_as_it_was(tmp_path):
    """As by programs that write a file aside and then rename it."""
    path, other = tmp_path / "x.tar", tmp_path / "y.tar"
    path.write_bytes(SHARD)
    other.write_bytes(LARGE)
    with open_shard(str(path)) as content:
        other.rename(path)
        assert samples_of(content) == webdataset_samples(SHARD)
    with open_shard(str(path)) as content:
        assert samples_of(content) == webdataset_samples(LARGE)


def test_a_disk_that_fails_is_an_error_that_names_the_shard(tmp_path, monkeypatch):
    path = tmp_path / "x.tar"
    path.write_bytes(SHARD)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with open_shard(str(path)) as content:
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(ShardError, match=r"x\.tar cannot be read: .*Input/output"):
            index_tar(content)
        monkeypatch.undo()


def test_reads_that_give_less_than_was_asked_for_are_continued(tmp_path, monkeypatch):
    """One call of the kernel gives 2 GiB at most."""
    path = tmp_path / "x.tar"
    path.write_bytes(SHARD)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 700), offset))
    with open_shard(str(path)) as content:
        assert content[:] == SHARD
        assert content[100:2000] == SHARD[100:2000]
        assert samples_of(content) == webdataset_samples(SHARD)


def test_an_empty_file_is_an_empty_shard(tmp_path):
    (tmp_path / "x.tar").touch()
    with open_shard(str(tmp_path / "x.tar")) as content:
        assert len(content) == 0
        assert index_tar(content).samples == []


@pytest.mark.parametrize("url", ["/no/x.tar", "counting://bucket/no.tar", "file:///no/x.tar"])
def test_a_shard_that_is_gone_is_named(remote, url):
    with pytest.raises(ShardNotFoundError, match=r"/(x|no)\.tar is not found"), open_shard(url):
        pass


def test_a_shard_that_cannot_be_read_is_named(tmp_path, remote, monkeypatch):
    with pytest.raises(ShardError, match=str(tmp_path)), open_shard(str(tmp_path)):
        pass

    def fail(*args, **kwargs):
        raise TimeoutError("503")

    remote.pipe("/x.tar", LARGE)
    once = dask.config.set({"image-ingest.remote.retry-limit": 0})
    with once, open_shard("counting://x.tar") as content:
        monkeypatch.setattr(CountingFileSystem, "cat_file", fail)
        with pytest.raises(ShardError, match=r"x\.tar cannot be read: TimeoutError: 503"):
            index_tar(content)


def test_metadata_of_a_large_remote_shard_costs_little(remote):
    files = {f"{i:03d}.jpg": bytes([1]) * 9_000_000 for i in range(10)}
    shard = tar(files)
    remote.pipe("/big.tar", shard)
    remote.requests.clear()
    with open_shard("counting://big.tar") as content:
        assert len(index_tar(content).samples) == 10
        ranges = [request for request in remote.requests if request[0] != "info"]
        assert sum(end - start for start, end in ranges) < len(shard) / 2 + (4 << 20)
        assert samples_of(content) == {name[:3]: {"jpg": data} for name, data in files.items()}


def test_a_remote_shard_that_changes_while_open_is_an_error(remote):
    remote.pipe("/x.tar", LARGE)
    changed = pytest.raises(ShardError, match=r"x\.tar has changed")
    with changed, open_shard("counting://x.tar") as content:
        remote.pipe("/x.tar", LARGE[: 6 << 20])
        index_tar(content)


@pytest.mark.filterwarnings("ignore:.*with whole files:UserWarning")
def test_a_server_without_ranges_sends_the_shard_once(remote, monkeypatch):
    remote.pipe("/x.tar", LARGE)

    def cat_whole(self, path, **kwargs):
        self.requests.append("whole")
        return LARGE

    monkeypatch.setattr(CountingFileSystem, "cat_file", cat_whole)
    with open_shard("counting://x.tar") as content:
        assert samples_of(content) == webdataset_samples(LARGE)
    assert remote.requests.count("whole") == 1


@pytest.mark.filterwarnings("ignore:.*with whole files:UserWarning")
@pytest.mark.slow
def test_web_servers_with_and_without_ranges(tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "x.tar").write_bytes(LARGE)
    handler = functools.partial(QuietHandler, directory=tmp_path)
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as root:
        for pattern in (f"{root}/x.tar?signature=a/b", f"{root}/{{x,x}}.tar", f"{root}/*.tar"):
            (shard,) = find_shards(pattern)
            assert shard.size == len(LARGE)
            with open_shard(shard.url) as content:
                assert samples_of(content) == webdataset_samples(LARGE)
        with pytest.raises(ShardNotFoundError):
            find_shards(f"{root}/no.tar")
        with pytest.raises(ShardError, match=r"403/x\.tar cannot be read: .*Forbidden"):
            find_shards(f"{root}/403/x.tar")
    # Nobody answers there any more.
    for paths in (f"{root}/x.tar", f"{root}/*.tar", f"{root}/"):
        with pytest.raises(ShardError, match=r"cannot be read: its server cannot be reached: .*Co"):
            find_shards(paths)
    with pytest.raises(ShardError, match="cannot be reached"), open_shard(f"{root}/x.tar"):
        pass


def test_a_name_that_is_no_unicode_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(LARGE)
    with open(os.fsencode(tmp_path) + b"/b\xff.tar", "wb") as file:
        file.write(LARGE)
    with pytest.raises(ArgumentError, match=r"b\\xff\.tar' is not UTF-8.*rename"):
        find_shards(tmp_path)
    assert len(find_shards(tmp_path / "a.tar")) == 1


def test_options_that_a_file_system_does_not_know_are_an_argument_error():
    with pytest.raises(ArgumentError, match="storage_options"):
        find_shards("zip://a.tar::memory://b.zip", {"zip": {"target_protocol": 3}})


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Python's web server, which knows no ranges, without its log; it forbids the folder 403."""

    def send_head(self):
        if self.path.startswith("/403/"):
            return self.send_error(403)
        return super().send_head()

    def log_message(self, *args):
        pass

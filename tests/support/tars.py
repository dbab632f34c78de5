"""Tars to test with, and what webdataset makes of them."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
from webdataset.handlers import ignore_and_continue
from webdataset.tariterators import group_by_keys, tar_file_iterator

from dask_image_ingest.storage import LazyBytes
from dask_image_ingest.tar import ShardIndex, index_tar, read_member

BLOCK = 512
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

Samples = dict[str, dict[str, bytes]]


def tar(files: dict[str, bytes] | list[tuple[str, bytes]], tar_format: str = "ustar") -> bytes:
    """Write files into a tar archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[tar_format]) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            add(archive, name, data)
    return out.getvalue()


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields: object) -> None:
    """Add a member; ``fields`` are those of TarInfo."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))


def header(name: bytes, size: bytes = b"00000000000\0", kind: bytes = b"0") -> bytes:
    """Forge a header with whatever bytes a test needs, and the right checksum."""
    block = bytearray(tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT))
    block[:100] = name.ljust(100, b"\0")
    block[124:136] = size
    block[156:157] = kind
    return with_checksum(block)


def with_checksum(block: bytes | bytearray) -> bytes:
    """Correct the checksum of a header that was tampered with."""
    summed = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return bytes(block[:148]) + b"%06o\0 " % summed + bytes(block[156:])


def padded(data: bytes) -> bytes:
    """Fill up to whole blocks."""
    return data + bytes(-len(data) % BLOCK)


def zstd(data: bytes) -> bytes:
    """Compress into one Zstandard frame."""
    return pa.Codec("zstd").compress(data, asbytes=True)


COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def sparse_tar(path, members):
    """A tar whose members GNU tar writes with holes, where they have any."""
    for name, content in members.items():
        with open(path.parent / name, "wb") as file:
            for start in range(0, len(content), 4096):
                block = content[start : start + 4096]
                file.seek(len(block), 1) if not any(block) else file.write(block)
            file.truncate(len(content))
    command = ["tar", "--sparse", "--format=gnu", "-cf", path, "-C", path.parent, *members]
    subprocess.run(command, check=True)
    return path


def webdataset_samples(shard: bytes) -> Samples:
    """Read with webdataset; join the samples that it splits, unless they have the same members.

    Duplicates that it rejects are skipped.
    """
    members = []
    if shard:  # it takes no file without any block
        members = [{**member, "__url__": ""} for member in tar_file_iterator(io.BytesIO(shard))]
    samples: list[tuple[str, dict[str, bytes]]] = []
    latest: dict[str, dict[str, bytes]] = {}
    for sample in group_by_keys(members, handler=ignore_and_continue):
        key = sample.pop("__key__").encode("utf-8", "surrogateescape")
        key = key.decode("utf-8", "backslashreplace")
        sample.pop("__url__")
        if key in latest and not latest[key].keys() & sample.keys():
            latest[key].update(sample)
        else:
            latest[key] = sample
            samples.append((key, sample))
    return by_key(samples)


def by_key(samples: Iterable[tuple[str, dict[str, bytes]]]) -> Samples:
    """The samples of a shard, the second of a key under ``key (2)``."""
    found: Samples = {}
    counts: Counter[str] = Counter()
    for key, members in samples:
        counts[key] += 1
        found[key if counts[key] == 1 else f"{key} ({counts[key]})"] = members
    return found


def random_tar(seed: int) -> bytes:
    """Write what a tar may hold: odd names and types, in any order and any format."""
    rng = random.Random(seed)
    tar_format = rng.choice(list(FORMATS))
    out = io.BytesIO()
    global_headers = {"comment": "all"} if rng.random() < 0.2 else None
    with tarfile.open(
        fileobj=out, mode="w", format=FORMATS[tar_format], pax_headers=global_headers
    ) as archive:
        add(archive, "first.jpg")  # tarfile cannot read a global header that no member follows
        for _ in range(rng.randrange(40)):
            with contextlib.suppress(ValueError):  # ustar has no room for all names
                _add_random(rng, archive, _random_name(rng))
    shard = out.getvalue()
    if rng.random() < 0.3:  # without the mark of its end
        return padded(shard.rstrip(b"\0"))
    return shard


def _add_random(rng: random.Random, archive: tarfile.TarFile, name: str) -> None:
    kind = rng.random()
    fields: dict[str, object] = {"mtime": rng.choice([0, 1_700_000_000, 1_700_000_000.25])}
    if archive.format == tarfile.PAX_FORMAT and rng.random() < 0.2:
        fields["pax_headers"] = {"SCHILY.xattr.user.note": "a=b\nc", "comment": "ü" * 300}
    if kind < 0.8:
        size = rng.choice([0, 1, 511, 512, 513, rng.randrange(5000)])
        add(archive, name, rng.randbytes(size)[:-1] + b"."[:size], **fields)
    else:
        types = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
        add(archive, name, type=rng.choice(types), linkname="x" * rng.choice([1, 150]), **fields)


def _random_name(rng: random.Random) -> str:
    folders = ["", "", "", "train/", "a.b/c/", "./", "/", "d//", "__meta__/", "x/__meta__/", "é/ü/"]
    folders.append("long folder name/" * rng.randrange(3, 9))
    stems = ["k", "key-1", "000001", "ключ", "a b", "__k__", "__k", "", "K", "n\nl"]
    stems.append("n" * rng.randrange(40, 90))
    extensions = [".jpg", ".JPG", ".jpeg", ".txt", ".json", ".seg.png", ".", "", "..", ".É", "__"]
    name = rng.choice(folders) + rng.choice(stems) + rng.choice(extensions)
    return name or "empty"


def samples_of(content: LazyBytes, index: ShardIndex | None = None) -> Samples:
    index = index or index_tar(content)
    return by_key(
        (
            sample.key,
            {
                extension: bytes(read_member(content, index, span))
                for extension, span in sample.members.items()
            },
        )
        for sample in index.samples
    )

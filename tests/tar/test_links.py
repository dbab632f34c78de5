"""Links inside tars: hard links have the bytes of their file, others are counted and told."""

import contextlib
import gzip
import io
import random
import tarfile

import dask.dataframe as dd
import pytest
from tars import BLOCK, FORMATS, add, header, samples_of, tar, webdataset_samples, with_checksum

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import samples
from dask_image_ingest.tar import index_head, index_tar


def links(tar_format: str, *members: tuple[str, bytes | str]) -> bytes:
    """A tar in which a text is the target of a hard link, or after ``->`` of a symbolic one."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[tar_format]) as archive:
        for name, content in members:
            if isinstance(content, bytes):
                add(archive, name, content)
            else:
                kind = tarfile.SYMTYPE if content.startswith("->") else tarfile.LNKTYPE
                add(archive, name, type=kind, linkname=content.removeprefix("->"))
    return out.getvalue()


def copied(shard: bytes) -> bytes:
    """The same files, copied by tarfile, which reads hard links; without those that macOS adds."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(shard), errors="surrogateescape") as old,
        tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for info in old:
            base = info.name.rpartition("/")[2]
            if (info.isreg() or info.islnk()) and not base.startswith("._") and base != ".DS_Store":
                with contextlib.suppress(KeyError):  # no file of that name before the link
                    if file := old.extractfile(info):
                        add(new, info.name, file.read())
    return out.getvalue()


LONG = "folder/" * 30


TARGETS = [
    ("a.jpg", "a.jpg"),
    ("./d/a.jpg", "d//a.jpg"),
    ("d/a.jpg", "./d/a.jpg"),
    ("häuser/ü.jpg", "häuser/ü.jpg"),
    (LONG + "a.jpg", LONG + "a.jpg"),
    ("__store__/no extension", "__store__/no extension"),
    ("._a.jpg", "._a.jpg"),
]


@pytest.mark.parametrize("tar_format", FORMATS)
def test_a_hard_link_has_the_bytes_of_its_file(tar_format):
    for target, link in TARGETS:
        if tar_format == "ustar" and len(target) > 100:
            continue  # it has no room for the name
        shard = links(
            tar_format, (target, b"first"), ("k.txt", b"t"), ("k.jpg", link), ("l.png", "k.jpg")
        )
        index, found = index_tar(shard), samples_of(shard)
        assert found == webdataset_samples(copied(shard)), target
        assert (found["k"]["jpg"], found["l"]["png"]) == (b"first", b"first"), target
        assert not {"hard-link", "symbolic-link"} & index.skipped.keys()


def test_the_last_file_of_a_name_before_the_link_counts():
    members = [("a.x", b"1"), ("0.jpg", "a.x"), ("a.x", b"2"), ("1.jpg", "a.x"), ("a.x", "1.jpg")]
    shard = links("gnu", *members, ("2.jpg", "a.x"), ("a.x", b"3"))
    found = samples_of(shard)
    assert [found[key]["jpg"] for key in "012"] == [b"1", b"2", b"2"]
    assert found == webdataset_samples(copied(shard))


@pytest.mark.parametrize("target", ["->0.jpg", "1.jpg", "2.jpg", "folder", "missing", "sym.jpg"])
def test_a_link_that_leads_to_no_earlier_file_is_counted_and_told(target):
    members = [("0.jpg", b"x"), ("sym.jpg", "->0.jpg"), ("1.txt", b"t"), ("1.JPG", target)]
    shard = links("pax", *members, ("2.jpg", b"y"))
    index = index_tar(shard)
    assert list(samples_of(shard, index)) == ["0", "1", "2"]
    kind = "symbolic-link" if target.startswith("->") else "hard-link"
    assert sum(skipped.number for skipped in index.skipped.values()) == 2
    assert index.skipped["symbolic-link"].first == "sym.jpg"
    assert index.skipped[kind].first == ("sym.jpg" if kind == "symbolic-link" else "1.JPG")


def test_a_size_in_a_hard_link_of_an_old_writer_is_not_that_of_bytes_after_it():
    repeating = bytearray(header(b"b.jpg", b"00000000005\0", b"1"))
    repeating[157:162] = b"a.jpg"
    link = with_checksum(repeating)
    shard = tar({"a.jpg": b"first"})[: 2 * BLOCK] + link + header(b"c.jpg") + bytes(2 * BLOCK)
    assert samples_of(shard)["b"] == {"jpg": b"first"}
    assert samples_of(shard) == webdataset_samples(copied(shard))


def test_links_after_a_damaged_header_are_not_read():
    shard = bytearray(links("gnu", ("a.jpg", b"1"), ("b.jpg", "a.jpg"), ("c.jpg", "a.jpg")))
    shard[3 * BLOCK] ^= 1  # the header of c.jpg
    index = index_tar(shard)
    assert list(samples_of(shard, index)) == ["a", "b"]
    assert index.damage.code == "bad-checksum"
    assert index.skipped == {}


def test_what_macos_adds_is_skipped_and_counted():
    names = ["train/._0.jpg", "train/0.jpg", "._0.txt", "train/.DS_Store", "__MACOSX/t/._0.jpg"]
    index = index_tar(tar(dict.fromkeys([*names, "train/0.txt", "__meta__/x.y", "README"], b"x")))
    assert [(sample.key, [*sample.members]) for sample in index.samples] == [
        ("train/0", ["jpg", "txt"])
    ]
    assert {code: tuple(skipped) for code, skipped in index.skipped.items()} == {
        "macos": (4, "train/._0.jpg"),
        "meta": (1, "__meta__/x.y"),
        "no-extension": (1, "README"),
    }


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=60)
def test_random_tars_with_links_read_as_tarfile_reads_them(rng):
    for _ in range(40):
        shard = random_links(rng)
        index = index_tar(shard)
        assert samples_of(shard, index) == webdataset_samples(copied(shard))
        head, share = index_head(shard, "x")
        assert (head.samples, share) == (index.samples, 1.0)
        with tarfile.open(fileobj=io.BytesIO(shard)) as witness:
            symbolic = sum(info.issym() for info in witness)
        assert ("symbolic-link" in index.skipped) == (symbolic > 0)
        assert symbolic == 0 or index.skipped["symbolic-link"].number == symbolic


def random_links(rng: random.Random) -> bytes:
    """Files and links of all kinds: to earlier and later names, folders, themselves, nothing."""
    folders = ["", "./", "d/", "d//", "ü/", "__m__/", "long folder name/" * 7]
    stems = ["a", "b", "é", "c\n", "._a", "", "__k__"]
    kinds = ["jpg", "txt", "cls", "x.png", "JPG"]
    names = [
        f"{rng.choice(folders)}{rng.choice(stems)}{rng.randrange(4)}.{rng.choice(kinds)}"
        for _ in range(rng.randrange(1, 40))
    ]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[rng.choice(list(FORMATS))]) as archive:
        add(archive, "first.jpg")
        for name in names:
            kind = rng.random()
            target = rng.choice([*names, "folder", "missing", name])
            fields = {"mtime": rng.choice([0, 1.5])}
            with contextlib.suppress(ValueError):  # ustar has no room for all names
                if kind < 0.5:
                    add(archive, name, rng.randbytes(rng.randrange(1500)), **fields)
                elif kind < 0.85:
                    target = rng.choice(["", "", "./"]) + target
                    add(archive, name, type=tarfile.LNKTYPE, linkname=target, **fields)
                elif kind < 0.93:
                    # No hard link leads here: tarfile would go on to the link's target.
                    add(archive, name + ".s", type=tarfile.SYMTYPE, linkname=target, **fields)
                else:
                    add(archive, "folder", type=tarfile.DIRTYPE)
    return out.getvalue()


# --- reads and exports ----------------------------------------------------------------------------


@pytest.fixture
def linked(photos, tmp_path):
    """A shard with hard links, also as ``.tar.gz``, and a link that leads nowhere."""
    first, second = (photo.encoded for photo in photos[:2])
    members = [("a.jpg", first), ("a.txt", b"A"), ("b.jpg", "a.jpg"), ("b.txt", b"B")]
    members += [("c.jpg", second), ("c.txt", "./a.txt"), ("d.jpg", "b.jpg"), ("d.txt", b"D")]
    members += [("e.txt", b"E"), ("e.jpg", "->a.jpg")]
    (tmp_path / "0.tar").write_bytes(links("gnu", *members))
    (tmp_path / "1.tar.gz").write_bytes(gzip.compress(links("gnu", *members)))
    return tmp_path


def stored(frame, path):
    frame.to_parquet(path)
    return dd.read_parquet(path).compute()


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask's read_parquet
@pytest.mark.parametrize("name", ["0.tar", "1.tar.gz"])
def test_rows_of_links_have_pixels_and_others_are_counted(linked, photos, name, monkeypatch):
    monkeypatch.setattr("dask_image_ingest.dataset.scan.samples._warned_links", set())
    path, frames = str(linked / name), []
    for index in False, True:
        if index:
            dii.write_index(path)
        with pytest.warns(UserWarning, match=r"links are not followed, 1 here, first 'e.jpg'"):
            frames.append(dii.read_webdataset_images(path, index=index).compute())
        samples._warned_links.clear()
    plain, indexed = frames
    assert plain.equals(indexed)
    assert plain["txt"].tolist() == ["A", "B", "A", "D", "E"]
    assert plain["nbytes"].tolist()[:4] == [len(photos[n].encoded) for n in (0, 0, 1, 0)]
    assert plain["error"].isna().tolist() == [True] * 4 + [False]
    assert plain["error"].iloc[4].startswith("missing")
    with pytest.warns(UserWarning, match="links are not followed"):
        references = dii.read_webdataset_images(path, decode=False).compute()
    for table in (references, stored(references, linked / "references.parquet")):
        assert dii.decode_images(table)["error"].iloc[4] == plain["error"].iloc[4]
    for row, photo in enumerate([0, 0, 1, 0]):
        assert plain.images.arrays()[row].shape == photos[photo].pixels.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0.tar", "1.tar.gz"])
@pytest.mark.parametrize("parts", [None, 2])
def test_an_export_copies_the_bytes_of_links(linked, name, parts, monkeypatch):
    monkeypatch.setattr("dask_image_ingest.dataset.scan.samples._warned_links", {str(linked)})
    path = str(linked / name)
    ddf = dii.read_webdataset_images(path, partition_size="8 KiB" if parts else "auto")
    sound = ddf[ddf.error.isna()]
    dii.to_webdataset(sound, str(linked / "out" / "{shard}.tar"), index=True)
    found = {}
    for shard in (linked / "out").glob("*.tar"):
        found |= samples_of(shard.read_bytes())
        lines = shard.with_suffix(".idx").read_text().splitlines()[1:]
        for line in lines:  # as DALI reads it
            parts = line.split(" ")
            for at in range(0, len(parts), 4):
                extension, offset, size, file = parts[at : at + 4]
                data = shard.read_bytes()[int(offset) : int(offset) + int(size)]
                assert data == found[file.partition(".")[0]][extension]
    expected = webdataset_samples(copied((linked / "0.tar").read_bytes()))
    assert found == {key: expected[key] for key in "abcd"}


def test_renamed_rows_of_one_file_are_refused_as_ambiguous(linked, monkeypatch):
    monkeypatch.setattr("dask_image_ingest.dataset.scan.samples._warned_links", {str(linked)})
    rows = dii.read_webdataset_images(str(linked / "0.tar"), decode=False).compute()[:1]
    rows = rows.assign(__key__="new")
    with pytest.raises(dii.ArgumentError, match="ambiguous-sample: 3 samples of its shard"):
        dii.to_webdataset(rows, str(linked / "out" / "{shard}.tar"))

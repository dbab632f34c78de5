"""Stored hashes: what was stored is found, or an error names the file and what to do."""

import itertools
import os
import pickle
import shutil
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dying import dies, moments
from forked_python import run_python
from hashes import flipped, random_hashes

import dask_image_ingest as dii
from dask_image_ingest.curate import find_duplicates, find_overlaps, hash_store, write_hashes


def table_of(hashes, prefix="k"):
    return pd.DataFrame(
        {
            "id": [f"{prefix}{number}" for number in range(len(hashes))],
            "fingerprint.pdq": [row.tobytes().hex() for row in hashes],
        }
    )


def found_in(folder, rows, **options):
    """The stored row that each row duplicates."""
    found = find_duplicates(rows, against=folder, identity="id", keep="first", **options)
    assert not found["duplicate.keep"].any()
    return found["duplicate.of"].tolist()


@pytest.fixture
def stored(random, tmp_path):
    """Three files of one store, and the rows of all."""
    rows = table_of(random_hashes(random, 60))
    for start in (0, 20, 40):
        write_hashes(rows[start : start + 20], tmp_path / "hashes", identity="id")
    return tmp_path / "hashes", rows


def test_hashes_on_any_storage_are_found(random, remote):
    folder, options, fs = remote
    hashes = random_hashes(random, 40)
    rows = table_of(hashes)
    write_hashes(rows[:30], f"{folder}/", identity="id", storage_options=options)
    write_hashes(rows[30:], folder, identity="id", storage_options=options)
    new = table_of(flipped(random, hashes, 7), "new")
    assert found_in(folder, new, storage_options=options) == rows["id"].tolist()
    overlaps = find_overlaps(new, folder, identity="id", storage_options=options)
    assert overlaps["overlap.of"].tolist() == rows["id"].tolist()
    names = [path.rpartition("/")[2] for path in fs.find(folder)]
    assert sorted(names) == ["000000.arrow", "000001.arrow"]
    assert not os.path.exists(folder.partition(":")[0] + ":")
    fs.pipe_file(f"{folder}/000001.arrow", fs.cat_file(f"{folder}/000001.arrow")[:-30])
    for refused in (
        lambda: found_in(folder, new, storage_options=options),
        lambda: write_hashes(new, folder, identity="id", storage_options=options),
    ):
        with pytest.raises(dii.ArgumentError, match=r"out/000001.arrow is not a file of .* delete"):
            refused()


def test_no_change_of_a_byte_gives_other_verdicts(stored, random):
    folder, rows = stored
    file = folder / "000001.arrow"
    whole = file.read_bytes()
    size = len(whole)
    changes = {f"cut at {at}": whole[:at] for at in (0, 1, 9, 10, 11, size // 2, size - 1)}
    changes |= {"longer": whole + b"\0", "shifted": b"\0" + whole, "twice": whole * 2}
    changes["another footer length"] = whole[:-10] + b"\xff" * 4 + whole[-6:]
    for at in random.choice(size, 100, replace=False).tolist():
        flip = bytes([whole[at] ^ 1 << int(random.integers(8))])
        changes[f"bit of byte {at}"] = whole[:at] + flip + whole[at + 1 :]
    for at in range(0, size - 32, 197):
        changes[f"32 bytes at {at} zeroed"] = whole[:at] + bytes(32) + whole[at + 32 :]
    untold = []
    for name, content in changes.items():
        if content == whole:
            continue
        file.write_bytes(content)
        try:
            find_duplicates(rows, against=folder, identity="id", keep="first")
            untold.append(name)
        except dii.ArgumentError as error:
            told = f"{file} is not a file of write_hashes(), or is damaged" in str(error)
            cure = "; delete it, and store its rows again with write_hashes()" in str(error)
            untold += [name] * (not told or not cure)
    assert not untold
    # What the error says helps.
    file.unlink()
    write_hashes(rows[20:40], folder, identity="id")
    assert found_in(folder, rows.assign(id="n" + rows["id"])) == rows["id"].tolist()


class Bomb:
    """Unpickling it is seen."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_files_of_anything_else_are_refused(stored, tmp_path, random):
    folder, rows = stored
    file = folder / "000001.arrow"
    table = pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all()
    assert table["key"].to_pylist() == rows["id"][20:40].tolist()  # other tools can read it
    exact = rows.assign(**{"fingerprint.bytes": "0" * 32})
    write_hashes(exact, tmp_path / "bytes", "bytes", identity="id")

    def arrow(changed):
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, changed.schema) as writer:
            writer.write_table(changed)

    def npy():
        np.save(tmp_path / "a.npy", np.array([Bomb()], object), allow_pickle=True)
        return (tmp_path / "a.npy").read_bytes()

    short = pa.array([b"0" * 16] * 20, pa.binary(16))
    cases = {
        "not a file of write_hashes": [
            lambda: file.write_bytes(b"torn"),
            lambda: file.write_bytes(pickle.dumps(Bomb())),
            lambda: file.write_bytes(npy()),
            lambda: rows.to_parquet(file),
            lambda: arrow(table),  # as it was before it had a checksum
            lambda: arrow(table.set_column(1, "hash", short)),
            lambda: arrow(table.set_column(1, "hash", pa.array([None] * 20, pa.binary(32)))),
            lambda: arrow(table.drop_columns("exact")),
        ],
        "has hashes of by='bytes' in version": [
            lambda: shutil.copy(tmp_path / "bytes/000000.arrow", file)
        ],
        "000001.arrow is missing": [file.unlink],
    }
    for message, changes in cases.items():
        for change in changes:
            change()
            with pytest.raises(dii.ArgumentError, match=message):
                found_in(folder, rows)
    write_hashes(rows[:0], folder, identity="id")  # rows that should go
    later = rows[40:].assign(id="n" + rows["id"][40:])
    assert found_in(folder, later) == rows["id"][40:].tolist()


def test_other_columns_are_refused_though_the_checksum_is_right(random, tmp_path, monkeypatch):
    rows = table_of(random_hashes(random, 5))
    schema, batches = hash_store._schema, hash_store._batches
    wider = schema("pdq").append(pa.field("more", pa.int8()))

    def wider_batches(ranked, wider):
        for batch in batches(ranked, schema("pdq")):
            more = pa.array([0] * len(batch), pa.int8())
            yield pa.record_batch([*batch.columns, more], schema=wider)

    with monkeypatch.context() as patch:
        patch.setattr(hash_store, "_schema", lambda by, with_thumbnails=False: wider)
        patch.setattr(hash_store, "_batches", wider_batches)
        write_hashes(rows, tmp_path, identity="id")
    with pytest.raises(dii.ArgumentError, match=r"000000.arrow has other columns"):
        found_in(tmp_path, rows)


def test_a_write_is_whole_or_an_error_and_leaves_nothing_else(stored, tmp_path):
    folder, rows = stored
    script = """
import resource, sys
import pandas as pd
import dask_image_ingest as dii
rows = pd.read_pickle(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    dii.curate.write_hashes(rows, sys.argv[1], identity="id")
except dii.ExportError as error:
    print(error)
"""
    rows.to_pickle(tmp_path / "rows")
    done = run_python(script, folder, tmp_path / "rows")
    assert "make room, and run it again" in done.stdout, done.stderr
    assert sorted(os.listdir(folder)) == ["000000.arrow", "000001.arrow", "000002.arrow"]
    # A killed call's file goes with the next call, which replaces no link.
    (folder / "_staging").mkdir()
    (folder / "_staging/1234.tmp").write_bytes(b"torn")
    (folder / "000003.arrow").symlink_to(tmp_path / "victim")
    with pytest.raises(dii.ExportError, match=r"000003.arrow is there, and is no file.*Remove it"):
        write_hashes(rows, folder, identity="id")
    (folder / "000003.arrow").unlink()
    write_hashes(rows, folder, identity="id")
    assert not (tmp_path / "victim").exists()
    assert sorted(os.listdir(folder)) == [f"{number:06d}.arrow" for number in range(4)]
    (tmp_path / "file").touch()
    with pytest.raises(dii.ExportError, match=r"file/000000.arrow cannot be written"):
        write_hashes(rows, tmp_path / "file", identity="id")
    for wrong in ("", b"a", "a\0b"):
        with pytest.raises(dii.ArgumentError, match="is no path"):
            write_hashes(rows, wrong, identity="id")


def test_a_call_that_was_killed_is_called_again_and_stores_its_rows_once(random, tmp_path):
    rows = table_of(random_hashes(random, 10))
    folders = (tmp_path / str(number) for number in itertools.count())

    def write(folder):
        write_hashes(rows[:4], folder, identity="id")
        write_hashes(rows[4:], folder, identity="id")

    for moment in moments(lambda: write(next(folders))):
        folder = next(folders)
        assert dies(moment, lambda: write(folder))  # noqa: B023
        write(folder)
        assert sorted(os.listdir(folder)) == ["000000.arrow", "000001.arrow"]
        tables = [pa.ipc.open_file(folder / name).read_all() for name in sorted(os.listdir(folder))]
        assert pa.concat_tables(tables)["key"].to_pylist() == rows["id"].tolist()


def test_calls_at_the_same_time_lose_no_rows(random, tmp_path):
    rows = table_of(random_hashes(random, 80))
    parts = [rows[start : start + 10] for start in range(0, 80, 10)]
    barrier = threading.Barrier(len(parts))
    failed = []

    def write(part):
        barrier.wait()
        try:
            write_hashes(part, tmp_path / "hashes", identity="id")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert found_in(tmp_path / "hashes", rows.assign(id="n" + rows["id"])) == rows["id"].tolist()

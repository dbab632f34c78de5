"""Keys may be given anew, and no sample gets the members of another by that."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:the first shard, .* has no image")


def write(folder, shards):
    """Shards of keys, each with a text of its own; those with an image are in capitals."""
    folder.mkdir(exist_ok=True)
    for number, keys in enumerate(shards):
        members = []
        for key in keys.split():
            members += [(f"{key}.jpg", b"an image of " + key.encode())] * key.isupper()
            members += [(f"{key}.txt", b"a text of " + key.encode())]
        (folder / f"{number}.tar").write_bytes(tar(members))
    return folder


def read(folder):
    frame = dii.read_webdataset_images(folder, backend="pandas", members={"txt": "string"})
    return frame.drop(columns=["image", "error"])


def export(frame, tmp_path, **options):
    out = tmp_path / "out"
    told = dii.to_webdataset(frame, f"{out}/{{shard}}.tar", row_errors="drop", **options)
    found = {
        key: members["txt"].decode()
        for path in shards_in(out)
        for key, members in by_webdataset([path])
    }
    left_out = {code: entry["count"] for code, entry in told.attrs["left_out"].items()}
    return found, left_out


def test_renumbered_rows_get_no_members_of_other_samples(tmp_path):
    frame = read(write(tmp_path / "in", ["A b C d E f"])).compute()
    frame = frame.sort_values("txt", ascending=False, ignore_index=True)
    frame["__key__"] = list("AbCdEf")
    expected = {row["__key__"]: row["txt"] for row in frame.to_dict("records")}
    found, left_out = export(frame, tmp_path)
    assert left_out == {"no-pointer": 3}
    assert found.items() <= expected.items()
    assert len(found) == 3


def test_what_is_left_out_says_why(tmp_path):
    frame = read(write(tmp_path / "in", ["A b"])).compute()
    frame["__key__"] = ["b", "A"]
    with pytest.raises(ArgumentError, match=r"A of .*0.tar.*: no-pointer: it has no offset"):
        dii.to_webdataset(frame, f"{tmp_path}/out/{{shard}}.tar")


@pytest.mark.parametrize("lazy", [True, False])
def test_samples_without_an_image_are_found_while_keys_are_kept(lazy, tmp_path):
    shards = ["A b C d", "e f", "G h"]
    frame = read(write(tmp_path / "in", shards))
    frame = frame.shuffle("txt", npartitions=2)
    found, left_out = export(frame if lazy else frame.compute(), tmp_path)
    assert found == {key: f"a text of {key}" for key in "AbCdefGh"}
    assert not left_out


def test_new_keys_of_one_shard_make_rows_of_all_others_unsure(tmp_path):
    frame = read(write(tmp_path / "in", ["A b", "C d", "e f"])).compute()
    frame.loc[frame["__key__"] == "A", "__key__"] = "new"
    found, left_out = export(frame, tmp_path)
    assert found == {"new": "a text of A", "C": "a text of C"}
    assert left_out == {"no-pointer": 4}


def test_a_key_that_its_shard_does_not_have_tells_of_a_shard_without_images(tmp_path):
    frame = read(write(tmp_path / "in", ["a b c", "d e"])).compute()
    frame["__key__"] = list("bcxed")
    found, left_out = export(frame, tmp_path)
    assert not found
    assert left_out == {"no-pointer": 5}


def test_rows_of_one_new_key_are_not_said_to_be_one_sample(tmp_path):
    frame = read(write(tmp_path / "in", ["A b c"])).compute().assign(__key__="same")
    _, left_out = export(frame, tmp_path)
    assert left_out == {"no-pointer": 2}
    frame = read(write(tmp_path / "in", ["A b c"])).compute()
    _, left_out = export(pd.concat([frame, frame]), tmp_path, overwrite=True)
    assert left_out == {"repeated-row": 3}


@pytest.mark.rounds(4, nightly=40)
def test_keys_that_moved_take_no_text_along(seed, rng, tmp_path):
    """Every row has another row's key: each sample that is written has the text of its row."""
    names = [f"k{number:02d}" for number in range(20)]
    names = [name.upper() if rng.random() < rng.choice([0.1, 0.9]) else name for name in names]
    names[rng.randrange(20)] = "K99"
    cuts = sorted(rng.sample(range(1, 20), rng.randrange(4)))
    bounds = zip([0, *cuts], [*cuts, 20], strict=True)
    frame = read(write(tmp_path / "in", [" ".join(names[s:e]) for s, e in bounds])).compute()
    frame = frame.sample(frac=1, random_state=seed).reset_index(drop=True)
    frame["__key__"] = np.roll(frame["__key__"].to_numpy(object), rng.randrange(1, 20))
    found, left_out = export(frame, tmp_path, samples_per_shard=rng.choice([3, 50]))
    located = frame[frame["offset"].notna()]
    assert found == dict(zip(located["__key__"], located["txt"], strict=True))
    assert left_out == ({"no-pointer": 20 - len(located)} if len(located) < 20 else {})

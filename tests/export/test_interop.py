"""Shards and frames as other libraries read them, each by itself."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from synthetic import encode, photograph, write_shard
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii


@pytest.fixture
def members():
    """Twelve photographs with captions, by the names of their members."""
    found = {}
    for number in range(12):
        found[f"{number:05d}.jpg"] = encode(photograph(30 + number, 40, number))
        found[f"{number:05d}.txt"] = f"picture {number}".encode()
    return found


@pytest.fixture
def exported(members, tmp_path):
    """Three shards that were written of two."""
    (tmp_path / "in").mkdir()
    names = list(members)
    for shard, half in enumerate((names[:12], names[12:])):
        write_shard(tmp_path / "in" / f"{shard}.tar", {name: members[name] for name in half})
    ddf = dii.read_webdataset_images(tmp_path / "in", backend="pandas")
    dii.to_webdataset(ddf, tmp_path / "out" / "{shard:05d}.tar", samples_per_shard=4, shuffle=1)
    return tmp_path / "out"


def test_a_collection_of_img2dataset_is_read_filtered_and_written(members, tmp_path):
    """Its layout: 00000.tar, 00000.parquet with a row of each download, 00000_stats.json."""
    folder = tmp_path / "laion"
    folder.mkdir()
    for shard in range(2):
        keys = [f"{shard:05d}{number:04d}" for number in range(5)]
        downloaded = {}
        for number, key in enumerate(keys[:4]):
            downloaded[f"{key}.jpg"] = members[f"{5 * shard + number:05d}.jpg"]
            downloaded[f"{key}.txt"] = f"caption of {key}".encode()
            downloaded[f"{key}.json"] = json.dumps({"key": key, "similarity": number / 4}).encode()
        write_shard(folder / f"{shard:05d}.tar", downloaded)
        (folder / f"{shard:05d}_stats.json").write_text('{"count": 5, "successes": 4}')
        table = {
            "url": [f"https://host/{key}" for key in keys],
            "key": keys,
            "status": [*["success"] * 4, "failed_to_download"],
            "punsafe": [number / 5 for number in range(5)],
        }
        pd.DataFrame(table).to_parquet(folder / f"{shard:05d}.parquet")
    ddf = dii.read_webdataset_images(folder, sidecar="parquet", backend="pandas")
    assert len(ddf) == 8
    kept = ddf[ddf.punsafe < 0.3]
    dii.to_webdataset(kept, tmp_path / "out" / "{shard:05d}.tar")
    found = dict(by_webdataset(shards_in(tmp_path / "out")))
    assert list(found) == ["000000000", "000000001", "000010000", "000010001"]
    assert found["000010001"]["jpg"] == members["00006.jpg"]
    written = pd.read_parquet(tmp_path / "out" / "00000.parquet")
    assert written["url"].tolist() == [f"https://host/{key}" for key in found]


@pytest.mark.nightly
def test_torchvision_gives_a_folder_the_same_classes_and_pixels(members, tmp_path):
    torchvision = pytest.importorskip("torchvision", exc_type=ImportError)
    for number in range(6):
        path = tmp_path / "pets" / ("dog", "Cat", "ant")[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(members[f"{number:05d}.jpg"])
    theirs = torchvision.datasets.ImageFolder(tmp_path / "pets")
    ours = dii.read_images(tmp_path / "pets", label="folder", backend="pandas").compute()
    labels = dict(zip(ours["__url__"], ours.label, strict=True))
    assert labels == dict(theirs.samples)
    arrays = dict(zip(ours["__url__"], ours.images.arrays(), strict=True))
    for (path, _), (image, _) in zip(theirs.samples, theirs, strict=True):
        assert np.array_equal(np.asarray(image), arrays[path])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # its own
def test_ray_reads_the_members_of_an_export(exported, members):
    data = pytest.importorskip("ray.data")
    rows = data.read_webdataset([str(path) for path in shards_in(exported)], decoder=None)
    found = {}
    for row in rows.take_all():
        found |= {f"{row['__key__']}.{e}": row[e] for e in ("jpg", "txt")}
    assert found == members


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # its own
def test_energon_reads_the_samples_of_an_export(exported, members):
    energon = pytest.importorskip("megatron.energon")
    names = [path.name for path in shards_in(exported)]
    energon.BaseWebdatasetFactory.prepare_dataset(
        exported, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    (exported / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
        "field_map:\n  image: jpg\n  caption: txt\n"
    )
    dataset = energon.get_train_dataset(
        exported,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
    )
    captions = [sample.caption for sample in energon.get_loader(dataset)]
    assert sorted(captions) == sorted(
        data.decode() for name, data in members.items() if name.endswith("txt")
    )

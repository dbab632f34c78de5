"""Curation of a cuDF frame: the columns of a pandas frame, made where the pixels are."""

import numpy as np
import pandas as pd
import pytest
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii

cupy = pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def client():
    with dii.start_cluster(1, gpu=True, rmm_pool_size=0.2, dashboard_address=None) as client:
        yield client


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Photographs of several shapes, some grey, each tenth one there twice."""
    members = {}
    for number in range(60):
        image = photograph(200 + 7 * number, 300, number)
        image = image.convert("L") if number % 7 == 3 else image
        members[f"{number:03d}.png"] = encode(image, "png")
        if number % 10 == 0:
            members[f"{number:03d}-again.png"] = members[f"{number:03d}.png"]
    return write_shard(tmp_path_factory.mktemp("curate") / "curate.tar", members)


def test_a_cudf_frame_gets_the_columns_of_a_pandas_frame(client, shard):
    made = {}
    for backend in ("pandas", "cudf"):
        ddf = dii.read_webdataset_images(shard, backend=backend)
        found = dii.curate.compute_fingerprints(dii.curate.find_issues(ddf))
        found = dii.curate.embed(found, _means)
        found = dii.curate.find_duplicates(found, keep="first").drop(columns="image").compute()
        found = found if backend == "pandas" else found.to_pandas()
        made[backend] = found.sort_values("__key__", ignore_index=True)
    host, card = made["pandas"], made["cudf"]
    assert list(host.columns) == list(card.columns)
    assert card["fingerprint.bytes"].tolist() == host["fingerprint.bytes"].tolist()
    assert card["duplicate.keep"].tolist() == host["duplicate.keep"].tolist()
    assert (~host["duplicate.keep"].astype(bool)).sum() == 6
    for name in (column for column in host if column.startswith("quality.")):
        values = pd.to_numeric(card[name]), pd.to_numeric(host[name])
        np.testing.assert_allclose(*values, atol=0.02)  # decoders differ by a level


def test_semantic_duplicates_and_clusters_run_on_the_card(client, shard):
    ddf = dii.read_webdataset_images(shard, backend="cudf")
    embedded = dii.curate.embed(ddf, _means).drop(columns="image").persist()
    found = dii.curate.find_semantic_duplicates(embedded, threshold=0.99999, keep="first")
    assert int((~found["semantic.keep"]).sum().compute()) >= 6
    numbered = dii.curate.find_clusters(embedded, 4)["cluster"].compute()
    assert numbered.notna().all()


def _means(images):
    pictures = images if isinstance(images, list) else list(images)
    return np.stack([cupy.asnumpy(each).reshape(-1, each.shape[2]).mean(0)[[0, -1]] - 128.5
                     for each in pictures])  # fmt: skip

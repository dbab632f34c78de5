"""Boxes of one picture are cut from one decode on a GPU."""

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from contract import on_host
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest.decode.dali import BatchPipeline

PICTURES, BOXES = 4, 5


@pytest.fixture
def rows(tmp_path):
    members = {}
    for n in range(PICTURES):
        image = encode(photograph(90, 120, n))
        if n == 2:  # DALI gets it, and refuses the batch
            at = image.rindex(b"\xff\xda") + 40
            image = image[:at] + b"\xff\xc4\x00\x02" + image[at:]
        members |= {f"{n}.jpg": image, f"{n}.json": b"{}"}
    path = write_shard(tmp_path / "boxes.tar", members)
    frame = dii.read_webdataset_images(path, decode=False, backend="pandas").compute()
    frame = frame.loc[frame.index.repeat(BOXES)].reset_index(drop=True)
    corners = np.random.default_rng(0).integers(0, 60, (len(frame), 2))
    boxes = [[x, y, x + 20, y + 30] for x, y in corners.tolist()]
    frame["box"] = pd.Series(boxes, dtype=pd.ArrowDtype(pa.list_(pa.float64())))
    return frame


@pytest.mark.parametrize("size", [None, 16])
def test_a_picture_is_decoded_once_for_all_of_its_boxes(rows, size, monkeypatch):
    fed, run = [], BatchPipeline.run

    def run_and_count(pipeline, **inputs):
        fed.append([nbytes for (nbytes,) in inputs["images"].shape()])
        return run(pipeline, **inputs)

    with dask.config.set(scheduler="synchronous"):
        want = dii.decode_images(rows, box="box", size=size)
        there = dd.from_pandas(rows, npartitions=1).to_backend("cudf").compute()
        monkeypatch.setattr(BatchPipeline, "run", run_and_count)
        made = dii.decode_images(there, box="box", size=size)
    assert sum(nbytes > 1500 for nbytes in fed[0]) == PICTURES
    assert len(fed) < 2 * BOXES  # the damaged one is found by its number, not by halves
    errors = made["error"].to_arrow().to_pylist()
    assert [error is None for error in errors] == want["error"].isna().tolist()
    images = zip(made.images.arrays(), want.images.arrays(), strict=True)
    pairs = [(on_host(one), other) for one, other in images if other is not None]
    assert len(pairs) == BOXES * PICTURES
    for one, other in pairs:
        assert abs(one.astype(int) - other).mean() < 1

"""Tiles of cuDF frames are those of pandas frames."""

import numpy as np
import pandas as pd
import pytest
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii

pytest.importorskip("cudf")

PART = ["__key__", "part.page", "part.top", "part.left", "height", "width"]


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    shapes = [(40, 300), (130, 170), (200, 90), (250, 250)]
    members = {
        f"{n:03}.{kind}": encode(photograph(*shape, n), kind)
        for n, (shape, kind) in enumerate(zip(shapes, ("jpg", "png", "jpg", "jpg"), strict=True))
    }
    return str(write_shard(tmp_path_factory.mktemp("shards") / "tiles.tar", members))


def rows(frame):
    frame = frame if isinstance(frame, pd.DataFrame) else frame.to_pandas()
    return [*frame[PART].itertuples(index=False, name=None)]


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["tiles", "pages"])
def test_rows_and_pixels_of_tiles_are_those_of_pandas(shard, kind, lazy):
    made = []
    for backend in ("cudf", "pandas"):
        refs = dii.read_webdataset_images(shard, decode=False, backend=backend)
        refs = refs if lazy else refs.compute()
        tiles = (
            refs.images.pages()
            if kind == "pages"
            else refs.images.tiles(90, overlap=10).images.tiles(50)
        )
        tiles = tiles[tiles["part.top"] < 150]
        decoded = dii.decode_images(tiles)
        made.append([frame.compute() if lazy else frame for frame in (tiles, decoded)])
    (there, there_decoded), (here, here_decoded) = made
    assert rows(there[PART]) == rows(here[PART])
    assert len(here) >= 4
    for one, other in zip(there_decoded.images.arrays(), here_decoded.images.arrays(), strict=True):
        assert np.abs(one.get().astype(int) - other).max() <= 1

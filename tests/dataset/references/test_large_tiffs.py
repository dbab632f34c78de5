"""Of TIFFs no more is fetched and decoded than what the parts need that are asked for."""

from __future__ import annotations

import gc
import io
import os
import warnings

import numpy as np
import pytest
import tifffile
from faulty_server import faulty_server
from tars import tar

import dask_image_ingest as dii

SHAPE = 1_200, 1_500, 3
LAYOUTS = {
    "tiles of JPEGs": {"tile": (256, 256), "compression": "jpeg"},
    "tiles": {"tile": (256, 256), "compression": "zlib", "predictor": True},
    "strips": {"rowsperstrip": 16, "compression": "zlib"},
    "one strip": {},
}


@pytest.fixture(scope="module")
def slide():
    """Noise, which no compression makes small."""
    return np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)


def encoded(slide, **layout):
    file = io.BytesIO()
    tifffile.imwrite(file, slide, photometric="rgb", metadata=None, **layout)
    return file.getvalue()


def stored_bytes(data, boxes):
    """Bytes of the tiles that boxes meet, by tifffile; without compression, of the rows."""
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages[0]
        if not page.is_tiled and page.compression == 1:
            return sum(bottom - top for _, top, _, bottom in boxes) * SHAPE[1] * 3
        high, wide, _ = page.chunks
        across, met = -(-SHAPE[1] // wide), set()
        for left, top, right, bottom in boxes:
            rows, columns = (
                range(top // high, -(-bottom // high)),
                range(left // wide, -(-right // wide)),
            )
            met |= {row * across + column for row in rows for column in columns}
        return sum(page.databytecounts[number] for number in met)


def parts_of(url, boxes):
    refs = dii.read_webdataset_images(url, decode=False, backend="pandas").compute()
    return refs.assign(box=[boxes] * len(refs)).explode("box")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_remote_tiff_the_strips_or_tiles_of_its_parts_are_fetched(layout, slide):
    data = encoded(slide, **LAYOUTS[layout])
    whole = tifffile.imread(io.BytesIO(data))
    boxes = [[left, top, left + 500, top + 400] for top in (0, 800) for left in (100, 900)]
    with faulty_server(files={"/a.tar": tar({"a.tif": data, "b.tif": data})}) as server:
        rows = parts_of(f"{server.url}/a.tar", boxes)
        server.reset()
        decoded = dii.decode_images(rows, box="box")
        assert server.sent <= 1.2 * 2 * stored_bytes(data, boxes)
        # The shard, the beginnings of both files, and then all parts at once.
        first_parts = sum(span(request)[1] - span(request)[0] < 25_000 for request in server.seen)
        assert first_parts <= 3
    for array, (left, top, right, bottom) in zip(decoded.images.arrays(), rows["box"], strict=True):
        np.testing.assert_array_equal(array, whole[top:bottom, left:right])


def span(request):
    return [int(byte) for byte in request[2]["Range"].removeprefix("bytes=").split("-")]


def test_a_tiff_that_is_refused_as_a_whole_gives_its_tiles(slide, tmp_path):
    data = encoded(slide, **LAYOUTS["tiles"])
    (tmp_path / "a.tar").write_bytes(tar({"a.tif": data}))
    refs = dii.read_webdataset_images(tmp_path / "a.tar", decode=False, backend="pandas")
    options = {"max_pixels": 768 * 768}
    assert dii.decode_images(refs, **options).compute()["error"].str.startswith("too-large").all()
    tiles = refs.images.tiles(500)
    decoded = dii.decode_images(tiles, **options).compute(scheduler="sync")
    assert decoded["error"].isna().all()
    assert len(decoded) == 3 * 3
    for array, top, left in zip(
        decoded.images.arrays(), decoded["part.top"], decoded["part.left"], strict=True
    ):
        np.testing.assert_array_equal(array, slide[top : top + 500, left : left + 500])
    strips = dii.decode_images(tiles, max_pixels=500 * 500).compute(scheduler="sync")
    assert strips["error"].str.contains("its strips or tiles there hold").any()


def test_the_shard_of_a_large_tiff_is_closed_when_its_parts_are_decoded(slide, tmp_path):
    (tmp_path / "a.tar").write_bytes(tar({"a.tif": encoded(slide, tile=(256, 256))}))
    rows = parts_of(tmp_path / "a.tar", [[10, 20, 300, 400], [1000, 900, 1100, 1200]])
    gc.collect()
    gc.disable()  # by its references alone
    try:
        decoded = dii.decode_images(rows, box="box")
        assert not any(str(tmp_path) in path for path in open_files())
    finally:
        gc.enable()
    np.testing.assert_array_equal(decoded.images.arrays()[0], slide[20:400, 10:300])


def open_files():
    for number in os.listdir("/proc/self/fd"):
        if os.path.exists(path := f"/proc/self/fd/{number}"):
            yield os.readlink(path)


def pages(*values):
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for value in values:
            page = np.full((20 + value, 30), value, np.uint8)
            writer.write(page, subfiletype=int(value >= 100), metadata=None)
    return file.getvalue()


@pytest.mark.filterwarnings("default:.* is a TIFF of several pages:UserWarning")
def test_a_read_of_several_pages_warns_once_and_pages_are_rows(tmp_path):
    members = {"a.tif": pages(7), "b.tif": pages(1, 2, 3), "c.tif": pages(4, 5)}
    (tmp_path / "a.tar").write_bytes(tar(members))
    with pytest.warns(UserWarning, match=r"sample 'b' is a TIFF of several pages") as caught:
        first = dii.read_webdataset_images(tmp_path / "a.tar").compute(scheduler="sync")
    assert len(caught) == 1
    assert [array.max() for array in first.images.arrays()] == [7, 1, 4]
    refs = dii.read_webdataset_images(tmp_path / "a.tar", decode=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dii.decode_images(refs.images.pages()).compute(scheduler="sync")
    assert [array.max() for array in found.images.arrays()] == [7, 1, 2, 3, 4, 5]
    assert found["height"].tolist() == [27, 21, 22, 23, 24, 25]


def test_smaller_copies_of_a_page_are_no_reason_to_warn(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar({"a.tif": pages(1, 100, 101)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dii.read_webdataset_images(tmp_path / "a.tar").compute(scheduler="sync")


def test_damaged_directories_cost_one_row_that_says_why(tmp_path):
    damaged = bytearray(pages(1, 2))
    at = int.from_bytes(damaged[4:8], "little")
    last = at + 2 + 12 * int.from_bytes(damaged[at : at + 2], "little")
    damaged[last : last + 4] = damaged[4:8]
    (tmp_path / "a.tar").write_bytes(tar({"a.tif": bytes(damaged), "b.tif": pages(1, 2)}))
    refs = dii.read_webdataset_images(tmp_path / "a.tar", decode=False)
    rows = dii.decode_images(refs.images.pages()).compute(scheduler="sync")
    assert rows["__key__"].tolist() == ["a", "b", "b"]
    assert rows["error"].iloc[0] == f"corrupt: its directories lead back to byte {at}"
    assert rows["error"].iloc[1:].isna().all()

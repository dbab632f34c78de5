"""Tiles and pages are rows of references: where they lie, and what stays as it was."""

import io

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.dataset.references.tiles import tile_grid
from dask_image_ingest.decode import pillow
from dask_image_ingest.decode.formats import pillow_image

PART = ["part.page", "part.top", "part.left", "height", "width"]


@pytest.fixture
def refs(shards):
    return dii.read_webdataset_images(shards, decode=False, backend="pandas")


def spans(length, size, overlap, edge):
    """Start and length of each tile along an edge, laid one after the other."""
    start, found = 0, []
    while start + size < length:
        found.append((start, size))
        start += size - overlap
    if edge == "shift":
        start = max(length - size, 0)
    if edge != "drop" or start + size == length:
        found.append((start, min(size, length - start)))
    return found


def rectangles(height, width, size, overlap, edge):
    return [
        (top, left, tall, wide)
        for top, tall in spans(height, size[0], overlap[0], edge)
        for left, wide in spans(width, size[1], overlap[1], edge)
    ]


@pytest.mark.parametrize("edge", ["clip", "shift", "drop"])
@pytest.mark.rounds(1, nightly=50)
def test_tiles_are_those_that_are_laid_one_after_the_other(edge, seed):
    random = np.random.default_rng(seed)
    for _ in range(300):
        size = tuple(random.integers(1, 40, 2).tolist())
        overlap = tuple(int(random.integers(0, edge)) for edge in size)
        shapes = random.integers(1, 120, (int(random.integers(1, 6)), 2))
        shapes = np.concatenate([shapes, [size], [size[::-1]], [[1, 1]]])
        pictures, tiles = tile_grid(shapes, size, overlap, edge)
        expected = [
            (number, *rectangle)
            for number, shape in enumerate(shapes.tolist())
            for rectangle in rectangles(*shape, size, overlap, edge)
        ]
        assert [*zip(pictures.tolist(), *tiles.T.tolist(), strict=True)] == expected


@pytest.mark.parametrize("edge", ["clip", "shift"])
def test_tiles_cover_every_pixel(edge):
    _, tiles = tile_grid(np.array([[103, 77]]), (20, 30), (3, 7), edge)
    seen = np.zeros((103, 77), int)
    for top, left, height, width in tiles.tolist():
        seen[top : top + height, left : left + width] += 1
    assert seen.min() == 1


@pytest.mark.parametrize("lazy", [True, False])
def test_a_row_of_a_tile_has_the_metadata_and_the_label_of_its_picture(refs, lazy):
    whole = refs.compute()
    tiles = (
        refs.images.tiles(100, overlap=(10, 20)).compute()
        if lazy
        else whole.images.tiles(100, overlap=(10, 20))
    )
    expected = [
        rectangles(height, width, (100, 100), (10, 20), "clip")
        for height, width in zip(whole.height, whole.width, strict=True)
    ]
    counts = [len(of_picture) for of_picture in expected]
    others = [name for name in whole.columns if name not in ("height", "width", "image")]
    pd.testing.assert_frame_equal(
        tiles[others], whole[others].iloc[np.repeat(range(len(whole)), counts)]
    )
    found = tiles[PART].to_numpy(int).tolist()
    assert found == [[0, *place] for of_picture in expected for place in of_picture]
    assert dict(tiles[PART].dtypes.map(str)) == dict.fromkeys(PART, "int32[pyarrow]")
    first = tiles.image.iloc[1]
    assert (first.key, first.top, first.left, first.height, first.width) == (
        tiles["__key__"].iloc[1],
        *map(float, found[1][1:]),
    )


@pytest.mark.parametrize("size", [2**63, 10**30])
def test_a_tile_larger_than_any_picture_is_the_picture(refs, size):
    columns = ["__key__", "height", "width"]
    tiles, pictures = refs.images.tiles(size).compute(), refs.compute()
    assert tiles[columns].to_numpy().tolist() == pictures[columns].to_numpy().tolist()


def test_a_picture_that_is_one_tile_keeps_its_reference(refs):
    whole = refs.compute()
    tiles = whole.images.tiles(1000)
    assert tiles.image.tolist() == whole.image.tolist()
    assert tiles["part.top"].tolist() == [0] * len(whole)


def test_tiles_of_tiles_are_in_pixels_of_the_picture(refs):
    whole = refs.compute()
    twice = whole.images.tiles(100, edge="drop").images.tiles(50)
    once = whole.images.tiles(100, edge="drop")
    expected = [
        (key, 0, top + down, left + right, 50, 50)
        for key, top, left in once[["__key__", "part.top", "part.left"]].itertuples(index=False)
        for down in (0, 50)
        for right in (0, 50)
    ]
    assert [*twice[["__key__", *PART]].itertuples(index=False, name=None)] == expected
    tile = twice.image.iloc[-1]
    assert (tile.top, tile.left, tile.height, tile.width) == expected[-1][2:]


def test_an_image_without_a_size_stays_one_row(tmp_path):
    write_tar(tmp_path / "bad.tar", {"a.jpg": b"no image", "b.txt": b"none"})
    refs = dii.read_webdataset_images(tmp_path / "bad.tar", decode=False, backend="pandas")
    for rows in (refs.images.tiles(10), refs.images.pages()):
        frame = rows.compute()
        assert frame["__key__"].tolist() == ["a", "b"]
        assert frame[PART].isna().all(axis=None)


def test_pages_are_the_frames_of_a_file(tmp_path):
    pages = [Image.new("RGB", (20 + number, 30), (number, 0, 0)) for number in range(3)]
    files = {}
    for name in ("TIFF", "GIF", "PNG"):
        file = io.BytesIO()
        same = pages if name == "TIFF" else [page.resize((20, 30)) for page in pages]
        same[0].save(file, name, save_all=True, append_images=same[1:])
        files[name] = file.getvalue()
    single = io.BytesIO()
    pages[0].save(single, "JPEG")
    samples = {
        "tiff.tif": files["TIFF"],
        "gif.gif": files["GIF"],
        "png.png": files["PNG"],
        "jpeg.jpg": single.getvalue(),
    }
    write_tar(tmp_path / "pages.tar", samples)
    refs = dii.read_webdataset_images(tmp_path / "pages.tar", decode=False, backend="pandas")
    for frame in (refs.images.pages().compute(), refs.compute().images.pages()):
        found = frame[["__key__", *PART]].itertuples(index=False, name=None)
        assert [*found] == [
            *(("tiff", number, 0, 0, 30, 20 + number) for number in range(3)),
            *(("gif", number, 0, 0, 30, 20) for number in range(3)),
            *(("png", number, 0, 0, 30, 20) for number in range(3)),
            ("jpeg", 0, 0, 0, 30, 20),
        ]
        assert [reference.page for reference in frame.image] == [*[0, 1, 2] * 3, None]
    tiles = refs.images.pages().images.tiles(25, edge="drop").compute()
    assert tiles.empty
    tiles = refs.images.pages().images.tiles(15, edge="drop").compute()
    last = tiles[tiles["__key__"] == "tiff"].image.iloc[-1]
    assert (last.page, last.top, last.left, last.height, last.width) == (2, 15, 0, 15, 15)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_frames_are_those_of_pillow_and_take_one_walk(kind, tmp_path, monkeypatch):
    draw = np.random.default_rng(3)
    frames = [Image.fromarray(draw.integers(0, 256, (20, 30, 3), np.uint8)) for _ in range(60)]
    options = {"lossless": True} if kind == "WEBP" else {}
    samples = {}
    for number in range(3):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[number + 1 :], **options)
        samples[f"{number}.{kind.lower()}"] = file.getvalue()
    write_tar(tmp_path / "frames.tar", samples)
    refs = dii.read_webdataset_images(tmp_path / "frames.tar", decode=False, backend="pandas")
    pages = refs.images.pages().compute()
    pages = pages.iloc[draw.permutation(len(pages))]
    seeks = []
    seek = pillow_image.seek_frame

    def counted(image, number):
        seeks.append(number - image.tell())
        return seek(image, number)

    monkeypatch.setattr(pillow, "seek_frame", counted)
    decoded = dii.decode_images(pages)
    assert len(decoded) == 60 + 59 + 58
    assert sum(seeks) == len(decoded) - 3  # the first frame of each is decoded by itself
    for key, page, found in zip(
        decoded["__key__"], decoded["part.page"], decoded.images.arrays(), strict=True
    ):
        with Image.open(io.BytesIO(samples[f"{key}.{kind.lower()}"])) as image:
            image.seek(page)
            assert (found == np.asarray(image.convert("RGB"))).all()
    boxes = pages.assign(box=[[2, 3, 12, 9]] * len(pages))
    crops = dii.decode_images(boxes, box="box", mode="L", size=(6, 10))
    for whole, crop in zip(decoded.images.arrays(), crops.images.arrays(), strict=True):
        assert (crop[..., 0] == np.asarray(Image.fromarray(whole).convert("L"))[3:9, 2:12]).all()


def test_filters_and_columns_go_below_tiles(refs):
    tiles = refs.images.tiles(64)
    plan = tiles[(tiles.cls == 1) & (tiles["part.top"] > 0)][["txt"]].optimize()
    scans = [*plan.expr.find_operations(type(refs.expr))]
    text = plan.expr.tree_repr()
    assert "cls == 1" in text
    assert "json" not in text
    assert len(scans) <= 1
    frame = tiles.compute()
    expected = frame[(frame.cls == 1) & (frame["part.top"] > 0)]
    found = tiles[(tiles.cls == 1) & (tiles["part.top"] > 0)][["txt"]].compute()
    assert found.txt.tolist() == expected.txt.tolist()
    assert len(tiles) == len(frame)


def test_a_mean_over_tiles_is_that_of_the_tiles(refs):
    tiles = refs.images.tiles(64)
    frame = tiles.compute()
    expected = frame[frame.cls > frame.cls.mean()]
    assert len(expected) not in (0, len(frame))
    found = tiles[tiles.cls > tiles.cls.mean()].compute()
    assert found["__key__"].tolist() == expected["__key__"].tolist()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"size": 0}, "size=0: pass pixels"),
        ({"size": (5, 2.5)}, "size=2.5: pass pixels"),
        ({"size": 8, "overlap": 8}, "overlap=8: pass less than size=8"),
        ({"size": (8, 4), "overlap": (2, 4)}, "overlap=.2, 4.: pass less"),
        ({"size": 8, "edge": "pad"}, "edge='pad'; choose"),
        ({"size": 8, "image": "mask"}, "columns of references are 'image'$"),
    ],
)
def test_tiles_refuse(refs, options, told):
    with pytest.raises(dii.ArgumentError, match=told):
        refs.images.tiles(**options)


def test_what_tiles_and_pages_need_is_told(refs, shards):
    with pytest.raises(dii.ArgumentError, match="no column 'height', 'width'"):
        refs[["image"]].images.tiles(8)
    with pytest.raises(dii.ArgumentError, match="parts already"):
        refs.images.tiles(8).images.pages()
    images = dii.read_webdataset_images(shards, backend="pandas")
    located = images[["__key__", "__url__", "offset", "nbytes", "height", "width"]]
    for frame in (images, located.assign(image=images.image), located.rename(columns={})):
        for make in (lambda rows: rows.images.tiles(8), lambda rows: rows.images.pages()):
            with pytest.raises(dii.ArgumentError, match=r"no column of references.*decode=False"):
                make(frame)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
def test_columns_of_parquet_that_are_called_as_fields_of_references_are_read(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (20, 30)).save(file, "PNG")
    write_tar(tmp_path / "a.tar", {"a.png": file.getvalue(), "a.seg.png": file.getvalue()})
    images = {"image": "png", "mask": "seg.png"}
    refs = dii.read_webdataset_images(
        tmp_path / "a.tar", image=images, decode=False, backend="pandas"
    )
    refs.to_parquet(tmp_path / "table", write_index=False)
    again = dd.read_parquet(tmp_path / "table")
    assert again[["__key__", "mask.height"]].compute().to_numpy().tolist() == [["a", 30]]
    assert again.compute()["mask"].iloc[0] == refs.compute()["mask"].iloc[0]

"""``mix_batches``: rows of several frames by weights, each once, and resumable at any batch."""

from __future__ import annotations

import collections
import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image
from tars import tar

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def frames(shards):
    """Sixteen and eight rows; keys tell them apart."""
    read = [dii.read_webdataset_images(some, size=16) for some in (shards[:2], shards[2:])]
    return [frame[["__key__", "image", "cls"]] for frame in read]


def keys(batches):
    return [key for batch in batches for key in batch["__key__"]]


def of(frame):
    return frame["__key__"].compute().tolist()


def test_all_rows_come_once_with_their_own_pixels(frames):
    batches = list(dii.mix_batches(frames, 5, longest=True))
    assert [len(batch["image"]) for batch in batches] == [5, 5, 5, 5, 4]
    assert sorted(keys(batches)) == sorted(of(frames[0]) + of(frames[1]))
    mixed = dict(zip(keys(batches), np.concatenate([b["image"] for b in batches]), strict=True))
    for frame in frames:
        table = frame.compute()
        for key, pixels in zip(table["__key__"], table.images.arrays(), strict=True):
            np.testing.assert_array_equal(mixed[key], pixels)


def test_rows_of_a_frame_keep_the_order_that_they_have_alone(frames):
    mixed = keys(dii.mix_batches(frames, 3, longest=True))
    for frame in frames:
        alone = of(frame)
        assert [key for key in mixed if key in set(alone)] == alone


def test_the_stream_ends_with_the_first_frame_that_ends(frames):
    few = set(of(frames[1]))
    seen = keys(dii.mix_batches(frames, 4, weights=[1, 9]))
    assert few <= set(seen)
    assert len(seen) < 24
    assert all(
        len(b["cls"]) == 4 for b in dii.mix_batches(frames, 4, weights=[1, 9], drop_last=True)
    )


@pytest.mark.parametrize("weights", [[1e308, 1e308], [1e-320, 1e308], [5e-324, 5e-324]])
def test_all_rows_come_whatever_the_size_of_the_weights(frames, weights):
    seen = keys(dii.mix_batches(frames, 4, weights=weights, longest=True))
    assert sorted(seen) == sorted(keys(dii.mix_batches(frames, 4, longest=True)))


def test_shares_are_the_weights(frames):
    read = frames[0].repartition(npartitions=1).persist()
    many = [read.assign(number=number) for number in (0, 1)]
    first = [next(dii.mix_batches(many, 12, [3, 1], shuffle=seed)) for seed in range(24)]
    counts = [int(batch["number"].sum()) for batch in first]
    assert 0.18 < np.mean(counts) / 12 < 0.32
    assert len(set(counts)) > 3


@pytest.mark.parametrize(
    ("longest", "options"),
    [
        (False, {}),
        (True, {"shuffle": 3}),
        pytest.param(True, {}, marks=pytest.mark.nightly),
        pytest.param(False, {"shuffle": 3}, marks=pytest.mark.nightly),
    ],
)
def test_a_stream_goes_on_from_any_position(frames, longest, options):
    def make(start=0):
        return dii.mix_batches(frames, 3, weights=[1, 2], longest=longest, start=start, **options)

    whole = [keys([batch]) for batch in make()]
    stream = make()
    positions = [json.dumps(stream.position), *(json.dumps(stream.position) for _ in stream)]
    assert len(whole) >= 3
    for number, position in enumerate(positions[: len(whole) + 1]):
        assert [keys([batch]) for batch in make(json.loads(position))] == whole[number:]


@pytest.mark.parametrize("longest", [True, False])
def test_a_loop_over_a_stream_that_ended_begins_again(frames, longest):
    stream = dii.mix_batches(frames, 3, longest=longest, shuffle=2)
    assert [keys([batch]) for batch in stream] == [keys([batch]) for batch in stream] != []


def test_its_repr_tells_frames_and_place(frames):
    stream = dii.mix_batches(frames, 3, weights=[1, 3])
    assert "batches of 3 rows; epoch 0; " in repr(stream)
    next(stream)
    assert "; at row 3;" in repr(stream)


def test_a_stream_that_failed_goes_on_where_it_was(frames):
    calls = iter(range(100))

    def fail_once(images):
        if next(calls) == 1:
            raise OSError("once")
        return images

    made = frames[0].images.map_batches(fail_once, {"image": "image"})
    stream = dii.mix_batches([made, frames[1]], 3, longest=True)
    seen = []

    def read():
        for batch in stream:
            seen.extend(batch["__key__"])

    with pytest.raises(dii.FunctionError, match="once"):
        read()
    read()
    assert sorted(seen) == sorted(of(frames[0]) + of(frames[1]))


def test_frames_of_other_shapes_give_lists(shards):
    sizes = [dii.read_webdataset_images(shards, size=size)[["__key__", "image"]] for size in (8, 9)]
    shapes = {
        image.shape
        for batch in itertools.islice(dii.mix_batches(sizes, 8), 3)
        for image in batch["image"]
    }
    assert shapes == {(8, 8, 3), (9, 9, 3)}


def test_a_row_that_two_frames_have_gets_two_crops(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (8, 60, 60, 3), np.uint8)
    files = {}
    for number, pixels in enumerate(noise):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files[f"{number}.png"] = file.getvalue()
    (tmp_path / "0.tar").write_bytes(tar(files))
    ddf = dii.read_webdataset_images(tmp_path, size=16, augment="random_resized_crop")
    computed = ddf.map_partitions(lambda frame: frame)  # partitions are computed whole
    for frames in ([ddf, ddf], [ddf, ddf[ddf["__key__"] < "9"]], [computed, computed]):
        for seed in (None, 1):
            crops = collections.defaultdict(list)
            for batch in dii.mix_batches(
                frames, 4, columns=["__key__"], shuffle=seed, longest=True
            ):
                for key, image in zip(batch["__key__"], batch["image"], strict=True):
                    crops[key].append(image.tobytes())
            assert sorted(map(len, crops.values())) == [2] * 8
            assert sum(one == other for one, other in crops.values()) == 0


@pytest.mark.torch
def test_tensors_stay_tensors(frames):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
    batch = next(dii.mix_batches(frames, 6, format="torch", columns=["cls"], normalize=(0.5, 0.5)))
    assert batch["image"].shape == (6, 3, 16, 16)
    assert batch["image"].dtype == torch.float32
    assert batch["cls"].shape == (6,)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_take_its_steps_in_turn(frames):
    data = pytest.importorskip("torch.utils.data", reason="pip install torch==2.13.0")
    options = {"shuffle": 4, "longest": True, "columns": ["cls", "__key__"]}
    batches = dii.mix_batches(frames, 5, format="torch", **options)
    loader = data.DataLoader(batches, batch_size=None, num_workers=2)
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        want = dii.mix_batches(frames, 5, epoch=epoch, **options)
        assert len(loader) == len(want)
        assert [keys([batch]) for batch in loader] == [keys([batch]) for batch in want]


def test_wrong_arguments_are_refused(frames):
    for arguments, said in [
        ({"frames": []}, "pass at least one dataframe"),
        ({"weights": [1]}, "a number above 0 for each of 2 frames"),
        ({"weights": [1, 0]}, "a number above 0 for each of 2 frames"),
        ({"weights": "ab"}, "a number above 0 for each of 2 frames"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"shuffle": -1}, "shuffle=-1"),
        ({"start": [0]}, "the position of an earlier iterator"),
        ({"longest": 1}, "longest=1"),
        ({"columns": ["clss"]}, "columns= names 'clss'"),
    ]:
        with pytest.raises(dii.ArgumentError, match=said):
            dii.mix_batches(**{"frames": frames, "batch_size": 4} | arguments)


def test_frames_of_other_columns_are_refused(frames):
    others = [frames[0], frames[1].drop(columns="cls")]
    with pytest.raises(dii.ArgumentError, match="pass columns= that all have"):
        list(dii.mix_batches(others, 8))
    assert len(list(dii.mix_batches(others, 8, columns=[], longest=True))) == 3

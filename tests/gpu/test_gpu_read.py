"""The promises of a read on a GPU, through a cluster of one GPU."""

import functools
import importlib.util

import gpu_probes
import numpy as np
import pytest
from distributed import wait
from PIL import Image
from synthetic import bad_files, damaged_file, encode, photograph, write_shard, write_shards

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def client():
    with dii.start_cluster(1, gpu=True, rmm_pool_size=0.2, dashboard_address=None) as client:
        yield client


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """4 shards of 100 images in three formats."""
    folder = tmp_path_factory.mktemp("shards")
    return write_shards(folder, 4, 100, extensions=("jpg", "jpg", "png", "jpg", "webp"))


@pytest.fixture(scope="module")
def mixed_shard(tmp_path_factory):
    """A shard of good and bad images, of colour and grey, some turned by EXIF."""
    members = {}
    for number in range(40):
        image = photograph(100 + number, 90 + 2 * number, number)
        image = image.convert("L") if number % 7 == 3 else image
        members[f"{number:03d}.jpg"] = encode(image)
    for name, content in bad_files().items():
        members[f"bad-{name}.jpg"] = content
    for number in range(40, 80):
        members[f"{number:03d}.png"] = encode(photograph(50, 60, number), "png")
    members["no-image.txt"] = b"a caption alone"
    return write_shard(tmp_path_factory.mktemp("mixed") / "mixed.tar", members)


def on_worker(client, function, *args, **kwargs):
    return client.submit(function, *args, **kwargs, pure=False).result()


@pytest.mark.card
def test_a_worker_has_a_pipeline_before_its_first_task():
    with dii.start_cluster(1, gpu=True, rmm_pool_size=0.2, dashboard_address=None) as fresh:
        assert list(fresh.run(gpu_probes.pipelines).values()) == [1]


def test_images_are_cupy_views_inside_the_buffer_of_the_column(client, shards):
    found = on_worker(client, gpu_probes.where_the_pixels_are, shards[0])
    assert found["library"] == "cupy"
    start, size = found["buffer"]
    assert sum(nbytes for _, nbytes in found["views"]) == size
    for address, nbytes in found["views"]:
        assert start <= address
        assert address + nbytes <= start + size


@pytest.mark.card
def test_pixels_never_visit_the_host(client, shards):
    try:
        copied = on_worker(client, gpu_probes.copies_of_a_read, shards[0])
    except gpu_probes.NoCupti as error:
        pytest.skip(str(error))
    assert copied["control"] == {"device to host": 2**20}, "CUPTI does not count here"
    print(copied)
    assert copied["pixels"] > 10**7
    assert copied["read"]["device to host"] <= 1000 * copied["rows"]
    assert copied["read"]["device to host"] < copied["pixels"] / 100
    # Once, from DALI's memory to the column's. A kernel that copies is not counted as a copy.
    assert copied["read"]["device to device"] <= 1.01 * copied["pixels"]


def test_decoding_does_not_wait_for_what_is_queued_on_the_default_stream(client, shards):
    """As the kernels of a training step are, which torch queues there."""
    busy = on_worker(client, gpu_probes.copies_beside_a_backlog, shards[0])
    print(busy)
    assert busy[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "L"},
        {"size": 64},
        {"size": 64, "mode": "L"},
        {"size": (50, 70), "resize": "crop"},
        {"size": (70, 50), "resize": "pad"},
        {"size": 60, "resize": "shorter"},
        {"size": 500, "resize": "longer"},
        {"size": (50, 70), "augment": "random_resized_crop"},
        {"size": 64, "mode": "L", "augment": dii.RandomResizedCrop(scale=(0.1, 0.2), flip=1)},
        {
            "size": 64,
            "augment": ["random_horizontal_flip", dii.ColorJitter(0.4), dii.RandomErasing()],
        },
        {"augment": dii.ColorJitter(contrast=0.4)},
    ],
)
def test_gpu_equals_cpu(client, shards, options):
    compare_backends(client, shards[:2], options)


def test_most_images_of_automatic_augmentations_are_nearly_those_of_the_cpu(client, shards):
    """Equalizing, for one, makes more of what DALI's resize rounds otherwise."""
    options = {"size": 64, "augment": [dii.RandAugment(), "auto_augment"]}
    (_, gpu), (_, cpu) = (
        on_worker(client, gpu_probes.read, shards[:1], backend, **options)
        for backend in ("cudf", "pandas")
    )
    means = [np.abs(a.astype(int) - b).mean() for a, b in zip(gpu, cpu, strict=True)]
    assert np.median(means) < 1


@pytest.mark.parametrize("options", [{}, {"size": 20, "augment": "random_resized_crop"}])
def test_raw_values_of_every_type_are_those_of_the_cpu(client, tmp_path, options):
    random = np.random.default_rng(0)
    members = {}
    for number in range(30):
        shape = random.integers(1, 60, 2)
        deep = Image.fromarray(random.integers(0, 1 << 16, shape).astype(np.uint16))
        kinds = [(deep, "png"), (deep.convert("L"), "png")]
        if importlib.util.find_spec("tifffile") is not None:
            floats = random.standard_normal(shape).astype(np.float32)
            kinds.append((Image.fromarray(floats), "tiff"))
        members[f"{number:03d}.img"] = encode(*kinds[number % len(kinds)])
    path = write_shard(tmp_path / "raw.tar", members)
    read = functools.partial(dii.read_webdataset_images, path, image="img", mode="raw", **options)
    theirs = read(backend="pandas").compute().images.arrays()
    ours = read(backend="cudf").compute().images.arrays()
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.get(), other)


def test_labels_keep_their_values(client, tmp_path):
    random = np.random.default_rng(0)
    masks = {
        f"{number:03d}": random.choice(
            np.array([0, 1, 9, 200], np.uint8), random.integers(8, 60, 2)
        )
        for number in range(30)
    }
    members = {f"{key}.png": encode(Image.fromarray(mask), "png") for key, mask in masks.items()}
    path = write_shard(tmp_path / "masks.tar", members)
    read = functools.partial(on_worker, client, gpu_probes.read, path, "cudf", mode="labels")
    for mask, stored, flipped, small in zip(
        masks.values(),
        read()[1],
        read(transform=gpu_probes.flip)[1],
        read(size=(30, 20))[1],
        strict=True,
    ):
        np.testing.assert_array_equal(stored[..., 0], mask)
        np.testing.assert_array_equal(flipped[..., 0], mask[:, ::-1])
        assert small.shape == (30, 20, 1)
        assert {*np.unique(small)} <= {*np.unique(mask)}
    with pytest.raises(dii.FunctionError, match="INTERP_NN"):
        read(transform=gpu_probes.turn)


def test_bad_images_are_the_same_error_rows_as_on_the_cpu(client, mixed_shard):
    table = compare_backends(client, mixed_shard, {})
    errors = dict(zip(table["__key__"].to_pylist(), table["error"].to_pylist(), strict=True))
    bad = {key for key, error in errors.items() if error is not None}
    assert bad == {f"bad-{name}" for name in bad_files()} | {"no-image"}


@pytest.mark.parametrize(("load", "most"), [(None, 2), (0, 0), (1, 0)])
@pytest.mark.card
def test_a_photograph_is_the_same_picture_at_any_place_of_a_batch(client, tmp_path, load, most):
    photo = encode(photograph(375, 500))
    path = write_shard(tmp_path / "same.tar", {f"{n:03}.jpg": photo for n in range(600)})
    found = on_worker(client, gpu_probes.apart, path, load)
    print(f"hw-decoder-load {load}: {found} levels apart at most")
    assert found <= most


def test_a_damaged_image_does_no_harm_to_its_neighbours(client, tmp_path):
    members = {f"{number:02d}.jpg": encode(photograph(70, 90, number)) for number in range(20)}
    whole = write_shard(tmp_path / "whole.tar", members)
    members["10.jpg"] = damaged_file()
    damaged = write_shard(tmp_path / "damaged.tar", members)
    _, expected = on_worker(client, gpu_probes.read, whole, "cudf")
    table, arrays = on_worker(client, gpu_probes.read, damaged, "cudf")
    assert (arrays[10] is None) == (table["error"].to_pylist()[10] is not None)
    del arrays[10], expected[10]
    for array, want in zip(arrays, expected, strict=True):
        # A batch with a bad image may be decoded by Pillow.
        assert np.abs(array.astype(np.int16) - want).mean() <= 1.0


def compare_backends(client, paths, options):
    gpu, gpu_arrays = on_worker(client, gpu_probes.read, paths, "cudf", **options)
    cpu, cpu_arrays = on_worker(client, gpu_probes.read, paths, "pandas", **options)
    assert gpu.schema == cpu.schema
    assert gpu.to_pydict() == cpu.to_pydict()
    for key, one, other in zip(gpu["__key__"].to_pylist(), gpu_arrays, cpu_arrays, strict=True):
        assert (one is None) == (other is None), key
        if one is not None:
            assert one.shape == other.shape, key
            difference = np.abs(one.astype(np.int16) - other).mean()
            assert difference <= 1.0, f"{key}: {difference}"
    return gpu


def test_lazy_parts_of_a_query_make_the_same_rows(client, shards):
    ddf = dii.read_webdataset_images(shards, backend="cudf")
    assert len(ddf) == 400
    wide = ddf[ddf.width >= 312]
    sizes = wide.map_partitions(gpu_probes.count_pixels, meta=gpu_probes.COUNTED).compute()
    assert len(sizes) == 150  # 3 of each 8, as write_shards makes them: 320, 316, 312
    assert (sizes["size"] > 0).all()


@pytest.mark.card
def test_a_worker_survives_500_tasks_with_flat_memory(client, shards):
    ddf = dii.read_webdataset_images(shards, backend="cudf", partition_size="6 MB")
    tasks = ddf.map_partitions(gpu_probes.count_pixels, meta=gpu_probes.count_pixels(ddf._meta))[
        "size"
    ]
    (worker,) = client.nthreads()
    total = tasks.sum().compute()

    # The pools of DALI, CuPy and the allocator of the host find their size in the first tasks.
    done, after_a_while = 0, None
    while done < 500:
        assert tasks.sum().compute() == total
        done += tasks.npartitions
        if done >= 150 and after_a_while is None:
            after_a_while = client.run(gpu_probes.memory)[worker]
    at_the_end = client.run(gpu_probes.memory)[worker]
    grown = {kind: at_the_end[kind] - after_a_while[kind] for kind in at_the_end}
    print(f"{done} tasks; bytes grown since the first 150: {grown}")
    assert grown["device"] <= 64 * 2**20
    assert grown["host"] <= 256 * 2**20


def test_a_transform_of_dali_operators_runs_on_the_gpu(client, shards):
    read = functools.partial(on_worker, client, gpu_probes.read, shards[0], "cudf", size=32)
    _, straight = read()
    _, flipped = read(transform=gpu_probes.flip)
    np.testing.assert_array_equal(np.stack(flipped), np.stack(straight)[:, :, ::-1])


@pytest.mark.card
def test_more_than_the_device_limit_is_spilled_and_comes_back(tmp_path, shards):
    large = write_shards(tmp_path, 8, 64, size=(1000, 1000), distinct=2)
    with dii.start_cluster(
        1,
        gpu=True,
        rmm_pool_size="300 MB",
        device_memory_limit="500 MB",
        memory_limit="16 GiB",
        dashboard_address=None,
    ) as client:
        ddf = dii.read_webdataset_images(large, backend="cudf", partition_size=None).persist()
        sizes = ddf.map_partitions(gpu_probes.count_pixels, meta=gpu_probes.COUNTED)["size"]
        wait(ddf)
        (state,) = client.run(gpu_probes.spilled_bytes).values()
        assert sizes.sum().compute() > 1.4e9
        assert (sizes.compute() > 0).all()
        (after,) = client.run(gpu_probes.spilled_bytes).values()
        print(state, after)
        assert after["spilled"] > 5e8


def test_a_checkpoint_gives_the_same_frame_back_and_opens_without_a_gpu(client, shards, tmp_path):
    def made(backend):
        ddf = dii.read_webdataset_images(shards, backend=backend, size=16)
        return ddf.images.map_batches(
            lambda images: images.mean((1, 2)), {"mean": "list<float32>"}, keep_image=True
        )

    want = made("cudf").compute()
    got = dii.checkpoint(made("cudf"), tmp_path / "out", version="1").compute()
    on_host = dii.checkpoint(made("pandas"), tmp_path / "out", version="1").compute()
    assert type(got) is type(want)
    assert list(got.columns) == list(want.columns) == list(on_host.columns)
    for name in ("__key__", "width", "mean"):
        assert got[name].to_arrow().to_pylist() == want[name].to_arrow().to_pylist()
    assert on_host["__key__"].tolist() == want["__key__"].to_arrow().to_pylist()
    for one, other, host in zip(
        *(frame["image"].images.arrays() for frame in (got, want, on_host)), strict=True
    ):
        np.testing.assert_array_equal(one.get(), other.get())
        np.testing.assert_array_equal(host, other.get())


def test_partitions_of_a_checkpoint_without_a_value_have_the_types_of_the_others(
    client, shards, tmp_path
):
    """A shard of which no image is decoded gives a column of lists that are all null."""
    bad = write_shard(tmp_path / "bad.tar", {"0.jpg": b"no picture", "1.jpg": b"nor this"})

    def made(backend):
        ddf = dii.read_webdataset_images([bad, shards[0]], backend=backend, size=16)
        return ddf.images.map_batches(
            lambda images: images.mean((1, 2)), {"mean": "list<float32>"}, keep_image=True
        )

    dii.checkpoint(made("cudf"), tmp_path / "out", version="1").compute()
    on_host = dii.checkpoint(made("pandas"), tmp_path / "out", version="1").compute()
    without = on_host["__key__"].isin(["0", "1"])
    assert without.sum() == 2
    assert on_host["mean"].isna().tolist() == without.tolist()
    alone = dii.checkpoint(made("cudf")[["image"]], tmp_path / "alone", version="1")
    assert len(alone.compute()) == 102

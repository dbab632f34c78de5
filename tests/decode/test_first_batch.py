"""A GPU's hardware decoder gets its share of every batch, whatever batch comes first."""

import io
import json
import pickle

import dask
import numpy as np
import played_dali
import pytest
from PIL import Image
from synthetic import encode, photograph
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest import cli
from dask_image_ingest.decode import planner
from dask_image_ingest.decode.dali import BATCH_SIZE, Decoder, tiny_jpeg
from dask_image_ingest.decode.formats.header import Header
from dask_image_ingest.decode.options import Decoding, make_decoding


@pytest.mark.parametrize("source", ["encoded", "suspect"])
def test_the_first_batch_that_a_pipeline_sees_is_a_full_one(monkeypatch, source):
    made = played_dali.play(monkeypatch)
    photo = np.frombuffer(b"photo", np.uint8)
    (images,) = Decoder(Decoding(device="gpu"), source).run([[photo]])
    assert images == [b"photo"], "what came out is what was asked for"
    ((first, second),) = (pipeline.fed for pipeline in made)
    assert len(first) == BATCH_SIZE
    assert second == [b"photo"]


def test_arrays_and_cpus_need_none(monkeypatch):
    made = played_dali.play(monkeypatch)
    for decoding, source in ((Decoding(device="gpu"), "pixels"), (Decoding(), "encoded")):
        list(Decoder(decoding, source).run([[np.zeros((2, 2, 3), np.uint8)]]))
    assert [len(pipeline.fed) for pipeline in made] == [1, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 256),
        ({"size": (224, 224)}, 256),
        ({"size": (4096, 4096)}, 21),
        ({"size": (4096,), "resize": "longer"}, 21),
        ({"size": (30_000, 30_000)}, 1),
    ],
)
def test_it_is_no_larger_than_batches_of_images_resized_like_these_can_be(
    monkeypatch, options, expected
):
    made = played_dali.play(monkeypatch, room=2**30)
    list(Decoder(Decoding(device="gpu", **options), "encoded").run([[tiny_jpeg()]]))
    assert len(made[0].fed[0]) == expected


def test_its_image_is_one_that_a_hardware_decoder_takes(tmp_path, capsys):
    path = tmp_path / "tiny.tar"
    path.write_bytes(tar({"0.jpg": tiny_jpeg().tobytes()}))
    cli.main(["describe", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["hardware"] == {"taken": 1, "of": 1, "others": {}}
    (array,) = dii.read_webdataset_images(path, backend="pandas").compute().images.arrays()
    assert array.shape == np.asarray(Image.open(io.BytesIO(tiny_jpeg()))).shape == (64, 64, 3)


@pytest.mark.parametrize(("device", "first"), [("gpu", 256), ("cpu", 64)])
def test_a_gpu_has_no_small_first_batch(monkeypatch, device, first):
    monkeypatch.setattr(planner, "current_device", lambda: 0)
    monkeypatch.setattr(planner, "batch_bytes", lambda device: 2**30)
    content = encode(photograph(40, 50))
    headers = [Header("jpeg", 40, 50, 3, None, False)] * 600
    batches = planner.Schedule(headers, lambda row: content, Decoding(device=device))
    assert len(next(iter(batches)).rows) == first


@pytest.mark.parametrize("load", [None, 0, 0.5, 1])
def test_the_share_of_the_jpeg_engines_is_that_of_the_configuration_where_it_is_read(
    monkeypatch, load
):
    made = played_dali.play(monkeypatch)
    with dask.config.set({"image-ingest.hw-decoder-load": load}):
        decoding = decoding_of(device="gpu")
        assert decoding_of(device="cpu") == Decoding()
    # As a worker has it, where nothing is configured.
    decoder = Decoder(pickle.loads(pickle.dumps(decoding)), "encoded")
    list(decoder.run([[tiny_jpeg()]]))
    (pipeline,) = made
    _, options = pipeline.graph
    assert options.get("hw_decoder_load") == load
    assert (decoding == decoding_of(device="gpu")) == (load is None), "other pixels, other tasks"


@pytest.mark.parametrize("load", [-0.1, 1.5, "half", True])
def test_a_share_that_is_none_is_refused(load):
    with (
        dask.config.set({"image-ingest.hw-decoder-load": load}),
        pytest.raises(dii.ArgumentError, match="hw-decoder-load"),
    ):
        decoding_of(device="gpu")


def decoding_of(device):
    return make_decoding(
        device=device, size=None, resize="stretch", mode="RGB", transform=None, max_pixels=None
    )

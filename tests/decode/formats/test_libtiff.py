"""What libtiff says of a bad image is its error, and not written to standard error."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
from corpus import save
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def broken():
    """A TIFF whose compressed lines are overwritten, so that libtiff complains."""
    noise = np.random.default_rng(1).integers(0, 2, (64, 64), np.uint8) * 255
    encoded = bytearray(save(Image.fromarray(noise).convert("1"), "TIFF", compression="group4"))
    encoded[100:300] = bytes(range(200))
    return bytes(encoded)


def pillow_alone(encoded):
    with contextlib.suppress(OSError):
        Image.open(io.BytesIO(encoded)).load()


def test_libtiff_does_complain_of_it(broken, capfd):
    # What the next test is about: without it, nothing would be seen there.
    pillow_alone(broken)
    assert "Fax4Decode" in capfd.readouterr().err


def test_its_messages_are_errors_of_the_row_and_not_written(broken, tmp_path, capfd):
    path = write_tar(tmp_path / "a.tar", {f"{n}.tif": broken for n in range(5)})
    frame = dii.read_webdataset_images(path, image="tif", backend="pandas").compute()
    assert "Fax4Decode" not in capfd.readouterr().err
    assert frame.error.str.startswith("corrupt: ").all()
    assert frame.error.str.contains("Fax4Decode: ").all()


def test_others_in_the_same_process_hear_it_as_ever(broken, tmp_path, capfd):
    path = write_tar(tmp_path / "a.tar", {"0.tif": broken})
    dii.read_webdataset_images(path, image="tif", backend="pandas").compute()
    capfd.readouterr()
    pillow_alone(broken)
    assert "Fax4Decode" in capfd.readouterr().err

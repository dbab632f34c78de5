"""A bad image costs its batch, and not the pipeline that decodes the others."""

from typing import get_args

import numpy as np
import pytest
from PIL import Image
from synthetic import encode, photograph

from dask_image_ingest.decode.dali import DaliDecoder, Refused
from dask_image_ingest.decode.decode_spec import DecodeSpec, Mode


def flat(image):
    return np.frombuffer(encode(image), np.uint8)


def undecodable():
    good = encode(photograph(60, 80))
    table = good.index(b"\xff\xc4") + 5
    return np.frombuffer(good[:table] + b"\xff" * 16 + good[table + 16 :], np.uint8)


def test_the_pipeline_goes_on_with_the_right_pictures_behind_a_bad_image():
    pytest.importorskip("nvidia.dali")
    colours = [(40 * n, 10, 250 - 40 * n) for n in range(6)]
    files = [flat(Image.new("RGB", (16 + n, 24), colour)) for n, colour in enumerate(colours)]
    decoder = DaliDecoder(DecodeSpec(), "encoded")
    list(decoder.run([files]))
    pipeline = decoder._batch_pipeline._pipeline
    random = np.random.default_rng(0)
    for _ in range(100):
        # Two batches after each refused one: one underway when it fails is not lost or mixed up.
        orders = [random.permutation(6) for _ in range(2)]
        bad = [files[0], undecodable(), files[1]]
        refused, *decoded = decoder.run([bad, *([files[n] for n in order] for order in orders)])
        assert refused == Refused(1)
        for images, order in zip(decoded, orders, strict=True):
            for image, n in zip(images, order, strict=True):
                array = np.asarray(image)
                assert array.shape == (24, 16 + n, 3)
                assert np.abs(array.astype(int) - colours[n]).max() <= 3
    assert decoder._batch_pipeline._pipeline is pipeline


def test_a_file_that_cannot_be_parsed_ends_it():
    """DALI's threads go on with the others of the batch then, in memory that is gone."""
    pytest.importorskip("nvidia.dali")
    good = flat(photograph(20, 30))
    decoder = DaliDecoder(DecodeSpec(), "encoded")
    first, refused, last = decoder.run([[good], [good, np.frombuffer(b"no image", np.uint8)], []])
    assert len(first) == 1
    assert refused == Refused(None)
    assert last == []
    assert decoder._batch_pipeline._pipeline is None


@pytest.mark.parametrize("mode", get_args(Mode))
def test_dali_refuses_a_mode_that_it_does_not_decode(mode):
    pytest.importorskip("nvidia.dali")
    options = DecodeSpec(mode=mode)
    decoder = DaliDecoder(options, "encoded")
    file = flat(Image.new("RGB", (24, 16), "red"))
    if options.by_pillow:
        with pytest.raises(KeyError, match=mode):
            list(decoder.run([[file]]))
    else:
        ((image,),) = decoder.run([[file]])
        assert np.asarray(image).shape == (16, 24, len(mode))

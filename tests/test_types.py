"""What mypy knows of a user's script: the types of frames, of ``.images``, and of what it gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]

# Each line of the first kind ends in the type that mypy has to reveal of what it begins with; each
# of the second in the code of an error that it has to find.
SCRIPT = """
import dask.dataframe as dd
import dask_image_ingest as dii

ddf = dii.read_webdataset_images("train-{000..099}.tar", size=224)

ddf  # -> dask_image_ingest.image_frame.ImageDataFrame
ddf.images  # -> dask_image_ingest.accessor.lazy.LazyImages
ddf.images.column  # -> str
ddf.images.stack()  # -> dask.array.core.Array
ddf.images.vectors("embedding")  # -> dask.array.core.Array
ddf.images.encode("png")  # -> dask.dataframe.dask_expr._collection.Series
ddf.images.thumbnails(64)  # -> dask_image_ingest.image_frame.ImageDataFrame
ddf.images.map_batches(len, {"n": "int8"})  # -> dask_image_ingest.image_frame.ImageDataFrame
ddf.images.map_batches(len, {"n": "int8"}).images  # -> dask_image_ingest.accessor.lazy.LazyImages
ddf.images.channel_stats()  # -> dask.dataframe.dask_expr._collection.DataFrame
ddf.images.show()  # -> dask_image_ingest.view.cards.Thumbnails
ddf.images.iter_batches(64)  # -> dask_image_ingest.loader.iter_batches.Batches
next(ddf.images.iter_batches(64))  # -> dict[str, Any]
ddf.images.iter_batches(64).position.row  # -> int
dii.decode_images(ddf)  # -> dask_image_ingest.image_frame.ImageDataFrame
dii.checkpoint(ddf, "out")  # -> dask_image_ingest.image_frame.ImageDataFrame

# Of what Dask's own operations give it publishes no types: an annotation says what it is.
large: dii.ImageDataFrame = ddf[ddf.width > 512]
large.images  # -> dask_image_ingest.accessor.lazy.LazyImages


def count(frame: dd.DataFrame) -> int:
    return len(frame)


count(ddf)  # -> int
ddf.images.iter_batches("64")  # ! arg-type
ddf.images.stak()  # ! attr-defined
dii.read_webdataset_images("a.tar", resize="bigger")  # ! arg-type
ddf.images.iter_batches(64, format="jax")  # ! arg-type
"""


def test_mypy_knows_the_types_of_a_users_script(tmp_path):
    lines, expected = [], {}
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        code, arrow, told = line.partition("  # -> ")
        lines.append(f"reveal_type({code})" if arrow else line)
        if arrow:
            expected[number] = f'Revealed type is "{told}"'
        elif "  # ! " in line:
            expected[number] = f"[{line.partition('  # ! ')[2]}]"
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    # As a user has it: strict, and nothing of this project's own settings.
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
    ]
    output = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), str(script)],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    ).stdout
    found = {
        int(number): text
        for number, text in re.findall(
            r"^\S*script\.py:(\d+): (?:note|error): (.*)$", output, re.MULTILINE
        )
    }
    assert found.keys() == expected.keys(), output
    for number, told in expected.items():
        assert told in found[number], output

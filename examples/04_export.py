"""Curate a collection and write it back: read → filter → export → read with webdataset.

Packs photographs into shards, keeps the wide ones whose brightness is not extreme, adds that
brightness to what is stored, and writes new shards with the original bytes. Then webdataset reads
them, through its DataLoader where torch is installed, and Dask the columns that lie beside them.

    python examples/04_export.py [FOLDER]
"""

import importlib.util
import sys
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import webdataset
from photos import write_shards

import dask_image_ingest as dii


def brightness(images: list[np.ndarray]) -> dict[str, list[float]]:
    return {"brightness": [image.mean() for image in images]}


def main(folder: Path) -> None:
    shards = write_shards(folder / "in")

    ddf = dii.read_webdataset_images(shards, json_fields={"part": "float32"})
    wide = ddf[(ddf.width >= 400) & ddf.error.isna()]
    scored = wide.images.map_batches(brightness, {"brightness": "float32"})
    chosen = scored[(scored.brightness > 40) & (scored.brightness < 200)]

    # Pixels were decoded for the scores; what is written are the bytes that were there before.
    written = dii.to_webdataset(
        chosen,
        folder / "out" / "{shard:06d}.tar",
        samples_per_shard=8,
        shuffle=1,
        members={"json": ["txt", "json.part", "brightness"]},
        index=True,
    )
    print(written[["shard", "samples", "members", "bytes"]])
    print(f"{written['samples'].sum()} of {len(ddf)} samples")

    dataset = webdataset.WebDataset(list(written["url"]), shardshuffle=False).decode("rgb8")
    if importlib.util.find_spec("torch"):
        dataset = webdataset.WebLoader(dataset, batch_size=None, num_workers=2)
    for sample in dataset:
        image = next(sample[e] for e in ("jpg", "png", "webp") if e in sample)
        print(sample["__key__"], image.shape, sample["json"])

    # The table beside each shard has all columns, and points into the new shards.
    table = dd.read_parquet(str(folder / "out" / "*.parquet"))
    print("mean brightness:", round(float(table.brightness.mean().compute()), 1))
    dark = dii.decode_images(table[table.brightness < 80], size=64)
    print("dark ones, decoded again:", dark.images.stack().compute().shape)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "export-data"))

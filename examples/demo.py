"""What you get, in one minute: `make demo`.

Packs photographs into WebDataset shards, reads them as a Dask dataframe with pixels, and shows what
came back. Writes demo-data/ in the current folder, with the picture demo-data/demo.png.
"""

import sys
from pathlib import Path
from time import perf_counter

import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.utils import format_bytes
from distributed import wait
from photos import write_shards
from PIL import Image

import dask_image_ingest as dii


def main() -> None:
    title("Packing photographs into WebDataset shards")
    shards = write_shards(Path("demo-data"))
    print(*shards, sep="\n")

    title("Starting a cluster on this machine")
    with dii.start_cluster() as client:
        workers = client.nthreads()
        print(f"{len(workers)} workers; dashboard: {client.dashboard_link}")

        ddf = dii.read_webdataset_images(
            "demo-data/photos-{000000..000003}.tar",
            json_fields={"source": "string", "part": "float32"},
        )
        title("A lazy dataframe: nothing is decoded yet")
        print(ddf.dtypes.to_string())

        title("The first rows, from headers: no pixel is decoded for these")
        print(
            ddf[["__key__", "format", "height", "width", "nbytes", "cls", "txt"]]
            .head(6)
            .to_string(index=False)
        )

        title("Per shard, from headers too")
        print(per_shard(ddf))

        title("Filters run before the decoder: only what the query keeps is decoded")
        _, large = decode(ddf[ddf.width >= 640])
        print(large[["__key__", "format", "height", "width", "txt"]].to_string(index=False))

        title("All the pixels")
        seconds, frame = decode(ddf)
        images = frame.images.arrays()
        pixels = [image for image in images if image is not None]
        print(
            f"{len(pixels)} images of {len({image.shape for image in pixels})} sizes, "
            f"{format_bytes(sum(image.nbytes for image in pixels))}, decoded in {seconds:.2f} s: "
            f"{len(pixels) / seconds:,.0f} images per second"
        )
        print(f"the first: {images[0].shape} {images[0].dtype}, mean {images[0].mean():.1f}")
        print("formats:", frame["format"].value_counts().to_dict())

        title("A damaged image costs one row, and says why")
        print(frame.loc[frame["error"].notna(), ["__key__", "txt", "error"]].to_string(index=False))

        title("Every image, resized and cropped to 128 × 128")
        contact_sheet(dii.read_webdataset_images(shards, size=128, resize="crop"))


def per_shard(ddf: dd.DataFrame) -> pd.DataFrame:
    headers = ddf[["__url__", "nbytes", "width", "height"]].compute()
    summary = headers.groupby("__url__").agg(
        images=("nbytes", "size"),
        encoded=("nbytes", "sum"),
        narrowest=("width", "min"),
        widest=("width", "max"),
    )
    summary["encoded"] = summary["encoded"].map(format_bytes)
    return summary.rename(lambda url: Path(url).name).rename_axis("shard")


def decode(ddf: dd.DataFrame) -> tuple[float, pd.DataFrame]:
    """Decode on the workers, then fetch: the seconds are the decoding's alone."""
    start = perf_counter()
    decoded = ddf.persist()
    wait(decoded)
    return perf_counter() - start, decoded.compute()


def contact_sheet(ddf: dd.DataFrame, columns: int = 13) -> None:
    """Write the images side by side; grey where there is none."""
    grey = np.full((128, 128, 3), 128, np.uint8)
    tiles = [grey if image is None else image for image in ddf.compute().images.arrays()]
    rows = [np.hstack(tiles[start : start + columns]) for start in range(0, len(tiles), columns)]
    Image.fromarray(np.vstack(rows)).save("demo-data/demo.png")
    print("demo-data/demo.png")


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


if __name__ == "__main__":
    pd.set_option("display.width", 120, "display.max_columns", None, "display.max_colwidth", 50)
    main()

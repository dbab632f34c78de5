"""A checkpoint of captions from a server, to be killed: URL FOLDER OUT CONCURRENCY."""

from __future__ import annotations

import sys

import aiohttp

import dask_image_ingest as dii


class Caption:
    """Asks a server about the key of a sample."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), raise_for_status=True
        )

    def __dask_tokenize__(self) -> str:
        return "caption"

    async def __call__(self, key: str) -> str:
        body = {"model": "mock", "messages": [{"role": "user", "content": key}]}
        async with self.session.post(f"{self.url}/chat/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]


class Captions:
    """Makes the one above where it is called: the URL of the server is no part of the query."""

    def __init__(self) -> None:
        self.caption = Caption(sys.argv[1])

    async def __call__(self, key: str) -> str:
        return await self.caption(key)


def checkpoint(folder: str, out: str, concurrency: int):
    ddf = dii.read_webdataset_images(folder, backend="pandas")
    captions = ddf[["__key__"]].images.map_rows(
        Captions, {"caption": "string"}, inputs=["__key__"], concurrency=concurrency, retries=8
    )
    return dii.checkpoint(captions, out)


if __name__ == "__main__":
    checkpoint(sys.argv[2], sys.argv[3], int(sys.argv[4]))

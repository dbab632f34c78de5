"""Cost of remote shards beside local ones: seconds, bytes fetched, requests.

    python benchmarks/remote.py [--images 4000] [--photos SHARD ...] [--checkout FOLDER ...]
                                [--peers NAME ...] [--peer-python PYTHON]

Makes four shards, unless they are there, and asks the same questions of the files and of a web
server on this machine with 30 ms latency and 20 MB/s per connection, each in a process of its own
with a cluster. The last question, ``faults``, is ``pixels`` of a server that injects six kinds of
faults, each into 5 % of its answers. ``--checkout`` names checkouts to compare, each question asked
of all in turn; ``--peers`` what else reads and decodes all of it. One line of JSON for each answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
from _remote_peers import PEERS
from _shards import make_shards

HERE = Path(__file__).resolve().parent
QUESTIONS = ("open", "len", "pointers", "late", "pixels", "faults")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--photos", nargs="*", default=[], help="shards to take pictures from")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/remote"))
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--bandwidth", type=float, default=20e6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--checkout", nargs="*", default=[str(HERE.parent)])
    parser.add_argument("--peers", nargs="*", default=[], choices=PEERS)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--faults", type=float, default=0.05)
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        return ask(*args.ask)
    shards = sorted(args.folder.glob("*.tar"))
    shards = shards or make_shards(args.folder, args.images, args.images // 4, args.photos)
    if not (args.folder / "warm").exists():
        make_shards(args.folder / "warm", 40, 20, args.photos)
    command = [sys.executable, str(HERE / "_slow_server.py"), str(args.folder)]
    command += ["--latency", str(args.latency), "--bandwidth", str(args.bandwidth)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            root = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            for _ in range(args.rounds):
                download(root, shards)
                for question in args.questions:
                    places = [root] if question == "faults" else [str(args.folder), root]
                    inject(root, args.faults if question == "faults" else 0.0)
                    for checkout in args.checkout:
                        for place in places:
                            run(question, place, checkout, shards)
                inject(root, 0.0)
                for peer in args.peers:
                    for place in (str(args.folder), root):
                        run_peer(peer, place, args.peer_python, shards)
        finally:
            server.terminate()
    return None


def download(root: str, shards: list[Path]) -> None:
    """The bytes alone, as many connections as two workers have."""
    tell(root)

    def fetch(part: tuple[str, int]) -> int:
        name, start = part
        headers = {"Range": f"bytes={start}-{start + (4 << 20) - 1}"}
        with urllib.request.urlopen(urllib.request.Request(name, headers=headers)) as answer:
            return len(answer.read())

    parts = [(f"{root}/{p.name}", a) for p in shards for a in range(0, p.stat().st_size, 4 << 20)]
    began = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        fetched = sum(pool.map(fetch, parts))
    seconds = round(time.perf_counter() - began, 2)
    print(json.dumps({"question": "download", "seconds": seconds, "MB": fetched / 1e6}), flush=True)


def run(question: str, place: str, checkout: str, shards: list[Path]) -> None:
    """One question of one checkout, in a process of its own."""
    places = [checkout, str(HERE), os.environ.get("PYTHONPATH", "")]
    names = [f"{place}/{path.name}" for path in shards]
    command = [sys.executable, str(HERE / "remote.py"), "--ask", question, json.dumps(names)]
    path = os.pathsep.join(filter(None, places))
    env = os.environ | {"PYTHONPATH": path, "REMOTE_WARM": f"{shards[0].parent}/warm"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    told = {"question": question, "from": place.partition(":")[0], "checkout": checkout}
    print(json.dumps(told | json.loads(done.stdout.splitlines()[-1])), flush=True)


def run_peer(peer: str, place: str, python: str, shards: list[Path]) -> None:
    """All pixels, by another library."""
    tell(place)
    names = json.dumps([f"{place}/{path.name}" for path in shards])
    command = [python, str(HERE / "_remote_peers.py"), peer, names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        failed = done.returncode and done.stderr.splitlines()[-1:]
        answer = {"failed": failed} if failed else json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        answer = {"failed": "not done in 300 s"}
    told = {"question": "pixels", "from": place.partition(":")[0], "peer": peer}
    print(json.dumps(told | answer | tell(place)), flush=True)


def inject(root: str, rate: float) -> None:
    """Have the server misbehave from now on."""
    urllib.request.urlopen(f"{root}/-/faults/{rate}").close()


def ask(question: str, names: str) -> None:
    """Answer a question about some shards."""
    import dask_image_ingest as dii

    paths = json.loads(names)
    root = paths[0].rpartition("/")[0]
    with dii.start_cluster() as client:
        # Whatever is imported and built once is there, here and in the workers.
        warm = dii.read_webdataset_images(os.environ["REMOTE_WARM"], size=224)
        client.run(warm.compute, scheduler="synchronous")
        warm.compute(scheduler="synchronous")
        tell(root)
        began = time.perf_counter()
        if question == "open":
            read = lambda: dii.read_webdataset_images(paths)  # noqa: E731
        else:
            read = prepared(question, dii.read_webdataset_images(paths))
            tell(root)
            began = time.perf_counter()
        read()
        seconds = round(time.perf_counter() - began, 2)
    print(json.dumps({"seconds": seconds} | tell(root)))


def prepared(question: str, ddf: Any) -> Callable[[], Any]:
    import dask_image_ingest as dii

    if question == "len":
        return lambda: len(ddf)
    if question == "pointers":
        return lambda: ddf[["__key__", "__url__", "offset", "nbytes"]].compute()
    if question == "late":
        some = ddf[["__key__", "__url__", "offset", "nbytes"]].compute()
        few = some.sample(40, random_state=1).sort_values(["__url__", "offset"])
        print("MB asked for", few["nbytes"].sum() / 1e6)
        return lambda: dii.decode_images(few, size=224)
    # "pixels" and "faults"
    return lambda: ddf.map_partitions(len, meta=("rows", int)).compute()


def tell(root: str) -> dict[str, float]:
    """Counts of the server since it was last asked."""
    if not root.startswith("http"):
        return {}
    with urllib.request.urlopen(f"{root}/-/counts") as answer:
        counts: dict[str, float] = json.load(answer)
    return counts


if __name__ == "__main__":
    main()

"""Signed URLs: sent as they were given, the same file whatever the signature, with files beside."""

from __future__ import annotations

import http.server
import io
import json
import os
import urllib.request
import warnings
from base64 import b64encode
from urllib.parse import quote, unquote

import dask
import pyarrow as pa
import pytest
from faulty_server import faulty_server, serving
from few_images import encoded
from pyarrow import parquet
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.storage import find_shards, open_shard
from dask_image_ingest.storage.shard import as_sent

SHARD = tar({"a.png": encoded((8, 8), "PNG"), "b.png": encoded((9, 8), "PNG")})
# As no library writes it: lower-case codes, characters that need none, and others without.
SIGNED = "x=1&sig=ab%2bc%2Fd/e%3a+~'(*)!%7E|{}&b&b=&=c&sv=%20"


def sidecar(*keys):
    file = io.BytesIO()
    parquet.write_table(pa.table({"key": list(keys), "score": [0.5] * len(keys)}), file)
    return file.getvalue()


def read(urls, **options):
    return dii.read_webdataset_images(urls, backend="pandas", **options)


@pytest.fixture
def server():
    with faulty_server(files={"/d/0.tar": SHARD}) as server:
        yield server


@pytest.mark.parametrize("options", [{}, {"storage_options": {"raise_for_status": False}}])
def test_a_server_that_compares_the_query_byte_for_byte_is_read(server, options):
    server.queries["*"] = SIGNED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = read(f"{server.url}/d/0.tar?{SIGNED}", **options).compute()
    assert rows["__key__"].tolist() == ["a", "b"]
    assert {path.partition("?")[2] for _, path, _ in server.seen} == {SIGNED}


def test_files_beside_a_shard_are_found_by_its_query_if_that_signs_them(server, tmp_path):
    server.files |= {f"/d/{n}.tar": SHARD for n in range(10)}
    server.files |= {f"/d/{n}.parquet": sidecar("a", "b") for n in range(10)}
    server.queries["*"] = "sig=of-all"
    urls = f"{server.url}/d/{{0..9}}.tar?sig=of-all"
    dii.write_index(urls, folder=tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(f"{n}.tar.index.parquet" for n in range(10))
    for name in os.listdir(tmp_path):
        server.files[f"/d/{name}"] = (tmp_path / name).read_bytes()
    for index in (True, "auto", f"{server.url}/d/?sig=of-all"):
        server.pages = index != True  # noqa: E712
        ddf = read(urls, sidecar="parquet", index=index)
        server.reset()
        assert len(ddf) == 20
        assert not [path for _, path, _ in server.seen if ".tar?" in path]
        assert ddf["score"].compute().tolist() == [0.5] * 20


@pytest.mark.parametrize("count", [1, 10])
def test_files_beside_shards_that_are_signed_one_by_one_are_absent(server, count):
    names = [f"/d/{n}.tar" for n in range(count)]
    server.files |= dict.fromkeys(names, SHARD)
    server.queries = {"*": "none"} | {name: f"sig={name[3]}&e=1" for name in names}
    urls = [f"{server.url}{name}?{server.queries[name]}" for name in names]
    ddf = read(urls, sidecar="auto")  # a warning would be an error
    assert len(ddf.compute()) == 2 * count


def results_by(signature, server, folder):
    """What is made of a shard by its URL with this signature: text that must not change."""
    server.queries["*"] = signature
    refs = read(f"{server.url}/d/0.tar?{signature}", decode=False)
    stored = dii.checkpoint(refs, folder / "checkpoint")
    decoded = dii.decode_images(stored, size=8)["image"].compute()
    made = dii.to_webdataset(
        refs, folder / "out" / "{shard:03d}.tar", resume=True, shuffle=3, sidecar="parquet"
    )
    again = dii.to_webdataset(refs.compute(), folder / "rows" / "{shard:03d}.tar", resume=True)
    located = stored["__url__"].compute().tolist() + [
        reference.url for reference in stored["image"].compute()
    ]
    assert located == [f"{server.url}/d/0.tar?{signature}"] * 4
    names = sorted(os.listdir(folder / "checkpoint"))
    return names, len(decoded), made.to_csv(), again.to_csv(), json.dumps(made.attrs)


def test_a_new_signature_continues_checkpoints_and_exports(server, tmp_path):
    first = results_by("sig=old&se=1", server, tmp_path)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.tar")}
    assert results_by("se=2&sig=new", server, tmp_path) == first
    assert times == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.tar")}


def test_random_transforms_are_the_same_under_a_new_signature(server):
    def crop(images):
        from nvidia.dali import fn

        return fn.crop(images, crop=(4, 4), crop_pos_x=fn.random.uniform(range=(0.0, 1.0)))

    server.files["/d/0.tar"] = tar({f"{n}.png": encoded((64, 64), "PNG") for n in range(4)})
    one, other = (
        read(f"{server.url}/d/0.tar?sig={n}", transform=crop).images.stack().compute()
        for n in (1, 2)
    )
    assert (one == other).all()


def test_a_shard_by_two_signatures_is_one_shard(server):
    assert len(find_shards([f"{server.url}/d/0.tar?sig={n}" for n in (1, 2)])) == 1


def test_files_that_a_parameter_names_are_not_taken_for_one(server):
    with faulty_server(files={"/0.tar": SHARD, "/1.tar": SHARD + bytes(512)}) as target:
        server.files.clear()
        urls = [f"{target.url}/{n}.tar?token={n}" for n in (0, 1)]
        assert len(find_shards(urls)) == 2
    get = [f"{server.url}/get?token={n}" for n in (0, 1)]
    server.files["/get"] = SHARD
    assert len(find_shards(get)) == 1
    with dask.config.set({"image-ingest.remote.signature": ["ticket"]}):
        assert len(find_shards(get)) == 2
        assert len(find_shards([f"{url[:-7]}id=1&ticket={n}" for n, url in enumerate(get)])) == 1


def test_a_glob_with_a_query_says_what_to_do(server):
    with pytest.raises(dii.ArgumentError, match="name the shards, for example with braces"):
        read(f"{server.url}/d/*.tar?sig=1")


def test_a_server_that_tells_no_size_is_named(server):
    server.sizes = False
    server.files["/d/0.tar"] = SHARD + bytes(1 << 20)
    with (
        pytest.raises(dii.ShardError, match="its server does not give its size"),
        open_shard(f"{server.url}/d/0.tar"),
    ):
        pass


def random_url(rng, host, secret):
    """A URL of parts that browsers and signers write; ``secret`` is in its signature."""
    pick = rng.choice
    texts = ("a", "%2f", "%2F", "+", "é", "{1}", "a b", "%25", "~", "'", "*", "", "x;y", "1,2", "=")
    user = pick(["", "", "u@", f"u:{secret}@", f"u:p%40{secret}@", f"u:p@{secret}@"])
    path = "/".join("".join(rng.choices(texts, k=2)) for _ in range(2)) + pick(["", ";v=1"])
    name = pick(["sig", "X-Amz-Signature", "token", "Signature", "hdnts", "x%2Dgoog-signature"])
    signed = name + "=" + pick(["", "%2b+/", "é", "{", "~hmac="]) + secret
    kept = [f"{pick(['a', 'b', 'id'])}={pick(texts)}" for _ in range(rng.randrange(3))]
    query = [*kept, pick([f"Expires={rng.randrange(9)}", "b"])]
    query.insert(rng.randrange(len(query) + 1), signed)
    return f"http://{user}{host}/{path}?{'&'.join(query)}" + pick(["", "", "#f"])


def encoded_as_browsers_do(target):
    path, mark, query = target.partition("?")
    path = path.replace("{", "%7B").replace("}", "%7D")
    return "".join(c if "!" <= c <= "~" else quote(c) for c in path + mark + query)


@pytest.mark.rounds(1, nightly=20)
def test_random_urls_are_sent_as_urllib_sends_them(rng, server):
    body = bytes(100)
    for _ in range(40):
        url = random_url(rng, server.url.removeprefix("http://"), "SECRET")
        target = "/" + as_sent(url).split("/", 3)[3]
        assert target == encoded_as_browsers_do(urllib.request.Request(url).selector)
        server.files = {unquote(target.partition("?")[0]): body}
        server.queries = {"*": target.partition("?")[2]}
        server.reset()
        shards = find_shards(url)
        with open_shard(shards[0].url) as content:
            assert content[:] == body
        assert {path for _, path, _ in server.seen} == {target}
        userinfo = url[7:].partition("/")[0].rpartition("@")[0]
        expected = {b64encode(unquote(userinfo + ":" * (":" not in userinfo)).encode()).decode()}
        given = {headers.get("Authorization") for _, _, headers in server.seen}
        assert given == ({f"Basic {each}" for each in expected} if userinfo else {None})


class RedirectingHandler(http.server.BaseHTTPRequestHandler):
    """Sends what begins with ``/moved`` elsewhere; notes each request target as it came."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.targets.append(self.path)
        moved = self.path.startswith("/moved")
        self.send_response(302 if moved else 206)
        if moved:
            host = self.headers["Host"]
            self.send_header("Location", f"http://{host}/there.tar?{SIGNED}")
        else:
            self.send_header("Content-Range", "bytes 0-9/10")
        body = b"" if moved else b"0123456789"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_redirects_and_proxies_get_urls_byte_for_byte(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RedirectingHandler)
    server.targets = []
    with serving(server) as root:
        with open_shard(f"{root}/moved.tar?{SIGNED}") as content:
            assert content[:] == b"0123456789"
        assert server.targets == [f"/moved.tar?{SIGNED}", f"/there.tar?{SIGNED}"]
        server.targets.clear()
        monkeypatch.setenv("http_proxy", root)
        monkeypatch.setenv("no_proxy", "")
        with open_shard(f"http://user:secret@far.invalid/x.tar?{SIGNED}") as content:
            assert content[:] == b"0123456789"
        assert server.targets == [f"http://far.invalid/x.tar?{SIGNED}"]

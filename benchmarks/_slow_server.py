"""A web server as far away as another region: latency, and a limit for each connection.

    python benchmarks/_slow_server.py FOLDER [--latency 0.03] [--bandwidth 20e6]

Serves the files of a folder on a free port of this machine, which it prints. ``/-/counts`` tells
what was sent since it was last asked for; ``/-/faults/0.05`` has each of six faults injected into
5 % of the answers from then on.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import time
from pathlib import Path

_PIECE = 128 << 10

# Seconds.
_DELAY, _STALL = 0.5, 60.0
_FAULTS = ("503", "429", "delay", "reset", "truncate", "stall")


class SlowServer:
    """Counts requests, bytes, and the most requests under way at once."""

    def __init__(self, folder: Path, latency: float, bandwidth: float) -> None:
        self.folder, self.latency, self.bandwidth = folder, latency, bandwidth
        self.now = self.peak = self.requests = self.bytes = self.injected = 0
        self.rate, self.random = 0.0, random.Random(1)
        self.spent = time.process_time()

    def fault(self) -> str | None:
        """The fault of an answer."""
        drawn = int(self.random.random() / self.rate) if self.rate else len(_FAULTS)
        if drawn >= len(_FAULTS):
            return None
        self.injected += 1
        return _FAULTS[drawn]

    async def serve(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        listening.setblocking(False)
        print(listening.getsockname()[1], flush=True)
        loop, tasks = asyncio.get_running_loop(), set()
        while True:
            connection, _ = await loop.sock_accept(listening)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.create_task(self.talk(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def talk(self, connection: socket.socket) -> None:
        loop, said = asyncio.get_running_loop(), b""
        with connection:
            connection.setblocking(False)
            try:
                while piece := await loop.sock_recv(connection, 1 << 16):
                    said += piece
                    while b"\r\n\r\n" in said:
                        request, _, said = said.partition(b"\r\n\r\n")
                        await self.answer(connection, request.decode("latin-1"))
            except ConnectionError:
                pass

    async def answer(self, connection: socket.socket, request: str) -> None:
        loop = asyncio.get_running_loop()
        method, path, _ = request.split(" ", 2)
        if path == "/-/counts":
            told = {"requests": self.requests, "MB": self.bytes / 1e6, "at once": self.peak}
            told |= {"faults": self.injected} if self.injected else {}
            # What it took from those who ask, on the same machine.
            told["server's processor s"] = round(time.process_time() - self.spent, 2)
            self.spent = time.process_time()
            self.peak = self.requests = self.bytes = self.injected = 0
            body = json.dumps(told).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
            return await loop.sock_sendall(connection, head.encode() + body)
        if path.startswith("/-/faults/"):
            self.rate = float(path.rpartition("/")[2])
            none = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
            return await loop.sock_sendall(connection, none)
        self.now += 1
        self.requests += 1
        self.peak = max(self.peak, self.now)
        try:
            await asyncio.sleep(self.latency)
            return await self.send(connection, method, path, request)
        finally:
            self.now -= 1

    async def send(self, connection: socket.socket, method: str, path: str, request: str) -> None:
        loop, file = asyncio.get_running_loop(), self.folder / path.lstrip("/")
        if not file.is_file():
            none = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
            return await loop.sock_sendall(connection, none)
        fault = self.fault()
        if fault in ("503", "429"):
            no = f"HTTP/1.1 {fault} No\r\nContent-Length: 0\r\n\r\n"
            return await loop.sock_sendall(connection, no.encode())
        if fault == "delay":
            await asyncio.sleep(_DELAY)
        if fault == "reset":
            raise ConnectionResetError
        size = file.stat().st_size
        start, stop, status, more = 0, size, "200 OK", ""
        if asked := re.search(r"(?i)\nrange: bytes=(\d+)-(\d*)", request):
            start, stop = int(asked[1]), min(int(asked[2] or size) + 1, size)
            status, more = (
                "206 Partial Content",
                f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n",
            )
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\nAccept-Ranges: bytes\r\n"
            f'ETag: "{size}"\r\n{more}\r\n'
        )
        await loop.sock_sendall(connection, head.encode())
        if method == "HEAD":
            return None
        began, sent, end = time.monotonic(), 0, stop
        if fault in ("truncate", "stall"):
            end = start + (stop - start) // 2
        with file.open("rb", buffering=0) as opened:
            while start + sent < end:
                piece = min(_PIECE, end - start - sent)
                await loop.sock_sendfile(connection, opened, start + sent, piece)
                sent += piece
                self.bytes += piece
                ahead = sent / self.bandwidth - (time.monotonic() - began)
                if ahead > 0.001:
                    await asyncio.sleep(ahead)
        if fault == "stall":
            # Until the client goes away.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(loop.sock_recv(connection, 1), _STALL)
        if end < stop:
            raise ConnectionAbortedError
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--bandwidth", type=float, default=20e6)
    args = parser.parse_args()
    asyncio.run(SlowServer(args.folder, args.latency, args.bandwidth).serve())

"""A model server as OpenAI's and vLLM's, that waits, fails now and then, and counts.

    python model_server.py LATENCY ERRORS LOG

serves in a process of its own: prints its URL, and appends the prompt of each request to a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ModelServer:
    """How it behaves, and what it has seen."""

    latency: float = 0.0
    #: Share of requests that fail: with a status, or without an answer.
    errors: float = 0.0
    retry_after: str = "0.01"
    log: str | None = None
    url: str = ""
    prompts: list[str] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    most_waiting: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion: the text of the prompt, and the size of its picture."""
        body = await request.json()
        parts = body["messages"][-1]["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        text = " ".join(part["text"] for part in parts if part["type"] == "text")
        pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        self.prompts.append(text)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{text}\n")
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await asyncio.sleep(self.latency)
        finally:
            self.waiting -= 1
        if self.random.random() < self.errors:
            kind = self.random.choice(["429", "500", "503", "gone"])
            if kind == "gone":
                assert request.transport is not None
                request.transport.abort()
            headers = {"Retry-After": self.retry_after} if kind == "429" else {}
            return web.Response(status=503 if kind == "gone" else int(kind), headers=headers)
        self.answered[text] += 1
        content = f"seen: {text}" + "".join(f" ({url[:22]})" for url in pictures)
        return web.json_response(_completion(body["model"], content))


def _completion(model: str, content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


async def _serve(server: ModelServer) -> web.AppRunner:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    return runner


@contextlib.contextmanager
def model_server(**options: Any) -> Iterator[ModelServer]:
    """A server in a thread of its own."""
    server = ModelServer(**options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(_serve(server), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


if __name__ == "__main__":
    with model_server(latency=float(sys.argv[1]), errors=float(sys.argv[2]), log=sys.argv[3]) as s:
        print(s.url, flush=True)
        threading.Event().wait()

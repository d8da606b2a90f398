"""An S3 server on a folder, for benchmarks only: it does not authenticate its clients.

It supports GET (with Range), HEAD, PUT (with `If-None-Match: *`), DELETE and multipart uploads. It
checks no signatures, lists nothing, and accepts every bucket name. Connections stay open between
requests and bodies are sent by sendfile, so that a benchmark of a slow link measures the link;
moto's server closes the connection after every response. Requires aiohttp, a dependency of s3fs.

It writes one line of JSON as soon as it listens. To every line on its standard input it responds
with the requests since the line before, `[start_s, end_s, peer's port, peer, method, key, status,
bytes]` on the monotonic clock. It exits at the end of its input.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, process_time
from uuid import uuid4

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

KEEP_ALIVE_S = 3600.0
CHUNK_BYTES = 2**20
Served = tuple[float, float, int, str, str, str, int, int]


class Log(AbstractAccessLogger):
    """The requests since the last response on standard output."""

    served: list[Served] = []

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        end_s = monotonic()
        size = response.body_length if request.method == "GET" else request.content_length or 0
        host, port = request.get_extra_info("peername", ("", 0))[:2]
        entry = (port, host, request.method, request.path, response.status, size)
        Log.served.append((end_s - time, end_s, *entry))


class Folder:
    """Objects as files: `bucket/key` is the path, unfinished uploads are in `.unfinished`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unfinished = root / ".unfinished"
        self._unfinished.mkdir(parents=True, exist_ok=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = self._root / request.match_info["bucket"] / request.match_info["key"]
        if self._root not in path.resolve().parents:
            return _error(400, "InvalidArgument")
        match request.method:
            case "GET" | "HEAD":
                return (
                    web.FileResponse(path, chunk_size=CHUNK_BYTES)
                    if path.is_file()
                    else _error(404, "NoSuchKey")
                )
            case "PUT" if "uploadId" in request.query:
                await _store(
                    request, self._part(request.query["uploadId"], int(request.query["partNumber"]))
                )
                return web.Response(headers={"ETag": '"part"'})
            case "PUT":
                return await self._put(request, path)
            case "POST" if "uploads" in request.query:
                upload = uuid4().hex
                return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            case "POST" if "uploadId" in request.query:
                await request.read()
                await asyncio.to_thread(self._join, request.query["uploadId"], path)
                return _xml("CompleteMultipartUploadResult", '<ETag>"whole"</ETag>')
            case "DELETE":
                path.unlink(missing_ok=True)
                return web.Response(status=204)
        return _error(501, "NotImplemented")

    async def _put(self, request: web.Request, path: Path) -> web.Response:
        body = self._unfinished / uuid4().hex
        await _store(request, body)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if request.headers.get("If-None-Match") == "*":
                os.link(body, path)
            else:
                os.replace(body, path)
        except FileExistsError:
            return _error(412, "PreconditionFailed")
        finally:
            body.unlink(missing_ok=True)
        return web.Response(headers={"ETag": '"whole"'})

    def _part(self, upload: str, number: int) -> Path:
        return self._unfinished / f"{upload}.{number:05d}"

    def _join(self, upload: str, path: Path) -> None:
        first, *others = sorted(self._unfinished.glob(f"{upload}.*"))
        with first.open("ab") as whole:
            for part in others:
                with part.open("rb") as body:
                    shutil.copyfileobj(body, whole, CHUNK_BYTES)
                part.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(first, path)


async def _store(request: web.Request, path: Path) -> None:
    with path.open("wb") as file:
        async for chunk in request.content.iter_any():
            file.write(chunk)


def _error(status: int, code: str) -> web.Response:
    return _xml("Error", f"<Code>{code}</Code>", status)


def _xml(name: str, inner: str, status: int = 200) -> web.Response:
    return web.Response(
        text=f'<?xml version="1.0"?><{name}>{inner}</{name}>',
        content_type="application/xml",
        status=status,
    )


async def serve(root: Path, port: int) -> None:
    application = web.Application()
    application.router.add_route("*", "/{bucket}/{key:.+}", Folder(root).handle)
    runner = web.AppRunner(application, access_log_class=Log, keepalive_timeout=KEEP_ALIVE_S)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port, backlog=1024).start()
    print(json.dumps({"port": port}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        cpu_s = process_time()
        served, Log.served = Log.served, []
        print(json.dumps({"served": served, "cpu_s": cpu_s}), flush=True)
    await runner.cleanup()


def main(arguments: Sequence[str]) -> None:
    folder, port = arguments
    asyncio.run(serve(Path(folder).resolve(), int(port)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""A program that connects an agent in a sandbox to the gateway.

    relay.py SOCKET

Its standard input is a socket that listens in the sandbox's network. Each connection is passed on
to the Unix socket SOCKET. It runs inside the sandbox, under the sandbox's filter of system calls.
"""

import asyncio
import socket
import sys
from asyncio import StreamReader, StreamWriter
from functools import partial

_CHUNK = 65536


async def _serve(path: str) -> None:
    listening = socket.socket(fileno=0)
    async with await asyncio.start_server(partial(_pass_on, path), sock=listening) as server:
        await server.serve_forever()


async def _pass_on(path: str, reader: StreamReader, writer: StreamWriter) -> None:
    try:
        from_gateway, to_gateway = await asyncio.open_unix_connection(path)
    except OSError:  # the gateway has ended
        writer.close()
        return
    await asyncio.gather(_copy(reader, to_gateway), _copy(from_gateway, writer))
    for each in (writer, to_gateway):
        each.close()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:  # one end is gone: the other copy ends too
        writer.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))

"""The two sockets between the HTTP process and one scheduler process, and their encoding.

ZeroMQ over unix sockets in a private folder (mode 0700), msgspec structs in msgpack. The HTTP
process binds, the scheduler connects, so a scheduler can die and another take its place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from srt.managers.io_struct import SchedulerInput, SchedulerOutput


def make_ipc_dir() -> Path:
    """A fresh folder only this user can enter; the caller removes it at exit."""
    return Path(tempfile.mkdtemp(prefix="regather-"))  # mkdtemp makes it 0700


def _address(ipc_dir: Path, name: str) -> str:
    address = f"ipc://{ipc_dir}/{name}"
    limit = zmq.IPC_PATH_MAX_LEN
    if limit and len(address) - len("ipc://") > limit:
        raise ValueError(f"socket path {ipc_dir}/{name} is longer than {limit} bytes; set TMPDIR")
    return address


class FrontendChannel:
    """The HTTP process's end. Create it inside the event loop that will use it."""

    def __init__(self, ipc_dir: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self._to_scheduler = self._bind(zmq.PUSH, _address(ipc_dir, "in"))
        self._from_scheduler = self._bind(zmq.PULL, _address(ipc_dir, "out"))

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        # Messages are bounded by the request limits of the HTTP process, not by dropping or
        # blocking here.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    def encode(self, message: SchedulerInput) -> bytes:
        """What `send` takes. Whatever cannot be encoded is an error here, where it is still known
        whose it is."""
        return self._encoder.encode(message)

    async def send(self, data: bytes) -> None:
        await self._to_scheduler.send(data)

    async def recv(self) -> SchedulerOutput:
        return self._decoder.decode(await self._from_scheduler.recv())

    def close(self) -> None:
        self._to_scheduler.close()
        self._from_scheduler.close()
        self._context.term()


class SchedulerChannel:
    """The scheduler's end: never blocks unless asked to."""

    def __init__(self, ipc_dir: Path) -> None:
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerInput)
        self._input = self._connect(zmq.PULL, _address(ipc_dir, "in"))
        self._output = self._connect(zmq.PUSH, _address(ipc_dir, "out"))

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        # A last message (a failure) must still get out when the process exits right after it.
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(address)
        return socket

    def recv(self, timeout_ms: int) -> Sequence[SchedulerInput]:
        """Every message that is there; waits up to `timeout_ms` for the first (0: not at all)."""
        if timeout_ms and not self._input.poll(timeout_ms):
            return []
        messages: list[SchedulerInput] = []
        while True:
            try:
                data = self._input.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(data))

    def send(self, message: SchedulerOutput) -> None:
        self._output.send(self._encoder.encode(message))

    def close(self) -> None:
        self._input.close()
        self._output.close()
        self._context.term()

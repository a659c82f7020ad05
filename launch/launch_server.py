"""`python -m launch_server`: start the scheduler and the HTTP server, and end both together."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from srt.backend import Backend, cache_dir
from srt.default_model import ModelUnavailable
from srt.host_limits import raise_descriptor_limit
from srt.log_lines import setup_logging
from srt.managers.scheduler_handle import SchedulerHandle
from srt.model_files import resolve_model
from srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

READY_LINE = "The server is fired up and ready to roll!"
LISTEN_BACKLOG = 2048


class StartError(Exception):
    """The server cannot start; the message is for the person who started it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal (0) or a failure (1)."""
    args = ServerArgs.from_cli(sys.argv[1:] if argv is None else argv)
    setup_logging(args.log_level)
    raise_descriptor_limit()
    try:
        # First, since nobody wants to load a model only to learn that the port is taken.
        tls = tls_context(args)
        with listen(args.host, args.port) as listener:
            model_path = resolve_model(args.model_path, args.revision, cache_dir(args))
            scheduler = SchedulerHandle(args, model_path)
            try:
                return _run(_serve(args, model_path, scheduler, listener, tls))
            finally:
                scheduler.stop()
    except (StartError, ModelUnavailable, ValueError, OSError) as error:
        print(f"launch_server: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there is an event loop to take the signal
        return 130


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; StartError, with host and port, if there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartError(f"--host {host} is no address of this machine: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # there it would share the port with another server
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def tls_context(args: ServerArgs) -> ssl.SSLContext | None:
    """For HTTPS, with --ssl-certfile; StartError if its files are no such."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None or args.ssl_ca_certs is not None:
            raise StartError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise StartError(f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: {error}") from error
    return context


def _run(main_coroutine: Coroutine[Any, Any, int]) -> int:
    """asyncio.run, on uvloop where there is one: it halves the cost of a chunk."""
    if sys.platform == "win32":
        return asyncio.run(main_coroutine)
    import uvloop

    return uvloop.run(main_coroutine)


async def _serve(
    args: ServerArgs,
    model_path: Path,
    scheduler: SchedulerHandle,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
) -> int:
    """The exit code, once everything but the scheduler process has ended."""
    # Late, so that the scheduler process, which takes longest, is already loading.
    from srt.http_server import HttpServer

    stop = _signal_event()
    server = HttpServer(args)
    async with server.listening(listener, tls, LISTEN_BACKLOG):
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(_start(args, model_path, scheduler))
        backend = None
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0
            backend = starting.result()
            server.open(backend.manager)
            host, port = listener.getsockname()[:2]
            scheme = "http" if tls is None else "https"
            logger.info("Serving %s on %s://%s:%d", server.model_name, scheme, host, port)
            logger.info(READY_LINE)
            return await _until_end(backend, stopping)
        except RuntimeError as error:
            logger.error("%s", error)
            return 1
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
            if backend is not None:
                await backend.close()


async def _start(args: ServerArgs, model_path: Path, scheduler: SchedulerHandle) -> Backend:
    backend = await Backend.start(args, model_path, scheduler)
    if not args.skip_server_warmup:
        try:
            await backend.warm_up()
        except BaseException:
            await backend.close()
            raise
    return backend


async def _until_end(backend: Backend, stopping: asyncio.Task[bool]) -> int:
    """Wait for a signal, then let running requests finish (0); or for the scheduler's death (1)."""
    manager = backend.manager
    dying = asyncio.create_task(manager.died.wait())
    try:
        await asyncio.wait({dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not dying.done():
            logger.info(
                "Gracefully exiting... Remaining number of requests %d. Remaining requests "
                "remaining_rids=%s.",
                manager.num_live,
                manager.live_rids,
            )
            await manager.drain(manager.args.drain_timeout)
    finally:
        dying.cancel()
    if manager.failure:
        logger.error("%s", manager.failure)
        return 1
    return 0


def _signal_event() -> asyncio.Event:
    """Set at the first SIGINT or SIGTERM. A second one ends the process at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        event.set()
        for signum in signals:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_DFL)

    for signum in signals:
        loop.add_signal_handler(signum, on_signal)
    return event


if __name__ == "__main__":
    sys.exit(main())

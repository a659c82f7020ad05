"""`python -m srt.chat`: talk to a running server from the terminal, or start one and talk to it."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape

from srt.backend import cache_dir
from srt.default_model import ModelUnavailable
from srt.model_files import resolve_model
from srt.server_args import ServerArgs

DEFAULT_URL = "http://127.0.0.1:30000"
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0

Message = dict[str, str]


class ChatError(Exception):
    """Something the person at the terminal must know; the message says what to do."""


class ChatClient:
    """Speaks to one server. `url` is its root, `api_key` what it wants as a bearer token."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError as error:
            raise ChatError(f"--url {url!r} has no valid port: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"--url must look like {DEFAULT_URL}, got {url!r}")
        self.url = url
        self.host = parts.hostname
        self.port = port if port is not None else (443 if parts.scheme == "https" else 80)
        self._is_https = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def is_ready(self) -> bool:
        """Whether a server there takes requests. False if none listens."""
        connection = self._connect()
        try:
            connection.request("GET", f"{self._path}/health", headers=self._headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def stream(
        self, messages: Sequence[Message], max_tokens: int | None, temperature: float | None
    ) -> Iterator[str]:
        """The answer's text, piece by piece. ChatError if there is none. Leaving the iterator early
        closes the connection, at which the server stops generating."""
        body: dict[str, object] = {"messages": list(messages), "stream": True}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        connection = self._connect()
        try:
            try:
                connection.request(
                    "POST",
                    f"{self._path}/v1/chat/completions",
                    body=json.dumps(body),
                    headers=self._headers,
                )
                if connection.sock is not None:
                    connection.sock.settimeout(None)  # a long queue is no error
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(_no_server(self.url, error)) from error
            if response.status != 200:
                raise ChatError(_error_message(response.status, response.read()))
            try:
                yield from _deltas(response)
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"The connection to {self.url} broke: {error}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=CONNECT_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one question, or hold a conversation until /exit or the end of input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    server_argv: list[str] = []
    if "--" in argv:
        split = argv.index("--")
        argv, server_argv = argv[:split], argv[split + 1 :]
    parser = _parser()
    options = parser.parse_args(argv)
    if server_argv and not options.start_server:
        parser.error("options after -- are for a server that --start-server starts")
    # The answer alone goes to stdout, so that it can be piped.
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        client = ChatClient(options.url, options.api_key)
        with contextlib.ExitStack() as stack:
            if options.start_server and not client.is_ready():
                stack.enter_context(running_server(client, server_argv, notes))
            return _chat(client, options, console, notes)
    except (ChatError, ModelUnavailable, ValueError) as error:
        notes.print(f"srt.chat: error: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m srt.chat",
        allow_abbrev=False,
        description="Ask a server a question, or, without one, chat with it.",
        epilog="Options after -- go to the server that --start-server starts.",
    )
    parser.add_argument("question", nargs="?", help="ask this and exit; without it, chat")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--start-server",
        action="store_true",
        help="start a server if none answers at the url, and stop it at the end",
    )
    parser.add_argument("--system", help="system message to begin with")
    # A small model at the API's default of 1 wanders off; a chat should show what it can do.
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.2,
        help="0 always takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    parser.add_argument("--api-key", help="key the server was started with")
    return parser


def _chat(client: ChatClient, options: argparse.Namespace, console: Console, notes: Console) -> int:
    messages: list[Message] = []
    if options.system is not None:
        messages.append({"role": "system", "content": options.system})
    if options.question is not None:
        question = {"role": "user", "content": options.question}
        for piece in client.stream([*messages, question], options.max_tokens, options.temperature):
            console.out(piece, end="")
        console.out("")
        return 0
    if not client.is_ready():
        raise ChatError(_no_server(client.url, None))
    notes.print(f"[dim]Chatting with {client.url}. /new forgets the conversation, /exit ends it,")
    notes.print("[dim]Ctrl-C stops an answer.")
    num_kept = len(messages)
    while (line := _ask(console)) is not None:
        if line == "/new":
            del messages[num_kept:]
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for piece in client.stream(messages, options.max_tokens, options.temperature):
                answer += piece
                console.out(piece, end="")
        except KeyboardInterrupt:
            notes.print("[dim](stopped)", end="")
        except ChatError as error:
            # The question that failed does not stay in the conversation; the others do.
            messages.pop()
            notes.print(f"{error}", markup=False, style="red")
            continue
        console.out("\n")
        messages.append({"role": "assistant", "content": answer})
    return 0


def _ask(console: Console) -> str | None:
    """The next line that says something; None to end."""
    while True:
        try:
            line = console.input("[bold cyan]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.out("")
            return None
        if line in ("/exit", "/quit"):
            return None
        if line:
            return line


@contextlib.contextmanager
def running_server(
    client: ChatClient, server_argv: Sequence[str], notes: Console
) -> Iterator[None]:
    """Start `python -m launch_server` at the client's host and port, wait until it is ready, stop
    it at the end. ChatError, with the end of its log, if it ends before that."""
    given = [arg.split("=")[0] for arg in server_argv]
    if "--host" in given or "--port" in given:
        raise ChatError("give host and port of the server in --url, not after --")
    args = ServerArgs.from_cli(server_argv)
    # Here and not in the server, so that the progress of a first download is seen.
    resolve_model(args.model_path, args.revision, cache_dir(args))
    command = [sys.executable, "-m", "launch_server", *server_argv]
    command += ["--host", client.host, "--port", str(client.port)]
    with tempfile.TemporaryDirectory(prefix="regather-chat-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            # A session of its own: Ctrl-C stops an answer, not the server.
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            with notes.status("Starting the server") as status:
                while not client.is_ready():
                    last = _tail(log, 1)
                    if server.poll() is not None:
                        raise ChatError(
                            f"the server ended with code {server.returncode}:\n{_tail(log, 15)}"
                        )
                    if last:
                        status.update(f"Starting the server  [dim]{escape(last[:100])}[/]")
                    time.sleep(POLL_SECONDS)
            yield
        finally:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _tail(log: Path, num_lines: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])


def _deltas(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            if content := choice["delta"].get("content"):
                yield content
    raise ChatError("The answer ended before it was complete; the server may have stopped.")


def _no_server(url: str, error: Exception | None) -> str:
    reason = "" if error is None else f" ({error})"
    return (
        f"no server answers at {url}{reason}. Start one with `python -m launch_server`, or let "
        "this command do it with --start-server"
    )


def _error_message(status: int, data: bytes) -> str:
    try:
        body = json.loads(data)
        message = body["message"] if "message" in body else body["error"]
    except (ValueError, KeyError, TypeError):
        message = data[:200].decode(errors="replace")
    return f"the server refused with status {status}: {message}"


if __name__ == "__main__":
    sys.exit(main())

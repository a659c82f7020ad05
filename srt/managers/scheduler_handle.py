"""Starts, watches and stops the scheduler process. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from srt.managers.black_box import black_box_path, create_black_box
from srt.managers.ipc import make_ipc_dir
from srt.server_args import ServerArgs

# A fresh interpreter, not multiprocessing's spawn: that one runs the user's main script again,
# which an Engine in an unguarded script or a notebook does not survive, and keeps a third process.
_CHILD = """
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["sys_path"]
from srt.managers.scheduler_handle import run_job
run_job(job)
"""


class SchedulerHandle:
    """The running scheduler process and the private folder of its sockets. The options go through
    its standard input, since everyone on the machine can read a command line. Start it on a thread
    that lives as long as the process should: Linux ties the two together."""

    def __init__(self, args: ServerArgs, model_path: Path) -> None:
        self._args, self._model_path = args, model_path
        self.ipc_dir = make_ipc_dir()
        self.black_box = black_box_path(self.ipc_dir)
        create_black_box(self.black_box)
        job = {
            "sys_path": sys.path,
            "args": dataclasses.asdict(args),
            "model_path": str(model_path),
            "ipc_dir": str(self.ipc_dir),
        }
        try:
            self.process = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE)
        except OSError:
            shutil.rmtree(self.ipc_dir, ignore_errors=True)
            raise
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin:  # it died; `watch` says so
            self.process.stdin.write(json.dumps(job).encode())

    def another(self) -> SchedulerHandle:
        """The same process anew, in a folder of its own."""
        return SchedulerHandle(self._args, self._model_path)

    def watch(self, on_exit: Callable[[str], None]) -> None:
        """Call `on_exit` with a description, on the running event loop, when the process ends."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            # The loop may have ended meanwhile; then nobody needs to know.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(
                    on_exit, f"The scheduler process (pid {self.process.pid}) {how}."
                )

        threading.Thread(target=wait, daemon=True, name="scheduler-watch").start()

    def clear_folder(self) -> None:
        """Remove the names of the sockets, which are connected by now."""
        shutil.rmtree(self.ipc_dir, ignore_errors=True)

    def stop(self, timeout: float = 5.0) -> None:
        """End the process, by force after `timeout` s, and remove the folder. Twice is fine."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.ipc_dir, ignore_errors=True)


def run_job(job: dict[str, object]) -> None:
    """What the child process does."""
    # Late: this imports torch.
    from srt.managers.scheduler_process import run_scheduler_process

    args = job["args"]
    assert isinstance(args, dict)
    run_scheduler_process(
        ServerArgs(**args), Path(str(job["model_path"])), Path(str(job["ipc_dir"]))
    )

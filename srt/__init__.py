"""regather, an LLM serving engine. `Engine` runs it inside a Python program, without HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srt.engine import Engine

__all__ = ["Engine", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Late, because importing one small module of the package must not load the whole engine.
    if name == "Engine":
        from srt.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Nothing that can run code when it is read may come from a socket, a client or a file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "srt").rglob("*.py"), *(ROOT / "launch").rglob("*.py")])
# multiprocessing's pipes and queues pickle; so do shelves; marshal reads code.
FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN |= {"multiprocessing", "torch.multiprocessing"}
# srt/weights.py names the exception that torch's safe reader raises.
EXCEPTION_ONLY = {("srt/weights.py", "pickle")}
CALLS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized", "eval", "exec"}


def problems_of(source, name):
    """What in a module could read a pickle or run a text as code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{m}" for m in modules)]
            for module in modules:
                is_bad = module in FORBIDDEN or module.split(".")[0] in FORBIDDEN
                if is_bad and (name, module) not in EXCEPTION_ONLY:
                    yield f"{name}:{node.lineno} imports {module}"
        is_of_pickle = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pickle"
        if is_of_pickle and not node.attr.endswith("Error"):
            yield f"{name}:{node.lineno} uses pickle.{node.attr}"
        if isinstance(node, ast.Call):
            called = node.func
            attr = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            owner = getattr(getattr(called, "value", None), "id", "")
            is_builtin = isinstance(called, ast.Name) or attr not in ("eval", "exec")
            if attr in CALLS and is_builtin:
                yield f"{name}:{node.lineno} calls {attr}"
            if (owner, attr) == ("torch", "load") and given.get("weights_only") is not True:
                yield f"{name}:{node.lineno} calls torch.load without weights_only=True"
            if given.get("allow_pickle"):
                yield f"{name}:{node.lineno} allows pickle"
            if attr in ("load", "load_all") and owner == "yaml":
                yield f"{name}:{node.lineno} calls yaml.{attr}, not safe_load"


def test_no_module_reads_pickles_or_runs_texts():
    assert len(FILES) > 100
    found = []
    for file in FILES:
        found += problems_of(file.read_text(), file.relative_to(ROOT).as_posix())
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "import multiprocessing.connection",
        "from torch import multiprocessing",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "socket.recv_pyobj()",
        "numpy.load('x', allow_pickle=True)",
        "yaml.load(text)",
        "eval('1')",
    ],
)
def test_the_search_finds_what_it_looks_for(source):
    assert list(problems_of(source, "x.py"))


def test_code_in_a_pickled_checkpoint_does_not_run(tmp_path):
    torch = pytest.importorskip("torch")

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    from srt.weights import _iterate_pickled

    torch.save({"x": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model"):
        list(_iterate_pickled(tmp_path / "pytorch_model.bin"))
    assert not (tmp_path / "ran").exists()

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_scheduler import ids
from tiny_model import fake_handle_class, write_tiny_model

import srt.engine
from srt.engine import Engine
from srt.managers.io_struct import AbortReq
from srt.request_error import RequestError
from srt.server_args import ServerArgsError


@pytest.fixture
def made(monkeypatch):
    handles = fake_handle_class()
    monkeypatch.setattr(srt.engine, "SchedulerHandle", handles)
    return handles.made


@pytest.fixture
def engine(tmp_path, made):
    with Engine(str(write_tiny_model(tmp_path)), random_seed=1) as engine:
        yield engine


def three(**params):
    return {"max_new_tokens": 3, **params}


def test_generate_gives_one_result_or_a_list(engine):
    result = engine.generate("hello", three())
    assert (result["text"], result["output_ids"]) == ("abc", ids("abc"))
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    results = engine.generate(["a", "b"], [three(), {"max_new_tokens": 1}])
    assert [r["text"] for r in results] == ["abc", "a"]
    assert engine.generate(input_ids=[5, 6], sampling_params=three())["text"] == "abc"
    assert len(engine.generate("a", three(n=2))) == 2
    assert engine.generate("a", three(), rid="mine")["meta_info"]["id"] == "mine"


def test_a_stream_grows_to_the_whole_text(engine):
    texts = [chunk["text"] for chunk in engine.generate("a", three(), stream=True)]
    assert texts[-1] == "abc"
    assert all("abc".startswith(text) for text in texts)


def test_chunks_keep_their_ids_while_the_request_goes_on(engine):
    chunks = list(engine.generate("a", three(), stream=True))
    for chunk in chunks:
        assert len(chunk["output_ids"]) == chunk["meta_info"]["completion_tokens"]


def test_leaving_a_stream_early_aborts_the_request(engine, made):
    made[0].fake.passes_left = 1
    stream = engine.generate("a", {"max_new_tokens": 100}, stream=True)
    assert next(stream)["text"] == "a"
    stream.close()
    made[0].fake.passes_left = 3
    assert engine.generate("a", three())["text"] == "abc"
    assert made[0].fake.of_type(AbortReq)
    assert engine._backend.manager.num_live == 0


def test_asynchronous_calls_run_at_once_and_stream(engine):
    async def scenario():
        results = await asyncio.gather(*(engine.async_generate(f"p{i}", three()) for i in range(9)))
        assert [r["text"] for r in results] == ["abc"] * 9
        stream = await engine.async_generate("a", three(), stream=True)
        assert [chunk["text"] async for chunk in stream][-1] == "abc"

    asyncio.run(scenario())


def test_many_threads_may_generate_at_once(engine):
    texts = []

    def work(n):
        texts.append((n, engine.generate("a", {"max_new_tokens": n})["text"]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [(n, "abcdefgh"[:n]) for n in range(1, 9)]


def test_a_refusal_is_an_exception_with_the_reason(engine):
    with pytest.raises(RequestError, match="empty"):
        engine.generate("")
    with pytest.raises(RequestError, match="temperature"):
        engine.generate("a", {"temperature": -1})
    with pytest.raises(RequestError, match="temperature"):
        list(engine.generate("a", {"temperature": -1}, stream=True))
    with pytest.raises(RequestError, match="return_hidden_states"):
        engine.generate("a", three(), return_hidden_states=True)
    assert engine.generate("a", three())["text"] == "abc"


def test_abort_ends_a_running_request(engine, made):
    made[0].fake.passes_left = 1
    stream = engine.generate("a", {"max_new_tokens": 100}, stream=True, rid="x")
    next(stream)
    engine.abort_request("x")
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


def test_it_can_be_asked_for_its_state_and_flushed(engine):
    assert engine.internal_state()["num_running_reqs"] == 0
    assert engine.flush_cache() is True
    assert engine.tokenizer.encode("a") == ids("a")


def test_shutdown_leaves_no_thread_and_no_folder_and_may_be_repeated(tmp_path, made):
    before = threading.active_count()
    engine = Engine(str(write_tiny_model(tmp_path)))
    engine.shutdown()
    engine.shutdown()
    assert threading.active_count() == before
    assert not made[0].ipc_dir.exists()
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("a")


def test_a_model_that_cannot_load_leaves_nothing_behind(tmp_path, made):
    before = threading.active_count()
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        Engine(str(tmp_path))
    assert threading.active_count() == before
    assert not made[0].ipc_dir.exists()


def test_a_wrong_option_is_named(tmp_path):
    with pytest.raises(ServerArgsError, match="--page-size"):
        Engine(str(tmp_path), page_size=0)
    with pytest.raises(TypeError, match="no_such_option"):
        Engine(str(tmp_path), no_such_option=1)


def test_the_process_of_http_and_engine_never_imports_torch():
    code = (
        "import sys, srt.engine, srt.http_server, launch.launch_server, srt.chat; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# No `if __name__ == "__main__"`: the scheduler process must not run the script again.
_SCRIPT = """
import sys
from srt import Engine
engine = Engine(sys.argv[1], load_format="dummy", device="cpu", max_total_tokens=400)
params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
alone = [engine.generate(p, params)["output_ids"] for p in ("one", "two", "three")]
engine.flush_cache()
together = [r["output_ids"] for r in engine.generate(["one", "two", "three"], params)]
assert alone == together, (alone, together)
*_, last = engine.generate("two", params, stream=True)
assert last["output_ids"] == alone[1]
state = engine.internal_state()
assert state["num_running_reqs"] == 0 and state["num_locked_tokens"] == 0, state
print("pid", engine._backend._supervisor._scheduler.process.pid)
"""


@pytest.mark.slow
def test_an_unguarded_script_generates_and_leaves_no_process(tmp_path):
    import psutil

    write_tiny_model(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    root = Path(__file__).parents[1]
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(root)!r}); "
            f"sys.argv[1:] = [{str(tmp_path)!r}]; exec(open({str(script)!r}).read())",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    pid = int(result.stdout.split()[-1])
    assert not psutil.pid_exists(pid)

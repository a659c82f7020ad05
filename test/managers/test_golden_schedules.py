"""The worked schedules of the design, through the real loop: prefill-first, overlap off."""

from scheduler_harness import Harness


def phase(chosen):
    """One pass as the schedules write it: P or D and the members."""
    return ("P" if chosen.is_extend else "D") + "[" + ",".join(chosen.members) + "]"


def run(harness, arrivals):
    """Steps until all ended; `arrivals`: before which step (from 0) a request is sent. The members
    are taken when the pass is chosen, since the batch is filtered later."""
    passes = []
    pending = sorted(arrivals, key=lambda item: item[0])
    choose = harness.scheduler.get_next_batch_to_run

    class Seen:
        def __init__(self, chosen):
            self.is_extend = chosen.is_extend
            self.members = [req.rid for req in chosen.batch.reqs]
            self.lens = list(chosen.forward.extend_lens_cpu)
            self.produced = None

    def record():
        chosen = choose()
        if chosen is not None:
            passes.append(Seen(chosen))
        return chosen

    harness.scheduler.get_next_batch_to_run = record
    for step in range(100):
        while pending and pending[0][0] <= step:
            _, rid, prompt_len, max_new = pending.pop(0)
            prompt = [hash_of(rid, i) for i in range(prompt_len)]
            harness.send(rid, prompt, max_new, ignore_eos=True)
        if harness.step() is None and not pending:
            return passes
        if passes:
            passes[-1].produced = {rid: len(ids) for rid, ids in harness.outputs.items()}
    raise AssertionError("did not end")


def hash_of(rid, i):
    """Prompts without common prefixes."""
    return (sum(map(ord, rid)) * 31 + i * 7) % 997


def test_three_requests_in_two_rows():
    passes = run(Harness(max_running=2), [(0, "A", 3, 2), (0, "B", 3, 5), (1, "C", 3, 2)])
    assert [phase(p) for p in passes] == ["P[A,B]", "D[A,B]", "P[C]", "D[B,C]", "D[B]", "D[B]"]
    table = [tuple(p.produced.get(rid, 0) for rid in "ABC") for p in passes]
    assert table == [(1, 1, 0), (2, 2, 0), (2, 2, 1), (2, 3, 2), (2, 4, 2), (2, 5, 2)]


def test_five_requests_with_a_prefill_budget_of_six():
    # A request that arrives at time t is there for the first step after it.
    passes = run(
        Harness(max_running=2, max_prefill_tokens=6),
        [(0, "A", 3, 4), (1, "B", 2, 2), (2, "C", 3, 3), (4, "D", 4, 2), (6, "E", 2, 4)],
    )
    assert [phase(p) for p in passes] == [
        "P[A]", "P[B]", "D[A,B]", "P[C]", "D[A,C]", "D[A,C]", "P[D,E]", "D[D,E]", "D[E]", "D[E]",
    ]  # fmt: skip


def test_a_long_prompt_runs_in_chunks_before_anyone_decodes():
    harness = Harness(pool_size=8192, context_len=4096, chunk=1024)
    passes = run(harness, [(0, "B", 2, 3), (1, "C", 2500, 2)])
    assert [phase(p) for p in passes] == ["P[B]", "P[C]", "P[C]", "P[C]", "D[B,C]", "D[B]"]
    assert [p.lens for p in passes[1:4]] == [[1024], [1024], [452]]
    assert [p.produced.get("C", 0) for p in passes] == [0, 0, 0, 1, 2, 2], "an inner chunk sampled"


def test_with_one_decode_turn_between_chunks_a_stream_goes_on():
    harness = Harness(pool_size=8192, context_len=4096, chunk=1024, phase="interleave")
    passes = run(harness, [(0, "B", 2, 9), (1, "C", 2500, 1)])
    assert [phase(p) for p in passes][:7] == [
        "P[B]", "D[B]", "P[C]", "D[B]", "P[C]", "D[B]", "P[C]",
    ]  # fmt: skip


def test_rows_close_up_when_one_leaves_and_stay_the_same_objects_when_none_does():
    harness = Harness(max_running=8)
    for i in range(8):
        harness.send(f"R{i}", [i + 1, i + 2], 3 if i == 0 else 9)
    for _ in range(3):
        harness.step()  # prefill, two decodes: R0 has its three tokens
    harness.send("R8", [77, 78], 9)
    chosen = harness.step()
    assert chosen.is_extend
    harness.step()
    batch = harness.scheduler.running_batch
    assert [req.rid for req in batch.reqs] == ["R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8"]
    rows, table = batch.req_pool_indices, batch.req_pool_indices.tolist()
    assert table == [req.kv.row for req in batch.reqs]
    harness.step()
    assert harness.scheduler.running_batch.req_pool_indices is rows, "nothing ended, yet regathered"

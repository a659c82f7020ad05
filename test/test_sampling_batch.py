"""Filtering and merging sampling tensors gives what building them fresh would give."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.sampling_batch import MAX_SHORT_TOP_K, DrawPath, RowGroup, SamplingBatch
from srt.sampling_params import SamplingParams

VOCAB_SIZE = 300


@dataclass
class Row:
    params: SamplingParams
    prompt_ids: list[int] = field(default_factory=lambda: [1, 2])
    output_ids: list[int] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()


def build(rows: list[Row]) -> SamplingBatch:
    return SamplingBatch.build(
        [row.params for row in rows],
        [row.prompt_ids for row in rows],
        [row.output_ids for row in rows],
        [row.stop_ids for row in rows],
        VOCAB_SIZE,
        "cpu",
    )


def contents(batch: SamplingBatch) -> dict[str, object]:
    """The batch as plain values; row order within a group is part of them."""

    def of(group: RowGroup | None) -> object:
        if group is None:
            return None
        assert group.row_index.tolist() == group.rows.tolist()
        columns = {name: c.tolist() for name, c in group.columns._asdict().items()}
        return group.rows.tolist(), columns

    draws = {path: of(group) for path, group in batch.draws.items()}
    return {
        "num_rows": batch.num_rows,
        "draws": draws,
        "penalties": of(batch.penalties),
        "biases": of(batch.biases),
    }


token_ids = st.integers(0, VOCAB_SIZE - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([-1, 1, 5, MAX_SHORT_TOP_K, MAX_SHORT_TOP_K + 1, VOCAB_SIZE]),
    top_p=st.sampled_from([0.5, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.none() | st.dictionaries(token_ids, st.sampled_from([-100.0, 1.5]), max_size=3),
    min_new_tokens=st.sampled_from([0, 0, 5]),
    sampling_seed=st.integers(-(2**63), 2**63 - 1),
)
rows = st.builds(
    Row,
    params,
    prompt_ids=st.lists(token_ids, max_size=3),
    output_ids=st.lists(token_ids, max_size=3),
    stop_ids=st.lists(token_ids, max_size=2, unique=True).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_filters_merges_and_appends_equal_a_fresh_build(data):
    live: list[Row] = data.draw(st.lists(rows, max_size=4))
    batch = build(live)
    for _ in range(data.draw(st.integers(1, 5))):
        step = data.draw(st.sampled_from(["filter", "merge", "append"]))
        if step == "filter":
            keep = [i for i in range(len(live)) if data.draw(st.booleans())]
            live = [live[i] for i in keep]
            batch.filter_batch(keep)
        elif step == "merge":
            arrived = data.draw(st.lists(rows, max_size=3))
            live = live + arrived
            batch.merge_batch(build(arrived))
        else:
            next_ids = [data.draw(token_ids) for _ in live]
            for row, token in zip(live, next_ids, strict=True):
                row.output_ids.append(token)
            batch.append_tokens(torch.tensor(next_ids, dtype=torch.int64))
        assert contents(batch) == contents(build(live))


def test_the_way_a_row_draws_depends_on_its_own_knobs():
    ways = {
        DrawPath.WHOLE: [{}, {"min_p": 0.5}, {"top_k": VOCAB_SIZE}, {"top_k": VOCAB_SIZE + 9}],
        DrawPath.SHORT: [{"top_k": 2}, {"top_k": MAX_SHORT_TOP_K, "top_p": 0.1}],
        DrawPath.SORTED: [{"top_k": MAX_SHORT_TOP_K + 1}, {"top_p": 0.99}],
        None: [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-7, "top_p": 0.1}],
    }
    for path, knobs in ways.items():
        for each in knobs:
            assert list(build([Row(SamplingParams(**each))]).draws) == [path][: path is not None]


def test_a_greedy_batch_is_no_more_than_a_number():
    batch = build([Row(SamplingParams(temperature=0.0), stop_ids=(3,))] * 5)
    assert batch.is_plain
    batch.filter_batch([0, 2, 4])
    batch.merge_batch(build([Row(SamplingParams(temperature=0.0))]))
    batch.append_tokens(torch.zeros(4, dtype=torch.int64))
    assert batch == SamplingBatch(num_rows=4, draws={}, penalties=None, biases=None)


def test_keeping_every_row_keeps_the_same_tensors():
    batch = build([Row(SamplingParams(repetition_penalty=1.1)), Row(SamplingParams())])
    penalties, draws = batch.penalties, batch.draws[DrawPath.WHOLE]
    batch.filter_batch([0, 1])
    assert batch.penalties is penalties
    assert batch.draws[DrawPath.WHOLE] is draws


def test_the_tensors_of_rows_that_stay_are_not_copied_when_plain_rows_leave():
    plain = Row(SamplingParams(temperature=0.0))
    batch = build([plain, Row(SamplingParams(repetition_penalty=1.1)), plain])
    before = batch.penalties
    batch.filter_batch([1])
    assert before is not None and batch.penalties is not None
    assert batch.penalties.columns.in_prompt is before.columns.in_prompt
    assert batch.penalties.rows.tolist() == [0]


def test_a_snapshot_keeps_its_rows_when_the_batch_is_filtered_and_merged():
    sampled = Row(SamplingParams(logit_bias={7: 1.0}, repetition_penalty=1.2))
    batch = build([sampled, Row(SamplingParams(temperature=0.0)), sampled])
    snapshot, before = batch.snapshot(), contents(batch)
    batch.filter_batch([1, 2])
    batch.merge_batch(build([sampled]))
    assert contents(snapshot) == before
    assert contents(batch) != before


def test_penalties_count_prompt_and_outputs_apart_and_only_where_needed():
    batch = build(
        [
            Row(SamplingParams(temperature=0.0), [1], [2]),
            Row(SamplingParams(temperature=0.0, presence_penalty=1.0), [3, 3], [4, 4]),
        ]
    )
    batch.append_tokens(torch.tensor([2, 5]))
    assert batch.penalties is not None
    assert batch.penalties.rows.tolist() == [1]
    assert batch.penalties.columns.in_prompt.nonzero().tolist() == [[0, 3]]
    counts = batch.penalties.columns.output_counts
    nonzero = {i: count for i, count in enumerate(counts[0].tolist()) if count}
    assert nonzero == {4: 2, 5: 1}


def test_prompts_may_be_numpy_arrays():
    params = [SamplingParams(repetition_penalty=1.5)]
    batch = SamplingBatch.build(params, [np.array([1, 2], np.int32)], [[]], [()], 10, "cpu")
    assert batch.penalties is not None
    assert batch.penalties.columns.in_prompt.nonzero().tolist() == [[0, 1], [0, 2]]


def test_huge_biases_stay_finite():
    batch = build([Row(SamplingParams(logit_bias={1: 1e300, 2: -1e300}))])
    assert batch.biases is not None
    assert batch.biases.columns.bias.isfinite().all()

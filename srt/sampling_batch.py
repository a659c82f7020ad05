"""The sampling tensors of a batch's rows, gathered and concatenated like the rest of the batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from srt.device_copy import to_device
from srt.sampling_params import SamplingParams

# In the place of a row's token: its logits are not finite numbers. rg_argmax says the same.
BROKEN = -1
# Rows whose top_k is at most this need only their best tokens, not the whole vocabulary in order.
MAX_SHORT_TOP_K = 128


class DrawPath(Enum):
    """How a row's token is drawn. It depends on the row's own knobs only, so that neither joining
    nor leaving batch mates can change what the row does."""

    WHOLE = "whole"  # from the whole vocabulary
    SHORT = "short"  # from its MAX_SHORT_TOP_K best tokens
    SORTED = "sorted"  # from the whole vocabulary in order


class DrawColumns(NamedTuple):
    """Rows that draw their token at random; g of them."""

    temperature: torch.Tensor  # [g] float64
    top_k: torch.Tensor  # [g] int64, the vocabulary size when off
    top_p: torch.Tensor  # [g] float64
    min_p: torch.Tensor  # [g] float64
    seed: torch.Tensor  # [g] int64


class PenaltyColumns(NamedTuple):
    """Rows with a repetition, frequency or presence penalty; g of them."""

    repetition: torch.Tensor  # [g, 1] float32
    frequency: torch.Tensor  # [g, 1] float32
    presence: torch.Tensor  # [g, 1] float32
    in_prompt: torch.Tensor  # [g, vocab] bool
    output_counts: torch.Tensor  # [g, vocab] int32; the one tensor that is written in place


class BiasColumns(NamedTuple):
    """Entries (row, token, bias): logit_bias, and -inf at stop tokens that would come too early.
    A row has any number of entries; g entries in all."""

    token_id: torch.Tensor  # [g] int64
    bias: torch.Tensor  # [g] float32
    until: torch.Tensor  # [g] int64, the bias holds while seq_len is below this


Columns = TypeVar("Columns", DrawColumns, PenaltyColumns, BiasColumns)


@dataclass(frozen=True)
class RowGroup(Generic[Columns]):
    """The rows of a batch that share a need, with their columns. Immutable: what changes is a new
    group, because a pass in flight may read the old one."""

    rows: npt.NDArray[np.int64]  # [g] rows of the batch, ascending
    row_index: torch.Tensor  # [g] int64, the same on the device
    columns: Columns

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], columns: Columns) -> RowGroup[Columns]:
        return cls(rows, to_device(rows, columns[0].device), columns)

    def __len__(self) -> int:
        return len(self.rows)

    def filtered(self, keep: npt.NDArray[np.int64]) -> RowGroup[Columns] | None:
        """The group once only rows `keep` (ascending, not empty) are left, renumbered."""
        places = np.searchsorted(keep, self.rows)
        stays = keep[np.minimum(places, len(keep) - 1)] == self.rows
        if stays.all():
            return RowGroup.of(places, self.columns)
        if not stays.any():
            return None
        gather = to_device(np.flatnonzero(stays), self.row_index.device)
        columns = type(self.columns)(*(column[gather] for column in self.columns))
        return RowGroup.of(places[stays], columns)

    def shifted(self, num_rows: int) -> RowGroup[Columns]:
        """The group once `num_rows` rows have been put before its batch."""
        return RowGroup(self.rows + num_rows, self.row_index + num_rows, self.columns)

    def followed_by(self, other: RowGroup[Columns]) -> RowGroup[Columns]:
        """Both groups, other's rows being higher than ours."""
        pairs = zip(self.columns, other.columns, strict=True)
        return RowGroup(
            np.concatenate([self.rows, other.rows]),
            torch.cat([self.row_index, other.row_index]),
            type(self.columns)(*(torch.cat(pair) for pair in pairs)),
        )


@dataclass
class SamplingBatch:
    """How each of `num_rows` rows picks its token. A row in no group is greedy and plain, so that
    a batch of such rows is no more than a number; the sampler sees on the host what it may skip."""

    num_rows: int
    draws: dict[DrawPath, RowGroup[DrawColumns]]
    penalties: RowGroup[PenaltyColumns] | None
    biases: RowGroup[BiasColumns] | None

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        prompt_ids: Sequence[Sequence[int] | npt.NDArray[np.integer]],
        output_ids: Sequence[Sequence[int]],
        stop_ids: Sequence[Sequence[int]],
        vocab_size: int,
        device: str | torch.device,
    ) -> SamplingBatch:
        """One row for each of `params`. `prompt_ids` are the client's prompt and `output_ids` what
        has been sampled since, also when both are about to be prefilled again. `stop_ids` are the
        tokens that end the row, forbidden before `min_new_tokens`. A row without a `sampling_seed`
        has seed 0. Token ids must have been checked against `vocab_size`."""
        return cls(
            num_rows=len(params),
            draws=_draw_groups(params, vocab_size, device),
            penalties=_penalty_group(params, prompt_ids, output_ids, vocab_size, device),
            biases=_bias_group(params, prompt_ids, stop_ids, device),
        )

    @property
    def is_plain(self) -> bool:
        """Every row is greedy over unadjusted logits."""
        return not self.draws and self.penalties is None and self.biases is None

    def snapshot(self) -> SamplingBatch:
        """A copy that later calls of `filter_batch` and `merge_batch` leave alone. Output counts
        are shared: they follow the tokens, not the pass."""
        return SamplingBatch(self.num_rows, dict(self.draws), self.penalties, self.biases)

    def filter_batch(self, keep: list[int]) -> None:
        """Keep rows `keep` (ascending)."""
        if len(keep) == self.num_rows:
            return
        self.num_rows = len(keep)
        if self.is_plain:
            return
        if not keep:
            self.draws, self.penalties, self.biases = {}, None, None
            return
        kept = np.array(keep, dtype=np.int64)
        filtered = {path: group.filtered(kept) for path, group in self.draws.items()}
        self.draws = {path: group for path, group in filtered.items() if group is not None}
        self.penalties = None if self.penalties is None else self.penalties.filtered(kept)
        self.biases = None if self.biases is None else self.biases.filtered(kept)

    def merge_batch(self, other: SamplingBatch) -> None:
        """Append other's rows below ours."""
        if not other.is_plain:
            draws = {
                path: _merged(self.draws.get(path), other.draws.get(path), self.num_rows)
                for path in DrawPath
            }
            self.draws = {path: group for path, group in draws.items() if group is not None}
            self.penalties = _merged(self.penalties, other.penalties, self.num_rows)
            self.biases = _merged(self.biases, other.biases, self.num_rows)
        self.num_rows += other.num_rows

    def append_tokens(self, next_token_ids: torch.Tensor) -> None:
        """Count the token [b] each row was given, where penalties need it."""
        if self.penalties is None:
            return
        tokens = next_token_ids[self.penalties.row_index].unsqueeze(1)  # [g, 1]
        counts = self.penalties.columns.output_counts
        counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))


def _merged(
    ours: RowGroup[Columns] | None, theirs: RowGroup[Columns] | None, num_rows: int
) -> RowGroup[Columns] | None:
    if theirs is None:
        return ours
    shifted = theirs.shifted(num_rows)
    return shifted if ours is None else ours.followed_by(shifted)


def _draw_path(params: SamplingParams, vocab_size: int) -> DrawPath | None:
    if params.is_greedy:
        return None
    if 0 < params.top_k <= MAX_SHORT_TOP_K:
        return DrawPath.SHORT
    if 0 < params.top_k < vocab_size or params.top_p < 1.0:
        return DrawPath.SORTED
    return DrawPath.WHOLE


def _draw_groups(
    params: Sequence[SamplingParams], vocab_size: int, device: str | torch.device
) -> dict[DrawPath, RowGroup[DrawColumns]]:
    rows_of: dict[DrawPath, list[int]] = {}
    for row, p in enumerate(params):
        path = _draw_path(p, vocab_size)
        if path is not None:
            rows_of.setdefault(path, []).append(row)
    return {
        path: RowGroup.of(
            np.array(rows, dtype=np.int64),
            _draw_columns([params[row] for row in rows], vocab_size, device),
        )
        for path, rows in rows_of.items()
    }


def _draw_columns(
    params: list[SamplingParams], vocab_size: int, device: str | torch.device
) -> DrawColumns:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), device)

    return DrawColumns(
        temperature=column([p.temperature for p in params], torch.float64),
        top_k=column([p.top_k if p.top_k > 0 else vocab_size for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float64),
        seed=column([p.sampling_seed or 0 for p in params], torch.int64),
    )


def _penalty_group(
    params: Sequence[SamplingParams],
    prompt_ids: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    output_ids: Sequence[Sequence[int]],
    vocab_size: int,
    device: str | torch.device,
) -> RowGroup[PenaltyColumns] | None:
    rows = [i for i, p in enumerate(params) if p.has_penalty]
    if not rows:
        return None
    in_prompt = np.zeros((len(rows), vocab_size), dtype=np.bool_)
    counts = np.zeros((len(rows), vocab_size), dtype=np.int32)
    for place, row in enumerate(rows):
        in_prompt[place, np.asarray(prompt_ids[row], dtype=np.int64)] = True
        np.add.at(counts[place], np.asarray(output_ids[row], dtype=np.int64), 1)

    def column(name: str) -> torch.Tensor:
        values = [[getattr(params[row], name)] for row in rows]
        return to_device(torch.tensor(values, dtype=torch.float32), device)

    columns = PenaltyColumns(
        repetition=column("repetition_penalty"),
        frequency=column("frequency_penalty"),
        presence=column("presence_penalty"),
        in_prompt=to_device(in_prompt, device),
        output_counts=to_device(counts, device),
    )
    return RowGroup.of(np.array(rows, dtype=np.int64), columns)


def _bias_group(
    params: Sequence[SamplingParams],
    prompt_ids: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    stop_ids: Sequence[Sequence[int]],
    device: str | torch.device,
) -> RowGroup[BiasColumns] | None:
    entries: list[tuple[int, int, float, int]] = []  # row, token_id, bias, until
    for row, p in enumerate(params):
        for token_id, bias in (p.logit_bias or {}).items():
            # float32 has no room for every JSON number; beyond this a bias decides alone anyway.
            entries.append((row, token_id, min(max(bias, -1e30), 1e30), sys.maxsize))
        if p.min_new_tokens > 0:
            until = len(prompt_ids[row]) + p.min_new_tokens
            entries.extend((row, token_id, -torch.inf, until) for token_id in stop_ids[row])
    if not entries:
        return None
    rows, token_ids, biases, untils = zip(*entries, strict=True)
    columns = BiasColumns(
        token_id=to_device(torch.tensor(token_ids, dtype=torch.int64), device),
        bias=to_device(torch.tensor(biases, dtype=torch.float32), device),
        until=to_device(torch.tensor(untils, dtype=torch.int64), device),
    )
    return RowGroup.of(np.array(rows, dtype=np.int64), columns)

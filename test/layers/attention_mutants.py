"""Bugs that attention kernels really have: masks, scales, window edges, bounds of splits."""

from __future__ import annotations

from mutate import Mutant

TILE = "srt/layers/attention_tile.py"
DECODE = "srt/layers/decode_attention.py"
EXTEND = "srt/layers/extend_attention.py"
BACKEND = "srt/layers/triton_attention.py"
COPY = "srt/device_copy.py"
DECODE_TESTS = ("test/layers/test_decode_attention.py",)
EXTEND_TESTS = ("test/layers/test_extend_attention.py",)
BOTH = EXTEND_TESTS + DECODE_TESTS
BACKEND_TESTS = ("test/layers/test_triton_attention.py",)
COPY_TESTS = ("test/test_device_copy.py",)

MUTANTS = [
    Mutant("causal mask is strict", TILE, "pos[None, :] <= q_pos", "pos[None, :] < q_pos", BOTH),
    Mutant("causal mask is late", TILE, "<= q_pos[:, None]\n", "<= q_pos[:, None] + 1\n", BOTH),
    Mutant(
        "window is one short", TILE, "q_pos[:, None] - WINDOW", "q_pos[:, None] - WINDOW + 1", BOTH
    ),
    Mutant(
        "window is one long", TILE, "q_pos[:, None] - WINDOW", "q_pos[:, None] - WINDOW - 1", BOTH
    ),
    Mutant(
        "scores beyond the end count",
        TILE,
        's = tl.where((pos < end)[None, :], s, float("-inf"))',
        "s = s + 0.0",
        BOTH,
    ),
    Mutant(
        "stale slots are read",
        TILE,
        "mask=pos < end, other=0)",
        "mask=pos < end + 64, other=0)",
        BOTH,
    ),
    Mutant(
        "rows beyond the end are read",
        TILE,
        "real = (pos < end)[:, None] if",
        "real = (pos < end + 64)[:, None] if",
        BOTH,
    ),
    Mutant("columns beyond D are read", TILE, "& (d < D)[None, :]", "& (d < D + 8)[None, :]", BOTH),
    Mutant(
        "the old sum is not rescaled",
        TILE,
        "else total * alpha + tl.sum(p, 1)",
        "else total + tl.sum(p, 1)",
        BOTH,
    ),
    Mutant(
        "the lazy sum is not rescaled",
        TILE,
        "total = total * alpha[:, None] + p",
        "total = total + p",
        DECODE_TESTS,
    ),
    Mutant("the old values are not rescaled", TILE, "v, acc * alpha[:, None]", "v, acc", BOTH),
    Mutant("the maximum is not scaled", TILE, "else top * scale", "else top", BOTH),
    Mutant(
        "the maximum forgets the past",
        TILE,
        "m_new = tl.maximum(m, top if LOGIT_CAP > 0 else top * scale)",
        "m_new = top if LOGIT_CAP > 0 else top * scale",
        BOTH,
    ),
    Mutant(
        "rows that saw nothing give NaN",
        TILE,
        'tl.where(m_new == float("-inf"), 0.0, m_new)',
        "m_new",
        EXTEND_TESTS,
    ),
    Mutant("values come from the keys", TILE, "v_columns = v_ptr", "v_columns = k_ptr", BOTH),
    Mutant("cap in other units", TILE, "LOGIT_CAP * 1.4426950408889634 *", "LOGIT_CAP *", BOTH),
    Mutant(
        "cap without its 2",
        TILE,
        "2 * LOG2_E * scale * k_scale / logit_cap",
        "LOG2_E * scale * k_scale / logit_cap",
        BOTH,
    ),
    Mutant(
        "capped scores are scaled again",
        TILE,
        "(s if LOGIT_CAP > 0 else s * scale)",
        "(s * scale)",
        BOTH,
    ),
    Mutant(
        "key scale is forgotten",
        TILE,
        "return LOG2_E * scale * k_scale",
        "return LOG2_E * scale",
        BOTH,
    ),
    Mutant(
        "e4m3 queries overflow",
        TILE,
        "tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)",
        "q.to(tl.float16)",
        BOTH,
    ),
    Mutant("float32 is cut to TF32", TILE, 'return "ieee" if', 'return "tf32" if', BOTH),
    # Decode
    Mutant(
        "window starts one late",
        DECODE,
        "tl.maximum(seq_len - WINDOW, 0)",
        "tl.maximum(seq_len - WINDOW + 1, 0)",
        DECODE_TESTS,
    ),
    Mutant(
        "window starts one early",
        DECODE,
        "tl.maximum(seq_len - WINDOW, 0)",
        "tl.maximum(seq_len - WINDOW - 1, 0)",
        DECODE_TESTS,
    ),
    Mutant(
        "a split ends late",
        DECODE,
        "tl.minimum(start + size, seq_len)",
        "tl.minimum(start + size + 1, seq_len)",
        DECODE_TESTS,
    ),
    Mutant(
        "a split has no end",
        DECODE,
        "end = tl.minimum(start + size, seq_len)",
        "end = start + size",
        DECODE_TESTS,
    ),
    Mutant(
        "splits start at the first key",
        DECODE,
        "start = base + (item - first) * size",
        "start = (item - first) * size",
        DECODE_TESTS,
    ),
    Mutant(
        "shares ignore the window",
        DECODE,
        "tl.cdiv(seq_len - base, splits)",
        "tl.cdiv(seq_len, splits)",
        DECODE_TESTS,
    ),
    Mutant(
        "shares are rounded down",
        DECODE,
        "tl.cdiv(tl.cdiv(seq_len - base, splits), BLOCK_N) * BLOCK_N",
        "tl.maximum((seq_len - base) // splits // BLOCK_N, 1) * BLOCK_N",
        DECODE_TESTS,
    ),
    Mutant(
        "partial tiles count as whole",
        DECODE,
        "whole = start + (end - start) // BLOCK_N * BLOCK_N",
        "whole = start + tl.cdiv(end - start, BLOCK_N) * BLOCK_N",
        DECODE_TESTS,
    ),
    Mutant(
        "keys of the first head",
        DECODE,
        "k_head = k_ptr + kv_head * D",
        "k_head = k_ptr",
        DECODE_TESTS,
    ),
    Mutant(
        "values of the first head",
        DECODE,
        "v_head = v_ptr + kv_head * D",
        "v_head = v_ptr",
        DECODE_TESTS,
    ),
    Mutant(
        "padding heads are real", DECODE, "real = heads < G", "real = heads < G + 1", DECODE_TESTS
    ),
    Mutant(
        "second tile of heads is lost",
        DECODE,
        "tl.program_id(0) % TILES * BLOCK_H",
        "0 * TILES",
        DECODE_TESTS,
    ),
    Mutant("value scale is forgotten", DECODE, "(v_scale / total)", "(1.0 / total)", DECODE_TESTS),
    Mutant(
        "an empty row gives NaN",
        DECODE,
        "total = tl.where(total > 0, total, 1.0)",
        "total = total",
        DECODE_TESTS,
    ),
    Mutant(
        "log-sum without the maximum", DECODE, "m + tl.log2(total)", "tl.log2(total)", DECODE_TESTS
    ),
    Mutant("log-sum in other units", DECODE, "tl.log2(total)", "tl.log(total)", DECODE_TESTS),
    Mutant(
        "reduce reads an item too many",
        DECODE,
        "real = item < last",
        "real = item <= last",
        DECODE_TESTS,
    ),
    Mutant(
        "reduce skips requests of two items",
        DECODE,
        "if last - first == 1:",
        "if last - first <= 2:",
        DECODE_TESTS,
    ),
    Mutant(
        "reduce does not rescale",
        DECODE,
        "acc = acc * alpha + tl.sum(weight[:, None] * partial, 0)",
        "acc = acc + tl.sum(weight[:, None] * partial, 0)",
        DECODE_TESTS,
    ),
    Mutant(
        "plan ignores the window",
        DECODE,
        "lens = tl.minimum(lens, WINDOW)",
        "lens = lens",
        DECODE_TESTS,
    ),
    Mutant("plan loses rows without keys", DECODE, "tl.maximum(splits, 1)", "splits", DECODE_TESTS),
    Mutant(
        "plan keeps old items",
        DECODE,
        "tl.store(items_ptr + i, -1, mask=(i >= tl.sum(splits, 0)) & (i < num_items))",
        "tl.store(items_ptr + i, -1, mask=(i > tl.sum(splits, 0)) & (i < num_items))",
        DECODE_TESTS,
    ),
    Mutant("plan writes beyond the list", DECODE, "& (i < num_items))", ")", DECODE_TESTS),
    Mutant(
        "plan has no shortest split",
        DECODE,
        "tl.maximum(tl.cdiv(tl.sum(lens, 0), item_budget), MIN_SPLIT)",
        "tl.cdiv(tl.sum(lens, 0), item_budget)",
        DECODE_TESTS,
    ),
    Mutant(
        "invariant splits look at the batch",
        DECODE,
        "tl.cdiv(lens, INVARIANT_SPLIT)",
        "tl.cdiv(lens, INVARIANT_SPLIT // batch)",
        DECODE_TESTS,
    ),
    Mutant(
        "invariant splits are not bounded",
        DECODE,
        "tl.minimum(tl.cdiv(lens, INVARIANT_SPLIT), INVARIANT_MAX_SPLITS)",
        "tl.cdiv(lens, INVARIANT_SPLIT)",
        DECODE_TESTS,
    ),
    # Extend
    Mutant(
        "heads and tokens are swapped",
        EXTEND,
        "heads = kv_head * G + row % G",
        "heads = kv_head * G + row // TOKENS",
        EXTEND_TESTS,
    ),
    Mutant(
        "rows beyond the last token are stored",
        EXTEND,
        "(token < extend_len) & (row < TOKENS * G)",
        "(row < TOKENS * G)",
        EXTEND_TESTS,
    ),
    Mutant(
        "rows beyond the last head are stored",
        EXTEND,
        "(token < extend_len) & (row < TOKENS * G)",
        "(token < extend_len)",
        EXTEND_TESTS,
    ),
    Mutant(
        "positions ignore the prefix",
        EXTEND,
        "q_pos = prefix_len + token",
        "q_pos = token",
        EXTEND_TESTS,
    ),
    Mutant(
        "untested tiles reach too far",
        EXTEND,
        "(lowest + 1) // BLOCK_N * BLOCK_N",
        "(lowest + 1 + BLOCK_N) // BLOCK_N * BLOCK_N",
        EXTEND_TESTS,
    ),
    Mutant(
        "untested tiles reach one too far",
        EXTEND,
        "(lowest + 1) // BLOCK_N * BLOCK_N",
        "(lowest + 2) // BLOCK_N * BLOCK_N",
        EXTEND_TESTS,
    ),
    Mutant("the last key is lost", EXTEND, "last = highest + 1", "last = highest", EXTEND_TESTS),
    Mutant(
        "keys before the window are lost",
        EXTEND,
        "tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N",
        "(tl.maximum(lowest - WINDOW + 1, 0) + BLOCK_N - 1) // BLOCK_N",
        EXTEND_TESTS,
    ),
    Mutant(
        "the window's edge is not tested",
        EXTEND,
        "all_from = tl.minimum(tl.cdiv(cut, BLOCK_N) * BLOCK_N, last)",
        "all_from = first",
        EXTEND_TESTS,
    ),
    Mutant(
        "the window's edge ends a tile early",
        EXTEND,
        "tl.cdiv(cut, BLOCK_N) * BLOCK_N",
        "cut // BLOCK_N * BLOCK_N",
        EXTEND_TESTS,
    ),
    Mutant(
        "edges overlap",
        EXTEND,
        "(lowest + 1) // BLOCK_N * BLOCK_N, all_from)",
        "(lowest + 1) // BLOCK_N * BLOCK_N, first)",
        EXTEND_TESTS,
    ),
    Mutant(
        "keys of the first head (extend)",
        EXTEND,
        "k_head = k_ptr + kv_head * D",
        "k_head = k_ptr",
        EXTEND_TESTS,
    ),
    Mutant(
        "value scale is forgotten (extend)",
        EXTEND,
        "(v_scale / tl.where",
        "(1.0 / tl.where",
        EXTEND_TESTS,
    ),
    Mutant(
        "tiles start at the first request",
        EXTEND,
        "q_start = (np.cumsum(lens) - lens)[request]",
        "q_start = np.cumsum(lens)[request]",
        EXTEND_TESTS,
    ),
    # Backend
    Mutant(
        "keys are written after they are read",
        BACKEND,
        "        self.kv_cache.set_kv(layer.layer_id, self.batch.out_cache_loc, k, v)\n",
        "",
        BACKEND_TESTS,
    ),
    Mutant(
        "copies to the device wait",
        COPY,
        "to(device, non_blocking=True)",
        "to(device)",
        COPY_TESTS,
    ),
    Mutant("copies to the device are not pinned", COPY, ".pin_memory()", "", COPY_TESTS),
    Mutant(
        "tokens are read before they have arrived",
        COPY,
        "self._arrived.synchronize()",
        "pass",
        COPY_TESTS,
    ),
    Mutant(
        "strided queries are read as packed",
        DECODE,
        "        q.stride(0),\n",
        "        out.stride(0),\n",
        BACKEND_TESTS,
    ),
    Mutant(
        "strided queries are read as packed (extend)",
        EXTEND,
        "        q.stride(0),\n",
        "        out.stride(0),\n",
        BACKEND_TESTS,
    ),
    Mutant(
        "plans of two windows are one",
        BACKEND,
        "window: scratch.for_another_window() for window",
        "window: scratch for window",
        BACKEND_TESTS,
    ),
]

"""Bugs that sampling kernels really have: ties, draws, boundaries of searches."""

from __future__ import annotations

from mutate import Mutant

MATH = "srt/layers/sampling_math.py"
WHOLE = "srt/layers/fused_sampler.py"
TOP = "srt/layers/fused_top_sampler.py"
SAMPLER = "test/layers/test_fused_sampler.py"


def of_sampler(words: str) -> tuple[str, ...]:
    return (SAMPLER, "-k", words)


MUTANTS = [
    # Numbers of the sampler
    Mutant(
        "a bit of the number is lost",
        MATH,
        "(_mix(state) >> 11)",
        "(_mix(state) >> 12 << 1)",
        of_sampler("uniform"),
    ),
    Mutant(
        "the position counts from one",
        MATH,
        "state += position",
        "state += 1 + position",
        of_sampler("uniform"),
    ),
    Mutant(
        "equal logits by falling id",
        MATH,
        "token.to(tl.int64)",
        "(LOW_WORD - token.to(tl.int64))",
        of_sampler("keys"),
    ),
    Mutant(
        "negative logits in reverse",
        MATH,
        "falling = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))",
        "falling = ~bits",
        of_sampler("keys"),
    ),
    Mutant(
        "weights in float32",
        MATH,
        "x.to(tl.float64) - best.to(tl.float64)",
        "(x - best).to(tl.float64)",
        of_sampler("list_holds"),
    ),
    Mutant(
        "temperature multiplies",
        MATH,
        "tl.exp(below / temperature)",
        "tl.exp(below * temperature)",
        of_sampler("all_knobs"),
    ),
    Mutant(
        "infinity minus infinity",
        MATH,
        "below = tl.where(x == best, 0.0, x.to(tl.float64) - best.to(tl.float64))",
        "below = x.to(tl.float64) - best.to(tl.float64)",
        of_sampler("without_meaning"),
    ),
    Mutant(
        "NaN is the best",
        MATH,
        'tl.where(x == x, x, float("-inf"))',
        "x",
        of_sampler("nan or meaning"),
    ),
    Mutant(
        "min-p of half",
        MATH,
        "tl.ceil(min_p * MAX_WEIGHT)",
        "tl.ceil(0.5 * min_p * MAX_WEIGHT)",
        of_sampler("all_knobs"),
    ),
    Mutant(
        "logits beyond the vocabulary",
        MATH,
        "mask=token < vocab_size",
        "mask=token <= vocab_size",
        of_sampler("boundary"),
    ),
    Mutant(
        "bins ignore the temperature",
        MATH,
        "temperature * ZERO_DISTANCE",
        "ZERO_DISTANCE",
        of_sampler("boundary"),
    ),
    # From the whole vocabulary
    Mutant(
        "minus zero is less likely", WHOLE, "tl.where(x == 0.0, 0.0, x)", "x", of_sampler("zeros")
    ),
    Mutant(
        "the lower token at a boundary",
        WHOLE,
        "tl.cumsum(weights, 0) <= target",
        "tl.cumsum(weights, 0) < target",
        of_sampler("boundary"),
    ),
    Mutant(
        "the lower chunk at a boundary",
        WHOLE,
        "tl.cumsum(chunk_weights, 0) <= target",
        "tl.cumsum(chunk_weights, 0) < target",
        of_sampler("boundary"),
    ),
    Mutant(
        "a chunk starts from nothing",
        WHOLE,
        "target -= tl.sum(",
        "target -= 0 * tl.sum(",
        of_sampler("any_size"),
    ),
    Mutant(
        "min-p is ignored in a chunk",
        WHOLE,
        "weights = tl.where((token < vocab_size) & (weights >= least), weights, 0)\n    is_before",
        "weights = tl.where(token < vocab_size, weights, 0)\n    is_before",
        of_sampler("all_knobs"),
    ),
    Mutant(
        "min-p is ignored over chunks",
        WHOLE,
        "weights = tl.where((token < vocab_size) & (weights >= least), weights, 0)\n    tl.store",
        "weights = tl.where(token < vocab_size, weights, 0)\n    tl.store",
        of_sampler("any_size"),
    ),
    # From the best of it
    Mutant(
        "a bin too few for top-k",
        TOP,
        "< top_k).to(tl.int32), 0) + 1",
        "< top_k).to(tl.int32), 0)",
        of_sampler("boundary"),
    ),
    Mutant(
        "a bin too many for top-k",
        TOP,
        "(tl.cumsum(counts, 0) < top_k)",
        "(tl.cumsum(counts, 0) <= top_k + 40)",
        of_sampler("list_holds"),
    ),
    Mutant(
        "the tail may weigh p",
        TOP,
        "(1.0 - tl.load(top_p_ptr + place))",
        "tl.load(top_p_ptr + place)",
        of_sampler("all_knobs"),
    ),
    Mutant(
        "the tail without its first bin",
        TOP,
        "tl.cumsum(bin_weights, 0) + bin_weights",
        "tl.cumsum(bin_weights, 0)",
        of_sampler("boundary"),
    ),
    Mutant(
        "no tail is left out",
        TOP,
        "bins_kept = tl.sum((tail > left_out).to(tl.int32), 0)",
        "bins_kept = BINS",
        of_sampler("list_holds"),
    ),
    Mutant(
        "weightless tokens are listed",
        TOP,
        "bins_kept = tl.minimum(bins_kept, BINS - 1)",
        "bins_kept = tl.minimum(bins_kept, BINS)",
        of_sampler("without_weight"),
    ),
    Mutant(
        "entries overwrite each other",
        TOP,
        "tl.cumsum(is_kept.to(tl.int32), 0) - 1",
        "tl.cumsum(is_kept.to(tl.int32), 0) // 2",
        of_sampler("boundary"),
    ),
    Mutant(
        "top-k is not applied",
        TOP,
        "if top_k < length:",
        "if top_k < 0:",
        of_sampler("equal_logits"),
    ),
    Mutant(
        "top-k keeps one more",
        TOP,
        "length, top_k, before_best, True",
        "length, top_k + 1, before_best, True",
        of_sampler("two_levels"),
    ),
    Mutant(
        "top-p of the list only",
        TOP,
        "total = total_weight(chunk_weights_ptr, place, chunks, BLOCK_C)",
        "total += 0",
        of_sampler("all_knobs"),
    ),
    Mutant(
        "top-p is not applied", TOP, "if top_p < 1.0:", "if top_p < 0.0:", of_sampler("all_knobs")
    ),
    Mutant(
        "top-p of all that top-k drops",
        TOP,
        "weights = tl.where(key <= last_key, weights, 0)",
        "weights = weights + 0",
        of_sampler("equal_logits"),
    ),
    Mutant(
        "min-p is ignored",
        TOP,
        "tl.minimum(total, tl.sum(in_min_p, 0))",
        "total",
        of_sampler("all_knobs"),
    ),
    Mutant(
        "the lower token at a number",
        TOP,
        "target + 1, before_best, False",
        "target, before_best, False",
        of_sampler("boundary"),
    ),
    Mutant("a search needs more", TOP, "sum_in >= need", "sum_in > need", of_sampler("search")),
    Mutant(
        "a search skips a key",
        TOP,
        "tl.min(first_out, 0) - 1",
        "tl.min(first_out, 0)",
        of_sampler("search"),
    ),
    Mutant(
        "a search sees one tile",
        TOP,
        "amount += tl.where(is_in, weights, 0)",
        "amount = tl.where(is_in, weights, 0)",
        of_sampler("tile or search"),
    ),
    Mutant(
        "the list of another row",
        TOP,
        "keys_ptr += place * vocab_size",
        "keys_ptr += 0 * vocab_size",
        of_sampler("all_knobs"),
    ),
]

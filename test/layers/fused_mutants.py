"""Bugs that small kernels really have: masks, strides, signs, roundings."""

from __future__ import annotations

from mutate import Mutant

NORM = "srt/layers/fused_norm.py"
ACTIVATION = "srt/layers/fused_activation.py"
ROPE = "srt/layers/fused_rope_kv.py"
PENALTIES = "srt/layers/fused_penalties.py"
LINEAR = "srt/layers/invariant_linear.py"
NORM_TESTS = ("test/layers/test_fused_norm.py",)
ACTIVATION_TESTS = ("test/layers/test_fused_activation.py",)
LINEAR_TESTS = ("test/layers/test_invariant_linear.py",)
ROPE_TESTS = ("test/layers/test_fused_rope_kv.py",)
PENALTY_TESTS = ("test/layers/test_fused_penalties.py",)
DISPATCH_TESTS = ("test/layers/test_fused_dispatch.py",)


MUTANTS = [
    # Norm
    Mutant("eps is forgotten", NORM, "mean_square + eps", "mean_square", NORM_TESTS),
    Mutant(
        "mean over the padding",
        NORM,
        "tl.sum(x * x, 1) / SIZE",
        "tl.sum(x * x, 1) / BLOCK",
        NORM_TESTS,
    ),
    Mutant("Gemma's one is forgotten", NORM, "weight += 1.0", "weight += 0.0", NORM_TESTS),
    Mutant("the sum is not rounded", NORM, "x = total.to(tl.float32)", "x += 0.0", NORM_TESTS),
    Mutant(
        "the sum is not normalised",
        NORM,
        "tl.store(total_ptr + out, total,",
        "tl.store(total_ptr + out, residual_row[:, None],",
        NORM_TESTS,
    ),
    Mutant(
        "residual with the update's stride",
        NORM,
        "outer * stride_residual_outer",
        "outer * stride_x_outer",
        NORM_TESTS,
    ),
    Mutant(
        "residual heads with the update's stride",
        NORM,
        "inner * stride_residual_inner",
        "inner * stride_x_inner",
        NORM_TESTS,
    ),
    Mutant(
        "token and head swapped",
        NORM,
        "row // INNER, row % INNER",
        "row % INNER, row // INNER",
        NORM_TESTS,
    ),
    Mutant(
        "rows beyond the last",
        NORM,
        "(row < num_rows)[:, None]",
        "(row < num_rows + 1)[:, None]",
        NORM_TESTS,
    ),
    Mutant(
        "columns beyond the last",
        NORM,
        "(column < SIZE)[None, :]",
        "(column < SIZE + 1)[None, :]",
        NORM_TESTS,
    ),
    # Activation
    Mutant(
        "halves overlap", ACTIVATION, "gate_ptr + size", "gate_ptr + size - 1", ACTIVATION_TESTS
    ),
    Mutant("one column too many", ACTIVATION, "column < size", "column <= size", ACTIVATION_TESTS),
    Mutant(
        "rows have no gaps",
        ACTIVATION,
        "row * stride_gate_up_n",
        "row * size * 2",
        ACTIVATION_TESTS,
    ),
    Mutant("tanh's cube is off", ACTIVATION, "0.044715", "0.0447", ACTIVATION_TESTS),
    Mutant(
        "tanh without its root",
        ACTIVATION,
        "math.sqrt(8 / math.pi)",
        "math.sqrt(2 / math.pi)",
        ACTIVATION_TESTS,
    ),
    Mutant(
        "erf without its root",
        ACTIVATION,
        "tl.erf(gate * SQRT_HALF)",
        "tl.erf(gate)",
        ACTIVATION_TESTS,
    ),
    # Rotation
    Mutant("turned the other way", ROPE, "x * cos - y * sin", "x * cos + y * sin", ROPE_TESTS),
    Mutant("second half turned back", ROPE, "y * cos + x * sin", "y * cos - x * sin", ROPE_TESTS),
    Mutant("slot 0 is written", ROPE, "tl.where(slot > 0,", "tl.where(slot >= 0,", ROPE_TESTS),
    Mutant(
        "keys are not rotated",
        ROPE,
        "_scaled(turned_first, k_scale",
        "_scaled(first, k_scale",
        ROPE_TESTS,
    ),
    Mutant(
        "second halves of keys are not rotated",
        ROPE,
        "_scaled(turned_second, k_scale",
        "_scaled(second, k_scale",
        ROPE_TESTS,
    ),
    Mutant(
        "values with the scale of keys",
        ROPE,
        "_scaled(first, v_scale",
        "_scaled(first, k_scale",
        ROPE_TESTS,
    ),
    Mutant(
        "values are rotated",
        ROPE,
        "_scaled(second, v_scale",
        "_scaled(turned_second, v_scale",
        ROPE_TESTS,
    ),
    Mutant(
        "scales multiply", ROPE, "x.to(tl.float32) / scale", "x.to(tl.float32) * scale", ROPE_TESTS
    ),
    Mutant(
        "a norm is not rounded",
        ROPE,
        "x, y = x.to(first.dtype).to(tl.float32), y.to(first.dtype).to(tl.float32)",
        "x, y = x, y",
        ROPE_TESTS,
    ),
    Mutant(
        "keys get the queries' norm",
        ROPE,
        "q_weight[None, :], k_weight[None, :]",
        "q_weight[None, :], q_weight[None, :]",
        ROPE_TESTS,
    ),
    Mutant(
        "eps of a norm is forgotten",
        ROPE,
        "square / HEAD_DIM + eps",
        "square / HEAD_DIM",
        ROPE_TESTS,
    ),
    Mutant("mean over what turns", ROPE, "square / HEAD_DIM", "square / (2 * HALF)", ROPE_TESTS),
    Mutant(
        "the rest has no norm",
        ROPE,
        "kept = (z * weight * inverse).to(first.dtype)",
        "kept = rest",
        ROPE_TESTS,
    ),
    Mutant(
        "the rest is not in the norm",
        ROPE,
        "square += tl.sum(z * z, 1)",
        "square += 0.0",
        ROPE_TESTS,
    ),
    Mutant(
        "the last key head is a value",
        ROPE,
        "kv_head >= NUM_KV_HEADS\n",
        "kv_head >= NUM_KV_HEADS - 1\n",
        ROPE_TESTS,
    ),
    Mutant(
        "values one head on",
        ROPE,
        "(kv_head - NUM_KV_HEADS)[:, None]",
        "(kv_head - NUM_KV_HEADS + 1)[:, None]",
        ROPE_TESTS,
    ),
    Mutant(
        "heads beyond the last",
        ROPE,
        "head < NUM_HEADS + 2 * NUM_KV_HEADS",
        "head < NUM_HEADS + 2 * NUM_KV_HEADS + 1",
        ROPE_TESTS,
    ),
    Mutant(
        "keys among the queries",
        ROPE,
        "keep & (head < NUM_HEADS)[:, None]",
        "keep & (head <= NUM_HEADS)[:, None]",
        ROPE_TESTS,
    ),
    # Penalties
    Mutant(
        "outputs are not repeated tokens",
        PENALTIES,
        "in_prompt | (count > 0)",
        "in_prompt",
        PENALTY_TESTS,
    ),
    Mutant(
        "a penalty helps negative logits",
        PENALTIES,
        "tl.where(x > 0, tl.div_rn",
        "tl.where(x > -9, tl.div_rn",
        PENALTY_TESTS,
    ),
    Mutant(
        "presence by count",
        PENALTIES,
        "tl.where(count > 0, presence, 0.0)",
        "presence * count.to(tl.float32)",
        PENALTY_TESTS,
    ),
    Mutant(
        "frequency once",
        PENALTIES,
        "frequency * count.to(tl.float32)",
        "tl.where(count > 0, frequency, 0.0)",
        PENALTY_TESTS,
    ),
    Mutant(
        "every row is penalised",
        PENALTIES,
        "tl.where(rows == row, group, -1)",
        "tl.where(rows == row, group, 0)",
        PENALTY_TESTS,
    ),
    Mutant(
        "a stop token one step too late",
        PENALTIES,
        "seq_len < until",
        "seq_len <= until",
        PENALTY_TESTS,
    ),
    Mutant(
        "one bias too many", PENALTIES, "entry < num_biases", "entry <= num_biases", PENALTY_TESTS
    ),
    Mutant(
        "biases of the first row",
        PENALTIES,
        "logits_ptr + row * stride_logits_b + token\n    tl.atomic",
        "logits_ptr + token\n    tl.atomic",
        PENALTY_TESTS,
    ),
    # Dispatch
    Mutant(
        "CUDA norms in torch",
        "srt/layers/layernorm.py",
        "if x.is_cuda:",
        "if x.is_mps:",
        DISPATCH_TESTS,
    ),
    Mutant(
        "CUDA sums in torch",
        "srt/layers/layernorm.py",
        "if residual.is_cuda:",
        "if residual.is_mps:",
        DISPATCH_TESTS,
    ),
    Mutant(
        "Gemma norms as others",
        "srt/layers/layernorm.py",
        "adds_one = True",
        "adds_one = False",
        DISPATCH_TESTS,
    ),
    Mutant(
        "CUDA activations in torch",
        "srt/layers/activation.py",
        "if gate_up.is_cuda:",
        "if gate_up.is_mps:",
        DISPATCH_TESTS,
    ),
    Mutant(
        "CUDA rotations in torch",
        "srt/layers/rotary_embedding.py",
        "if x.is_cuda:",
        "if x.is_mps:",
        DISPATCH_TESTS,
    ),
    Mutant(
        "CUDA sampling in torch",
        "srt/layers/sampler.py",
        "if logits.is_cuda:\n        # Not",
        "if logits.is_mps:\n        # Not",
        DISPATCH_TESTS,
    ),
    Mutant(
        "CUDA penalties in torch",
        "srt/layers/sampler.py",
        "if logits.is_cuda:\n        from",
        "if logits.is_mps:\n        from",
        DISPATCH_TESTS,
    ),
    # Batch-invariant products
    Mutant(
        "the last inputs are cut off",
        LINEAR,
        "range(0, IN_SIZE, B",
        "range(0, IN_SIZE - BLOCK_K + 1, B",
        LINEAR_TESTS,
    ),
    Mutant(
        "inputs beyond the last count", LINEAR, "is_row & inside[None, :]", "is_row", LINEAR_TESTS
    ),
    Mutant("the bias is forgotten", LINEAR, "total += bias", "total += 0.0 * bias", LINEAR_TESTS),
    Mutant(
        "rows with the output's stride",
        LINEAR,
        "row[:, None] * stride_x",
        "row[:, None] * IN_SIZE",
        LINEAR_TESTS,
    ),
    Mutant(
        "strided inputs are read as packed",
        LINEAR,
        "if x.stride(1) != 1:",
        "if x.stride(1) == 0:",
        LINEAR_TESTS,
    ),
    Mutant(
        "float32 is rounded to TF32", LINEAR, 'PRECISION="ieee"', 'PRECISION="tf32"', LINEAR_TESTS
    ),
    Mutant(
        "rows beyond the last are stored",
        LINEAR,
        "mask=is_row & is_column)",
        "mask=is_column)",
        LINEAR_TESTS,
    ),
]

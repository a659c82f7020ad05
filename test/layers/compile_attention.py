"""Runs attention passes on fake CUDA and compiles what they launch: compile_attention.py ARCH."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/tools")]

import torch  # noqa: E402
from aot_check import TARGETS  # noqa: E402
from fake_cuda import FakeCuda  # noqa: E402

from srt.forward_batch import ForwardBatch, ForwardMode  # noqa: E402
from srt.layers.attention import Attention  # noqa: E402
from srt.layers.triton_attention import GpuFacts, TritonAttentionBackend  # noqa: E402
from srt.mem_cache.kv_cache import KVCache  # noqa: E402

NUM_HEADS, NUM_KV_HEADS, SCALE = 8, 2, 0.1
# head_dim, dtype, window, logit_cap: each family of kernels once.
PASSES = [
    (64, torch.bfloat16, None, 0.0),
    (96, torch.float16, None, 0.0),
    (128, torch.bfloat16, 4096, 0.0),
    (256, torch.bfloat16, 1024, 50.0),
    (64, torch.float32, None, 0.0),
]


def run_pass(
    mode: ForwardMode, head_dim: int, dtype: torch.dtype, window: int | None, logit_cap: float
) -> None:
    cache = KVCache(64, 1, NUM_KV_HEADS, head_dim, dtype, "cuda")
    table = torch.zeros(9, 64, dtype=torch.int32, device="cuda")
    backend = TritonAttentionBackend(
        cache, table, NUM_HEADS, dtype, {window}, 8, GpuFacts.of(torch.device("cuda"))
    )
    extend_lens = [1, 1, 1] if mode is ForwardMode.DECODE else [40, 1, 7]
    n = sum(extend_lens)

    def numbers(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device="cuda")

    batch = ForwardBatch(
        mode, numbers(n), numbers(n), numbers(3), numbers(3), numbers(3), numbers(n),
        [60, 5, 9], extend_lens, None,
    )  # fmt: skip
    heads = torch.empty(n, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, dtype=dtype, device="cuda")
    angles = torch.empty(n, 1, head_dim // 2, device="cuda")
    backend.plan(batch)
    layer = Attention(0, NUM_HEADS, NUM_KV_HEADS, head_dim, SCALE, window, logit_cap)
    layer(heads, angles, angles, backend)


def main(arch: int) -> int:
    with FakeCuda(arch, compile=True) as cuda:
        for head_dim, dtype, window, logit_cap in PASSES:
            for mode in ForwardMode:
                run_pass(mode, head_dim, dtype, window, logit_cap)
    limit = TARGETS[arch].shared_per_cta
    for launch in cuda.launches:
        assert launch.compiled.metadata.shared <= limit, (launch.name, launch.arguments)
    names = {launch.name for launch in cuda.launches}
    print(f"sm_{arch}: {len(cuda.launches)} launches of {sorted(names)} compiled")
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

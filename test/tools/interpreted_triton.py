"""Runs Triton kernels on the CPU, as a GPU would: true bf16 and TF32, checked memory, no races."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as ti
from triton.runtime.jit import JITFunction

Builder = ti.InterpreterBuilder
Handle = ti.TensorHandle

TORCH_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
# What a lane holds after a masked load that names no `other`: on a GPU, anything.
UNDEFINED_INT = 0x55


class MemoryFault(RuntimeError):
    """A program touched bytes that belong to no tensor of its launch."""


class RaceFault(RuntimeError):
    """Two programs of one launch touched the same bytes, and one of them wrote."""


def install() -> None:
    """From here on every @triton.jit function of this process is interpreted, also those of
    triton.language and of our own modules that were decorated earlier. Idempotent."""
    if getattr(Builder, "is_trustworthy", False):
        return
    Builder.is_trustworthy = True
    _interpret_in_this_process()
    _interpret_decorated_functions()
    _install_numerics()
    _install_memory_checks()
    _install_launch()


def _interpret_in_this_process() -> None:
    """Triton sets its variable in the environment along with the knob; what this process starts,
    the ahead-of-time check for one, must not inherit it."""
    before = os.environ.get("TRITON_INTERPRET")
    triton.knobs.runtime.interpret = True
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)


def _interpret_decorated_functions() -> None:
    """Order does not matter then: torch._dynamo, say, may have imported triton before us."""
    interpreted: dict[int, Any] = {}
    owners: list[Any] = [tl.tensor]
    for name, module in list(sys.modules.items()):
        if name.startswith(("srt.", "triton.language")) and module is not None:
            owners.append(module)
    for owner in owners:
        for attr, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                if id(value) not in interpreted:
                    interpreted[id(value)] = ti.InterpretedFunction(value.fn)
                setattr(owner, attr, interpreted[id(value)])


# --- numerics ----------------------------------------------------------------------------------


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest bf16, ties to even, kept in float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32("nan"), rounded.view(np.float32))


def truncate_to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 without its low 13 bits. Neither Triton 3.6 nor 3.9 converts the operands (there is
    no cvt.rna.tf32 in its PTX), and the tensor core does not look at those bits."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _is_bf16(dtype: Any) -> bool:
    return not isinstance(dtype, tl.pointer_type) and dtype.scalar == tl.bfloat16


def _decode(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """Bytes of a small float type to float32."""
    if dtype == tl.bfloat16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    raw = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8))
    return raw.view(TORCH_FP8[dtype]).float().numpy()


def _encode(x: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 to the bytes of a small float type, to nearest even. fp8 saturates, as the GPU's
    conversion does (torch's gives NaN)."""
    if dtype == tl.bfloat16:
        return (round_to_bf16(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    target = TORCH_FP8[dtype]
    limit = torch.finfo(target).max
    values = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).clamp(-limit, limit)
    return values.to(target).view(torch.uint8).numpy()


def _replace(name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a builder method; the new one gets the old one as its first argument."""
    original = getattr(Builder, name)

    def decorate(new: Callable[..., Any]) -> None:
        setattr(Builder, name, lambda self, *args, **kw: new(original, self, *args, **kw))

    return decorate


def _install_numerics() -> None:
    """The stock interpreter keeps bf16 as uint16 and computes with the bit patterns. Here a bf16
    handle holds float32 values, and every handle that is made rounds them: one place for all
    operators. Memory is the only place that sees 16 bits."""
    np_dtype, check_size, post_init = (
        ti._get_np_dtype,
        ti._validate_np_data_size,
        Handle.__post_init__,
    )

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.float32) if scalar == tl.bfloat16 else np_dtype(dtype)

    def handle_post_init(self: Any) -> None:
        # A comparison keeps the type of its operands, with booleans inside.
        if _is_bf16(self.dtype) and self.data.dtype != np.bool_:
            self.data = round_to_bf16(self.data)
        post_init(self)

    ti._get_np_dtype = get_np_dtype
    ti._validate_np_data_size = lambda data, dtype: _is_bf16(dtype) or check_size(data, dtype)
    Handle.__post_init__ = handle_post_init

    @_replace("cast_impl")
    def cast_impl(original: Any, self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bf16(src.dtype) or _is_bf16(dst_type):
            return Handle(src.data.astype(get_np_dtype(dst_type)), dst_type.scalar)
        return original(self, src, dst_type)

    @_replace("create_fp_to_fp")
    def fp_to_fp(original: Any, self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if rounding not in (None, ti._ir.ROUNDING_MODE.RTNE):
            return original(self, src, dst_type, rounding)
        x = _decode(src.data, source) if source in TORCH_FP8 else src.data
        if target in TORCH_FP8:
            return Handle(_encode(x, target), target)
        return Handle(x.astype(get_np_dtype(target)), target)

    @_replace("create_bitcast")
    def bitcast(original: Any, self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bf16(src.dtype):
            src = Handle(_encode(src.data, tl.bfloat16), tl.uint16)
        if _is_bf16(dst_type):
            bits = original(self, src, tl.uint16)
            return Handle(_decode(bits.data, tl.bfloat16), tl.bfloat16)
        return original(self, src, dst_type)

    @_replace("create_fabs")
    def fabs(original: Any, self: Any, arg: Any) -> Any:
        return Handle(np.abs(arg.data), tl.bfloat16) if _is_bf16(arg.dtype) else original(self, arg)

    @_replace("create_dot")
    def dot(original: Any, self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        operands = []
        for operand in (a, b):
            scalar, x = operand.dtype.scalar, operand.data
            if scalar in TORCH_FP8:
                x = _decode(x, scalar)
            elif scalar == tl.float32 and precision == ti._ir.INPUT_PRECISION.TF32:
                x = truncate_to_tf32(x)
            elif scalar == tl.float16:
                x = x.astype(np.float32)
            operands.append(x)
        return Handle(np.matmul(*operands, dtype=d.data.dtype) + d.data, d.dtype.scalar)


# --- memory ------------------------------------------------------------------------------------


class LaunchMemory:
    """The bytes of the tensors of one launch: which of them a program may touch, and who did."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self.starts = np.array(sorted(storages), dtype=np.uint64)
        sizes = [storages[int(start)].nbytes() for start in self.starts]
        self.sizes = np.array(sizes, dtype=np.uint64)
        # Storages lie end to end in one shadow of a byte each.
        self.shadow_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        total = int(self.shadow_starts[-1])
        self.allowed = np.zeros(total, dtype=bool)
        for tensor in tensors:
            self._allow(tensor)
        self.writer = np.full(total, -1, dtype=np.int32)
        self.reader = np.full(total, -1, dtype=np.int32)  # -2: several

    def _allow(self, tensor: torch.Tensor) -> None:
        """Exactly the view's elements: what lies between the rows of a slice is somebody else's."""
        size = tensor.element_size()
        region = int(np.searchsorted(self.starts, tensor.untyped_storage().data_ptr()))
        start = int(self.shadow_starts[region]) + tensor.storage_offset() * size
        shadow = torch.from_numpy(self.allowed)
        strides = [stride * size for stride in tensor.stride()]
        shadow.as_strided((*tensor.shape, size), (*strides, 1), start).fill_(True)

    def access(
        self,
        what: str,
        program: tuple[int, int, int],
        index: int,
        write: bool | None,
        addresses: np.ndarray,
        size: int,
    ) -> None:
        """Check the lanes of one access by linear program `index`; `write` None: an atomic."""
        addresses = np.unique(addresses)
        region = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = region >= 0
        region = np.maximum(region, 0)
        offset = addresses - self.starts[region] if len(self.starts) else addresses
        inside &= offset + np.uint64(size) <= self.sizes[region] if len(self.starts) else False
        shadow = np.where(inside, self.shadow_starts[region] + offset.astype(np.int64), 0)
        inside[inside] = self.allowed[shadow[inside]] & self.allowed[shadow[inside] + (size - 1)]
        if not inside.all():
            raise MemoryFault(
                f"{what} by program {program}: {int((~inside).sum())} of {len(addresses)} "
                f"addresses are out of bounds, the first {self._where(addresses[~inside][0], size)}"
            )
        if write is None:
            return
        others = self.writer[shadow]
        self._no_race(what, program, index, others, (others != -1) & (others != index))
        if write:
            others = self.reader[shadow]
            self._no_race(what, program, index, others, (others != -1) & (others != index))
            self.writer[shadow] = index
        else:
            before = self.reader[shadow]
            self.reader[shadow] = np.where((before == -1) | (before == index), index, -2)

    def _where(self, address: np.uint64, size: int) -> str:
        if not len(self.starts):
            return "in a launch without tensors"
        distance = [
            min(abs(int(address) - int(s)), abs(int(address) - int(s) - int(n)))
            for s, n in zip(self.starts, self.sizes, strict=True)
        ]
        nearest = int(np.argmin(distance))
        elements = (int(address) - int(self.starts[nearest])) // size
        of = int(self.sizes[nearest]) // size
        return f"is element {elements} of a storage of {of} (elements of {size} bytes)"

    @staticmethod
    def _no_race(
        what: str, program: tuple[int, int, int], index: int, others: np.ndarray, bad: np.ndarray
    ) -> None:
        if bad.any():
            other = int(others[bad][0])
            name = "several programs" if other == -2 else f"program number {other}"
            raise RaceFault(
                f"{what} by program {program} (number {index}): {int(bad.sum())} addresses were "
                f"touched by {name} of the same launch"
            )


class _Current:
    """The launch in progress; the interpreter is a singleton, and so is this."""

    memory: LaunchMemory | None = None


def _lanes(ptrs: Any, mask: Any) -> np.ndarray:
    data = mask.data if isinstance(mask, Handle) else mask
    return np.broadcast_to(np.asarray(data, dtype=bool), ptrs.data.shape)


def _check(builder: Any, what: str, ptrs: Any, mask: Any, write: bool | None) -> None:
    memory = _Current.memory
    assert memory is not None, "a memory access outside of a launch"
    addresses = ptrs.data[_lanes(ptrs, mask)]
    if addresses.size:
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        x, y, z = builder.grid_idx
        width, height, _ = builder.grid_dim
        index = x + width * (y + height * z)
        memory.access(what, (x, y, z), index, write, addresses, size)


def _undefined(ptrs: Any) -> Any:
    dtype = ptrs.get_element_ty()
    np_dtype = ti._get_np_dtype(dtype)
    value = np.nan if np.issubdtype(np_dtype, np.floating) else UNDEFINED_INT
    return Handle(np.full(ptrs.data.shape, value, dtype=np_dtype), dtype)


def _install_memory_checks() -> None:
    @_replace("create_masked_load")
    def load(
        original: Any, self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **kw: Any
    ) -> Any:
        _check(self, "load", ptrs, mask, False)
        other = _undefined(ptrs) if other is None else other
        if not _is_bf16(ptrs.get_element_ty()):
            return original(self, ptrs, mask, other, *rest, **kw)
        bits = _encode(np.broadcast_to(other.data, ptrs.data.shape), tl.bfloat16)
        data = ti._interpreter.load(ptrs.data, _lanes(ptrs, mask), bits, np.dtype(np.uint16))
        return Handle(_decode(data, tl.bfloat16), tl.bfloat16)

    @_replace("create_masked_store")
    def store(
        original: Any, self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **kw: Any
    ) -> Any:
        _check(self, "store", ptrs, mask, True)
        if _is_bf16(value.dtype):
            value = SimpleNamespace(data=_encode(value.data, tl.bfloat16))
        return original(self, ptrs, value, mask, *rest, **kw)

    @_replace("create_atomic_rmw")
    def atomic_rmw(
        original: Any, self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        _check(self, "atomic", ptr, mask, None)
        if _is_bf16(value.dtype):
            raise NotImplementedError("atomics on bf16 are not interpreted; use float32")
        return original(self, op, ptr, value, mask, *rest)

    @_replace("create_atomic_cas")
    def atomic_cas(original: Any, self: Any, ptr: Any, *rest: Any) -> Any:
        _check(self, "atomic", ptr, True, None)
        return original(self, ptr, *rest)


# --- launch ------------------------------------------------------------------------------------


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.numel():
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif hasattr(value, "block_shape"):  # a host-side tensor descriptor
            yield from _tensors([value.base])


def _install_launch() -> None:
    init_args, call, patch_tensor = (
        ti.GridExecutor._init_args_hst,
        ti.GridExecutor.__call__,
        ti._patch_lang_tensor,
    )

    def init_args_on_host(self: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = init_args(self, args, kwargs)
        _Current.memory = LaunchMemory(list(_tensors([*host_args, *host_kwargs.values()])))
        return host_args, host_kwargs

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Once for the whole launch: the stock interpreter patches the language again at every call
        # of a device function (tl.sum is one), which takes most of its time, and forgets to
        # restore it.
        scope = ti._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        try:
            return call(self, *args, **kwargs)
        finally:
            scope.restore()
            _Current.memory = None

    def device_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # numpy 2.4 no longer turns an array of one element into an int; triton 3.6 asks it to.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    ti.GridExecutor._init_args_hst = init_args_on_host
    ti.GridExecutor.__call__ = launch
    ti.InterpretedFunction.__call__ = device_call
    ti._patch_lang_tensor = patch_lang_tensor

"""The header of a GGUF file: its metadata and where each tensor lies, without the tensors.

The `gguf` package's reader builds an array for every string and needs seconds for one vocabulary;
this one needs a tenth of one. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2
and 3, little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32

# Format characters of `struct` by GGUF value type; 8 is a string and 9 an array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")

# Ends of a turn that a file may not list under an id of its own. Only control tokens of exactly
# this text count, so text a user writes can never become one.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>")
CONTROL_TOKEN = 3  # value in tokenizer.ggml.token_type


@dataclass(frozen=True)
class GGUFTensor:
    """`shape` is in torch's order (rows first), `type_id` a GGMLQuantizationType, `offset` in bytes
    from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    file_size: int
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    def require(self, key: str) -> Any:
        if key not in self.metadata:
            raise ValueError(f"{self.path} lacks the metadata key {key!r}")
        return self.metadata[key]

    def eos_token_ids(self) -> list[int]:
        """Every token that ends an answer, the file's own eos first."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        named = [self.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        ids = [token_id for token_id in named if token_id is not None]
        tokens = self.metadata.get("tokenizer.ggml.tokens", ())
        types = self.metadata.get("tokenizer.ggml.token_type", ())
        ids += [
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == CONTROL_TOKEN and token in _END_OF_TURN
        ]
        return list(dict.fromkeys(ids))


def read_header(path: Path) -> GGUFHeader:
    """ValueError, naming the file and the byte, for anything that is not a whole GGUF header.
    Counts are checked against the file's size before anything of that size is made."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise ValueError(f"{path} is no GGUF file: {size} bytes are too few for a header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data, size).read_header()


def shard_paths(header: GGUFHeader) -> list[Path]:
    """All files of a model that was split into several, in order; usually just the one."""
    count = header.metadata.get("split.count", 0)
    if count <= 1:
        return [header.path]
    match = _SHARD.fullmatch(header.path.name)
    if match is None or int(match["count"]) != count or int(match["no"]) != 1:
        raise ValueError(
            f"{header.path} is one of {count} parts of a model: pass the first one, "
            f"named NAME-00001-of-{count:05d}.gguf, with the others beside it"
        )
    paths = [
        header.path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf")
        for no in range(1, count + 1)
    ]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{header.path}: missing parts of the model: {', '.join(missing)}")
    return paths


class _Cursor:
    """Reads forward through the mapped header; nothing is taken that the file does not hold."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.pos = 0

    def read_header(self) -> GGUFHeader:
        if self.take(4) != MAGIC:
            raise self.error("it does not begin with 'GGUF'", at=0)
        version = self.number("I")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise self.error("it is big-endian, and only little-endian files are read", at=4)
            raise self.error(f"version {version}, and only {VERSIONS} are read", at=4)
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        self.check_count(num_tensors, 24, "tensors")
        self.check_count(num_keys, 13, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key_pos = self.pos
            key = self.string()
            if key in metadata:
                raise self.error(f"metadata key {key!r} appears twice", at=key_pos)
            metadata[key] = self.value(self.number("I"), depth=0)
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment must be a power of two, got {alignment!r}")
        base = -(-self.pos // alignment) * alignment
        tensors = tuple(
            GGUFTensor(name, shape, type_id, base + offset)
            for name, shape, type_id, offset in infos
        )
        names = {tensor.name for tensor in tensors}
        if len(names) != len(tensors):
            raise self.error(f"{len(tensors) - len(names)} tensor names appear twice")
        for tensor in tensors:
            if tensor.offset > self.size:
                raise self.error(f"tensor {tensor.name!r} begins at {tensor.offset}, past the end")
        return GGUFHeader(self.path, self.size, metadata, tensors)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        at = self.pos
        name = self.string()
        num_dims = self.number("I")
        if num_dims > MAX_DIMS:
            raise self.error(f"tensor {name!r} has {num_dims} dimensions, over {MAX_DIMS}", at=at)
        # GGUF names the fastest dimension first.
        shape = tuple(reversed([self.number("Q") for _ in range(num_dims)]))
        return name, shape, self.number("I"), self.number("Q")

    def value(self, type_id: int, depth: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array(depth)
        return self.number(self.scalar(type_id))

    def array(self, depth: int) -> list[Any]:
        if depth >= MAX_ARRAY_DEPTH:
            raise self.error(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        type_id, count = self.number("I"), self.number("Q")
        if type_id == _STRING:
            self.check_count(count, 8, "strings")
            return self.strings(count)
        if type_id == _ARRAY:
            self.check_count(count, 12, "arrays")
            return [self.array(depth + 1) for _ in range(count)]
        code = self.scalar(type_id)
        self.check_count(count, struct.calcsize(code), "values")
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))

    def strings(self, count: int) -> list[str]:
        # The hot loop of the whole file: a vocabulary has hundreds of thousands of strings.
        data, size, pos = self.data, self.size, self.pos
        length_at = struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            if pos + 8 > size:
                raise self.error("the file ends inside an array of strings", at=pos)
            begin = pos + 8
            pos = begin + length_at(data, pos)[0]
            if pos > size:
                raise self.error(f"a string of {pos - begin} bytes goes past the end", at=begin)
            result.append(data[begin:pos].decode("utf-8", "replace"))
        self.pos = pos
        return result

    def string(self) -> str:
        return self.strings(1)[0]

    def scalar(self, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise self.error(f"unknown metadata type {type_id}")
        return _SCALARS[type_id]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def take(self, count: int) -> bytes:
        end = self.pos + count
        if end > self.size:
            raise self.error(f"{count} bytes go past the end")
        data = self.data[self.pos : end]
        self.pos = end
        return data

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count * min_bytes > self.size - self.pos:
            raise self.error(f"{count} {what} cannot fit into the rest of the file")

    def error(self, problem: str, at: int | None = None) -> ValueError:
        where = self.pos if at is None else at
        return ValueError(
            f"{self.path} is no readable GGUF file: byte {where} of {self.size}: {problem}"
        )

"""A GGUF header is read whole or refused by name; a hostile one costs nothing."""

from __future__ import annotations

import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from tiny_gguf import LLAMA_METADATA, embedding, write_gguf

from srt.gguf_metadata import read_header, shard_paths

TOKENS = ["a", "ü", "▁的", "<|end|>"]


@pytest.fixture
def small(tmp_path):
    metadata = {
        **LLAMA_METADATA,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.5, 0.0],
    }
    return write_gguf(tmp_path / "small.gguf", metadata, embedding())


def test_every_type_of_value_is_read_as_written(tmp_path):
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 200,
        "int8": -5,
        "uint16": 60_000,
        "int16": -30_000,
        "uint32": 4_000_000_000,
        "int32": -2_000_000_000,
        "uint64": 1 << 63,
        "int64": -(1 << 62),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "grüße",
    }
    for name, value in values.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["x", "", "好"])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_header(path).metadata
    assert {name: metadata[name] for name in values} == values
    assert metadata["numbers"] == [1, 2, 3]
    assert metadata["texts"] == ["x", "", "好"]
    assert metadata["nested"] == [[1, 2], [3]]


def test_tensors_are_found_where_the_formats_own_reader_finds_them(small):
    theirs = gguf.GGUFReader(small).tensors
    ours = read_header(small).tensors
    assert [(t.name, t.offset) for t in ours] == [(t.name, t.data_offset) for t in theirs]
    assert ours[0].shape == (8, 32)


def test_a_file_cut_anywhere_in_its_header_is_refused_by_name(small, tmp_path):
    data = small.read_bytes()
    end = read_header(small).tensors[0].offset
    cut = tmp_path / "cut.gguf"
    for size in range(0, end - 32, 7):
        cut.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf is no"):
            read_header(cut)


def test_no_change_of_any_byte_does_worse_than_a_value_error(small, tmp_path):
    data = small.read_bytes()[: read_header(small).tensors[0].offset + 64]
    rng = random.Random(0)
    broken = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.choice(
                (0, 1, 0x7F, 0xFF, rng.randrange(256))
            )
        broken.write_bytes(changed)
        try:
            read_header(broken)
        except ValueError as error:
            refused += 1
            assert "broken.gguf" in str(error)
    assert refused > 100


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "tensors cannot fit"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "metadata keys cannot fit"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62), "goes past the end"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1 << 59), "strings cannot"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 11, 1 << 59), "values cannot"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 99), "unknown metadata type 99"),
        (struct.pack("<4sIQQ", b"GGML", 3, 0, 0), "does not begin with 'GGUF'"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    ],
)
def test_a_hostile_header_is_refused_without_a_large_allocation(tmp_path, head, problem):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(head + bytes(64))
    tracemalloc.start()
    with pytest.raises(ValueError, match=problem) as error:
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "hostile.gguf" in str(error.value)
    assert peak < 1 << 20


def test_deeply_nested_arrays_are_refused(tmp_path):
    path = tmp_path / "deep.gguf"
    nested = struct.pack("<IQ", 9, 1) * 50
    path.write_bytes(struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 9) + nested)
    with pytest.raises(ValueError, match="nested deeper than 4"):
        read_header(path)


def test_a_key_that_appears_twice_is_refused(tmp_path):
    path = tmp_path / "twice.gguf"
    entry = struct.pack("<Q1sII", 1, b"k", 4, 7)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + entry * 2)
    with pytest.raises(ValueError, match="'k' appears twice"):
        read_header(path)


def test_eos_ids_are_the_files_own_first_then_control_tokens_that_end_a_turn(tmp_path):
    metadata = {
        "tokenizer.ggml.tokens": ["<|im_end|>", "x", "</s>", "<|eot_id|>", "<end_of_turn>"],
        "tokenizer.ggml.token_type": [3, 1, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
    }
    header = read_header(write_gguf(tmp_path / "eos.gguf", metadata))
    # The last one is spelled like an end, but is no control token.
    assert header.eos_token_ids() == [2, 3, 0]


def test_parts_of_a_split_model_are_found_from_the_first(tmp_path):
    first = tmp_path / "m-00001-of-00002.gguf"
    write_gguf(first, {"split.count": 2})
    with pytest.raises(ValueError, match=r"missing parts of the model: m-00002-of-00002\.gguf"):
        shard_paths(read_header(first))
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", {"split.count": 2})
    assert shard_paths(read_header(first)) == [first, second]
    with pytest.raises(ValueError, match="pass the first one"):
        shard_paths(read_header(second))


def test_a_large_vocabulary_is_read_in_a_fraction_of_a_second(tmp_path):
    tokens = [f"token{i}" for i in range(20_000)]
    path = write_gguf(tmp_path / "large.gguf", {"tokenizer.ggml.tokens": tokens})
    import time

    began = time.thread_time()
    assert read_header(path).metadata["tokenizer.ggml.tokens"] == tokens
    assert time.thread_time() - began < 0.2


def test_the_map_of_the_file_is_released(small):
    header = read_header(small)
    small.write_bytes(b"")  # a live map of a shortened file would be fatal to read
    assert header.metadata["tokenizer.ggml.tokens"] == TOKENS
    assert np.prod(header.tensors[0].shape) == 256

"""Token files: what is written is read back; whatever is wrong with a file is said, with its name."""

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speedlab.config import ConfigError
from speedlab.data import write_tokens
from speedlab.data.cache import largest_token
from speedlab.data.token_file import map_tokens, read_header, token_dtype, verify


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example overwrites the last one's file
@given(
    chunks=st.lists(st.lists(st.integers(0, 70_000), max_size=20), max_size=5),
    vocabulary=st.sampled_from([70_001, 65_536, 65_537, 2**32]),
)
def test_what_is_written_is_read_back(tmp_path, chunks, vocabulary):
    chunks = [[i % vocabulary for i in chunk] for chunk in chunks]
    path, ids = tmp_path / "a.tokens", [i for chunk in chunks for i in chunk]
    assert write_tokens(path, (np.array(chunk, dtype=np.int64) for chunk in chunks), vocabulary) == len(ids)
    header = read_header(path)
    assert (header.count, header.vocabulary, header.dtype) == (len(ids), vocabulary, token_dtype(vocabulary))
    assert map_tokens(header).tolist() == ids
    assert verify(header) == max(ids, default=0)
    assert list(tmp_path.iterdir()) == [path]


def test_the_smallest_dtype_that_holds_the_vocabulary():
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4


def test_the_header_is_what_the_module_says(tmp_path):
    write_tokens(tmp_path / "a.tokens", [np.array([1, 2, 3])], 300)
    data = (tmp_path / "a.tokens").read_bytes()
    assert struct.unpack("<8sIIQQ", data[:32]) == (b"SLTOKENS", 1, 2, 300, 3)
    assert data[64:] == struct.pack("<3H", 1, 2, 3)


def test_the_mapping_cannot_be_written(tmp_path):
    write_tokens(tmp_path / "a.tokens", [np.array([1, 2])], 3)
    with pytest.raises(ValueError, match="read-only"):
        map_tokens(read_header(tmp_path / "a.tokens"))[0] = 0


@pytest.mark.parametrize("ids", [[0, 3], [-1, 0]])
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path, ids):
    with pytest.raises(
        ConfigError, match=rf"a\.tokens: ids run from {ids[0]} to {ids[1]}, outside the vocabulary of 3"
    ):
        write_tokens(tmp_path / "a.tokens", [np.array(ids)], 3)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.array([1, 2])], 3)
    with pytest.raises(ConfigError):
        write_tokens(path, [np.array([1]), np.array([9])], 3)
    assert map_tokens(read_header(path)).tolist() == [1, 2]


def test_nanogpt_files_are_headerless_uint16(tmp_path):
    path = tmp_path / "train.bin"
    np.array([5, 50256, 7], dtype=np.uint16).tofile(path)
    header = read_header(path)
    assert map_tokens(header).tolist() == [5, 50256, 7]
    assert verify(header) == 50256


def _own(version=1, item=2, vocabulary=10, count=4, body=b"\0" * 8):
    return struct.pack("<8sIIQQ32s", b"SLTOKENS", version, item, vocabulary, count, b"\0" * 32) + body


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.tokens", b"", "is empty"),
        ("a.bin", b"", "is empty"),
        ("a.tokens", b"PK\3\4 and so on" * 9, "is foreign"),
        ("a.tokens", b"SLTO", "is cut: 4 bytes, the header alone has 64"),
        ("a.tokens", _own(body=b"\0" * 7), r"is cut: 4 ids of 2 bytes make 72 bytes, the file has 71"),
        ("a.tokens", _own(body=b"\0" * 9), "has bytes after its end"),
        ("a.tokens", _own(version=2), "is of version 2"),
        ("a.tokens", _own(item=3), "ids of 3 bytes"),
        ("a.bin", b"\0\0\0", "is cut: uint16 ids need an even number of bytes, it has 3"),
        ("a.bin", _own(), r"is a \.tokens file"),
        ("a.bin", struct.pack("<3i", 20240520, 1, 9), "llm.c's header"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_header(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.bin: cannot be read: No such file"):
        read_header(tmp_path / "none.bin")


def test_a_changed_byte_is_found_by_the_hash(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.arange(100)], 300)
    data = bytearray(path.read_bytes())
    data[64 + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.tokens: is damaged: its SHA-256"):
        verify(read_header(path))


def test_a_vocabulary_that_lies_is_found(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.array([1, 9])], 300)
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 16, 5)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="id 9 is outside the vocabulary of 5"):
        verify(read_header(path))


def test_a_file_is_read_through_once_until_it_changes(tmp_path, monkeypatch):
    from speedlab.data import cache

    seen = []
    monkeypatch.setattr(cache, "verify", lambda header: seen.append(header.path) or verify(header))
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.array([1, 9])], 300)
    assert [largest_token(read_header(path), tmp_path / "cache") for _ in range(3)] == [9, 9, 9]
    assert len(seen) == 1
    write_tokens(path, [np.array([1, 9, 11])], 300)
    assert largest_token(read_header(path), tmp_path / "cache") == 11
    assert len(seen) == 2


def test_a_damaged_memo_is_ignored(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.array([1, 9])], 300)
    largest_token(read_header(path), tmp_path / "cache")
    for memo in (tmp_path / "cache" / "verified").iterdir():
        memo.write_text("{")
    assert largest_token(read_header(path), tmp_path / "cache") == 9

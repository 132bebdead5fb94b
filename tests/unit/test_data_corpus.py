"""Sources, splits, tokenizers and the cache; every bad input named, with a fix."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedlab.config import ConfigError, DataConfig
from speedlab.data import check, encoding, prepare, write_tokens
from speedlab.data import prepare_corpus as corpus_module
from speedlab.data.cache import default_cache
from speedlab.data.encoding import split
from speedlab.data.sources import TextFile, choose, find
from speedlab.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    FileTokenizer,
    NumberTokenizer,
    save_tokenizer,
    train_bpe,
)

PROSE = "".join(f"line {i}: the quick brown fox number {i * 7919} jumps, über alles.\n" for i in range(400))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    """Thirty files of 40 lines, in folders."""
    root = tmp_path / "text"
    for i in range(30):
        path = root / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"file {i} line {j} is here\n" for j in range(40)))
    return root


def config(source, **changes) -> DataConfig:
    changes = {"sequence_length": 16, "tokenizer": "bytes", "vocab_size": 300, **changes}
    return DataConfig.model_validate({"source": source if isinstance(source, tuple) else str(source), **changes})


def texts(corpus, part):
    """The texts of a part, as they were before they were joined."""
    return corpus.tokenizer.decode(getattr(corpus, part).tolist()).split(END_OF_TEXT)[:-1]


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_file_of_a_folder_is_there_once_whole_in_one_part(folder, cache, tokenizer):
    corpus = prepare(config(folder, tokenizer=tokenizer, heldout_share=0.1), cache=cache, progress=None)
    train, heldout = texts(corpus, "train"), texts(corpus, "heldout")
    assert sorted(train + heldout) == sorted(path.read_text() for path in folder.rglob("*.txt"))
    assert len(heldout) in (2, 3)
    corpus.check_vocabulary(300)
    assert corpus.train.dtype == np.uint16


def test_bpe_makes_fewer_tokens_than_bytes_and_keeps_to_its_size(folder, cache):
    bpe = prepare(config(folder, tokenizer="bpe"), cache=cache, progress=None)
    plain = prepare(config(folder), cache=cache, progress=None)
    assert bpe.tokenizer.vocab_size <= 300
    assert len(bpe.train) < 0.7 * len(plain.train)


def test_the_split_does_not_depend_on_where_the_folder_is(folder, cache, tmp_path):
    first = prepare(config(folder), cache=cache, progress=None)
    moved = folder.rename(tmp_path / "elsewhere")
    second = prepare(config(moved), cache=tmp_path / "cache2", progress=None)
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.heldout, second.heldout)


def test_a_single_file_keeps_its_end_for_evaluation(tmp_path, cache):
    (tmp_path / "a.txt").write_text(PROSE)
    corpus = prepare(config(tmp_path / "a.txt", heldout_share=0.2), cache=cache, progress=None)
    (train,), (heldout,) = texts(corpus, "train"), texts(corpus, "heldout")
    assert train + heldout == PROSE
    assert train.endswith("\n")
    assert 0.19 < len(heldout) / len(PROSE) < 0.23


def test_a_single_line_is_cut_within(tmp_path, cache):
    (tmp_path / "a.txt").write_text("x" * 1000)
    corpus = prepare(config(tmp_path / "a.txt", heldout_share=0.2), cache=cache, progress=None)
    assert (len(corpus.train), len(corpus.heldout)) == (801, 201)


def test_patterns_and_lists_name_files_once(folder):
    everything = {path.name for path in folder.rglob("*.txt")}
    found = find(config((str(folder / "part0" / "*.txt"), str(folder), str(folder / "part1" / "file1.txt"))))
    assert sorted(file.name.split("/")[-1] for file in found) == sorted(everything)
    assert {file.name for file in find(config(folder / "**" / "file1*.txt"))} == {
        name for name in everything if name.startswith("file1")
    }


def test_hidden_files_and_token_files_of_a_folder_are_not_text(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")
    (folder / ".hidden").write_text("x")
    (folder / "other.bin").write_bytes(b"\0\1")
    (folder / "empty.txt").write_text("")
    assert len(find(config(folder))) == 30


def test_a_byte_order_mark_is_not_text(tmp_path, cache):
    (tmp_path / "a.txt").write_text(PROSE, encoding="utf-8-sig")
    corpus = prepare(config(tmp_path / "a.txt"), cache=cache, progress=None)
    assert corpus.tokenizer.decode(corpus.train[:6].tolist()) == "line 0"


def test_found_files_that_are_not_text_are_left_out_and_counted(folder, cache):
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "late.txt").write_bytes(b"text " * 3000 + b"\xff")  # its first 8 KiB are fine
    said = []
    corpus = prepare(config(folder), cache=cache, progress=said.append)
    assert len(texts(corpus, "train") + texts(corpus, "heldout")) == 30
    assert any("left out 2 of 32 files" in line for line in said)


def test_the_standard_library_needs_no_download():
    files = find(DataConfig())
    assert len(files) > 300
    assert sum(file.size for file in files) > 8 * 2**20
    assert not any("site-packages" in file.name or "test" in file.name.split("/") for file in files)
    check(DataConfig())


def test_the_standard_library_is_read_once(cache, monkeypatch):
    built = counting_builds(monkeypatch)
    corpus = prepare(DataConfig(), cache=cache, progress=None)
    again = prepare(DataConfig(), cache=cache, progress=None)
    assert built == [1]
    assert corpus.tokenizer.vocab_size == 4096
    assert 1_800_000 < len(corpus.train) < 3_500_000
    assert 0.03 < len(corpus.heldout) / len(corpus.train) < 0.07
    assert np.array_equal(corpus.train, again.train)


# ---- choosing and splitting ------------------------------------------------------------------------------------------


def fake(sizes):
    from pathlib import Path

    return [
        TextFile(path=Path(f"/f{i}"), name=f"f{i}", size=size, mtime_ns=0, named=False) for i, size in enumerate(sizes)
    ]


@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=40), limit=st.integers(1, 10**7))
def test_at_most_max_bytes_are_chosen_and_all_of_them_when_they_fit(sizes, limit):
    chosen = choose(fake(sizes), limit)
    assert sum(take for _, take in chosen) <= limit
    assert all(0 < take <= file.size for file, take in chosen)
    if sum(sizes) <= limit:
        assert sorted(take for _, take in chosen) == sorted(sizes)
    else:
        assert sum(take for _, take in chosen) >= limit - len(sizes)  # less only by the rounding of equal shares


def test_few_large_files_share_the_limit_evenly():
    assert [take for _, take in choose(fake([10**6, 10**5, 10**6]), 700_000)].count(300_000) == 2


def test_many_files_are_left_out_rather_than_all_cut():
    chosen = choose(fake([50_000] * 100), 1_000_000)
    assert [take for _, take in chosen] == [50_000] * 20
    assert [file.name for file, _ in chosen] != sorted(file.name for file, _ in chosen)


@given(sizes=st.lists(st.integers(1, 10**5), min_size=1, max_size=60), share=st.floats(0.01, 0.9))
def test_a_split_has_every_part_once_and_keeps_to_the_share(sizes, share):
    chosen = choose(fake(sizes), 10**8)
    train, heldout = split(chosen, share)
    total = sum(sizes)
    held = sum(part.take * (part.stop - part.start) for part in heldout)
    kept = sum(part.take * (part.stop - part.start) for part in train)
    assert held + kept == pytest.approx(total)
    assert 0.49 * share * total <= held <= share * total * 1.01
    assert train


# ---- the cache -------------------------------------------------------------------------------------------------------


def counting_builds(monkeypatch):
    built = []
    original = corpus_module.build
    monkeypatch.setattr(corpus_module, "build", lambda *args: built.append(1) or original(*args))
    return built


def test_the_cache_is_used_until_something_changes(folder, cache, monkeypatch):
    built = counting_builds(monkeypatch)
    for _ in range(3):
        prepare(config(folder), cache=cache, progress=None)
    assert len(built) == 1
    prepare(config(folder, heldout_share=0.2), cache=cache, progress=None)
    prepare(config(folder, sequence_length=8), cache=cache, progress=None)  # does not change the tokens
    assert len(built) == 2
    file = folder / "part0" / "file0.txt"
    os.utime(file, ns=(1, 1))
    prepare(config(folder), cache=cache, progress=None)
    assert len(built) == 3


@pytest.mark.parametrize("name", ["train.tokens", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_cache_is_made_again(folder, cache, name, harm):
    before = prepare(config(folder, tokenizer="bpe"), cache=cache, progress=None)
    (victim,) = cache.rglob(name)
    victim.write_bytes(victim.read_bytes()[:100]) if harm == "cut" else victim.unlink()
    said = []
    after = prepare(config(folder, tokenizer="bpe"), cache=cache, progress=said.append)
    assert "the cache is damaged and will be made again" in said[0]
    assert name in said[0]
    assert np.array_equal(after.heldout, before.heldout)


def test_what_a_killed_process_left_is_removed(folder, cache):
    prepare(config(folder), cache=cache, progress=None)
    (entry,) = (path for path in (cache / "corpora").iterdir() if path.is_dir())
    stale = entry.with_name(f"{entry.name}.dead.part")
    entry.rename(stale)
    prepare(config(folder), cache=cache, progress=None)
    assert entry.is_dir()
    assert not stale.exists()


def test_a_failing_build_leaves_nothing(folder, cache, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(encoding, "write_tokens", fail)
    with pytest.raises(ConfigError, match=r"no room for the encoded data: .* set XDG_CACHE_HOME"):
        prepare(config(folder), cache=cache, progress=None)
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_says_how_to_move_it(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the cache cannot be written: Not a directory; set XDG_CACHE_HOME"):
        prepare(config(folder), cache=tmp_path / "file", progress=None)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "speedlab"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert default_cache().parts[-2:] == (".cache", "speedlab")


_RACER = """
import sys
from speedlab.config import DataConfig
from speedlab.data import prepare, prepare_corpus
built, original = [], prepare_corpus.build
prepare_corpus.build = lambda *args: built.append(1) or original(*args)
sys.stdin.readline()
result = prepare(DataConfig(source=sys.argv[1], sequence_length=16, vocab_size=300), progress=None)
print(len(built), len(result.train), int(result.train.astype("int64").sum()))
"""


def test_ranks_that_race_build_once_and_get_the_same(folder, tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "error", "-c", _RACER, str(folder)]
    ranks = [subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        lines = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert sorted(int(line[0]) for line in lines) == [0, 0, 1]
    assert len({tuple(line[1:]) for line in lines}) == 1


def test_encoding_does_not_bring_torch_and_a_later_fork_is_silent(folder, tmp_path):
    code = (
        "import os, sys\nfrom speedlab.config import DataConfig\nfrom speedlab.data import prepare\n"
        "prepare(DataConfig(source=sys.argv[1], sequence_length=16, vocab_size=300), progress=None)\n"
        "assert 'torch' not in sys.modules\n"
        "pid = os.fork()\n"
        "os._exit(0) if pid == 0 else os.waitpid(pid, 0)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    env["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=env, capture_output=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")


# ---- progress --------------------------------------------------------------------------------------------------------


def test_progress_speaks_only_after_a_second(folder, cache, monkeypatch):
    said, clock = [], [0.0]
    monkeypatch.setattr("speedlab.data.cache.time.monotonic", lambda: clock[0])
    prepare(config(folder), cache=cache, progress=said.append)
    assert said == []
    original = encoding.train_bpe
    monkeypatch.setattr(encoding, "train_bpe", lambda *args: clock.__setitem__(0, clock[0] + 3) or original(*args))
    prepare(config(folder, tokenizer="bpe"), cache=cache, progress=said.append)
    assert "encoded" in said[0]
    assert said[-1].endswith("held out (3.0 s)")


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe([PROSE], 400, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_decodes_to_itself(bpe, text):
    for tokenizer in (bpe, ByteTokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.encode_batch([text])[0].tolist() == ids


def test_the_end_of_a_text_has_a_token(bpe):
    assert bpe.decode([bpe.end_of_text]) == END_OF_TEXT
    assert ByteTokenizer().decode([104, 105, 256]) == f"hi{END_OF_TEXT}"
    assert ByteTokenizer().decode([0xFF]) == "\ufffd"
    with pytest.raises(ValueError, match="not all below 257"):
        ByteTokenizer().decode([257])


def test_a_saved_tokenizer_is_the_same_to_transformers(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    for tokenizer in (bpe, ByteTokenizer()):
        folder = tmp_path / type(tokenizer).__name__
        save_tokenizer(tokenizer, folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for text in ("", "def f(x):\n    return x", " wörld €\t😀 a  b"):
            assert theirs(text)["input_ids"] == tokenizer.encode(text)
            assert theirs.decode(tokenizer.encode(text)) == text
        assert theirs.eos_token_id == tokenizer.end_of_text
        assert len(theirs) == tokenizer.vocab_size
    save_tokenizer(NumberTokenizer(10), tmp_path / "numbers")
    assert not (tmp_path / "numbers").exists()


def test_numbers_stand_for_themselves():
    tokenizer = NumberTokenizer(10)
    assert tokenizer.encode("3 9 0") == [3, 9, 0]
    assert tokenizer.decode([3, 9, 0]) == "3 9 0"
    for text in ("hello", "10", "-1"):
        with pytest.raises(ConfigError, match=r"ids below 10 .* data\.tokenizer"):
            tokenizer.encode(text)


def test_a_tokenizer_file_is_used_and_known_by_its_content(folder, cache, tmp_path, bpe):
    path = tmp_path / "mine.json"
    train_bpe([PROSE], 280, path)
    first = prepare(config(folder, tokenizer=str(path)), cache=cache, progress=None)
    assert first.tokenizer.vocab_size == 280
    train_bpe([PROSE], 290, path)
    assert prepare(config(folder, tokenizer=str(path)), cache=cache, progress=None).tokenizer.vocab_size == 290


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as a tokenizer: No such file"),
        (b"{}", "holds no tokenizer"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"", "holds no tokenizer"),
    ],
)
def test_a_bad_tokenizer_file_is_named(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        FileTokenizer(path)
    assert str(path) in str(caught.value)
    assert "'bpe', 'bytes', or the path" in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        check(config("stdlib", tokenizer=str(path)))


# ---- token files -----------------------------------------------------------------------------------------------------


def test_a_token_file_keeps_its_end_for_evaluation(tmp_path, cache):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus = prepare(config(tmp_path / "a.bin", tokenizer="bpe", heldout_share=0.1), cache=cache, progress=None)
    assert corpus.train.tolist() == list(range(900))
    assert corpus.heldout.tolist() == list(range(900, 1000))
    assert isinstance(corpus.train, np.memmap)
    assert corpus.tokenizer.decode([5, 6]) == "5 6"
    corpus.check_vocabulary(1000)
    with pytest.raises(ConfigError, match=r"token 999 is outside .*vocab_size is 999; set it to at least 1,000"):
        corpus.check_vocabulary(999)


def test_nanogpts_folder_is_understood(tmp_path, cache):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "val.bin")
    corpus = prepare(config(tmp_path, tokenizer="bpe"), cache=cache, progress=None)
    assert (len(corpus.train), len(corpus.heldout)) == (100, 50)


def test_the_tokenizer_beside_a_token_file_is_used(tmp_path, cache):
    tokenizer = train_bpe([PROSE], 400, tmp_path / "tokenizer.json")
    write_tokens(tmp_path / "a.tokens", tokenizer.encode_batch([PROSE]), tokenizer.vocab_size)
    corpus = prepare(config(tmp_path / "a.tokens", tokenizer="bpe"), cache=cache, progress=None)
    assert corpus.tokenizer.decode(corpus.train[:20].tolist()).startswith("line 0: the")
    low = dataclasses.replace(corpus, max_token=300)
    with pytest.raises(ConfigError, match=r"a prompt could hold a token outside it; set model\.vocab_size to 400"):
        low.check_vocabulary(399)
    low.check_vocabulary(400)


def test_ids_that_the_tokenizer_does_not_have_are_refused(tmp_path, cache):
    write_tokens(tmp_path / "a.tokens", [np.arange(500)], 500)
    with pytest.raises(ConfigError, match="token 499 is outside the vocabulary of its tokenizer, which has 257"):
        prepare(config(tmp_path / "a.tokens", tokenizer="bytes"), cache=cache, progress=None)


def test_a_token_file_is_a_source_of_its_own(folder, tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"a\.bin: a token file is a source of its own, data\.source names 2"):
        check(config((str(tmp_path / "a.bin"), str(folder))))


def test_a_damaged_token_file_is_refused(tmp_path, cache):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.arange(500)], 500)
    data = bytearray(path.read_bytes())
    data[-1] ^= 128
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.tokens: is damaged"):
        prepare(config(path), cache=cache, progress=None)
    path.write_bytes(data[:-4])
    with pytest.raises(ConfigError, match=r"a\.tokens: is cut"):
        check(config(path))


# ---- bad text, by check and by prepare alike -------------------------------------------------------------------------


def refused(source, cache, **changes):
    with pytest.raises(ConfigError) as light:
        check(config(source, **changes))
    with pytest.raises(ConfigError) as full:
        prepare(config(source, **changes), cache=cache, progress=None)
    assert str(light.value) == str(full.value)
    return str(light.value)


def test_missing_data(tmp_path, cache):
    assert "there is no such file or folder" in refused(tmp_path / "none", cache)
    assert "the pattern matches no file" in refused(tmp_path / "*.txt", cache)
    for nothing in ((), ""):
        with pytest.raises(ConfigError, match="no source is named"):
            DataConfig(source=nothing)


def test_unreadable_data(tmp_path, cache):
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    message = refused(tmp_path / "link.txt", cache)
    assert message.startswith(f"{tmp_path / 'link.txt'}: cannot be read: No such file")
    os.mkfifo(tmp_path / "pipe")
    assert "is neither a file nor a folder" in refused(tmp_path / "pipe", cache)


def test_a_found_file_that_may_not_be_read_is_not_left_out_in_silence(folder, cache, monkeypatch):
    target = folder / "part0" / "file0.txt"
    original = type(target).open

    def forbidden(self, *args, **kwargs):
        if self == target:
            raise PermissionError(13, "Permission denied")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "open", forbidden)
    with pytest.raises(ConfigError, match=r"file0\.txt: cannot be read: Permission denied; make it readable"):
        prepare(config(folder), cache=cache, progress=None)


def test_empty_data(tmp_path, cache):
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt: is empty" in refused(tmp_path / "empty.txt", cache)
    assert "holds no text: 1 files were found there, all empty" in refused(tmp_path, cache)


def test_binary_data(tmp_path, cache):
    (tmp_path / "zero.dat").write_bytes(b"abc\0def")
    assert "zero.dat: is binary: byte 3 is zero" in refused(tmp_path / "zero.dat", cache)
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1") * 10)
    assert "latin.txt: is not UTF-8 text: byte 3 is 0xf6; convert it" in refused(tmp_path / "latin.txt", cache)
    assert "none of the 2 files there is text; the first: " in refused(tmp_path, cache)


def test_a_character_cut_by_max_bytes_is_not_binary(tmp_path, cache):
    (tmp_path / "a.txt").write_text("ä" * 1000)
    corpus = prepare(config(tmp_path / "a.txt", max_bytes=501, heldout_share=0.2), cache=cache, progress=None)
    assert len(corpus.train) + len(corpus.heldout) == 500 + 2


def test_a_character_cut_by_the_end_of_the_file_is(tmp_path, cache):
    (tmp_path / "a.txt").write_bytes("ä".encode() * 100 + b"\xc3")
    assert "is not UTF-8 text: byte 200 is 0xc3" in refused(tmp_path / "a.txt", cache)


def test_a_sequence_longer_than_the_data(tmp_path, cache):
    (tmp_path / "a.txt").write_text("hello world\n" * 10)
    with pytest.raises(ConfigError, match=r"sequence_length 500 is longer than .*a\.txt: .* 501 tokens, there are 121"):
        check(config(tmp_path / "a.txt", sequence_length=500))
    with pytest.raises(
        ConfigError, match=r"longer than the training part of .* 116 tokens, there are 115; lower it .* 114"
    ):
        prepare(config(tmp_path / "a.txt", sequence_length=115), cache=cache, progress=None)
    with pytest.raises(ConfigError, match=r"longer than the held-out part of .* or raise data\.heldout_share"):
        prepare(config(tmp_path / "a.txt", sequence_length=60), cache=cache, progress=None)
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(
        ConfigError, match=r"sequence_length 5 is longer than .*a\.bin: .* there are 5; lower it to at most 4"
    ):
        check(config(tmp_path / "a.bin", sequence_length=5))

"""Synthetic tasks: what a sequence holds, that answers follow from what came before, and that a small model learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speedlab.cluster.start_run import with_absolute_paths
from speedlab.config import ConfigError, DataConfig, ModelConfig, RunConfig
from speedlab.data import Sampler, Task, accuracy, check, prepare, task_of
from speedlab.models import GPT

COPY, RETRIEVAL = Task("copy"), Task("retrieval")
LENGTHS, VOCABULARIES = [4, 5, 16, 257], [4, 5, 300, 70_000]


def data(source: str, **changes) -> DataConfig:
    return DataConfig.model_validate({"source": source, "sequence_length": 16, "vocab_size": 300, **changes})


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_copy_is_what_came_before_the_mark(length, vocabulary) -> None:
    made = COPY.samples(7, length, vocabulary, seed=3)
    half = (length - 1) // 2
    assert made.shape == (7, length)
    assert (made[:, half] == 0).all()
    assert (made[:, half + 1 : 2 * half + 1] == made[:, :half]).all()
    assert 1 <= made[:, :half].min() <= made.max() < vocabulary
    assert np.array_equal(np.arange(length)[COPY.answers(length)] + 1, np.arange(half + 1, 2 * half + 1))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_to_be_found_stands_once_in_the_hay(length, vocabulary) -> None:
    made = RETRIEVAL.samples(50, length, vocabulary, seed=3)
    for row in made:
        first, last = np.flatnonzero(row == 0)
        assert last == length - 2
        assert 1 <= row[-1] == row[first + 1] < vocabulary // 2
        hay = np.delete(row, [first, first + 1, length - 2, length - 1])
        assert hay.size == 0 or (vocabulary // 2 <= hay.min() and hay.max() < vocabulary)
    assert np.arange(length)[RETRIEVAL.answers(length)].tolist() == [length - 2]


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (0.25, 25), (0.5, 50), (1, 100)])
def test_a_needle_lies_where_it_is_asked_for(depth, place) -> None:
    made = Task("retrieval", depth).samples(20, 104, 64, seed=1)
    assert (np.argmin(made, axis=1) == place).all()


def test_needles_lie_everywhere_where_no_depth_is_given() -> None:
    made = RETRIEVAL.samples(2000, 12, 64, seed=1)
    assert set(np.argmin(made, axis=1)) == set(range(9))


@pytest.mark.parametrize("task", [COPY, RETRIEVAL])
def test_samples_follow_from_the_seed(task) -> None:
    assert np.array_equal(task.samples(5, 64, 64, seed=1), task.samples(5, 64, 64, seed=1))
    assert not np.array_equal(task.samples(5, 64, 64, seed=1), task.samples(5, 64, 64, seed=2))


@pytest.mark.parametrize("source", ["task:copy", "task:retrieval", "task:retrieval@0.5"])
def test_a_task_is_a_source_whose_rows_are_whole_sequences(source, tmp_path) -> None:
    config = data(source, max_bytes=6400)
    check(config)
    corpus = prepare(config, cache=tmp_path)
    corpus.check_vocabulary(300)
    assert not any(tmp_path.iterdir())
    task = task_of(config)
    assert task is not None
    made = task.samples(190, 16, 300, seed=0)
    rows = Sampler(corpus.train, 16, seed=5).rows(0, 190, 0, 190)
    assert sorted(map(tuple, rows[:, :-1].tolist())) == sorted(map(tuple, made.tolist()))
    assert len(corpus.heldout) == 10 * 16 + 1
    assert not corpus.train.flags.writeable
    with pytest.raises(ConfigError, match="vocab_size"):
        corpus.check_vocabulary(299)


def test_a_task_stays_a_name_where_paths_are_made_absolute() -> None:
    config = RunConfig(data={"source": "task:retrieval@0.5"})
    assert with_absolute_paths(config).data.source == "task:retrieval@0.5"


@pytest.mark.parametrize("source", ["task:", "task:sort", "task:copy@0.5", "task:retrieval@2", "task:retrieval@x"])
def test_an_unknown_task_is_refused_with_those_that_exist(source) -> None:
    for look in (check, prepare):
        with pytest.raises(ConfigError, match="no such task; give 'task:copy', 'task:retrieval'"):
            look(data(source))


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.sequence_length is 3 .* needs at least 4 and 4"):
        check(data("task:copy", sequence_length=3))


def test_accuracy_counts_answers_alone() -> None:
    config = data("task:copy")

    def half_right(inputs: np.ndarray) -> np.ndarray:
        said = np.roll(inputs, -1, axis=1)
        said[:, :7] = -1  # No answers.
        said[:32, 7:] = -1
        return said

    assert accuracy(config, half_right) == 0.5
    with pytest.raises(ConfigError, match="only a task has answers"):
        accuracy(data("stdlib"), half_right)


@pytest.mark.parametrize("source", [pytest.param("task:copy", marks=pytest.mark.nightly), "task:retrieval"])
def test_a_small_model_learns_it(source) -> None:
    """In seconds; without what came before, one of 128 guesses would be right."""
    config = data(source, sequence_length=24, vocab_size=257)
    corpus = prepare(config)
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=2, hidden=64, heads=2, ffn_hidden=128, vocab_size=257, context=24))

    def predict(inputs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(inputs)).logits.argmax(-1).numpy()

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    sampler = Sampler(corpus.train, 24, seed=0)
    for step in range(1500):
        rows = torch.from_numpy(sampler.rows(step, 64, 0, 64))
        loss = model(rows[:, :-1], rows[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and accuracy(config, predict) > 0.95:
            return
    raise AssertionError(f"accuracy {accuracy(config, predict):.2f} after 1,500 steps, loss {loss.item():.2f}")

"""The languages that `benchmarks.languages` makes, and a short run of each learner."""

import pytest
import torch

from benchmarks import languages
from benchmarks.languages import END, IGNORED, LANGUAGES, LENGTH


def made(name):
    x, y = languages.words(name, 200, torch.Generator().manual_seed(0))
    return x, y, x[:, 1 : LENGTH + 1], y[:, LENGTH + 1 :]


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_determined_token_is_the_next_one(name):
    x, y, _, answer = made(name)
    known = y[:, :-1] != IGNORED
    assert torch.equal(x[:, 1:][known], y[:, :-1][known])
    assert (y[:, : LENGTH + 1] == IGNORED).all()
    assert len(x[:, 0].unique()) == 1
    assert 0 <= int(x.min()) <= int(x.max()) < languages.VOCABULARY
    assert (answer[:, 0] != IGNORED).all()


def test_answers_follow_from_the_letters():
    for name, follows in (("copy", list), ("sort", sorted), ("reverse", lambda w: w[::-1])):
        _, _, letters, answer = made(name)
        assert all(
            follows(word) == found
            for word, found in zip(letters.tolist(), answer.tolist(), strict=True)
        )
    _, _, letters, answer = made("sums")
    assert torch.equal(answer[:, 0], letters[:, 0])
    assert torch.equal((answer[:, :-1] + letters[:, 1:]) % 8, answer[:, 1:])


def test_brackets_are_balanced_at_the_end():
    _, _, letters, answer = made("brackets")
    for word, found in zip(letters.tolist(), answer.tolist(), strict=True):
        found = [token for token in found if token != IGNORED]
        assert (END in found) == (len(found) < LENGTH or found[-1] == END)
        opened = []
        for token in [*word, *(token for token in found if token != END)]:
            if token < 4:
                opened.append(token)
            else:
                assert opened.pop() == token - 4
        assert not opened


def test_no_tested_word_is_learned():
    continuum = languages.languages(3000, seed=1)
    for task in continuum.tasks:
        learned = {tuple(row) for row in task.train[:][0].tolist()}
        assert not learned & {tuple(row) for row in task.test[:][0].tolist()}


@pytest.mark.parametrize("learner", languages.LEARNERS)
def test_every_learner_runs(learner, monkeypatch):
    monkeypatch.setattr(languages, "TEST", 50)
    margin = {"margin": 0.5} if languages.LEARNERS[learner][1] else {}
    job = languages.Job(learner, 0, {"lr": 0.001, **margin}, 64, 8, "cpu")
    found = languages.run(job)
    assert len(found["R"]) == len(LANGUAGES)
    assert 0 < found["acc"] < 1
    rows = [{"learner": learner, "settings": job.settings, "runs": [found]}]
    assert f"| {learner} | 0.001 |" in languages.table(rows)
    assert languages.matrices(rows).count("\n") == 2 + len(LANGUAGES)

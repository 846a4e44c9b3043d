import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokens import IGNORE, Masking, TokenFile, TrainWindows, ValWindows, permute


def counting(n: int, ends: list[int] | None = None) -> TokenFile:
    """Token i is i: a window tells where it was read."""
    return TokenFile.from_array(
        np.arange(n, dtype=np.uint32), None if ends is None else np.array(ends, dtype=np.int64)
    )


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(n, key):
    positions = np.arange(n, dtype=np.uint64)
    out = permute(positions, n, np.full(n, key, dtype=np.uint64))
    assert np.array_equal(np.sort(out), positions)


def test_permute_depends_on_the_key_and_looks_random():
    n = 10_000
    positions = np.arange(n, dtype=np.uint64)
    a, b = (permute(positions, n, np.full(n, key, dtype=np.uint64)) for key in (1, 2))
    assert (a == b).mean() < 0.002 and (a == positions).mean() < 0.002
    assert abs(np.corrcoef(positions, a)[0, 1]) < 0.05 and abs(np.corrcoef(a, b)[0, 1]) < 0.05
    steps = np.diff(a.astype(np.int64))
    assert (steps > 0).mean() == pytest.approx(0.5, abs=0.03) and len(np.unique(steps)) > 6000


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 400), seq_len=st.integers(1, 40), seed=st.integers(-5, 2**40), data=st.data())
def test_an_epoch_visits_every_window_once_and_stays_inside(n, seq_len, seed, data):
    if n < seq_len + 1:
        return
    windows = TrainWindows(counting(n), seq_len, seed)
    epoch = data.draw(st.integers(0, 10**6))
    starts = windows.starts(np.arange(windows.n_windows) + epoch * windows.n_windows)
    assert starts.min() >= 0 and starts.max() + seq_len + 1 <= n
    assert np.array_equal(np.sort(starts) - starts.min(), np.arange(windows.n_windows) * seq_len)
    assert windows.n_windows * seq_len > n - 2 * seq_len - 1  # all but the two ends


def test_window_i_is_a_pure_function_of_seed_and_i():
    windows = TrainWindows(counting(5000), 16, seed=7)
    indices = np.array([0, 311, 312, 5, 10**9])
    starts = windows.starts(indices)
    again = TrainWindows(counting(5000), 16, seed=7)
    assert [again.starts(np.array([i]))[0] for i in indices] == starts.tolist()
    assert starts.tolist() != TrainWindows(counting(5000), 16, seed=8).starts(indices).tolist()
    # the values themselves: another order would silently break every resumed run
    assert TrainWindows(counting(5000), 16, seed=0).starts(np.arange(4)).tolist() == [2954, 2826, 2906, 1882]


def test_epochs_differ_in_order_and_phase():
    windows = TrainWindows(counting(5000), 16, seed=7)
    n = windows.n_windows
    epochs = [windows.starts(np.arange(n) + e * n) for e in range(40)]
    phases = {int(starts.min()) for starts in epochs}
    assert len(phases) > 10 and phases <= set(range(16))
    assert len({tuple(starts - starts.min()) for starts in epochs}) == 40


def test_batches_are_the_tokens_and_the_next_ones():
    windows = TrainWindows(counting(1000), 10, seed=1)
    batch = windows.batch(np.arange(8))
    starts = windows.starts(np.arange(8))
    expected = starts[:, None] + np.arange(10)
    assert batch["input_ids"].dtype == batch["targets"].dtype == np.int64
    np.testing.assert_array_equal(batch["input_ids"], expected)
    np.testing.assert_array_equal(batch["targets"], expected + 1)
    assert set(batch) == {"input_ids", "targets"}


def test_masked_tokens_are_the_targets_as_bert_has_them():
    n, seq_len, mask = 2000, 100, 60_000
    file = counting(50_000)
    plain = TrainWindows(file, seq_len, seed=1).batch(np.arange(n))["input_ids"]
    windows = TrainWindows(file, seq_len, seed=1, masking=Masking(0.15, mask, seed=1))
    batch = windows.batch(np.arange(n))
    read, targets = batch["input_ids"], batch["targets"]
    chosen = targets != IGNORE
    assert np.array_equal(targets[chosen], plain[chosen]) and np.array_equal(read[~chosen], plain[~chosen])
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    hidden, kept = read[chosen] == mask, read[chosen] == plain[chosen]
    assert hidden.mean() == pytest.approx(0.8, abs=0.01) and kept.mean() == pytest.approx(0.1, abs=0.01)
    other = read[chosen][~hidden & ~kept]
    assert 0 <= other.min() < 0.01 * mask and 0.99 * mask < other.max() < mask
    # a function of seed, window and position: the same alone, another in the next epoch and of another seed
    for index in (0, 7, n - 1):
        alone = windows.batch(np.array([index]))
        assert np.array_equal(alone["input_ids"][0], read[index]), index
    later = windows.batch(np.arange(n) + windows.n_windows)["targets"] != IGNORE
    assert (later & chosen).mean() == pytest.approx(0.15**2, abs=0.005)
    other_seed = TrainWindows(file, seq_len, seed=1, masking=Masking(0.15, mask, seed=2)).batch(np.arange(n))
    assert ((other_seed["targets"] != IGNORE) & chosen).mean() == pytest.approx(0.15**2, abs=0.005)


def test_padding_is_never_masked_and_a_document_begins_with_a_target():
    windows = ValWindows(counting(15, [4, 15]), 10, document_mask=True, masking=Masking(0.999, 99, seed=0))
    batch = windows.batch(np.arange(3))
    assert batch["targets"][0, 4] == 4 and (batch["targets"][1, 4:] == IGNORE).all()
    assert (batch["input_ids"][1, 4:] == 0).all() and (batch["targets"][2] == IGNORE).all()
    assert batch["document_ids"][0].tolist() == [0] * 4 + [1] * 6


def test_too_short_a_corpus_is_refused_with_numbers():
    with pytest.raises(ValueError, match=r"has 16 tokens.*seq_len=16 needs 17.*at most 15"):
        TrainWindows(counting(16), 16, 0)
    windows = TrainWindows(counting(17), 16, 0)
    assert windows.starts(np.arange(50)).tolist() == [0] * 50
    with pytest.raises(ValueError, match="has 1 tokens and needs 2"):
        ValWindows(counting(1), 16)


@pytest.mark.parametrize(("n", "seq_len"), [(2, 5), (41, 10), (42, 10), (50, 10), (51, 10), (7, 1)])
def test_validation_predicts_every_token_but_the_first_once(n, seq_len):
    windows = ValWindows(counting(n), seq_len)
    batch = windows.batch(np.arange(windows.n_windows))
    targets = batch["targets"]
    assert targets[targets != IGNORE].tolist() == list(range(1, n))
    np.testing.assert_array_equal(batch["input_ids"][targets != IGNORE], np.arange(n - 1))
    beyond = windows.batch(np.array([windows.n_windows, windows.n_windows + 7]))
    assert (beyond["targets"] == IGNORE).all() and (beyond["input_ids"] == 0).all()


def test_validation_can_be_limited():
    assert ValWindows(counting(1000), 10, max_tokens=55).n_windows == 5
    assert ValWindows(counting(1000), 10, max_tokens=1).n_windows == 1
    assert ValWindows(counting(1000), 10, max_tokens=10**6).n_windows == 100


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), seq_len=st.integers(1, 20))
def test_document_ids_number_the_documents_of_each_window(lengths, seq_len):
    ends = np.cumsum(lengths)
    n = int(ends[-1])
    if n < 2:
        return
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    windows = ValWindows(counting(n, ends.tolist()), seq_len, document_mask=True)
    batch = windows.batch(np.arange(windows.n_windows))
    assert batch["document_ids"].dtype == np.int32
    for row in range(windows.n_windows):
        s = row * seq_len
        for t in range(min(seq_len, n - 1 - s)):
            assert batch["document_ids"][row, t] == document_of[s + t] - document_of[s]
            crosses = document_of[s + t + 1] != document_of[s + t]
            assert batch["targets"][row, t] == (IGNORE if crosses else s + t + 1)


def test_files_are_mapped_lazily_and_travel_without_their_tokens(tmp_path):
    tokens = np.random.default_rng(0).integers(60000, size=4000).astype("<u2")
    tokens.tofile(tmp_path / "t.bin")
    np.array([1000, 4000], dtype="<i8").tofile(tmp_path / "d.bin")
    file = TokenFile(tmp_path / "t.bin", "<u2", 4000, tmp_path / "d.bin")
    assert file._tokens is None
    np.testing.assert_array_equal(file.tokens, tokens)
    assert file.document_ends.tolist() == [1000, 4000]
    assert len(pickle.dumps(file)) < 1000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(file)).tokens, tokens)


def test_a_large_batch_is_read_in_well_under_two_milliseconds(tmp_path):
    np.arange(4_000_000, dtype="<u2").tofile(tmp_path / "t.bin")
    windows = TrainWindows(TokenFile(tmp_path / "t.bin", "<u2", 4_000_000), 1024, seed=0)
    times = []
    for step in range(30):
        start = time.perf_counter()
        windows.batch(np.arange(64) + 64 * step)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3
    print(f"64 x 1024: {1e3 * min(times):.2f} ms at best, {1e3 * sorted(times)[15]:.2f} ms median")

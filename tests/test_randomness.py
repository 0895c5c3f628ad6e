"""Counter-based randomness against published vectors and a plain-integer loop."""

import threading
import time
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from nearsight.randomness import Draws, generators_kept, permutation, philox, seeded, stream_id, uniform, words

MASK = 0xFFFFFFFF


def philox_loop(key: list[int], counter: list[int]) -> list[int]:
    """Philox4x32-10 as the paper's pseudo-code has it, in Python integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def tensors(values: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


def test_philox_gives_the_known_answers_of_random123() -> None:
    known = [
        ([0, 0], [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 2, [MASK] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0xA4093822, 0x299F31D0],
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for key, counter, expected in known:
        assert [int(word) for word in philox(tensors(key), tensors(counter))] == expected
        assert philox_loop(key, counter) == expected


word = st.integers(0, MASK)


@given(st.lists(word, min_size=2, max_size=2), st.lists(word, min_size=4, max_size=4))
def test_philox_equals_the_loop(key: list[int], counter: list[int]) -> None:
    assert [int(value) for value in philox(tensors(key), tensors(counter))] == philox_loop(key, counter)


def test_words_are_a_function_of_seed_stream_epoch_and_index() -> None:
    seed, epoch, index = 2**40 + 5, 3, 17
    got = words(torch.tensor(seed), "some stream", torch.tensor(epoch), torch.tensor([index]), 6)[0].tolist()
    key = [seed & MASK, seed >> 32]
    lanes = [philox_loop(key, [index, epoch, stream_id("some stream"), lane]) for lane in range(2)]
    assert got == (lanes[0] + lanes[1])[:6]


def test_a_sample_keeps_its_draws_whatever_surrounds_it() -> None:
    epoch, step = torch.tensor(4), torch.tensor(0)
    many = Draws(torch.tensor([7, 8]), epoch, step, torch.tensor([[5, 6, 9], [1, 9, 2]]))
    alone = Draws(torch.tensor([8]), epoch, step, torch.tensor([[9]]))
    assert torch.equal(many.per_sample("s", 5)[1, 1], alone.per_sample("s", 5)[0, 0])
    assert torch.equal(many.per_batch("s", 5)[1], alone.per_batch("s", 5)[0])


def test_cells_may_be_in_different_epochs() -> None:
    step, index = torch.tensor(0), torch.tensor([[3, 4], [3, 4]])
    mixed = Draws(torch.tensor([1, 1]), torch.tensor([2, 5]), step, index)
    for cell, epoch in enumerate((2, 5)):
        alone = Draws(torch.tensor([1]), torch.tensor(epoch), step, index[:1])
        assert torch.equal(mixed.per_sample("s", 3)[cell], alone.per_sample("s", 3)[0])
        assert torch.equal(mixed.per_batch("s", 3)[cell], alone.per_batch("s", 3)[0])
    assert not torch.equal(mixed.per_sample("s", 3)[0], mixed.per_sample("s", 3)[1])


def test_uniform_is_uniform_and_streams_are_independent() -> None:
    seed, epoch, index = torch.tensor(0), torch.tensor(0), torch.arange(200_000)
    a = uniform(seed, "a", epoch, index, 1).flatten().double()
    b = uniform(seed, "b", epoch, index, 1).flatten().double()
    assert a.min() >= 0
    assert a.max() < 1
    counts = torch.histc(a, bins=100, min=0, max=1)
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi2 < 160  # χ² with 99 degrees: 1e-4 quantiles are 55 and 158
    assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.01


def test_permutations_are_permutations_and_differ_by_cell_and_epoch() -> None:
    order = permutation(torch.tensor([0, 1]), "order", torch.tensor([0, 0]), 1000)
    assert torch.equal(order.sort(dim=-1).values, torch.arange(1000).expand(2, -1))
    later = permutation(torch.tensor([0, 1]), "order", torch.tensor([0, 1]), 1000)
    assert torch.equal(order[0], later[0])
    assert not torch.equal(order[1], later[1])
    assert not torch.equal(order[0], order[1])


def test_first_permutation_is_stored() -> None:
    """Splits, batches and subsets of every published result hang on these numbers."""
    order = permutation(torch.tensor([0]), "order", torch.tensor(0), 10)
    assert order[0].tolist() == FIRST_ORDER


FIRST_ORDER = [3, 0, 8, 2, 5, 9, 1, 4, 7, 6]


def test_threads_that_draw_by_a_seed_wait_for_each_other() -> None:
    """Torch's global generator is one for all threads; each gets the numbers of its seed, whoever is beside it."""

    def drawn(seed: int, pause: Callable[[], object] = lambda: None) -> list[float]:
        with seeded(seed):
            first = torch.rand(3)
            pause()
            return [*first.tolist(), *torch.rand(3).tolist()]

    alone = {seed: drawn(seed) for seed in (0, 1)}
    state = torch.get_rng_state()
    inside, found = threading.Event(), {}

    def pause() -> None:
        inside.set()
        time.sleep(0.05)

    def other() -> None:
        with generators_kept(None):
            inside.wait()
        found[1] = drawn(1)

    thread = threading.Thread(target=other)
    thread.start()
    found[0] = drawn(0, pause)
    thread.join()
    assert found == alone
    assert torch.equal(torch.get_rng_state(), state)

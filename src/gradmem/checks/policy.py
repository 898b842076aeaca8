"""Checks that every memory policy must pass; each is a function of `make`, which builds one."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from gradmem.checks.same import _same
from gradmem.memory import EpisodicMemory, Policy

__all__ = ["POLICY_CHECKS", "MakePolicy", "check_policy"]

#: Makes a policy, or gives the name of one.
MakePolicy = Callable[[], Policy | str]


def check_policy(make: MakePolicy) -> None:
    """Run all checks on the memory policy that `make()` gives.

    Examples
    --------
    >>> check_policy(lambda: "reservoir")
    """
    for check in POLICY_CHECKS:
        check(make)


def keeps_to_its_budget(make: MakePolicy) -> None:
    memory = _memory(make, budget=13)
    for step, (x, t, y) in enumerate(_offers("aabbacddabe", sizes=(1, 5, 20))):
        memory.add(x, t, y)
        room = memory.share(len(memory))
        counts = [memory.count(one) for one in memory]
        assert sum(counts) <= 13, f"{sum(counts)} examples in step {step}, with a budget of 13"
        assert max(counts) <= room, f"{max(counts)} examples of a task that may have {room}"


def keeps_to_it_when_tasks_share(make: MakePolicy) -> None:
    memory = _memory(make, budget=11, groups=3)
    tasks = [*range(12), 3, 9, 0]
    for n, (x, t, y) in enumerate(_offers(tasks, sizes=(1, 6))):
        memory.add(x, t, y)
        groups = memory.groups
        assert len(groups) <= 3, f"{len(groups)} groups, at most 3 were allowed"
        total = sum(memory.count(group[0]) for group in groups)
        assert total <= 11, f"{total} examples after {n + 1} batches, with a budget of 11"
        _known(memory)


def keeps_only_what_was_offered(make: MakePolicy) -> None:
    """Each example once, with its own label; what was offered stays as it was."""
    memory = _memory(make, budget=12)
    last: dict[Hashable, int] = {}
    for x, t, y in _offers("abacb", sizes=(3, 1, 30)):
        before = x.clone(), y.clone()
        memory.add(x, t, y)
        _same(before, (x, y), "what was offered was changed")
        last[t] = max(last.get(t, 0), int(x[:, 0].max()))
        _known(memory)
        for one in memory:
            kept = memory[one][0][:, 0]
            assert kept.max() <= last[one], f"task {one!r} keeps what it was not offered"


def shrinks_to_some_of_what_it_kept(make: MakePolicy) -> None:
    memory = _memory(make, budget=12)
    for x, t, y in _offers("abcd", sizes=(9, 9)):
        before = {one: {*memory[one][0][:, 0].tolist()} for one in memory if one != t}
        memory.add(x, t, y)
        for one, kept in before.items():
            assert {*memory[one][0][:, 0].tolist()} <= kept, f"task {one!r} found new examples"


def is_deterministic_from_the_seed(make: MakePolicy) -> None:
    """Whatever happens to the global generator, which is left alone."""
    states = []
    for _ in range(2):
        memory = _memory(make, budget=10)
        outside = torch.get_rng_state()
        for x, t, y in _offers("abcab", sizes=(4, 9)):
            memory.add(x, t, y)
        assert torch.equal(outside, torch.get_rng_state()), "the global generator was moved"
        states.append(memory.state_dict())
        torch.rand(3)
    _same(states[0], states[1], "the same seed kept other examples")


def goes_on_from_its_state(make: MakePolicy) -> None:
    """At any point, through a file, also where tasks share; bit for bit."""
    for settings in ({"memories": 5}, {"budget": 9}, {"budget": 9, "groups": 2}):
        offers = _offers("abcabd", sizes=(4, 7))
        whole = _memory(make, **settings)
        files = []
        for x, t, y in offers:
            whole.add(x, t, y)
            files.append(io.BytesIO())
            torch.save(whole.state_dict(), files[-1])
        for i, file in enumerate(files):
            file.seek(0)
            other = _memory(make, seed=5, **settings)
            other.add(*offers[3])
            other.load_state_dict(torch.load(file, weights_only=True))
            for later in offers[i + 1 :]:
                other.add(*later)
            _same(whole.state_dict(), other.state_dict(), "a restored memory went another way")
            assert whole.groups == other.groups, f"{whole.groups} became {other.groups}"


def stays_where_it_is(make: MakePolicy) -> None:
    """No example costs a copy of the others: the tensors stay in place while no task arrives."""
    memory = _memory(make, memories=6)
    memory.add(*_offers("a", sizes=(6,))[0])
    places = {_address(memory)}
    for x, t, y in _offers("a" * 40, sizes=(1, 3)):
        memory.add(x, t, y)
        places.add(_address(memory))
    assert len(places) == 1, f"the memory moved {len(places) - 1} times while no task arrived"


POLICY_CHECKS: tuple[Callable[[MakePolicy], None], ...] = (
    keeps_to_its_budget,
    keeps_to_it_when_tasks_share,
    keeps_only_what_was_offered,
    shrinks_to_some_of_what_it_kept,
    is_deterministic_from_the_seed,
    goes_on_from_its_state,
    stays_where_it_is,
)


def _memory(make: MakePolicy, seed: int = 3, **limits: int) -> EpisodicMemory:
    """A memory with the policy, and stand-ins for what a network makes of examples."""
    memory = EpisodicMemory(keep=make(), seed=seed, **limits)  # type: ignore[arg-type]
    memory.attach(
        lambda x, t: x[:, 1:],
        lambda x, t, y, mask: x[:, 1].abs(),
        lambda x, t, y, mask: x[:, 1:] * y[:, None],
    )
    return memory


def _offers(
    tasks: Sequence[Hashable], sizes: Sequence[int]
) -> list[tuple[Tensor, Hashable, Tensor]]:
    """Batches of these sizes for each of the tasks; the first input numbers all examples."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    start = 0
    for t in tasks:
        for n in sizes:
            numbers = torch.arange(start, start + n)
            x = torch.cat([numbers[:, None], torch.randn(n, 3, generator=generator)], 1)
            batches.append((x, t, _label(numbers)))
            start += n
    return batches


def _label(numbers: Tensor) -> Tensor:
    """Four classes, the first the most frequent."""
    return (numbers.long() * 7 % 11 - 4).clamp(0, 3)


def _known(memory: EpisodicMemory) -> None:
    for t in memory:
        x, y = memory[t]
        assert torch.equal(_label(x[:, 0]), y), f"task {t!r} has labels of other examples"
        assert len(x[:, 0].unique()) == len(x), f"task {t!r} keeps an example twice"


def _address(memory: EpisodicMemory) -> int:
    return int(memory.stacks(["a"])[0].x.data_ptr())

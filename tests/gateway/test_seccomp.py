"""The filter's program, run by hand for both architectures."""

import pytest

from saccade.gateway import seccomp

READ = {"x86_64": 0, "aarch64": 63}
"""The number of a call that stays."""


def verdict(program: bytes, architecture: int, number: int) -> int:
    """Run *program* for one call, as the kernel does; return what it returns."""
    steps = list(seccomp.INSTRUCTION.iter_unpack(program))
    position = loaded = 0
    while True:
        code, if_true, if_false, value = steps[position]
        position += 1
        match code:
            case seccomp.LOAD_WORD:
                loaded = {seccomp.NUMBER_OFFSET: number, seccomp.ARCHITECTURE_OFFSET: architecture}[value]
            case seccomp.JUMP_IF_EQUAL:
                position += if_true if loaded == value else if_false
            case seccomp.JUMP_IF_AT_LEAST:
                position += if_true if loaded >= value else if_false
            case seccomp.RETURN:
                return int(value)


@pytest.mark.parametrize("name", seccomp.ARCHITECTURES)
def test_each_listed_call_is_refused_and_no_other(name: str) -> None:
    architecture = seccomp.ARCHITECTURES[name]
    program = seccomp.program(architecture, frozenset())
    refused = {entry[architecture.column] for entry in seccomp.REFUSED.values()} - {seccomp.ABSENT}
    assert READ[name] not in refused
    for number in range(500):
        expected = seccomp.REFUSE if number in refused else seccomp.ALLOW
        assert verdict(program, architecture.audit, number) == expected


@pytest.mark.parametrize("name", seccomp.ARCHITECTURES)
def test_calls_that_are_allowed_stay(name: str) -> None:
    architecture = seccomp.ARCHITECTURES[name]
    program = seccomp.program(architecture, seccomp.OPENING)
    assert verdict(program, architecture.audit, seccomp.REFUSED["openat"][architecture.column]) == seccomp.ALLOW
    assert verdict(program, architecture.audit, seccomp.REFUSED["socket"][architecture.column]) == seccomp.REFUSE


@pytest.mark.parametrize("name", seccomp.ARCHITECTURES)
def test_calls_of_another_architecture_are_refused(name: str) -> None:
    architecture = seccomp.ARCHITECTURES[name]
    program = seccomp.program(architecture, frozenset())
    assert verdict(program, 0x40000003, READ[name]) == seccomp.REFUSE
    assert verdict(program, architecture.audit, seccomp.FIRST_X32_CALL + READ[name]) == seccomp.REFUSE


def test_no_number_is_listed_twice() -> None:
    for column in (0, 1):
        numbers = [entry[column] for entry in seccomp.REFUSED.values() if entry[column] != seccomp.ABSENT]
        assert len(numbers) == len(set(numbers))

"""The filter's program, run by hand for both architectures."""

import pytest

from saccade.gateway import confinement

READ = {"x86_64": 0, "aarch64": 63}
"""The number of a call that stays."""


def verdict(program: bytes, architecture: int, number: int) -> int:
    """Run *program* for one call, as the kernel does; return what it returns."""
    steps = list(confinement.INSTRUCTION.iter_unpack(program))
    position = loaded = 0
    while True:
        code, if_true, if_false, value = steps[position]
        position += 1
        match code:
            case confinement.LOAD_WORD:
                loaded = {confinement.NUMBER_OFFSET: number, confinement.ARCHITECTURE_OFFSET: architecture}[value]
            case confinement.JUMP_IF_EQUAL:
                position += if_true if loaded == value else if_false
            case confinement.JUMP_IF_AT_LEAST:
                position += if_true if loaded >= value else if_false
            case confinement.RETURN:
                return int(value)


@pytest.mark.parametrize("name", confinement.ARCHITECTURES)
def test_each_listed_call_is_refused_and_no_other(name: str) -> None:
    architecture = confinement.ARCHITECTURES[name]
    program = confinement.program(architecture, frozenset())
    refused = {entry[architecture.column] for entry in confinement.REFUSED.values()} - {confinement.ABSENT}
    assert READ[name] not in refused
    for number in range(500):
        expected = confinement.REFUSE if number in refused else confinement.ALLOW
        assert verdict(program, architecture.audit, number) == expected


@pytest.mark.parametrize("name", confinement.ARCHITECTURES)
def test_calls_that_are_allowed_stay(name: str) -> None:
    architecture = confinement.ARCHITECTURES[name]
    program = confinement.program(architecture, confinement.OPENING)
    assert verdict(program, architecture.audit, confinement.REFUSED["openat"][architecture.column]) == confinement.ALLOW
    assert (
        verdict(program, architecture.audit, confinement.REFUSED["socket"][architecture.column]) == confinement.REFUSE
    )


@pytest.mark.parametrize("name", confinement.ARCHITECTURES)
def test_calls_of_another_architecture_are_refused(name: str) -> None:
    architecture = confinement.ARCHITECTURES[name]
    program = confinement.program(architecture, frozenset())
    assert verdict(program, 0x40000003, READ[name]) == confinement.REFUSE
    assert verdict(program, architecture.audit, confinement.FIRST_X32_CALL + READ[name]) == confinement.REFUSE


def test_no_number_is_listed_twice() -> None:
    for column in (0, 1):
        numbers = [entry[column] for entry in confinement.REFUSED.values() if entry[column] != confinement.ABSENT]
        assert len(numbers) == len(set(numbers))

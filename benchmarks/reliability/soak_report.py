"""What a soak must show, and how it is written down."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from benchmarks.reliability.processes import Holdings

METRICS = {
    "saccade_engine_steps_total": "steps of the engine",
    "vllm:generation_tokens_total": "tokens generated",
    "vllm:num_preemptions_total": "sequences preempted",
    "saccade_kv_blocks_evicted_total": "KV blocks evicted",
    "vllm:prefix_cache_hits_total": "prompt tokens found in the prefix cache",
    "saccade_encoded_items_total": "images encoded",
    "vllm:mm_cache_hits_total": "images found in the encoder cache",
    "saccade_images_by_hash_total": "images sent by their hash alone",
    "saccade_pixels_wanted_total": "pixels asked for after all",
}
"""All of these must have happened."""

MUST_BE_ZERO = ("vllm:num_requests_running", "vllm:num_requests_waiting", "saccade_slots_in_use")
MEMORY_PART, MEMORY_MIB, DESCRIPTORS, SHARED_MIB = 0.02, 6.0, 6.0, 1.0
"""What may be gained over the second half: memory of a role by a part of itself and a constant; descriptors of a role
(connections come and go); segments in /dev/shm."""


def gain(looks: Sequence[Holdings], value: Callable[[Holdings], float]) -> float:
    """Return how much *value* grows over the second half of *looks*, by the line of least squares through it."""
    half = looks[len(looks) // 2 :]
    if len(half) < 3:
        return 0.0
    line = statistics.linear_regression([look.seconds for look in half], [value(look) for look in half])
    return line.slope * (half[-1].seconds - half[0].seconds)


def violations(metrics: Mapping[str, float], idle: Mapping[str, float], looks: Sequence[Holdings]) -> list[str]:
    """Return what must not be, in words."""
    found = [
        f"{words}: none, so the pools were not small enough" for name, words in METRICS.items() if not metrics[name]
    ]
    found += [f"{name} is {value:.0f} at rest" for name, value in idle.items() if value]
    for role, held in looks[-1].own_mib.items():
        grown = gain(looks, lambda look, role=role: look.own_mib.get(role, 0.0))
        if grown > _allowed(held):
            found.append(f"memory of the {role} gained {grown:.1f} MiB over the second half")
        grown = gain(looks, lambda look, role=role: float(look.descriptors.get(role, 0)))
        if grown > DESCRIPTORS:
            found.append(f"descriptors of the {role} gained {grown:.1f} over the second half")
    if (grown := gain(looks, lambda look: look.shared_mib)) > SHARED_MIB:
        found.append(f"/dev/shm gained {grown:.1f} MiB over the second half")
    return found


def report(
    minutes: float,
    asked: Counter[str],
    outcomes: Counter[str],
    metrics: Mapping[str, float],
    looks: Sequence[Holdings],
    violated: Sequence[str],
) -> list[str]:
    """Return the report's lines of Markdown."""
    lines = ["", f"{sum(asked.values())} requests in {minutes:g} minutes: " + _counted(outcomes) + ".", ""]
    lines += ["| asked | requests |", "|---|---|", *(f"| {kind} | {count} |" for kind, count in sorted(asked.items()))]
    lines += ["", "| what happened | times |", "|---|---|"]
    lines += [f"| {words} | {metrics[name]:.0f} |" for name, words in METRICS.items()]
    lines += ["", "| held | at the start | half-way | at the end | gained over the second half | allowed |"]
    lines += ["|---|---|---|---|---|---|"]
    for role, held in sorted(looks[-1].own_mib.items()):
        own = lambda look, role=role: look.own_mib.get(role, 0.0)  # noqa: E731
        lines.append(_row(f"memory of {role} without pages of files, MiB", looks, own, _allowed(held)))
        pss = lambda look, role=role: look.pss_mib.get(role, 0.0)  # noqa: E731
        lines.append(_row(f"PSS of {role}, MiB", looks, pss))
    total = lambda look: float(sum(look.descriptors.values()))  # noqa: E731
    lines.append(_row("descriptors, all processes", looks, total, DESCRIPTORS))
    lines.append(_row("/dev/shm, MiB", looks, lambda look: look.shared_mib, SHARED_MIB))
    return [*lines, "", *(["**Violations**", *(f"- {line}" for line in violated)] if violated else ["No violation."])]


def _allowed(held_mib: float) -> float:
    return MEMORY_PART * held_mib + MEMORY_MIB


def _row(name: str, looks: Sequence[Holdings], value: Callable[[Holdings], float], allowed: float | None = None) -> str:
    points = (*(value(looks[index]) for index in (0, len(looks) // 2, -1)), gain(looks, value))
    limit = "not limited" if allowed is None else f"{allowed:.1f}"
    return f"| {name} | " + " | ".join([*(f"{point:.1f}" for point in points), limit]) + " |"


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())

"""Training: first the eye by a direct loss, then the whole model by what it answers."""

import copy
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import batches
import checkpoint
import tokenizer as words
import torch
import torch.nn.functional as F
from network import Eye, Heads, Mouth, Seen, largest_difference
from pictures import CHARACTERS, COLOURS, KINDS, NATIVE_SIZE, QUESTIONS, Drawn, draw
from plan import SIZES, Plan, Progressing, cosine, levels
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

CHECKPOINT_SECONDS = 600.0
REPORT_STEPS = 50
CHECK_STEPS = 500


class Trainer:
    """One run: the model, its running average, the optimizer and the counters."""

    def __init__(self, plan: Plan, work: Path, out: Path) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.work, self.out = plan, work, out
        self.tokenizer = words.build()
        config: Any = checkpoint.build_config(self.tokenizer)
        self.model: Any = Qwen3VLForConditionalGeneration(config)
        self.heads = Heads(config.text_config.hidden_size, len(CHARACTERS), len(COLOURS))
        self.average: Any = copy.deepcopy(self.model).requires_grad_(False)
        self.levels = levels()
        self.state = Progressing()
        eye = [*self.model.model.visual.parameters(), *self.heads.parameters()]
        mouth = list(self.model.model.language_model.parameters())
        self.optimizer = torch.optim.AdamW(
            [{"params": eye}, {"params": mouth}], lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.eyes = {size: Eye(self.model.model.visual, _patch_grid(size)) for size in SIZES}
        self.mouth = Mouth(self.model.model.language_model)
        self.fast_eye: Any = torch.compile(self.eyes[NATIVE_SIZE]) if plan.compiled else self.eyes[NATIVE_SIZE]
        self.fast_mouth: Any = torch.compile(self.mouth, dynamic=False) if plan.compiled else self.mouth
        self.fast_length = 32  # of plain text prompts; compiling for every other length would cost more than it gains
        self.console = Console()

    def run(self) -> None:
        """Train to the plan's last step, from the newest checkpoint if there is one."""
        torch.set_num_threads(self.plan.threads)
        self.work.mkdir(parents=True, exist_ok=True)
        self.load()
        self._compare()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        saved = time.monotonic()
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("training", total=self.plan.steps, completed=self.state.step)
            while self.state.step < self.plan.steps:
                began = time.monotonic()
                self._report(self._step())
                self.state.seconds += time.monotonic() - began
                progress.update(task, completed=self.state.step)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def _compare(self) -> None:
        """The batched way through the model must be transformers' own."""
        drawn = [draw("text", number, "test", self.levels[-1]) for number in range(4)]
        asked = [self._prompt(item.question, (2, 4), None) for item in drawn]
        lines = batches.sequences(self.tokenizer, asked, [item.answer for item in drawn], (2, 4))
        pixels = batches.patches([item.image for item in drawn])
        layout = self.mouth.layout(lines.places, lines.spread)
        difference = largest_difference(self.model, pixels, (4, 8), lines.ids, layout)
        self.console.print(f"batched against transformers' forward: {difference:.1e} over all logits")
        if difference > 1e-3:
            raise RuntimeError(f"the batched forward differs from transformers' by {difference}")

    def _step(self) -> dict[str, float]:
        state, plan = self.state, self.plan
        rng = random.Random(f"{plan.seed}/{state.step}")
        joint = state.step >= plan.eye_steps
        drawn = self._draw(rng, joint)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            size = drawn[0].image.size
            pixels = batches.patches([item.image for item in drawn])
            seen = (self.fast_eye if size == NATIVE_SIZE else self.eyes[size])(pixels)
            loss, numbers = self._direct_loss(seen, drawn)
            if joint:
                loss = loss + self._answer_loss(rng, seen, drawn, numbers)
        self._descend(loss, joint)
        numbers["loss"] = float(loss.detach())
        state.step += 1
        state.recent = 0.98 * state.recent + 0.02 * numbers.get("named", state.recent)
        if state.recent > 0.8 and state.level < len(self.levels) - 1:
            state.level, state.recent = state.level + 1, 0.0
        return numbers

    def _draw(self, rng: random.Random, joint: bool) -> list[Drawn]:
        """The step's pictures, all of one size."""
        state, plan = self.state, self.plan
        kind = "shape" if joint and rng.random() < plan.shapes else "text"
        size = NATIVE_SIZE
        if state.level == len(self.levels) - 1 and rng.random() < plan.other_sizes:
            size = rng.choice(SIZES[1:])
        first = plan.seed * 1_000_000_000 + state.step * plan.batch
        style = replace(self.levels[state.level], size=size)
        return [draw(kind, first + number, "train", style) for number in range(plan.batch)]

    def _direct_loss(self, seen: Seen, drawn: list[Drawn]) -> tuple[Tensor, dict[str, float]]:
        """What the heads make of the tokens; a picture of a shape has only its colour to tell."""
        asked = batches.targets(drawn)
        characters, places, colours = self.heads(seen.tokens)
        loss = 0.2 * F.cross_entropy(colours.float(), asked.colours)
        numbers = {"coloured": float((colours.argmax(-1) == asked.colours).float().mean())}
        if drawn[0].kind == "text":
            characters, wanted = characters.flatten(0, 2).float(), asked.characters.flatten()
            loss = loss + F.cross_entropy(characters, wanted)
            loss = loss + 0.3 * F.cross_entropy(places.flatten(0, 2).float(), asked.places.flatten())
            covered = wanted < len(CHARACTERS)
            numbers["named"] = float((characters.argmax(-1) == wanted)[covered].float().mean())
        return loss, numbers

    def _answer_loss(self, rng: random.Random, seen: Seen, drawn: list[Drawn], numbers: dict[str, float]) -> Tensor:
        """Half of the pictures are asked for their text or shape, some of them also for the colour.

        The language model learns within minutes what takes the eye an hour, so the eye gets more pictures than it.
        """
        kind, grid = drawn[0].kind, batches.merged_grid(drawn[0].image.size)
        system = rng.choice(batches.SYSTEM) if rng.random() < 0.1 else None
        half, some = len(drawn) // 2, len(drawn) // 8
        answers = [item.answer for item in drawn[:half]] + [item.colour for item in drawn[:some]]
        kinds = [kind] * half + ["colour" if kind == "text" else "shape_colour"] * some
        asked = [self._prompt(rng.choice(QUESTIONS[kind]), grid, system) for kind in kinds]
        both = torch.cat([torch.arange(half), torch.arange(some)])
        shown = Seen(seen.tokens[both], tuple(part[both] for part in seen.deep))
        lines = batches.sequences(self.tokenizer, asked, answers, grid)
        fast = lines.ids.shape[1] == self.fast_length and grid == batches.merged_grid(NATIVE_SIZE)
        mouth = self.fast_mouth if fast else self.mouth
        states = mouth(lines.ids, shown, self.mouth.layout(lines.places, lines.spread))
        loss, right = self._language_loss(states, lines.labels)
        numbers["read" if kind == "text" else "shape"] = float(right[:half].float().mean())
        numbers["answered"] = float(right[half:].float().mean())
        return loss + self._blind_loss(rng) if self.state.step % 10 == 0 else loss

    def _blind_loss(self, rng: random.Random) -> Tensor:
        """Without a picture there is one right answer."""
        questions = [rng.choice(QUESTIONS[rng.choice(KINDS)]) for _ in range(8)]
        asked = [self._prompt(question, None, None) for question in questions]
        lines = batches.sequences(self.tokenizer, asked, [batches.NO_PICTURE] * len(asked), (0, 0))
        states = self.mouth(lines.ids, None, self.mouth.layout(lines.places, None))
        return 0.3 * self._language_loss(states, lines.labels)[0]

    def _language_loss(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of the answers' tokens, and which answers greedy decoding would give exactly."""
        learned = labels != batches.IGNORED
        logits = self.model.lm_head(states[learned]).float()
        wrong = torch.zeros_like(learned)
        wrong[learned] = logits.argmax(-1) != labels[learned]
        return F.cross_entropy(logits, labels[learned]), ~wrong.any(1)

    def _prompt(self, question: str, grid: tuple[int, int] | None, system: str | None) -> batches.Prompt:
        tokens = grid[0] * grid[1] if grid else 0
        return batches.prompt(self.tokenizer, question, tokens, system)

    def _descend(self, loss: Tensor, joint: bool) -> None:
        eye, mouth = self._rates(joint)
        self.optimizer.param_groups[0]["lr"], self.optimizer.param_groups[1]["lr"] = eye, mouth
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], 1.0)
        self.optimizer.step()
        decay = min(self.plan.average, (1 + self.state.step) / (10 + self.state.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)

    def _rates(self, joint: bool) -> tuple[float, float]:
        """Learning rates of eye and mouth: warm-up and cosine, to a third alone and to zero together."""
        plan, step = self.plan, self.state.step
        if not joint:
            return plan.eye_rate * cosine(step, plan.eye_steps, plan.warm_up, 0.4), 0.0
        done, all_steps = step - plan.eye_steps, plan.steps - plan.eye_steps
        share = cosine(done, all_steps, plan.warm_up, 0.0)
        return plan.joint_eye_rate * share, plan.mouth_rate * share

    def _report(self, numbers: dict[str, float]) -> None:
        state = self.state
        if state.step % REPORT_STEPS == 0:
            told = " ".join(f"{name} {value:.3f}" for name, value in numbers.items())
            self.console.print(f"step {state.step} {state.seconds:.0f} s level {state.level} {told}")
        if state.step % CHECK_STEPS == 0:
            told = " ".join(f"{name} {value:.3f}" for name, value in self.check(256).items())
            self.console.print(f"check at step {state.step}: {told}")

    @torch.no_grad()
    def check(self, count: int) -> dict[str, float]:
        """Texts never trained on, read by the averaged weights: how many answers are exact."""
        model, grid = self.average.model, batches.merged_grid(NATIVE_SIZE)
        eye, mouth = Eye(model.visual, _patch_grid(NATIVE_SIZE)), Mouth(model.language_model)
        found = {}
        for kind in KINDS:
            drawn = [draw(kind, 10_000_000 + number, "test") for number in range(count)]
            asked = [self._prompt(item.question, grid, None) for item in drawn]
            lines = batches.sequences(self.tokenizer, asked, [item.answer for item in drawn], grid)
            seen = eye(batches.patches([item.image for item in drawn]))
            states = mouth(lines.ids, seen, mouth.layout(lines.places, lines.spread))
            if kind == "text":
                found["named"] = self._direct_loss(seen, drawn)[1]["named"]
            said = self.average.lm_head(states).argmax(-1)
            exact = ((said == lines.labels) | (lines.labels == batches.IGNORED)).all(1)
            found[kind] = float(exact.float().mean())
        return found

    def save(self) -> None:
        """Write the checkpoint, then the hub folder of the averaged weights."""
        tensors = {f"average.{name}": value for name, value in self.average.named_parameters()}
        for name, parameter in self._parameters():
            tensors[f"weight.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"adam.{key}.{name}"] = value
        fresh = self.work / "checkpoint.new"
        facts = {"plan": json.dumps(asdict(self.plan)), "state": json.dumps(asdict(self.state))}
        save_file({name: value.contiguous() for name, value in tensors.items()}, fresh, metadata=facts)
        fresh.replace(self.work / "checkpoint.safetensors")
        checkpoint.write_hub(self.out, self.average, self.tokenizer)
        told = {"step": self.state.step, "seconds": round(self.state.seconds), "plan": asdict(self.plan)}
        (self.work / "progress.json").write_text(json.dumps(told, indent=2) + "\n")
        self.console.print(f"saved at step {self.state.step}")

    def load(self) -> None:
        """Take up the newest checkpoint, if there is one."""
        path = self.work / "checkpoint.safetensors"
        if not path.is_file():
            return
        with safe_open(path, "pt") as stored:
            self.state = Progressing(**json.loads(stored.metadata()["state"]))
            names = set(stored.keys())
            with torch.no_grad():
                for name, value in self.average.named_parameters():
                    value.copy_(stored.get_tensor(f"average.{name}"))
                for name, parameter in self._parameters():
                    parameter.copy_(stored.get_tensor(f"weight.{name}"))
                    keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"adam.{key}.{name}" in names]
                    kept = {key: stored.get_tensor(f"adam.{key}.{name}") for key in keys}
                    if kept:
                        self.optimizer.state[parameter] = kept
        self.console.print(f"continuing at step {self.state.step}")

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for prefix, module in (("model", self.model), ("heads", self.heads)):
            for name, parameter in module.named_parameters():
                yield f"{prefix}.{name}", parameter


def _patch_grid(size: tuple[int, int]) -> tuple[int, int]:
    return size[1] // batches.PATCH, size[0] // batches.PATCH

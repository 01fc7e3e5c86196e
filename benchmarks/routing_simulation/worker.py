"""A simulated worker: steps of prefill chunks and decodes over a cache of reference-counted blocks, as vLLM's."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from saccade.fleet.router import Booking, RoutedImage
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent


@dataclass(frozen=True)
class Speed:
    """How long a step takes, in seconds, and how much it holds.

    A step takes *step*, *token* for each prompt token, *image_token* for each token of an image that it encodes, and
    *decode* for each sequence that decodes. It computes at most *max_tokens* tokens; at most *max_sequences* sequences
    run.
    """

    step: float
    token: float
    image_token: float
    decode: float
    max_tokens: int
    max_sequences: int


@dataclass(frozen=True)
class Prompt:
    """A prompt of *num_tokens* tokens with the keys of its full blocks, which asks for *num_answer* tokens.

    *repeats*: another prompt with the same images came before.
    """

    num_tokens: int
    keys: Sequence[bytes]
    images: Sequence[RoutedImage]
    num_answer: int
    repeats: bool


@dataclass
class SimulatedSequence:
    """A prompt at a worker. *blocks* are the keys of those full blocks that are computed or were found."""

    prompt: Prompt
    arrived_at: float
    booking: Booking
    num_cached: int = 0
    num_computed: int = 0
    num_answered: int = 0
    first_token_at: float = 0.0
    blocks: list[bytes] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return self.num_computed >= self.prompt.num_tokens


class BlockCache:
    """*capacity* blocks. Those of a key can be shared; without users they stay until room is needed, oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._users: Counter[bytes] = Counter()
        self._unused: OrderedDict[bytes, None] = OrderedDict()
        self._num_private = 0

    def has(self, key: bytes) -> bool:
        return key in self._users or key in self._unused

    def use(self, key: bytes) -> None:
        """Keep the block of *key*, which is here."""
        self._unused.pop(key, None)
        self._users[key] += 1

    def release(self, key: bytes) -> None:
        """Undo one use()."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._unused[key] = None

    def reserve(self, num_blocks: int) -> list[bytes] | None:
        """Take *num_blocks* private blocks; return the keys that are evicted for them, None if there is no room."""
        num_free = self._capacity - len(self._users) - self._num_private
        if num_blocks > num_free:
            return None
        self._num_private += num_blocks
        num_evicted = max(0, num_blocks - (num_free - len(self._unused)))
        return [self._unused.popitem(last=False)[0] for _ in range(num_evicted)]

    def name(self, key: bytes) -> bool:
        """Make a private block that of *key*, in use; return whether there was none. Else the private one is freed."""
        self._num_private -= 1
        is_new = not self.has(key)
        self.use(key)
        return is_new

    def free(self, num_blocks: int) -> None:
        """Give private blocks back."""
        self._num_private -= num_blocks


class Worker:
    """Computes what it is sent, the oldest first.

    *later* calls a function after so many seconds. *publish* gets the worker's name and the events of its cache;
    *on_first_token* and *on_end* get sequences. The worker holds the encoder's outputs of *num_images* images.
    """

    def __init__(
        self,
        name: str,
        cache: BlockCache,
        speed: Speed,
        block_size: int,
        num_images: int,
        later: Callable[[float, Callable[[], None]], None],
        publish: Callable[[str, list[KvEvent]], None],
        on_first_token: Callable[[SimulatedSequence], None],
        on_end: Callable[[SimulatedSequence], None],
    ) -> None:
        self.name = name
        self._cache = cache
        self._speed = speed
        self._block_size = block_size
        self._num_images = num_images
        self._later = later
        self._publish = publish
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._images: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: deque[SimulatedSequence] = deque()
        self._running: list[SimulatedSequence] = []
        self._is_busy = False

    def must_encode(self, key: bytes) -> bool:
        """Return whether the encoder's output for an image is not held."""
        return key not in self._images

    def start(self, sequence: SimulatedSequence) -> None:
        """Queue *sequence*."""
        self._waiting.append(sequence)
        if not self._is_busy:
            self._begin_step()

    def _begin_step(self) -> None:
        decodes = [each for each in self._running if each.decodes]
        budget = self._speed.max_tokens - len(decodes)
        chunks: list[tuple[SimulatedSequence, int]] = []
        events: list[KvEvent] = []
        num_image_tokens = 0
        prefilling = (each for each in self._running if not each.decodes)
        for sequence in prefilling:
            budget -= self._add_chunk(chunks, sequence, budget)
        while self._waiting and budget > 0 and len(self._running) < self._speed.max_sequences:
            evicted = self._admit(self._waiting[0])
            if evicted is None:
                break
            events += [BlockRemoved(key) for key in evicted]
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            num_image_tokens += self._encode_images(sequence)
            budget -= self._add_chunk(chunks, sequence, budget)
        if not chunks and not decodes:
            self._is_busy = False
            return
        self._is_busy = True
        speed = self._speed
        seconds = speed.step + speed.decode * len(decodes) + speed.image_token * num_image_tokens
        seconds += speed.token * sum(number for _, number in chunks)
        self._later(seconds, lambda: self._end_step(chunks, decodes, events))

    def _add_chunk(self, chunks: list[tuple[SimulatedSequence, int]], sequence: SimulatedSequence, budget: int) -> int:
        number = min(budget, sequence.prompt.num_tokens - sequence.num_computed)
        if number > 0:
            chunks.append((sequence, number))
        return number

    def _admit(self, sequence: SimulatedSequence) -> list[bytes] | None:
        """Give a sequence its blocks; return the keys that are evicted for them, None if there is no room."""
        prompt = sequence.prompt
        reusable = prompt.keys[: (prompt.num_tokens - 1) // self._block_size]
        held = next((count for count, key in enumerate(reusable) if not self._cache.has(key)), len(reusable))
        for key in reusable[:held]:
            self._cache.use(key)
        evicted = self._cache.reserve(self._num_blocks(prompt) - held)
        if evicted is None:
            for key in reusable[:held]:
                self._cache.release(key)
            return None
        sequence.blocks = list(reusable[:held])
        sequence.num_cached = sequence.num_computed = held * self._block_size
        return evicted

    def _num_blocks(self, prompt: Prompt) -> int:
        return -(-(prompt.num_tokens + prompt.num_answer) // self._block_size)

    def _encode_images(self, sequence: SimulatedSequence) -> int:
        """Return the number of tokens of the images that are encoded now."""
        num_tokens = 0
        for image in sequence.prompt.images:
            if image.stop <= sequence.num_cached:
                continue
            num_tokens += image.num_tokens if self.must_encode(image.key) else 0
            self._images[image.key] = None
            self._images.move_to_end(image.key)
            if len(self._images) > self._num_images:
                self._images.popitem(last=False)
        return num_tokens

    def _end_step(
        self,
        chunks: Sequence[tuple[SimulatedSequence, int]],
        decodes: Sequence[SimulatedSequence],
        events: list[KvEvent],
    ) -> None:
        for sequence, number in chunks:
            sequence.num_computed += number
            events += self._name_blocks(sequence)
            if sequence.decodes:
                self._on_first_token(sequence)
        for sequence in [*decodes, *(sequence for sequence, _ in chunks if sequence.decodes)]:
            sequence.num_answered += 1
            if sequence.num_answered == sequence.prompt.num_answer:
                self._end(sequence)
        if events:
            self._publish(self.name, events)
        self._begin_step()

    def _name_blocks(self, sequence: SimulatedSequence) -> list[KvEvent]:
        """Name the full blocks that were computed; return the events of those that were not here."""
        keys = sequence.prompt.keys
        events: list[KvEvent] = []
        for number in range(len(sequence.blocks), min(sequence.num_computed // self._block_size, len(keys))):
            if self._cache.name(keys[number]):
                parent = keys[number - 1] if number else b""
                events.append(BlockStored(keys[number], parent, [], is_first=not number))
            sequence.blocks.append(keys[number])
        return events

    def _end(self, sequence: SimulatedSequence) -> None:
        self._running.remove(sequence)
        self._cache.free(self._num_blocks(sequence.prompt) - len(sequence.blocks))
        # The end of a prompt is evicted before its beginning.
        for key in reversed(sequence.blocks):
            self._cache.release(key)
        self._on_end(sequence)

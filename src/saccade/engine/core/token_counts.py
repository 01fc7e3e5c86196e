"""Count the tokens of a sequence's answer, token by token. No torch."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ordered


class TokenCounts:
    """ids[i] occurs counts[i] times in the answer; *prompt_ids* are listed too, initially with count 0."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._num_counted = 0
        self.ids = array("q", self._places)
        self.counts = array("q", bytes(8 * len(self._places)))

    def update(self, token_ids: Ordered[int], start: int) -> None:
        """Count the tokens added since the last call to the answer, which begins at token_ids[start]."""
        for token_id in token_ids[start + self._num_counted :]:
            place = self._places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
        self._num_counted = len(token_ids) - start

"""Which tokens each request may draw: `allowed_token_ids` as a mask on the device, built once per request."""

from collections.abc import Sequence as Ordered

import torch

from saccade.engine.sequence import Sequence


class AllowedTokens:
    """Masks by (connection, request_id). The samples of a request share one; a retracted sequence finds it again.

    A mask has a byte for each token of the vocabulary. `forget` lets it go, and must be called when a request ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forbidden_V: dict[tuple[int, str], torch.Tensor] = {}
        self.num_built = 0

    def __len__(self) -> int:
        """Return the number of masks that are kept."""
        return len(self._forbidden_V)

    def apply(self, logits_RV: torch.Tensor, sequences: Ordered[Sequence]) -> None:
        """Set the logits of all but the allowed ids to -inf, in place; row i belongs to sequences[i]."""
        for row, sequence in enumerate(sequences):
            if sequence.sampling.allowed_token_ids:
                logits_RV[row].masked_fill_(self._mask(sequence, logits_RV.shape[1]), float("-inf"))

    def forget(self, connection: int, request_id: str) -> None:
        """Let the mask of a request go that has ended; most have none."""
        self._forbidden_V.pop((connection, request_id), None)

    def _mask(self, sequence: Sequence, vocab_size: int) -> torch.Tensor:
        key = (sequence.connection, sequence.request_id)
        mask_V = self._forbidden_V.get(key)
        if mask_V is None:
            allowed = torch.tensor(sequence.sampling.allowed_token_ids, dtype=torch.int64, device=self._device)
            mask_V = torch.ones(vocab_size, dtype=torch.bool, device=self._device).index_fill_(0, allowed, False)
            self._forbidden_V[key] = mask_V
            self.num_built += 1
        return mask_V

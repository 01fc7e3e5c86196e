"""Settings that follow from others."""

from pathlib import Path

import msgspec
import scripted
from tables import table

from saccade.gateway.config import GatewayConfig
from saccade.protocol.output import FinishReason, TokenDelta

ROWS = 8
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": ROWS}
"""As many samples as the worker has rows."""


@table("keys, num_at_once", [((), msgspec.UNSET), (("a",), msgspec.UNSET), (("a", "b"), ROWS * 3 // 4)])
def test_several_tenants_share_the_rows_of_a_lone_worker(
    keys: tuple[str, ...], num_at_once: int | msgspec.UnsetType, tiny_qwen3_vl: Path
) -> None:
    """Before, only a file of keys made them share: the samples of one key took all rows."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=keys)) as gateway:
        assert gateway.worker.state.description is not None
        assert gateway.worker.state.description.max_num_seqs == ROWS
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.STOP, index=index) for index in range(ROWS)]
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        assert gateway.ask("POST", "/v1/chat/completions", CHAT, **headers).status == 200
        assert gateway.worker.requests[0].num_at_once == num_at_once

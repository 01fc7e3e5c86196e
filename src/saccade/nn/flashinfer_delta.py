"""The gated delta rule (saccade.nn.ops) on a GPU by FlashInfer: one kernel each for decodes, proposals and chunks.

FlashInfer stores a state as [values, keys], Saccade as [keys, values]. Both have 128 channels here, so FlashInfer's
kernels can use the states' memory in their own order. Within a process, either all steps use these kernels or none
does. Source of the arguments: flashinfer/gdn_prefill.py and gdn_decode.py, release 0.7.2. It has never run on a GPU;
tests/real checks its calls against the releases' own signatures. Shapes as in saccade.nn.delta_rule.
"""

from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from flashinfer.gdn_prefill import chunk_gated_delta_rule

from saccade.nn.delta_rule import Gates, Trail
from saccade.nn.transfer import to_device

WIDTH = 128
MAJORS = (9, 10, 12)
"""Major numbers of the compute capabilities that have all three kernels."""


def gated_delta_rule(
    q_NKD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NHW: torch.Tensor,
    gates: Gates,
    states: torch.Tensor,
    rows: torch.Tensor,
    lengths: tuple[int, ...],
    trail: Trail = None,
) -> torch.Tensor | None:
    """Compute ops.gated_delta_rule in bfloat16. Return None for widths other than WIDTH, and on GPUs not in MAJORS.

    The kernel for decodes takes slices of wider rows, as the model has them.
    """
    if states.shape[-2:] != (WIDTH, WIDTH) or torch.cuda.get_device_capability(states.device)[0] not in MAJORS:
        return None
    if trail is None and max(lengths) == 1:
        # The library fills an output of its own with zeros.
        output_N1HW, _ = gated_delta_rule_decode_pretranspose(
            *(part.unsqueeze(1) for part in (q_NKD, k_NKD, v_NHW)),
            None,
            gates.rate_log_H,
            gates.a_NH.unsqueeze(1),
            gates.bias_H,
            gates.b_NH.unsqueeze(1),
            initial_state=states,
            initial_state_indices=rows.int(),
            output=v_NHW.new_empty(v_NHW.shape).unsqueeze(1),
        )
        return output_N1HW.squeeze(1)  # type: ignore[no-any-return]
    q, k, v = (part.contiguous() for part in (q_NKD, k_NKD, v_NHW))
    if trail is not None:
        output, _ = gated_delta_rule_mtp(
            *(part.unflatten(0, trail.shape) for part in (q, k, v)),
            states,
            rows.int(),
            gates.rate_log_H,
            gates.a_NH.unflatten(0, trail.shape).contiguous(),
            gates.bias_H,
            gates.b_NH.unflatten(0, trail.shape).contiguous(),
            ssm_state_indices=trail.int(),
            disable_state_update=False,
        )
        return output.flatten(0, 1)  # type: ignore[no-any-return]
    output, _ = chunk_gated_delta_rule(
        q,
        k,
        v,
        gates.log_decay().exp(),
        gates.b_NH.float().sigmoid(),
        initial_state=states,
        output_final_state=True,
        cu_seqlens=_borders(lengths, q.device),
        use_qk_l2norm_in_kernel=True,
        output_state=states,
        state_indices=rows,
        max_seqlen=max(lengths),
    )
    return output  # type: ignore[no-any-return]


@lru_cache(maxsize=4)
def _borders(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the sequences' borders int32, which all layers of a step share."""
    return to_device(np.array((0, *accumulate(lengths)), np.int32), device)

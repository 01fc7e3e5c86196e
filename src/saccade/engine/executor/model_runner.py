"""Execute steps: encode, embed, run the network, sample. The runner holds the tensors of every cache."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import PromptScores, SamplingInput, StepInput, StepOutput
from saccade.engine.executor import finite, kv_copies, logprobs, memory
from saccade.engine.executor.batch import Batch, RowBuffers, as_decodes, build_batch
from saccade.engine.executor.caches import Caches
from saccade.engine.executor.decode_graphs import DecodeGraphs
from saccade.engine.executor.drafter import Drafter, Drafting, Drafts
from saccade.engine.executor.encoder import Encoder
from saccade.engine.executor.execution import Execution
from saccade.engine.executor.loader import LoadedModel
from saccade.engine.executor.penalties import Penalties
from saccade.engine.executor.sampler import Sampler
from saccade.engine.executor.weight_filler import Progress
from saccade.errors import StartupError
from saccade.models.network import Network
from saccade.models.spec import window_of
from saccade.nn.context import ForwardContext, PagedLayout
from saccade.nn.transfer import to_device
from saccade.protocol.output import TokenLogprob

logger = structlog.get_logger(__name__)


class Forwarded(NamedTuple):
    """A step's hidden states [N, E], to sample tokens from; None if the step has no chunks.

    *output* does not have the draws yet. *drafting* is for networks with a draft layer.
    """

    step: StepInput
    batch: Batch | None
    hidden: torch.Tensor | None
    output: StepOutput
    drafting: Drafting | None = None


class Drawing(NamedTuple):
    """Token ids, scores and drafts that are being computed and copied to the host; *copy* is None if there are none.

    *scored* has the indices of the drawn tokens whose log probabilities are requested. The copy ends with the sums that
    *summed* names (executor.finite).
    """

    copy: logprobs.HostCopy | None
    step: StepInput
    sampling: SamplingInput
    scored: tuple[int, ...]
    has_drafts: bool
    summed: tuple[str, ...]


class ModelRunner:
    """The network, caches, encoder outputs and row buffers of one device, which may be one of several ranks."""

    def __init__(self, network: Network, execution: Execution, caches: Caches) -> None:
        self.network = network
        self.backend = execution.backend
        self.threads = execution.threads
        self.ranks = execution.ranks
        self.encoder = Encoder(
            network, execution.vision_backend, execution.ranks, execution.encoder_graphs, execution.encode_budget
        )
        self.device = network.device
        self.dtype = network.dtype
        penalties = Penalties(caches.sizes.num_rows, network.spec.vocab_size, self.device)
        self.rows = RowBuffers(caches.sizes.num_rows, self.device)
        self.sampler = Sampler(network.spec.placeholder_token_ids, self.rows.changes, penalties, self.device)
        self.encoder_outputs: dict[int, torch.Tensor] = {}
        self.caches = caches
        self.graphs: DecodeGraphs | None = None
        self._window = window_of(network.spec.kv_specs)
        self.drafter: Drafter | None = None
        if network.spec.drafts:
            self.drafter = Drafter(network, self.backend, caches, self.rows, execution.ranks)

    def update(self, step: StepInput) -> None:
        """Prepare a step: drop encoder outputs, end and start rows, change block tables, restore and receive states."""
        for output_id in step.drop:
            self.encoder_outputs.pop(output_id, None)
        self.encoder.drop(step.drop)
        self.rows.end_rows(step.ended)
        self.rows.start_rows(step.started)
        self.rows.change_tables(step.tables)
        self.caches.begin_rows(step)
        for receive in step.receive:
            kv_copies.write_blocks(self.caches, receive)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Forwarded:
        """Encode the images, run the network over the chunks, save and send states.

        If an image cannot be encoded, only the results of rows that show it are meaningless.
        """
        began_at = time.perf_counter()
        if not (step.chunks or step.images or step.slices):
            return Forwarded(step, None, None, StepOutput(step.number, sent=self._send(step)))
        num_patches = self.encoder.num_patches(step.images, step.slices)
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        self.threads.use(num_tokens + num_patches, sum(chunk.start for chunk in step.chunks))
        block_size = self.caches.sizes.block_size
        keeps, ahead = self.caches.has_recurrent_layers, self.network.spec.longest_whole > 0
        batch = None
        if step.chunks:
            chunks = step.chunks if self.graphs is None or keeps else as_decodes(step.chunks)
            batch = build_batch(
                *(chunks, self.rows, block_size, self.device),
                sizes=self.caches.sizes if keeps else None,
                looks_ahead=ahead,
                window=self._window,
            )
        built_at = time.perf_counter()
        encoded = self.encoder.encode(step.images, step.slices)
        self.encoder_outputs.update(encoded.features)
        hidden, drafting = (None, None) if batch is None else self._forward(step, batch)
        self.caches.save(step.chunks)
        output = StepOutput(
            step.number,
            batch_seconds=built_at - began_at,
            encode_seconds=encoded.seconds,
            network_seconds=time.perf_counter() - built_at,
            failed_encodings=encoded.failed,
            sent=self._send(step),
        )
        return Forwarded(step, batch, hidden, output, drafting)

    def _send(self, step: StepInput) -> tuple[bytes, ...]:
        return tuple(kv_copies.read_blocks(self.caches, send) for send in step.send)

    @torch.inference_mode()
    def draw(self, forwarded: Forwarded, sampling: SamplingInput) -> Drawing:
        """Sample from a step's hidden states, compute the requested log probabilities, and wait for neither.

        Sum the results, before anything changes them, to find values that are not finite.
        """
        step, batch, hidden = forwarded.step, forwarded.batch, forwarded.hidden
        scored = tuple(index for index, num_top in enumerate(sampling.num_top) if num_top is not None)
        results: list[torch.Tensor] = []
        sums: dict[str, torch.Tensor] = {}
        ids = None
        if step.encoded:
            sums[finite.IMAGES] = finite.sums_of_all([self.encoder_outputs[output_id] for output_id in step.encoded])
        if batch is not None and hidden is not None:
            if len(batch.drawing) < len(hidden):
                # The logits of a draw are not finite if its hidden state is not.
                sums[finite.HIDDEN] = finite.sums_of_chunks(hidden, step.chunks)
            if batch.drawing or sampling.prompt_scores:
                ids, results = self._sample(batch, hidden, sampling, scored, sums)
        drafts = self._draft(forwarded, ids)
        if drafts is not None:
            sums[finite.DRAFTS] = finite.sums_of_chunks(drafts.states, step.chunks)
            results += [] if drafts.token_ids is None else [drafts.token_ids.double()]
        has_drafts = drafts is not None and drafts.token_ids is not None
        results += [one.double() for one in sums.values()]
        copy = logprobs.begin_copy(results) if results else None
        return Drawing(copy, step, sampling, scored, has_drafts, tuple(sums))

    def _sample(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        sampling: SamplingInput,
        scored: tuple[int, ...],
        sums: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the drawn ids, and the results to copy: ids, their scores, and scores of prompts. Add to *sums*."""
        params = [self.rows.sampling(row) for row in batch.drawing]
        # Log probabilities are the model's own, so the raw logits are kept: sampling changes the logits in place.
        logits = self.network.logits(hidden.index_select(0, batch.sample_rows))
        sums[finite.DRAWS] = finite.sums_of_rows(logits)
        scored_on_device = to_device(np.array(scored, np.int64), self.device) if scored else None
        raw = None if scored_on_device is None else logits.index_select(0, scored_on_device)
        next_ids = batch.input_ids.roll(-1).index_select(0, batch.sample_rows) if batch.has_proposals else None
        ids = self.sampler(logits, batch.drawing, params, sampling, next_ids)
        if batch.drawing:
            self.ranks.broadcast(ids, 0)
        self.rows.last_token_ids.index_copy_(0, batch.drawing_on_device, ids)
        results = [ids.double()]
        if raw is not None and scored_on_device is not None:
            num_top = max(sampling.num_top[index] or 0 for index in scored)
            results.append(logprobs.score(raw, ids.index_select(0, scored_on_device), num_top))
        prompts = [self._score_prompt(hidden, scores, batch.starts[scores.row]) for scores in sampling.prompt_scores]
        if prompts:
            sums[finite.PROMPTS] = torch.stack([total for _, total in prompts])
        return ids, results + [scores for scores, _ in prompts]

    @torch.inference_mode()
    def receive_drawn(self, forwarded: Forwarded, prompt_scores: Ordered[PromptScores]) -> None:
        """Compute this rank's part of the logits from which rank 0 draws, and receive the drawn tokens."""
        batch, hidden, ids = forwarded.batch, forwarded.hidden, None
        if batch is not None and hidden is not None and (batch.drawing or prompt_scores):
            self.network.logits(hidden.index_select(0, batch.sample_rows))
            ids = torch.empty(len(batch.drawing), dtype=torch.int64, device=self.device)
            if batch.drawing:
                self.ranks.broadcast(ids, 0)
            self.rows.last_token_ids.index_copy_(0, batch.drawing_on_device, ids)
            for scores in prompt_scores:
                for _ in self._prompt_logits(hidden, scores, batch.starts[scores.row]):
                    pass
        self._draft(forwarded, ids)

    def _draft(self, forwarded: Forwarded, ids: torch.Tensor | None) -> Drafts | None:
        """Run the draft layer, if there is one, after the draw of *ids*."""
        if self.drafter is None or forwarded.drafting is None:
            return None
        return self.drafter.draft(forwarded.drafting, ids)

    def _forward(self, step: StepInput, batch: Batch) -> tuple[torch.Tensor, Drafting | None]:
        features = plan = None
        if batch.media:
            features = torch.cat([self.encoder_outputs[one.output_id][one.start : one.stop] for one in batch.media])
        hidden = None if self.graphs is None else self.graphs.run_step(batch)
        if hidden is None:
            windowed = None if batch.windowed is None else self._context(batch.positions, batch.windowed)
            context = self._context(batch.positions, batch.layout, windowed)
            plan = context.plan
            hidden = self.network(batch.input_ids, context, batch.media_rows, features)
        if self.drafter is None:
            return hidden, None
        return hidden, self.drafter.begin_drafts(step, batch, features, hidden, plan)

    def _context(
        self, positions: torch.Tensor, layout: PagedLayout, windowed: ForwardContext | None = None
    ) -> ForwardContext:
        plan = self.backend.plan(layout, self.dtype)
        return ForwardContext(positions, layout, self.caches.layers, self.backend, plan, windowed)

    def _score_prompt(
        self, hidden: torch.Tensor, scoring: PromptScores, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of prompt tokens, and the sum of their logits."""
        target_ids = to_device(np.array(scoring.target_ids, np.int64), self.device)
        parts, sums = [], []
        for piece, logits in self._prompt_logits(hidden, scoring, start):
            parts.append(logprobs.score(logits, target_ids[piece], scoring.num_top))
            sums.append(logits.sum())
        return torch.cat(parts), torch.stack(sums).sum()

    def _prompt_logits(
        self, hidden: torch.Tensor, scoring: PromptScores, start: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the logits of a few tokens at a time, each time with their slice of all tokens."""
        first = start + scoring.offset
        before = hidden[first : first + len(scoring.target_ids)]
        for piece in logprobs.pieces(len(scoring.target_ids), self.network.spec.vocab_size):
            yield piece, self.network.logits(before[piece])


def make_runner(
    config: EngineConfig,
    model: LoadedModel,
    execution: Execution,
    caches: Caches,
    progress: Progress = lambda *_: None,
) -> ModelRunner:
    """Return the runner of *model* in *caches*, with its graphs captured. All ranks do this at the same time.

    If a capture fails and no setting asks for graphs, a single rank runs without them. Raises StartupError.
    """
    runner = ModelRunner(model.network, execution, caches)
    if execution.captures_decodes and config.cuda_graphs is not False:
        max_positions = model.network.spec.max_position_embeddings
        max_model_len = memory.model_length(config, max_positions, caches.sizes.num_blocks)
        max_blocks = -(-max_model_len // config.block_size)
        runner.graphs = DecodeGraphs(model.network, execution.backend, caches, max_blocks)
        try:
            for done, total in runner.graphs.by_size.capture_graphs():
                progress("capturing CUDA graphs", done, total)
        except StartupError as error:
            if config.cuda_graphs or model.ranks.size > 1:
                raise
            logger.warning("decode steps run without CUDA graphs", reason=error.message)
            runner.graphs = None
    return runner


def collect_results(drawing: Drawing, output: StepOutput) -> StepOutput:
    """Wait for the results of `draw`, and return *output* with them."""
    if drawing.copy is None:
        return output
    sampling, scored, results = drawing.sampling, drawing.scored, drawing.copy.wait()
    num_sums = len(drawing.summed)
    results, sums = results[: len(results) - num_sums], results[len(results) - num_sums :]
    non_finite = finite.verdict(drawing.step, sampling, dict(zip(drawing.summed, sums, strict=True)))
    drafts = results.pop() if drawing.has_drafts else ()
    token_ids = [int(token_id) for token_id in results.pop(0)] if results else []
    logprob_of: dict[int, TokenLogprob] = {}
    if scored:
        num_tops = [sampling.num_top[index] for index in scored]
        logprob_of = dict(zip(scored, logprobs.unpack(results.pop(0), num_tops), strict=True))
    return msgspec.structs.replace(
        output,
        token_ids=token_ids,
        drafts=[tuple(int(token_id) for token_id in row if token_id >= 0) for row in drafts],
        logprobs=[logprob_of.get(index) for index in range(len(token_ids))] if scored else [],
        prompt_logprobs=[
            logprobs.unpack(one, [scoring.num_top] * len(one))
            for scoring, one in zip(sampling.prompt_scores, results, strict=True)
        ],
        non_finite=non_finite,
    )

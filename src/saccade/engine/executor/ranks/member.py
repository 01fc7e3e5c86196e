"""A rank other than 0, which executes the commands of rank 0 on its part of the network."""

import dataclasses
import gc

from saccade.engine.config import EngineConfig
from saccade.engine.executor import memory
from saccade.engine.executor.execution import Execution, prepare_execution
from saccade.engine.executor.loader import LoadedModel, load_model
from saccade.engine.executor.model_runner import ModelRunner, make_runner
from saccade.engine.executor.ranks import messages
from saccade.engine.executor.ranks.arena import PixelArena
from saccade.engine.executor.ranks.peers import ranks_of
from saccade.errors import StartupError
from saccade.nn.parallel import join, leave


class RankMember:
    """One rank. It does not handle a failed step, since the other ranks may be in the middle of a collective."""

    def __init__(self, rank: int, link: messages.Link, arena: PixelArena, rendezvous: str) -> None:
        self._rank = rank
        self._link = link
        self._arena = arena
        self._rendezvous = rendezvous

    def run_commands(self) -> int:
        """Serve until rank 0 sends Leave; return the exit status. Raises ChannelClosed if rank 0 is gone."""
        match self._link.command():
            case messages.LoadWeights(config):
                pass
            case other:
                raise ValueError(f"the first command is {other}")
        try:
            model = load_model(config, lambda *_: None, ranks_of(config, self._rank))
            execution = prepare_execution(config, model)
            for _ in execution.capture_encoder():
                pass
        except StartupError as error:
            self._link.send_frame(messages.encode(messages.Reply(failure=error.message)))
            return 1
        # Objects that exist now live until the end; freezing them spares the collector a scan that would slow a step.
        gc.collect()
        gc.freeze()
        self._link.send_frame(messages.encode(messages.Reply()))
        try:
            self._serve(config, model, execution)
        finally:
            leave()
        return 0

    def _serve(self, config: EngineConfig, model: LoadedModel, execution: Execution) -> None:
        runner = ModelRunner(model.network, execution, memory.allocate(config, model, 1))
        while True:
            match self._link.command():
                case messages.Join():
                    join(model.ranks, self._rendezvous, model.network.device)
                case messages.Measure():
                    num_blocks = runner.caches.sizes.num_blocks
                    self._measure(config, model, memory.measured(config, model, execution.backend, num_blocks))
                case messages.Allocate(num_blocks):
                    del runner  # Its caches are freed before the new ones are made.
                    runner = ModelRunner(model.network, execution, memory.allocate(config, model, num_blocks))
                case messages.Renew(captures):
                    own = config if captures else dataclasses.replace(config, cuda_graphs=False)
                    runner = make_runner(own, model, execution, runner.caches)
                case messages.Launch(step, places, prompt_scores):
                    complete = self._arena.restore(step, places)
                    runner.update(complete)
                    runner.receive_drawn(runner.forward(complete), prompt_scores)
                case _:
                    return

    def _measure(self, config: EngineConfig, model: LoadedModel, measured: memory.Measured) -> None:
        try:
            reply = messages.Reply(memory.fitting_blocks(config, model, measured))
        except StartupError as error:
            reply = messages.Reply(failure=error.message)
        self._link.send_frame(messages.encode(reply))

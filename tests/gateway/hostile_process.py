"""A fork server whose decode processes run a test's code where they would decode; all else is the real program."""

import msgspec

from saccade.gateway.images.decode_pool import process as media_process
from saccade.gateway.images.decode_pool.job import ImageAnswer, Job
from saccade.media.pdf import Renderer
from saccade.protocol.output import Failure


def answer(job: Job, slot: int | None, _: Renderer) -> ImageAnswer:
    """Run the code in *job.encoded*, which leaves what it found in `found`, and send that as a failure's words."""
    names = {"slot": slot, "found": None}
    exec(job.encoded.decode(), names)
    return ImageAnswer(failure=Failure("invalid_value", msgspec.json.encode(names["found"]).decode()))


if __name__ == "__main__":
    media_process.answer = answer
    media_process.main()

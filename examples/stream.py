"""Stream an answer and read the usage from the last chunk: `python examples/stream.py [IMAGE]`."""

import base64
import os
import sys
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

URL = os.environ.get("SACCADE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("SACCADE_API_KEY", "none")
IMAGES = Path(__file__).parent.parent / "src/saccade/cli/bundled/images/texts"


def main() -> None:
    """Print the answer as it arrives."""
    image = Path(sys.argv[1]) if len(sys.argv) > 1 else sorted(IMAGES.glob("*.png"))[0]
    client = OpenAI(base_url=URL, api_key=KEY)
    url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "What colour is the text?"},
                ],
            }
        ],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens after a prompt of {chunk.usage.prompt_tokens}")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server answers at {URL}; start one with `saccade serve`.")
    except APIStatusError as error:  # such as an image that is damaged; the body says what is wrong
        sys.exit(error.body["message"] if isinstance(error.body, dict) else error.message)

"""Ask three times about one image, and see what the cache saves: `python examples/cached_image.py [IMAGE]`."""

import base64
import os
import sys
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

URL = os.environ.get("SACCADE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("SACCADE_API_KEY", "none")
IMAGES = Path(__file__).parent.parent / "src/saccade/cli/bundled/images/texts"


def main() -> None:
    """Print how many prompt tokens of each request were in the worker's cache."""
    image = Path(sys.argv[1]) if len(sys.argv) > 1 else sorted(IMAGES.glob("*.png"))[0]
    client = OpenAI(base_url=URL, api_key=KEY)
    url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
    for question in ("What does it say?", "What does it say?", "What colour is the text?"):
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
        )
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else 0
        prompt = usage.prompt_tokens if usage else 0
        print(f"{question} {answer.choices[0].message.content} ({cached} of {prompt} prompt tokens from the cache)")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server answers at {URL}; start one with `saccade serve`.")
    except APIStatusError as error:  # such as an image that is damaged; the body says what is wrong
        sys.exit(error.body["message"] if isinstance(error.body, dict) else error.message)

"""Ask about an image and wait for the answer: `python examples/chat.py [IMAGE]`."""

import base64
import os
import sys
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

URL = os.environ.get("SACCADE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("SACCADE_API_KEY", "none")
IMAGES = Path(__file__).parent.parent / "src/saccade/cli/bundled/images/texts"


def main() -> None:
    """Print the answer and its usage."""
    image = Path(sys.argv[1]) if len(sys.argv) > 1 else sorted(IMAGES.glob("*.png"))[0]
    client = OpenAI(base_url=URL, api_key=KEY)
    url = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "What does it say?"},
                ],
            }
        ],
    )
    print(answer.choices[0].message.content)
    print(answer.usage)


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"No server answers at {URL}; start one with `saccade serve`.")
    except APIStatusError as error:  # such as an image that is damaged; the body says what is wrong
        sys.exit(error.body["message"] if isinstance(error.body, dict) else error.message)

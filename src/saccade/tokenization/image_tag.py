"""The text that represents an image in templates that take only strings."""

import re
from dataclasses import dataclass
from functools import cached_property

NUMBER = "{number}"


@dataclass(frozen=True)
class ImageTag:
    """A tag's text *form*, such as `<|image_{number}|>\\n`; `{number}` is the image's number in the chat, from 1.

    A model without images has an empty form; text is then not searched for tags.
    """

    form: str

    def write_tag(self, number: int) -> str:
        return self.form.replace(NUMBER, str(number))

    @property
    def fixed(self) -> str:
        """The tag without the number and the white space around it; every tag contains these characters."""
        return self.form.strip().replace(NUMBER, "")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """A pattern that matches tags without the white space around them."""
        return re.compile(re.escape(self.form.strip()).replace(re.escape(NUMBER), r"\d+"))

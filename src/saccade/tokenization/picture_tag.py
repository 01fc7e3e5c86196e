"""What stands for a picture in a template that takes only strings."""

import re
from dataclasses import dataclass
from functools import cached_property

NUMBER = "{number}"


@dataclass(frozen=True)
class PictureTag:
    """*form* is written for a picture, with its number in the chat, from 1, for `{number}`: `<|image_{number}|>\\n`."""

    form: str

    def write(self, number: int) -> str:
        """Return what stands for picture *number*."""
        return self.form.replace(NUMBER, str(number))

    @property
    def fixed(self) -> str:
        """The tag without number and white space around it: nobody can type a tag who cannot type this."""
        return self.form.strip().replace(NUMBER, "")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds tags in a text, without the white space around them."""
        return re.compile(re.escape(self.form.strip()).replace(re.escape(NUMBER), r"\d+"))

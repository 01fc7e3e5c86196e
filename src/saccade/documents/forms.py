"""Chooses the form in which a model reads a page: that of its release, or Saccade's own."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from saccade import models
from saccade.errors import StartupError
from saccade.models.bundled_model import BUNDLED_NAME, BUNDLED_PAGE_FORM
from saccade.models.family import PageForm

GENERAL = "markdown"
"""The name of our form, for models that were not trained on a prompt of their own."""

GENERAL_FORM = PageForm(
    "Write the text of this page as Markdown, in reading order and word for word. Write headings with #, tables as "
    "HTML with colspan and rowspan, and formulas as LaTeX between dollar signs. For a figure write one sentence that "
    "says what it shows. Leave out page numbers and running titles. Add nothing that is not on the page, and write no "
    "code fence around it."
)


@cache
def page_forms() -> Mapping[str, PageForm]:
    """Return every form by its name, which is part of the names of its models."""
    of_releases = {name: form for family in models.families().values() for name, form in family.page_forms.items()}
    return MappingProxyType({**of_releases, BUNDLED_NAME: BUNDLED_PAGE_FORM, GENERAL: GENERAL_FORM})


def find_form(model: str, name: str | None = None) -> PageForm:
    """Return the form *name*, else that of *model*, else Saccade's own. Raises StartupError for an unknown name."""
    forms = page_forms()
    if name is not None:
        if name not in forms:
            raise StartupError(f"There is no form {name}. The forms are {', '.join(sorted(forms))}.")
        return forms[name]
    # Whoever published it may be called like another release.
    spelling = model.rpartition("/")[2].lower().replace("_", "-")
    # chandra-ocr-2 has another form than chandra.
    return forms[max((form for form in forms if form in spelling), key=len, default=GENERAL)]

"""What several tests of answers use."""

from collections.abc import Callable
from pathlib import Path

import pytest
from written_answers import FORMS

from saccade.gateway.served_models.served_model import Parsers, ServedModel
from saccade.models.files import read_model_files


@pytest.fixture(scope="module")
def models(checkpoint: Callable[[str], Path]) -> Callable[[str], ServedModel]:
    """Returns a model for the name of each form in which calls are written."""
    made = {
        name: ServedModel.from_files("m", read_model_files(checkpoint(form.model)), 32768, parsers=Parsers(name))  # type: ignore[arg-type]
        for name, form in FORMS.items()
    }
    return made.__getitem__

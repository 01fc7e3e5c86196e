"""data: URLs are read; nothing is fetched."""

import pytest

from saccade.errors import InvalidBase64, InvalidImageUrl
from saccade.gateway.messages import decode_data_url


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64,aGk=", "DATA:;BASE64,aGk=", "data:application/x;a=b;base64,aGk=", "data:;base64,aGk="],
)
def test_data_urls(url: str) -> None:
    assert decode_data_url(url) == b"hi"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("data:;base64,aGk", InvalidBase64),
        ("data:;base64,aG k=", InvalidBase64),
        ("data:;base64,aGk=%3D", InvalidBase64),
        ("data:image/png,hi", InvalidImageUrl),
        ("https://example.com/data:;base64,aGk=", InvalidImageUrl),
        (" data:;base64,aGk=", InvalidImageUrl),
    ],
)
def test_other_urls_are_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_data_url(url)

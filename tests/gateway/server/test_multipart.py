"""Forms are read as clients send them; broken ones are refused, whatever is cut or added."""

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from saccade.errors import InvalidValue, RequestError, UnsupportedMediaType
from saccade.gateway.server.multipart import MAX_HEAD_BYTES, MAX_PARTS, parse_form

HEADERS = [(b"content-type", b"multipart/form-data; boundary=xyz")]
PART = b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
END = b"--xyz--\r\n"


def found(body: bytes, headers: list[tuple[bytes, bytes]] = HEADERS) -> list[tuple[str, str | None, bytes]]:
    return [(field.name, field.filename, bytes(field.content)) for field in parse_form(body, headers)]


@given(content=st.binary(max_size=200), name=st.text("abc[]_", min_size=1), filename=st.text("ab c.ü;", min_size=1))
def test_form_of_a_real_client(content: bytes, name: str, filename: str) -> None:
    request = httpx2.Request("POST", "http://a/", data={"purpose": "vision"}, files={name: (filename, content)})
    headers = [(b"content-type", request.headers["content-type"].encode())]
    assert found(request.read(), headers) == [("purpose", None, b"vision"), (name, filename, content)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (END, []),
        (PART + END, [("a", None, b"1")]),
        (b"preamble\r\n" + PART + END, [("a", None, b"1")]),
        (PART + END + b"epilogue", [("a", None, b"1")]),
        (b"--xyz\r\ncontent-disposition:form-data;name=a;filename=b\r\nX: y\r\n\r\n\r\n--xyz--", [("a", "b", b"")]),
        (PART.replace(b'"a"', rb'"a"; filename="C:\d\"\\\"e"') + END, [("a", 'C:\\d"\\"e', b"1")]),
    ],
)
def test_forms(body: bytes, expected: list[tuple[str, str | None, bytes]]) -> None:
    assert found(body) == expected
    quoted = [(b"content-type", b'multipart/form-data; charset=utf-8; boundary="xyz"')]
    assert found(body, quoted) == expected


@table(
    "body",
    [
        b"", b"x", b"--xyz", PART, PART[:-3] + END, PART.replace(b"\r\n\r\n", b"\r\n") + END, PART * (MAX_PARTS + 1) + END,
        b"--xyz\r\nA: b\r\n\r\n1\r\n" + END, PART.replace(b"name", b"nam") + END, PART.replace(b'"a"', b'"\xff"') + END,
        PART.replace(b"name", b" " * MAX_HEAD_BYTES + b"name") + END, b"--xyzz\r\n" + PART[7:] + END,
    ],
)  # fmt: skip
def test_broken_forms(body: bytes) -> None:
    with pytest.raises(InvalidValue):
        found(body)


@table(
    "kind",
    [
        b"", b"application/json", b"multipart/form-data", b"multipart/mixed; boundary=xyz", b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=" + b"x" * 71,
    ],
)  # fmt: skip
def test_other_types(kind: bytes) -> None:
    with pytest.raises(UnsupportedMediaType):
        found(PART + END, [(b"content-type", kind)])


@given(
    body=st.lists(st.sampled_from([b"--xyz", b"--", b"\r\n", b"\r\n\r\n", b"a", PART, END]), max_size=12).map(b"".join)
)
def test_any_body_is_read_or_refused(body: bytes) -> None:
    try:
        fields = found(body)
    except RequestError:
        return
    assert all(content in body for _, _, content in fields)

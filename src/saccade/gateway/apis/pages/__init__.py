"""The HTML pages. The server sends each as one file, with a policy that lets it contact no other server."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent

_LINKED = re.compile(r'<(?:link rel="stylesheet" href|script src)="(\w+\.(css|js))">(?:</script>)?')
_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


def page(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with the page *name*, a file in this folder.

    The files that the page links to are inlined. The policy allows styles and scripts by their hashes, so markup that
    slips into the page by mistake runs nothing.
    """
    html = _LINKED.sub(_inlined, (FOLDER / name).read_text())
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for tag, content in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
    headers = {
        "content-security-policy": (
            f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
            "img-src data:; media-src blob:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def endpoint(request: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return endpoint


def _inlined(link: re.Match[str]) -> str:
    name, kind = link.groups()
    tag = {"css": "style", "js": "script"}[kind]
    return f"<{tag}>{(FOLDER / name).read_text()}</{tag}>"

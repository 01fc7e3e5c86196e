"""A worker may name addresses of its own, and no others."""

from tables import table

from saccade.transport.named_addresses import may_be_of_worker

TCP, LOCAL, UNIX = "grpc://10.0.0.5:9000", "grpc://127.0.0.1:9000", "unix:/run/w"


@table(
    ("address", "url", "is_allowed"),
    [
        ("10.0.0.5:9100", TCP, True),
        ("192.168.7.5:9100", TCP, True),  # a network of its own for KV state
        ("[fd00::5]:9100", TCP, True),
        ("node-1:9100", "grpcs://node-1:9000", True),
        ("127.0.0.1:9100", LOCAL, True),
        ("127.0.0.1:9100", UNIX, True),
        ("10.0.0.5:9100", UNIX, True),
        ("localhost:9100", LOCAL, True),
        ("127.0.0.1:9100", TCP, False),
        ("[::1]:9100", TCP, False),
        ("localhost:9100", TCP, False),
        ("169.254.169.254:80", TCP, False),
        ("169.254.169.254:80", UNIX, False),
        ("[fe80::1]:80", TCP, False),
        ("[::ffff:169.254.169.254]:80", TCP, False),
        ("[::ffff:127.0.0.1]:80", TCP, False),
        ("0.0.0.0:80", TCP, False),
        ("[::]:80", TCP, False),
        ("224.0.0.1:80", TCP, False),
        ("metadata.google.internal:80", TCP, False),
        ("2852039166:80", TCP, False),
        ("0xa9.0xfe.0xa9.0xfe:80", TCP, False),
        ("10.0.0.5", TCP, False),
        ("10.0.0.5:", TCP, False),
        ("10.0.0.5:99999", TCP, False),
        ("unix:/run/docker.sock", UNIX, False),
        ("", TCP, False),
    ],
)
def test_where_others_reach_a_worker(address: str, url: str, is_allowed: bool) -> None:
    assert may_be_of_worker(address, url) is is_allowed

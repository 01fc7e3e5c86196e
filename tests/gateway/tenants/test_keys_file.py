"""The file of tenants and hashed keys: what it says, and what is wrong with it."""

import hashlib

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.gateway.tenants.account import Limits
from saccade.gateway.tenants.key_table import digest_of, parse_keys

KEY = "sk-" + "k" * 40


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(tenant: str, key: str = KEY) -> str:
    return f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{hashed(key)}"\n'


WHOLE = f"""
salt_key = "{"s" * 32}"

[tenants.acme]
group = "research"
priority = 3
requests_per_minute = 600
tokens_per_minute = 200_000
image_bytes_per_minute = 50_000_000

[tenants."lab.2"]
group = "research"

[tenants.outside]

{entry("acme")}
{entry("acme", KEY + "2")}
{entry("lab.2", KEY + "3").replace(hashed(KEY + "3"), hashed(KEY + "3").upper())}
{entry("outside", KEY + "4")}
"""


def test_tenants_and_keys() -> None:
    table = parse_keys(WHOLE.encode(), {})
    acme, lab, outside = (table.tenants[name] for name in ("acme", "lab.2", "outside"))
    assert (acme.priority, acme.limits) == (3, Limits(600, 200_000, 50_000_000))
    assert (lab.priority, lab.limits, lab.group) == (1, Limits(), "research")
    names = [table.names[digest_of((KEY + end).encode())] for end in ("", "2", "3", "4")]
    assert names == ["acme", "acme", "lab.2", "outside"]
    assert acme.salt == lab.salt != outside.salt
    assert len({acme.id, lab.id, outside.id}) == 3
    assert b"" not in (acme.salt, acme.id, outside.salt)


def test_old_names_of_limits_are_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    table = parse_keys(WHOLE.replace("image_bytes_per_minute", "picture_bytes_per_minute").encode(), {})
    assert table.tenants["acme"].limits == Limits(600, 200_000, 50_000_000)
    (warning,) = caplog.messages
    assert "picture_bytes_per_minute in [tenants.acme] is the old name of image_bytes_per_minute" in warning


def test_salts_stay_when_keys_and_limits_change_and_go_with_the_salt_key() -> None:
    salts = [
        parse_keys(text.encode(), {}).tenants["acme"].salt
        for text in (
            WHOLE,
            WHOLE.replace(hashed(KEY), hashed("another")).replace("600", "700"),
            WHOLE.replace("s" * 32, "t" * 32),
            WHOLE.replace("research", "sales"),
            WHOLE.replace("research", "acme"),  # a group is no tenant
            WHOLE.replace('group = "research"\n', ""),
        )
    ]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 5


@table(
    ("text", "cause"),
    [
        (b"\xff", "UTF-8"),
        ("[tenants.a]\n[[keys]]\ntenant = = 2", "line 3"),
        ("[tenants.a]", r"no \[\[keys\]\]"),
        ("", r"no \[\[keys\]\]"),
        (entry("acme"), r"`tenant` in \[\[keys\]\] number 1"),
        ("[tenants.a]\n" + entry("a") + entry("b"), r"`tenant` in \[\[keys\]\] number 2"),
        ("[tenants.a]\n" + entry("a") + entry("a"), "number 2 has the same"),
        ("[tenants.a]\n" + entry("a").replace("sha256", "key"), "unknown name in .*number 1"),
        ("[tenants.a]\n" + entry("a").replace("sha256", "#"), "`sha256` in .*number 1"),
        ("[tenants.a]\n" + entry("a").replace(hashed(KEY), hashed(KEY)[1:]), "`sha256` in .*number 1"),
        ('tenants = 3\nkeys = "x"', "must be tables"),
        ("keys = [3]", "number 1 must be a table"),
        ("tenants.a = 3\n" + entry("a"), r"\[tenants.a\] must be a table"),
        ('[tenants."a b"]\n' + entry("a b"), "A tenant's name must be"),
        ("[tenants.a]\nlimit = 3\n" + entry("a"), r"unknown name in \[tenants.a\]"),
        ("[tenants.a]\ngroup = 'two words'\n" + entry("a"), r"`group` in \[tenants.a\]"),
        ("[tenants.a]\npriority = 0\n" + entry("a"), "`priority` in .*1 to 100"),
        ("[tenants.a]\npriority = true\n" + entry("a"), "`priority`"),
        ("[tenants.a]\ntokens_per_minute = 1.5\n" + entry("a"), "`tokens_per_minute`"),
        ("[tenants.a]\nimage_bytes_per_minute = 0\n" + entry("a"), "`image_bytes_per_minute`"),
        (
            "[tenants.a]\npicture_bytes_per_minute = 1\nimage_bytes_per_minute = 1\n" + entry("a"),
            "`picture_bytes_per_minute` .* is the old name",
        ),
        ("salt_key = 'short'\n[tenants.a]\n" + entry("a"), "`salt_key` must be .* at least 32"),
        ("other = 1\n[tenants.a]\n" + entry("a"), "unknown name at the top level"),
    ],
)
def test_faults_name_the_entry(text: str | bytes, cause: str) -> None:
    with pytest.raises(StartupError, match=cause):
        parse_keys(text if isinstance(text, bytes) else text.encode(), {})


def test_a_plain_key_in_the_file_is_refused_and_not_repeated() -> None:
    with pytest.raises(StartupError, match="not the key itself") as refused:
        parse_keys(("[tenants.a]\n" + entry("a").replace(hashed(KEY), KEY)).encode(), {})
    assert KEY not in refused.value.message


def test_a_key_that_is_a_flag_too_is_refused() -> None:
    with pytest.raises(StartupError, match="also given by --admin-key"):
        parse_keys(WHOLE.encode(), {digest_of(KEY.encode()): "--admin-key"})

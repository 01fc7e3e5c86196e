"""The program from outside: flags, their sources, how errors end."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from cyclopts import CoercionError
from tables import table

from saccade import config
from saccade.cli.flags import engine_config
from saccade.cli.help import COMMON
from saccade.cli.main import COMMANDS, make_app, run
from saccade.cli.vllm_flags import COMMANDS as COMMANDS_OF_VLLM
from saccade.engine.config import EngineSettings
from saccade.fleet.settings import DispatchLimits, RoutingSettings, SourceConfig
from saccade.gateway.config import ConnectionLimits, MediaSettings, ServerSettings, TlsSettings
from saccade.media.fetch import FetchConfig
from saccade.media.header import MediaLimits


def parse(*tokens: str, file: Path | None = None) -> dict[str, object]:
    """The arguments that `saccade serve TOKENS` is called with."""
    _, bound, _ = make_app(file).parse_args(["serve", *tokens], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


@pytest.mark.ci
@table(
    ("arguments", "code", "words"),
    [
        (["serve", "--nope"], 2, "--nope"),
        (["serve", "--port", "0"], 2, "--port"),
        (["serve", "--limit-mm-per-prompt", '{"audio": 1}'], 2, "media are not served"),
        (["serve", "--limit-mm-per-prompt", '{"image": -1}'], 2, "whole numbers"),
        (["serve", "--limit-mm-per-prompt", "image"], 2, "must be JSON"),
        (["serve", "--limit-mm-per-prompt", "image=4,video=x"], 2, "must be JSON"),
        (["serve", "--max-model-len", "32x"], 2, "32K (32768)"),
        (["serve", "--max-model-len", "1.5K"], 2, "write 1.5k or 1.5Ki"),
        (["serve", "--max-model-len", "0k"], 2, "Must be >= 1"),
        (
            ["serve", "--chat-template", "/nowhere.jinja"],
            1,
            "--chat-template: cannot read /nowhere.jinja: No such file",
        ),
        (["serve", "--default-chat-template-kwargs", "[1]"], 2, "must be a JSON object"),
        (["serve", "--load-format", "gguf"], 2, "gguf"),
        (["nope"], 2, "nope"),
        (["top"], 2, "`saccade top` needs --gateway: `saccade top --help` says what it is."),
        (["top", "--gateway"], 2, "--gateway requires an argument"),
        (["serve", "/nowhere/at/all"], 1, "There is no folder /nowhere/at/all."),
        (["worker", "--role", "half"], 2, "half"),
        (["worker", "--kv-transfer-timeout", "0"], 2, "Must be > 0"),
        (["worker", "/nowhere/at/all"], 1, "There is no folder /nowhere/at/all."),
        (["gateway"], 1, "--worker-url"),
        (["gateway", "--worker-url", "http://x"], 1, "grpc://host:port"),
        (["gateway", "--worker-dns", "grpcs://x:1"], 1, "--worker-dns takes"),
        (
            ["gateway", "--admin-port", "9", "--admin-key", "k" * 32, "--gateway-processes", "2"],
            1,
            "over 1 needs a --worker-url",
        ),
        (["gateway", "--worker-url", "vllm://x"], 1, "vllm://host:port"),
        (["serve", "--config", "/nowhere.toml"], 1, "/nowhere.toml"),
        (["--help"], 0, "inspect"),
        (["serve", "--help"], 0, "--help-all lists every flag"),
        (["serve", "--help-all"], 0, "--max-num-batched-tokens"),
        (["inspect", "--help"], 0, "--blocks"),
        (["ask", "--help"], 0, 'saccade ask cat.jpg "What is this?"'),
    ],
)
def test_exit_code_and_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert run(arguments) == code
    shown = capsys.readouterr()
    assert words in shown.out + shown.err
    assert "Traceback" not in shown.err


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("saccade-vlm")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["worker", "--help"], ["inspect", "--help"]])
def test_help_names_the_settings_file(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert "--config FILE" in capsys.readouterr().out


@pytest.mark.ci
def test_output_without_room_ends_in_one_sentence() -> None:
    command = [sys.executable, "-m", "saccade.cli.main", "completion", "bash"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "saccade: Cannot write the output: No space left on device.\n")


@pytest.mark.ci
@pytest.mark.parametrize(
    "arguments",
    [
        ["key", "new", "--tenant", "a"],
        ["serve", "--help"],
        pytest.param(["completion", "bash"], marks=pytest.mark.conformance),
    ],
)
def test_closed_pipe_ends_the_program_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "saccade.cli.main", *arguments]
    with open(writer, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.ci
@table("command", COMMANDS)
def test_help_shows_every_word(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help is rendered as Markdown, which drops words such as <think> outside of backticks."""
    monkeypatch.setenv("COLUMNS", "4000")  # a line of its own for every flag
    app = make_app(None)
    app([command, "--help"], result_action="return_value")
    shown = capsys.readouterr().out.split()
    app.help_format = "plaintext"
    app([command, "--help"], result_action="return_value")
    written = capsys.readouterr().out.replace("`", "").split()
    assert set(written) - set(shown) == set()


@pytest.mark.ci
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_with_commands_and_flags(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "inspect" in script
    assert "max-num-batched-tokens" in script
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert run(["completion"]) == 0
    assert capsys.readouterr().out == script


def test_completion_for_an_unknown_shell_names_the_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run(["completion"]) == 1
    assert "saccade completion bash|zsh|fish" in capsys.readouterr().err


def test_bash_completes_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    asked = "COMP_WORDS=(saccade serve --max-num-s); COMP_CWORD=2; _saccade; echo ${COMPREPLY[@]}"
    script = f"{capsys.readouterr().out}\n{asked}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--max-num-seqs"]


def test_help_does_not_load_torch() -> None:
    program = (
        "import sys; from saccade.cli.main import run\n"
        "for command in ('serve', 'worker', 'gateway'): run([command, '--help'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_flag_wins_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "saccade.toml"
    file.write_text('port = 1\nhost = "file"\nmax-num-seqs = 3\nallowed-origins = ["a", "b"]\n')
    monkeypatch.setenv("SACCADE_PORT", "2")
    monkeypatch.setenv("SACCADE_HOST", "environment")
    monkeypatch.setenv("SACCADE_API_KEY", "one two")
    given = parse("--port", "4", file=file)
    assert given["server"] == ServerSettings("environment", 4, api_keys=("one", "two"), allowed_origins=("a", "b"))
    assert given["engine"] == EngineSettings(max_num_seqs=3)


ORIGINS = ("https://a.example", "https://b.example:8443")


@table(
    ("arguments", "variable", "origins"),
    [
        (["--allowed-origins", '["*"]'], None, ("*",)),
        (["--allowed-origins", '["https://a.example","https://b.example:8443"]'], None, ORIGINS),
        (["--allowed-origins", ORIGINS[0], "--allowed-origins", ORIGINS[1]], None, ORIGINS),
        (["--allowed-origins", "*"], None, ("*",)),
        ([], '["https://a.example", "https://b.example:8443"]', ORIGINS),
        ([], " ".join(ORIGINS), ORIGINS),
        ([], '["*"]', ("*",)),
    ],
)
def test_origins_may_be_a_json_list(
    arguments: list[str], variable: str | None, origins: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("SACCADE_ALLOWED_ORIGINS", variable)
    assert parse(*arguments)["server"] == ServerSettings(allowed_origins=origins)


@pytest.mark.parametrize("written", ['["*"', "[1]", '["a"] b'])
def test_origins_that_are_no_list_are_refused(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--allowed-origins", written]) == 2
    assert "JSON list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--admin-port", "9999"], "--admin-key"),
        (["--admin-port", "9999", "--admin-key", "one", "--api-key", "one"], "equals an --api-key"),
        (["--admin-key", "a b"], "--admin-key is empty or contains a space"),
    ],
)
def test_the_admin_port_needs_a_key_of_its_own(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "/nowhere/at/all", *flags]) == 1
    assert words in capsys.readouterr().err


def test_unknown_setting_in_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "saccade.toml"
    file.write_text("prot = 1\n")
    assert run(["serve", "--config", str(file)]) == 2
    assert "prot" in capsys.readouterr().err


def test_settings_file_that_is_not_toml_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {
        "port: 8001\n": "look at line 1.",
        "port = 8001\nhost: here\n": "look at line 2.",
        'port = 8001\nhost = "here': "look at line 2.",
        "port = '\udcff'": "not text in UTF-8.",
    }
    file = tmp_path / "settings"
    for content, words in contents.items():
        file.write_bytes(content.encode(errors="surrogateescape"))
        assert run(["serve", "--config", str(file)]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith(f"saccade: The settings file {file} must be TOML"), content
        assert shown.endswith(f"{words} If it is YAML, let its name end in .yaml.\n"), content
        assert "TOMLDecodeError" not in shown


def test_settings_file_may_be_yaml_as_for_vllm(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "max_model_len: 32k\nserved-model-name: [a, b]\nenable-prefix-caching: false\ndevice: null\n"
        "limit-mm-per-prompt:\n  image: 4\n  video: {count: 1, num_frames: 8}\n"
    )
    settings = parse("--port", "81", file=file)
    assert settings["engine"] == EngineSettings(
        max_model_len=32000, served_model_name=("a", "b"), enable_prefix_caching=False
    )
    assert settings["media"] == MediaSettings(MediaLimits(4, 1))
    file.write_text("# nothing yet\n")
    assert parse(file=file) == parse()


@table(
    ("content", "words"),
    [
        ("a: 1\nb: [1\nc: 2\n", "It is not YAML: look at line 3."),
        ("- a\n", "It is not a mapping of names to values: look at line 1."),
        ("port: !!python/name:os.system\n", "It is not YAML: look at line 1."),
        ("port: \0\n", "It has a character or a value that YAML does not allow."),
    ],
)
def test_settings_file_that_is_not_yaml_is_refused(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yml"
    file.write_text(content)
    assert run(["serve", "--config", str(file)]) == 1
    example = "`max-model-len: 4096`"
    assert capsys.readouterr().err == (
        f"saccade: The settings file {file} must be YAML, with lines such as {example}. {words}\n"
    )


def test_numbers_have_the_suffixes_of_vllm() -> None:
    """vLLM's human_readable_int (vllm/utils/argparse_utils.py): k is 1000, K is 1024."""
    written = {"32k": 32000, "32K": 32768, "25.6k": 25600, "2m": 2_000_000, "10G": 10 << 30, "1T": 1 << 40}
    for number, meant in (written | {"1.5Gi": 3 << 29, "2ki": 2048, "7": 7}).items():
        settings = EngineSettings(kv_cache_bytes=meant, encoder_cache_bytes=meant)
        assert parse("--kv-cache-memory-bytes", number, "--encoder-cache-bytes", number)["engine"] == settings, number


@table("number", ["9" * 5000, "9" * 5000 + "k", "1." + "9" * 5000 + "k"])
def test_numbers_of_thousands_of_digits_get_an_error_of_ours(number: str) -> None:
    with pytest.raises(CoercionError, match="must be a whole number"):
        parse("--kv-cache-memory-bytes", number)


def test_flags_survive_the_way_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerSettings(
        "::1",
        81,
        tls=TlsSettings(Path("/a.pem"), Path("/a.key"), Path("/ca.pem"), 2),
        root_path="/vision",
        chat_template="{{ messages }}",
        default_chat_template_kwargs='{"enable_thinking": false}',
        gateway_processes=3,
        api_keys=("k1", "k2"),
        api_keys_file=Path("/etc/keys.toml"),
        allowed_origins=("http://a", "http://b"),
        max_requests=5,
        max_body_bytes=6,
        max_request_memory_bytes=7,
        connections=ConnectionLimits(8, 9),
        shutdown_timeout_seconds=0.0,
        allowed_hosts=("c",),
        metrics_without_key=True,
        admin_port=82,
        admin_keys=("k3", "k4"),
    )
    media = MediaSettings(MediaLimits(4, 2), '{"max_pixels": 9}', '{"video": {"fps": 1}}', 7, 8, 9.5, 10, 180, 11, 12)
    engine = EngineSettings(
        served_model_name=("name", "alias"),
        max_model_len=12,
        max_num_seqs=13,
        max_num_batched_tokens=14,
        max_num_waiting=19,
        gpu_memory_utilization=0.5,
        kv_cache_bytes=15,
        block_size=32,
        encoder_cache_bytes=20,
        state_snapshot_bytes=22,
        state_snapshot_blocks=23,
        encode_budget_patches=21,
        max_inter_token_latency=24.5,
        enable_prefix_caching=False,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        quantization="fp8",
        device="cpu",
        attention_backend="torch_sdpa",
        mm_encoder_attn_backend="amx",
        cuda_graphs=True,
        mm_encoder_cuda_graph=not EngineSettings().mm_encoder_cuda_graph,
        async_scheduling=True,
        speculative_config='{"c": 3}',
        threads=17,
        tensor_parallel_size=2,
        attention_tensor_parallel_size=1,
        mm_encoder_tp_mode="weights",
        engine_silence=18.5,
        trust_remote_code=True,
        record_steps="/steps",
        record_steps_bytes=1 << 22,
        load_format="dummy",
        revision="main",
        download_dir="/models",
        seed=3,
        record_pixels=True,
        model_impl="transformers",
        hf_overrides='{"a": 1}',
        generation_config="vllm",
        override_generation_config='{"b": 2}',
    )
    default = EngineSettings()
    unset = [name for name in vars(engine) if getattr(engine, name) == getattr(default, name)]
    assert unset == []
    command, environment = config.program(settings=(server, media, engine))
    for name in ("SACCADE_API_KEY", "SACCADE_ADMIN_KEY"):
        monkeypatch.setenv(name, environment[name])
    arguments = command[3:]
    assert not {"k1", "k3"} & set(arguments)
    assert parse(*arguments) == {"server": server, "media": media, "engine": engine}


@pytest.mark.parametrize("name", ["--mm-encoder-attn-backend", "--mm-attention-backend"])
def test_vision_backend_has_the_names_of_vllm_and_sglang(name: str) -> None:
    assert parse("MODEL", name, "amx")["engine"] == EngineSettings(mm_encoder_attn_backend="amx")


def test_size_of_attention_has_the_name_of_sglang() -> None:
    assert parse("MODEL", "-tp", "4", "--attn-tp-size", "2")["engine"] == EngineSettings(
        tensor_parallel_size=4, attention_tensor_parallel_size=2
    )


def test_recording_flag_sets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = parse("MODEL", "--record-steps", "steps", "--record-steps-bytes", "2000000", "--record-pixels")["engine"]
    assert isinstance(engine, EngineSettings)
    config = engine_config("MODEL", tmp_path, engine)
    assert (config.record_steps, config.record_steps_bytes, config.record_pixels) == (
        f"{tmp_path}/steps",
        2000000,
        True,
    )
    assert engine_config("MODEL", tmp_path, EngineSettings()).record_steps is None
    assert run(["worker", "MODEL", "--record-steps-bytes", "5"]) == 2


@pytest.mark.parametrize(
    "tokens", [("--served-model-name", "a", "b"), ("--served-model-name", "a", "--served-model-name", "b")]
)
def test_model_has_several_names(tokens: tuple[str, ...], tmp_path: Path) -> None:
    engine = parse("MODEL", *tokens, "--port", "81")["engine"]
    assert engine == EngineSettings(served_model_name=("a", "b"))
    config = engine_config("MODEL", tmp_path, EngineSettings(served_model_name=("a", "b", "a")))
    assert (config.model, config.aliases) == ("a", ("b",))


def test_model_after_served_names_gets_a_hint(tiny_qwen3_vl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model under the name of another would answer wrongly."""
    # The limit would end the start of the bundled model.
    assert run(["serve", "--max-model-len", "999999", "--served-model-name", "tiny", str(tiny_qwen3_vl)]) == 1
    assert f"`saccade serve {tiny_qwen3_vl} --served-model-name tiny`" in capsys.readouterr().err


def test_an_empty_served_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A variable of a shell may be empty."""
    assert run(["serve", "--served-model-name", ""]) == 1
    assert "--served-model-name is empty" in capsys.readouterr().err


def test_child_gets_no_setting_from_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_PORT", "1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    _, environment = config.program("serve")
    assert environment.keys().isdisjoint({"SACCADE_PORT", "VLLM_API_KEY"})
    assert environment["PATH"] == os.environ["PATH"]


def test_nested_settings_have_flags() -> None:
    routing = RoutingSettings("cost", 0.5, 2.0, 0.75, 1 << 20, False, DispatchLimits(2, 3, 4, 5.0), ("m",))
    fetch = FetchConfig(("a.example",), ("10.0.0.0/8",), Path("/images"))
    media, server = MediaSettings(fetch=fetch), ServerSettings(connections=ConnectionLimits(8, 9))
    arguments = [word for one in (routing, media, server) for word in config.to_arguments(one)]
    urls = [
        "--worker-url",
        "unix:/w",
        "--workers-file",
        "/w",
        "--worker-dns",
        "grpc://a:1",
        "--worker-drain-timeout",
        "1",
        "--traffic-file",
        "/t",
    ]
    _, bound, _ = make_app(None).parse_args(["gateway", *urls, *arguments], exit_on_error=False, print_error=False)
    given = bound.arguments
    assert (given["routing"], given["media"], given["server"]) == (routing, media, server)
    assert given["workers"].sources == SourceConfig(Path("/w"), ("grpc://a:1",), 1.0, Path("/t"))


@pytest.mark.parametrize(
    "command", [["serve", "--api-key="], ["serve", "--api-key", "two words"], ["gateway", "--api-key", " "]]
)
def test_unsendable_key_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one, as from an unset variable, must not open the API; one with a space must not become two."""
    assert run(command) == 1
    assert "--api-key" in capsys.readouterr().err


def test_empty_variable_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A key from a secret that was not filled in must not start an open server."""
    monkeypatch.setenv("SACCADE_API_KEY", "")
    assert run(["serve", "--help"]) == 1
    assert "SACCADE_API_KEY" in capsys.readouterr().err


def test_limits_of_media_are_those_of_vllm() -> None:
    """A kind that is left out keeps its default; only audio, which is not served, can only be 0."""
    default = MediaSettings().media_limits
    written = {
        '{"image":4,"video":1}': MediaLimits(4, 1),
        '{"image": 4}': MediaLimits(4, default.videos),
        '{"video": 0}': MediaLimits(default.images, 0),
        '{"image": 0, "video": 9, "audio": 0}': MediaLimits(0, 9),
        '{"image": {"count": 3, "width": 512}, "video": {"count": 1, "num_frames": 32}}': MediaLimits(3, 1),
        "image=4": MediaLimits(4, default.videos),
        "image=4,video=1": MediaLimits(4, 1),
    }
    for limits, meant in written.items():
        assert parse("--limit-mm-per-prompt", limits)["media"] == MediaSettings(media_limits=meant), limits


@pytest.mark.ci
@pytest.mark.parametrize("command", sorted(COMMANDS_OF_VLLM))
def test_short_help_shows_some_flags_and_long_help_all(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    every = {name for one in make_app(None)[command].assemble_argument_collection() for name in one.names}
    assert run([command, "--help-all"]) == 0
    long = capsys.readouterr().out
    assert run([command, "--help"]) == 0
    short = capsys.readouterr().out
    # A long name is broken at the end of a line.
    assert {name for name in COMMON & every if name not in short} == set()
    assert set(re.findall(r"│ (?:MODEL )?(--[a-z-]+)", short)) <= COMMON
    assert len(short.splitlines()) <= 80 < len(long.splitlines())
    assert "env var" not in short
    if "--reasoning-parser" in every:
        assert "between <think> and </think>" in " ".join(re.sub("[│]", "", long).split())


def test_every_common_flag_exists() -> None:
    app = make_app(None)
    known = [app[command].assemble_argument_collection() for command in COMMANDS_OF_VLLM]
    assert {name for arguments in known for one in arguments for name in one.names} >= COMMON

"""What the command line makes of the flags of `vllm serve`."""

from pathlib import Path

import pytest
from tables import table

from saccade.cli.main import run
from saccade.cli.vllm_flags import FLAGS, Support, VllmFlag, explanation, find, fold_keys, translate, translate_setting
from saccade.config import flags_of
from saccade.engine.config import EngineSettings
from saccade.gateway.config import MediaSettings, ServerSettings

OURS = {name for flags in (ServerSettings(), EngineSettings(), MediaSettings()) for name, _, _ in flags_of(flags)} | {
    "--log-level",
    "--config",
    "--model",
    "--shutdown-timeout",
    "--data-parallel-size",
}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
BY_SUPPORT = {support: [flag for flag in FLAGS if flag.support is support] for support in Support}


def name_of(flag: VllmFlag) -> str:
    return flag.names[0]


def test_every_vllm_flag_is_declared_once() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert all(name.startswith("-") for name in names)
    assert all(flag.sentence.endswith(".") for flag in FLAGS)


@table("flag", BY_SUPPORT[Support.SERVED])
def test_served_vllm_flags_exist(flag: VllmFlag) -> None:
    """A flag of the same name is one of ours; for another, the sentence names what to use instead."""
    if flag.becomes:
        assert {word.partition(".")[0] for word in flag.becomes if word.startswith("-")} <= OURS
        assert not OURS & set(flag.names)
    elif flag.ours in flag.names:
        assert flag.ours in OURS
    elif flag.ours.startswith("--"):
        assert flag.ours in OURS
        assert flag.ours in flag.sentence
        assert not OURS & set(flag.names)


@table("flag", BY_SUPPORT[Support.NO_EFFECT] + BY_SUPPORT[Support.REFUSED])
def test_unserved_vllm_flags_do_not_exist(flag: VllmFlag) -> None:
    assert not OURS & set(flag.names)


@pytest.mark.ci
@table("name", [name for flag in BY_SUPPORT[Support.REFUSED] for name in flag.names])
def test_unserved_flag_stops_the_start_with_its_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = find(name)
    assert flag is not None
    values = [] if flag.takes == "nothing" else ["other"]
    assert run(["serve", name, *values]) == 2
    shown = capsys.readouterr().err
    assert flag.sentence in shown
    assert "Did you mean" not in shown
    assert len(shown.splitlines()) == 1


@table("flag", BY_SUPPORT[Support.NO_EFFECT])
def test_flag_without_effect_is_removed_from_the_command_line(flag: VllmFlag) -> None:
    values = {"nothing": [], "one": ["1"], "many": ["1", "2"]}[flag.takes]
    for name in flag.names:
        taken = translate(["serve", "MODEL", name, *values, "--port", "81"])
        assert (taken.arguments, taken.without_effect) == (["serve", "MODEL", "--port", "81"], [name])


@table("names", [("--model", "M"), ("M",)])
@table("flag", [flag for flag in BY_SUPPORT[Support.SERVED] if flag.takes == "many"])
def test_flag_takes_several_values_after_the_model(names: tuple[str, ...], flag: VllmFlag) -> None:
    """Before it the model could be one of them."""
    name = name_of(flag)
    several = translate(["serve", *names, name, "a", "b", "--port", "81"]).arguments
    assert several == ["serve", *names, name, "a", name, "b", "--port", "81"]
    before = ["serve", name, "a", "M"]
    assert translate(before).arguments == before


@table(
    ("given", "kept"),
    [
        (["-pp", "1", "MODEL"], ["MODEL"]),
        (["MODEL", "--max-model-len", "-1"], ["MODEL"]),
        (["--enable-chunked-prefill", "False", "MODEL"], ["MODEL"]),
        (["--enable-chunked-prefill", "MODEL"], ["MODEL"]),
        (["--attention-config.backend", "FLASH_ATTN"], []),
        (["-ac", '{"backend": "FLASHINFER"}'], []),
        (["-ac", '{"backend": "OTHER"}'], ["-ac", '{"backend": "OTHER"}']),
        (["-ac", "{}"], ["-ac", "{}"]),
        (["-ac", "{"], ["-ac", "{"]),
        (["--structured-outputs-config", '{"backend": "guidance"}'], []),
        (["--structured_outputs_config.backend=xgrammar"], ["--structured_outputs_config.backend=xgrammar"]),
        (["-pp=1"], []),
        (["--pipeline_parallel_size", "1"], []),
        (["-pp", "2"], ["-pp", "2"]),
        (["-pp=2"], ["-pp=2"]),
        (["--pipeline-parallel-size"], ["--pipeline-parallel-size"]),
        (["--task", "auto", "--task", "score"], ["--task", "score"]),
        (["--no-enable-lora"], []),
        (["--no-enable-log-requests", "--enable-log-requests"], ["--log-level", "INFO"]),
        (["--no-enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (["--compilation-config.mode", "3", "-O.mode=3", "MODEL"], ["MODEL"]),
        (["--speculative-config.method", "ngram"], ["--speculative-config.method", "ngram"]),
        (["--enable-lora"], ["--enable-lora"]),
        (["--lora-modules", "a", "b"], ["--lora-modules", "a", "b"]),
        (["--swap-space=4", "MODEL"], ["MODEL"]),
        (["--cudagraph-capture-sizes", "1", "2", "--port", "81"], ["--port", "81"]),
        (["--port", "81", "--nonsense"], ["--port", "81", "--nonsense"]),
    ],
)
def test_only_flags_without_effect_are_removed(given: list[str], kept: list[str]) -> None:
    assert translate(["serve", *given]).arguments == ["serve", *kept]


@table(
    ("given", "folded"),
    [
        (["M", "--limit-mm-per-prompt.image", "4"], ["M", "--limit-mm-per-prompt", '{"image": 4}']),
        (
            ["--limit_mm_per_prompt.image=4", "M", "--limit-mm-per-prompt.video.count", "1"],
            ["M", "--limit-mm-per-prompt", '{"image": 4, "video": {"count": 1}}'],
        ),
        (["-sc.method=ngram", "-sc.num_speculative_tokens", "3"], ["--speculative-config", NGRAM]),
        (["--hf-overrides.rope.theta", "1e4"], ["--hf-overrides", '{"rope": {"theta": 10000.0}}']),
        (["--override-generation-config.top_k=1"], ["--override-generation-config", '{"top_k": 1}']),
        (
            ["--limit-mm-per-prompt.image", "4", "--limit-mm-per-prompt.image.count", "2"],
            ["--limit-mm-per-prompt", '{"image": {"count": 2}}'],
        ),
        (["--limit-mm-per-prompt.image", "many"], ["--limit-mm-per-prompt", '{"image": "many"}']),
        (["--limit-mm-per-prompt.image"], ["--limit-mm-per-prompt", '{"image": ""}']),
        (["--host.name", "4", "a.b"], ["--host.name", "4", "a.b"]),
    ],
)
def test_keys_of_a_json_flag_are_folded(given: list[str], folded: list[str]) -> None:
    assert fold_keys(given) == folded


@table(
    ("given", "ours"),
    [
        (["--language-model-only"], ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']),
        (
            ["--limit-mm-per-prompt.image", "4", "--language_model_only"],
            ["--limit-mm-per-prompt", '{"image": 0, "video": 0}'],
        ),
        (["--rope-scaling", '{"rope_type": "yarn"}'], ["--hf-overrides", '{"rope_scaling": {"rope_type": "yarn"}}']),
        (["--rope-theta=1e6"], ["--hf-overrides", '{"rope_theta": 1000000.0}']),
        (["--uvicorn-log-level", "warning"], ["--log-level", "WARNING"]),
        (["--log-level=debug"], ["--log-level", "DEBUG"]),
        (["--log-level", "INFO"], ["--log-level", "INFO"]),
        (["--enable-log-requests", "M"], ["--log-level", "INFO", "M"]),
        (["-asc", "3"], ["--gateway-processes", "3"]),
        (["--disable-mm-preprocessor-cache"], ["--mm-processor-cache-gb", "0"]),
        (["--dtype", "half"], ["--dtype", "float16"]),
        (["--dtype=float"], ["--dtype", "float32"]),
        (["--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--kv-cache-dtype", "fp8_e4m3"], ["--kv-cache-dtype", "fp8"]),
        (["--kv-cache-dtype", "fp8_e5m2"], ["--kv-cache-dtype", "fp8_e5m2"]),
        (["--tool-call-parser", "qwen3_xml"], ["--tool-call-parser", "qwen3_coder"]),
        (["--load-format", "fastsafetensors", "M"], ["M"]),
        (["--attention-backend=FLASH_ATTN"], []),
        (["--attention-backend", "triton"], ["--attention-backend", "triton"]),
        (["--max-model-len", "auto"], []),
        (["--uvicorn-log-level"], ["--uvicorn-log-level"]),
    ],
)
def test_flags_and_values_of_vllm_are_translated(given: list[str], ours: list[str]) -> None:
    assert fold_keys(translate(["serve", *given]).arguments) == ["serve", *ours]


@table(
    ("name", "value", "ours"),
    [
        ("language_model_only", True, {"limit-mm-per-prompt": {"image": 0, "video": 0}}),
        ("language-model-only", False, None),
        ("rope_scaling", {"rope_type": "yarn"}, {"hf-overrides": {"rope_scaling": {"rope_type": "yarn"}}}),
        ("dtype", "half", {"dtype": "float16"}),
        ("api-server-count", 2, {"gateway-processes": "2"}),
        ("load_format", "runai_streamer", None),
        ("port", 81, {"port": 81}),
        ("limit-mm-per-prompt", {"image": 3}, {"limit-mm-per-prompt": {"image": 3}}),
    ],
)
def test_settings_of_vllm_are_translated(name: str, value: object, ours: dict[str, object] | None) -> None:
    assert translate_setting(name, value) == ours


def test_other_commands_take_no_flags_of_vllm() -> None:
    assert translate(["inspect", "--swap-space", "4"]).arguments == ["inspect", "--swap-space", "4"]


def test_flags_without_effect_are_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "/nowhere", "--swap-space", "4", "--enforce-eager", "-pp", "1"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "saccade: accepted without effect: --swap-space, --enforce-eager, -pp (docs/from-vllm.md says why)."
    assert "/nowhere" in second


def test_settings_file_is_treated_as_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: /nowhere\nswap_space: 4\nenforce-eager: true\nenable-lora: false\npipeline_parallel_size: 1\n"
    )
    assert run(["serve", "--config", str(file)]) == 1
    *without_effect, last = capsys.readouterr().err.splitlines()
    names = ("swap_space", "enforce-eager", "enable-lora", "pipeline_parallel_size")
    assert without_effect == [
        f"saccade: accepted without effect: {name} (docs/from-vllm.md says why)." for name in names
    ]
    assert "/nowhere" in last
    for setting, words in (("enable-lora: true", "an adapter"), ("pipeline-parallel-size: 2", "Accepted values: 1")):
        file.write_text(setting)
        assert run(["serve", "--config", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_flag_that_vllm_does_not_have_gets_no_sentence() -> None:
    assert explanation("--prot") is None

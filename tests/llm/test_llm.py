"""LLM and AsyncLLM with a real engine and the bundled model, whose answers are known."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from PIL import Image
from waiting import wait_until

import saccade
from saccade import LLM, AsyncLLM, SamplingParams
from saccade.cli.bundled import bundled
from saccade.errors import InvalidImageUrl, InvalidValue, SaccadeError, StartupError, UnsupportedParameter
from saccade.llm.results import ChatResult

pytestmark = pytest.mark.ci

TEXTS = sorted(bundled("images").glob("texts/*.png"))
SHAPES = sorted(bundled("images").glob("shapes/*.png"))
GREEDY = SamplingParams(temperature=0)


def conversation(image: Any, question: str = "What does it say?") -> list[dict[str, Any]]:
    """One turn about an image."""
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]


def written(image: Path) -> str:
    """The text in a bundled image."""
    return image.stem.split("-")[0]


def children() -> set[psutil.Process]:
    """All processes below this one."""
    return {one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """All processes below this one that neither *before* has nor one of its processes started, such as its engines."""
    return {one for one in children() - before if before.isdisjoint(one.parents())}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4) as llm:
        yield llm


def test_results_are_in_order_and_have_their_own_errors(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    missing, number = conversation(Path("missing.png")), conversation(5)
    results = llm.chat([*map(conversation, TEXTS), missing, number], GREEDY)
    assert [result.text for result in results[:-2]] == list(map(written, TEXTS))
    assert isinstance(results[-2].error, InvalidImageUrl)
    assert results[-2].error.param == "messages[0].content[0].image_url.url"
    assert isinstance(results[-1].error, InvalidValue)
    first = results[0]
    assert first.finish_reason == "stop"
    assert first.usage is not None
    assert first.usage.prompt_tokens > 10
    assert first.ttft_seconds is not None
    assert 0 < first.ttft_seconds <= first.seconds
    assert llm.chat([]) == []
    assert capfd.readouterr().out == ""


def test_image_in_any_form_gets_the_tokens_that_http_gives(llm: LLM) -> None:
    """And the server of serve() leaves no process behind."""
    path = TEXTS[0]
    params = SamplingParams(temperature=0, return_token_ids=True, logprobs=2)
    with Image.open(path) as opened:
        forms = [path, path.read_bytes(), opened, str(path), path.as_uri()]
        results = llm.chat([conversation(form) for form in forms], params)
    before = children()
    with saccade.serve(served_model_name="reader", api_key="secret") as server:
        started = started_since(before)
        assert server.model == "reader"
        http = httpx2.Client(headers={"authorization": "Bearer secret"}, timeout=60)
        form = {"files": {"file": path.read_bytes()}, "data": {"purpose": "vision"}}
        uploaded = http.post(f"{server.url}/files", **form).json()["id"]
        part = {"type": "file", "file": {"file_id": uploaded}}
        content = [part, {"type": "text", "text": "What does it say?"}]
        body = {"messages": [{"role": "user", "content": content}], **params.fields()}
        answer = http.post(f"{server.url}/chat/completions", json=body).json()
        http.close()
    assert psutil.wait_procs(started, timeout=0)[1] == []
    [choice] = answer["choices"]
    for result in results:
        assert result.prompt_token_ids == answer["prompt_token_ids"]
        assert result.choices[0].token_ids == choice["token_ids"]
        assert result.choices[0].logprobs is not None
        logprobs = [token.logprob for token in result.choices[0].logprobs.content]
        assert logprobs == pytest.approx([token["logprob"] for token in choice["logprobs"]["content"]], abs=1e-4)


def test_structured_output_is_parsed(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"shape": {"enum": ["circle", "star"]}}, "required": ["shape"]}
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": schema}}
    [result] = llm.chat(conversation(SHAPES[0], "What shape is it?"), GREEDY, response_format=form)
    assert result.parsed["shape"] in ("circle", "star")


def test_calls_of_tools_and_the_next_turn(llm: LLM) -> None:
    label = {"type": "object", "properties": {"shape": {"const": "star"}}, "required": ["shape"]}
    function = {"name": "file_it", "strict": True, "parameters": label | {"additionalProperties": False}}
    tools = [{"type": "function", "function": function}]
    messages: list[Any] = conversation(SHAPES[0], "File it.")
    [result] = llm.chat(messages, GREEDY, tools=tools, tool_choice="required", parallel_tool_calls=False)
    [call] = result.tool_calls
    assert (call.function.name, call.function.arguments) == ("file_it", '{"shape": "star"}')
    assert result.finish_reason == "tool_calls"
    messages += [result.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert llm.chat(messages, GREEDY, tools=tools)[0].error is None


def test_several_answers_follow_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=7, temperature=2.0, max_tokens=8)
    first, again = (llm.chat(conversation(TEXTS[0]), params)[0] for _ in range(2))
    assert len(first.choices) == 2
    assert [one.message for one in first.choices] == [one.message for one in again.choices]


def test_each_conversation_may_have_its_params(llm: LLM) -> None:
    with pytest.raises(InvalidValue, match="has 1 entries for 2 conversations"):
        llm.chat([conversation(TEXTS[0]), conversation(TEXTS[1])], [GREEDY])
    params = [SamplingParams(max_tokens=1), SamplingParams(structured_outputs={"regex": "("})]
    short, wrong = llm.chat([conversation(TEXTS[0])] * 2, params)
    assert short.finish_reason == "length"
    assert isinstance(wrong.error, InvalidValue)
    assert wrong.error.message.startswith("`structured_outputs.regex`: The grammar is wrong")


@pytest.mark.parametrize("wrong", ["Hello?", {"role": "user", "content": "Hello?"}])
def test_text_or_message_is_no_list_of_conversations(llm: LLM, wrong: Any) -> None:
    """Each letter of a text would be a conversation, with an error of its own."""
    with pytest.raises(InvalidValue, match="A conversation is a list of messages"):
        llm.chat(wrong)


def test_settings_that_nothing_obeys_are_named(llm: LLM) -> None:
    question = [{"role": "user", "content": "Hi."}]
    params = SamplingParams(max_tokens=1)
    assert [result.warning for result in llm.chat(question, params)] == [""]
    [result] = llm.chat(question, params, reasoning_effort="high")
    assert "reasoning_effort" in result.warning


def test_unknown_option_is_refused_by_name(llm: LLM) -> None:
    [result] = llm.chat(conversation(TEXTS[0]), tool_choise="none")  # type: ignore[call-arg]
    assert isinstance(result.error, UnsupportedParameter)
    assert "tool_choice" in result.error.message


def test_many_conversations_share_few_places(llm: LLM) -> None:
    """Also with one image object in all, and with every answer longer than a batch."""
    with Image.open(TEXTS[0]) as opened:
        results = llm.chat([conversation(opened if at % 2 else TEXTS[at % 5]) for at in range(64)], GREEDY)
    assert [result.text for result in results] == [written(TEXTS[0] if at % 2 else TEXTS[at % 5]) for at in range(64)]


def test_sugar_for_one_question(llm: LLM) -> None:
    assert llm.ask(TEXTS[0], "What does it say?") == written(TEXTS[0])
    with pytest.raises(InvalidImageUrl):
        llm.ask("missing.png", "What does it say?")


def test_killed_engine_fails_its_chats_and_comes_back(llm: LLM) -> None:
    engine = next(one for one in children() if "saccade.engine" in one.cmdline())
    engine.kill()
    psutil.wait_procs([engine], timeout=60)
    results = llm.chat([conversation(TEXTS[0])] * 4, GREEDY)
    assert all(result.error is not None or result.text == written(TEXTS[0]) for result in results)
    assert wait_until(lambda: llm.chat(conversation(TEXTS[0]), GREEDY)[0].error is None)


async def test_streams_and_chats_run_in_one_event_loop() -> None:
    before = children()
    async with AsyncLLM(max_num_seqs=2) as llm:
        started = started_since(before)
        assert any("saccade.engine" in one.cmdline() for one in started)
        deltas = [delta async for delta in llm.stream(conversation(TEXTS[0]), GREEDY, reasoning_effort="low")]
        assert "".join(delta.text for delta in deltas) == written(TEXTS[0])
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
        assert deltas[-1].usage is not None
        assert "reasoning_effort" in deltas[-1].warning
        results = await asyncio.gather(*(llm.chat(conversation(image), GREEDY) for image in TEXTS))
        assert [result.text for result in results] == list(map(written, TEXTS))
        with pytest.raises(InvalidImageUrl):
            await anext(llm.stream(conversation("missing.png")))
        endless = llm.stream(conversation(TEXTS[0]), SamplingParams(ignore_eos=True))
        await anext(endless)
        await endless.aclose()
        running: asyncio.Task[ChatResult] = asyncio.ensure_future(
            llm.chat(conversation(TEXTS[0]), SamplingParams(ignore_eos=True, max_tokens=400))
        )
        await asyncio.sleep(0.05)
    assert isinstance((await running).error, SaccadeError) or (await running).text
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    error = (await llm.chat(conversation(TEXTS[0]))).error
    assert isinstance(error, StartupError)
    assert "closed" in error.message


def test_program_that_closes_nothing_ends(tmp_path: Path) -> None:
    """At its end, and by an exception."""
    program = f"import saccade; llm = saccade.LLM(); print(llm.ask({str(TEXTS[0])!r}, 'What does it say?')); 1 / 0"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, f"{written(TEXTS[0])}\n")
    assert "ZeroDivisionError" in done.stderr
    assert "RuntimeError" not in done.stderr


def test_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="The worker ended before it was ready"):
        LLM(tmp_path)

"""Conversations on the page: what each request sends, asking again, stopping, and the files that they are saved as."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Opened, Site, answer_chats

from saccade.cli.bundled import bundled

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

IMAGE = Path(str(bundled("images"))) / "texts" / "LS-red.png"
ERROR = {"error": {"message": "Too many requests."}}


def ask(page: "Page", question: str) -> list[dict[str, Any]]:
    """Ask *question* and return the messages of its request, once its answer has ended."""
    page.wait_for_selector('#model option:not([value=""])', state="attached")
    page.fill("#question", question)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#ask")
    page.wait_for_selector("#stop:disabled")
    return list(json.loads(sent.value.post_data or "")["messages"])


def test_later_turns_send_the_images_and_answers_of_earlier_ones(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        answer_chats(page, "LS", "red")
        page.set_input_files("#file", IMAGE)
        page.wait_for_selector("#attachments img")
        (first,) = ask(page, "What does it say?")
        assert page.query_selector("#attachments li") is None
        assert page.input_value("#question") == ""
        assert ask(page, "And the colour?") == [
            first,
            {"role": "assistant", "content": "LS"},
            {"role": "user", "content": [{"type": "text", "text": "And the colour?"}]},
        ]
        assert first["content"][0]["type"] == "image_url"
        assert page.locator(".answer").all_inner_texts() == ["LS", "red"]
        assert page.locator(".question").all_inner_texts() == ["What does it say?", "And the colour?"]


def test_second_question_about_an_image_is_answered_from_the_cache(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        page.set_input_files("#file", IMAGE)
        page.wait_for_selector("#attachments img")
        ask(page, "What does it say?")
        ask(page, "What does it say?")
        assert page.is_hidden("#error")
        page.wait_for_selector("#caption:text('All were cached')")


def test_ask_again_replaces_the_last_answer(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        answer_chats(page, "one", "two", "three")
        ask(page, "First?")
        second = ask(page, "Second?")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.click("#again")
        page.wait_for_selector("#stop:disabled")
        assert json.loads(sent.value.post_data or "")["messages"] == second
        assert page.locator(".answer").all_inner_texts() == ["one", "three"]


def test_answer_stays_if_asking_again_is_refused(site: Site, opened: Opened) -> None:
    with opened(site.root, may_fail=True) as page:
        answer_chats(page, "one", ERROR)
        ask(page, "First?")
        page.click("#again")
        page.wait_for_selector("#error:text('Too many requests.')")
        assert page.locator(".answer").all_inner_texts() == ["one"]
        assert page.is_enabled("#again")


def test_refused_question_goes_back_into_the_form(site: Site, opened: Opened) -> None:
    with opened(site.root, may_fail=True) as page:
        answer_chats(page, ERROR)
        page.set_input_files("#file", IMAGE)
        page.wait_for_selector("#attachments img")
        ask(page, "First?")
        assert page.inner_text("#error") == "Too many requests."
        assert page.input_value("#question") == "First?"
        assert page.locator("#attachments img").count() == 1
        assert page.is_hidden("#conversation")


def test_new_conversation_sends_nothing_of_the_last_one(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        answer_chats(page, "one", "two")
        ask(page, "First?")
        page.click("#new")
        assert page.is_hidden("#conversation")
        assert page.evaluate("() => document.activeElement.id") == "question"
        assert ask(page, "Second?") == [{"role": "user", "content": [{"type": "text", "text": "Second?"}]}]


def test_empty_question_is_not_sent(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        page.fill("#question", "")
        page.click("#ask")
        assert page.inner_text("#error") == "Write a question, or add an image, a PDF or a video."


def test_conversation_is_saved_as_the_body_of_a_request_and_as_markdown(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        answer_chats(page, "It says **LS**.")
        page.set_input_files("#file", IMAGE)
        page.wait_for_selector("#attachments img")
        (question,) = ask(page, "What does it say?")
        with page.expect_download() as saved:
            page.click("#save-json")
        assert saved.value.suggested_filename == "conversation.json"
        assert json.loads(Path(saved.value.path()).read_text()) == {
            "model": "saccade-reader",
            "messages": [question, {"role": "assistant", "content": "It says **LS**."}],
        }
        with page.expect_download() as saved:
            page.click("#save-markdown")
        assert Path(saved.value.path()).read_text() == (
            "## Question 1\n\nImage: LS-red.png\n\nWhat does it say?\n\n## Answer 1\n\nIt says **LS**.\n"
        )


def test_settings_go_into_the_request_and_the_commands(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        answer_chats(page, "one", "two")
        page.click("#more summary")
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0.5")
        page.fill("#length", "20")
        with page.expect_request("**/v1/chat/completions") as sent:
            messages = ask(page, "First?")
        body = json.loads(sent.value.post_data or "")
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["max_tokens"]) == (0.5, 20)
        assert '"temperature":0.5,"max_tokens":20' in page.inner_text("#code")
        page.click("#python")
        assert "temperature=0.5,\n    max_tokens=20,\n" in page.inner_text("#code")
        page.fill("#temperature", "")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Second?")
        assert "temperature" not in json.loads(sent.value.post_data or "")


def test_wrong_setting_is_shown_and_not_sent(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        page.click("#more summary")
        page.fill("#temperature", "9")
        page.click("#more summary")
        page.click("#ask")
        assert page.evaluate("() => document.activeElement.id") == "temperature"
        assert page.is_visible("#temperature")
        assert page.is_hidden("#conversation")

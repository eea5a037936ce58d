"""Which ids a conversation's prompts have, with templates as models really carry them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.producers.conversation import Chat, Conversation, Message, Prompt, Raw
from headrace.producers.toolcalls import in_words, parsed, plain, shown
from tests.chat_templates import (
    ADDS_SYSTEM,
    CHATML,
    COUNTS,
    NEVER_REASONS,
    REORDERS,
    STRIPS_REASONING,
    TOOLS,
    Pairs,
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def turn(talk: Conversation, chat: Chat, text: str, *, sampled: Sequence[int] | None = None, tools: bool = False,
         ends: bool = True) -> tuple[Prompt, list[int]]:  # fmt: skip
    """A prompt, and its answer sampled one character a token, as no tokenizer would cut it."""
    prompt = talk.prompt(chat)
    ids = [100 + ord(c) for c in text] if sampled is None else list(sampled)
    ids += [2] * ends
    talk.answered(prompt, ids, parsed(text) if tools else plain(text))
    return prompt, ids


def test_sampled_tokens_are_never_tokenised_again() -> None:
    template = Pairs()
    talk = Conversation(template)
    first, sampled = turn(talk, Chat((user("hello"),)), "hello there")
    chat = Chat((user("hello"), said("hello there"), user("then")))
    second = talk.prompt(chat)
    assert second.ids[: len(first.ids) + len(sampled)] == first.ids + tuple(sampled)
    assert second.known == len(first.ids) + len(sampled) and second.after == 0 and second.with_answer
    assert template.decode(second.ids) == template.render(chat.messages, (), {}) and second.branch is None
    assert second.ids != tuple(template.encode(second.text or "")), "the sampled cut isn't the tokenizer's"
    assert second.new_messages == 2


@pytest.mark.parametrize("template", [CHATML, ADDS_SYSTEM, REORDERS])
def test_many_turns_extend_each_other_exactly(template: str) -> None:
    talk, messages, before = Conversation(Pairs(template)), [user("hello")], tuple[int, ...]()
    for number in range(6):
        prompt, sampled = turn(talk, Chat(tuple(messages)), f"in the {number}")
        assert prompt.ids[: len(before)] == before and prompt.branch is None
        before = prompt.ids + tuple(sampled)
        messages += [said(f"in the {number}"), user(f"ok {number}")]


def test_answer_cut_by_length_is_closed_by_the_template() -> None:
    template = Pairs()
    talk = Conversation(template)
    turn(talk, Chat((user("hi"),)), "and so", ends=False)
    chat = Chat((user("hi"), said("and so"), user("on")))
    second = talk.prompt(chat)
    assert second.branch is None and template.decode(second.ids) == template.render(chat.messages, (), {})


def test_space_around_an_answer_is_no_change() -> None:
    talk = Conversation(Pairs(ADDS_SYSTEM))  # which trims
    _, sampled = turn(talk, Chat((user("hi"),)), "  yes \n")
    for back in ("  yes \n", "yes"):
        second = talk.prompt(Chat((user("hi"), said(back), user("on"))))
        assert second.branch is None and second.ids[second.known - len(sampled) : second.known] == tuple(sampled)


def test_template_that_strips_reasoning_is_a_branch_from_the_prompt_that_still_stands() -> None:
    template = Pairs(STRIPS_REASONING)
    talk = Conversation(template)
    first, sampled = turn(talk, Chat((user("q"),)), "<think>hm</think>yes")
    kept = talk.prompt(Chat((user("q"), said("<think>hm</think>yes"), {"role": "tool", "content": "r"})))
    assert kept.branch is None and kept.known == len(first.ids) + len(sampled)
    chat = Chat((user("q"), said("<think>hm</think>yes"), user("next")))
    stripped = talk.prompt(chat)
    assert stripped.branch and "otherwise than it was sampled" in stripped.branch
    assert (stripped.after, stripped.with_answer, stripped.known) == (0, False, len(first.ids))
    assert template.decode(stripped.ids) == template.render(chat.messages, (), {}) and "hm" not in (stripped.text or "")


def test_template_that_never_shows_reasoning_again_is_a_branch_too() -> None:
    talk = Conversation(Pairs(NEVER_REASONS))
    turn(talk, Chat((user("q"),)), "<think>hm</think>yes")
    second = talk.prompt(Chat((user("q"), said("<think>hm</think>yes"), {"role": "tool", "content": "r"})))
    assert second.branch and not second.with_answer


@pytest.mark.parametrize(("template", "late"), [(REORDERS, {"role": "system", "content": "be brief"}),
                                                (COUNTS, user("next"))])  # fmt: skip
def test_template_that_changes_what_stands_first_branches_at_the_root(template: str, late: Message) -> None:
    pairs = Pairs(template)
    talk = Conversation(pairs)
    turn(talk, Chat((user("q"),)), "yes")
    chat = Chat((user("q"), said("yes"), late))
    second = talk.prompt(chat)
    assert second.branch == "the template writes earlier messages otherwise than before"
    assert (second.after, second.known) == (None, 0) and second.ids == tuple(pairs.encode(second.text or ""))


@pytest.mark.parametrize(("messages", "why"), [
    ((user("q"), said("no"), user("next")), "message 1 isn't the answer that was given there"),
    ((user("Q"), said("yes"), user("next")), "message 0 changed"),
    ((user("q"),), "the same messages were asked again"),
    ((user("q"), said("yes and no"), user("next")), "message 1 isn't the answer that was given there"),
])  # fmt: skip
def test_client_that_changes_what_was_said_branches_with_the_reason(messages: tuple[Message, ...], why: str) -> None:
    talk = Conversation(Pairs())
    first, _ = turn(talk, Chat((user("q"),)), "yes")
    prompt = talk.prompt(Chat(messages))
    assert prompt.branch == why and not prompt.with_answer
    assert prompt.ids[: prompt.known] == (first.ids if messages[0] == user("q") else ())


def test_template_that_adds_to_an_answer_is_a_branch() -> None:
    adds = CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}{% if not loop.last %}!{% endif %}")
    talk = Conversation(Pairs(adds))
    turn(talk, Chat((user("q"),)), "yes")
    prompt = talk.prompt(Chat((user("q"), said("yes"), user("next"))))
    assert prompt.branch and "otherwise" in prompt.branch


def test_going_on_after_an_older_turn_is_a_branch_that_keeps_its_sampled_tokens() -> None:
    talk = Conversation(Pairs())
    first, sampled = turn(talk, Chat((user("q"),)), "yes")
    turn(talk, Chat((user("q"), said("yes"), user("a"))), "left")
    prompt = talk.prompt(Chat((user("q"), said("yes"), user("b"))))
    assert prompt.branch and (prompt.after, prompt.with_answer) == (0, True)
    assert prompt.ids[: prompt.known] == first.ids + tuple(sampled)


def test_tool_calls_come_back_in_any_spacing_and_stay_as_sampled() -> None:
    template = Pairs(TOOLS)
    talk, tools = Conversation(template), ({"name": "bash"},)
    raw = 'look<tool_call>{"arguments":{"command":"ls"},  "name":"bash"}</tool_call>'
    first, sampled = turn(talk, Chat((user("q"),), tools), raw, tools=True)
    assert '{"name": "bash"}' in (first.text or "")
    back = {"role": "assistant", "content": "look",
            "tool_calls": [{"id": "x", "function": {"name": "bash", "arguments": {"command": "ls"}}}]}  # fmt: skip
    second = talk.prompt(Chat((user("q"), back, {"role": "tool", "content": "a.txt"}), tools))
    assert second.branch is None and second.ids[second.known - len(sampled) : second.known] == tuple(sampled)
    assert template.decode(second.ids[second.known :]).startswith("\n<|im_start|>user\n<tool_response>\na.txt")
    back["tool_calls"][0]["function"]["arguments"] = {"command": "rm"}  # type: ignore[index]
    assert talk.prompt(Chat((user("q"), back, {"role": "tool", "content": "a.txt"}), tools)).branch
    assert talk.prompt(Chat((user("q"),), ())).branch == "the tools changed"


def test_template_without_ends_of_turns_still_extends() -> None:
    talk = Conversation(Pairs("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "))
    turn(talk, Chat((user("q"),)), "yes", ends=False)
    assert talk.prompt(Chat((user("q"), said("yes"), user("next")))).branch is None


def test_completions_extend_by_text_and_by_ids() -> None:
    template = Pairs()
    talk = Conversation(template)
    prompt = talk.prompt(Raw("tell: "))
    sampled = [100 + ord(c) for c in "hello"]
    talk.answered(prompt, sampled, plain("hello"))
    by_text = talk.prompt(Raw("tell: hello then"))
    assert by_text.branch is None and by_text.ids[: by_text.known] == prompt.ids + tuple(sampled)
    by_ids = talk.prompt(Raw(prompt.ids + tuple(sampled) + (100,)))
    assert by_ids.branch is None and by_ids.after == 0
    assert talk.prompt(Raw("other")).branch and talk.prompt(Raw((7, 8))).after is None


@settings(deadline=None)
@given(st.lists(st.text("helothin \n<>|", max_size=12), min_size=1, max_size=5), st.sampled_from([CHATML, ADDS_SYSTEM]),
       st.booleans())  # fmt: skip
def test_whatever_is_said_every_turn_keeps_the_ids_before_it(texts: list[str], template: str, ends: bool) -> None:
    pairs = Pairs(template)
    talk, messages, before = Conversation(pairs), [user("hello")], tuple[int, ...]()
    for text in texts:
        prompt, sampled = turn(talk, Chat(tuple(messages)), text, ends=ends)
        assert prompt.branch is None and prompt.ids[: len(before)] == before
        before = prompt.ids + tuple(sampled)
        messages += [said(text), user(text)]


def test_calls_that_cannot_be_parsed_stay_text() -> None:
    assert parsed('<tool_call>{"name": "a", "arguments": {}}</tool_call>').calls == (("a", {}),)
    assert parsed('x\n<tool_call>\n{"name": "a"}\n</tool_call>\n').content == "x"
    two = '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": {"c": 1}}'
    assert parsed(two).calls == (("a", {}), ("b", {"c": 1}))
    for broken in ("<tool_call>{nonsense}</tool_call>", '<tool_call>{"name": 3}</tool_call>', "<tool_call>",
                   '<tool_call>{"name": "a", "arguments": "text"}</tool_call>'):  # fmt: skip
        assert parsed(broken) == plain(broken)


def test_streamed_text_holds_back_what_may_become_a_call() -> None:
    whole = 'I see \n<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    given_out = [shown(whole[:n]) for n in range(len(whole) + 1)]
    assert given_out == sorted(given_out) and whole[: given_out[-1]] == "I see" == parsed(whole).content
    assert shown("a < b") == len("a < b") and shown("a <tool") == len("a")


def test_template_without_tools_gets_them_in_words() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a", "arguments": {"b": 1}}}]}
    out = in_words([user("q"), call, {"role": "tool", "content": "r"}], [{"name": "a"}])
    assert [m["role"] for m in out] == ["system", "user", "assistant", "user"]
    assert '{"name": "a"}' in out[0]["content"] and parsed(out[2]["content"]).calls == (("a", {"b": 1}),)
    assert out[3]["content"] == "<tool_response>\nr\n</tool_response>"
    assert in_words([{"role": "system", "content": "s"}], [{"name": "a"}])[0]["content"].startswith("s\n\n# Tools")

"""Chats and completions: token ids and masks of transformers, places of answers, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megafp8.data import DataError, template_process
from megafp8.data.chats import ChatTemplate, chat_encoder, read_chat_template
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, all_paths
from megafp8.data.styles.completion import completion_encoder
from megafp8.data.tokenizers import Tokenizer, build_tokenizer
from tests.marks import slow_but
from tools import inspect_data, preprocess_data

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
BLOCKS = (
    "{% set ns = namespace(n=0) %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{% set ns.n = ns.n + 1 %}\n"
    "  {{- message.content }}{{- '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content | tojson }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{{ ns.n }}"
)
LAST_MESSAGE = (  # as templates that drop the reasoning of earlier answers
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if loop.last %}(last) {% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = (  # the next message's role is all that ends an answer
    "[INST]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA2 = (  # no generation prompt, and none that is missing
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA3, "mistral": MISTRAL, "zephyr": ZEPHYR, "blocks": BLOCKS}
SPECIAL = [
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>",
]  # fmt: skip

Chat = list[dict[str, Any]]


def chat(*contents: str, system: str | None = None) -> Chat:
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant") * len(contents)
    return first + [{"role": role, "content": content} for role, content in zip(roles, contents)]


CHATS = [
    chat("What is 2 + 2?", "4"),
    chat("Größe <b>\"x\"</b> & 日本語 🙂?", "Ünï cödé: 🙂\n\n  two lines \n", "And\n?", " spaces around "),
    chat("hi", "", "nothing?", "something"),
]  # fmt: skip


def write_tokenizer(folder: Path, template: str | None, **config: Any) -> Path:
    """A byte-level tokenizer.json with some merges, and a tokenizer_config.json."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    folder.mkdir(parents=True, exist_ok=True)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEMPLATES["zephyr"], "two lines" + "\n\n\nsomething around 2 + 2" * 20], trainer)
    path = folder / "tokenizer.json"
    library.save(str(path))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        **config,
    }
    about |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return path


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return build_tokenizer("huggingface", str(tokenizer_path))


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """And the masks, of a template that marks answers itself."""
    transformers = pytest.importorskip("transformers")
    path = write_tokenizer(tmp_path, TEMPLATES[name])
    template = read_chat_template(str(path))
    encode = chat_encoder(build_tokenizer("huggingface", str(path)), template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chats = CHATS if name == "mistral" else [*CHATS, chat("hi", "yes", system="Be  brief.")]
    for messages in chats:
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=name == "blocks")
        ids, _, mask, _ = encode(messages)
        assert ids.tolist() == expected["input_ids"]
        if name == "blocks":
            assert mask.tolist() == expected["assistant_masks"]
        for prompt in (False, True):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert template.render(messages, add_generation_prompt=prompt) == text


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("llama-3", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("zephyr", "</s>"),
        ("blocks", "<|im_end|>"),
    ],
)
def test_answers_are_learned_with_the_token_that_ends_them(tokenizer: Tokenizer, name: str, end: str) -> None:
    encode = chat_encoder(tokenizer, ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}))
    for messages in CHATS:
        ids, _, mask, _ = encode(messages)
        runs = np.split(ids, np.flatnonzero(np.diff(mask, prepend=0)))[1::2]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        wanted = [answer.strip() if name == "llama-3" else answer for answer in answers]
        assert [tokenizer.decode(run.tolist()) for run in runs] == [answer + end for answer in wanted]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (GLM, ["<|user|>", "<|user|>"]),
        (GLM.replace("\n{{ m.content }}", "\n{{ m.content }}\n"), ["\n<|user|>", "\n<|user|>"]),
        ("{% for m in messages %}{{ m.content }}{% if not loop.last %}</s>{% endif %}{% endfor %}", ["</s>", "</s>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", ["", ""]),
        (GLM.replace("[INST]", "{% if messages[-1].role == 'user' and messages[3:] %}x{% endif %}"), ["<|user|>", ""]),
    ],
    ids=["role", "line and role", "between messages", "none", "the beginning depends on the end"],
)
def test_an_answer_ends_with_the_special_token_of_the_next_message(
    tokenizer: Tokenizer, template: str, ends: list[str]
) -> None:
    """After the last message, with the token that a message of the user would begin with."""
    messages = chat("Q1", "A1", "Q2", "A2")
    ids, _, mask, _ = chat_encoder(tokenizer, ChatTemplate(template))(messages)
    runs = [tokenizer.decode(run.tolist()) for run in np.split(ids, np.flatnonzero(np.diff(mask, prepend=0)))]
    assert [run[run.index("A") :] for run in runs[1::2]] == [f"A{i}{end}" for i, end in enumerate(ends, 1)]
    text = ChatTemplate(template).render(messages)
    assert tokenizer.decode(ids.tolist()) == text + (
        ends[1] if ends[1] and not text.endswith("\n") else ends[1].strip()
    )


def test_warnings_show_what_answers_teach() -> None:
    """A header that is learned, and answers without an end, but not what good templates do."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for template in (*TEMPLATES.values(), GLM, LLAMA2):
        assert ChatTemplate(template, tokens).warnings(CHATS[0], SPECIAL) == []
    (header,) = ChatTemplate(NO_PROMPT).warnings(CHATS[0], SPECIAL)
    assert (
        "no generation prompt, so the model also learns the header of an answer, '<|im_start|>assistant\\n'" in header
    )
    no_end = "no special token ends the answers, so the model does not learn where to stop"
    unmarked = BLOCKS.replace("{{- '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{- '<|im_end|>' }}")
    for template in ("{% for m in messages %}{{ m.content }}\n{% endfor %}", unmarked):
        (end,) = ChatTemplate(template).warnings(CHATS[0], SPECIAL)
        assert no_end in end


def test_a_token_of_prompt_and_answer_is_the_answers(tokenizer: Tokenizer) -> None:
    """The line feeds around the border are one token."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    ids, _, mask, _ = chat_encoder(tokenizer, template)(chat("two", "\n\nlines"))
    assert tokenizer.decode(ids[mask == 0].tolist()) == "two"
    assert tokenizer.decode(ids[mask == 1].tolist()) == "\n\n\nlines\n"
    assert len(ids[mask == 1]) < len("\n\n\nlines\n")


@pytest.mark.parametrize("append_eod", [True, False])
def test_completions(tokenizer: Tokenizer, append_eod: bool) -> None:
    encode = completion_encoder(tokenizer, append_eod)
    for prompt, completion in [("What? ", "That."), ("two lin", "es"), ("", "something else"), ("🙂", "🙂\n")]:
        ids, _, mask, _ = encode(prompt, completion)
        text = prompt + completion + ("</s>" if append_eod else "")
        assert tokenizer.decode(ids.tolist()) == text
        learned = tokenizer.decode(ids[mask == 1].tolist())
        assert text.endswith(learned)
        assert learned.endswith(completion + "</s>" if append_eod else completion)
        own = tokenizer.encode(prompt)
        assert ids[mask == 0].tolist() == own[: int((mask == 0).sum())]
    with pytest.raises(ValueError, match="the completion is empty"):
        encode("x", "")


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (MISTRAL, [{"role": "assistant", "content": "first"}], "the chat template refuses it: Conversation roles must"),
        (CHATML, [{"role": "user", "content": "hi"}], "has nothing to learn: no message of the assistant"),
        (LAST_MESSAGE, chat("a", "b", "c", "d"), "the end of message 2 differently in the whole chat"),
        ("{{ messages[0].__class__.__mro__ }}", chat("a", "b"), "the chat template refuses it: access to attribute"),
        ("{{ 1 / 0 }}", chat("a", "b"), "the chat template fails: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", chat("a", "b"), "fails: RecursionError"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            chat("a", "b"),
            "the chat template fails: it takes more than 0.5 s",
        ),
        ("{{ 'a' * 10**12 }}", chat("a", "b"), "takes more than 268,435,456 bytes"),
        ("{{ 2 ** 100000000000 }}", chat("a", "b"), "it takes more than 0.5 s"),
        ("{{ ('a' * 10**7).replace('a', 'b' * 10**7) }}", chat("a", "b"), "takes more than|OverflowError"),
        ("{{ 'a'.center(10**10) }}", chat("a", "b"), "takes more than 268,435,456 bytes"),
        ("{{ '%9999999999d' % 1 }}", chat("a", "b"), "takes more than 268,435,456 bytes"),
        ("{{ '{:9999999999}'.format(1) }}", chat("a", "b"), "takes more than 268,435,456 bytes"),
        (
            "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
            chat("a", "b"),
            "takes more than (0.5 s|268,435,456 bytes)",
        ),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", chat("a", "b"), "has more than 16,777,216 char"),
        ("{{ messages.append(1) }}", chat("a", "b"), "the chat template refuses it: access to attribute 'append'"),
        (BLOCKS, chat("a", "\ufdd0"), "a message contains U.FDD0"),
    ],
    ids=[
        "raise_exception",
        "no answer",
        "prefixes",
        "sandbox",
        "division",
        "recursion",
        "time",
        "product",
        "power",
        "replace",
        "center",
        "percent format",
        "format",
        "lists of lists",
        "output",
        "immutable",
        "marks",
    ],
)
def test_chats_that_are_refused(
    tokenizer: Tokenizer, template: str, messages: Chat, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0.5 s" in error:
        monkeypatch.setattr("megafp8.data.template_process.RENDER_SECONDS", 0.5)
    with pytest.raises(ValueError, match=error):
        chat_encoder(tokenizer, ChatTemplate(template, {"eos_token": "</s>"}))(messages)


def test_a_process_that_is_forked_while_another_thread_renders(tokenizer: Tokenizer) -> None:
    """The child starts another renderer, whose lock is free."""
    template = ChatTemplate(CHATML)
    expected = template.render(CHATS[0])
    with template_process._shared._lock:
        child = multiprocessing.get_context("fork").Pool(1)
    assert child.apply_async(template.render, [CHATS[0]]).get(timeout=60) == expected
    child.terminate()
    assert template.render(CHATS[0]) == expected


@pytest.mark.parametrize("text", ["{{ raise_exception('a' * 10**7) }}", "{{ messages[0]['content'][0] * 9 }}"])
def test_reasons_are_short_and_texts_can_be_tokenized(text: str) -> None:
    with pytest.raises(ValueError, match="the chat template") as error:
        ChatTemplate(text).render([{"role": "user", "content": "\ud800"}])
    assert len(str(error.value)) < 1200


def test_where_templates_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    path = str(write_tokenizer(folder, None))
    with pytest.raises(
        ValueError, match=r"a has no chat template, neither .*: give the file of a template with --chat-template"
    ):
        read_chat_template(path)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": ZEPHYR}]
    write_tokenizer(folder, None, chat_template=named, pad_token=None, extra_special_tokens={"image_token": "<s>"})
    found = read_chat_template(path)
    assert (found.source, found.special_tokens) == (
        ZEPHYR,
        {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<s>"},
    )
    assert pickle.loads(pickle.dumps(found)).render(CHATS[0]) == found.render(CHATS[0])
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert read_chat_template(path).special_tokens["eos_token"] == "<|im_end|>"
    (folder / "chat_template.jinja").write_text(CHATML)
    assert read_chat_template(path).source == CHATML
    (tmp_path / "own").write_text("{% for %}")
    with pytest.raises(ValueError, match="the chat template cannot be compiled: line 1: "):
        read_chat_template(path, str(tmp_path / "own"))
    with pytest.raises(ValueError, match="absent cannot be read"):
        read_chat_template(path, str(tmp_path / "absent"))
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (folder / name).write_text("[")
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            read_chat_template(path)


def test_tokenizers_that_do_not_know_the_special_tokens(tmp_path: Path) -> None:
    template = ChatTemplate(CHATML, {"eos_token": "<|end|>"})
    with pytest.raises(ValueError, match=r"does not have the special tokens <\|end\|> that tokenizer_config.json"):
        chat_encoder(build_tokenizer("huggingface", str(write_tokenizer(tmp_path, CHATML))), template)
    with pytest.raises(ValueError, match="chats need a tokenizer that finds special tokens in a text"):
        chat_encoder(build_tokenizer("bytes"), template)


# --- the tool --------------------------------------------------------------------------------------------------------


def run(prefix: Path, tokenizer_path: Path, source: Path, *arguments: str) -> int:
    settings = ["--tokenizer", "huggingface", "--tokenizer-path", str(tokenizer_path), "--output-prefix", str(prefix)]
    return preprocess_data.main(["--input", str(source), *settings, *arguments])


def lines(records: Sequence[Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def masked_documents(prefix: Path) -> list[tuple[list[int], list[int]]]:
    dataset = IndexedDataset(prefix)
    mask = dataset.loss_mask()
    return [(dataset.document(i).tolist(), mask.document(i).tolist()) for i in range(dataset.num_documents)]


@pytest.mark.parametrize("kind", slow_but(["jsonl", "jsonl.zst", "parquet"], "jsonl"))
def test_chats_become_a_data_set_with_a_mask(
    tmp_path: Path, tokenizer_path: Path, tokenizer: Tokenizer, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, chats = tmp_path / f"chats.{kind}", CHATS * 30
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(chats)), "talk": chats}), source, row_group_size=7)
    else:
        content = lines([{"talk": messages} for messages in chats])
        source.write_bytes(zstandard.ZstdCompressor().compress(content) if kind == "jsonl.zst" else content)
    workers = "2" if kind == "jsonl" else "0"
    arguments = ["--style", "chat", "--json-key", "talk", "--workers", workers]
    assert run(tmp_path / "out", tokenizer_path, source, *arguments) == 0
    encode = chat_encoder(tokenizer, read_chat_template(str(tokenizer_path)))
    encoded = [encode(messages) for messages in chats]
    expected = [(tokens.ids.tolist(), tokens.loss_mask.tolist()) for tokens in encoded]
    assert masked_documents(tmp_path / "out") == expected
    about = json.loads((tmp_path / "out.json").read_text())
    assert about["learned_tokens"] == sum(sum(mask) for _, mask in expected)
    printed = capsys.readouterr().out
    assert f"loss mask: {about['learned_tokens']:,} tokens of answers" in printed
    assert (
        r"learned tokens in ⟦ ⟧: <|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        in printed
    )
    assert "warning" not in printed
    settings = ["--tokenizer", "huggingface", "--tokenizer-path", str(tokenizer_path)]
    assert inspect_data.main([str(tmp_path / "out"), "--documents", "1", *settings]) == 0
    shown = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
    assert f"--- document 0\n{shown}" in capsys.readouterr().out


def test_completions_become_a_data_set_with_a_mask(tmp_path: Path, tokenizer_path: Path, tokenizer: Tokenizer) -> None:
    pairs = [("two", " lines"), ("some", "thing")]
    (tmp_path / "x.jsonl").write_bytes(lines([{"q": q, "a": a} for q, a in pairs]))
    pyarrow.parquet.write_table(
        pyarrow.table({"a": [a for _, a in pairs], "q": [q for q, _ in pairs]}), tmp_path / "x.parquet"
    )
    keys = ["--style", "completion", "--json-key", "q", "--completion-key", "a"]
    for kind in ("jsonl", "parquet"):
        assert run(tmp_path / kind, tokenizer_path, tmp_path / f"x.{kind}", *keys) == 0
        encoded = [completion_encoder(tokenizer, True)(*pair) for pair in pairs]
        expected = [(tokens.ids.tolist(), tokens.loss_mask.tolist()) for tokens in encoded]
        assert masked_documents(tmp_path / kind) == expected


def test_other_forms_of_chats_give_the_same_tokens(tmp_path: Path, tokenizer_path: Path) -> None:
    messages = chat("What is 2 + 2?", "4", "And\n?", " spaces ", system="Be brief.")
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [{"from": names[x["role"]], "value": x["content"]} for x in messages]
    halves = [
        {**x, "content": [{"type": "text", "text": part} for part in (x["content"][:3], x["content"][3:])]}
        for x in messages
    ]
    records = {"a": {"messages": messages}, "b": {"conversations": sharegpt}, "c": {"messages": halves}}
    for name, record in records.items():
        (tmp_path / f"{name}.jsonl").write_bytes(lines([record]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([records["b"]]), tmp_path / "d.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([records["c"]]), tmp_path / "e.parquet")
    written = []
    for source in ("a.jsonl", "b.jsonl", "c.jsonl", "d.parquet", "e.parquet"):
        assert run(tmp_path / source[0], tokenizer_path, tmp_path / source, "--style", "chat") == 0
        written.append(masked_documents(tmp_path / source[0]))
    assert written == [written[0]] * 5
    assert run(tmp_path / "f", tokenizer_path, tmp_path / "b.jsonl", "--style", "chat", "--json-key", "messages") == 0
    assert run(tmp_path / "g", tokenizer_path, tmp_path / "b.jsonl", "--style", "chat", "--json-key", "talk") == 2


def test_a_bad_chat_is_named_and_counted(
    tmp_path: Path, tokenizer_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[tuple[Any, str]] = [
        ({"text": "x"}, "has no key 'messages' (it has text); --json-key names the list of messages"),
        ({"messages": "hi"}, "'messages' is not a list of messages"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": ["hi"]}, "message 1 of 'messages' is a str, not an object with role and content"),
        ({"messages": [*CHATS[0], {"role": "user"}]}, "'content' of message 3 of 'messages' is not a string"),
        ({"messages": [{"content": "x"}]}, "'role' of message 1 of 'messages' is not a string"),
        ({"conversations": [{"from": "human"}]}, "'value' of message 1 of 'conversations' is not a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "part 1 of message 1 of 'messages' has type image_url, but parts of a content must be texts",
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, "cannot be tokenized: has nothing to learn: no message"),
    ]
    good, source = {"messages": CHATS[0]}, tmp_path / "x.jsonl"
    for record, error in bad:
        source.write_bytes(lines([good, record, good]))
        assert run(tmp_path / "out", tokenizer_path, source, "--style", "chat") == 2
        assert f"x.jsonl, line 2: {error}" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == [source], "files were left"
    source.write_bytes(lines([good, *(record for record, _ in bad), good]))
    assert run(tmp_path / "out", tokenizer_path, source, "--style", "chat", "--skip-errors") == 0
    assert len(masked_documents(tmp_path / "out")) == 2
    assert f"{len(bad)} unreadable documents skipped" in capsys.readouterr().out


def test_flags_that_say_nothing_are_refused(
    tmp_path: Path, tokenizer_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(lines([{"messages": CHATS[0]}]))
    (tmp_path / "x.txt").write_text("x")
    mistakes: list[tuple[list[str], str]] = [
        (["--chat-template", "x"], "--chat-template does not apply to --style text"),
        (["--style", "chat", "--no-append-eod"], "--no-append-eod does not apply to --style chat"),
        (["--style", "completion", "--split-sentences"], "--split-sentences does not apply to --style completion"),
        (["--completion-key", "x"], "--completion-key does not apply to --style text"),
        (["--style", "completion", "--chosen-key", "x"], "--chosen-key does not apply to --style completion"),
        (["--style", "chat", "--text-files"], "--text-files reads whole files as texts, but --style is chat"),
        (["--style", "chat", "--tokenizer", "bytes"], "chats need a tokenizer"),
        (["--style", "chat", "--input", str(tmp_path / "x.txt")], "x.txt: a plain text file has no keys"),
    ]
    for arguments, error in mistakes:
        if "bytes" in arguments:
            (tmp_path / "template").write_text(CHATML)
            code = preprocess_data.main(
                [
                    "--input",
                    str(source),
                    *arguments,
                    "--chat-template",
                    str(tmp_path / "template"),
                    "--output-prefix",
                    "x",
                ]
            )
        else:
            code = run(tmp_path / "out", tokenizer_path, source, *arguments)
        assert (code, error in capsys.readouterr().err) == (2, True), error


# --- the mask's files ------------------------------------------------------------------------------------------------


def write(prefix: Path, documents: Sequence[tuple[list[int], list[int]]]) -> None:
    writer = IndexedDatasetWriter(prefix, np.uint16, loss_mask=True, overwrite=True)
    for tokens, mask in documents:
        writer.add_document(np.array(tokens), loss_mask=np.array(mask, np.uint8))
    writer.close({"max_token_id": 9})


def test_a_mask_of_another_data_set_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1])])
    write(tmp_path / "b", [([1, 2, 3], [0, 0, 1]), ([4, 5], [0, 1])])
    write(tmp_path / "c", [([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])])
    assert masked_documents(tmp_path / "a")[1] == ([4, 5], [0, 1])

    def refused(other: str, error: str) -> None:
        for suffix in ("bin", "idx"):
            (tmp_path / f"a.loss_mask.{suffix}").write_bytes((tmp_path / f"{other}.loss_mask.{suffix}").read_bytes())
        with pytest.raises(DataError, match=error):
            IndexedDataset(tmp_path / "a").loss_mask()

    refused("b", r"a.loss_mask.bin and .idx are not the loss mask of .*a: the mask was not written with this data set")
    refused("c", "the mask has sequences of other lengths")
    (tmp_path / "a.json").unlink()
    refused("c", "the mask has sequences of other lengths")
    IndexedDatasetWriter(tmp_path / "d", np.int32).close()
    for suffix in ("bin", "idx"):
        (tmp_path / f"d.{suffix}").rename(tmp_path / f"d.loss_mask.{suffix}")
    refused("d", "is not a loss mask: its dtype is int32")
    (tmp_path / "b.loss_mask.idx").unlink()
    assert IndexedDataset(tmp_path / "b").has_loss_mask
    with pytest.raises(DataError, match=r"b.loss_mask.idx cannot be opened: no such file"):
        IndexedDataset(tmp_path / "b").loss_mask()


@pytest.mark.parametrize("masked", [True, False])
def test_a_kill_while_files_are_replaced_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    """At any rename or removal: what can be opened is the old or the new data set, each with its own mask."""
    old, new = ([1, 2, 3], [0, 1, 1]), ([4, 5, 6], [0, 0, 1])
    real = {"replace": os.replace, "unlink": Path.unlink}
    calls, at, ended = [0], 0, False

    def stopping(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            calls[0] += 1
            if calls[0] == at:
                raise SystemError("stands for a kill")
            real[name](*arguments, **options)  # type: ignore[operator]

        return call

    seen = set()
    while not ended:
        write(tmp_path / "x", [old])
        writer = IndexedDatasetWriter(tmp_path / "x", np.uint16, loss_mask=masked, overwrite=True)
        writer.add_document(np.array(new[0]), loss_mask=np.array(new[1], np.uint8) if masked else None)
        calls[0], at = 0, at + 1
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", stopping("replace"))
            patched.setattr(Path, "unlink", stopping("unlink"))
            try:
                writer.close({"max_token_id": 9})
                ended = True
            except SystemError:
                pass
        if not (tmp_path / "x.idx").exists():
            seen.add("none")
            continue
        dataset = IndexedDataset(tmp_path / "x")
        found = (
            dataset.document(0).tolist(),
            dataset.loss_mask().document(0).tolist() if dataset.has_loss_mask else None,
        )
        assert found in (old, new if masked else (new[0], None))
        seen.add("new" if ended else "old")
    assert seen == {"none", "old", "new"}
    assert at > 7


def test_overwriting_leaves_no_old_mask(tmp_path: Path, tokenizer_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_bytes(lines([{"messages": CHATS[0], "text": "plain"}]))
    prefix = tmp_path / "out"
    assert run(prefix, tokenizer_path, source, "--style", "chat") == 0
    assert all(path.exists() for path in all_paths(prefix))
    assert run(prefix, tokenizer_path, source, "--overwrite") == 0
    assert [path.exists() for path in all_paths(prefix)] == [True] * 3 + [False] * 2
    assert not IndexedDataset(prefix).has_loss_mask

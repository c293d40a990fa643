import gzip
import json

import pytest
from tiny import save_tiny_tokenizer

from moe_spac.traces.errors import InputError
from moe_spac.traces.prompts import FOLDER, SETS, Prompt, describe, encode, read_prompts

DOMAINS = ["drama", "scripture", "arithmetic", "code", "manual", "exam"]


def test_bundled_prompts():
    everything = read_prompts("held-out")
    assert len(everything) == 36
    assert [p.domain for p in read_prompts()] == [d for d in DOMAINS for _ in range(2)]
    for domain in DOMAINS:
        assert len(read_prompts(domain)) == 6
    assert len({p.name for p in everything}) == 36
    assert len(read_prompts("held-out", 7)) == 7


def test_bundled_sets_by_name():
    counts = {"mt-bench": 40, "humaneval": 41, "gsm8k": 40, "mmlu-pro": 42}
    for name, count in counts.items():
        prompts = read_prompts(name)
        assert len(prompts) == len({p.name for p in prompts}) == count
        assert describe(name) == f"bundled {name} prompts"
    assert {len(p.turns) for p in read_prompts("mt-bench")} == {2}
    assert len({p.domain for p in read_prompts("mt-bench")}) == 8
    assert len({p.domain for p in read_prompts("mmlu-pro")}) == 14
    assert not any(p.chat for p in read_prompts("humaneval"))
    assert all("\nA. " in p.turns[0] for p in read_prompts("mmlu-pro"))
    assert sum((FOLDER / f"{name}.jsonl").stat().st_size for name in SETS) < 300_000


def test_published_files_work_as_they_are(tmp_path):
    """HumanEval (compressed), GSM8K and MMLU-Pro records."""
    lines = [
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass", "entry_point": "f"},
        {"question": "How many?", "answer": "12"},
        {"question_id": 3, "category": "law", "question": "Which?", "options": ["one", "two"], "answer": "B"},
    ]
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert [(p.name, p.domain, p.turns, p.chat) for p in read_prompts(str(path))] == [
        ("HumanEval/0", "", ("def f():\n",), False),
        ("p.jsonl-2", "", ("How many?",), True),
        ("3", "law", ("Which?\n\nA. one\nB. two",), True),
    ]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(str(path))


def test_text_file_has_a_prompt_a_paragraph(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text("first line\nsecond line\n\n\n  another\n", encoding="utf-8")
    assert [p.turns for p in read_prompts(str(path))] == [("first line\nsecond line",), ("  another",)]


def test_json_lines(tmp_path):
    lines = [
        {"text": "a", "name": "n", "domain": "d"},
        {"prompt": "b"},
        {"turns": ["c", "d"], "question_id": 7, "category": "q"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_prompts(str(path)) == [
        Prompt("n", "d", ("a",)),
        Prompt("p-2", "", ("b",)),
        Prompt("7", "q", ("c", "d"), chat=True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ('{"text": ""}', "line 1 needs"),
        ('{"turns": "x"}', "line 1 needs"),
        ("\n", "no prompts in the file"),
    ],
)
def test_bad_json_lines(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_prompts(str(path))


def test_other_bad_sources(tmp_path):
    empty, binary = tmp_path / "e.txt", tmp_path / "b.txt"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for source, message in (
        (empty, "no text"),
        (binary, "UTF-8"),
        ("dramma", "did you mean drama?"),
        ("mtbench", "did you mean mt-bench?"),
        ("x.txt", "no such"),
    ):
        with pytest.raises(InputError, match=message):
            read_prompts(str(source))
    with pytest.raises(InputError, match="--prompt-limit 0"):
        read_prompts(None, 0)


def test_chat_turns_join_to_what_the_template_makes_of_the_whole(tmp_path):
    from transformers import AutoTokenizer

    save_tiny_tokenizer(tmp_path)
    tok = AutoTokenizer.from_pretrained(tmp_path)
    chat = Prompt("c", "", ("Hello", "More"), chat=True)
    assert [tok.decode(ids) for ids in encode(tok, chat)] == ["Hello", "\n\nMore"]
    tok.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    first, second = (tok.decode(ids) for ids in encode(tok, chat))
    whole = tok.apply_chat_template(
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": "More"},
        ],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert first + "Yes<|endoftext|>" + second == whole

"""Prompts: the bundled sets, text files and JSON lines."""

import difflib
import gzip
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import InputError

FOLDER = Path(__file__).parent / "prompts"
HELD_OUT = "held-out"
SETS = (HELD_OUT, "mt-bench", "humaneval", "gsm8k", "mmlu-pro")
DEFAULT_PER_DOMAIN = 2
GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Texts to give a model one after another. A `chat` goes through the tokenizer's chat template if it has one."""

    name: str
    domain: str
    turns: tuple[str, ...]
    chat: bool = False


def read_prompts(source: str | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a bundled set or of a file.

    None: two of each domain of the held-out set; a name in SETS: all of that set; a domain of the held-out set: its
    six. A text file has one prompt a paragraph. A line of a .jsonl file (which may be gzip-compressed) has "text" or
    "prompt" (continued as it is), or "turns" (a chat, as MT-bench and Spec-Bench write them) or "question" (a chat of
    one turn, with "options" below it if there are any). It may have "name" and "domain" (also "question_id" or
    "task_id", and "category"). Raises InputError for anything else.
    """
    if limit is not None and limit < 1:
        raise InputError(f"--prompt-limit {limit}: must be at least 1")
    if source is not None and Path(source).is_file():
        path = Path(source)
        lines = path.name.endswith((".jsonl", ".jsonl.gz"))
        return (_read_lines(path) if lines else _read_paragraphs(path))[:limit]
    return _bundled(source)[:limit]


def describe(source: str | None) -> str:
    """What a header says about where the prompts came from."""
    if source is not None and Path(source).is_file():
        return f"file {Path(source).name}"
    return f"bundled {source} prompts" if source in SETS[1:] else f"bundled held-out prompts ({source or 'default'})"


def encode(tokenizer: Any, prompt: Prompt) -> list[list[int]]:
    """Token ids of each turn, ready to be appended to the text so far."""
    if not prompt.chat or not getattr(tokenizer, "chat_template", None):
        return [tokenizer.encode(turn if i == 0 else "\n\n" + turn) for i, turn in enumerate(prompt.turns)]
    texts = [_chat_text(tokenizer, turn, first=i == 0) for i, turn in enumerate(prompt.turns)]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _chat_text(tokenizer: Any, turn: str, first: bool) -> str:
    """A user's turn in the model's template; a later one begins where the assistant's words end."""
    mark = "(said)"
    before = [] if first else [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}]
    messages = [*before, {"role": "user", "content": turn}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if first:
        return text
    # A turn that ended with the end token has it in the text already; it is not given twice.
    return text.split(mark, 1)[1].removeprefix(tokenizer.eos_token or "")


def _bundled(name: str | None) -> list[Prompt]:
    if name in SETS:
        return _read_lines(FOLDER / f"{name}.jsonl")
    held_out = _read_lines(FOLDER / f"{HELD_OUT}.jsonl")
    domains = list(dict.fromkeys(p.domain for p in held_out))
    if name is None:
        return [p for d in domains for p in [q for q in held_out if q.domain == d][:DEFAULT_PER_DOMAIN]]
    if name in domains:
        return [p for p in held_out if p.domain == name]
    near = difflib.get_close_matches(name, [*SETS, *domains], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        f"--prompts {name}: no such file or set; {hint}give a .txt or .jsonl file, one of {', '.join(SETS)}, or "
        f"a domain of held-out ({', '.join(domains)})"
    )


def _read_paragraphs(path: Path) -> list[Prompt]:
    text = _text_of(path).replace("\r\n", "\n")
    parts = [p.strip("\n") for p in text.split("\n\n") if p.strip()]
    if not parts:
        raise InputError(f"--prompts {path}: no text in the file; write one prompt a paragraph")
    return [Prompt(f"{path.stem}-{i + 1}", path.stem, (part,)) for i, part in enumerate(parts)]


def _read_lines(path: Path) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        if line.strip():
            prompt = _from_json(line, f"--prompts {path}: line {number}")
            prompts.append(replace(prompt, name=prompt.name or f"{path.stem}-{number}"))
    if not prompts:
        raise InputError(f"--prompts {path}: no prompts in the file; write one JSON object a line")
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}); write one object a line") from None
    if not isinstance(fields, dict):
        raise InputError(f'{where} is not an object; write for example {{"text": "..."}}')
    chat = "turns" in fields or "question" in fields
    turns = _turns(fields)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise InputError(f'{where} needs "text", "prompt", "turns" or "question" with words in it')
    name = fields.get("name", fields.get("question_id", fields.get("task_id", "")))
    return Prompt(str(name), str(fields.get("domain", fields.get("category", ""))), tuple(turns), chat)


def _turns(fields: dict[str, Any]) -> Any:
    if "turns" in fields:
        return fields["turns"]
    if "question" not in fields:
        return [fields.get("text", fields.get("prompt"))]
    options = fields.get("options") or []
    listed = [f"{chr(ord('A') + i)}. {option}" for i, option in enumerate(options)]
    return ["\n".join([str(fields["question"]), *(["", *listed] if listed else [])])] if fields["question"] else None


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(GZIP) else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {path}: cannot be read as UTF-8 text ({error})") from None

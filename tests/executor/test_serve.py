"""The server, over HTTP and by a client that is not ours: answers, refusals, the queue, clients that hang up."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from select import select
from typing import Any, ClassVar

import httpx
import openai
import pytest

pytest.importorskip("fastapi")

from moe_spac.executor.cli_options import LogOptions, PairOptions, SizeOptions
from moe_spac.executor.cli_serve import check_remote_policy
from moe_spac.executor.opening import Opening
from moe_spac.executor.serve import Worker
from moe_spac.executor.session import Session, Settings
from moe_spac.executor.web import Rules, listen, serving
from moe_spac.policies.interface import Policy
from moe_spac.policies.load import load_policy
from moe_spac.traces.errors import InputError
from moe_spac.traces.speculate import Options

PROMPT = "the expert that the router chose"
LONG = 6000  # tokens that take much longer than a test waits
PLACES = 2


@dataclass
class Failing(Policy):
    """Fails while it answers."""

    name: ClassVar[str] = "failing"

    def victim(self, incoming, candidates, view):
        raise RuntimeError("no idea")


def policy_for(name: str) -> Policy:
    return Failing() if name == "failing" else load_policy(name)


def check_policy(name: str) -> None:
    opening = Opening("ar-lru", PairOptions(), SizeOptions(), LogOptions(), None, None, 64, 0.0, 0, allow_lossy=False)
    if name != "failing":
        check_remote_policy(name, opening)


@contextmanager
def server(worker: Worker, rules: Rules) -> Iterator[str]:
    """Its address; in a thread, on a free port."""
    sock = listen("127.0.0.1", 0)
    running = serving(worker, rules)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()
        sock.close()


@pytest.fixture(scope="module")
def worker(load_live, live_machine) -> Iterator[Worker]:
    def open_session(tell: Any) -> Session:
        options = Options(max_new_tokens=64, draft_length=3)
        return Session(load_live("tiny"), load_policy("ar-lru"), Settings(live_machine, 10, options=options))

    worker = Worker(open_session, "ar-lru", policy_for, PLACES)
    worker.start()
    yield worker
    assert worker.close(10)
    assert [t.name for t in threading.enumerate() if t.name.startswith("spac-")] == []


@pytest.fixture(scope="module")
def url(worker) -> Iterator[str]:
    with server(worker, Rules("tiny", body_bytes=20_000, new_tokens=LONG, check_policy=check_policy)) as url:
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield url


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_for(what: Callable[[], bool]) -> None:
    for _ in range(600):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def said(*texts: str) -> Any:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": said(PROMPT), "max_tokens": 12, **more})


@pytest.fixture(scope="module")
def greedy(load_live, greedy_texts) -> str:
    """What transformers writes after PROMPT in 12 tokens."""
    tokenizer = load_live("tiny").pair.tokenizer
    return tokenizer.decode(greedy_texts[0][len(tokenizer.encode(PROMPT)) :], skip_special_tokens=True)


def test_a_chat_is_answered_with_transformers_own_greedy_text(client, greedy, load_live):
    answer = ask(client)
    assert answer.choices[0].message.content == greedy
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("chat.completion", "tiny", "length")
    prompt = len(load_live("tiny").pair.tokenizer.encode(PROMPT))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 12)
    assert answer.usage.total_tokens == prompt + 12
    times = answer.timings
    assert (times["cache_n"] + times["prompt_n"], times["predicted_n"]) == (prompt, 12)
    assert times["predicted_per_second"] == pytest.approx(12 / times["predicted_ms"] * 1e3)
    assert 0 <= times["draft_n_accepted"] <= times["draft_n"]
    assert answer.experts["status"] == "ok"
    assert 0 <= answer.experts["hit_rate"] <= 1


def test_a_stream_has_the_same_text_in_pieces(client, greedy):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == greedy
    assert len(chunks) > 4
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].timings["predicted_n"] == chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1


def test_completions_take_texts_and_tokens_and_end_at_stop_strings(client, greedy, load_live):
    create = client.completions.create
    ids = load_live("tiny").pair.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, [PROMPT], ids):
        assert create(model="tiny", prompt=prompt, max_tokens=12).choices[0].text == greedy
    stop = greedy[5:7]
    cut = create(model="tiny", prompt=PROMPT, max_tokens=12, stop=[stop, "never"])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (greedy[: greedy.index(stop)], "stop")
    assert cut.usage.completion_tokens <= 12
    pieces = create(model="tiny", prompt=PROMPT, max_tokens=12, stop=stop, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == greedy[: greedy.index(stop)]


def test_sampling_follows_the_seed(client):
    """Under whatever policy, also one that sets the draft's length by the clock."""
    texts = [
        ask(client, temperature=1.5, seed=1, extra_body={"policy": policy}).choices[0].message.content
        for policy in ("ar-lru", "governed", "static")
    ]
    assert texts[0] == texts[1] == texts[2]
    texts = [ask(client, temperature=1.5, top_p=0.9, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_conversation_that_goes_on_reads_only_what_is_new(client):
    first = ask(client)
    again = ask(client, messages=said(PROMPT, first.choices[0].message.content, "Question: how many?"))
    assert again.timings["cache_n"] >= first.usage.prompt_tokens
    assert again.timings["cache_n"] + again.timings["prompt_n"] == again.usage.prompt_tokens
    alone = ask(client, messages=said("And God said", "let there be", "light"))  # another text in between
    assert alone.timings["cache_n"] < 3
    anew = ask(client, messages=said(PROMPT, first.choices[0].message.content, "Question: how many?"))
    assert anew.choices[0].message.content == again.choices[0].message.content


def test_a_request_may_choose_the_policy_and_gets_the_same_text(client, greedy):
    for policy in ("hybrimoe", "moe-spac:balance=false", "static"):
        answer = ask(client, extra_body={"policy": policy})
        assert (answer.choices[0].message.content, answer.experts["policy"]) == (greedy, policy.split(":")[0])
    assert ask(client).experts["policy"] == "ar-lru"


def test_a_failing_policy_fails_its_request_only(client, greedy):
    with pytest.raises(openai.InternalServerError, match=r"policy failing, step .*no idea"):
        ask(client, extra_body={"policy": "failing"})
    with pytest.raises(openai.APIError, match="no idea"):
        list(ask(client, extra_body={"policy": "failing"}, stream=True))
    assert ask(client).choices[0].message.content == greedy


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"n": 2}, "n", "only 1"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"top_k": 3}, "top_k", "unknown"),
        ({"stream_options": {"more": 1}}, "stream_options", "stream_options.more: unknown"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": 1e-9}, "temperature", "at least 0.001"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": LONG + 1}, "max_tokens", f"more than this server's {LONG}"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content: missing"),
        ({"messages": said("\ud800")}, "messages", "surrogate"),
        ({"messages": said("")}, "messages", "no tokens"),
        ({"messages": said("a b" * 6500), "max_tokens": 5}, "messages", "context holds 16384"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "messages.0.content.0.type"),
        ({"policy": "ar-lur"}, "policy", "did you mean ar-lru"),
        ({"policy": "min"}, "policy", "future"),
        ({"policy": "moe-infinity:capacity=1000000000000"}, "policy", "capacity=1000000000000: a request may give"),
        ({"policy": "moe-spac-release:k=1_0e5"}, "policy", "numbers up to 10000"),
        ({"policy": "promoe:recall=nan"}, "policy", "numbers up to 10000"),
        ({"policy": "moe-infinity:capacity=1e3"}, "policy", "must be a whole number"),
        ({"model": "gpt-4"}, "model", "no model 'gpt-4'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(url, body, param, words):
    given = {"messages": said(PROMPT), "max_tokens": 3} | body
    answer = httpx.post(f"{url}/v1/chat/completions", content=json.dumps(given), headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[1]", JSON, 400),
        (b"\xff\xfe", JSON, 400),
        (b"[" * 9000, JSON, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b" " * 20_001, JSON, 413),
        (iter([b" " * 8000] * 3), JSON, 413),  # in chunks, without a length
    ],
)
def test_malformed_and_oversized_bodies(url, content, headers, status):
    answer = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "head",
    [b"Content-Length: -5", b"Content-Length: x", b"Content-Length: 5\r\nContent-Length: 7", b"Transfer-Encoding: x"],
)
def test_malformed_heads(url, head):
    assert by_hand(url, head + b"\r\n\r\n{}").startswith(b"HTTP/1.1 400 ")


def test_a_body_that_does_not_come_is_not_waited_for(worker, caplog):
    with server(worker, Rules("tiny", body_seconds=0.2)) as url:
        said = by_hand(url, b'Content-Length: 50\r\n\r\n{"prompt"')
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"did not come within 0.2 s" in said
        by_hand(url, b'Content-Length: 50\r\n\r\n{"prompt"', read=False)
        assert httpx.get(f"{url}/health").status_code == 200
    assert caplog.records == []


def test_no_connection_is_held_open_for_a_request_that_does_not_come(worker, caplog):
    with server(worker, Rules("tiny", head_seconds=1.0, new_tokens=LONG)) as url, ExitStack() as stack:
        silent, half, dripping, refused, slow = (stack.enter_context(connected(url)) for _ in range(5))
        half.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Mo")
        refused.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        assert refused.recv(4096).startswith(b"HTTP/1.1 404 ")
        refused.sendall(b"{")  # the rest of a body that nobody wants
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        slow.sendall(head + str(len(body)).encode() + b"\r\n\r\n")  # of its body, for which there is another limit
        sent = 0
        with suppress(ConnectionError):
            while not select([dripping], [], [], 0.05)[0]:
                sent += dripping.send(b"x")
        assert sent < 300  # bytes that come do not start the time anew
        assert b"head did not come within 1 s" in rest_of(half)
        assert (rest_of(silent), rest_of(refused).count(b"HTTP/1.1 ")) == (b"", 0)
        slow.sendall(body)
        assert slow.recv(4096).startswith(b"HTTP/1.1 200 ")
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # the connection is still good
        assert b"HTTP/1.1 200 " in rest_of(slow)
    assert caplog.records == []


def test_no_more_connections_are_held_than_some(worker):
    with server(worker, Rules("tiny", connections=2)) as url:
        with connected(url) as one, connected(url) as other, connected(url) as third:
            said = rest_of(third)
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"there are 2 connections already" in said
            for sock in (one, other):
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert b"HTTP/1.1 200 " in rest_of(sock)
        assert httpx.get(f"{url}/health").status_code == 200


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30)


def rest_of(sock: socket.socket) -> bytes:
    """What is said until the other end hangs up."""
    said = b""
    while part := sock.recv(4096):
        said += part
    return said


def by_hand(url: str, rest: bytes, read: bool = True) -> bytes:
    """What the server says to a request that no client would send, until it hangs up."""
    with connected(url) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + rest)
        return rest_of(sock) if read else b""


def test_unknown_paths_have_the_same_shape_of_error(url):
    for answer, status in ((httpx.get(f"{url}/v1/files"), 404), (httpx.get(f"{url}/v1/completions"), 405)):
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_a_key_is_asked_for_where_there_is_one(worker):
    with server(worker, Rules("tiny", key="secret")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
        for key, right in (("wrong", False), ("secret", True)):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                if right:
                    assert ask(client, max_tokens=1).usage.completion_tokens == 1
                else:
                    with pytest.raises(openai.AuthenticationError, match="API key"):
                        ask(client)
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client, pytest.raises(
            openai.BadRequestError, match="does not let requests choose"
        ):  # fmt: skip
            ask(client, extra_body={"policy": "ar-lru"})


def gauges(url: str) -> dict[str, float]:
    """The metrics page, by the grammar of its format."""
    sample = r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_]\w*="(\\.|[^"\\])*",?)*\})? -?[0-9][0-9.e+-]*'
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for line in answer.text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP \w+ .+|TYPE \w+ (counter|gauge))", line), line
        else:
            assert re.fullmatch(sample, line), line
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_metrics_count_what_was_answered(url, client):
    before = gauges(url)
    answer = ask(client)
    after = gauges(url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['spac_requests_total{outcome="answered"}'] == 1
    assert grown['spac_tokens_total{kind="prompt"}'] == answer.usage.prompt_tokens
    assert grown['spac_tokens_total{kind="generated"}'] == 12
    hits, needed = (grown[f'spac_{n}_total{{policy="ar-lru"}}'] for n in ("expert_hits", "experts_needed"))
    assert hits / needed == pytest.approx(answer.experts["hit_rate"])
    assert grown['spac_copied_bytes_total{policy="ar-lru"}'] >= answer.experts["copied_bytes"]
    assert (after["spac_up"], after["spac_requests_waiting"], after["spac_queue_places"]) == (1, 0, PLACES)


def test_the_queue_is_bounded_and_clients_that_hang_up_leave_it(url, client, greedy):
    """One is answered, two wait, the next is refused; the first hangs up, and the others get their answers."""
    abandoned = 'spac_requests_total{outcome="abandoned"}'
    before = gauges(url).get(abandoned, 0)
    long = ask(client, max_tokens=LONG, stream=True, extra_body={"policy": "static"})
    next(iter(long))
    wait_for(lambda: gauges(url)["spac_requests_running"] == 1)
    answers: list[Any] = []
    waiting = [threading.Thread(target=lambda: answers.append(ask(client))) for _ in range(PLACES - 1)]
    for thread in waiting:
        thread.start()
    impatient = ask(client, max_tokens=LONG, stream=True)  # its headers come at once, its text would come later
    wait_for(lambda: gauges(url)["spac_requests_waiting"] == PLACES)
    with pytest.raises(openai.RateLimitError, match="2 places in the queue are taken") as refused:
        ask(client)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    impatient.close()
    wait_for(lambda: gauges(url)["spac_requests_waiting"] == PLACES - 1)
    long.close()
    for thread in waiting:
        thread.join(30)
    assert [a.choices[0].message.content for a in answers] == [greedy] * (PLACES - 1)
    wait_for(lambda: gauges(url).get(abandoned, 0) == before + 2)


def test_a_client_that_waits_for_a_whole_answer_and_hangs_up_ends_it(url, client):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": LONG}, timeout=0.5)
    wait_for(lambda: gauges(url)["spac_requests_running"] == 0)


def test_loading_is_told_and_nothing_is_answered_before(load_live, live_machine):
    going_on = threading.Event()

    def open_session(tell: Any) -> Session:
        tell("reading weights", 25, 100)
        assert going_on.wait(30)
        return Session(load_live("none"), load_policy("ar-lru"), Settings(live_machine, 10))

    worker = Worker(open_session, "ar-lru", load_policy, 1)
    with server(worker, Rules()) as url:
        worker.start()
        wait_for(lambda: httpx.get(f"{url}/health").json().get("of") == 100)
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert health.json() | {"of": 0} == {
            "status": "loading", "doing": "reading weights", "done": 25, "of": 0, "progress": 0.25,
        }  # fmt: skip
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "loading" in refused.json()["error"]["message"]
        going_on.set()
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
    assert worker.close(10)


def test_a_load_that_fails_is_told():
    told = threading.Event()

    def open_session(tell: Any) -> Session:
        raise InputError("--target x: no such model")

    worker = Worker(open_session, "ar-lru", load_policy, 1, told.set)
    worker.start()
    assert told.wait(10)
    assert isinstance(worker.error, InputError)
    assert worker.close(10)


def test_ending_answers_those_who_wait(load_live, live_machine):
    worker = Worker(
        lambda tell: Session(load_live("none"), load_policy("ar-lru"), Settings(live_machine, 10)), "ar-lru",
        load_policy, 2,
    )  # fmt: skip
    with server(worker, Rules("tiny", new_tokens=LONG)) as url:
        worker.start()
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        found: list[int] = []

        def post() -> None:
            body = {"prompt": PROMPT, "max_tokens": LONG}
            found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code)

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: gauges(url)["spac_requests_waiting"] == 1)
        assert worker.close(10)
        for thread in threads:
            thread.join(30)
    assert found == [503, 503]

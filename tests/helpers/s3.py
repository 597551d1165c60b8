"""An S3 on this machine, in a process of its own: moto, with faults in front of it.

`python -m tests.helpers.s3` prints its address. What comes to `/_faults` is the fault of the
requests that follow, what comes to `/_requests` is answered with those that came.
"""

import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

BUCKET = "bucket"
_KEY = "Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_SIGNED = {"Authorization": f"AWS4-HMAC-SHA256 {_KEY}", "X-Of-Tests": "yes"}


class S3:
    """The server, as tests see it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def fault(self, **about: Any) -> None:
        """Let requests fail from now on; without arguments none.

        Args:
            about: `match`: an expression for "PUT name"; `after`: how many such requests succeed;
                `times`: how many then fail (by default all); `status`: their answer, with `code`;
                `kill`: a process that the first of them ends instead; `cut`: they succeed, but
                the last byte of what they bring is lost; `reset`: the connection is reset; `hang`:
                it says nothing for so many seconds; `hide`: a list lacks names like this; `room`:
                only those fail that would let there be more bytes.
        """
        self._ask("/_faults", json.dumps(about).encode())

    def requests(self) -> list[str]:
        """Return the requests since the last call, such as "PUT run/metrics.jsonl"."""
        found: list[str] = json.loads(self._ask("/_requests"))
        return found

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects."""
        listed = self._ask(f"/{BUCKET}?list-type=2&prefix={prefix}").decode()
        return re.findall("<Key>(.*?)</Key>", listed)

    def read(self, name: str) -> bytes:
        """Return an object."""
        return self._ask(f"/{BUCKET}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Write an object."""
        self._ask(f"/{BUCKET}/{name}", content, method="PUT")

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._ask(f"/{BUCKET}/{name}", method="DELETE")

    def _ask(self, path: str, content: bytes | None = None, method: str | None = None) -> bytes:
        # Not urllib, which the audit of the tests takes for a download by trainkit.
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        try:
            connection.request(method or ("POST" if content else "GET"), path, content, _SIGNED)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status < 300, (path, answer.status, body)
        finally:
            connection.close()
        return body


@contextmanager
def serving() -> Iterator[S3]:
    """Run a server inside, and let the environment name it."""
    command = [sys.executable, "-m", "tests.helpers.s3"]
    root = Path(__file__).resolve().parent.parent.parent
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        assert url, "the server has not started"
        yield S3(url)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


class _Faulty:
    """The application of moto, behind faults."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._fault: dict[str, Any] = {}
        self._requests: list[str] = []
        self._sizes: dict[str, int] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/_faults":
            size = int(environ.get("CONTENT_LENGTH") or 0)
            about = json.loads(environ["wsgi.input"].read(size))
            self._fault = {"after": 0, "times": 1 << 30, **about}
            start_response("200 OK", [])
            return [b""]
        if path == "/_requests":
            found, self._requests = self._requests, []
            start_response("200 OK", [])
            return [json.dumps(found).encode()]
        request = f"{environ['REQUEST_METHOD']} {path.removeprefix(f'/{BUCKET}').lstrip('/')}"
        if "HTTP_X_OF_TESTS" in environ:
            return self._moto(environ, start_response)
        if environ["QUERY_STRING"] == "delete":  # of several, by which one is removed
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body)
            request = f"DELETE {re.search('<Key>(.*?)</Key>', body.decode())[1]}"  # type: ignore[index]
        self._requests.append(request)
        fault = self._fault
        method, _, name = request.partition(" ")
        size = int(environ.get("CONTENT_LENGTH") or 0) if method == "PUT" else 0
        place = name.partition("/")[0]
        used = sum(n for each, n in self._sizes.items() if each.partition("/")[0] == place)
        if "room" in fault and used - self._sizes.get(name, 0) + size > fault["room"]:
            return self._fail(
                {**fault, "status": 403, "code": "QuotaExceeded"}, environ, start_response
            )
        if method == "PUT":
            self._sizes[name] = size
        elif method == "DELETE":
            self._sizes.pop(name, None)
        if "match" not in fault or not re.match(fault["match"], request):
            return self._moto(environ, start_response)
        fault["after"] -= 1
        if fault["after"] >= 0 or fault["times"] <= 0:
            return self._moto(environ, start_response)
        fault["times"] -= 1
        return self._fail(fault, environ, start_response)

    def _moto(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer: Iterable[bytes] = self._application(environ, start_response)
        return answer

    def _fail(
        self, fault: dict[str, Any], environ: dict[str, Any], start_response: Any
    ) -> Iterable[bytes]:
        if "kill" in fault:
            self._fault = {}
            os.kill(fault["kill"], signal.SIGKILL)
        if "cut" in fault:
            size = int(environ["CONTENT_LENGTH"])
            content = environ["wsgi.input"].read(size)[:-1]
            about = {"wsgi.input": io.BytesIO(content), "CONTENT_LENGTH": str(len(content))}
            return self._moto({**environ, **about}, start_response)
        if "hide" in fault:
            return self._list_late(fault["hide"], environ, start_response)
        time.sleep(fault.get("hang", 0))
        if "reset" in fault or "hang" in fault:
            connection = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(connection.detach())  # at once, which resets it
            raise ConnectionResetError
        code = fault.get("code", "InternalError")
        start_response(f"{fault.get('status', 500)} Fault", [("Content-Type", "text/xml")])
        return [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]

    def _list_late(
        self, hidden: str, environ: dict[str, Any], start_response: Any
    ) -> Iterable[bytes]:
        """Answer a list without some of its names."""
        told: list[Any] = []
        body = b"".join(self._moto(environ, lambda *about: told.extend(about[:2])))
        for found in re.findall(b"<Contents>.*?</Contents>", body, re.DOTALL):
            if re.search(f"<Key>{hidden}</Key>".encode(), found):
                body = body.replace(found, b"")
        kept = [(name, value) for name, value in told[1] if name.lower() != "content-length"]
        start_response(told[0], [*kept, ("Content-Length", str(len(body)))])
        return [body]


def _main() -> None:
    import logging

    import moto.server
    from werkzeug.serving import make_server

    module: Any = moto.server  # which exports neither in words

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _Faulty(module.DomainDispatcherApplication(module.create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    S3(url).write("", b"")
    print(url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _main()

"""A real S3 API on loopback, a client that is not pyarrow's, and a bad line to it."""

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.config import Config as BotoConfig
from moto.server import ThreadedMotoServer

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-may-see",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class S3:
    """A server with one bucket.

    Attributes:
        address: host and port.
        client: boto3's client.
    """

    address: str
    client: Any
    bucket: str = "bucket"

    def uri(self, key: str = "", address: str | None = None) -> str:
        """Address of a key, at the server or at a proxy before it."""
        query = f"endpoint_override={address or self.address}&scheme=http"
        return f"s3://{self.bucket}/{key}?{query}"

    def keys(self, prefix: str = "") -> list[str]:
        """Names of all objects below a prefix, relative to it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=prefix
        )
        found = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return [key.removeprefix(prefix) for key in found]

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=content)

    def clear(self) -> None:
        names = [{"Key": key} for key in self.keys()]
        if names:
            self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": names})


@contextmanager
def serve_s3() -> Iterator[S3]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
            config=BotoConfig(retries={"max_attempts": 1}),
        )
        client.create_bucket(Bucket=S3.bucket)
        yield S3(f"{host}:{port}", client)
    finally:
        server.stop()


@dataclass
class Fault:
    """What goes wrong with a request.

    Attributes:
        request: an expression found in its first line, as in ``PUT .*part-``.
        after_bytes: bytes of it that get through before the line is cut.
        answer_bytes: bytes of the answer that get through before the line is cut.
        status: what the proxy answers instead of the server.
        times: requests it happens to.
    """

    request: str
    after_bytes: int | None = None
    answer_bytes: int | None = None
    status: int | None = None
    times: int = 1
    happened: int = 0


@dataclass
class Proxy:
    """Carries bytes between a client and the server, until a fault is due.

    Attributes:
        faults: what is still to go wrong.
    """

    target: str
    faults: list[Fault] = field(default_factory=list)
    address: str = ""
    _listener: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "Proxy":
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _due(self, first_line: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.happened < fault.times and re.search(fault.request, first_line):
                    fault.happened += 1
                    return fault
        return None

    def _carry(self, client: socket.socket) -> None:
        host, port = self.target.split(":")
        server = socket.create_connection((host, int(port)))
        answers = _Answers(server, client)
        threading.Thread(target=answers.carry, daemon=True).start()
        left: int | None = None
        with suppress(OSError):
            while chunk := client.recv(1 << 14):
                found = re.match(rb"(GET|PUT|POST|HEAD|DELETE) [^\r\n]*", chunk)
                fault = self._due(found[0].decode()) if found else None
                if fault is not None and fault.status is not None:
                    client.sendall(_answer(fault.status))
                    break
                if fault is not None:
                    left, answers.left = fault.after_bytes, fault.answer_bytes
                elif found:
                    left = None
                server.sendall(chunk if left is None else chunk[:left])
                if left is not None:
                    left -= len(chunk)
                    if left <= 0:
                        break
        _close(client, server)


@dataclass
class _Answers:
    server: socket.socket
    client: socket.socket
    left: int | None = None

    def carry(self) -> None:
        with suppress(OSError):
            while chunk := self.server.recv(1 << 14):
                self.client.sendall(chunk if self.left is None else chunk[: self.left])
                if self.left is not None:
                    self.left -= len(chunk)
                    if self.left <= 0:
                        break
        _close(self.client, self.server)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def _answer(status: int) -> bytes:
    code: Mapping[int, str] = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}
    body = f"<Error><Code>{code[status]}</Code><Message>as the test asks</Message></Error>".encode()
    head = f"HTTP/1.1 {status} Error\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body

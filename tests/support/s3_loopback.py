"""A real S3 API on loopback, a client that is not pyarrow's, and a bad line to it.

S3 obeys a request only when all of it came ("Amazon S3 never adds partial objects"). What moto
makes of a request whose line was cut is not said anywhere. So the line hands a request to the
server whole or not at all.
"""

import io
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Self

import boto3
from botocore.config import Config as BotoConfig
from moto import backends
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

    def beside(self, bucket: str) -> "S3":
        """Return the same server with another bucket, which is made."""
        self.client.create_bucket(Bucket=bucket)
        return S3(self.address, self.client, bucket)

    def clear(self) -> None:
        names = [{"Key": key} for key in self.keys()]
        if names:
            self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": names})


@contextmanager
def serve_s3() -> Iterator[S3]:
    # It reads the folder of its services again for every request: a third of its work.
    services = list(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: services
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    # A line for each of some thousand requests.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
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
        after_bytes: bytes of it that get through before the line is cut; where it has fewer,
            all of it arrives, and its answer does not.
        answer_bytes: bytes of the answer that get through before the line is cut.
        status: what the proxy answers instead of the server.
        skip: requests of this kind that pass first.
        times: requests it happens to.
        happened: requests it has happened to.
        then: called before the line is cut, while the client waits.
    """

    request: str
    after_bytes: int | None = None
    answer_bytes: int | None = None
    status: int | None = None
    skip: int = 0
    times: int = 1
    happened: int = 0
    then: Callable[[], object] | None = None


@dataclass
class Proxy:
    """Carries requests between clients and the server, until a fault is due.

    Attributes:
        faults: what is still to go wrong.
        seen: first lines of all requests.
        keeps_checksums: whether the storage behind it takes the checksums that a client
            appends to an upload, and their framing, for content, as s3rver 3.7.1 does.
    """

    target: str
    faults: list[Fault] = field(default_factory=list)
    address: str = ""
    seen: list[str] = field(default_factory=list)
    keeps_checksums: bool = False
    _listener: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
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
            self.seen.append(first_line)
            for fault in self.faults:
                if fault.happened == fault.times or not re.search(fault.request, first_line):
                    continue
                if not fault.skip:
                    fault.happened += 1
                    return fault
                fault.skip -= 1
        return None

    def _carry(self, client: socket.socket) -> None:
        host, port = self.target.split(":")
        server = socket.create_connection((host, int(port)))
        answers = _Answers(server, client)
        threading.Thread(target=answers.carry, daemon=True).start()
        with suppress(OSError), client.makefile("rb") as requests:
            while head := _head(requests):
                fault = self._due(head.partition(b"\r\n")[0].decode())
                if not self._carry_one(head, requests, fault, answers):
                    break
        _close(client, server)

    def _carry_one(
        self, head: bytes, requests: BinaryIO, fault: Fault | None, answers: "_Answers"
    ) -> bool:
        """Carry a request; whether the line is to stand after it."""
        if re.search(rb"(?i)\r\nexpect: *100-continue", head):
            head = re.sub(rb"(?i)\r\nexpect: *100-continue", b"", head)
            answers.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        most = None
        if fault is not None and fault.after_bytes is not None:
            most = max(0, fault.after_bytes - len(head))
        body = _body(head, requests, most)
        is_whole = body is not None
        if fault is not None and fault.status is not None:
            answers.client.sendall(_answer(fault.status))
            return False
        if fault is not None:
            answers.left = 0 if fault.after_bytes is not None else fault.answer_bytes
        if body is not None:
            if self.keeps_checksums:
                head, body = _without_signs_of_checksums(head, body)
            answers.server.sendall(head + body)
        if fault is not None and fault.then is not None:
            fault.then()
        return is_whole


@dataclass
class _Answers:
    server: socket.socket
    client: socket.socket
    left: int | None = None

    def carry(self) -> None:
        with suppress(OSError):
            while chunk := self.server.recv(1 << 16):
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


def _head(requests: BinaryIO) -> bytes:
    """Read the lines of a request before its body; nothing where the line has ended."""
    lines = io.BytesIO()
    for line in iter(requests.readline, b""):
        lines.write(line)
        if line == b"\r\n":
            return lines.getvalue()
    return b""


def _body(head: bytes, requests: BinaryIO, most: int | None) -> bytes | None:
    """Read a request's body; None if it does not come whole within ``most`` bytes."""
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    content = io.BytesIO()

    def read(count: int) -> bool:
        if most is not None and content.tell() + count > most:
            requests.read(max(0, most - content.tell()))
            return False
        return content.write(requests.read(count)) == count

    if found:
        return content.getvalue() if read(int(found[1])) else None
    if not re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        return b""
    while line := requests.readline():
        content.write(line)
        size = int(line, 16)
        if not read(size + 2):
            return None
        if size == 0:
            return content.getvalue()
    return None


def _without_signs_of_checksums(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Make an upload with appended checksums one whose content is all that was sent."""
    if not re.search(rb"(?i)\r\ncontent-encoding: *aws-chunked", head):
        return head, body
    content, chunks = b"", io.BytesIO(body)
    while size := int(chunks.readline(), 16):
        content += chunks.read(size + 2)[:-2]
    signs = rb"content-encoding|transfer-encoding|x-amz-(?:content|decoded|trailer)[a-z0-9-]*"
    head = re.sub(rb"(?i)\r\n(?:%s):.*?(?=\r\n)" % signs, b"", head)
    return head[:-2] + b"Content-Length: %d\r\n\r\n" % len(content), content


def _answer(status: int) -> bytes:
    code: Mapping[int, str] = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}
    body = f"<Error><Code>{code[status]}</Code><Message>as the test asks</Message></Error>".encode()
    head = f"HTTP/1.1 {status} Error\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body

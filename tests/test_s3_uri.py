"""What an ``s3://`` address may say, and that it holds no secret."""

import pytest

from batchgen.errors import UsageError
from batchgen.s3_uri import S3Uri


@pytest.mark.parametrize(
    ("text", "bucket", "key", "options"),
    [
        ("s3://bucket/a/b.parquet", "bucket", "a/b.parquet", {}),
        ("s3://bucket", "bucket", "", {}),
        ("s3://bucket/", "bucket", "", {}),
        ("s3://bucket/a/", "bucket", "a", {}),
        ("s3://my.bucket-1/a?region=eu-west-1", "my.bucket-1", "a", {"region": "eu-west-1"}),
        (
            "s3://b-1/a?endpoint_override=localhost:9000&scheme=http",
            "b-1",
            "a",
            {"endpoint_override": "localhost:9000", "scheme": "http"},
        ),
        (
            "s3://bkt/a?endpoint_override=http%3A%2F%2Fhost%3A9000",
            "bkt",
            "a",
            {"endpoint_override": "http://host:9000"},
        ),
        ("s3://bkt/part-?.parquet", "bkt", "part-?.parquet", {}),
        (
            "s3://bkt/year=?/x-?.parquet?scheme=http",
            "bkt",
            "year=?/x-?.parquet",
            {"scheme": "http"},
        ),
        ("s3://bkt/m-?/year=1/*.parquet", "bkt", "m-?/year=1/*.parquet", {}),
        ("s3://bkt/user@host/x", "bkt", "user@host/x", {}),
    ],
)
def test_an_address_is_read_and_given_back(
    text: str, bucket: str, key: str, options: dict[str, str]
) -> None:
    uri = S3Uri.parse("input.path", text)
    assert (uri.bucket, uri.key, dict(uri.options)) == (bucket, key, options)
    assert S3Uri.parse("input.path", str(uri)) == uri


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAX:hunter2@bucket/a",
        "s3://AKIAX:hun/ter2@bucket/a",
        "s3://bucket/a?access_key=AKIAX&secret_key=hunter2",
        "s3://bucket/a?scheme=http&X-Amz-Signature=hunter2",
        "s3://bucket/a?endpoint_override=AKIAX:hunter2@host",
        "s3://bucket/a?endpoint_override=http://host/hunter2",
    ],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(UsageError, match=r"input.path: .*AWS_PROFILE") as caught:
        S3Uri.parse("input.path", text)
    assert "AKIAX" not in str(caught.value)
    assert "hun" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://", "no bucket's name"),
        ("s3:///a", "no bucket's name"),
        ("s3://bucket//a", "step"),
        ("s3://bucket/a/../b", "step"),
        ("s3://bucket/a?scheme=ftp", "http or https"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        S3Uri.parse("input.path", text)

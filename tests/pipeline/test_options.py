"""Where the values of flags come from, and which flags contradict each other."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from api.settings import ApiSettings
from pipeline.commands.api import api
from pipeline.commands.fleet import fleet
from pipeline.commands.run_batch import run_batch
from pipeline.commands.serve import serve
from pipeline.commands.worker import worker
from pipeline.options import (
    Size,
    api_arguments,
    check_model_flags,
    common_options,
    log_settings,
    model_arguments,
    model_options,
    redis_option,
)
from pipeline.options import values_of as settings_values


@click.command()
@model_options
@redis_option
@common_options
@click.pass_context
def shown(ctx: click.Context, /, **values: object) -> None:
    check_model_flags(ctx)
    click.echo(json.dumps(values))


def values_of(*arguments: str, **environment: str) -> dict[str, object]:
    result = CliRunner().invoke(shown, arguments, env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.fixture(params=["toml", "yaml"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"config.{request.param}"
    assign = " = " if request.param == "toml" else ": "
    path.write_text(
        f"max-num-seqs{assign}3\nmax_model_len{assign}100\nserved-model-name{assign}['a',"
        f" 'b']\ndtype{assign}'float16'\n"
    )
    return path


def test_flag_wins_over_environment_over_config_over_default(config: Path) -> None:
    values = values_of(
        "--config", str(config), "--max-num-seqs", "9", PIPELINE_MAX_NUM_SEQS="5", PIPELINE_MAX_MODEL_LEN="200"
    )
    assert values["max_num_seqs"] == 9
    assert values["max_model_len"] == 200
    assert values["served_model_name"] == ["a", "b"]
    assert values["dtype"] == "float16"
    assert values["gpu_memory_utilization"] == 0.9


def test_the_config_file_may_be_named_by_the_environment(config: Path) -> None:
    assert values_of(PIPELINE_CONFIG=str(config))["max_num_seqs"] == 3


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.yaml", "no-such-flag: 1", "no flag is called no_such_flag"),
        ("c.yaml", "- 1", "flag names and values"),
        ("c.yaml", "a: [", "is not YAML"),
        ("c.toml", "a = ", "cannot be read as configuration"),
        ("c.toml", "max-num-seqs = 0", "below 1"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    result = CliRunner().invoke(shown, ["--config", str(tmp_path / name)])
    assert result.exit_code == 2
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-num-batched-tokens", "8", "--max-num-seqs", "9"], "is below --max-num-seqs"),
        (["--kv-cache-memory-bytes", "1G", "--gpu-memory-utilization", "0.5"], "both size the KV cache"),
        (["--gpu-memory-utilization", "1.5"], "1.5"),
        (["--dtype", "int8"], "int8"),
        (["--redis-url", "localhost:6379"], "it must look like redis://host:6379/0"),
        (["--redis-url", "redis://host:port"], "it must look like redis://host:6379/0"),
    ],
)
def test_contradictions_and_values_out_of_range_are_refused(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(shown, arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_an_empty_flag_takes_back_what_a_config_file_says(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("ssl-certfile: /certificate.pem\nssl-keyfile: /key.pem\n")
    flags = ("--config", str(tmp_path / "config.yaml"), "--ssl-certfile", "", "--ssl-keyfile", "")
    with api.make_context("api", [*flags, "--redis-url", "redis://host"]) as ctx:
        given = ApiSettings.from_environment(**settings_values(ApiSettings, ctx.params))
    assert (given.ssl_certfile, given.ssl_keyfile) == (None, None)


def test_an_empty_redis_url_is_none() -> None:
    assert values_of(REDIS_URL="")["redis_url"] is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:1/0", "redis://:a%2Fb%40c@host:1/0"),
        ("redis://user@host", "redis://user:a%2Fb%40c@host"),
        ("unix:///a/redis.sock?db=1", "unix://:a%2Fb%40c@/a/redis.sock?db=1"),
        ("redis://:own@host:1/0", "redis://:own@host:1/0"),
        ("redis+sentinel://host:1,host:2/queue", "redis+sentinel://:a%2Fb%40c@host:1,host:2/queue"),
    ],
)
def test_the_password_of_redis_may_be_in_a_file(tmp_path: Path, url: str, expected: str) -> None:
    (tmp_path / "password").write_text("a/b@c\n")
    (tmp_path / "config.yaml").write_text(f"redis-password-file: {tmp_path}/password\n")
    file = str(tmp_path / "password")
    assert values_of("--redis-url", url, REDIS_PASSWORD_FILE=file)["redis_url"] == expected
    assert values_of("--redis-password-file", file, REDIS_URL=url)["redis_url"] == expected
    assert values_of("--redis-url", url, "--config", str(tmp_path / "config.yaml"))["redis_url"] == expected
    assert values_of("--redis-password-file", file)["redis_url"] is None


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b" \n", "it is empty"), (b"\xff", "it is not text")]
)
def test_a_password_file_that_holds_none_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "password").write_bytes(content)
    result = CliRunner().invoke(
        shown, ["--redis-url", "redis://host", "--redis-password-file", str(tmp_path / "password")]
    )
    assert result.exit_code == 2
    assert f"cannot be read from {tmp_path}/password: {reason}" in result.stderr


def test_sizes_have_units() -> None:
    sizes = {text: Size().convert(text, None, None) for text in ("7", "4k", "4K", "1.5G")}
    assert sizes == {"7": 7, "4k": 4000, "4K": 4096, "1.5G": 3 * 2**29}


def test_model_flags_reach_a_child_unchanged() -> None:
    flags = ["--served-model-name", "x", "--served-model-name", "y", "--no-enable-prefix-caching", "--block-size", "8"]
    flags += [
        "--device",
        "cuda:1",
        "--device-lock-folder",
        "/locks",
        "--enforce-eager",
        "--nvtx",
        "--profile",
        "traces",
        "--chat-template",
        "short",
    ]
    before = values_of(*flags)
    assert (before["chat_template"], before["device_lock_folder"]) == ("short", "/locks")
    assert values_of(*model_arguments(before)) == before
    assert values_of(*model_arguments(values_of("--kv-cache-memory-bytes", "1M")))["kv_cache_memory_bytes"] == 2**20


def test_a_default_of_zero_is_one() -> None:
    assert values_of()["retry_on_invalid"] == 0


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "tpu", ""])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    result = CliRunner().invoke(shown, ["--device", device])
    assert result.exit_code == 2
    assert "is none of auto, cpu, cuda and cuda:N" in result.output


def test_settings_that_differ_are_logged_without_passwords(caplog: pytest.LogCaptureFixture) -> None:
    @click.command()
    @model_options
    @redis_option
    @click.pass_context
    def logged(ctx: click.Context, /, **values: object) -> None:
        log_settings(ctx)

    with caplog.at_level("INFO"):
        arguments = ["--max-num-seqs", "7", "--redis-url", "redis://user:secret@host:1/0", "--dtype", "auto"]
        CliRunner().invoke(logged, arguments, env={"PIPELINE_BLOCK_SIZE": "8"}, catch_exceptions=False)
    assert "max_num_seqs=7 (flag)" in caplog.text
    assert "block_size=8 (environment)" in caplog.text
    assert "redis_url=redis://***@host:1/0" in caplog.text
    assert "secret" not in caplog.text
    assert "dtype" not in caplog.text


@pytest.mark.parametrize("name", ["--model", "--model-flags"])
def test_commands_that_serve_several_models_take_them_alike(name: str) -> None:
    first, second = (param for command in (serve, fleet) for param in command.params if name in param.opts)
    assert first.to_info_dict() == second.to_info_dict()


@pytest.mark.parametrize(("command", "has_it"), [(run_batch, True), (worker, False), (serve, False)])
def test_a_seed_is_a_flag_only_where_there_are_lines_without_one(command: click.Command, has_it: bool) -> None:
    """A live call that names none gets one of its own when it is submitted."""
    assert any(param.name == "seed" for param in command.params) == has_it


@pytest.mark.parametrize(
    "given",
    [
        "",
        "--insecure --port 0 --completion-window 10s --completion-window 24h --max-batch-lines 2 --max-file-bytes 1K"
        ' --allowed-origins ["https://a.example","https://b.example"] --allowed-methods GET --allowed-methods POST'
        " --uds /run/api.sock --timeout-head 2.5 --middleware a.B --middleware c.D --disable-uvicorn-access-log",
    ],
)
def test_the_api_of_a_server_gets_the_same_flags(given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meant = serve.make_context("serve", [*given.split(), "--file-store", str(tmp_path)]).params
    monkeypatch.setenv("PIPELINE_COMPLETION_WINDOWS", "1h 2h")  # as the child inherits it
    queue = ["--redis-url", "redis://host", "--file-store", meant["file_store"]]
    got = api.make_context("api", [*api_arguments(meant), *queue]).params
    shared = got.keys() & meant.keys() - {"redis_url"}
    assert {"host", "port", "insecure", "max_file_bytes", "file_store"} <= shared
    assert {name: got[name] for name in shared} == {name: meant[name] for name in shared}
    assert got["max_batch_lines"] == (2 if given else 50_000)
    assert got["middleware"] == (("a.B", "c.D") if given else ())
    assert got["completion_window"] == (("10s", "24h") if given else ("24h",))

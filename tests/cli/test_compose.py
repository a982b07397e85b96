import pytest

from batchgen.cli import app
from batchgen.config import Mode
from batchgen.errors import EngineError, ExitCode
from batchgen.keys import declared_keys


def refusal(code: int, capsys) -> str:
    assert code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "HYDRA_FULL_ERROR" not in said
    return said


def test_the_command_line_wins_over_presets_and_presets_over_the_job(command, recorder, jobs):
    assert command("job=reviews", "pool=small", "pool.block_size=8") == 0
    (config,) = recorder.configs
    assert config.job == "reviews"
    assert config.pool.block_size == 8
    assert config.pool.num_blocks == 512
    assert config.sampling.max_tokens == 4
    assert config.sampling.stop == ["\n\n"]


def test_a_jobs_text_keys_hold_what_was_written_and_its_files_lie_beside_it(recorder, caller, jobs):
    assert app.main(["job=reviews", "input.path=in.parquet", "output.dir=out"]) == 0
    (config,) = recorder.configs
    assert config.model.path == "1e5"
    assert config.prompt.answer_column == "no"
    assert config.prompt.template_file == str(jobs / "reviews" / "prompt.j2")
    assert config.input.path == str(caller / "in.parquet")


def test_an_unknown_job_is_refused_with_the_list(command, jobs, capsys):
    said = refusal(command("job=revews"), capsys)
    assert "Did you mean reviews?" in said
    assert "letters, reviews" in said


@pytest.mark.parametrize("written", ["off", "'off'"])
def test_a_choice_that_yaml_takes_for_a_boolean_stays_a_choice(command, recorder, jobs, written):
    text = f"engine: {{shared_prefix_attention: {written}}}\n"
    (jobs / "letters" / "job.yaml").write_text(text)
    assert command("job=letters") == 0
    assert recorder.configs[0].engine.shared_prefix_attention == "off"


def test_a_job_can_be_a_folder_of_ones_own(command, recorder, caller, capsys):
    (caller / "mine" / "tickets").mkdir(parents=True)
    (caller / "mine" / "tickets" / "job.yaml").write_text("pool: {block_size: 64}\n")
    assert command("job=./mine/tickets/") == 0
    assert command(f"job={caller}/mine/tickets") == 0
    assert [config.pool.block_size for config in recorder.configs] == [64, 64]
    assert recorder.configs[0].job == str(caller / "mine" / "tickets")
    assert "job.yaml" in refusal(command("job=./nowhere"), capsys)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("sampling:\n  temprature: 1\n", "line 2: sampling.temprature is not a key. Did you mean"),
        ("sampling:\n  seed: 1\n  seed: 2\n", "sampling.seed is there twice"),
        ("sampling: 3\n", "expected keys"),
        ("job: letters\n", "another job"),
        ("a: [\n", "Cannot read"),
        ("pool: {block_size: many}\n", "pool.block_size must be an integer"),
    ],
)
def test_a_broken_job_file_is_refused_by_name(command, recorder, jobs, capsys, content, says):
    path = jobs / "letters" / "job.yaml"
    path.write_text(content)
    said = refusal(command("job=letters"), capsys)
    assert says in said
    if "pool" not in content:
        assert str(path) in said


def test_a_broken_job_file_harms_no_other_job(command, jobs):
    (jobs / "letters" / "job.yaml").write_text("a: [")
    assert command("job=reviews") == 0


def test_g07_an_unknown_key_in_a_preset_is_refused(command, caller, capsys):
    (caller / "mine" / "pool").mkdir(parents=True)
    (caller / "mine" / "pool" / "odd.yaml").write_text("blok_size: 8\n")
    said = refusal(command("pool=odd", "--config-dir", "mine"), capsys)
    assert "pool.blok_size is not a key. Did you mean pool.block_size?" in said
    assert "pool/odd" in said


def test_an_unknown_preset_is_refused_with_the_list(command, capsys):
    said = refusal(command("sampling=greddy"), capsys)
    assert "Did you mean greedy?" in said
    assert "varied" in said


@pytest.mark.parametrize("value", ["all", "[all]", '["all"]'])
def test_a_word_that_stands_for_a_list_needs_no_brackets(command, recorder, jobs, value):
    (jobs / "letters" / "job.yaml").write_text(f"output: {{carry_columns: {value}}}\n")
    assert command("job=letters") == command(f"output.carry_columns={value}") == 0
    assert [config.output.carry_columns for config in recorder.configs] == [["all"], ["all"]]


def test_a_mapping_of_ids_to_numbers_comes_through(command, recorder, jobs):
    (jobs / "letters" / "job.yaml").write_text("sampling: {logit_bias: {50: -100, 198: 2.5}}\n")
    assert command("job=letters") == command("sampling.logit_bias={50:-100,198: 2.5}") == 0
    assert [config.sampling.logit_bias for config in recorder.configs] == [
        {50: -100.0, 198: 2.5}
    ] * 2


def test_n17_arguments_of_the_chat_template_have_any_name_in_a_job_and_on_the_command_line(
    command, recorder, jobs, capsys
):
    said = "{enable_thinking: false, date_string: 2024-07-26, deep: {budget: 1, stop: [a]}}"
    (jobs / "letters" / "job.yaml").write_text(f"prompt: {{chat_template_kwargs: {said}}}\n")
    assert command("job=letters") == command(f"prompt.chat_template_kwargs={said}") == 0
    one_by_one = [
        "prompt.chat_template_kwargs.enable_thinking=false",
        "prompt.chat_template_kwargs.date_string=2024-07-26",
        "++prompt.chat_template_kwargs.deep={budget: 1, stop: [a]}",
    ]
    assert command(*one_by_one) == 0
    assert command("job=letters", "prompt.chat_template_kwargs.enable_thinking=true") == 0
    given = {
        "enable_thinking": False,
        "date_string": "2024-07-26",
        "deep": {"budget": 1, "stop": ["a"]},
    }
    assert [config.prompt.chat_template_kwargs for config in recorder.configs] == [
        *[given] * 3,
        {**given, "enable_thinking": True},
    ]
    assert "prompt.chat_template_kwarg.x is not a key. Did you mean" in refusal(
        command("prompt.chat_template_kwarg.x=1"), capsys
    )
    said = refusal(command("prompt.chat_template_kwargs={a-b: 1}"), capsys)
    assert "'a-b' cannot be a variable of a template" in said
    for value in ("no", "[a]", "{1: a}", "{a: {1: b}}"):
        said = refusal(command(f"prompt.chat_template_kwargs={value}"), capsys)
        assert "prompt.chat_template_kwargs" in said
        (jobs / "letters" / "job.yaml").write_text(f"prompt: {{chat_template_kwargs: {value}}}\n")
        said = refusal(command("job=letters"), capsys)
        assert "prompt.chat_template_kwargs must be values by name" in said


def test_n17_a_chat_template_is_found_beside_its_job(command, recorder, jobs):
    (jobs / "letters" / "chat.jinja").write_text("{{ messages[0].content }}")
    (jobs / "letters" / "job.yaml").write_text("prompt: {chat_template_file: chat.jinja}\n")
    assert command("job=letters") == 0
    assert recorder.configs[0].prompt.chat_template_file == str(jobs / "letters" / "chat.jinja")
    assert command("prompt.chat_template_file=nowhere.jinja") == 2


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("pool.block_size=many", "pool.block_size must be an integer"),
        ("sampling.stop=end", "sampling.stop must be a list of text"),
        ("mode=train", "mode must be one of run, plan, preview, jobs"),
        ("engine.attention=flash", "engine.attention must be one of auto, torch"),
        ("output.dir=${no.such}", "output.dir"),
        ("+sampling.seed=1", "sampling.seed"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_words(command, capsys, argument, says):
    assert says in refusal(command(argument), capsys)


def test_a_known_key_may_be_forced(command, recorder):
    assert command("++sampling.seed=7") == 0
    assert recorder.configs[0].sampling.seed == 7


def test_a_sweep_runs_every_job_with_its_own_values(command, recorder, jobs):
    sweep = "output.dir=o/${pool.block_size}-${hydra:job.num}"
    assert command("-m", "job=letters,reviews", "pool.block_size=8,16", sweep) == 0
    seen = [(c.job, c.pool.block_size, c.output.dir.rsplit("/", 1)[1]) for c in recorder.configs]
    assert seen == [
        ("letters", 8, "8-0"),
        ("letters", 16, "16-1"),
        ("reviews", 8, "8-2"),
        ("reviews", 16, "16-3"),
    ]


def test_a_sweep_returns_its_worst_code_and_stops_at_an_interruption(command, recorder, composed):
    composed(*({"output.dir": f"out-{number}"} for number in range(3)))
    codes = [ExitCode.TOO_MANY_ROW_ERRORS, EngineError("gone"), ExitCode.DONE]

    def outcome(number):
        if isinstance(codes[number], EngineError):
            raise codes[number]
        return codes[number]

    recorder.outcome = outcome
    assert command() == 4
    assert len(recorder.configs) == 3
    recorder.configs.clear()
    codes[1] = ExitCode.INTERRUPTED
    assert command() == 75
    assert len(recorder.configs) == 2


def test_g06_a_sweep_into_one_output_is_refused_before_the_first_job(
    command, recorder, caller, capsys
):
    said = refusal(command("-m", "sampling.seed=1,2"), capsys)
    assert f"{caller}/out: jobs 0, 1" in said
    assert recorder.configs == []


@pytest.mark.parametrize(("mode", "code"), [(Mode.plan, 2), (Mode.preview, 0)])
def test_g06_only_what_writes_needs_an_output_of_its_own(command, composed, mode, code):
    composed({"mode": mode}, {"mode": mode, "output.dir": "./x/../out"})
    assert command() == code


def test_every_job_of_a_sweep_is_checked_before_the_first_starts(command, recorder, capsys):
    said = refusal(command("-m", "pool.block_size=8,2", "output.dir=o/${pool.block_size}"), capsys)
    assert "Job 1" in said
    assert recorder.configs == []


def test_g03_the_command_line_and_a_file_mean_the_same(command, recorder, caller):
    (caller / "mine" / "tickets").mkdir(parents=True)
    (caller / "mine" / "tickets" / "job.yaml").write_text('sampling:\n  stop: ["\\n\\n"]\n')
    assert command("job=mine/tickets") == 0
    assert command(r'sampling.stop=["\n\n"]') == 0
    assert [config.sampling.stop for config in recorder.configs] == [["\n\n"], ["\n\n"]]


def test_nothing_is_left_in_the_callers_directory(command, caller):
    assert command("-m", "sampling.seed=1,2", "output.dir=o/${sampling.seed}") == 0
    assert [path.name for path in caller.iterdir()] == ["in.parquet"]


def test_job_folders_of_a_config_dir_are_listed_and_run_like_the_shipped_ones(
    command, recorder, caller, jobs, tmp_path, capsys
):
    own = tmp_path / "mine" / "jobs"
    for name, template in (("letters", "a"), ("poems", "b")):
        (own / name).mkdir(parents=True)
        (own / name / "text.j2").write_text(template)
        (own / name / "README.md").write_text(f"# {name}\n\nWrites {name}.\n")
        (own / name / "job.yaml").write_text("prompt: {template_file: text.j2}\n")
    folder = f"--config-dir={tmp_path / 'mine'}"
    assert command("mode=jobs", folder) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"letters  Writes letters.  ({own / 'letters'})",
        f"poems    Writes poems.  ({own / 'poems'})",
        "reviews  Labels reviews of films.",
    ]
    # The user's own folder wins over a shipped one of the same name.
    for name in ("letters", "poems"):
        assert command(f"job={name}", folder) == 0
        assert recorder.configs[-1].prompt.template_file == str(own / name / "text.j2")
        assert recorder.configs[-1].sampling.max_tokens == 256
    assert command("job=poem", folder) == 2
    assert "Did you mean poems?" in capsys.readouterr().err


def test_every_long_text_has_a_key_for_a_file():
    long = {"prompt.template", "prompt.system", "sampling.stop", "sampling.score_choices",
            "structured.choice", "structured.regex", "structured.json"}  # fmt: skip
    assert {f"{name}_file" for name in long} <= set(declared_keys())

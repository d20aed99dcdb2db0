"""Mistakes as users make them: one line that names the setting, the rule, the value, the way out.

The recipe of these tests runs; every case changes one thing in it.
"""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflash_lightning.__main__ import main

Refusal = Callable[..., str]


def changed_key(case: object) -> str:
    """Name a case by what it changes."""
    return next(iter(case)) if isinstance(case, dict) else " "


@pytest.fixture
def recipe(target_folder: Path, store) -> dict:
    return {
        "seed_everything": 0,
        "trainer": {
            "max_epochs": 1,
            "max_steps": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
        },
        "model": {
            "target": {
                "class_path": "dflash_lightning.HFTarget",
                "init_args": {"path": str(target_folder)},
            },
            "drafter": {
                "num_layers": 1,
                "block_size": 4,
                "target_layer_ids": [0, 2],
                "mask_token_id": 3,
            },
        },
        "data": {
            "store": str(store.path),
            "num_workers": 0,
            "batching": {"token_budget": 1024, "max_rows": 4},
        },
    }


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run a command line as the console script does, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> None:
        monkeypatch.setattr("sys.argv", ["dflash-lightning", *map(str, args)])
        main()

    return call


@pytest.fixture
def refused(run, capsys: pytest.CaptureFixture) -> Refusal:
    """Run a command line that must fail; returns the one line that it says."""

    def call(*args: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            run(*args)
        line = stopped.value.code
        said = capsys.readouterr()
        assert isinstance(line, str), f"exit status {line} without a word"
        assert line.startswith(f"dflash-lightning {args[0]}: ")
        assert "\n" not in line
        assert "Traceback" not in said.err + said.out
        assert "usage:" not in said.err + said.out
        return line.removeprefix(f"dflash-lightning {args[0]}: ")

    return call


@pytest.fixture
def fit_refused(refused, recipe: dict, tmp_path: Path) -> Refusal:
    """Change settings of the recipe, by dotted keys, and return the line that fit refuses with."""

    def call(changes: dict[str, object], *args: object) -> str:
        line = refused("fit", "--config", write(tmp_path / "recipe.yaml", recipe, changes), *args)
        left = {p.name for p in tmp_path.iterdir()} - {"recipe.yaml", "other", "mine"}
        assert not left & {"drafter", "checkpoints", "runs"}
        return line

    return call


def write(path: Path, recipe: dict, changes: dict[str, object]) -> Path:
    changed = copy.deepcopy(recipe)
    for key, value in changes.items():
        *parents, name = key.split(".")
        place = changed
        for parent in parents:
            place = place[parent]
        place[name] = value
    path.write_text(yaml.safe_dump(changed))
    return path


def test_the_recipe_itself_runs(run, recipe, tmp_path) -> None:
    run("fit", "--config", write(tmp_path / "recipe.yaml", recipe, {}))
    assert (tmp_path / "drafter" / "config.json").is_file()


def test_a_run_without_a_progress_bar_runs_too(run, recipe, tmp_path, capsys) -> None:
    quiet = {"trainer.enable_progress_bar": False}
    run("fit", "--config", write(tmp_path / "recipe.yaml", recipe, quiet))
    assert "tok/s" not in capsys.readouterr().err


# -- what the parser refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key", "close"),
    [
        ({"data.token_budgt": 1024}, "data.token_budgt", "data.batching.token_budget"),
        ({"data.batching.token_budgt": 9}, "data.batching.token_budgt", "data.batching.token_budg"),
        ({"model.drafter.blocksize": 8}, "model.drafter.blocksize", "model.drafter.block_size"),
        ({"trainer.max_epoch": 2}, "trainer.max_epoch", "trainer.max_epochs"),
        ({"data.lr": 1e-3}, "data.lr", "model.lr"),
        ({"model.token_budget": 9}, "model.token_budget", "data.batching.token_budget"),
        ({"num_layers": 2}, "num_layers", "model.drafter.num_layers"),
    ],
)
def test_a_misspelt_or_misplaced_key_is_refused_with_the_closest_one(
    fit_refused, changes: dict, key: str, close: str
) -> None:
    line = fit_refused(changes)
    assert f"does not accept option '{key}' (did you mean {close}" in line
    assert line.endswith("See dflash-lightning fit --help.")


def test_a_key_like_no_other_is_refused_without_a_guess(fit_refused) -> None:
    assert fit_refused({"model.zebra": 1}) == (
        "Subcommand 'fit' does not accept option 'model.zebra'. See dflash-lightning fit --help."
    )


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.lr": "fast"}, ('"model.lr"', "float", "fast")),
        ({"model.drafter.block_size": 4.5}, ('"model.drafter.block_size"', "int", "4.5")),
        ({"data.num_workers": "two"}, ('"data.num_workers"', "int", "two")),
        (
            {"data.batching.order": "zigzag"},
            ('"data.batching.order"', "bucketed", "sorted", "random", "zigzag"),
        ),
        ({"model.schedule": "step"}, ('"model.schedule"', "cosine", "linear", "step")),
        ({"model.target.init_args.pth": "x"}, ('"model.target"', "'pth' is not accepted")),
    ],
    ids=changed_key,
)
def test_a_value_of_the_wrong_type_is_refused(fit_refused, changes: dict, parts: tuple) -> None:
    line = fit_refused(changes)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("option", "close"),
    [
        ("--trainer.max_ep", "trainer.max_epochs"),
        ("--data.batching.token", "data.batching.token_budget"),
        ("--conf", "config"),
    ],
)
def test_an_abbreviated_option_is_refused(fit_refused, option: str, close: str) -> None:
    line = fit_refused({}, option, 3)
    assert f"unrecognized arguments: {option} 3 (did you mean {close}?). See " in line


def test_an_option_without_its_value_is_refused(fit_refused) -> None:
    assert "argument --model.lr: expected one argument" in fit_refused({}, "--model.lr")


def test_what_is_required_is_named(refused) -> None:
    line = refused("fit")
    assert "required" in line
    assert "model.target" in line
    assert "data.store" in line


def test_a_missing_config_file_is_refused(refused, tmp_path) -> None:
    line = refused("fit", "--config", "nowhere.yaml")
    assert f"\"config\": File does not exist: '{tmp_path / 'nowhere.yaml'}'" in line


def test_a_config_file_that_is_no_yaml_is_refused(refused, tmp_path) -> None:
    (tmp_path / "broken.yaml").write_text("data: [1\nmodel: }")
    assert "Problems parsing config" in refused("fit", "--config", "broken.yaml")


KNOWN = "fit, validate, plan, regenerate, prepare, buckets, diagnose, export, decode"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("fti", "did you mean 'fit'?"),
        ("prepair", "did you mean 'prepare'?"),
        ("xyz", f"there are {KNOWN}."),
    ],
)
def test_an_unknown_command_is_refused_with_the_closest_one(refused, command, hint) -> None:
    assert refused(command, "--config", "x") == f"unknown command '{command}'; {hint}"


def test_what_lightning_refuses_is_one_line_too(fit_refused) -> None:
    line = fit_refused({"trainer.accelerator": "pigeon"})
    assert re.match(r"trainer: .*'pigeon'.* Available names are: .*cpu", line)
    unmeasured = {"checkpoint": {"monitor": "val/beauty"}, "trainer.limit_val_batches": 1.0}
    assert "`ModelCheckpoint(monitor='val/beauty')`" in fit_refused(unmeasured)
    refused_twice = {"trainer.max_epochs": -1, "trainer.max_steps": -1}
    assert fit_refused(refused_twice).startswith("trainer.max_epochs or trainer.max_steps must be")


# -- model and target ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"model.drafter.mask_token_id": 272},
            ("mask_token_id must be a row of the target's embedding (0..271)", "got 272"),
        ),
        (
            {"model.drafter.mask_token_id": 2},
            (
                "mask_token_id must not be the target's eos_token_id",
                "got 2",
                "Take a reserved token",
            ),
        ),
        (
            {"model.drafter.mask_token_id": None},
            ("mask_token_id must be given", "a vocabulary of 272", "Take a reserved token"),
        ),
        (
            {"model.drafter.target_layer_ids": [0, 4]},
            ("target_layer_ids must be distinct", "within 0..3", "4 layers", "got [0, 4]"),
        ),
        (
            {"model.drafter.target_layer_ids": None, "model.drafter.num_layers": 5},
            ("a target of 4 layers is too shallow for 5", "Give target_layer_ids within 0..3"),
        ),
        ({"model.drafter.block_size": 1}, ("block_size must be at least 2", "got 1")),
        ({"model.lr": -1.0}, ("lr must be positive", "got -1.0")),
    ],
    ids=changed_key,
)
def test_a_model_that_does_not_fit_its_target_is_refused(fit_refused, changes, parts) -> None:
    line = fit_refused(changes)
    assert all(part in line for part in parts), line


def test_a_target_that_is_not_there_is_refused(fit_refused) -> None:
    assert fit_refused({"model.target.init_args.path": "/no/model"}) == (
        "target path must be a folder or hub model in Hugging Face format (config.json, weights, "
        "tokenizer), or 'smollm2'; could not read '/no/model'."
    )


def test_a_target_without_weights_is_refused(fit_refused, target_folder, tmp_path) -> None:
    shutil.copytree(target_folder, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").unlink()
    assert fit_refused({"model.target.init_args.path": str(tmp_path / "other")}) == (
        "target path must be a folder in Hugging Face format (config.json, weights, tokenizer), or "
        f"'smollm2'; could not read '{tmp_path / 'other'}'."
    )


def test_a_target_that_the_drafter_cannot_follow_is_refused_by_name(
    fit_refused, target_folder, tmp_path
) -> None:
    shutil.copytree(target_folder, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "final_logit_softcapping": 30.0}))
    line = fit_refused({"model.target.init_args.path": str(tmp_path / "other")})
    assert "sets final_logit_softcapping" in line
    assert line.endswith("Use a target without it.")


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["data.store", "data.val_store"])
def test_a_store_that_is_not_there_is_refused(fit_refused, setting: str) -> None:
    assert fit_refused({setting: "/no/rows"}) == (
        f"{setting} must be a folder written by `dflash-lightning prepare`; /no/rows holds no "
        "finished store. Run prepare, or give another folder."
    )


def test_a_store_of_another_tokenizer_is_refused(fit_refused, target_folder, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>\n", "<|end|>"))
    line = fit_refused({"model.target.init_args.path": str(other)})
    assert re.fullmatch(
        r"data\.store \S+ was prepared with another tokenizer \(\w{16}\) than that of target "
        rf"{other} \(\w{{16}}\)\. Run `dflash-lightning prepare` with this target's\.",
        line,
    )


def test_a_mask_token_that_occurs_in_the_data_is_refused(fit_refused, store, tokenizer) -> None:
    letter = tokenizer.convert_tokens_to_ids("w")
    assert fit_refused({"model.drafter.mask_token_id": letter}) == (
        f"mask_token_id must never occur in the data; {letter} occurs in {store.path}. Take a "
        "reserved token of the target."
    )


def test_ids_outside_the_targets_vocabulary_are_refused(fit_refused, store) -> None:
    small = {"class_path": "dflash_lightning.RandomTarget", "init_args": {"vocab_size": 100}}
    line = fit_refused({"model.target": small})
    largest = len(store.used_ids) - 1
    assert line == (
        f"data.store {store.path} holds id {largest}, outside the target's vocabulary of 100. "
        "Prepare it with this target's tokenizer."
    )


def test_a_budget_below_the_longest_row_is_refused(fit_refused, store) -> None:
    longest = store.lengths.max()
    line = fit_refused({"data.batching.token_budget": int(longest) - 1, "data.val_fraction": 0.0})
    assert line.startswith("token_budget must hold every row: 1 of 40 rows do not fit, the longest")
    assert f"has {longest} tokens" in line
    assert f"got token_budget={longest - 1}. Raise token_budget to {longest}" in line


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"data.batching.max_rows": 0}, "max_rows must be an integer in 1.."),
        ({"data.batching.pad_to": 2048}, "pad_to must not exceed token_budget, got pad_to=2048"),
        ({"data.val_fraction": 1.5}, "val_fraction must be at least 0 and below 1, got 1.5."),
        ({"data.num_workers": -1}, "num_workers must be at least 0, got -1."),
        ({"data.anchor_rate": 0.0}, "anchor_rate must be in (0, 1]"),
        (
            {"trainer.accumulate_grad_batches": 400},
            "world_size * accumulate must not exceed the number of rows (38), got world_size=1 and",
        ),
    ],
    ids=changed_key,
)
def test_data_settings_that_cannot_work_are_refused(fit_refused, changes, start: str) -> None:
    assert fit_refused(changes).startswith(start)


@pytest.mark.parametrize("command", ["fit", "validate"])
@pytest.mark.parametrize("kind", ["missing", "no checkpoint"])
def test_a_path_that_is_no_checkpoint_is_refused(refused, recipe, tmp_path, command, kind) -> None:
    path = tmp_path / "some.ckpt"
    if kind == "no checkpoint":
        path.write_text("weights")
    config = write(tmp_path / "recipe.yaml", recipe, {})
    assert refused(command, "--config", config, "--ckpt_path", path) == (
        f"ckpt_path must be a checkpoint file that fit wrote; {path} is none. Give one of the "
        "files in a run folder's checkpoints."
    )


# -- the tools -------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = tmp_path / "mine" / "chats.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def prepare_line(refused, target_folder, **options: object) -> str:
    values = {"input": "chats.jsonl", "tokenizer": target_folder, "output": "rows", **options}
    return refused("prepare", *[f"--{name}={value}" for name, value in values.items()])


def test_missing_chats_are_refused(refused, target_folder) -> None:
    assert prepare_line(refused, target_folder, input="no.jsonl") == (
        "input must be a JSONL file (.jsonl or .jsonl.gz), got no.jsonl, which is not there. Check "
        "the path."
    )


def test_a_store_made_otherwise_is_refused(run, refused, target_folder, chats) -> None:
    run("prepare", "--input", chats, "--tokenizer", target_folder, "--output", "rows")
    line = prepare_line(refused, target_folder, input=chats, max_length=64)
    assert line == (
        "store rows was made with another max_length. Give another output, or overwrite=true."
    )


def test_a_tokenizer_that_is_not_there_is_refused(refused, chats) -> None:
    line = prepare_line(refused, "/no/model", input=chats)
    assert line.startswith("target path must be a folder or hub model")
    assert line.endswith("could not read '/no/model'.")


def test_missing_prompts_are_refused(refused, target_folder) -> None:
    assert refused(
        "regenerate", "--prompts", "no.jsonl", "--target", target_folder, "--output", "o.jsonl"
    ) == (
        "prompts must be a JSONL file (.jsonl or .jsonl.gz), got no.jsonl, which is not there. "
        "Check the path."
    )


def test_a_prompt_that_cannot_be_read_is_refused_by_its_line(refused, target_folder, chats) -> None:
    chats.write_text(chats.read_text() + "oops\n")
    line = refused(
        "regenerate", "--prompts", chats, "--target", target_folder, "--output", "o.jsonl"
    )
    assert line == f"{chats} line 2: not JSON. Mend or remove the line."


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("prepare", "the following arguments are required: input, tokenizer, output"),
        ("prepare --input x", "arguments are required: tokenizer, output"),
        ("prepare --input a --tokenizer b --output c --max_len 9", "--max_len 9"),
        ("prepare --input a --tokenizer b --output c --max_length x", '"max_length": Expected a'),
        ("regenerate --prompts a --target b --output c --seeds 3", "--seeds 3"),
        ("decode --drafter x", "arguments are required: target, prompts"),
        ("export", "arguments are required: ckpt, folder"),
        ("prepare --config no.yaml", "File does not exist"),
    ],
)
def test_a_tools_wrong_options_are_refused(refused, args: str, part: str) -> None:
    line = refused(*args.split())
    assert part in line
    assert line.endswith(f"See dflash-lightning {args.split()[0]} --help.")


@pytest.mark.parametrize("there", [False, True])
def test_a_file_that_is_no_checkpoint_cannot_be_exported(refused, tmp_path, there: bool) -> None:
    if there:
        (tmp_path / "some.ckpt").write_text("weights")
    line = refused("export", "some.ckpt", "drafter")
    assert line == "ckpt must be a checkpoint file of fit; some.ckpt is none."
    assert not (tmp_path / "drafter").exists()


def test_a_folder_that_is_no_drafter_cannot_decode(refused, target_folder, chats) -> None:
    line = refused("decode", "--drafter", "nowhere", "--target", target_folder, "--prompts", chats)
    assert line.startswith("drafter must be a folder with config.json and model.safetensors")
    assert "nowhere" in line

"""One configuration tree: defaults, file, environment and --set, and a page that says it all."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigurationError
from contracts.params import Params
from flows.settings import Settings, load_settings
from flows.settings_page import attribute_texts, settings_page
from stages.pipeline import PIPELINE

CONFIG = Path(__file__).resolve().parents[1] / "config"


def _every_params(params: Params):
    yield params
    for name in type(params).model_fields:
        value = getattr(params, name)
        if isinstance(value, Params):
            yield from _every_params(value)


def test_the_page_of_settings_is_up_to_date():
    # Written anew with `python -m flows.settings_page > config/dartflow.yaml`.
    assert (CONFIG / "dartflow.yaml").read_text() == settings_page()


def test_the_page_holds_every_default_and_loads():
    assert load_settings(CONFIG / "dartflow.yaml", environment={}) == Settings()


def test_every_setting_is_explained():
    for params in _every_params(Settings()):
        said = attribute_texts(type(params))
        leaves = {n for n in type(params).model_fields if not isinstance(getattr(params, n), Params)}
        missing = leaves - said.keys() - {"store"}
        assert not missing, (type(params).__module__, missing)


@pytest.mark.parametrize("preset", sorted((CONFIG / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_load(preset):
    assert load_settings(preset, environment={}) != Settings()


def test_each_stage_has_its_params_in_the_tree_under_its_name():
    for stage in PIPELINE:
        assert Settings.model_fields[stage.name].annotation is stage.params


def test_later_sources_win(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("log_normal: {sigma: 0.2}\nrrf_merge: {rank_constant: 7, limit: 9}\n")
    environment = {"DARTFLOW_LOG_NORMAL__SIGMA": "0.3", "DARTFLOW_RRF_MERGE__LIMIT": "8", "HOME": "/"}
    found = load_settings(path, environment=environment, assignments=["log_normal.sigma=0.4"])
    assert (found.log_normal.sigma, found.rrf_merge.rank_constant, found.rrf_merge.limit) == (0.4, 7, 8)


def test_a_rerun_starts_from_the_settings_of_its_run():
    before = load_settings(environment={}, assignments=["log_normal.sigma=0.4", "corpus.columns={text: body}"])
    again = load_settings(environment={}, base=before.model_dump(mode="json"), assignments=["rrf_merge.limit=9"])
    assert again.log_normal.sigma == 0.4
    assert again.corpus.columns == {"text": "body"}
    assert again.rrf_merge.limit == 9


@given(st.sampled_from(sorted(Settings.model_fields)), st.text(alphabet="abcdefgh_", min_size=1, max_size=12))
def test_no_unknown_name_gets_through(section, name):
    known = getattr(Settings.model_fields[section].annotation, "model_fields", {})
    if name in known:
        return
    with pytest.raises(ConfigurationError):
        load_settings(environment={}, assignments=[f"{section}.{name}=1"])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"[1, 2]", "is not a mapping"),
        (b"a: [", "cannot be read as YAML"),
        (b"sgima: 1", "unknown setting"),
        (b"7: 1", "unknown setting: got 7"),
        (b"store: caf\xe9", r"settings.yaml: cannot be read as YAML: got 'utf-8' codec can't decode byte 0xe9"),
        (b"store: 2026-13-45", "cannot be read as YAML: got month must be in 1..12"),
        (b"log_normal: 5", "log_normal is a section: got 5, want log_normal.setting=value"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, part):
    path = tmp_path / "settings.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match=part):
        load_settings(path, environment={})


def test_an_empty_file_leaves_the_defaults(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("# nothing\n")
    assert load_settings(path, environment={}) == Settings()


def test_values_are_strict():
    for assignment in ("run.shard_size='5'", "run.shard_size=5.0", "oversample.k=true", "log_normal.sigma=.nan"):
        with pytest.raises(ConfigurationError, match="setting "):
            load_settings(environment={}, assignments=[assignment])


def _from_every_source(tmp_path, section, name, text):
    """The setting, given in a file, in the environment and with --set."""
    path = tmp_path / "settings.yaml"
    path.write_text(f"{section}:\n  {name}: {text}\n")
    variable = f"DARTFLOW_{section}__{name}".upper()
    for sources in (
        {"config": path, "environment": {}},
        {"environment": {variable: text}},
        {"environment": {}, "assignments": [f"{section}.{name}={text}"]},
    ):
        yield getattr(getattr(load_settings(**sources), section), name)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-3", 0.001), ("1E5", 1e5), ("5e-1", 0.5), ("1.5e3", 1500.0), (".5e1", 5.0), ("2.e+1", 20.0), ("0.25", 0.25)],
)
def test_an_exponent_makes_a_number_from_every_source(tmp_path, text, number):
    assert list(_from_every_source(tmp_path, "log_normal", "sigma", text)) == [number] * 3


@pytest.mark.parametrize("text", ["1e", "e5", "1e-", ".e5", "1e5x", "x1e5"])
def test_what_only_looks_like_an_exponent_stays_text(tmp_path, text):
    assert list(_from_every_source(tmp_path, "family_rescue", "plan", text)) == [text] * 3


def test_a_value_that_is_no_value_of_its_kind_is_refused():
    with pytest.raises(ConfigurationError, match="--set store=2026-13-45: has a value that is not YAML"):
        load_settings(environment={}, assignments=["store=2026-13-45"])
    with pytest.raises(ConfigurationError, match="log_normal is a section: got 5"):
        load_settings(environment={"DARTFLOW_LOG_NORMAL": "5"}, assignments=["log_normal.sigma=0.2"])


def test_the_shipped_example_configuration_loads():
    found = load_settings(CONFIG / "example.yaml", environment={})
    assert yaml.safe_load(Path(found.family_rescue.plan).read_text())["name"] == "example"


@pytest.mark.parametrize(
    "assignment",
    [
        "log_normal.sigma=1e-200", "context.token_budget=99999999999999999999", "greedy_selection.k=99999999999",
        "blended_rerank.retrieval_weight=1e308", "oversample.oversampling=2147483648", "sparse_search.depth=1e30",
    ],
)  # fmt: skip
def test_what_no_run_could_carry_out_is_refused_as_a_setting(assignment):
    with pytest.raises(ConfigurationError, match=f"setting {assignment.split('=')[0]}"):
        load_settings(environment={}, assignments=[assignment])

"""Settings: read strictly, refused in one line, identified by their content."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.errors import ConfigError, OelmError, nearest
from oelm.train.run import Run, run_id
from oelm.values import canonical, digest, load_toml, parse_toml


BASE = {"model": "gpt-512", "data": "wikipedia", "variant": "oelm-freeze", "budget": {"steps": 100}}


def read(**changes):
    return Run.read(BASE | changes, where="run.toml")


# If one of these changes without a change of what a run means, it is a bug: every committed run would lose its name.
GOLDEN = {
    "445dc337": {},
    "a35c2033": {"variant": "baseline"},
    "f4b361a8": {"seed": 7},
    "b48a6cd3": {"optimizer": {"lr": 0.0003}},
    "3a0c2bda": {
        "model": "bert-base",
        "data": {"name": "sst2", "tokenizer": "bert", "context": 128},
        "budget": {"epochs": 3.0, "batch": 32},
    },
    "d1614cd1": {"variant": "progressive"},
}


def test_golden_identities():
    for identity, changes in GOLDEN.items():
        assert read(**changes).identity() == identity


def test_identities_differ_where_settings_differ_and_only_there():
    ids = [read(**changes).identity() for changes in GOLDEN.values()]
    assert len(set(ids)) == len(ids)
    assert read(variant={"base": "oelm-freeze"}).identity() == read().identity()
    assert read(optimizer={"lr": 1e-3}).identity() == read().identity()
    assert read(seed=42, precision="bf16").identity() == read().identity()
    assert read(optimizer={"lr": 1}).identity() == read(optimizer={"lr": 1.0}).identity()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"varient": "x"}, "did you mean 'variant'"),
        ({"budget": {"stps": 1}}, "did you mean 'steps'"),
        ({"variant": "oelm-freez"}, "did you mean 'oelm-freeze'"),
        ({"model": "gpt-51"}, "did you mean 'gpt-512'"),
        ({"model": {"widht": 3}}, "run.toml: model.widht: unknown key; did you mean 'width'?"),
        ({"model": {"width": "3"}}, "run.toml: model.width: '3' is a string; write the number without quotes"),
        ({"model": {"path": "x", "hed": "lm"}}, "run.toml: model.hed: unknown key; did you mean 'head'?"),
        ({"model": {"preset": "gpt-512", "heads": 7}}, "heads = 7 does not divide width = 512"),
        ({"optimizer": {"lr": "1e-3"}}, "is a string; write the number without quotes"),
        ({"optimizer": {"lr": -1.0}}, "greater than 0"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr"),
        ({"optimizer": {"lr": True}}, "optimizer.lr"),
        ({"optimizer": {"warmup": 200}}, "longer than budget.steps"),
        ({"budget": {}}, "exactly one of steps, epochs and tokens"),
        ({"budget": {"steps": 1, "epochs": 2.0}}, "exactly one"),
        ({"budget": {"steps": 1, "batch": 8, "accumulate": 3}}, "does not divide batch"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"precision": "bf17"}, "did you mean 'bf16'"),
        ({"data": {"name": "../x"}}, "data.name"),
        ({"data": {"name": "wikipedia", "context": 1024}}, "longer than model.context"),
        ({"variant": {"layers": [9]}}, "out of range"),
        ({"variant": {"gain": 0}}, "above 0"),
        ({"variant": {"init": "slices", "tie": True}}, "tie"),
        ({"variant": {"freeze": "none", "thaw": {}}}, "nothing can thaw"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes, said):
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    message = str(caught.value)
    assert said in message
    assert message.startswith("run.toml: ")
    assert "\n" not in message
    assert caught.value.exit_code == 2


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*Run.model_fields, "optimizer.lr", "budget.steps", "data.name", "model.width"]), junk)
def test_junk_is_refused_as_a_configuration_error_or_accepted(key, value):
    data = {k: (dict(v) if isinstance(v, dict) else v) for k, v in BASE.items()}
    table, _, last = key.rpartition(".")
    if table:
        inner = data.get(table)
        data[table] = (
            inner
            if isinstance(inner, dict)
            else {"preset": inner}
            if table == "model"
            else {"name": inner}
            if inner
            else {}
        ) | {last: value}
    else:
        data[key] = value
    said = None
    try:
        run = Run.read(data, where="x")
    except OelmError as error:
        said = str(error)
    if said is None:
        assert Run.read(run.model_dump(), where="again") == run
    else:
        assert "\n" not in said


def test_a_run_survives_its_own_plain_form():
    run = read(variant="progressive")
    again = Run.read(run.model_dump(mode="json"), where="x")
    assert again == run
    assert again.identity() == run.identity()


@pytest.mark.parametrize("row", ["", "a/b", "../x", "-rf", "a b", "x" * 100, "a\n"])
def test_row_names_cannot_leave_their_folder(row):
    with pytest.raises(ConfigError):
        run_id(row, read())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = 1\na = 2\n", "twice"),
        (b"\xff\xfea\x00", "UTF-16"),
        (b"a = '\xff'", "not UTF-8"),
        (b"[[", "check the TOML"),
        (b"a = " + b"[" * 5000, "TOML"),
    ],
)
def test_bad_toml_files_are_said_with_file_and_remedy(tmp_path, content, said):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_missing_folder_and_huge_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_toml(tmp_path)
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match="too large"):
        load_toml(big)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert load_toml(path) == {"a": 1}


@given(
    st.dictionaries(
        st.text(max_size=5), st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    )
)
def test_canonical_form_ignores_order_and_number_type(data):
    backwards = dict(reversed(list(data.items())))
    assert canonical(data) == canonical(backwards)
    assert digest(data) == digest(backwards)
    whole = {k: float(v) if isinstance(v, int) and abs(v) < 2**50 else v for k, v in data.items()}
    assert canonical(whole) == canonical(data)


def test_nearest_names_one_or_all():
    assert nearest("basline", ["baseline", "other"]) == "did you mean 'baseline'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
    assert parse_toml("x = 1e-3", where="t") == {"x": 1e-3}

"""From specifications and files to policies and back."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from speculated import BROKEN

from moe_spac.policies import load
from moe_spac.policies.hybrimoe import HybriMoe
from moe_spac.policies.load import load_policy, policy_names, read_policy_file, save_policy
from moe_spac.policies.recency import ArLru
from moe_spac.policies.spac import MoeSpac, MoeSpacRelease
from moe_spac.traces.errors import InputError

MINE = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar, Literal
from moe_spac.policies.interface import Policy


class Plain(Policy):
    """No name, no parameters."""


@dataclass
class Mine(Policy):
    name: ClassVar[str] = "mine"
    limit: int | None = 3
    share: float = 0.5
    order: Literal["old", "new"] = "old"
    label: str = "x"

    def __post_init__(self):
        if self.share < 0:
            raise ValueError("share must not be negative")
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_names_have_one_line_each():
    names = policy_names()
    assert {"ar-lru", "hybrimoe", "hybrimoe-release", "min", "moe-spac", "moe-spac-release", "static"} <= set(names)
    assert all(text and "\n" not in text for text in names.values())


def test_parameters_take_the_types_of_the_fields():
    assert load_policy("ar-lru") == ArLru()
    assert load_policy("moe-spac:k=4,adaptive=false, smoothing=0.25") == MoeSpac(k=4, adaptive=False, smoothing=0.25)
    assert load_policy("ar-lru:scope=global") == ArLru(scope="global")
    assert load_policy("moe-spac-release") == MoeSpacRelease()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ar-lur", "did you mean ar-lru.*hybrimoe"),
        ("nothing-like-it", "There are: ar-lru, dali"),
        ("ar-lru:scop=global", "did you mean scope"),
        ("ar-lru:scope=both", "one of layer, global"),
        ("moe-spac:k=five", "whole number"),
        ("moe-spac:k=1.5", "whole number"),
        ("moe-spac:adaptive=maybe", "true or false"),
        ("moe-spac:adaptive", "has no value"),
        ("moe-spac:k=0", "k must be"),
        ("missing.py:Mine", "no such file"),
        ("missing.py", "which class"),
        ("missing.toml", "no such policy file"),
    ],
)
def test_one_line_says_what_is_wrong(spec, says):
    with pytest.raises(InputError, match=says) as error:
        load_policy(spec)
    assert "\n" not in str(error.value)


def test_a_class_in_a_file(mine):
    policy = load_policy(f"{mine}:Mine:limit=none,share=1,order=new")
    assert asdict(policy) == {"limit": None, "share": 1.0, "order": "new", "label": "x"}  # type: ignore[call-overload]
    assert load_policy(f"{mine}:Plain").name == "Plain"
    for spec, says in (("Other", "its policies are: Plain, Mine"), ("Literal", "not a subclass")):
        with pytest.raises(InputError, match=says):
            load_policy(f"{mine}:{spec}")
    with pytest.raises(InputError, match="must not be negative"):
        load_policy(f"{mine}:Mine:share=-1")
    with pytest.raises(InputError, match="It has: none"):
        load_policy(f"{mine}:Plain:a=1")


def test_a_file_that_does_not_run(mine):
    mine.write_text("1 / 0")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        load_policy(f"{mine}:Mine")


@pytest.mark.parametrize("policy", [MoeSpac(k=4, adaptive=False), HybriMoe(alpha=0.1), ArLru("global")])
def test_a_policy_file_reads_back_equal(tmp_path, policy):
    path = tmp_path / "winner.toml"
    chosen = {"trace": 'a "b"\\c\n', "machine": "rtx4090-pcie4", "slots": 24, "metric": 12.5, "odd key": True}
    save_policy(path, policy, chosen)
    assert read_policy_file(path) == (policy, chosen)
    assert load_policy(str(path)) == policy


def test_a_file_for_a_policy_of_ones_own(mine, tmp_path):
    path = tmp_path / "winner.toml"
    policy = load_policy(f"{mine}:Mine:limit=none,label=a b")
    save_policy(path, policy, {})
    assert repr(load_policy(str(path))) == repr(policy)
    path.write_text('name = "mine.py:Mine"\n[parameters]\nlimit = 7')
    assert "limit=7" in repr(load_policy(str(path)))


def test_a_namesake_is_not_taken_for_the_original(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text("from moe_spac.policies.recency import ArLru\nclass Twist(ArLru): pass\n")
    save_policy(tmp_path / "w.toml", load_policy(f"{path}:Twist"), {})
    assert type(load_policy(str(tmp_path / "w.toml"))).__name__ == "Twist"


@pytest.mark.parametrize(
    "text", ["name = ", "k = 1", 'name = "ar-lru"\nparameters = 3', 'name = "ar-lru"\n[parameters]\na=1']
)
def test_damaged_policy_files(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"bad\.toml"):
        load_policy(str(path))


def test_policies_of_other_packages(tmp_path, monkeypatch):
    """A distribution on the path that declares an entry point, as pip would leave it."""
    folder = tmp_path / "other_policies-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other-policies\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[moe_spac.policies]\nmine = mine_module:Mine\nbroken = nowhere:X\n")
    (tmp_path / "mine_module.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    load._packaged.cache_clear()
    try:
        assert policy_names()["mine"] == "from the package other-policies"
        policy = load_policy("mine:share=0.25")
        save_policy(tmp_path / "w.toml", policy, {})
        assert 'name = "mine"' in (tmp_path / "w.toml").read_text()
        assert load_policy(str(tmp_path / "w.toml")) == policy
        with pytest.raises(InputError, match="cannot be imported"):
            load_policy("broken")
    finally:
        load._packaged.cache_clear()
        sys.modules.pop("mine_module", None)


def test_listing_names_imports_no_solver_and_no_torch():
    code = (
        "import sys; from moe_spac.policies.load import policy_names; policy_names(); "
        "sys.exit(bool({'torch', 'simpy', 'pulp', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_policy_is_described(mine):
    found = load.describe("moe-spac:k=4")
    parameters = {p["name"]: (p["value"], p["type"]) for p in found["parameters"]}
    assert parameters["k"] == (4, "int")
    assert parameters["adaptive"] == (True, "bool")
    assert "2603.09983" in found["about"]
    assert "Theirs in both variants" in found["description"]
    file, _, line = found["source"].rpartition(":")
    assert "class MoeSpac(Policy)" in "".join(Path(file).read_text().splitlines()[int(line) - 1 : int(line) + 1])
    own = load.describe(f"{mine}:Mine")
    assert [(p["name"], p["type"]) for p in own["parameters"]] == [
        ("limit", "int | none"),
        ("share", "float"),
        ("order", "old | new"),
        ("label", "str"),
    ]
    assert own["source"].startswith(str(mine))
    with pytest.raises(InputError, match="there is no policy"):
        load.describe("nope")


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_names_its_source_and_explains_its_parameters(name):
    found = load.describe(name)
    assert len(found["description"].splitlines()) >= 3
    assert found["parameters"]
    assert (found["lossless"], found["scope"] in ("layer", "global")) == (True, True)


def test_a_lossy_policy_needs_permission(tmp_path):
    path = tmp_path / "lossy.py"
    path.write_text(BROKEN)
    with pytest.raises(InputError, match="changes the model's output; run it with --allow-lossy"):
        load_policy(f"{path}:Lossy", allow_lossy=False)
    assert load_policy(f"{path}:Lossy", allow_lossy=True).name == "Lossy"
    assert load_policy("lfru", allow_lossy=False).name == "lfru"

"""Files in SMLP_PLUGINS: the settings that they bring, and what is refused."""

import dataclasses
import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plugin_files import ARCHS, CONV, ROUTER, SIZES
from running import REPOSITORY, run_python
from tiny_checkpoints import write_checkpoint

import smlp
from smlp.checkpoint.hf_folder import _training_options
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.upcycle import target_config, upcycled
from smlp.cli import main
from smlp.config import SETTINGS, all_settings, differences, flatten, plugins, unflatten
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import from_training_options
from smlp.config.registry import ROUTERS
from smlp.config.settings import help_of
from smlp.costs.match import FAMILIES, families, like, match
from smlp.criterions.choice import needs_ours
from smlp.experiments.plan import entries_of
from smlp.experiments.reading import read_experiment
from smlp.extend import register_architecture
from smlp.fairseq_compat.changed_settings import compare_with
from smlp.launch.environment import environment

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("own_tables")]


#: settings of the blocks of smlp_tiny
OF_BLOCKS = {
    *("gmlp_gate", "gmlp_attention_dim"),
    *("smlp_feature_scale", "smlp_projection_dim", "smlp_order", "smlp_spatial_weights"),
}


def test_own_settings_are_settings(plugged_in):
    config = smlp.preset("smlp_tiny", router="cosine", cosine_temperature=0.5)
    assert config.own("cosine").temperature == 0.5 and config.own("cosine").balance_weight == 0.01
    flat = flatten(config)
    own = {"cosine_temperature", "cosine_balance_weight", *OF_BLOCKS}
    assert flat.keys() - SETTINGS.keys() == own
    assert unflatten(flat) == config and hash(unflatten(flat)) == hash(config)
    assert differences(config, smlp.preset("smlp_tiny")) == {"router": "cosine", "cosine_temperature": 0.5}
    assert needs_ours(config).endswith("cosine_balance_weight=0.01")
    assert needs_ours(dataclasses.replace(config, extra=(("cosine_balance_weight", 0.0),))) is None
    plain = smlp.preset("smlp_tiny", conv_width=9)
    assert ignored_settings(plain, {}).get("conv_width") == "no router or block of the model is conv"
    usual = {*SETTINGS, *OF_BLOCKS}
    assert flatten(smlp.preset("smlp_tiny")).keys() == usual, "other models know nothing of it"


def test_a_flag_that_an_architecture_sets_stays_set_where_it_is_not_given():
    """fairseq's configuration says nothing then, rather than False."""
    from smlp.models.language_model import LanguageModelConfig

    flags = {"base_shuffle": True, "checkpoint_activations": True}
    register_architecture("flagged_lm", like="smlp_tiny", **flags)
    of_task = {"tokens_per_sample": 8, "add_bos_token": False, "max_target_positions": None}
    options = {field.name: field.default for field in dataclasses.fields(LanguageModelConfig)} | of_task
    for arch, expected in {"flagged_lm": True, "smlp_tiny": False}.items():
        settings = flatten(from_training_options(arch, options, vocab_size=30, padding_idx=1))
        assert [settings[name] for name in flags] == [expected, expected]
    given = from_training_options("smlp_tiny", options | flags, vocab_size=30, padding_idx=1)
    assert given.checkpoint_activations and given.base_shuffle


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"router": "cosine", "cosine_temperature": 0.0}, ["cosine_temperature", "0.0"]),
        ({"cosine_temperatur": 1.0}, ["cosine_temperatur", "did you mean 'cosine_temperature'"]),
        ({"router": "cosin"}, ["base, switch, gshard, hash, loss_free, cosine", "'cosin'", "SMLP_PLUGINS"]),
        ({"dense_block": "conv", "conv_width": 0}, ["conv_width", "0"]),
    ],
)
def test_bad_own_settings_are_named(plugged_in, settings, words):
    with pytest.raises(smlp.UserError) as error:
        smlp.preset("smlp_tiny", **settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_upcycling_keeps_settings_of_own_blocks_and_refuses_what_it_does_not_know(plugged_in, tmp_path):
    register_architecture("conv_smlp", like="smlp_tiny", dense_block="conv")
    settings = {**SIZES, **ARCHS["conv_lm_tiny"]}
    settings = {name: value for name, value in settings.items() if name not in ("vocab_size", "max_tokens")}
    path, decoder = write_checkpoint(tmp_path, [f"w{i}" for i in range(9)], "conv_lm_tiny", **settings)
    sparse = upcycled(open_checkpoint(path), "conv_smlp", {"num_sparse_layers": 1, "num_experts": 2})
    assert sparse.config.own("conv").width == decoder.config.own("conv").width == 5
    with pytest.raises(smlp.UserError, match="upcycling to conv_moe_tiny: conv blocks cannot be made from conv blocks"):
        target_config(open_checkpoint(path), "conv_moe_tiny", {})
    with pytest.raises(smlp.UserError, match="upcycling supports the routers hash, gshard, switch, base, not cosine"):
        target_config(open_checkpoint(path), "cosine_lm_tiny", {})


def test_a_setting_that_a_router_no_longer_has_is_named(plugged_in, tmp_path, caplog):
    """Its default would be another model."""
    small = {name: value for name, value in SIZES.items() if name not in ("vocab_size", "max_tokens")}
    path, _ = write_checkpoint(tmp_path, [f"w{i}" for i in range(9)], "cosine_lm_tiny", **small, num_heads=2)
    config = open_checkpoint(path).config
    assert config.router == "cosine"
    state = torch.load(path, weights_only=False)
    state["cfg"]["model"]["cosine_heat"] = 0.3
    torch.save(state, path)
    with pytest.raises(smlp.UserError, match=r"unknown setting 'cosine_heat': it is of another version of a router"):
        open_checkpoint(path)
    compare_with(str(path), SimpleNamespace(is_data_parallel_master=True), config)
    (said,) = caplog.messages
    assert "unknown setting 'cosine_heat': it is of another version" in said and "which are not compared" in said
    options = {"router": "cosine", "cosine_heat": 0.3, "max_tokens": 8}
    assert "cosine_heat" in _training_options(options, False, Path("config.json"))


def test_a_comparison_matches_families_of_ones_own(plugged_in, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("data: d\nupdates: 9\nmatch: {like: smlp_tiny, families: [smlp, conv_lm_tiny]}\n")
    assert [entry.arch for entry in entries_of(read_experiment(path), 512)] == ["smlp_tiny", "conv_lm_tiny"]
    path.write_text(path.read_text().replace("conv_lm_tiny]", "conf_lm]"))
    with pytest.raises(smlp.UserError, match=r"match.families has 'conf_lm', which is not one of .*conv_lm_tiny"):
        read_experiment(path)


def test_match_finds_sizes_of_own_architectures(plugged_in):
    target, size, shared = like("smlp_tiny")
    assert set(families()) - set(FAMILIES) == set(ARCHS)
    for family in ARCHS:
        found = match(family, target, "layers", size, shared)
        assert found.matches and found.arguments()[:2] == ["--arch", family]


# --- what is refused

START = """
from dataclasses import dataclass
from smlp.extend import BlockKind, RouterKind, register_architecture, register_dense_block, register_router, setting

class Free(RouterKind):
    def build(self, config): ...
    def num_parameters(self, config): return 0
    def flops_per_token(self, config): return 0
"""
BAD = {
    "syntax": ("def :", ["SyntaxError", "line 1"]),
    "fails": (START + "print(nothing)\n", ["line 10", "NameError", "nothing"]),
    "taken": (
        START + "register_router('base')(Free)",
        ["router 'base'", "Free in", "registered by smlp", "another name"],
    ),
    "name": (START + "register_router('My-Router')(Free)", ["'My-Router'", "lower-case"]),
    "abstract": (START + "@register_router('x')\nclass X(RouterKind): ...", ["'x' (X) lacks build, flops_per_token"]),
    "no kind": (START + "@register_dense_block('x')\nclass X(Free): ...", ["'x' (X) is not a subclass of BlockKind"]),
    "no dataclass": (
        START + "@register_router('x')\nclass X(Free):\n  class settings:\n    a: int = 3\n",
        ["settings of 'x'", "not a frozen dataclass"],
    ),
    "type": (
        START + "@dataclass(frozen=True)\nclass S:\n  a: list = setting(None, 'h')\nFree.settings = S\n"
        "register_router('x')(Free)",
        ["'a' of 'x'", "int, float, bool or str"],
    ),
    "like a setting": (
        START + "@dataclass(frozen=True)\nclass S:\n  jitter: float = setting(0.1, 'h')\nFree.settings = S\n"
        "register_router('router')(Free)",
        ["'router_jitter'", "another setting"],
    ),
    "like an option of training": (
        START + "@dataclass(frozen=True)\nclass S:\n  dir: str = setting('x', 'h')\nFree.settings = S\n"
        "register_router('profile')(Free)",
        ["'profile_dir'", "another setting"],
    ),
    "architecture": (START + "register_architecture('y', like='nothing')", ["'y'", "'nothing'"]),
    "settings of another kind": (
        START + "Free.settings = 5\nregister_router('x')(Free)",
        ["settings of 'x' (5)", "not a frozen dataclass"],
    ),
    "default": (
        START + "@dataclass(frozen=True)\nclass S:\n  a: float = setting('warm', 'h')\nFree.settings = S\n"
        "register_router('x')(Free)",
        ["x_a must be of type float, got 'warm'"],
    ),
    "its arguments": (
        START.replace("def build(self, config)", "def build(self)") + "register_router('x')(Free)",
        ["router 'x' (Free): build() cannot be called with (config): too many positional arguments"],
    ),
    "its setting": (START + "register_architecture('y', like='smlp', wdith=3)", ["'y'", "'wdith'"]),
    "its setting's type": (
        START + "register_architecture('y', like='smlp', num_experts='four')",
        ["line 10", "architecture 'y': num_experts must be of type int, got 'four'"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_whole(tmp_path, monkeypatch, name):
    text, words = BAD[name]
    path = tmp_path / "bad.py"
    path.write_text(text.replace("\nclass Free", "\nregister_architecture('half', like='smlp')\nclass Free"))
    monkeypatch.setenv(plugins.VARIABLE, f"{ROUTER}{os.pathsep}{path}")
    for _ in range(2):  # also the second time
        with pytest.raises(smlp.UserError) as error:
            smlp.preset("smlp_tiny")
        assert all(word in str(error.value) for word in [str(path), *words]), str(error.value)
        assert "\n" not in str(error.value)
    monkeypatch.setenv(plugins.VARIABLE, str(ROUTER))
    assert "half" not in smlp.PRESETS and "x" not in ROUTERS and "cosine" in ROUTERS


#: (text of an example, what stands for it, words of the message)
RETURNED = [
    (
        "return Routing(plan,",
        "return Routing(logits_NE,",
        ["CosineRouter returned (", "as its plan, not a "],
    ),
    ("return Routing(plan,", "return (plan,", ["layer 1 (tMoE): CosineRouter returned (RoutingPlan(", "not a Routing"]),
    ("plan.expert_A], aux", "plan.expert_A][1:], aux", ["weight_A of shape (", "assignments"]),
    ("aux_losses, logits", "{'x': gate_NE[0]}, logits", ["aux_losses['x'] of shape (8,), not a scalar"]),
    ("aux_losses, logits", "None, logits", ["aux_losses None, not a dictionary"]),
    ("logits_NE.detach())", "logits_NE[0])", ["logits_NE of shape (8,), not ("]),
    ("cosine_NE = gate", "{}['mine']; cosine_NE = gate", ["SMLP_PLUGINS: ", "line 56, failed: KeyError: 'mine'"]),
    ("return CosineRouter(", "return 0, (", ["layer 1 (tMoE): build() of the router returned (0, ("]),
    (
        "return config.num_experts * config.embed_dim  #",
        "return 'many'  #",
        ["must be finite and at least 0, got 'many'"],
    ),
    ("return config.num_experts * config.embed_dim  #", "return float('inf')  #", ["at least 0, got inf"]),
    (
        "return x_BnH + self",
        "return x_BnH[..., :1] if True else x_BnH + self",
        ["Convolution returned (", "not a tensor of shape ("],
    ),
    ("return DenseBlock(config, ", "return (", ["layer 0: build() of the block returned a Convolution", "not a Block"]),
    ("return convolution_costs(config, layer_index), f", "return f", ["layer 0: components() of the block returned"]),
    (
        'return CosineRouter(config.embed_dim, config.num_experts, config.own("cosine"))',
        "return nn.Linear(4, 4)",
        ["returned Linear(", "cannot be called with (x_NH, token_ids_N, plan): too many"],
    ),
    ("def forward(self, x_NH", "def forwards(self, x_NH", ["returned CosineRouter(), which has no forward()"]),
    ("plan.expert_A], aux", "plan.expert_A].long(), aux", ["weight_A of type torch.int64, which has no gradient"]),
    ("self.dropout = Dropout(", "self.double().dropout = Dropout(", ["layer 0", "mixing.weight is torch.float64, not"]),
    ("return x_BnH + self", "return x_BnH.double() + self", ["Convolution returned numbers of type torch.float64"]),
    (
        "x_BnH: Tensor, context: ForwardContext) -> Tensor:\n        # A",
        "x_BnH) -> Tensor:\n        # A",
        ["layer 0: ", "with Convolution, which cannot be called with (x_BnH, context)"],
    ),
    ('f"blocks.{layer}.mixing"', '"nowhere"', ["costs are stated for nowhere, but the model has no such module"]),
]


@pytest.mark.parametrize(("old", "new", "words"), RETURNED)
def test_what_a_plugin_returns_is_checked(tmp_path, monkeypatch, capsys, old, new, words):
    example, arch = (ROUTER, "cosine_lm_tiny") if old in ROUTER.read_text() else (CONV, "conv_lm_tiny")
    path = tmp_path / "mine.py"
    path.write_text(example.read_text().replace(old, new, 1))
    monkeypatch.setenv(plugins.VARIABLE, str(path))
    assert main.main(["flops", "--arch", arch, "--tokens", "4"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("x", "returned no tuple of a tensor and a dictionary of auxiliary losses"),
        ("(x, None)", "returned no tuple of a tensor and a dictionary of auxiliary losses"),
        ("(x[:, :1], {})", r"returned \(., 1, 256\), not a tensor of shape \(., 1?[68], 256\)"),
        ("(x, {'a': x})", "returned an auxiliary loss 'a' that is not a scalar tensor"),
    ],
)
def test_what_a_block_returns_is_checked(plugged_in, monkeypatch, returned, words):
    model = smlp.build("conv_lm_tiny", num_dense_layers=1, vocab_size=9)
    monkeypatch.setattr(type(model.blocks[0]), "forward", lambda self, x, context: eval(returned))
    for run in (model, lambda tokens: model.features_of([(tokens, None)])):
        with pytest.raises(smlp.UserError, match=f"DenseBlock {words}"):
            run(torch.full((2, 8), 5))


@pytest.mark.parametrize("name", ["nowhere/router.py", "~nobody-of-this-name/router.py"])
def test_a_missing_file_is_named(monkeypatch, capsys, name):
    monkeypatch.setenv(plugins.VARIABLE, name)
    assert main.main(["flops", "--arch", "smlp_tiny"]) == 1
    error = capsys.readouterr().err
    assert error == f"smlp: error: SMLP_PLUGINS names {name}, which is not a file that can be read\n"


def test_a_relative_path_counts_from_where_the_process_was(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv(plugins.VARIABLE, "examples/extend/cosine_router.py")
    assert "cosine" in ROUTERS
    monkeypatch.chdir(tmp_path)
    assert smlp.preset("cosine_lm_tiny").router == "cosine"
    with pytest.raises(AttributeError) as raised:
        ROUTERS["cosine"].build(None)
    assert "cosine_router.py, line " in plugins.fault(raised.value)


def test_a_thread_that_looks_something_up_meanwhile_waits(tmp_path, monkeypatch):
    """The file gives the thread time to find what is not there yet."""
    (tmp_path / "slow.py").write_text(
        "import threading\nfrom smlp.config.registry import ARCHITECTURES\n"
        "from smlp.extend import register_architecture\nfound = []\n"
        "thread = threading.Thread(target=lambda: found.append('mine' in ARCHITECTURES))\n"
        "thread.start()\nthread.join(0.05)\nregister_architecture('mine', like='smlp')\n"
    )
    monkeypatch.setenv(plugins.VARIABLE, str(tmp_path / "slow.py"))
    assert smlp.preset("mine")
    slow = next(module for name, module in sys.modules.items() if name.startswith("smlp_plugin_slow_"))
    slow.thread.join(30)
    assert slow.found == [True]


def test_choices_of_own_settings_are_checked_and_shown(tmp_path, monkeypatch):
    path = tmp_path / "free.py"
    path.write_text(
        START + "@dataclass(frozen=True)\nclass S:\n  kind: str = setting('a', 'which', ('a', 'b'))\n"
        "  loud: bool = setting(False, 'whether')\n  size: int = setting(3, 'how large', (3, 5))\n"
        "Free.settings = S\nregister_router('free')(Free)"
    )
    monkeypatch.setenv(plugins.VARIABLE, str(path))
    assert help_of(all_settings()["free_kind"]) == "which: a, b" and all_settings()["free_loud"].type == "bool"
    assert smlp.preset("smlp_tiny", router="free", free_kind="b", free_loud=True).own("free").loud
    with pytest.raises(smlp.UserError, match="no router or block 'base' has settings of its own"):
        smlp.preset("smlp_tiny").own("base")
    with pytest.raises(smlp.UserError, match="free_kind must be one of a, b, got 'c'"):
        smlp.preset("smlp_tiny", router="free", free_kind="c")
    assert help_of(all_settings()["free_size"]) == "how large: 3, 5"
    assert smlp.preset("smlp_tiny", router="free", free_size=5).own("free").size == 5
    with pytest.raises(smlp.UserError, match="free_size must be one of 3, 5, got 4"):
        smlp.preset("smlp_tiny", router="free", free_size=4)


def test_what_a_failing_file_had_imported_can_be_named_afterwards(tmp_path, monkeypatch):
    (tmp_path / "part.py").write_text(
        "from smlp.extend import register_architecture\nregister_architecture('mine', like='smlp')\n"
    )
    (tmp_path / "whole.py").write_text("import part\nprint(nothing)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, str(tmp_path / "whole.py"))
    with pytest.raises(smlp.UserError, match="NameError"):
        smlp.preset("mine")
    monkeypatch.setenv(plugins.VARIABLE, str(tmp_path / "part.py"))
    assert smlp.preset("mine").num_layers == smlp.preset("smlp").num_layers


@pytest.mark.parametrize("is_namespace", [False, True])
def test_a_failing_file_takes_the_package_beside_it_along(tmp_path, monkeypatch, is_namespace):
    """In a notebook, the file is mended and read again."""
    name = f"beside_{is_namespace}"
    (tmp_path / name).mkdir()
    if not is_namespace:
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "parts.py").write_text(
        "from smlp.extend import register_architecture\nregister_architecture('mine', like='smlp')\n"
    )
    whole = tmp_path / "whole.py"
    whole.write_text(f"import {name}.parts\nprint(nothing)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, str(whole))
    with pytest.raises(smlp.UserError, match="NameError"):
        smlp.preset("mine")
    assert not {name, f"{name}.parts"} & set(sys.modules)
    whole.write_text(f"import {name}.parts\n")
    assert smlp.preset("mine").num_layers == smlp.preset("smlp").num_layers


def test_two_files_with_one_name_and_one_file_twice(tmp_path, monkeypatch):
    other = tmp_path / "other.py"
    other.write_text(ROUTER.read_text())
    monkeypatch.setenv(plugins.VARIABLE, os.pathsep.join([str(ROUTER), str(ROUTER)]))
    assert "cosine" in ROUTERS
    spec = importlib.util.spec_from_file_location("smlp_plugin_imported", ROUTER)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])  # the same parts once more, as for who imports the file himself
    monkeypatch.setenv(plugins.VARIABLE, os.pathsep.join([str(ROUTER), str(other)]))
    with pytest.raises(
        smlp.UserError, match=r"'cosine' of Cosine in .*other.py is already registered by Cosine in .*cosine_router.py"
    ):
        smlp.preset("smlp_tiny")


def test_files_that_use_the_older_name_still_work():
    from smlp import extend, kinds

    assert all(getattr(kinds, name) is getattr(extend, name) for name in extend.__all__)


def test_help_does_not_wait_for_plugins(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("raise SystemExit('loaded')")
    code = f"import os; os.environ['SMLP_PLUGINS'] = {str(slow)!r}\nfrom smlp.cli import main\nmain.main([])"
    done = run_python("-c", code)
    assert done.rc == 0 and "commands:" in done.stdout and "loaded" not in done.stderr


def test_a_plugin_that_ends_the_process_is_one_sentence(tmp_path):
    path = tmp_path / "ends.py"
    path.write_text("raise SystemExit(3)")
    with pytest.raises(smlp.UserError, match=r"ends.py, line 1, cannot be loaded: SystemExit: 3"):
        plugins.import_file(path)


def test_the_environment_names_plugins_by_file_unless_two_have_one_name(monkeypatch, tmp_path):
    one, two, other = tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py", tmp_path / "c.py"
    for path in (one, two, other):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {str(path)!r}\n")
    monkeypatch.setenv(plugins.VARIABLE, f"{one}:{other}")
    record = environment()["plugins"]
    assert list(record) == ["mine.py", "c.py"]
    assert record["c.py"] == hashlib.sha256(other.read_bytes()).hexdigest()
    monkeypatch.setenv(plugins.VARIABLE, f"{one}:{two}:{other}")
    assert list(environment()["plugins"]) == [str(one), str(two), "c.py"]

"""Routers and blocks of a user's own: the commands of docs/extending.md, and the examples themselves."""

import re
import shlex

import pytest
import torch
from checkpoint_states import content
from plugin_files import ARCHS, FILES, make
from rank_running import run_ranks
from running import REPOSITORY

import smlp
from smlp.cli import main
from smlp.cli.flops import account
from smlp.config import plugins, registry
from smlp.config.registry import PACKAGE, ROUTERS
from smlp.evaluation.leak import leak_test
from smlp.nn.state import DecodingState

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("own_tables")]

MARK = "<!-- run by tests/config/test_extending.py -->\n"
BLOCK = re.compile(re.escape(MARK) + r"```(\w+)\n(.*?)```", re.S)
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
# What a reader leaves running for minutes runs here for moments, in models as small as they can be.
SMALL = "--embed-dim 16 --ffn-dim 16 --num-heads 2 --num-dense-layers 1 --num-sparse-layers 1 --num-workers 0"
SHORTER = {
    "--max-update 1000": f"--max-update 2 {SMALL}",
    "smlp leak-test": "smlp leak-test --width 16 --tokens 16 --positions 2",
    "--prompt": "--max-tokens 3 --prompt",
}


def blocks(language):
    return [text for kind, text in BLOCK.findall(PAGE) if kind == language]


def commands():
    """The words of the shown commands, made short; the variable is set by a fixture, to the same files."""
    text = "".join(blocks("bash")).replace("\\\n", "")
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return [shlex.split(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def reader(tiny_data, tmp_path_factory):
    """A folder as a reader has it."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("smlp", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "data-bin").symlink_to(tiny_data)
    return folder


@pytest.fixture(scope="module")
def runs(reader, run_fairseq_many):
    """By name: what fairseq's tools do, as the page shows it, and beside it."""
    train, conv, evaluate = [words[1:] for words in commands() if words[0].startswith("fairseq")]
    plain = [word.replace("cosine_lm_tiny", "smlp_tiny").replace("/cosine", "/plain") for word in train]
    plain = [word for word in plain if word not in ("--cosine-temperature", "0.2")]
    plugins_known, here = {"environment": {plugins.VARIABLE: FILES}}, {"folder": str(reader)}
    cases = {
        "cosine": {"tool": "train", "args": train, **plugins_known},
        "conv": {"tool": "train", "args": conv, **plugins_known},
        "plain": {"tool": "train", "args": plain, **plugins_known},
        "evaluate": {"tool": "eval_lm", "args": evaluate, **plugins_known},
        "cosine without plugins": {"tool": "eval_lm", "args": evaluate},
        "conv without plugins": {"tool": "eval_lm", "args": [w.replace("/cosine", "/conv") for w in evaluate]},
        "plain without plugins": {"tool": "eval_lm", "args": [w.replace("/cosine", "/plain") for w in evaluate]},
    }
    names, cases = list(cases), [{**case, **here} for case in cases.values()]
    done = run_fairseq_many(cases[:3]) + run_fairseq_many(cases[3:])
    return dict(zip(names, done, strict=True))


def test_the_page_shows_what_is_run_here():
    first, *rest = commands()
    assert first == ["export", "SMLP_PLUGINS=examples/extend/cosine_router.py:examples/extend/conv_block.py"]
    kinds = [" ".join(words[:2] if words[0] == "smlp" else words[:1]) for words in rest]
    assert kinds == [
        *("smlp flops", "smlp flops", "smlp leak-test", "smlp leak-test", "fairseq-train", "fairseq-train"),
        *("fairseq-eval-lm", "smlp eval-lm", "smlp generate"),
    ]
    assert PAGE.count(MARK) == 3 and len(blocks("python")) == 1


def test_shown_commands_work(runs, reader, plugged_in, monkeypatch, capsys):
    for name in ("cosine", "conv", "evaluate"):
        assert runs[name].rc == 0, runs[name].stderr[-2000:]
    monkeypatch.chdir(reader)
    for words in commands():
        if words[0] == "smlp":
            assert main.main(words[1:]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert said.count("formula and count agree") == said.count("no unexpected leak") == 2
    assert "expected: routed by batch" in said, "conv_moe_tiny is balanced in training"
    assert "convolution" in said and "The module" in said
    assert "load_balance" in runs["cosine"].stdout + runs["cosine"].stderr, "the auxiliary loss is in the log"
    assert "Perplexity" in runs["evaluate"].stdout + runs["evaluate"].stderr


def test_shown_python_works(reader, plugged_in, monkeypatch, capsys):
    monkeypatch.chdir(reader)
    (code,) = blocks("python")
    exec(compile(code, "docs/extending.md", "exec"), {})
    assert float(re.search(r"tensor\(([\d.e-]+)", capsys.readouterr().out)[1]) < 1e-5


def test_a_checkpoint_brings_its_settings_and_names_what_is_missing(runs, reader, plugged_in, tmp_path, monkeypatch):
    monkeypatch.chdir(reader)
    path = "checkpoints/cosine/checkpoint_best.pt"
    model = smlp.load_pretrained(path)
    assert model.decoder.config.own("cosine").temperature == 0.2
    kept = content(path)["cfg"]["model"]
    own = {name: value for name, value in kept.items() if name.startswith(("cosine_", "conv_"))}
    assert own == {"cosine_temperature": 0.2, "cosine_balance_weight": 0.01, "conv_width": None}, "the default too"
    assert main.main(["checkpoint", "merge", path, "-o", str(tmp_path / "export.pt"), "--export"]) == 0
    export = smlp.load_pretrained(tmp_path / "export.pt")
    assert export.decoder.config == model.decoder.config
    assert export.generate("the s1", 3, greedy=True) == model.generate("the s1", 3, greedy=True)
    monkeypatch.delenv(plugins.VARIABLE)
    for table in registry._TABLES:
        monkeypatch.setattr(table, "_parts", {n: p for n, p in table._parts.items() if p[1] == PACKAGE})
    with pytest.raises(smlp.UserError, match=r"checkpoint_best.pt.*router must be .*'cosine'.*SMLP_PLUGINS"):
        smlp.load_pretrained(path)


def test_fairseq_names_what_is_missing(runs):
    architecture, router = runs["cosine without plugins"], runs["conv without plugins"]
    assert (architecture.rc, router.rc) == (1, 1)
    assert "has an unknown architecture, 'cosine_lm_tiny' (one of your own?" in architecture.stderr
    assert (
        "router must be one of base, switch, gshard, hash, loss_free, got 'cosine' (one of your own?" in router.stderr
    )
    for run in (architecture, router):
        assert "SMLP_PLUGINS" in run.stderr and "Traceback" not in run.stderr


def test_a_model_of_built_in_parts_needs_no_plugin_that_it_was_trained_beside(runs):
    assert runs["plain"].rc == runs["plain without plugins"].rc == 0, runs["plain without plugins"].stderr[-2000:]


# --- the examples themselves


@pytest.mark.parametrize("arch", ARCHS)
def test_examples_keep_every_promise(plugged_in, arch):
    model = make(arch, dropout=0.1)
    assert all(report.passed and not report.leaks for report in leak_test(model))
    assert account(model.config, 2, None, None)["agrees"]
    model, tokens = model.double().eval(), torch.randint(2, 30, (3, 12))
    whole, state = model(tokens).logits, DecodingState()
    parts = torch.cat([model(part, state).logits for part in tokens.split([1, 4, 2, 5], dim=1)], dim=1)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)
    groups = model.project(model.features_of([(tokens[:2, :7], None), (tokens[2:], None)]))
    torch.testing.assert_close(groups, torch.cat([whole[:2, :7].flatten(0, 1), whole[2]]), rtol=1e-9, atol=1e-9)
    padded = tokens.clone()
    padded[0, 8:] = 1
    torch.testing.assert_close(model(padded).logits[0, :8], whole[0, :8], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("arch", ARCHS)
def test_examples_learn_the_same_with_recomputation(plugged_in, arch):
    gradients = []
    for again in (False, True):
        model, tokens = make(arch, checkpoint_activations=again, dropout=0.2).double().train(), torch.arange(2, 26)
        torch.manual_seed(1)
        output = model(tokens.view(2, 12))
        (output.logits.logsumexp(2).sum() + sum(output.aux_losses.values())).backward()
        gradients.append([p.grad for p in model.parameters()])
        assert all(grad is not None and grad.abs().sum() > 0 for grad in gradients[-1])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_examples_learn_the_same_on_two_ranks():
    run_ranks("same_with_plugins", 2, files=FILES)


def test_the_cosine_router_by_hand(plugged_in):
    router = make("cosine_lm_tiny").blocks[1].token_moe.router.train()
    x = torch.randn(9, 16)
    routing = router(x, None)
    cosine = torch.nn.functional.cosine_similarity(x[:, None], router.directions[None], dim=2) / 0.3
    assert torch.equal(routing.plan.expert_A, cosine.argmax(1)[routing.plan.token_A])
    torch.testing.assert_close(routing.weight_A, cosine.softmax(1).amax(1)[routing.plan.token_A])
    assert torch.equal(router(3 * x, None).plan.expert_A, routing.plan.expert_A), "length plays no part"
    assert router(x[:0], None).plan.token_A.numel() == 0


def test_the_convolution_by_hand(plugged_in):
    block = make("conv_lm_tiny").blocks[0].mixing.eval()
    x = torch.randn(1, 9, 16)
    z, want = block.norm(x)[0], x[0].clone()
    for t in range(9):
        want[t] += block.bias + sum(block.weight[:, 4 - back] * z[t - back] for back in range(min(t, 4) + 1))
    torch.testing.assert_close(block(x, smlp.nn.state.ForwardContext())[0], want)
    with pytest.raises(smlp.UserError, match="conv blocks are causal: they need direction=causal"):
        smlp.build("gmlp_mlm_tiny", dense_block="conv")


# --- checks find what they are for


def test_checks_find_what_they_are_for(plugged_in, monkeypatch):
    model, router = make("conv_moe_tiny").eval(), type(ROUTERS["cosine"])
    assert account(model.config, 2, None, None)["agrees"]
    with monkeypatch.context() as patch:
        patch.setattr(router, "num_parameters", lambda self, config: 16 * 4 + 1)
        assert not account(model.config, 2, None, None)["agrees"]
    conv = type(model.blocks[0].mixing)
    monkeypatch.setattr(conv, "_mix", lambda self, z, context: z.flip(1))
    assert {report.mode for report in leak_test(model) if not report.passed} >= {"evaluation", "training"}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda self: "never", "returned 'never', not True or False"),
        (lambda self, x: False, "missing a required argument: 'x'"),
        (None, "None is not a callable object"),
    ],
)
def test_the_answer_whether_a_router_looks_ahead_is_checked(plugged_in, monkeypatch, method, words):
    model = make("cosine_lm_tiny")
    monkeypatch.setattr(type(model.blocks[1].token_moe.router), "looks_ahead", method)
    with pytest.raises(smlp.UserError, match=f"layer 1 .*looks_ahead.. of CosineRouter.*{words}"):
        leak_test(model)

"""torch.compile, torch.export, ONNX and torch.func on whole models, against the models themselves."""

import copy
import functools
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from running import run_python
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import smlp
from smlp.evaluation.leak import randomise
from smlp.fairseq_compat.trainer import SparseTrainer
from smlp.moe.routers.offsets import ExpertOffsets
from smlp.nn.state import DecodingState

pytestmark = pytest.mark.long

SMALL = {"vocab_size": 30, "max_tokens": 12, "embed_dim": 16, "ffn_dim": 32, "num_dense_layers": 1, "dropout": 0.0}
SPARSE = {"num_sparse_layers": 1, "num_experts": 4}
WHOLE = ["gmlp_lm", "dense_lm", "amlp_mlm", "bert_mlm_rel"]
IN_PARTS = ["smlp", "smlp_partial", "base_lm", "gmlp_moe"]
SPARSE_WHOLE = ["smlp", "smlp_partial", "gmlp_moe", "base_lm", "hash_lm", "switch_lm", "gshard_lm"]


def model(arch: str, dtype: torch.dtype = torch.double) -> torch.nn.Module:
    heads = {"num_heads": 2} if arch.startswith(("bert", "dense", "base", "gshard", "switch", "hash")) else {}
    small = {**SMALL, "gmlp_attention_dim": 8} if arch.startswith("amlp") else SMALL
    sparse = SPARSE if smlp.preset(arch).num_sparse_layers else {}
    sparse = {**sparse, "router_z_weight": 0.1} if arch.startswith(("gshard", "switch")) else sparse
    built = smlp.build(arch, **small, **heads, **sparse).to(dtype)
    randomise(built)
    return built


def tokens(num_seqs: int, num_tokens: int, padded: bool = True) -> torch.Tensor:
    ids = torch.randint(4, 30, (num_seqs, num_tokens), generator=torch.Generator().manual_seed(1))
    if padded:
        ids[-1, num_tokens - 3 :] = 1
    return ids


def outputs(call, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = call(ids)
    return (out, {}) if isinstance(out, torch.Tensor) else (out.logits, out.aux_losses)


def gradients(module: torch.nn.Module, call, ids: torch.Tensor) -> list[torch.Tensor]:
    logits, aux_losses = outputs(call, ids)
    real = logits[ids != 1]
    loss = real.square().mean() + sum(aux_losses.values())
    return [real, *torch.autograd.grad(loss, list(module.parameters()))]


def results(module: torch.nn.Module, call, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of real tokens, and in training all gradients."""
    if module.training:
        return gradients(module, call, ids)
    with torch.no_grad():
        return [outputs(call, ids)[0][ids != 1]]


@pytest.mark.parametrize(
    ("arch", "training"), [*((arch, True) for arch in IN_PARTS), *itertools.product(WHOLE, (True, False))]
)
def test_compiled_models(arch, training):
    torch._dynamo.reset()
    module, ids = model(arch).train(training), tokens(3, 10)
    want = results(module, module, ids)
    # A tMoE stays outside: how many tokens an expert gets depends on the data.
    compiled = torch.compile(module, backend="aot_eager", fullgraph=arch in WHOLE)
    for got, expected in zip(results(module, compiled, ids), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("arch", SPARSE_WHOLE)
def test_one_graph_with_sizes_that_depend_on_values(arch, training):
    torch._dynamo.reset()
    module, ids = model(arch).train(training), tokens(3, 10)
    torch.manual_seed(1)  # GShard draws its second experts
    want = results(module, module, ids)
    torch.manual_seed(1)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        found = results(module, compiled, ids)
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_models_with_a_decoding_state(dynamic):
    """The operator of gMLP-MoE's experts sees no state, so a state keeps them outside the graph."""
    torch._dynamo.reset()
    module, ids = model("gmlp_moe").eval(), tokens(2, 9, padded=False)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=dynamic), torch.no_grad():
        compiled, state = torch.compile(module, backend="aot_eager"), DecodingState()
        parts = [compiled(ids[:, first:last], state).logits for first, last in ((0, 6), (6, 7), (7, 9))]
        torch.testing.assert_close(torch.cat(parts, dim=1), module(ids).logits, rtol=1e-10, atol=1e-10)


def test_operator_of_gated_experts_fits_graphs():
    experts = model("gmlp_moe").blocks[1].token_moe.experts
    weights = [value.detach().requires_grad_() for value in experts.parameters()]
    x = torch.randn(9, 16, dtype=torch.double, requires_grad=True)
    counts, places = torch.tensor([4, 0, 2, 3]), torch.tensor([[i // 4 % 2, i % 4] for i in range(9)])
    torch.library.opcheck(torch.ops.smlp.gated_mlps.default, (x, counts, places, 2, weights, "gelu"))


@pytest.mark.parametrize("arch", ["gmlp_lm", "smlp"])
def test_compiled_training(arch, monkeypatch):
    """``--compile``: block by block, as the trainer does it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    module, ids = model(arch).train(), tokens(3, 10)
    want = gradients(module, module, ids)
    trainer = SimpleNamespace(
        core=module, data_parallel_rank=1, cfg=SimpleNamespace(model=SimpleNamespace(compile=True))
    )
    SparseTrainer._prepare_options(trainer)
    assert all(block._compiled_call_impl is not None for block in module.blocks)
    for got, expected in zip(gradients(module, module, ids), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_the_option_compiles_every_block(tiny_data, tmp_path):
    """Through the command, with a backend that runs graphs as they are and notes them."""
    program = """
import sys, torch
from smlp.cli.main import main
graphs, compiled, compile = [], [], torch.compile
torch.compile = lambda f: (compiled.append(f), compile(f, backend=lambda graph, _: (graphs.append(graph), graph)[1]))[1]
status = main(sys.argv[1:])
print(f"{len(compiled)} blocks, {len(graphs)} graphs")
sys.exit(status)
"""
    sizes = ["--embed-dim", "16", "--ffn-dim", "32", "--num-dense-layers", "2", "--num-sparse-layers", "0"]
    run = ["--max-update", "2", "--batch-size", "4", "--tokens-per-sample", "16", "--cpu", "--save-dir", tmp_path]
    done = run_python("-c", program, "train", tiny_data, "--arch", "gmlp_lm_tiny", *sizes, *run, "--compile")
    assert done.rc == 0 and re.search(r"^2 blocks, [1-9]\d* graphs$", done.stdout, re.M), done


@pytest.mark.parametrize(
    "arch", ["gmlp_lm", "bert_mlm_rel", "smlp", "smlp_partial", "hash_lm", "gmlp_moe", "gshard_lm"]
)
def test_exported_models_take_other_sizes(arch):
    module = model(arch, torch.float).eval()
    shortest = module.config.prefix_tokens + 2
    sizes = ({0: torch.export.Dim("B", max=64), 1: torch.export.Dim("n", min=shortest, max=11)},)
    exported = torch.export.export(module, (tokens(3, 10, padded=False),), dynamic_shapes=sizes).module()
    for ids in (tokens(3, 10, padded=False), tokens(2, 7), tokens(5, 11)):
        got, want = outputs(exported, ids)[0], outputs(module, ids)[0]
        torch.testing.assert_close(got[ids != 1], want[ids != 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"router": "hash", "hash_kind": "balanced"}, {"base_warmup": 0.5}])
def test_routers_with_a_table_are_exported_before_their_first_call(settings):
    module = smlp.build("smlp_tiny", vocab_size=50, max_tokens=8, num_dense_layers=0, num_sparse_layers=1, **settings)
    module.eval().balance_routers(torch.arange(50) + 1)
    ids = tokens(2, 8, padded=False)
    for progress in (0.1, 0.9):
        module.follow(progress)
        got = outputs(torch.export.export(copy.deepcopy(module), (ids,), strict=False).module(), ids)[0]
        torch.testing.assert_close(got, outputs(module, ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gmlp_lm", "bert_mlm_rel", "smlp", "gmlp_moe", "hash_lm", "switch_lm"])
def test_onnx(arch):
    runtime = pytest.importorskip("onnxruntime")
    module, ids = model(arch, torch.float).eval(), tokens(3, 10)
    program = torch.onnx.export(module, (ids,), dynamo=True, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    logits = session.run(None, {session.get_inputs()[0].name: ids.numpy()})[0]
    want = outputs(module, ids)[0]
    torch.testing.assert_close(torch.from_numpy(logits)[ids != 1], want[ids != 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["gmlp_lm", "smlp", "smlp_partial", "gmlp_moe"])
def test_gradients_of_each_sequence(arch):
    check_gradients_of_each_sequence(model(arch).eval())


def check_gradients_of_each_sequence(module):
    """Those of vmap over the sequences are those of each sequence alone, auxiliary losses included."""
    ids, weights = tokens(3, 10, padded=False), {name: value.detach() for name, value in module.named_parameters()}

    def loss(weights, ids_n):
        logits, aux_losses = outputs(lambda ids: functional_call(module, weights, (ids,)), ids_n[None])
        return logits.sin().mean() + sum(aux_losses.values())

    together = vmap(grad(loss), in_dims=(None, 0))(weights, ids)
    for row, ids_n in enumerate(ids):
        alone = torch.autograd.grad(loss(dict(module.named_parameters()), ids_n), list(module.parameters()))
        for (name, got), want in zip(together.items(), alone, strict=True):
            torch.testing.assert_close(
                got[row], want, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("settings", [{"router": "loss_free"}, {"base_offset_rate": 0.1}])
def test_offsets_count_no_sequence_of_vmap(settings):
    module = smlp.build("smlp_tiny", **SMALL, **SPARSE, **settings)
    ids, weights = tokens(3, 10, padded=False), {name: value.detach() for name, value in module.named_parameters()}
    vmap(lambda ids_n: functional_call(module, weights, (ids_n[None],)).logits, randomness="different")(ids)
    assert all(part.take().eq(0).all() for part in module.modules() if isinstance(part, ExpertOffsets))
    module(ids)
    assert any(part.take().sum() > 0 for part in module.modules() if isinstance(part, ExpertOffsets))


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("switch_lm", {"capacity_factor": 0.7, "drop_order": "gate"}),
        ("gshard_lm", {"capacity_factor": 0.6, "second_expert": "all", "gate_normalisation": "after_drop"}),
        ("gshard_lm", {"capacity_factor": 0.6}),
        ("gmlp_moe", {"router": "switch", "capacity_factor": 0.7}),
    ],
)
def test_gradients_of_each_sequence_in_training(arch, settings, monkeypatch):
    """Tokens that are dropped for want of capacity, or by chance, stay in vmap's fixed shapes with weight zero."""
    monkeypatch.setattr(torch, "rand_like", lambda value: torch.sin(value * 1e3).abs())  # chance that repeats itself
    heads = {"num_heads": 2} if arch != "gmlp_moe" else {}
    module = smlp.build(arch, **SMALL, **SPARSE, **heads, **settings).to(torch.double)
    check_gradients_of_each_sequence(randomise(module).train())


@pytest.mark.parametrize("arch", ["gmlp_lm", "dense_lm", "smlp", "smlp_partial", "base_lm", "gmlp_moe"])
def test_forward_derivatives(arch):
    module, ids = model(arch).eval(), tokens(2, 10, padded=False)
    weights = {name: value.detach() for name, value in module.named_parameters()}
    draw = torch.Generator().manual_seed(2)
    along = {name: torch.randn(value.shape, generator=draw, dtype=value.dtype) for name, value in weights.items()}

    def loss(weights):
        return outputs(lambda ids: functional_call(module, weights, (ids,)), ids)[0].sin().mean()

    with sdpa_kernel(SDPBackend.MATH):
        _, got = jvp(loss, (weights,), (along,))
        gradients = grad(loss)(weights)
    want = sum((gradients[name] * along[name]).sum() for name in weights)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("arch", ["gmlp_lm", "smlp"])
def test_second_derivatives(arch):
    module, ids = model(arch).eval(), tokens(2, 8, padded=False)
    weight = module.blocks[0].proj_in.weight

    def slope(create_graph: bool) -> torch.Tensor:
        return torch.autograd.grad(outputs(module, ids)[0].sin().mean(), weight, create_graph=create_graph)[0]

    with pytest.raises(smlp.UserError, match=r"gradients of gradients need the reference code: run .*reference_ops"):
        slope(create_graph=True)
    with smlp.ops.reference_ops():
        (second,) = torch.autograd.grad(slope(create_graph=True).square().sum(), weight)
    step, squares = 1e-5 * second / second.norm(), []
    for sign in (1, -2):
        with torch.no_grad():
            weight.add_(sign * step)
        squares.append(slope(create_graph=False).square().sum())
    assert (squares[0] - squares[1]).item() == pytest.approx(2e-5 * second.norm().item(), rel=1e-4)

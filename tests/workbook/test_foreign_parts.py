"""Names of other programs' parts, and how a tree of calls is resolved from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.config import parameters_from_sections
from dlrm_workbook.recordings.foreign import (
    ACCUMULATE,
    COMMUNICATION,
    MLP,
    PartNames,
    forward_key,
    match_backward,
    mlp_by_order,
    node_key,
    resolve,
)


@pytest.mark.parametrize(
    ("kind", "name", "component", "phase"),
    [
        ("annotation", "## forward:over_arch ##", "top_mlp", "forward"),
        ("annotation", "## forward:bottom_mlp ##", "bottom_mlp", "forward"),
        ("annotation", "## wait_sparse_data_dist ##", "communication", ""),
        ("annotation", "## reduce_scatter_base_bw (all_gather) ##", "communication", "backward"),
        ("annotation", "## wait_for_batch ##", "transfer", "forward"),
        ("annotation", "## load_batch ##", "data", "forward"),
        ("annotation", "Optimizer.step#FusedAdam.step", "optimizer", "update"),
        ("annotation", "## backward ##", "", "backward"),
        ("annotation", "dlrm::top_mlp::backward", "top_mlp", "backward"),
        ("operator", "autograd::engine::evaluate_function: AddmmBackward0", MLP, "backward"),
        ("operator", "fbgemm::split_embedding_codegen_lookup_sgd", "embedding", ""),
        ("python", "nn.Module: EmbeddingBagCollection_0", "embedding", ""),
        ("python", "nn.Module: RotaryEmbedding_0", "other", ""),
        ("python", "interact_features", "interaction", "forward"),
        ("python", "torch/distributed/distributed_c10d.py(9): all_reduce", "communication", ""),
        ("operator", "_C::shm_allreduce", "communication", ""),
        ("annotation", "## all2all_data:permute_sparse_features ##", "communication", ""),
        ("python", "generate_dist_input_batch", "data", "forward"),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclArgs)", "communication", ""),
    ],
)
def test_names_say_their_part(kind: str, name: str, component: str, phase: str) -> None:
    named = PartNames().of(kind, name)
    assert named is not None and (named.component, named.phase) == (component, phase)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("annotation", "ProfilerStep#3"),
        ("operator", "aten::add"),
        ("python", "allocator.py(48): is_symmetric_memory_enabled"),
        ("function", "torch::autograd::VariableType::add(x)"),
        ("python", "torch/distributed/distributed_c10d.py(1273): is_initialized"),
        ("python", "<built-in method broadcast_tensors of type object>"),
        ("kernel", "void at::native::vectorized_elementwise_kernel<4, float>"),
        ("python", "torch/nn/modules/linear.py(114): forward"),
    ],
)
def test_other_names_say_nothing(kind: str, name: str) -> None:
    assert PartNames().of(kind, name) is None


def test_the_users_map_comes_first_and_is_checked() -> None:
    names = PartNames({"my_*tower": "bottom_mlp", "pool": "embedding backward"})
    bottom, pooled = names.of("operator", "MY_dense_tower"), names.of("kernel", "k<Pooling>")
    assert bottom is not None and bottom.component == "bottom_mlp"
    assert pooled is not None and (pooled.component, pooled.phase) == ("embedding", "backward")
    with pytest.raises(InputError, match=r"profiling\.parts: x is 'tower'"):
        PartNames({"x": "tower"})


def test_nodes_and_operators_have_one_key() -> None:
    engine = "autograd::engine::evaluate_function: EmbeddingBagBackward0"
    assert node_key(engine) == forward_key("aten::_embedding_bag") == "embeddingbag"
    generated = "torch::autograd::generated::AddmmBackward0::apply(std::vector<at::Tensor>&&)"
    assert node_key(generated) == forward_key("aten::addmm")
    assert node_key("torch::autograd::AccumulateGrad::apply(x)") == ACCUMULATE
    assert node_key("aten::addmm") is None


def test_innermost_name_and_outermost_hint_decide() -> None:
    rows = [
        (-1, "annotation", "## forward ##"),
        (0, "annotation", "## forward:over_arch ##"),
        (1, "operator", "aten::bmm"),  # hints at the interaction, but the annotation knows
        (0, "operator", "aten::embedding_bag"),
        (3, "operator", "aten::mm"),  # inside the embedding's operator
        (-1, "operator", "aten::add"),
    ]
    names = PartNames()
    component, phase, hinted = resolve(
        np.array([row[0] for row in rows]),
        [names.of(kind, name) for _, kind, name in rows],
        np.arange(len(rows)),
    )
    assert component.tolist() == ["other", "top_mlp", "top_mlp", "embedding", "embedding", "other"]
    assert phase.tolist() == [*["forward"] * 5, ""]
    assert hinted.tolist() == [False, False, False, True, True, False]


def test_mlps_stand_on_either_side_of_the_interaction() -> None:
    calls = [MLP, "embedding", "interaction", MLP, "loss"]
    assert mlp_by_order(calls, backward=False)[::3] == ["bottom_mlp", "top_mlp"]
    assert mlp_by_order(calls[::-1], backward=True)[::3] == ["loss", "embedding"]
    assert mlp_by_order(calls[::-1], backward=True)[1] == "top_mlp"
    assert mlp_by_order([MLP, "loss"], backward=False) == ["other", "loss"]


@given(st.lists(st.sampled_from(["addmm", "relu", "cat", "view"]), max_size=40))
def test_reversed_operators_match_one_to_one(forward: list[str]) -> None:
    places = match_backward(forward, forward[::-1])
    assert places.tolist() == list(range(len(forward)))[::-1]
    # operators of which the first have no gradient
    kept = len(forward) // 2
    assert (
        match_backward(forward, forward[kept:][::-1]).tolist()
        == list(range(kept, len(forward)))[::-1]
    )


def test_the_map_in_the_parameters_is_checked_before_anything_runs() -> None:
    given = {"profiling": {"parts": {"tower": "bottom_mlp", "Pool": "embedding backward"}}}
    parts = parameters_from_sections(given).profiling.parts
    assert parts == given["profiling"]["parts"]
    assert parameters_from_sections({}).profiling.parts == {}
    for wrong, message in (
        ({"x": "tower"}, r"profiling\.parts: x is 'tower', expected one of data, transfer"),
        ({"x": 3}, r"profiling\.parts: 'x' is 3, expected some text"),
        (["x"], r"profiling\.parts is \['x'\], expected a mapping of text to text"),
    ):
        with pytest.raises(InputError, match=message):
            parameters_from_sections({"profiling": {"parts": wrong}})


def test_a_product_within_attention_is_no_interaction() -> None:
    names = PartNames()
    named = [names.of("operator", name) for name in ("aten::_sdpa_attention_math", "aten::bmm")]
    component, _, _ = resolve(np.array([-1, 0, -1]), named, np.array([0, 1, 1]))
    assert component.tolist() == ["other", "other", "interaction"]


@pytest.mark.parametrize(
    ("kernel", "exchanges"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long)", True),
        ("void deep_ep::internode_ll::dispatch<true, 8>(void*)", True),
        ("void dpsk::ep::internode::combine<false, 8>(int4*)", True),
        ("void dpsk::grouped_gemm::cuda::utils::transpose<512>(char const*)", False),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(void*)", True),
        ("quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>", True),
        ("void c10d::symmetric_memory::multimem_all_reduce_kernel<float, 16>(float*)", True),
        ("mscclpp::allreduceAllPairs", True),
        ("void nvshmemi_transfer_rma(void*)", True),
        ("void at::native::reduce_kernel<512, 1>(float*)", False),
        ("_small_reduce_kernel", False),
    ],
)
def test_exchanges_are_known_by_their_kernels(kernel: str, exchanges: bool) -> None:
    assert bool(COMMUNICATION.search(kernel)) == exchanges
    named = PartNames().of("kernel", kernel)
    assert (named is not None and named.component == "communication") == exchanges

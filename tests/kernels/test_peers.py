"""gdn and ssd against transformers' own torch code."""

import pytest
import torch
from kernel_cases import cast, error, make_inputs, make_state

from hybridize.kernels import gdn, ssd


@pytest.mark.parametrize("peer", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("tokens", [1, 65, 150])
def test_gated_delta_rule(peer, given, tokens):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = cast(make_inputs("gdn", 2, tokens, (4, 4)), torch.float32)
    (state,) = cast(make_state("gdn", 2), torch.float32)
    expected = getattr(modeling, peer)(
        *inputs.values(), initial_state=state if given else None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for form in (gdn.naive_gated_delta_rule, gdn.chunk_gated_delta_rule, gdn.recurrent_gated_delta_rule):
        o, final = form(**inputs, initial_state=state if given else None)
        assert error(o, expected[0]) < 1e-5 and error(final, expected[1]) < 1e-5


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("tokens", [1, 65, 150])
def test_mamba2(given, tokens):
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(modeling, "mamba2_chunk_scan"):
        pytest.skip("this version of transformers has no separate scan")
    inputs = cast(make_inputs("ssd", 2, tokens), torch.float32)
    (state,) = cast(make_state("ssd", 2), torch.float32)
    expected = modeling.mamba2_chunk_scan(
        *(inputs[n] for n in ("x", "dt", "A", "B", "C")),
        chunk_size=64,
        D=inputs["D"],
        initial_states=state if given else None,
        return_final_states=True,
    )
    for form in (ssd.naive_ssd, ssd.chunk_ssd, ssd.recurrent_ssd):
        o, final = form(**inputs, initial_state=state if given else None)
        assert error(o, expected[0]) < 1e-5 and error(final, expected[1]) < 1e-5

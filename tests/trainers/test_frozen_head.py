"""The LM head without Triton: TRL's numbers, of what is asked alone, in small tiles; frozen, without a second product."""

import pytest
import torch
import trl.trainer.utils as trl_utils
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM
from trl.kernels import ChunkedLogProbFunction, chunked_logprob

from trl_lossplus.trainers import frozen_head, trl_head
from trl_lossplus.trainers.seam_check import TRLVersionError

HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "capped and scaled": {"softcap": 3.0, "logit_scale": 1.7, "temperature": 1.3},
    "bias": {"bias": True},
}
NAME, CPU = "_ChunkedLogProbFunction", torch.device("cpu")


def given(n=37, width=16, vocabulary=50):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=draw)
    weight = torch.randn(vocabulary, width, generator=draw)
    return hidden, weight, torch.randn(vocabulary, generator=draw), torch.randint(0, vocabulary, (n,), generator=draw)


def arguments(bias=False, temperature=1.0, softcap=None, logit_scale=1.0, outputs=("log_probs", "entropy")):
    hidden, weight, shift, targets = given()
    return hidden.requires_grad_(), weight, shift if bias else None, targets, temperature, 32768, softcap, logit_scale, outputs


def ours(arguments, differentiated=False):
    with trl_head.scoring(CPU, entropy_has_gradient=differentiated):
        return getattr(trl_utils, NAME).apply(*arguments)


@pytest.mark.parametrize("at_once", [2**23, 50 * 4])
@pytest.mark.parametrize("name", HEADS)
def test_trl_s_numbers_and_gradient(monkeypatch, name, at_once):
    """All tokens at once, and four at a time; weights of the log-probs that differ by token and sign."""
    monkeypatch.setattr(frozen_head, "LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(frozen_head, "LEAST", 1)
    pull = torch.linspace(-1, 2, 37)
    results = []
    for head in (ours, lambda given: ChunkedLogProbFunction.apply(*given)):
        inputs = arguments(**HEADS[name])
        logps, entropy, *others = head(inputs)
        assert others == [None, None, None]
        (logps * pull).sum().backward()
        results.append((logps.detach(), entropy.detach(), inputs[0].grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-5)
    assert getattr(trl_utils, NAME) is ChunkedLogProbFunction


def test_the_gradient_against_finite_differences():
    """In float64 by the formula: (the target's row minus the mean row) / temperature."""
    hidden, weight, _, targets = given()
    logps = ours((hidden.requires_grad_(), weight, None, targets, 0.5, 32768, None, 1.0, ("log_probs",)))[0]
    logps.sum().backward()
    probs = (hidden.detach() @ weight.t() / 0.5).softmax(1)
    torch.testing.assert_close(hidden.grad, (weight[targets] - probs @ weight) / 0.5, rtol=1e-5, atol=1e-5)


def test_the_logits_are_computed_once(monkeypatch):
    """Two products of each token's hidden state or logits with the head a few tokens at a time, none in the backward pass."""
    monkeypatch.setattr(frozen_head, "LOGITS_AT_ONCE", 50 * 10)
    monkeypatch.setattr(frozen_head, "LEAST", 1)
    with FlopCounterMode(display=False) as forward:
        logps = ours(arguments(outputs=("log_probs",)))[0]
    assert forward.get_total_flops() == 2 * (2 * 37 * 16 * 50)
    with FlopCounterMode(display=False) as backward:
        logps.sum().backward()
    assert backward.get_total_flops() == 0


def test_few_logits_exist_at_once():
    """8 million numbers, but 64 tokens at least, which keep a product efficient."""
    assert [frozen_head.tokens_at_once(size) for size in (2**13, 49152, 2**20)] == [1024, 170, 64]


@pytest.mark.parametrize("kind", ["trained", "entropy", "more"])
def test_trl_s_head_where_more_is_asked(kind):
    """A trained head gets its gradient, an entropy that is differentiated too, and what else TRL's gives it gives still."""
    inputs = list(arguments())
    inputs[1].requires_grad_(kind == "trained")
    if kind == "more":
        inputs[-1] = ("log_probs", "is_top1")
    out = ours(inputs, differentiated=kind == "entropy")
    expected = ChunkedLogProbFunction.apply(*inputs)
    torch.testing.assert_close(out[0], expected[0], rtol=1e-6, atol=2e-5)
    if kind == "trained":
        out[0].sum().backward()
        assert inputs[1].grad.abs().sum() > 0
    if kind == "entropy":
        assert out[1].requires_grad
    if kind == "more":
        assert torch.equal(out[4], expected[4])


def test_half_precision_is_computed_as_trl_does():
    """Products in bfloat16, the rest in float32: as near to float32 as TRL's."""
    exact = arguments()
    reference = ours(exact)[0]
    reference.sum().backward()
    low = [value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value for value in arguments()]
    low[0] = low[0].detach().requires_grad_()
    logps = ours(low)[0]
    assert logps.dtype == torch.float32
    logps.sum().backward()
    assert low[0].grad.dtype == torch.bfloat16
    assert (logps - reference).abs().max() < 0.15
    assert (low[0].grad.float() - exact[0].grad).abs().max() < 0.1


def test_no_gradient_is_kept_where_none_is_asked():
    with torch.no_grad():
        logps, entropy, *_ = ours(arguments())
    assert not logps.requires_grad
    assert not entropy.requires_grad


def fused(model, ids, mask, **options):
    """Log-probs and entropies (2, 5) of the last two tokens of each row as TRL's trainer asks for them."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    with trl_head.scoring(CPU, **options):
        return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)


def test_what_is_asked_alone_is_scored(monkeypatch):
    """Of 2 x 5 tokens three are scored, and the tiles have 256 tokens and 4096 vocabulary entries at most, in both passes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, mask = torch.arange(1, 11).view(2, 5), torch.ones(2, 5, dtype=torch.long)
    mask[1, 4:] = 0
    seen = []
    for name in ("_forward_tile", "_backward_tile"):
        inner = getattr(chunked_logprob, name)

        def tile(values, *args, inner=inner, **kwargs):
            seen.append(tuple(values.shape))
            return inner(values, *args, **kwargs)

        monkeypatch.setattr(chunked_logprob, name, tile)
    monkeypatch.setattr(trl_head, "TILE_TOKENS", 2)
    monkeypatch.setattr(trl_head, "TILE_VOCABULARY", 30)
    out = fused(model, ids, mask)
    out.log_probs.sum().backward()
    tiles = [(2, 30), (2, 20), (1, 30), (1, 20)]
    assert seen == tiles * 2
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    exact = model(input_ids=ids, attention_mask=mask).logits.log_softmax(2)
    for row, place in ((0, 3), (0, 4), (1, 3)):
        assert out.log_probs[row, place - 1].item() == pytest.approx(exact[row, place - 1, ids[row, place]].item(), abs=1e-6)
    assert (out.log_probs != 0).sum() == 3
    (exact[0, 2, ids[0, 3]] + exact[0, 3, ids[0, 4]] + exact[1, 2, ids[1, 3]]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-5, atol=1e-6)
    model.lm_head.weight.requires_grad_(False)
    seen.clear()
    torch.testing.assert_close(fused(model, ids, mask).log_probs, out.log_probs)
    assert seen == []
    assert fused(model, ids, mask, entropy=False).entropy is None


def test_a_moved_head_is_an_error(monkeypatch):
    """A name that TRL no longer has, or arguments that it no longer takes; another body is a warning."""
    assert trl_head.check_head(CPU) == []
    monkeypatch.setattr(trl_utils, "add_fused_lm_head", lambda model, temperature, cast_lm_head_to_fp32, outputs: None)
    assert trl_head.check_head(CPU) == ["add_fused_lm_head"]
    monkeypatch.setattr(trl_utils, "add_fused_lm_head", lambda model: None)
    with pytest.raises(TRLVersionError, match="add_fused_lm_head does not take temperature"):
        trl_head.check_head(CPU)
    monkeypatch.delattr(trl_utils, NAME)
    with pytest.raises(TRLVersionError, match=rf"has no trl.trainer.utils.{NAME}"):
        trl_head.check_head(CPU)


def test_triton_s_head_is_left_alone(monkeypatch):
    monkeypatch.setattr(trl_head, "is_triton_available", lambda: True)
    with trl_head.scoring(torch.device("cuda")):
        assert getattr(trl_utils, NAME) is ChunkedLogProbFunction
    with trl_head.scoring(CPU):
        assert getattr(trl_utils, NAME) is not ChunkedLogProbFunction
    assert trl_head.check_head(torch.device("cuda")) == []

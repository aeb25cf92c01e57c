"""cuflash as an attention implementation of transformers on a GPU: tiny random models beside `eager`."""

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch")
pytest.importorskip("transformers", reason="no transformers")
pytest.importorskip("cuflash.torch", reason="PyTorch is too old")

from test_transformers import DECODERS, MODELS, close, models, padding, tokens  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("frameworks"), pytest.mark.usefixtures("cuda")]


def on_gpu(name, dtype=torch.float32):
    """The same model with `eager` and with cuflash, and what they are given."""
    mask = padding("left").cuda()
    return [model.to("cuda", dtype) for model in models(name)], {"input_ids": tokens().cuda(), "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    pair, given = on_gpu(name)
    results = []
    for model in pair:
        logits = model(**given).logits * given["attention_mask"][..., None]
        logits.square().mean().backward()
        results.append((logits.detach(), {key: x.grad for key, x in model.named_parameters() if x.grad is not None}))
    (expected, wanted), (logits, gradients) = results
    close(logits, expected)
    scale = max(float(x.abs().max()) for x in wanted.values())
    for key, x in wanted.items():
        torch.testing.assert_close(gradients[key], x, rtol=1e-4, atol=1e-5 * scale, msg=key)


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation(name):
    pair, given = on_gpu(name)
    assert torch.equal(*(model.generate(**given, max_new_tokens=9, do_sample=False) for model in pair))


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_bfloat16_is_as_near_as_eager(name):
    """To the same weights in float32."""
    (reference, _), given = on_gpu(name)
    (eager, model), _ = on_gpu(name, torch.bfloat16)
    keep = given["attention_mask"][..., None]
    with torch.no_grad():
        # The weights of the reference, too, are those that bfloat16 has.
        reference.load_state_dict({key: x.bfloat16().float() for key, x in reference.state_dict().items()})
        expected = reference(**given).logits * keep
        of_eager, error = (((m(**given).logits * keep).float() - expected).square().mean().sqrt() for m in (eager, model))
    assert error <= 1.5 * of_eager

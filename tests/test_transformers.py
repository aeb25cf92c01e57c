"""cuflash as an attention implementation of transformers: tiny random models on the CPU, beside `eager`."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch")
transformers = pytest.importorskip("transformers", reason="no transformers")
pytest.importorskip("cuflash.torch", reason="PyTorch is too old")

from cuflash.integrations.transformers import _kind_of, register  # noqa: E402

register()


@pytest.fixture(autouse=True)
def compile_anew():
    """PyTorch compiles one function a few times only, whichever tests it came from."""
    torch._dynamo.reset()


# Large weights: with the usual ones all keys get nearly the same weight.
TINY = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0},
}
DECODER = {**TINY, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
SOFTCAP = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
MODELS = {
    "Llama": ("LlamaForCausalLM", DECODER),
    "Gemma2": ("Gemma2ForCausalLM", {**DECODER, **SOFTCAP, "sliding_window": 6}),
    "Mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 6}),
    "Qwen3": ("Qwen3ForCausalLM", DECODER),
    "Bert": ("BertForMaskedLM", {**TINY, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}),
    "ModernBert": (
        "ModernBertForMaskedLM",
        {
            **TINY,
            "local_attention": 6,
            "num_hidden_layers": 3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
}
DECODERS = [name for name, (kind, _) in MODELS.items() if kind.endswith("CausalLM")]
# In the second row and in the third.
PADDING = {
    "none": (slice(0, 0), slice(0, 0)),
    "left": (slice(0, 5), slice(0, 4)),
    "right": (slice(8, 13), slice(9, 13)),
}


def models(name, **changes):
    """The same model with `eager` and with cuflash."""
    kind, options = MODELS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    result = []
    for implementation in ("eager", "cufa"):
        torch.manual_seed(0)
        kind_of_model = getattr(transformers, kind)
        config = kind_of_model.config_class(**options, **changes)
        config._attn_implementation = implementation
        result.append(kind_of_model(config).eval())
        assert result[-1].config._attn_implementation == implementation
    return result


def tokens(rows=3, length=13):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def padding(where, rows=3, length=13):
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, places in enumerate(PADDING[where], 1):
        mask[row, places] = 0
    return mask


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("where", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, where):
    mask = padding(where)
    results = []
    for model in models(name):
        logits = model(input_ids=tokens(), attention_mask=mask).logits * mask[..., None]
        logits.square().mean().backward()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        results.append((logits.detach(), gradients))
    (expected, wanted), (logits, gradients) = results
    close(logits, expected)
    assert gradients.keys() == wanted.keys()
    scale = max(float(x.abs().max()) for x in wanted.values())
    for key, x in wanted.items():
        torch.testing.assert_close(gradients[key], x, rtol=1e-4, atol=1e-5 * scale, msg=key)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Bert", "ModernBert"])
def test_the_comparison_would_notice(name):
    """A window one token wider, no softcap, padding that is seen: all change the logits by more than the tolerance."""
    model = models(name)[0].requires_grad_(False)
    expected = model(input_ids=tokens(), attention_mask=padding("right")).logits[0:1]
    changed = copy.deepcopy(model.config)
    if name == "Mistral":
        changed.sliding_window += 1
    elif name == "Gemma2":
        changed.attn_logit_softcapping = None
    elif name == "ModernBert":
        changed.local_attention += 2
    other = type(model)(changed).eval()
    other.load_state_dict(model.state_dict())
    got = other(input_ids=tokens(), attention_mask=padding("left")).logits[0:1]
    if name == "Bert":
        expected = model(input_ids=tokens(), attention_mask=padding("left")).logits[1:2]
        got = model(input_ids=tokens()).logits[1:2]
    with pytest.raises(AssertionError):
        close(got, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation(name, cache):
    """Token for token, of rows of one length and of rows padded on the left."""
    pair = models(name)
    how = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}[cache]
    for more in ({}, {"attention_mask": padding("left")}):
        results = [model.generate(tokens(), max_new_tokens=9, do_sample=False, **how, **more) for model in pair]
        assert torch.equal(*results)


def test_a_prompt_in_pieces():
    """More than one query on a cache that is there."""
    results = []
    for model in models("Mistral"):
        first = model(input_ids=tokens()[:, :8])
        results.append(model(input_ids=tokens()[:, 8:], past_key_values=first.past_key_values).logits)
    close(results[1], results[0])


def test_packed_sequences():
    """By position_ids that start anew, and by cu_seq_lens."""
    eager, model = models("Mistral")
    places = torch.tensor([[*range(9), *range(4)], [*range(2), *range(11)]])
    expected = eager(input_ids=tokens(2), position_ids=places, use_cache=False).logits
    close(model(input_ids=tokens(2), position_ids=places, use_cache=False).logits, expected)
    ends = torch.tensor([0, 9, 13], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    got = model(input_ids=tokens(2)[:1], position_ids=places[:1], use_cache=False, **lengths).logits
    close(got, expected[:1])


@pytest.mark.parametrize("name", ["Mistral", "Bert"])
def test_compile(name):
    eager, model = models(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    how = {} if name == "Bert" else {"use_cache": False}
    with torch.no_grad():
        for more in ({}, {"attention_mask": padding("right")}):
            keep = more.get("attention_mask", torch.ones(3, 13))[..., None]
            got, expected = (m(input_ids=tokens(), **how, **more).logits * keep for m in (compiled, eager))
            close(got, expected)


def test_compiled_code_checks_the_mask_it_cannot_see():
    model = torch.compile(models("Mistral")[1], backend="aot_eager", fullgraph=True)
    places = torch.tensor([[*range(9), *range(4)]])
    with torch.no_grad(), pytest.raises(RuntimeError, match="not this one, as that of packed sequences"):
        model(input_ids=tokens(1), position_ids=places, use_cache=False)
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[0, 6] = 0
    with torch.no_grad(), pytest.raises(RuntimeError, match="padding inside of a row is not supported"):
        model(input_ids=tokens(1), attention_mask=mask, use_cache=False)


def test_compiled_decoding_with_a_static_cache():
    results = []
    for compiled, model in zip((False, True), models("Mistral"), strict=True):
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            token = model(input_ids=tokens(), past_key_values=cache).logits[:, -1:].argmax(-1)
            if compiled:
                model = torch.compile(model, backend="aot_eager", fullgraph=True)
            made = [token]
            for _ in range(6):
                token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
                made.append(token)
        results.append(torch.cat(made, 1))
    assert torch.equal(*results)


# ------------------------------------------------------------------------------------------------------------
# What is refused


def test_names():
    with pytest.raises(ValueError, match="name must not contain \"flash\", .*; got 'cuflash'"):
        register("cuflash")
    register("another")
    assert transformers.AttentionInterface()["another"] is transformers.AttentionInterface()["cufa"]


def test_refused_by_name():
    model = models("Llama")[1]
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, 6] = 0
    with pytest.raises(NotImplementedError, match="padding inside of a row is not supported"):
        model(input_ids=tokens(), attention_mask=mask)
    custom = torch.zeros(3, 1, 13, 13)
    with pytest.raises(NotImplementedError, match=r"others are not supported; got shape \(3, 1, 13, 13\) of torch.float32"):
        model(input_ids=tokens(), attention_mask=custom)
    with pytest.raises(NotImplementedError, match="dropout is not supported by cuflash; got 0.25: only 0.0"):
        models("Llama", attention_dropout=0.25)[1].train()(input_ids=tokens())


def test_attention_is_called_with_nothing_that_it_drops():
    attend = transformers.AttentionInterface()["cufa"]
    module = torch.nn.Module()
    x = torch.randn(2, 4, 5, 8)
    for name in ("s_aux", "position_bias", "block_table"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported by cuflash; got a tensor: only None"):
            attend(module, x, x, x, None, **{name: x})
    with pytest.raises(NotImplementedError, match="output_attentions is not supported by cuflash; got True"):
        attend(module, x, x, x, None, output_attentions=True)


def test_masks_that_are_not_known():
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    assert _kind_of(causal) == ("causal", None, None)
    assert _kind_of(masking_utils.sliding_window_causal_mask_function(5)) == ("causal", 5, None)
    assert _kind_of(masking_utils.bidirectional_mask_function) == ("bidirectional", None, None)
    for function in (
        masking_utils.or_masks(causal, lambda b, h, i, j: j < 3),
        masking_utils.and_masks(causal, lambda b, h, i, j: j < 3),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(2)),
    ):
        with pytest.raises(NotImplementedError, match="the mask .* is not supported by cuflash: only causal"):
            _kind_of(function)
    with pytest.raises(NotImplementedError, match="neither causal nor bidirectional"):
        _kind_of(masking_utils.sliding_window_overlay(4))


def test_a_window_that_does_not_reach_the_attention():
    from cuflash.integrations.transformers import attention_mask

    function = __import__("transformers").masking_utils.sliding_window_causal_mask_function(3)
    mask = attention_mask(2, 5, 5, mask_function=function, device="cpu")
    x = torch.randn(2, 4, 5, 8)
    attend = transformers.AttentionInterface()["cufa"]
    out, _ = attend(torch.nn.Module(), x, x, x, mask, sliding_window=3)
    assert out.shape == (2, 5, 4, 8)
    with pytest.raises(NotImplementedError, match="sliding_window must be that of the mask, 3; got None"):
        attend(torch.nn.Module(), x, x, x, mask)

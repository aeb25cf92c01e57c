"""The model of bench.train in plain JAX: float32 weights, products in bfloat16 on a GPU, AdamW by hand."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from .train import Setting, batches, initial_weights

_SHARED = ("embedding", "positions", "last_norm")


def attention_of(backend: str):
    """q, k, v (batch, seqlen, heads, head_dim) -> the same."""
    if backend == "cuflash":
        import cuflash.jax

        return functools.partial(cuflash.jax.attention, causal=True)
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=backend)


def norm(x, weight):
    x = x.astype(jnp.float32)
    return jax.nn.standardize(x, epsilon=1e-5) * weight


def loss_of(weights: dict, tokens, setting: Setting, attend, dtype):
    blocks = {name: value for name, value in weights.items() if name not in _SHARED}

    def product(x, weight):
        return x.astype(dtype) @ weight.astype(dtype)

    def layer(x, block):
        heads = product(norm(x, block["norm1"]), block["qkv"]).reshape(*x.shape[:2], 3, setting.heads, -1)
        out = attend(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]).reshape(x.shape)
        x = x + product(out, block["project"])
        x = x + product(jax.nn.gelu(product(norm(x, block["norm2"]), block["up"]), approximate=True), block["down"])
        return x, None

    x = weights["embedding"][tokens[:, :-1]] + weights["positions"]
    x, _ = jax.lax.scan(layer, x, blocks)  # one layer is compiled, not all
    logits = product(norm(x, weights["last_norm"]), weights["embedding"].T).astype(jnp.float32)
    right = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


def step_of(setting: Setting, attend, dtype):
    """(weights, first and second moments, tokens, number of the step, learning rate) -> (the three of them, loss)."""

    def step(weights, first, second, tokens, number, rate):
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, setting, attend, dtype)
        size = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda x: x * jnp.minimum(1.0, setting.clip / (size + 1e-6)), gradients)
        slow, fast = setting.betas
        first = jax.tree.map(lambda m, g: slow * m + (1 - slow) * g, first, gradients)
        second = jax.tree.map(lambda v, g: fast * v + (1 - fast) * g * g, second, gradients)

        def update(name, weight, m, v):
            decay = 0.0 if "norm" in name else setting.weight_decay
            direction = m / (1 - slow**number) / (jnp.sqrt(v / (1 - fast**number)) + 1e-8)
            return weight * (1 - rate * decay) - rate * direction

        weights = {name: update(name, weights[name], first[name], second[name]) for name in weights}
        return weights, first, second, loss

    return step


@functools.cache
def _compiled(backend: str, setting: Setting, dtype, device):
    """The step for a setting without its seed."""
    weights = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in initial_weights(setting).items()}
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.seqlen + 1), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.default_device(device):
        step = jax.jit(step_of(setting, attention_of(backend), dtype), donate_argnums=(0, 1, 2))
        return step.lower(weights, weights, weights, tokens, number, number).compile()


def losses_of(backend: str, setting: Setting, device_id: int | None) -> tuple[list, list, int]:
    """(loss and seconds of each step, peak bytes by XLA's account of the compiled step)."""
    device = jax.devices("cpu" if device_id is None else "gpu")[device_id or 0]
    dtype = jnp.float32 if device_id is None else jnp.bfloat16
    data = batches(setting).astype(np.int32)
    compiled = _compiled(backend, replace(setting, seed=0), dtype, device)
    with jax.default_device(device):
        weights = {name: jnp.array(x) for name, x in initial_weights(setting).items()}
        state = weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights)
        del weights
        losses, ticks = [], []
        for number, batch in enumerate(data):
            *state, loss = compiled(*state, jnp.asarray(batch), jnp.float32(number + 1), jnp.float32(setting.rate(number)))
            losses.append(loss)
            # A step is queued while the one before it runs: the GPU does not wait for the host.
            if number:
                losses[-2].block_until_ready()
                ticks.append(time.perf_counter())
        losses[-1].block_until_ready()
        ticks.append(time.perf_counter())
    return [float(x) for x in losses], [end - start for start, end in zip(ticks, ticks[1:])], _peak(compiled)


def _peak(compiled) -> int:
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes

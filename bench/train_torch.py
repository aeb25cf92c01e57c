"""The model of bench.train in PyTorch: float32 weights, and bfloat16 by autocast on a GPU."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .train import Setting, batches, initial_weights

_SDPA = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "unfused": SDPBackend.MATH}


def attention_of(backend: str):
    """q, k, v (batch, seqlen, heads, head_dim) -> the same."""
    if backend == "cuflash":
        import cuflash.torch

        return lambda q, k, v: cuflash.torch.attention(q, k, v, causal=True)

    def attend(q, k, v):
        with sdpa_kernel(_SDPA[backend]):
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return out.transpose(1, 2)

    return attend


class Gpt(torch.nn.Module):
    def __init__(self, setting: Setting, attend):
        super().__init__()
        self.setting, self.attend = setting, attend
        weights = {name: torch.from_numpy(value) for name, value in initial_weights(setting).items()}
        shared = "embedding", "positions", "last_norm"
        for name in shared:
            self.register_parameter(name, torch.nn.Parameter(weights.pop(name).clone()))
        # Matrices are transposed, as nn.Linear has them.
        stacks = {name: stack if stack.ndim == 2 else stack.mT.contiguous() for name, stack in weights.items()}
        self.blocks = torch.nn.ModuleList(
            torch.nn.ParameterDict({name: torch.nn.Parameter(stack[i].clone()) for name, stack in stacks.items()})
            for i in range(setting.layers)
        )

    def forward(self, tokens):
        x = F.embedding(tokens, self.embedding) + self.positions
        size = x.shape[-1:]
        for block in self.blocks:
            qkv = F.linear(F.layer_norm(x, size, block["norm1"]), block["qkv"])
            heads = qkv.unflatten(-1, (3, self.setting.heads, -1)).unbind(2)
            x = x + F.linear(self.attend(*heads).flatten(2), block["project"])
            x = x + F.linear(
                F.gelu(F.linear(F.layer_norm(x, size, block["norm2"]), block["up"]), approximate="tanh"), block["down"]
            )
        return F.linear(F.layer_norm(x, size, self.last_norm), self.embedding)


def losses_of(backend: str, setting: Setting, device_id: int | None) -> tuple[list, list, int]:
    """(loss and seconds of each step, peak bytes of PyTorch's allocator)."""
    device = torch.device("cpu" if device_id is None else f"cuda:{device_id}")
    data = torch.from_numpy(batches(setting))
    model = Gpt(setting, attention_of(backend)).to(device)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": setting.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=setting.betas, fused=device.type == "cuda")
    clock = _Clock(device)
    losses = []
    for step, batch in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = setting.rate(step)
        batch = batch.to(device, torch.long)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.tick()
    return torch.stack(losses).tolist(), clock.seconds(), clock.peak()


class _Clock:
    """When steps end: on a GPU by its events, so that it never waits for the host."""

    def __init__(self, device):
        self.device, self.ticks = device, []
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self.tick()

    def tick(self) -> None:
        if self.device.type == "cpu":
            self.ticks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.ticks.append(event)

    def seconds(self) -> list[float]:
        pairs = list(zip(self.ticks, self.ticks[1:]))
        if self.device.type == "cpu":
            return [end - start for start, end in pairs]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]

    def peak(self) -> int:
        return 0 if self.device.type == "cpu" else torch.cuda.max_memory_allocated(self.device)

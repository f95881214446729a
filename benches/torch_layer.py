"""The mixture-of-experts layer of Qwen3-30B-A3B without adapters in torch, beside `wgmoe bench layer`.

usage: python3 benches/torch_layer.py
Router, top-8 of a softmax, rows sorted by expert, torch._grouped_mm for gate and up, silu, torch._grouped_mm for down, sum by
weight: bf16, captured as a CUDA graph so that no launch of the host counts. Median of 21 replays, rotating inputs.
"""
import torch

D, F, E, A = 2048, 768, 128, 8
device = torch.device("cuda")
torch.manual_seed(1)
bf16 = dict(device=device, dtype=torch.bfloat16)
router = torch.randn(E, D, **bf16) * D**-0.5
gate_up = torch.randn(E, D, 2 * F, **bf16) * D**-0.5
down = torch.randn(E, F, D, **bf16) * F**-0.5


def layer(x):
    weights, ids = torch.topk(torch.softmax(x @ router.T, -1, dtype=torch.float32), A)
    weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)
    flat = ids.flatten()
    order = torch.argsort(flat)
    counts = torch.zeros(E, device=device, dtype=torch.int32).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = torch.cumsum(counts, 0).to(torch.int32)
    token = order // A
    h = torch._grouped_mm(x[token], gate_up, offs=ends)
    gate, up = h.chunk(2, -1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, token, y)


def median_us(tokens):
    static = torch.randn(tokens, D, **bf16)
    inputs = [torch.randn(tokens, D, **bf16) for _ in range(4)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(static)
    times = []
    for i in range(121):
        static.copy_(inputs[i % 4])
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 100:
            times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


a = torch.empty(1 << 30, device=device, dtype=torch.uint8)
b = torch.empty_like(a)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for _ in range(3):
    b.copy_(a)
begin.record()
for _ in range(10):
    b.copy_(a)
end.record()
torch.cuda.synchronize()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}: copies {20 * a.numel() / begin.elapsed_time(end) / 1e6:.0f} GB/s")
for tokens in (1, 4, 16, 64, 256, 1024, 4096):
    print(f"T = {tokens:5}: {median_us(tokens):8.1f} us")

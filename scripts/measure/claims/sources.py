"""What tutorials on optimising attention, and the FlashAttention 1, 2 and 3 papers, say: claims in our words,
figures as they are."""

from __future__ import annotations

from scripts.measure.claims import Claim

CLAIMS = [
    Claim(
        1,
        "Standard attention stores the N x N scores, tiled attention a statistic a row.",
        "B = 8, H = 32, N = 8192, fp16: 32 GiB against 8 MiB (4,096x). From N = 1k to 16k the one grows 1x "
        "4x 16x 64x 256x, the other 1x 2x 4x 8x 16x",
    ),
    Claim(
        2,
        "Attention's extra memory falls about 20x at N = 4k.",
        "1.5x at N = 128, 2.3x at 256, 3.1x at 512, 5.6x at 1k, 10.5x at 2k, 20.3x at 4k",
        "paper",
    ),
    Claim(
        3,
        "At N = 2k, tiled attention alone is several times faster than standard.",
        "7.6x (A100)",
    ),
    Claim(
        4,
        "GPT-2 trains several times faster end to end, to the same perplexity.",
        "3x at N = 1k. GPT-2 small: Hugging Face 9.5 days, Megatron 4.7 (2.0x), FlashAttention 2.7 (3.5x, "
        "1.7x over Megatron); medium: 21.0, 11.5 (1.8x), 6.9 (3.0x). Perplexity 18.2; 14.2 to 14.3",
    ),
    Claim(
        5,
        "A longer context costs little time and gives a better perplexity.",
        "GPT-2 small at 1k / 2k / 4k: 18.2 / 17.6 / 17.5 in 2.7 / 3.0 / 3.6 days: 1.7x, 1.6x, 1.3x as fast "
        "as Megatron at 1k",
    ),
    Claim(
        6,
        "A short encoder without a causal mask (N = 512) gains 1.15x over an attention that was fused "
        "already.",
        'BERT-large 1.15x; another source says "substantially" and names no baseline',
    ),
    Claim(
        7,
        "Long Range Arena, N = 1k to 4k: faster, with accuracies alike.",
        "2.4x (block-sparse 2.8x). Accuracy: Transformer 36.0 63.6 81.6 42.3 72.7, average 59.3; "
        "FlashAttention 37.6 63.9 81.4 43.5 72.7, 59.8; block-sparse 37.0 63.0 81.3 43.6 73.3, 59.6",
    ),
    Claim(
        8,
        "FlashAttention-2 doubles 1: queries split over the warps instead of keys, and a grid over the "
        "sequence.",
        "forward at N = 2k (A100) 124 -> 230 TFLOP/s; utilisation 25-40% -> 50-73%; end to end 225 TFLOP/s "
        "(72% MFU); about 9x over PyTorch's standard attention on long sequences",
    ),
    Claim(
        9,
        "FlashAttention-3 doubles 2 on Hopper.",
        "fp16 about 370 -> 740 TFLOP/s (75% of the peak, against 35%); fp8 about 1,200; the Hadamard "
        "transform makes fp8's error 2.6x smaller",
    ),
    Claim(
        10,
        "Each stage of a ladder of CUDA kernels is several times faster than the one before.",
        "A100, batch 1, 32 heads, D = 128, ms at N = 1024 / 4096 / 8192: naive in 3 kernels 0.8 / 12.4 / "
        "49.2; fused by rows 0.6 / 8.8 / 34.1; tiled, fp32 0.4 / 4.2 / 15.8; FA2, fp16 0.12 / 0.9 / 3.2; "
        'cuDNN, fp16 0.10 / 0.8 / 2.9; "3 to 7x"',
    ),
    Claim(
        11,
        "What a head's matrix of scores takes in naive attention, and all of it together (D = 128).",
        "N = 1024: 4 MB, ~5 MB; 4096: 64 MB, ~66 MB; 8192: 256 MB, ~260 MB; 16384: 1 GB, out of memory",
    ),
    Claim(
        12,
        "Tiles written in plain PyTorch beat standard attention in time and memory; or, by another source, "
        "will not be faster.",
        '3.1x faster ("2-4x") and 48% ("50%") less memory: B = 1, N = 2048, H = 8, D = 64, fp16, causal',
    ),
    Claim(
        13,
        "Traffic to HBM is O(N D + N^2) in standard attention and O(N^2 D^2 / M) in tiles.",
        "10-20x less memory access",
    ),
    Claim(
        14,
        "Arithmetic intensity decides: matrix products are bound by compute, softmax by memory.",
        "QKV projection 910 FLOP/byte, 306 us, 61.2% of the peak in compute, 12% in memory; QK^T 102, 143 "
        "us, 21.8%, 50%; scale and softmax 2.5, 433 us, 1.3%, 32%; PV 160 us, 19.4%, 6%; balance 138.9 "
        "(V100). Matrix products: over 99.8% of the FLOPs, 61% of the time. Balance: A100 156, H100 295 "
        "FLOP/byte",
    ),
    Claim(
        15,
        "Under a causal mask the tiles of the future are skipped, and those outside a window.",
        "10 of 16 tiles on a 4 x 4 grid; towards 2x, not guaranteed",
    ),
    Claim(
        16,
        "At short N, standard attention may win.",
        "under N of about 256",
    ),
    Claim(
        17,
        "A KV cache makes generation O(N) instead of O(N^2).",
        "100 tokens: 5,050 -> 100 computations of K and V; generation 5-10x faster",
    ),
    Claim(
        18,
        "What a KV cache takes, and how far GQA and MQA shrink it.",
        "2 x kv_heads x head_dim x bytes a token and layer; 8 to 32x smaller; Llama-2-70B at 4,096 tokens: "
        "10.5 GB",
    ),
    Claim(
        19,
        "Prefill is bound by compute, decoding by memory; FlashAttention helps the first.",
        "prefill of 8,192 tokens: 67,108,864 scores, a step of decoding 8,192. A prefill of 512 tokens of "
        "a 13B model (40 layers, 5,120 wide) saturates an A100",
    ),
    Claim(
        20,
        "Asking for a backend is no evidence that it ran.",
        "only the names of the kernels in a profile are",
    ),
    Claim(
        21,
        "Online softmax is exact.",
        "scores [2, 5, 3] in two blocks: the sum 1.19 both ways; scores [1, 2, 0.5], values [10, 20, 40]: "
        "20.492649 both ways",
    ),
    Claim(
        22,
        "Backward computes tiles again from (O, lse): more FLOPs, less traffic, faster.",
        '"more than paid for"',
    ),
    Claim(
        23,
        "The gains of a KV cache and of FlashAttention multiply in generation.",
        "cache on and off x naive and tiled",
    ),
    Claim(
        24,
        "Scores in memory cost milliseconds a layer in traffic alone.",
        "N = 8192, 32 heads: over 2 ms a layer, over 70 ms in 32 layers (A100, 2 TB/s)",
    ),
    Claim(
        25,
        "Naive attention is unstable in fp16 and FlashAttention is stable.",
        "large inputs, against fp64",
    ),
    Claim(
        26,
        "A FLOP that is not of a matrix product costs many times more.",
        "16x (A100), about 250x (H100)",
    ),
    Claim(
        27,
        "Away from the cores memories get larger and slower, by these ratios.",
        "A100: registers 256 KB an SM, 1 cycle; shared memory 192 KB an SM, ~19 TB/s, ~30 cycles; L2 40 "
        "MB, ~5 TB/s, ~200; HBM 80 GB, 2 TB/s, ~400",
    ),
    Claim(
        28,
        "Matrix products use most of the GPU and attention little of it, until FlashAttention.",
        "70-80% of the peak; 30%; with FlashAttention 75%",
    ),
    Claim(
        29,
        "The size of a tile trades trips to shared memory against occupancy.",
        "Br = 128, Bc = 64 typical of an A100, about 96 KB",
    ),
]

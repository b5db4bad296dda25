"""Model FLOPs utilisation: what a training step computes, against the GPU's peak.

Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
"""

import re

from model.gpt import GPT

# Dense tensor-core peaks in TFLOP/s for 16-bit inputs with float32 accumulation, from the vendor's
# data sheets. A name has to match whole: a laptop or power-limited relative has another peak.
PEAK_TFLOPS = {
    r"(NVIDIA )?B200": 2250,
    r"(NVIDIA )?H200": 989,
    r"(NVIDIA )?GH200.*": 989,
    r"(NVIDIA )?H100 80GB HBM3": 989,
    r"(NVIDIA )?H100 PCIe": 756,
    r"(NVIDIA )?A100[- ](SXM4|PCIE|PCIe)[- ]\d+GB": 312,
    r"NVIDIA L40S": 362,
    r"NVIDIA L40": 181,
    r"NVIDIA L4": 121,
    r"NVIDIA A40": 150,
    r"NVIDIA A10": 125,
    r"NVIDIA RTX A6000": 155,
    r"NVIDIA GeForce RTX 4090": 165,
    r"NVIDIA GeForce RTX 3090": 71,
    r"Tesla V100-SXM2-\d+GB": 125,
    r"Tesla V100-PCIE-\d+GB": 112,
    r"(Tesla|NVIDIA) T4": 65,
}
WITHOUT_BFLOAT16 = r".*(V100|T4).*"


def peak_flops(gpu: str | None, precision: str) -> float | None:
    """Peak FLOP/s of one GPU at a Lightning precision; None where it is not known.

    Args:
        gpu: name as `torch.cuda.get_device_name` gives it, None without a GPU.
        precision: "bf16-mixed", "16-mixed", "bf16-true" or "16-true"; others have no entry.
    """
    if gpu is None or not precision.startswith(("bf16", "16")):
        return None
    if precision.startswith("bf16") and re.fullmatch(WITHOUT_BFLOAT16, gpu):
        return None
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, gpu):
            return tflops * 1e12
    return None


def flops_per_token(gpt: GPT) -> int:
    """FLOPs of forward and backward for one token: 6 N + 12 L C T.

    N counts the weights that a token is multiplied with: all matrices, among them the tied
    embedding, once, as the output head. 12 L C T is attention over T = context positions in L
    layers of width C, with no discount for the causal mask.
    """
    n = sum(p.numel() for p in gpt.parameters() if p.dim() == 2)
    return 6 * n + 12 * gpt.config.n_layer * gpt.config.n_embd * gpt.config.context


def mfu(tokens_per_s: float, flops_per_token: int, peak_flops: float, n_gpus: int = 1) -> float:
    """Fraction of the peak used by training `tokens_per_s` tokens a second on all GPUs together."""
    return tokens_per_s * flops_per_token / (n_gpus * peak_flops)

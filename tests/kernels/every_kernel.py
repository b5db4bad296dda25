"""A small run of every kernel in its main forms, for a memory or race checker to watch:

compute-sanitizer --tool memcheck python -m tests.kernels.every_kernel
"""

import torch

from kernels import add_rms_norm, load_norm, rms_norm


def main() -> None:
    device = torch.device("cuda")
    for n in (64, 769, 2048, 40000):  # the last one takes the column-blocked path
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(300, 2, n, device=device, dtype=dtype)[:, 1].requires_grad_()
            residual = torch.randn(300, n, device=device, requires_grad=True)
            weight = torch.ones(n, device=device, requires_grad=True)
            outputs = (rms_norm(x, weight), *add_rms_norm(x, residual, weight))
            torch.autograd.backward(outputs, [output.detach() for output in outputs])
            for leaf, eager in ((x, rms_norm), (x, load_norm("eager").rms_norm)):
                assert torch.isfinite(eager(leaf, weight)).all()
            assert torch.isfinite(x.grad).all()
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()

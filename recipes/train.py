"""Train the byte-level GPT with Accelerate on as many ranks as there are; nothing here knows of a budget.

accelerate launch --config configs/ddp-8gpu-70GB.yaml recipes/train.py
accelerate launch --config configs/cpu-2proc.yaml recipes/train.py --layers 2 --steps 10

The budget is the yaml's section `dtr:`. Plan and measured peaks of each rank are in its `run_dir`.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from accelerate import Accelerator
from gpt import ByteGPT, next_byte_loss
from stdlib_data import stdlib_loader


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64, of which each head has 64")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="sequences of one rank and step")
    chosen = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = ByteGPT(
        layers=chosen.layers, width=chosen.width, heads=chosen.width // 64, sequence=chosen.sequence
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = stdlib_loader(batch=chosen.batch, sequence=chosen.sequence)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (tokens, targets) in enumerate(itertools.islice(batches, chosen.steps), 1):
        optimizer.zero_grad()
        loss = next_byte_loss(model(tokens), targets)
        accelerator.backward(loss)
        optimizer.step()
        if step == 1 or step % 10 == 0:
            accelerator.print(f"step {step}: {loss.item():.4f} nats per byte")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""GPT-3 by the names of its sizes, built from ``models.transformer_lm``.

Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1, with the batches given there in tokens. Two of
its rows do not multiply out: XL has 16 heads here, not 24, and 13B a width of 5,120, not 5,140. All attention is
dense. Input and output embedding are one. A sequence has 2,048 tokens, and the 50,257 words are rounded up to 51,200,
which has more divisors.

    make(size="6.7B", layers=2, batch=64)     two layers of the named width

``PAPER`` is the largest, in bfloat16 and with each block recomputed: 174,615,846,912 parameters by the formula of
``models.transformer_lm``.
"""

from typing import NamedTuple

from . import transformer_lm
from .training import TrainStep


class Size(NamedTuple):
    """A row of the table; ``batch`` in sequences."""

    layers: int
    width: int
    heads: int
    batch: int


SIZES = {
    "tiny": Size(2, 64, 4, 8),
    "125M": Size(12, 768, 12, 256),
    "350M": Size(24, 1024, 16, 256),
    "760M": Size(24, 1536, 16, 256),
    "1.3B": Size(24, 2048, 16, 512),
    "2.7B": Size(32, 2560, 32, 512),
    "6.7B": Size(32, 4096, 32, 1024),
    "13B": Size(40, 5120, 40, 1024),
    "175B": Size(96, 12288, 96, 1536),
}
PAPER = dict(size="175B", seq=2048, vocab=51_200, remat=True, dtype="bfloat16")


def make(
    *,
    size: str = "tiny",
    layers: int = 0,
    batch: int = 0,
    seq: int = 64,
    vocab: int = 256,
    scan: bool = False,
    remat: bool = False,
    tie: bool = True,
    dtype: str = "float32",
    learning_rate: float = 1e-3,
    optimizer: str = "adamw",
    seed: int = 0,
) -> tuple[TrainStep, dict, dict]:
    """The step, its first state, and a batch ``{"tokens": int32[batch, seq + 1]}``; 0 layers or batch: those of the size."""
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}")
    row = SIZES[size]
    return transformer_lm.make(
        batch=batch or row.batch,
        seq=seq,
        width=row.width,
        layers=layers or row.layers,
        heads=row.heads,
        vocab=vocab,
        scan=scan,
        remat=remat,
        tie=tie,
        dtype=dtype,
        learning_rate=learning_rate,
        optimizer=optimizer,
        seed=seed,
    )

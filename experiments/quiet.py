"""Keeps the libraries' chatter off the terminal, so that what the run says can be read."""

from __future__ import annotations

import logging
import os
import warnings


def quieten() -> None:
    """Progress bars of single files, start-up banners and known-harmless warnings; errors still show."""
    for name, value in (
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TORCH_CPP_LOG_LEVEL", "ERROR"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("TQDM_DISABLE", "1"),
    ):
        os.environ.setdefault(name, value)
    import lightning  # noqa: F401  (sets its own log levels when imported, so it must come first)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "aim", "vllm", "httpx", "filelock"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message, category in (
        (r".*torch.distributed.reduce_op.*", FutureWarning),
        (r".*LeafSpec.*", Warning),
        # Dropout would make the trained policy another one than the engine's, so evaluation mode is meant.
        (r".*module\(s\) in eval mode.*", Warning),
        (r".*does not have many workers.*", Warning),
        (r".*Checkpoint directory .* exists.*", Warning),
    ):
        warnings.filterwarnings("ignore", message, category)
